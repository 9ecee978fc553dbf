//! State shared by all users (`Bytes`) of one device.

use std::collections::HashMap;
use std::sync::Weak;

use super::range_locks::{Range, RangeLocks};
use crate::device::{Completion, Device, Error, Result};
use crate::sync::{Arc, LazyLock, Mutex};
use crate::work_queue::{Task, WorkQueue};

pub struct Shared {
    pub device: Arc<dyn Device>,
    pub locks: RangeLocks<Task>,
    /// Logical block size of the device in bytes.
    pub block: u64,
}

/// The shared state of each device by the device's address, which is unique because the state keeps the
/// device alive. Innermost lock, held for a look-up or a change.
static SHARED_STATES: LazyLock<Mutex<HashMap<usize, Weak<Shared>>>> = LazyLock::new(Mutex::default);

/// Work queue whose thread starts the next pieces of requests, for all devices.
static WORK: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::new("bytes"));

impl Shared {
    pub fn for_device(device: Arc<dyn Device>) -> Arc<Self> {
        let block = u64::from(device.geometry().logical_block);
        let mut states = SHARED_STATES.lock();
        let known = states.entry(address(&device)).or_default();
        if let Some(shared) = known.upgrade() {
            return shared;
        }
        let shared = Arc::new(Self { device, locks: RangeLocks::default(), block });
        *known = Arc::downgrade(&shared);
        shared
    }

    /// Locks a range, or returns `None` if a locked or waiting range excludes it. Announces partial writes.
    pub fn try_lock_range(self: &Arc<Self>, range: Range) -> Option<RangeGuard> {
        if range.part {
            self.locks.announce();
        }
        if self.locks.try_lock_range(range) {
            return Some(RangeGuard { shared: Arc::clone(self), range });
        }
        if range.part {
            self.locks.withdraw();
        }
        None
    }

    /// Runs `task` with the range locked, at once or when the lock is granted. The caller must have called
    /// [`start_thread`].
    pub fn with_range_lock(self: &Arc<Self>, range: Range, task: impl FnOnce(RangeGuard) + Send + 'static) {
        if range.part {
            self.locks.announce();
        }
        let shared = Arc::clone(self);
        let task: Task = Box::new(move || task(RangeGuard { shared, range }));
        if let Some(task) = self.locks.lock_or_wait(range, task) {
            task();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // The map may already contain a new state of the same device.
        let (mut states, address) = (SHARED_STATES.lock(), address(&self.device));
        if states.get(&address).is_some_and(|shared| shared.strong_count() == 0) {
            states.remove(&address);
        }
    }
}

fn address(device: &Arc<dyn Device>) -> usize {
    Arc::as_ptr(device).cast::<()>() as usize
}

/// A locked range. Dropping the guard unlocks the range.
pub struct RangeGuard {
    shared: Arc<Shared>,
    range: Range,
}

impl RangeGuard {
    /// Returns a completion that unlocks the range before it calls `done`.
    pub fn release_before(self, done: Completion) -> Completion {
        Completion::new(move |outcome, buffer| {
            drop(self);
            done.complete(outcome, buffer);
        })
    }
}

impl Drop for RangeGuard {
    fn drop(&mut self) {
        // The calling thread may belong to the device and must not call it, so the waiting tasks run on the
        // work queue.
        self.shared.locks.release(self.range).into_iter().for_each(run_later);
    }
}

/// Starts the thread of the work queue. Must be called before a request waits or uses [`run_later`].
///
/// # Errors
/// [`Error::NoMemory`] if the thread cannot be started.
pub fn start_thread() -> Result<()> {
    WORK.start().map_err(|_| Error::NoMemory)
}

pub fn run_later(task: impl FnOnce() + Send + 'static) {
    WORK.push(task);
}
