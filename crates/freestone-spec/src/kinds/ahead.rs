//! Far devices that a start opens side by side: exports of NBD servers, images in RBD and in stores.
//!
//! [`Ahead::begin`] begins to open them on threads of its own. When such a device has its turn,
//! [`Ahead::open`] waits for that. So a start waits for servers that do not answer within the longest
//! of their timeouts, and [`Ahead::abandon`] ends the wait.

use std::any::Any;
use std::collections::{HashMap, VecDeque};
use std::panic::{self, AssertUnwindSafe};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use super::Spec;
use crate::refusal::{Errno, Refusal};

/// Devices that are opened at once.
const THREADS_MAX: usize = 64;

/// What came of opening a device: a `Result<T, Refusal>` of its kind.
type Outcome = Box<dyn Any + Send>;
/// Opens a device.
pub type Opener = Box<dyn FnOnce() -> Outcome + Send>;

/// Devices that are opened before their turn. `state` is locked for a look or a change.
#[derive(Default)]
pub struct Ahead {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Devices that no thread opens yet.
    queue: VecDeque<(String, Opener)>,
    /// By name; nothing until the device was opened.
    outcomes: HashMap<String, Option<Outcome>>,
    /// Threads that open devices of the queue.
    threads: usize,
    is_abandoned: bool,
}

/// Makes an [`Opener`] of what [`Ahead::open`] would call.
pub fn opener<T: Send + 'static>(open: impl FnOnce() -> Result<T, Refusal> + Send + 'static) -> Opener {
    Box::new(move || Box::new(open()))
}

impl Ahead {
    /// Begins to open those devices that are far, unless they were abandoned. If no thread can be started,
    /// they are opened in their turn. What was opened and is not wanted closes when the guard is dropped.
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

    /// Forgets a device that was removed. What was opened for it closes, and another device may have its
    /// name.
    pub fn forget(&self, name: &str) {
        let mut state = self.lock();
        let at = state.queue.iter().position(|(queued, _)| queued == name);
        let left = (at.and_then(|at| state.queue.remove(at)), state.outcomes.remove(name));
        drop(state);
        // Closes connections, outside of the lock.
        drop(left);
        self.changed.notify_all();
    }

    /// Fails every wait for such a device from now on.
    pub fn abandon(&self) {
        let mut state = self.lock();
        state.is_abandoned = true;
        let queue = std::mem::take(&mut state.queue);
        drop(state);
        drop(queue);
        self.changed.notify_all();
    }
}

/// Devices that are opened ahead, as long as they may be wanted.
pub struct OpenAhead(Arc<Ahead>);

impl OpenAhead {
    /// Waits until `look`, which is told which devices are not opened yet, returns something. `None`:
    /// it is `until`, or the devices are abandoned.
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
        let left = (std::mem::take(&mut state.queue), std::mem::take(&mut state.outcomes));
        drop(state);
        // Closes connections, outside of the lock.
        drop(left);
    }
}

impl Ahead {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic cannot leave the state inconsistent, so poisoning is ignored.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the next device. False: there is none, and the thread ends.
    fn open_next(&self) -> bool {
        let mut state = self.lock();
        let Some((name, open)) = state.queue.pop_front() else {
            state.threads -= 1;
            return false;
        };
        drop(state);
        let outcome = panic::catch_unwind(AssertUnwindSafe(open)).ok();
        let mut state = self.lock();
        let left = match (state.outcomes.get_mut(&name), outcome) {
            (Some(waits), Some(outcome)) => waits.replace(outcome),
            // It panicked: `open` opens the device itself, and its caller sees the panic.
            (Some(_), None) => state.outcomes.remove(&name).flatten(),
            (None, outcome) => outcome,
        };
        drop(state);
        // A device that nobody wants closes its connections, outside of the lock.
        drop(left);
        self.changed.notify_all();
        true
    }

    /// Opens a device, or waits until a thread has done so.
    pub fn open<T: 'static>(
        &self,
        name: &str,
        open: impl FnOnce() -> Result<T, Refusal>,
    ) -> Result<T, Refusal> {
        let mut state = self.lock();
        // Without threads nobody else opens it. With threads it is waited for, which `abandon` can end.
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
                    // A device of another kind has the name by now: it is opened.
                    let Some(outcome) = outcome else { break };
                    return *outcome;
                }
            }
        }
        drop(state);
        open()
    }
}
