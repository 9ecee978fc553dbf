//! Worker thread of a power layer, for requests that wait for cache space, for a claimed range, or
//! for a flush. The worker never waits for a single request, so a slow request delays only requests
//! that depend on it.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::completion;
use super::drain::PowerShared;
use super::io::PowerAdmission;
use super::queue::{Job, WriteOut};
use freestone_core::device::{Completion, Error, IoBuf, Op, Request};
use freestone_core::sync::Ordering::SeqCst;

/// Maximum number of bytes of unflushed blocks that the worker keeps in flight to the device under
/// this layer.
const WINDOW_BYTES: u64 = 8 << 20;

impl PowerShared {
    /// Queues a job for the worker. The power must be on, and the caller must be pinned.
    pub fn enqueue(&self, job: Job) {
        self.queue.pending.fetch_add(1, SeqCst);
        if matches!(job, Job::Write { .. }) {
            self.queue.waiting.fetch_add(1, SeqCst);
        }
        self.events.listen();
        self.queue.state.lock().jobs.push(job);
        self.events.notify_always();
    }

    fn finish_job(&self) {
        self.queue.pending.fetch_sub(1, SeqCst);
        self.events.stop_listening();
        // A thread that switches the power off may wait for the end of all jobs.
        self.events.notify();
    }

    /// Makes the worker exit after its last job.
    pub fn stop_worker(&self) {
        self.queue.state.lock().stop = true;
        self.events.notify_always();
    }

    pub fn work(self: &Arc<Self>) {
        let mut jobs = Vec::new();
        loop {
            let seen = self.events.count();
            let stop = {
                let mut state = self.queue.state.lock();
                jobs.append(&mut state.jobs);
                state.stop
            };
            if stop && jobs.is_empty() {
                return;
            }
            let admitted = self.admit(|| {});
            let mut room = true;
            for job in mem::take(&mut jobs) {
                match job {
                    job if matches!(admitted, PowerAdmission::Off) => self.fail_gone(job),
                    job @ Job::Write { .. } if !room => jobs.push(job),
                    job => {
                        let left = self.step_catching_panics(job);
                        room &= !matches!(left, Some(Job::Write { .. }));
                        jobs.extend(left);
                    }
                }
            }
            drop(admitted);
            // After the last job there may be no listener, so that no event would end the wait.
            if !(stop && jobs.is_empty()) {
                self.events.wait(seen);
            }
        }
    }

    fn fail_gone(&self, job: Job) {
        match job {
            Job::Write { buffer, done, .. } => {
                done.complete(Err(Error::Gone), buffer);
                self.queue.waiting.fetch_sub(1, SeqCst);
            }
            Job::PastCache { buffer, done, .. } => done.complete(Err(Error::Gone), buffer),
            Job::WriteOut(write_out) => {
                self.close_flush(write_out.slot, false);
                write_out.done.complete(Err(Error::Gone), IoBuf::empty());
            }
        }
        self.finish_job();
    }

    /// Runs a step of a job. If the job's completion panics, the job is finished and other jobs
    /// continue. The panic hook has already reported the panic.
    fn step_catching_panics(self: &Arc<Self>, job: Job) -> Option<Job> {
        let step = AssertUnwindSafe(|| completion::inside(|| self.step(job)));
        catch_unwind(step).unwrap_or_else(|_| {
            self.finish_job();
            None
        })
    }

    /// Runs a job as far as possible without waiting. Returns the job if it is not finished.
    fn step(self: &Arc<Self>, job: Job) -> Option<Job> {
        let left = match job {
            Job::Write { request, buffer, at, failures, done } => {
                self.step_write(request, buffer, at, failures, done)
            }
            Job::PastCache { request, buffer, done } => self
                .submit_past_cache(request, buffer, done)
                .map(|(buffer, done)| Job::PastCache { request, buffer, done }),
            Job::WriteOut(write_out) => self.step_write_out(write_out).map(Job::WriteOut),
        };
        if left.is_none() {
            self.finish_job();
        }
        left
    }

    fn step_write(
        self: &Arc<Self>,
        request: Request,
        buffer: IoBuf,
        mut at: u64,
        failures: u64,
        done: Completion,
    ) -> Option<Job> {
        let outcome = loop {
            let data = (request.op == Op::Write).then(|| &buffer[at as usize..]);
            match self.cache.insert(&request.rest(at), data) {
                Ok(0) => {}
                Ok(part) => {
                    at += part;
                    if at == request.len {
                        break Ok(());
                    }
                    continue;
                }
                Err(error) => break Err(error),
            }
            if let Some(error) = self.failed_since(failures) {
                break Err(error);
            }
            match self.reclaim_space(request.len - at) {
                Ok(()) => return Some(Job::Write { request, buffer, at, failures, done }),
                Err(error) => break Err(error),
            }
        };
        self.queue.waiting.fetch_sub(1, SeqCst);
        done.complete(outcome, buffer);
        None
    }

    /// Starts writes of cached blocks, until enough are in flight or done to free `len` bytes of
    /// cache space, or no unclaimed block is left.
    fn reclaim_space(self: &Arc<Self>, len: u64) -> Result<(), Error> {
        // Blocks whose write failed are requeued after the bound, so each block is tried once, even
        // if the device completes requests inline.
        let bound = self.cache.now();
        let want = len.min(self.cache.capacity()).min(WINDOW_BYTES);
        while self.cache.free_bytes() + self.draining.load(SeqCst) < want {
            match self.cache.claim_run(bound, None)? {
                Some(run) => self.drain(run),
                None => break,
            }
        }
        Ok(())
    }

    fn step_write_out(self: &Arc<Self>, write_out: WriteOut) -> Option<WriteOut> {
        let within = write_out.within.as_ref();
        let mut error = None;
        while error.is_none() && self.draining.load(SeqCst) < WINDOW_BYTES {
            match self.cache.claim_run(write_out.bound, within) {
                Ok(Some(run)) => self.drain(run),
                Ok(None) => break,
                Err(failed) => error = Some(failed),
            }
        }
        // Must be checked before the failures, because a failed write is counted before its blocks
        // are requeued.
        let unflushed = self.is_unflushed(write_out.bound, within);
        let error = error.or_else(|| self.failed_since(write_out.failures));
        match error {
            Some(error) => {
                self.close_flush(write_out.slot, false);
                write_out.done.complete(Err(error), IoBuf::empty());
                None
            }
            None if unflushed => Some(write_out),
            None if write_out.flush => {
                self.flush_below(write_out.slot, write_out.done);
                None
            }
            None => {
                write_out.done.complete(Ok(()), IoBuf::empty());
                None
            }
        }
    }

    pub fn flush_below(self: &Arc<Self>, slot: Option<u64>, done: Completion) {
        self.below(Request::flush(), IoBuf::empty(), move |shared, outcome, buffer| {
            shared.close_flush(slot, outcome.is_ok());
            done.complete(outcome, buffer);
        });
    }
}
