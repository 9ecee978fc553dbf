//! Worker thread of a device, for requests that wait for room, for a range, or for a flush. The
//! worker waits only for events, so a slow request below delays only its dependents.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::completion;
use super::drain::PowerShared;
use super::io::PowerAdmission;
use super::queue::{Job, WriteOut};
use freestone_core::device::{Completion, Error, IoBuf, Op, Request};
use freestone_core::sync::Ordering::SeqCst;

/// Maximum unflushed bytes in flight below.
const WINDOW_BYTES: u64 = 8 << 20;

impl PowerShared {
    /// Passes a job to the worker. Requires that the power is on; called under a pin.
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
        // A power switch listens.
        self.events.notify();
    }

    /// Tells the worker to exit after its last job.
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
            // The last job's event may have had no listener.
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

    /// Runs a step. A job whose completion panics is finished: the panic hook has reported it, and
    /// other requests continue.
    fn step_catching_panics(self: &Arc<Self>, job: Job) -> Option<Job> {
        let step = AssertUnwindSafe(|| completion::inside(|| self.step(job)));
        catch_unwind(step).unwrap_or_else(|_| {
            self.finish_job();
            None
        })
    }

    /// Runs a job as far as possible. Returns the rest of it.
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
            match self.make_room(request.len - at) {
                Ok(()) => return Some(Job::Write { request, buffer, at, failures, done }),
                Err(error) => break Err(error),
            }
        };
        self.queue.waiting.fetch_sub(1, SeqCst);
        done.complete(outcome, buffer);
        None
    }

    /// Starts writes below until there is room for `len` bytes, or nothing left to write.
    fn make_room(self: &Arc<Self>, len: u64) -> Result<(), Error> {
        // Failed blocks move past the bound, so each block is tried once, also with a device that
        // completes inline.
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
        // Checked before the failures: a failure is counted before its blocks are moved.
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
