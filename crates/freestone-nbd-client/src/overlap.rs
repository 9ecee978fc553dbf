//! Requests that overlap run one after the other, all others side by side.
//!
//! Several connections, and servers with threads, carry requests out in any order and piece by
//! piece; a block that two of them write at once would be a mixture. And what is sent again after a
//! loss comes when it can: nothing that overlaps it was answered meanwhile.

use std::collections::VecDeque;

use crate::job::Job;

/// Jobs that are not finished, by ticket.
#[derive(Default)]
pub struct Overlap {
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    /// Jobs that change content.
    changing: usize,
    /// Jobs that wait here.
    waiting: usize,
}

struct Entry {
    start: u64,
    end: u64,
    changes: bool,
    /// Jobs that came before and overlap. Whatever overlaps and comes later waits for this one, so
    /// the count is exact.
    blockers: usize,
    /// Where it waits.
    job: Option<Box<Job>>,
}

impl Entry {
    fn conflicts(&self, other: &Self) -> bool {
        (self.changes || other.changes) && self.start < other.end && other.start < self.end
    }
}

impl Overlap {
    /// A job comes; it is given back where nothing is in its way.
    pub fn arrive(&mut self, mut job: Box<Job>) -> Option<Box<Job>> {
        let (start, len) = (job.request.offset, job.request.len);
        if len == 0 {
            return Some(job);
        }
        let changes = job.changes();
        let mut entry = Entry { start, end: start + len, changes, blockers: 0, job: None };
        if changes || self.changing > 0 {
            entry.blockers = self.entries.iter().flatten().filter(|other| other.conflicts(&entry)).count();
        }
        self.changing += usize::from(changes);
        let ticket = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        job.ticket = Some(ticket);
        let ready = if entry.blockers == 0 {
            Some(job)
        } else {
            self.waiting += 1;
            entry.job = Some(job);
            None
        };
        self.entries[ticket] = Some(entry);
        ready
    }

    /// A job is about to be answered; `ready` hears of those that waited for it.
    pub fn finish(&mut self, job: &Job, mut ready: impl FnMut(Box<Job>)) {
        let Some(ticket) = job.ticket else { return };
        let Some(gone) = self.entries.get_mut(ticket).and_then(Option::take) else { return };
        self.free.push(ticket);
        self.changing -= usize::from(gone.changes);
        if self.waiting > 0 {
            for entry in self.entries.iter_mut().flatten() {
                if entry.blockers > 0 && entry.conflicts(&gone) {
                    entry.blockers -= 1;
                    if entry.blockers == 0
                        && let Some(job) = entry.job.take()
                    {
                        self.waiting -= 1;
                        ready(job);
                    }
                }
            }
        }
        if self.free.len() == self.entries.len() {
            // A burst does not make later looks long.
            self.entries.clear();
            self.free.clear();
        }
    }

    /// Gives up: all that wait here.
    pub fn clear(&mut self) -> VecDeque<Box<Job>> {
        self.free.clear();
        (self.changing, self.waiting) = (0, 0);
        self.entries.drain(..).filter_map(|entry| entry?.job).collect()
    }
}

#[cfg(test)]
mod tests {
    use freestone_core::device::{Completion, IoBuf, Op, Request};

    use super::*;

    fn job(op: Op, offset: u64, len: u64) -> Box<Job> {
        Box::new(Job::new(Request::new(op, offset, len), IoBuf::empty(), Completion::new(|_, _| {})))
    }

    #[test]
    fn what_overlaps_a_write_waits_for_it() {
        let mut overlap = Overlap::default();
        let write = overlap.arrive(job(Op::Write, 0, 4096)).unwrap();
        assert!(overlap.arrive(job(Op::Read, 512, 512)).is_none());
        assert!(overlap.arrive(job(Op::Read, 1024, 512)).is_none());
        assert!(overlap.arrive(job(Op::Write, 512, 512)).is_none());
        assert!(overlap.arrive(job(Op::Write, 4096, 512)).is_some());
        assert!(overlap.arrive(job(Op::Flush, 0, 0)).is_some());
        let mut ready = Vec::new();
        overlap.finish(&write, |job| ready.push(job));
        let ranges: Vec<_> = ready.iter().map(|job| (job.request.op, job.request.offset)).collect();
        assert_eq!(ranges, [(Op::Read, 512), (Op::Read, 1024)]);
        let first = ready.remove(0);
        overlap.finish(&ready[0], |_| panic!("the second write waits for the other read"));
        let mut last = Vec::new();
        overlap.finish(&first, |job| last.push(job));
        assert_eq!(last[0].request.op, Op::Write);
    }

    #[test]
    fn reads_do_not_wait_for_reads_and_what_waits_is_given_back_at_the_end() {
        let mut overlap = Overlap::default();
        for _ in 0..10 {
            assert!(overlap.arrive(job(Op::Read, 0, 4096)).is_some());
        }
        assert!(overlap.arrive(job(Op::Discard, 0, 512)).is_none());
        assert_eq!(overlap.clear().len(), 1);
        assert!(overlap.arrive(job(Op::Write, 0, 512)).is_some());
    }
}
