//! Parallel opening of remote devices when a server starts: exports of NBD servers, images in RBD and
//! in object storage.
//!
//! [`Ahead::begin`] opens them on threads of its own. In the turn of such a device, [`Ahead::open`]
//! waits for its thread. So a start with unreachable servers takes as long as the longest of their
//! timeouts, not as long as their sum. [`Ahead::abandon`] ends the wait.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::Spec;
use crate::refusal::{Errno, Refusal};

/// Maximum number of threads that open devices.
const THREADS_MAX: usize = 64;

/// Result of opening a device: a `Result<T, Refusal>`, where `T` depends on the kind.
type Outcome = Box<dyn Any + Send>;
/// Function that opens a device.
pub type Opener = Box<dyn FnOnce() -> Outcome + Send>;

/// Devices that are opened before their turn. `state` is locked only to read or change it, never
/// while a device is opened or closed.
#[derive(Default)]
pub struct Ahead {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Devices that wait for a thread.
    queue: VecDeque<(String, Opener)>,
    /// Results by name; None until the device was opened.
    outcomes: HashMap<String, Option<Outcome>>,
    /// Threads that open devices of the queue.
    threads: usize,
    /// `abandon` was called.
    is_abandoned: bool,
}

/// Converts a function for [`Ahead::open`] to an [`Opener`].
pub fn opener<T: Send + 'static>(open: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Opener {
    Box::new(move || Box::new(open()))
}

impl Ahead {
    /// Begins to open the remote devices among `specs`, unless `abandon` was called. If no thread can be
    /// started, they are opened in their turn. Dropping the guard closes devices that nobody took.
    #[must_use]
    pub fn begin<'a>(self: &Arc<Self>, specs: impl Iterator<Item = &'a Spec>) -> OpenAhead {
        let openers = specs.filter_map(|spec| Some((spec.name.clone(), spec.kind.opener(spec)?)));
        let openers: VecDeque<_> = openers.collect();
        let threads = openers.len().min(THREADS_MAX);
        let mut state = self.lock();
        if !state.is_abandoned {
            state.outcomes = openers.iter().map(|(name, _)| (name.clone(), None)).collect();
            state.queue = openers;
        }
        drop(state);
        for _ in 0..threads {
            self.lock().threads += 1;
            let ahead = Arc::clone(self);
            let run = move || while ahead.open_next() {};
            if thread::Builder::new().name("open".into()).spawn(run).is_err() {
                self.lock().threads -= 1;
                break;
            }
        }
        OpenAhead(Arc::clone(self))
    }

    /// Forgets a removed device and closes it, so that another device can have its name.
    pub fn forget(&self, name: &str) {
        let mut state = self.lock();
        let at = state.queue.iter().position(|(queued, _)| queued == name);
        let unused = (at.and_then(|at| state.queue.remove(at)), state.outcomes.remove(name));
        drop(state);
        // Dropping closes connections, so it happens outside of the lock.
        drop(unused);
        self.changed.notify_all();
    }

    /// Fails every present and later wait for a device.
    pub fn abandon(&self) {
        let mut state = self.lock();
        state.is_abandoned = true;
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        drop(queue);
        self.changed.notify_all();
    }
}

/// Guard of the devices that are opened ahead.
pub struct OpenAhead(Arc<Ahead>);

impl OpenAhead {
    /// Waits until `look` returns a value. `look` gets a function that returns true for a device that is
    /// not opened yet. Returns None at the time `until`, or if the devices are abandoned.
    pub fn wait<T>(
        &self,
        until: Option<Instant>,
        mut look: impl FnMut(&dyn Fn(&str) -> bool) -> Option<T>,
    ) -> Option<T> {
        let mut state = self.0.lock();
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
                Some(left) => {
                    self.0.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
                None => self.0.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Returns true if a device is not opened yet.
    pub fn is_pending(&self, name: &str) -> bool {
        self.0.lock().is_pending(name)
    }
}

impl State {
    fn is_pending(&self, name: &str) -> bool {
        matches!(self.outcomes.get(name), Some(None))
    }
}

impl Drop for OpenAhead {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        let unused = (std::mem::take(&mut state.queue), std::mem::take(&mut state.outcomes));
        drop(state);
        // Closes connections, outside of the lock.
        drop(unused);
    }
}

impl Ahead {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state inconsistent, so poisoning is ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the next device. Returns false if the queue is empty, which ends the thread.
    fn open_next(&self) -> bool {
        let mut state = self.lock();
        let Some((name, open)) = state.queue.pop_front() else {
            state.threads -= 1;
            return false;
        };
        drop(state);
        let outcome = panic::catch_unwind(AssertUnwindSafe(open)).ok();
        let mut state = self.lock();
        let unused = match (state.outcomes.get_mut(&name), outcome) {
            (Some(outcome_slot), Some(outcome)) => outcome_slot.replace(outcome),
            // The opener panicked: `open` opens the device again, and its caller sees the panic.
            (Some(_), None) => state.outcomes.remove(&name).flatten(),
            (None, outcome) => outcome,
        };
        drop(state);
        // Dropping an unused device closes connections, so it happens outside of the lock.
        drop(unused);
        self.changed.notify_all();
        true
    }

    /// Opens a device, or waits until a thread has opened it.
    pub fn open<T: 'static>(
        &self,
        name: &str,
        open: impl FnOnce() -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut state = self.lock();
        // If no thread runs, open a queued device here. Otherwise wait for the threads, which `abandon`
        // can end.
        if state.threads == 0
            && let Some(at) = state.queue.iter().position(|(queued, _)| queued == name)
        {
            state.queue.remove(at);
            state.outcomes.remove(name);
        }
        loop {
            let State { outcomes, is_abandoned, .. } = &mut *state;
            if *is_abandoned {
                return Err(Refusal::failed(Errno::ECANCELED, "the server is shutting down"));
            }
            match outcomes.get_mut(name) {
                None => break,
                Some(None) => {
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                }
                Some(outcome) => {
                    let outcome = outcome.take().and_then(|outcome| outcome.downcast().ok());
                    outcomes.remove(name);
                    // The result is for a device of another kind that had the name, so open this one.
                    let Some(outcome) = outcome else { break };
                    return *outcome;
                }
            }
        }
        drop(state);
        open()
    }
}
