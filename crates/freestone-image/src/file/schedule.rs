//! Scheduling of jobs: overlapping jobs run in submission order, ready jobs oldest first.

use std::collections::VecDeque;

use freestone_core::overlap::Overlap;

use super::job::Job;

/// Unfinished jobs, by id.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// Ranges of all unfinished jobs, and the jobs that are not taken.
    overlap: Overlap<Job>,
    /// Jobs that no overlapping job blocks, oldest first.
    ready: VecDeque<usize>,
}

impl Schedule {
    /// Adds a job, which may be ready at once.
    pub fn add(&mut self, job: Job) {
        let (start, len) = (job.request.offset, job.request.len);
        let (id, ready) = self.overlap.enter(start..start + len, job.changes());
        self.overlap.keep(id, job);
        if ready {
            self.ready.push_back(id);
        }
    }

    /// Returns the id of the oldest ready job.
    pub fn next_ready(&mut self) -> Option<usize> {
        self.ready.pop_front()
    }

    /// Puts a started job back to the front of the ready queue.
    pub fn put_back(&mut self, id: usize) {
        self.ready.push_front(id);
    }

    /// Returns a job that is not taken.
    pub fn job(&mut self, id: usize) -> Option<&mut Job> {
        self.overlap.kept(id)
    }

    /// Removes a job from the schedule; its range stays occupied until [`Schedule::finish`].
    pub fn take(&mut self, id: usize) -> Option<Job> {
        self.overlap.take(id)
    }

    /// Releases the range of a job, which may make jobs that waited for it ready. Returns the job
    /// unless it was taken.
    pub fn finish(&mut self, id: usize) -> Option<Job> {
        self.overlap.finish(id, |id, _| self.ready.push_back(id))
    }

    /// Removes and returns all jobs that are not taken.
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
    fn job_is_ready_without_earlier_overlap() {
        let mut schedule = Schedule::default();
        for (op, offset, len) in
            [(Op::Write, 0, 512), (Op::Read, 0, 512), (Op::Discard, 512, 512), (Op::Flush, 0, 0)]
        {
            schedule.add(job(op, offset, len));
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
