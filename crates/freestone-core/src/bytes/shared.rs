//! State shared by all users of one device.

use std::collections::HashMap;
use std::sync::Weak;

use super::holds::{Holds, Range};
use crate::device::{Completion, Device, Error, Result};
use crate::sync::{Arc, LazyLock, Mutex};
use crate::work_queue::{Task, WorkQueue};

pub struct Shared {
    pub device: Arc<dyn Device>,
    pub holds: Holds<Task>,
    /// Bytes of a block of the device.
    pub block: u64,
}

/// Shared states by the address of the device, which the state keeps alive. Innermost lock, held for a
/// look-up or a change.
static SHARED_STATES: LazyLock<Mutex<HashMap<usize, Weak<Shared>>>> = LazyLock::new(Mutex::default);

/// The thread that starts the next pieces, for all devices.
static WORK: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::new("bytes"));

impl Shared {
    pub fn for_device(device: Arc<dyn Device>) -> Arc<Self> {
        let block = u64::from(device.geometry().logical_block);
        let mut states = SHARED_STATES.lock();
        let known = states.entry(address(&device)).or_default();
        if let Some(shared) = known.upgrade() {
            return shared;
        }
        let shared = Arc::new(Self { device, holds: Holds::default(), block });
        *known = Arc::downgrade(&shared);
        shared
    }

    /// Takes a hold, or returns `None` if the range is excluded. Announces partial writes.
    pub fn try_hold(self: &Arc<Self>, range: Range) -> Option<HoldGuard> {
        if range.part {
            self.holds.announce();
        }
        if self.holds.try_hold(range) {
            return Some(HoldGuard { shared: Arc::clone(self), range });
        }
        if range.part {
            self.holds.withdraw();
        }
        None
    }

    /// Runs `task` with a hold, now or when it is granted. The caller must have called [`start_thread`].
    pub fn with_hold(self: &Arc<Self>, range: Range, task: impl FnOnce(HoldGuard) + Send + 'static) {
        if range.part {
            self.holds.announce();
        }
        let shared = Arc::clone(self);
        let task: Task = Box::new(move || task(HoldGuard { shared, range }));
        if let Some(task) = self.holds.hold_or_wait(range, task) {
            task();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A new state of the same device may be in the map already.
        let (mut states, address) = (SHARED_STATES.lock(), address(&self.device));
        if states.get(&address).is_some_and(|shared| shared.strong_count() == 0) {
            states.remove(&address);
        }
    }
}

fn address(device: &Arc<dyn Device>) -> usize {
    Arc::as_ptr(device).cast::<()>() as usize
}

/// A granted hold. Releases it on drop.
pub struct HoldGuard {
    shared: Arc<Shared>,
    range: Range,
}

impl HoldGuard {
    /// Returns a completion that releases the hold before it calls `done`.
    pub fn release_before(self, done: Completion) -> Completion {
        Completion::new(move |outcome, buffer| {
            drop(self);
            done.complete(outcome, buffer);
        })
    }
}

impl Drop for HoldGuard {
    fn drop(&mut self) {
        // The calling thread may belong to the device, which must not be called from there.
        self.shared.holds.release(self.range).into_iter().for_each(run_later);
    }
}

/// Starts the thread. Must be called before a request waits or uses [`run_later`].
///
/// # Errors
/// [`Error::NoMemory`] if the thread cannot be started.
pub fn start_thread() -> Result<()> {
    WORK.start().map_err(|_| Error::NoMemory)
}

pub fn run_later(task: impl FnOnce() + Send + 'static) {
    WORK.push(task);
}
