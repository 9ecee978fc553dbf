//! What all users of one device share.

use std::collections::HashMap;
use std::sync::Weak;

use super::holds::{Holds, Range};
use crate::device::{Completion, Device, Error, Result};
use crate::sync::{Arc, LazyLock, Mutex};
use crate::work_queue::{Task, WorkQueue};

/// A device, and who writes it.
pub struct Shared {
    pub device: Arc<dyn Device>,
    pub holds: Holds<Task>,
    /// Bytes of a block of the device.
    pub block: u64,
}

/// By the address of the device, which lives as long as what is found here. Lock order: nothing is
/// taken under it; held for a look or a change.
static ALL: LazyLock<Mutex<HashMap<usize, Weak<Shared>>>> = LazyLock::new(Mutex::default);

/// The thread that begins the next piece, for all devices.
static WORK: LazyLock<Arc<WorkQueue>> = LazyLock::new(|| WorkQueue::new("bytes"));

impl Shared {
    /// What the users of this device share.
    pub fn of(device: Arc<dyn Device>) -> Arc<Self> {
        let block = u64::from(device.geometry().logical_block);
        let mut all = ALL.lock();
        let known = all.entry(address(&device)).or_default();
        if let Some(shared) = known.upgrade() {
            return shared;
        }
        let shared = Arc::new(Self { device, holds: Holds::default(), block });
        *known = Arc::downgrade(&shared);
        shared
    }

    /// Takes a hold, if it is free; one of a part is announced before.
    pub fn try_hold(self: &Arc<Self>, range: Range) -> Option<Held> {
        if range.part {
            self.holds.announce();
        }
        if self.holds.try_hold(range) {
            return Some(Held { shared: Arc::clone(self), range });
        }
        if range.part {
            self.holds.withdraw();
        }
        None
    }

    /// Does `task` with a hold: now, or when it is free. [`can_wait`] was called before.
    pub fn with_hold(self: &Arc<Self>, range: Range, task: impl FnOnce(Held) + Send + 'static) {
        if range.part {
            self.holds.announce();
        }
        let shared = Arc::clone(self);
        let task: Task = Box::new(move || task(Held { shared, range }));
        if let Some(task) = self.holds.hold_or_wait(range, task) {
            task();
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // Another may stand there already.
        let (mut all, address) = (ALL.lock(), address(&self.device));
        if all.get(&address).is_some_and(|shared| shared.strong_count() == 0) {
            all.remove(&address);
        }
    }
}

fn address(device: &Arc<dyn Device>) -> usize {
    Arc::as_ptr(device).cast::<()>() as usize
}

/// A hold, until it is dropped.
pub struct Held {
    shared: Arc<Shared>,
    range: Range,
}

impl Held {
    /// A completion that gives the hold back before it answers.
    pub fn until(self, done: Completion) -> Completion {
        Completion::new(move |outcome, buffer| {
            drop(self);
            done.complete(outcome, buffer);
        })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // This may be a thread of the device, which must not be called from there.
        self.shared.holds.release(self.range).into_iter().for_each(later);
    }
}

/// Before anything may wait or go on [`later`].
///
/// # Errors
/// There can be no thread.
pub fn can_wait() -> Result<()> {
    WORK.start().map_err(|_| Error::NoMemory)
}

/// The thread will do this soon.
pub fn later(task: impl FnOnce() + Send + 'static) {
    WORK.push(task);
}
