//! Ordering of overlapping requests. Requests that overlap run in order of arrival, all others concurrently.
//!
//! Needed by devices whose disk or server executes requests in any order and piece by piece. Two concurrent
//! writes to a block would leave a mixture of both. A request that is repeated, after a connection loss or
//! for its rest, completes before any later overlapping request starts.

use std::ops::Range;

/// Unfinished requests by ticket. The owner can store a `T` with each request.
#[derive(Debug)]
pub struct OverlapTracker<T> {
    entries: Vec<Option<Entry<T>>>,
    free: Vec<usize>,
    /// Number of unfinished requests that modify content.
    changing: usize,
    /// Number of requests that wait for conflicting requests.
    waiting: usize,
}

#[derive(Debug)]
struct Entry<T> {
    range: Range<u64>,
    changes: bool,
    /// Number of older unfinished requests that conflict. When a request finishes, every conflicting entry is
    /// younger and has counted the request, because an older entry would have kept it from starting. So the
    /// count is exact without a stored order.
    blockers: usize,
    value: Option<T>,
}

impl<T> Entry<T> {
    fn conflicts(&self, other: &Self) -> bool {
        (self.changes || other.changes)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

impl<T> Default for OverlapTracker<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), changing: 0, waiting: 0 }
    }
}

impl<T> OverlapTracker<T> {
    /// Adds a request. Returns the ticket of the request, and true if it may start because no conflicting
    /// request is unfinished.
    pub fn enter(&mut self, range: Range<u64>, changes: bool) -> (usize, bool) {
        let mut entry = Entry { range, changes, blockers: 0, value: None };
        if changes || self.changing > 0 {
            entry.blockers = self.entries.iter().flatten().filter(|other| other.conflicts(&entry)).count();
        }
        let ready = entry.blockers == 0;
        self.changing += usize::from(changes);
        self.waiting += usize::from(!ready);
        let ticket = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[ticket] = Some(entry);
        (ticket, ready)
    }

    /// Stores a value with the unfinished request of this ticket.
    pub fn store(&mut self, ticket: usize, value: T) {
        if let Some(entry) = self.entries.get_mut(ticket).and_then(Option::as_mut) {
            entry.value = Some(value);
        }
    }

    /// Returns the value stored with a request, or `None` if there is none.
    pub fn value_mut(&mut self, ticket: usize) -> Option<&mut T> {
        self.entries.get_mut(ticket)?.as_mut()?.value.as_mut()
    }

    /// Removes and returns the value stored with a request. The range stays occupied until
    /// [`finish`](Self::finish).
    pub fn take(&mut self, ticket: usize) -> Option<T> {
        self.entries.get_mut(ticket)?.as_mut()?.value.take()
    }

    /// Removes a finished request and returns its value. Calls `ready` with the ticket and value of each
    /// request that waited for the finished one and may start now.
    pub fn finish(&mut self, ticket: usize, mut ready: impl FnMut(usize, &mut Option<T>)) -> Option<T> {
        let finished = self.entries.get_mut(ticket)?.take()?;
        self.free.push(ticket);
        self.changing -= usize::from(finished.changes);
        if self.waiting > 0 {
            for (ticket, entry) in self.entries.iter_mut().enumerate() {
                if let Some(entry) = entry
                    && entry.blockers > 0
                    && entry.conflicts(&finished)
                {
                    entry.blockers -= 1;
                    if entry.blockers == 0 {
                        self.waiting -= 1;
                        ready(ticket, &mut entry.value);
                    }
                }
            }
        }
        if self.is_empty() {
            // Empties the table, so that later scans are short after a burst of requests.
            self.entries.clear();
            self.free.clear();
        }
        finished.value
    }

    /// Returns true if all requests are finished.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    /// Removes all requests and returns their values.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        (self.changing, self.waiting) = (0, 0);
        self.entries.drain(..).filter_map(|entry| entry?.value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: bool = false;
    const WRITE: bool = true;

    /// Returns the tickets of requests that may start after `ticket` is finished.
    fn finish_and_list_ready(overlap: &mut OverlapTracker<()>, ticket: usize) -> Vec<usize> {
        let mut ready = Vec::new();
        overlap.finish(ticket, |ticket, _| ready.push(ticket));
        ready
    }

    #[test]
    fn overlapping_requests_run_in_arrival_order() {
        let mut overlap = OverlapTracker::default();
        let mut began = Vec::new();
        for (range, changes) in [
            (0..4096, WRITE),
            (512..1024, READ),
            (1024..1536, READ),
            (512..1024, WRITE),
            (4096..4608, WRITE),
            (0..0, READ),
            (4096..4608, READ),
        ] {
            let (ticket, ready) = overlap.enter(range, changes);
            began.extend(ready.then_some(ticket));
        }
        assert_eq!(began, [0, 4, 5]);
        // Both reads are ready; the second write still waits for the read that it overlaps.
        assert_eq!(finish_and_list_ready(&mut overlap, 0), [1, 2]);
        assert_eq!(finish_and_list_ready(&mut overlap, 2), []);
        assert_eq!(finish_and_list_ready(&mut overlap, 1), [3]);
        assert_eq!(finish_and_list_ready(&mut overlap, 4), [6]);
        for ticket in [3, 5, 6] {
            assert!(!overlap.is_empty());
            assert_eq!(finish_and_list_ready(&mut overlap, ticket), []);
        }
        assert!(overlap.is_empty());
        assert_eq!(overlap.enter(0..512, WRITE), (0, true));
    }

    #[test]
    fn reads_do_not_wait_for_reads() {
        let mut overlap = OverlapTracker::<()>::default();
        assert!((0..100).all(|_| overlap.enter(0..4096, READ).1));
        assert!(!overlap.enter(0..512, WRITE).1);
        assert!(!overlap.enter(0..512, READ).1);
    }

    #[test]
    fn taken_request_keeps_its_range() {
        let mut overlap = OverlapTracker::default();
        let (write, _) = overlap.enter(0..512, WRITE);
        overlap.store(write, "write");
        assert_eq!(overlap.take(write), Some("write"));
        let (read, ready) = overlap.enter(0..512, READ);
        assert!(!ready);
        overlap.store(read, "read");
        let mut began = None;
        assert_eq!(overlap.finish(write, |_, kept| began = kept.take()), None);
        assert_eq!(began, Some("read"));
        assert_eq!(overlap.value_mut(read), None);
    }

    #[test]
    fn drain_returns_all_values() {
        let mut overlap = OverlapTracker::default();
        for name in ["a", "b"] {
            let (ticket, _) = overlap.enter(0..512, WRITE);
            overlap.store(ticket, name);
        }
        assert_eq!(overlap.drain().collect::<Vec<_>>(), ["a", "b"]);
        assert!(overlap.is_empty() && overlap.enter(0..512, WRITE).1);
    }
}
