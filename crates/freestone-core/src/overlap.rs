//! Requests that overlap run one after the other, all others side by side.
//!
//! For devices whose disk or server carries requests out in any order and piece by piece: a block
//! that two of them write at once would be a mixture. And what is done again, after a loss or in
//! part, is done before anything that overlaps it was answered.

use std::ops::Range;

/// Requests that are not finished, by ticket. Each may leave a `T` here.
#[derive(Debug)]
pub struct Overlap<T> {
    entries: Vec<Option<Entry<T>>>,
    free: Vec<usize>,
    /// Requests that change content.
    changing: usize,
    /// Requests that wait for others.
    waiting: usize,
}

#[derive(Debug)]
struct Entry<T> {
    range: Range<u64>,
    changes: bool,
    /// Older unfinished requests that overlap. They were all there before this one, and whatever
    /// overlaps and is there when one of them ends came later than that one; so this count is exact
    /// and no order needs to be kept.
    blockers: usize,
    kept: Option<T>,
}

impl<T> Entry<T> {
    fn conflicts(&self, other: &Self) -> bool {
        (self.changes || other.changes)
            && self.range.start < other.range.end
            && other.range.start < self.range.end
    }
}

impl<T> Default for Overlap<T> {
    fn default() -> Self {
        Self { entries: Vec::new(), free: Vec::new(), changing: 0, waiting: 0 }
    }
}

impl<T> Overlap<T> {
    /// A request comes. Answers its ticket, and whether it can begin at once: nothing is in its way.
    pub fn enter(&mut self, range: Range<u64>, changes: bool) -> (usize, bool) {
        let mut entry = Entry { range, changes, blockers: 0, kept: None };
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

    /// Keeps what belongs to a request that is not finished.
    pub fn keep(&mut self, ticket: usize, it: T) {
        if let Some(entry) = self.entries.get_mut(ticket).and_then(Option::as_mut) {
            entry.kept = Some(it);
        }
    }

    /// What is kept of a request.
    pub fn kept(&mut self, ticket: usize) -> Option<&mut T> {
        self.entries.get_mut(ticket)?.as_mut()?.kept.as_mut()
    }

    /// Takes out what is kept of a request. Its range stays occupied until it is
    /// [finished](Self::finish).
    pub fn take(&mut self, ticket: usize) -> Option<T> {
        self.entries.get_mut(ticket)?.as_mut()?.kept.take()
    }

    /// A request is done; `ready` hears of those that waited for it and can begin, with what is kept
    /// of them. Answers what is kept of this one.
    pub fn finish(&mut self, ticket: usize, mut ready: impl FnMut(usize, &mut Option<T>)) -> Option<T> {
        let gone = self.entries.get_mut(ticket)?.take()?;
        self.free.push(ticket);
        self.changing -= usize::from(gone.changes);
        if self.waiting > 0 {
            for (ticket, entry) in self.entries.iter_mut().enumerate() {
                if let Some(entry) = entry
                    && entry.blockers > 0
                    && entry.conflicts(&gone)
                {
                    entry.blockers -= 1;
                    if entry.blockers == 0 {
                        self.waiting -= 1;
                        ready(ticket, &mut entry.kept);
                    }
                }
            }
        }
        if self.is_empty() {
            // A burst does not make later looks long.
            self.entries.clear();
            self.free.clear();
        }
        gone.kept
    }

    /// Whether all are finished.
    pub fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }

    /// Gives up: forgets all, and answers what is kept of them.
    pub fn drain(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        (self.changing, self.waiting) = (0, 0);
        self.entries.drain(..).filter_map(|entry| entry?.kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const READ: bool = false;
    const WRITE: bool = true;

    /// Tickets of those that a finished one lets begin.
    fn after(overlap: &mut Overlap<()>, ticket: usize) -> Vec<usize> {
        let mut ready = Vec::new();
        overlap.finish(ticket, |ticket, _| ready.push(ticket));
        ready
    }

    #[test]
    fn what_overlaps_runs_in_the_order_of_its_arrival() {
        let mut overlap = Overlap::default();
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
        // Both reads; the second write waits for the read it overlaps.
        assert_eq!(after(&mut overlap, 0), [1, 2]);
        assert_eq!(after(&mut overlap, 2), []);
        assert_eq!(after(&mut overlap, 1), [3]);
        assert_eq!(after(&mut overlap, 4), [6]);
        for ticket in [3, 5, 6] {
            assert!(!overlap.is_empty());
            assert_eq!(after(&mut overlap, ticket), []);
        }
        assert!(overlap.is_empty());
        assert_eq!(overlap.enter(0..512, WRITE), (0, true));
    }

    #[test]
    fn reads_do_not_wait_for_reads() {
        let mut overlap = Overlap::<()>::default();
        assert!((0..100).all(|_| overlap.enter(0..4096, READ).1));
        assert!(!overlap.enter(0..512, WRITE).1);
        assert!(!overlap.enter(0..512, READ).1);
    }

    #[test]
    fn what_is_taken_keeps_its_range() {
        let mut overlap = Overlap::default();
        let (write, _) = overlap.enter(0..512, WRITE);
        overlap.keep(write, "write");
        assert_eq!(overlap.take(write), Some("write"));
        let (read, ready) = overlap.enter(0..512, READ);
        assert!(!ready);
        overlap.keep(read, "read");
        let mut began = None;
        assert_eq!(overlap.finish(write, |_, kept| began = kept.take()), None);
        assert_eq!(began, Some("read"));
        assert_eq!(overlap.kept(read), None);
    }

    #[test]
    fn all_that_is_kept_is_given_back_at_the_end() {
        let mut overlap = Overlap::default();
        for name in ["a", "b"] {
            let (ticket, _) = overlap.enter(0..512, WRITE);
            overlap.keep(ticket, name);
        }
        assert_eq!(overlap.drain().collect::<Vec<_>>(), ["a", "b"]);
        assert!(overlap.is_empty() && overlap.enter(0..512, WRITE).1);
    }
}
