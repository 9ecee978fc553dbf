//! Opens remote devices in parallel when a server starts: exports of other NBD servers, and images
//! in RBD or object storage.
//!
//! [`ParallelOpen::begin`] opens remote devices on separate threads. When such a device is created
//! in the order of the configuration, [`ParallelOpen::open`] waits for its thread. So a start with
//! unreachable servers takes as long as the longest timeout, not as long as the sum of all
//! timeouts. [`ParallelOpen::abandon`] ends the wait.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use freestone::sync::{Condvar, Mutex};

use super::Spec;
use crate::refusal::Refusal;

/// Maximum number of threads that open devices in parallel.
const THREADS_MAX: usize = 64;

/// Result of opening a device: a `Result<T, Refusal>`, where `T` depends on the kind of the device.
type Outcome = Box<dyn Any + Send>;
/// Function that opens a device on any thread.
pub type Opener = Box<dyn FnOnce() -> Outcome + Send>;

/// Remote devices that are opened in advance. `state` is locked only to read or change it, never
/// while a device is opened or closed.
#[derive(Default)]
pub struct ParallelOpen {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Names and openers of devices that wait for a thread.
    queue: VecDeque<(String, Opener)>,
    /// Results by device name; `None` until the device was opened.
    outcomes: HashMap<String, Option<Outcome>>,
    /// Number of running threads that open devices of the queue.
    threads: usize,
    is_abandoned: bool,
}

/// Converts a function that opens a device to an [`Opener`]. [`ParallelOpen::open`] returns its
/// result.
pub fn opener<T: Send + 'static>(open: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Opener {
    Box::new(move || Box::new(open()))
}

impl ParallelOpen {
    /// Begins to open the remote devices among `specs`, unless `abandon` was called. If no thread
    /// can be started, [`open`](Self::open) opens each device. Dropping the guard closes devices
    /// that were opened but not used.
    #[must_use]
    pub fn begin<'a>(self: &Arc<Self>, specs: impl Iterator<Item = &'a Spec>) -> ParallelOpenGuard {
        let openers = specs.filter_map(|spec| Some((spec.name.clone(), spec.kind.opener(spec)?)));
        let openers: VecDeque<_> = openers.collect();
        let threads = openers.len().min(THREADS_MAX);
        let mut state = self.state.lock();
        if !state.is_abandoned {
            state.outcomes = openers.iter().map(|(name, _)| (name.clone(), None)).collect();
            state.queue = openers;
        }
        drop(state);
        for _ in 0..threads {
            self.state.lock().threads += 1;
            let parallel_open = Arc::clone(self);
            let run = move || while parallel_open.open_next() {};
            if thread::Builder::new().name("open".into()).spawn(run).is_err() {
                self.state.lock().threads -= 1;
                break;
            }
        }
        ParallelOpenGuard(Arc::clone(self))
    }

    /// Forgets and closes a device that was removed, so that another device can use the name.
    pub fn forget(&self, name: &str) {
        let mut state = self.state.lock();
        let at = state.queue.iter().position(|(queued, _)| queued == name);
        let unused = (at.and_then(|at| state.queue.remove(at)), state.outcomes.remove(name));
        drop(state);
        // Dropping the device closes connections, which may block, so the lock is released before.
        drop(unused);
        self.changed.notify_all();
    }

    /// Makes every present and later call of [`open`](Self::open) fail.
    pub fn abandon(&self) {
        let mut state = self.state.lock();
        state.is_abandoned = true;
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        drop(queue);
        self.changed.notify_all();
    }
}

/// Guard of the devices that are opened in advance. Dropping it closes those that were not used.
pub struct ParallelOpenGuard(Arc<ParallelOpen>);

impl ParallelOpenGuard {
    /// Waits until `look` returns a value, and returns it. The argument of `look` is a function
    /// that returns true for a device that is not opened yet. Returns `None` at the time `until`,
    /// or after [`abandon`](ParallelOpen::abandon).
    pub fn wait<T>(
        &self,
        until: Option<Instant>,
        mut look: impl FnMut(&dyn Fn(&str) -> bool) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.0.state.lock();
        loop {
            if state.is_abandoned {
                return None;
            }
            if let Some(found) = look(&|name| state.is_pending(name)) {
                return Some(found);
            }
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            state = match left {
                Some(Duration::ZERO) => return None,
                Some(left) => self.0.changed.wait_timeout(state, left).0,
                None => self.0.changed.wait(state),
            };
        }
    }

    /// Returns true if the device is being opened in advance, but is not open yet.
    pub fn is_pending(&self, name: &str) -> bool {
        self.0.state.lock().is_pending(name)
    }
}

impl State {
    fn is_pending(&self, name: &str) -> bool {
        matches!(self.outcomes.get(name), Some(None))
    }
}

impl Drop for ParallelOpenGuard {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        let unused = (std::mem::take(&mut state.queue), std::mem::take(&mut state.outcomes));
        drop(state);
        // Dropping the devices closes connections, which may block, so the lock is released before.
        drop(unused);
    }
}

impl ParallelOpen {
    /// Opens the next device of the queue. Returns false if the queue is empty, which ends the
    /// thread.
    fn open_next(&self) -> bool {
        let mut state = self.state.lock();
        let Some((name, open)) = state.queue.pop_front() else {
            state.threads -= 1;
            return false;
        };
        drop(state);
        let outcome = panic::catch_unwind(AssertUnwindSafe(open)).ok();
        let mut state = self.state.lock();
        let unused = match (state.outcomes.get_mut(&name), outcome) {
            (Some(outcome_slot), Some(outcome)) => outcome_slot.replace(outcome),
            // The opener panicked. `open` then opens the device again, so that the panic occurs in
            // its caller.
            (Some(_), None) => state.outcomes.remove(&name).flatten(),
            (None, outcome) => outcome,
        };
        drop(state);
        // Dropping an unused device closes connections, which may block, so the lock is released
        // before.
        drop(unused);
        self.changed.notify_all();
        true
    }

    /// Opens a device with `open`, or waits until a thread has opened the device in advance. Fails
    /// with `ECANCELED` after `abandon`.
    pub fn open<T: 'static>(
        &self,
        name: &str,
        open: impl FnOnce() -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut state = self.state.lock();
        // If no thread runs, a queued device must be opened on this thread. Otherwise this thread
        // waits for the others, so that `abandon` can end the wait.
        if state.threads == 0
            && let Some(at) = state.queue.iter().position(|(queued, _)| queued == name)
        {
            state.queue.remove(at);
            state.outcomes.remove(name);
        }
        loop {
            let State { outcomes, is_abandoned, .. } = &mut *state;
            if *is_abandoned {
                refuse!(ECANCELED, "the server is shutting down");
            }
            match outcomes.get_mut(name) {
                None => break,
                Some(None) => {
                    state = self.changed.wait(state);
                }
                Some(outcome) => {
                    let outcome = outcome.take().and_then(|outcome| outcome.downcast().ok());
                    outcomes.remove(name);
                    // If the type does not match, the result belongs to a device of another kind
                    // that had the same name, so this one is opened.
                    let Some(outcome) = outcome else { break };
                    return *outcome;
                }
            }
        }
        drop(state);
        open()
    }
}
