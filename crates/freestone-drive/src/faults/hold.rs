//! Completions of requests that a fault rule delays until a time, or hangs until they are released.
//!
//! Lock order: `held` is the innermost lock. Completions run after it is released.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::{Error, Result};
use freestone_core::sync::{Condvar, Instant, Mutex};
use freestone_core::timer;

/// Time for which a fault rule holds a completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pause {
    #[default]
    No,
    /// Hold the completion until this time.
    Until(Instant),
    /// Hold the completion until [`Hold::release`] is called.
    Hang,
}

impl Pause {
    /// Returns the longer of two pauses.
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Hang, _) | (_, Self::Hang) => Self::Hang,
            (Self::Until(a), Self::Until(b)) => Self::Until(a.max(b)),
            (Self::No, pause) | (pause, Self::No) => pause,
        }
    }

    /// Returns a pause of `delay` that starts now.
    pub fn of(delay: Duration) -> Self {
        // A time beyond the clock's range is never reached, so the request hangs.
        Instant::now().checked_add(delay).map_or(Self::Hang, Self::Until)
    }
}

/// Runs a held completion. The argument is `Ok` to deliver the request's own outcome, or
/// [`Error::Gone`] to replace it.
type CompleteFn = Box<dyn FnOnce(Result<()>) + Send>;

/// Completions of one device that fault rules delay or hang.
#[derive(Default)]
pub struct Hold {
    held: Mutex<HeldRequests>,
    /// Wakes threads that wait in a delayed or hung zone operation.
    changed: Condvar,
}

#[derive(Default)]
struct HeldRequests {
    requests: BTreeMap<u64, HeldRequest>,
    next: u64,
    /// Number of threads that wait in a hung zone operation.
    threads: u64,
    /// Number of calls of `release`. A hung zone operation ends when it changes.
    releases: u64,
    closed: bool,
}

struct HeldRequest {
    hangs: bool,
    complete: CompleteFn,
}

impl Hold {
    /// Runs `complete` with `Ok` after `pause`, or with [`Error::Gone`] if [`close`](Self::close)
    /// is called earlier.
    pub fn complete_after(
        self: &Arc<Self>,
        pause: Pause,
        complete: impl FnOnce(Result<()>) + Send + 'static,
    ) {
        let when = match pause {
            Pause::Hang => None,
            Pause::Until(when) if when > Instant::now() => Some(when),
            Pause::No | Pause::Until(_) => return complete(Ok(())),
        };
        let id;
        {
            let mut held = self.held.lock();
            if held.closed {
                drop(held);
                return complete(Err(Error::Gone));
            }
            id = held.next;
            held.next += 1;
            held.requests.insert(id, HeldRequest { hangs: when.is_none(), complete: Box::new(complete) });
        }
        if let Some(when) = when {
            let hold = Arc::downgrade(self);
            let due = timer::schedule(when, move || {
                if let Some(hold) = hold.upgrade() {
                    hold.complete_now(id);
                }
            });
            if due.is_err() {
                // Cannot fail: the timer thread was started when the device was created. If it did,
                // an early completion is better than none.
                self.complete_now(id);
            }
        }
    }

    fn complete_now(&self, id: u64) {
        let request = self.held.lock().requests.remove(&id);
        if let Some(request) = request {
            (request.complete)(Ok(()));
        }
    }

    /// Blocks the calling thread for `pause`. Fails with [`Error::Gone`] if the device is closed
    /// meanwhile.
    pub fn wait(&self, pause: Pause) -> Result<()> {
        if pause == Pause::No {
            return Ok(());
        }
        let mut held = self.held.lock();
        let releases = held.releases;
        if pause == Pause::Hang {
            held.threads += 1;
        }
        let outcome = loop {
            if held.closed {
                break Err(Error::Gone);
            }
            held = match pause {
                Pause::Until(when) => match when.checked_duration_since(Instant::now()) {
                    None | Some(Duration::ZERO) => break Ok(()),
                    Some(left) => self.changed.wait_timeout(held, left).0,
                },
                _ if held.releases > releases => break Ok(()),
                _ => freestone_core::pin::wait(&self.changed, held),
            };
        };
        if pause == Pause::Hang {
            held.threads -= 1;
        }
        outcome
    }

    /// Completes all hung requests, wakes hung zone operations, and returns the number of both.
    pub fn release(&self) -> u64 {
        let (released, threads) = {
            let mut held = self.held.lock();
            held.releases += 1;
            let all = std::mem::take(&mut held.requests);
            let (released, kept): (BTreeMap<_, _>, BTreeMap<_, _>) =
                all.into_iter().partition(|(_, request)| request.hangs);
            held.requests = kept;
            (released, held.threads)
        };
        self.changed.notify_all();
        let count = released.len() as u64 + threads;
        for request in released.into_values() {
            (request.complete)(Ok(()));
        }
        count
    }

    /// Returns the number of hung requests and zone operations.
    pub fn hung_requests(&self) -> u64 {
        let held = self.held.lock();
        held.requests.values().filter(|request| request.hangs).count() as u64 + held.threads
    }

    /// Fails all delayed and hung requests with [`Error::Gone`], and every later request that would
    /// be held.
    pub fn close(&self) {
        let all = {
            let mut held = self.held.lock();
            held.closed = true;
            std::mem::take(&mut held.requests)
        };
        self.changed.notify_all();
        for request in all.into_values() {
            (request.complete)(Err(Error::Gone));
        }
    }
}
