//! The worker: one thread for a device, for requests that wait for room, for a range, or for a
//! flush. It waits for nothing but the bell, so a slow request below holds up only what needs it.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::completion;
use super::drain::PowerShared;
use super::io::Admitted;
use super::queue::{Job, Settle};
use freestone_core::device::{Completion, Error, IoBuf, Op, Request};
use freestone_core::sync::Ordering::SeqCst;

/// Unflushed bytes that are written below at a time.
const WINDOW_BYTES: u64 = 8 << 20;

impl PowerShared {
    /// Hands a job to the worker. Called with the power on, under a pin.
    pub fn enqueue(&self, job: Job) {
        self.queue.pending.fetch_add(1, SeqCst);
        if matches!(job, Job::Write { .. }) {
            self.queue.waiting.fetch_add(1, SeqCst);
        }
        self.bell.listen();
        self.queue.state.lock().jobs.push(job);
        self.bell.ring_loud();
    }

    fn finished(&self) {
        self.queue.pending.fetch_sub(1, SeqCst);
        self.bell.leave();
        // Whoever switches the power off listens.
        self.bell.ring();
    }

    /// The worker ends when it has nothing to do any more.
    pub fn stop_worker(&self) {
        self.queue.state.lock().stop = true;
        self.bell.ring_loud();
    }

    /// The worker's thread.
    pub fn work(self: &Arc<Self>) {
        let mut jobs = Vec::new();
        loop {
            let seen = self.bell.count();
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
                    job if matches!(admitted, Admitted::Off) => self.answer_gone(job),
                    job @ Job::Write { .. } if !room => jobs.push(job),
                    job => {
                        let left = self.step_or_lose(job);
                        room &= !matches!(left, Some(Job::Write { .. }));
                        jobs.extend(left);
                    }
                }
            }
            drop(admitted);
            // The last job may have rung for nobody.
            if !(stop && jobs.is_empty()) {
                self.bell.wait(seen);
            }
        }
    }

    fn answer_gone(&self, job: Job) {
        match job {
            Job::Write { buffer, done, .. } => {
                done.complete(Err(Error::Gone), buffer);
                self.queue.waiting.fetch_sub(1, SeqCst);
            }
            Job::Through { buffer, done, .. } => done.complete(Err(Error::Gone), buffer),
            Job::Settle(settle) => {
                self.close_flush(settle.slot, false);
                settle.done.complete(Err(Error::Gone), IoBuf::empty());
            }
        }
        self.finished();
    }

    /// A step. One whose completion panics is over; the panic was reported by its hook, and is not
    /// the other requests' affair.
    fn step_or_lose(self: &Arc<Self>, job: Job) -> Option<Job> {
        let step = AssertUnwindSafe(|| completion::inside(|| self.step(job)));
        catch_unwind(step).unwrap_or_else(|_| {
            self.finished();
            None
        })
    }

    /// Does what can be done of a job; gives back what is left.
    fn step(self: &Arc<Self>, job: Job) -> Option<Job> {
        let left = match job {
            Job::Write { request, buffer, at, failures, done } => {
                self.step_write(request, buffer, at, failures, done)
            }
            Job::Through { request, buffer, done } => self
                .through(request, buffer, done)
                .map(|(buffer, done)| Job::Through { request, buffer, done }),
            Job::Settle(settle) => self.step_settle(settle).map(Job::Settle),
        };
        if left.is_none() {
            self.finished();
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

    /// Has enough written below that there is room for `len` bytes, or that the cache is empty.
    fn make_room(self: &Arc<Self>, len: u64) -> Result<(), Error> {
        // What fails gets a later place: each block is tried once, also by a device that answers at
        // once.
        let bound = self.cache.now();
        let want = len.min(self.cache.capacity()).min(WINDOW_BYTES);
        while self.cache.room() + self.draining.load(SeqCst) < want {
            match self.cache.claim_run(bound, None)? {
                Some(run) => self.drain(run),
                None => break,
            }
        }
        Ok(())
    }

    fn step_settle(self: &Arc<Self>, settle: Settle) -> Option<Settle> {
        let within = settle.within.as_ref();
        let mut error = None;
        while error.is_none() && self.draining.load(SeqCst) < WINDOW_BYTES {
            match self.cache.claim_run(settle.bound, within) {
                Ok(Some(run)) => self.drain(run),
                Ok(None) => break,
                Err(failed) => error = Some(failed),
            }
        }
        // In this order: what failed is counted before it is put off.
        let unflushed = self.is_unflushed(settle.bound, within);
        let error = error.or_else(|| self.failed_since(settle.failures));
        match error {
            Some(error) => {
                self.close_flush(settle.slot, false);
                settle.done.complete(Err(error), IoBuf::empty());
                None
            }
            None if unflushed => Some(settle),
            None if settle.flush => {
                self.flush_below(settle.slot, settle.done);
                None
            }
            None => {
                settle.done.complete(Ok(()), IoBuf::empty());
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
