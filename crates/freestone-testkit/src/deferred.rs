//! A wrapper device that makes callers submit requests instead of completing their tries.

use std::fmt;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

use freestone_core::device::zoned::{AppendCompletion, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Flags, IoBuf, Request, Result, TryResult, forward_device,
    forward_zoned,
};
use freestone_core::sync::{Condvar, Mutex};

use crate::Rng;

/// Time that the executor waits for a second request, so that there are several to shuffle.
const GATHER: Duration = Duration::from_micros(100);

/// Policy for the result of the wrapper's `try_io`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeferPolicy {
    /// The wrapper always returns "would block".
    Always,
    /// The wrapper returns "would block" with this probability in percent. With the same probability, it
    /// passes only the beginning of a request to the inner device. Otherwise it returns the inner device's
    /// result.
    Sometimes(u8),
}

/// A wrapper that returns "would block" from tries according to the [`DeferPolicy`]. Submitted requests
/// complete on a separate thread, in an order that depends on the seed and on arrival times. Requests to the
/// same zone keep their order.
pub struct DeferringDevice {
    shared: Arc<DeferredShared>,
    policy: DeferPolicy,
    executor: Option<JoinHandle<()>>,
}

enum Job {
    Io(Request, IoBuf, Completion),
    Append(u64, IoBuf, Flags, AppendCompletion),
}

struct DeferredShared {
    inner: Arc<dyn Device>,
    state: Mutex<DeferredState>,
    changed: Condvar,
}

struct DeferredState {
    rng: Rng,
    jobs: Vec<Job>,
    /// Indexes of the zones with requests in flight in the inner device.
    running: Vec<u64>,
    stop: bool,
}

impl DeferringDevice {
    /// Wraps the device `inner`. The seed decides which tries are deferred, and the order of completions.
    pub fn new(inner: Arc<dyn Device>, policy: DeferPolicy, seed: u64) -> Self {
        let state = DeferredState { rng: Rng::new(seed), jobs: Vec::new(), running: Vec::new(), stop: false };
        let shared = Arc::new(DeferredShared { inner, state: Mutex::new(state), changed: Condvar::new() });
        let executor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.execute()
        });
        Self { shared, policy, executor: Some(executor) }
    }

    /// Returns true if the try at `offset` must return "would block".
    fn defers(&self, offset: u64) -> bool {
        let mut state = self.shared.state.lock();
        // A try must not overtake requests submitted earlier to the same zone.
        self.shared.is_busy(&state, offset)
            || match self.policy {
                DeferPolicy::Always => true,
                DeferPolicy::Sometimes(percent) => state.rng.chance(percent),
            }
    }

    /// Returns how many bytes of a try are passed on to the inner device.
    fn portion(&self, request: &Request) -> u64 {
        let geometry = self.shared.inner.geometry();
        let blocks = request.len / u64::from(geometry.logical_block);
        match self.policy {
            // Writes to zones are passed on whole.
            DeferPolicy::Sometimes(percent) if blocks > 1 && geometry.zones.is_none() => {
                let mut state = self.shared.state.lock();
                if state.rng.chance(percent) {
                    return (1 + state.rng.below(blocks - 1)) * u64::from(geometry.logical_block);
                }
                request.len
            }
            _ => request.len,
        }
    }

    fn enqueue(&self, job: Job) {
        self.shared.state.lock().jobs.push(job);
        self.shared.changed.notify_all();
    }
}

impl DeferredShared {
    /// Returns the index of the zone that contains `offset`, or `None` if the device has no zones.
    fn zone(&self, offset: u64) -> Option<u64> {
        self.inner.geometry().zones.map(|zones| offset / zones.zone_size)
    }

    fn is_busy(&self, state: &DeferredState, offset: u64) -> bool {
        let zone = self.zone(offset);
        zone.is_some_and(|zone| {
            state.running.contains(&zone)
                || state.jobs.iter().any(|job| self.zone(job.offset()) == Some(zone))
        })
    }

    fn execute(self: Arc<Self>) {
        loop {
            let mut state = self.state.lock();
            while state.jobs.is_empty() && !state.stop {
                state = self.changed.wait(state);
            }
            if state.jobs.len() < 2 && !state.stop {
                state = self.changed.wait_timeout(state, GATHER).0;
            }
            if state.jobs.is_empty() {
                if state.stop {
                    return;
                }
                continue;
            }
            let count = state.jobs.len() as u64;
            let candidate = state.rng.below(count) as usize;
            let zone = self.zone(state.jobs[candidate].offset());
            // Take the oldest request of the chosen zone. `remove` keeps the order of the others.
            let first = match zone {
                Some(_) => {
                    state.jobs.iter().position(|job| self.zone(job.offset()) == zone).unwrap_or(candidate)
                }
                None => candidate,
            };
            let job = state.jobs.remove(first);
            state.running.extend(zone);
            drop(state);
            self.run(job, zone);
        }
    }

    fn run(self: &Arc<Self>, job: Job, zone: Option<u64>) {
        let shared = Arc::clone(self);
        let finish = move || {
            let mut state = shared.state.lock();
            if let Some(at) = state.running.iter().position(|running| Some(*running) == zone) {
                state.running.swap_remove(at);
            }
        };
        match job {
            Job::Io(request, buffer, done) => {
                let done = Completion::new(move |outcome, buffer| {
                    finish();
                    done.complete(outcome, buffer);
                });
                self.inner.submit(request, buffer, done);
            }
            Job::Append(offset, data, flags, done) => match self.inner.zoned() {
                Some(zoned) => {
                    let done = Box::new(move |outcome| {
                        finish();
                        done(outcome);
                    });
                    zoned.submit_append(offset, data, flags, done);
                }
                None => done(Err(Error::Unsupported)),
            },
        }
    }
}

impl Job {
    fn offset(&self) -> u64 {
        match self {
            Self::Io(request, ..) => request.offset,
            Self::Append(offset, ..) => *offset,
        }
    }
}

impl Device for DeferringDevice {
    forward_device!(|deferring| deferring.shared.inner => geometry, extents;
        prefetch: below, zoned: self, changes: none);

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry())?;
        if self.defers(request.offset) {
            return Ok(TryResult::WouldBlock);
        }
        let portion = self.portion(request);
        if portion == request.len {
            return self.shared.inner.try_io(request, buffer);
        }
        let part = Request { len: portion, ..*request };
        let buffer = match buffer {
            Buffer::None => Buffer::None,
            Buffer::Read(out) => Buffer::Read(&mut out[..portion as usize]),
            Buffer::Write(data) => Buffer::Write(&data[..portion as usize]),
        };
        Ok(match self.shared.inner.try_io(&part, buffer)? {
            TryResult::Done => TryResult::Partly(portion),
            other => other,
        })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.enqueue(Job::Io(request, buffer, done));
    }
}

impl Zoned for DeferringDevice {
    forward_zoned!(|deferring| deferring.shared.inner => report, zone_op, reset_all);

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let zoned = self.shared.inner.zones()?;
        if self.defers(offset) { Ok(None) } else { zoned.try_append(offset, data, flags) }
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        self.enqueue(Job::Append(offset, data, flags, done));
    }
}

impl Drop for DeferringDevice {
    /// Completes all submitted requests, and ends the thread.
    fn drop(&mut self) {
        self.shared.state.lock().stop = true;
        self.shared.changed.notify_all();
        if let Some(executor) = self.executor.take()
            && executor.thread().id() != thread::current().id()
        {
            // The panic hook has already reported a panic of the thread.
            let _ = executor.join();
        }
    }
}

impl fmt::Debug for DeferringDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeferringDevice({:?})", self.policy)
    }
}
