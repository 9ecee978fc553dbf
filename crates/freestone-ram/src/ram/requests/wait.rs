//! Waits of requests that change content (write, write zeroes, discard), and their resumption or
//! failure.

use crate::codec::Page;
use crate::ram::device::Ram;
use crate::ram::device::stats::counter;
use crate::ram::geometry::piece;
use crate::ram::waiting::job::Job;
use crate::ram::waiting::removals::SpaceRetry;
use freestone_core::PAGE_BYTES;
use freestone_core::client_log;
use freestone_core::device::Error;

impl Ram {
    /// Starts the work queue, which resumes waiting requests, and then queues `job` with `wait`.
    /// Returns the request if it need not wait, `None` if it waits or has failed.
    fn wait_for_work_queue(&self, job: Job, wait: impl FnOnce(Job) -> Option<Job>) -> Option<Job> {
        match self.0.pages.keeper.start() {
            Ok(()) => wait(job),
            Err(error) => {
                client_log!(error, %error, "cannot start the thread for requests that wait");
                self.fail_write(job, Error::NoMemory);
                None
            }
        }
    }

    /// Queues a request until the snapshot in progress is taken. Returns the request if writers are
    /// not frozen any more.
    pub(super) fn wait_for_thaw(&self, job: Job) -> Option<Job> {
        self.wait_for_work_queue(job, |job| self.0.chain.get().hold((self.clone(), job)).map(|(_, job)| job))
    }

    /// Queues a request that found no memory until a removal ends. Returns the request if no
    /// removal is pending any more.
    pub(super) fn wait_for_removal(&self, job: Job) -> Option<Job> {
        self.wait_for_work_queue(job, |job| self.0.pages.removals.wait(self.to_waiting(job)))
    }

    /// Queues a request until space is freed. Returns the request if it must check for space again.
    pub(super) fn wait_for_space(&self, mut job: Job) -> Option<Job> {
        let full = &self.0.pages.full;
        job.waits.get_or_insert_with(|| self.0.limits.space.begin_wait(full.policy().timeout));
        self.wait_for_work_queue(job, |job| {
            let again = full.waiters.wait(self.to_waiting(job), |request| &mut request.job.space_generation);
            // A concurrent `disable_waiting` may have taken the queue before this request was in
            // it.
            if again.is_none() && self.0.limits.space.are_waits_disabled() {
                self.0.pages.end_space_waits(&self.0.limits.space);
            }
            again.map(|request| request.job)
        })
    }

    /// Queues a request that found no space until space is freed, or fails the request, as the full
    /// policy demands.
    fn apply_full_policy_to(&self, job: Job) -> Option<Job> {
        match self.0.check_may_wait() {
            Ok(()) => self.wait_for_space(job),
            Err(error) => {
                self.fail_write(job, error);
                None
            }
        }
    }

    pub(in crate::ram) fn wait_for_eviction(&self, mut job: Job) {
        let pages = &self.0.pages;
        if !job.last_try {
            self.0.counters.add(counter::WRITESTALL, 1);
            return pages.keeper.wait_for_eviction(self.to_waiting(job));
        }
        // Memory of a removed device does not help a device that is at its own memory limit.
        let has_space = self.0.layer().has_space(PAGE_BYTES);
        let retry = if has_space { self.0.space_retry(&mut job.ended) } else { SpaceRetry::No };
        let job = Job { last_try: false, ..job };
        let job = match retry {
            SpaceRetry::AfterRemoval => self.wait_for_removal(job),
            SpaceRetry::Now => Some(job),
            // Memory will be free soon: the remaining pages of retired layers are in flight from
            // the backing device.
            SpaceRetry::No if has_space && pages.is_freeing() => {
                return pages.keeper.wait_for_tick(self.to_waiting(job));
            }
            SpaceRetry::No => self.apply_full_policy_to(job),
        };
        if let Some(job) = job {
            pages.keeper.resume(self.to_waiting(job));
        }
    }

    /// Applies a request's change to part of a page that the device does not store itself. `parent`
    /// is the parent's content of the page. Retries the request if the device has stored the page
    /// meanwhile, or writers are frozen.
    pub(super) fn put_over_parent(&self, mut job: Job, parent: &mut Page) {
        let slot = job.slot();
        let (_, from, len) = piece(job.request.offset, job.request.len);
        job.part(len).put(from, parent);
        let error = match self.0.put_over_parent(slot, parent) {
            Some(Ok(Ok(()))) => return self.finish_page(job, len),
            Some(Ok(Err(error))) => error,
            Some(Err(_)) => return self.wait_for_eviction(job),
            None => return self.0.pages.keeper.resume(self.to_waiting(job)),
        };
        let retry = if error == Error::NoSpace { self.0.space_retry(&mut job.ended) } else { SpaceRetry::No };
        let job = match retry {
            SpaceRetry::No if error == Error::NoSpace => self.apply_full_policy_to(job),
            SpaceRetry::No => return self.fail_write(job, error),
            SpaceRetry::Now => Some(job),
            SpaceRetry::AfterRemoval => self.wait_for_removal(job),
        };
        if let Some(job) = job {
            self.0.pages.keeper.resume(self.to_waiting(job));
        }
    }

    pub(super) fn fail_write(&self, job: Job, error: Error) {
        self.0.counters.add(counter::FAILED_WRITES, 1);
        job.done.complete(Err(error), job.buffer);
    }

    /// Completes or continues a request after its change to `len` bytes of its current page.
    pub(super) fn finish_page(&self, mut job: Job, len: usize) {
        if job.request.len == len as u64 {
            return job.done.complete(Ok(()), job.buffer);
        }
        job.advance(len as u64);
        self.0.pages.keeper.resume(self.to_waiting(job));
    }
}
