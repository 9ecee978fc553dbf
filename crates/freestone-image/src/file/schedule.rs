//! The order of jobs: those that overlap run one after the other, all others side by side.

use std::collections::VecDeque;

use super::job::Job;

/// Jobs that are not finished, by id.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    /// Jobs that nothing is in the way of, oldest first.
    ready: VecDeque<usize>,
    /// Unfinished jobs that change content, and unfinished jobs that wait for others.
    changing: usize,
    waiting: usize,
}

#[derive(Debug)]
struct Entry {
    /// None while somebody else carries it out.
    job: Option<Job>,
    start: u64,
    end: u64,
    changes: bool,
    /// Older unfinished jobs that overlap. They were all there before this one, and whatever
    /// overlaps and is there when one of them ends came later than that one; so this count is exact
    /// and no order needs to be kept.
    blockers: usize,
}

impl Entry {
    fn conflicts(&self, other: &Self) -> bool {
        (self.changes || other.changes) && self.start < other.end && other.start < self.end
    }
}

impl Schedule {
    /// Takes a job; it may be ready at once.
    pub fn arrive(&mut self, job: Job) {
        let (start, len) = (job.request.offset, job.request.len);
        let changes = job.changes();
        let mut entry = Entry { job: Some(job), start, end: start + len, changes, blockers: 0 };
        if changes || self.changing > 0 {
            entry.blockers = self.entries.iter().flatten().filter(|other| other.conflicts(&entry)).count();
        }
        let ready = entry.blockers == 0;
        self.changing += usize::from(changes);
        let id = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            self.entries.len() - 1
        });
        self.entries[id] = Some(entry);
        if ready {
            self.ready.push_back(id);
        } else {
            self.waiting += 1;
        }
    }

    /// The oldest job that can start.
    pub fn next_ready(&mut self) -> Option<usize> {
        self.ready.pop_front()
    }

    /// A job that is not taken.
    pub fn job(&mut self, id: usize) -> Option<&mut Job> {
        self.entries.get_mut(id)?.as_mut()?.job.as_mut()
    }

    /// Takes a job out; its range stays occupied until [`Schedule::finish`].
    pub fn take(&mut self, id: usize) -> Option<Job> {
        self.entries.get_mut(id)?.as_mut()?.job.take()
    }

    /// Frees the range of a job; what waited for it may be ready now. The job comes back unless it
    /// was taken.
    pub fn finish(&mut self, id: usize) -> Option<Job> {
        let gone = self.entries.get_mut(id)?.take()?;
        self.free.push(id);
        self.changing -= usize::from(gone.changes);
        if self.waiting > 0 {
            for (id, entry) in self.entries.iter_mut().enumerate() {
                if let Some(entry) = entry
                    && entry.blockers > 0
                    && entry.conflicts(&gone)
                {
                    entry.blockers -= 1;
                    if entry.blockers == 0 {
                        self.waiting -= 1;
                        self.ready.push_back(id);
                    }
                }
            }
        }
        if self.is_empty() {
            // A burst does not make later scans long.
            self.entries.clear();
            self.free.clear();
        }
        gone.job
    }

    /// Gives up: all jobs that are not taken.
    pub fn into_jobs(self) -> impl Iterator<Item = Job> {
        self.entries.into_iter().filter_map(|entry| entry?.job)
    }

    pub fn is_empty(&self) -> bool {
        self.free.len() == self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use freestone_core::device::{Completion, IoBuf, Op, Request};

    fn job(op: Op, offset: u64, len: u64) -> Job {
        Job::new(Request::new(op, offset, len), IoBuf::empty(), Completion::new(|_, _| {}))
    }

    fn ready(schedule: &mut Schedule) -> Vec<usize> {
        std::iter::from_fn(|| schedule.next_ready()).collect()
    }

    #[test]
    fn overlapping_jobs_run_in_the_order_of_their_arrival() {
        let mut schedule = Schedule::default();
        for (op, offset, len) in [
            (Op::Write, 0, 4096),
            (Op::Read, 512, 512),
            (Op::Read, 1024, 512),
            (Op::Write, 512, 512),
            (Op::Write, 4096, 512),
            (Op::Flush, 0, 0),
            (Op::Read, 4096, 512),
        ] {
            schedule.arrive(job(op, offset, len));
        }
        assert_eq!(ready(&mut schedule), [0, 4, 5]);
        schedule.finish(0);
        // Both reads; the second write waits for the read it overlaps.
        assert_eq!(ready(&mut schedule), [1, 2]);
        schedule.finish(2);
        assert_eq!(ready(&mut schedule), []);
        schedule.finish(1);
        assert_eq!(ready(&mut schedule), [3]);
        schedule.finish(4);
        assert_eq!(ready(&mut schedule), [6]);
        for id in [3, 5, 6] {
            assert!(!schedule.is_empty());
            schedule.finish(id);
        }
        assert!(schedule.is_empty());
    }

    #[test]
    fn reads_never_wait_for_reads() {
        let mut schedule = Schedule::default();
        for _ in 0..100 {
            schedule.arrive(job(Op::Read, 0, 4096));
        }
        assert_eq!(ready(&mut schedule).len(), 100);
    }

    #[test]
    fn a_taken_job_keeps_its_range() {
        let mut schedule = Schedule::default();
        schedule.arrive(job(Op::Write, 0, 512));
        assert!(schedule.take(0).is_some());
        schedule.arrive(job(Op::Read, 0, 512));
        assert_eq!(ready(&mut schedule), [0]);
        assert!(schedule.finish(0).is_none());
        assert_eq!(ready(&mut schedule), [1]);
    }
}
