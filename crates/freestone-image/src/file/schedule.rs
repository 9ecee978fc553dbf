//! Which jobs can start, oldest first.

use std::collections::VecDeque;

use freestone_core::overlap::Overlap;

use super::job::Job;

/// Jobs that are not finished, by id.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// With the jobs that nobody else carries out.
    overlap: Overlap<Job>,
    /// Jobs that nothing is in the way of, oldest first.
    ready: VecDeque<usize>,
}

impl Schedule {
    /// Takes a job; it may be ready at once.
    pub fn arrive(&mut self, job: Job) {
        let (start, len) = (job.request.offset, job.request.len);
        let (id, ready) = self.overlap.enter(start..start + len, job.changes());
        self.overlap.keep(id, job);
        if ready {
            self.ready.push_back(id);
        }
    }

    /// The oldest job that can start.
    pub fn next_ready(&mut self) -> Option<usize> {
        self.ready.pop_front()
    }

    /// Makes a job that was started the next one to start.
    pub fn put_back(&mut self, id: usize) {
        self.ready.push_front(id);
    }

    /// A job that is not taken.
    pub fn job(&mut self, id: usize) -> Option<&mut Job> {
        self.overlap.kept(id)
    }

    /// Takes a job out; its range stays occupied until [`Schedule::finish`].
    pub fn take(&mut self, id: usize) -> Option<Job> {
        self.overlap.take(id)
    }

    /// Frees the range of a job; what waited for it may be ready now. The job comes back unless it
    /// was taken.
    pub fn finish(&mut self, id: usize) -> Option<Job> {
        self.overlap.finish(id, |id, _| self.ready.push_back(id))
    }

    /// Gives up: all jobs that are not taken.
    pub fn drain(&mut self) -> impl Iterator<Item = Job> {
        self.ready.clear();
        self.overlap.drain()
    }

    pub fn is_empty(&self) -> bool {
        self.overlap.is_empty()
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
    fn jobs_are_ready_when_nothing_is_in_their_way() {
        let mut schedule = Schedule::default();
        for (op, offset, len) in
            [(Op::Write, 0, 512), (Op::Read, 0, 512), (Op::Discard, 512, 512), (Op::Flush, 0, 0)]
        {
            schedule.arrive(job(op, offset, len));
        }
        assert_eq!(ready(&mut schedule), [0, 2, 3]);
        assert!(schedule.take(0).is_some() && schedule.job(0).is_none());
        assert!(schedule.finish(0).is_none());
        assert_eq!(ready(&mut schedule), [1]);
        assert!(schedule.job(1).is_some_and(|job| job.request.op == Op::Read));
        for id in [1, 2, 3] {
            assert!(!schedule.is_empty() && schedule.finish(id).is_some());
        }
        assert!(schedule.is_empty());
    }
}
