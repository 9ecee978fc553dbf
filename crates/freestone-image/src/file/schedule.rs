//! Scheduling of jobs: overlapping jobs run in submission order, and ready jobs run oldest first.

use std::collections::VecDeque;

use freestone_core::overlap::OverlapTracker;

use super::job::Job;

/// Unfinished jobs of a file, by id.
#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// Ranges of all unfinished jobs, and the jobs that are not [taken](Self::take).
    overlap: OverlapTracker<Job>,
    /// Ids of jobs that no overlapping job blocks and that are not started, oldest first.
    ready: VecDeque<usize>,
}

impl Schedule {
    /// Adds a job, which is ready at once if it does not overlap an unfinished job.
    pub fn add(&mut self, job: Job) {
        let (start, len) = (job.request.offset, job.request.len);
        let (id, ready) = self.overlap.enter(start..start + len, job.changes());
        self.overlap.store(id, job);
        if ready {
            self.ready.push_back(id);
        }
    }

    /// Removes the oldest ready job from the ready queue and returns its id; `None` if no job is
    /// ready.
    pub fn next_ready(&mut self) -> Option<usize> {
        self.ready.pop_front()
    }

    /// Adds a started job to the front of the ready queue again.
    pub fn put_back(&mut self, id: usize) {
        self.ready.push_front(id);
    }

    /// Returns the job with this id; `None` if it is [taken](Self::take).
    pub fn job(&mut self, id: usize) -> Option<&mut Job> {
        self.overlap.value_mut(id)
    }

    /// Removes a job from the schedule. The range of the job stays occupied until
    /// [`Schedule::finish`].
    pub fn take(&mut self, id: usize) -> Option<Job> {
        self.overlap.take(id)
    }

    /// Releases the range of a job, so that jobs that waited for this range may become ready.
    /// Returns the job unless it was taken.
    pub fn finish(&mut self, id: usize) -> Option<Job> {
        self.overlap.finish(id, |id, _| self.ready.push_back(id))
    }

    /// Removes and returns all jobs that are not taken, and clears the schedule.
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
