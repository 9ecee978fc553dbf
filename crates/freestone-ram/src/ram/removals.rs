//! What is removed and not freed yet, as a family knows it: layers that are being freed, and
//! devices that are about to leave some.

use std::collections::VecDeque;

use super::Ram;
use super::job::Job;
use super::layer::Layer;
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::{LEAF_SLOTS, MAX_SLOTS};
use freestone_core::sync::{Arc, AtomicU64, Mutex, Ordering};

/// Layers of a family that are being freed, by as many threads as come to help. Lock order: taken
/// for a look at what to do next; slots are not locked under it.
#[derive(Default)]
pub(super) struct Retiring(Mutex<VecDeque<Draining>>);

struct Draining {
    layer: Arc<Layer>,
    next: u64,
    /// Threads at work on leaves of it.
    busy: u32,
    /// Leaves in which something was on its way from the backing device.
    again: Vec<u64>,
}

/// What a step of freeing came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// A leaf was freed.
    Freed,
    /// Others free what is left, or it is on its way from the backing device.
    Later,
    /// Nothing is left.
    Nothing,
}

impl Retiring {
    /// Has a layer freed that no request can reach any more.
    pub fn add(&self, layer: Arc<Layer>) {
        self.0.lock().push_back(Draining { layer, next: 0, busy: 0, again: Vec::new() });
    }

    /// Nothing is freed any more: all of it goes with the family.
    pub fn forget(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }

    /// A leaf to be freed by who calls: its layer and first slot.
    pub fn take_leaf(&self) -> Result<(Arc<Layer>, u64), Step> {
        let mut queue = self.0.lock();
        for draining in queue.iter_mut() {
            let start = match draining.layer.table().next_present(draining.next, MAX_SLOTS) {
                Some(next) => {
                    draining.next = (next | (LEAF_SLOTS - 1)) + 1;
                    next & !(LEAF_SLOTS - 1)
                }
                None => match draining.again.pop() {
                    Some(start) => start,
                    None => continue,
                },
            };
            draining.busy += 1;
            return Ok((Arc::clone(&draining.layer), start));
        }
        Err(if queue.is_empty() { Step::Nothing } else { Step::Later })
    }

    /// What was taken is freed, but for what is on its way where something is `left`. Returns
    /// whether nothing of the layer is left.
    pub fn done_with_leaf(&self, layer: &Arc<Layer>, start: u64, left: bool) -> bool {
        let mut queue = self.0.lock();
        let Some(at) = queue.iter().position(|draining| Arc::ptr_eq(&draining.layer, layer)) else {
            return false;
        };
        let draining = &mut queue[at];
        draining.busy -= 1;
        if left {
            draining.again.push(start);
        }
        let is_done = draining.busy == 0
            && draining.again.is_empty()
            && layer.table().next_present(draining.next, MAX_SLOTS).is_none();
        if is_done {
            queue.remove(at);
        }
        is_done
    }

    /// Whether nothing is to be freed.
    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Whether somebody is freeing a leaf.
    pub fn is_busy(&self) -> bool {
        self.0.lock().iter().any(|draining| draining.busy > 0)
    }

    /// Bytes that are still to be freed.
    pub fn bytes(&self) -> u64 {
        self.0.lock().iter().map(|draining| draining.layer.charged()).sum()
    }
}

/// Removed devices whose pages cannot be freed before the cleaner has done something else, and
/// rewinds that have not yet retired what was there, as writes without memory see them. One that is
/// no longer `pending` is already among those that `ended`, and its pages among what is retired.
///
/// Lock order: `waiting` is innermost.
#[derive(Default)]
pub(super) struct Removals {
    pending: AtomicU64,
    ended: AtomicU64,
    /// Requests that try again when one has ended. Each gets on by itself, so none waits for ever.
    waiting: Mutex<Vec<(Ram, Job)>>,
}

/// What a write that found no memory can hope for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Hope {
    None,
    /// A removed device gave its memory back meanwhile.
    Again,
    /// One is about to.
    Later,
}

impl Removals {
    /// From now on writes that find no memory wait.
    pub fn begin(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
    }

    /// One that is not pending any more has given back the rest.
    pub fn got_on(&self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// What was removed is retired, or of no use to anybody who waits for memory. Returns who tries
    /// again.
    pub fn end(&self) -> Vec<(Ram, Job)> {
        self.ended.fetch_add(1, Ordering::SeqCst);
        self.pending.fetch_sub(1, Ordering::SeqCst);
        std::mem::take(&mut *self.waiting.lock())
    }

    /// Whether something is removed and not retired yet.
    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst) > 0
    }

    /// `ended` is what this said of the attempt before, at first 0.
    pub fn hope(&self, ended: &mut u64) -> Hope {
        if self.pending.load(Ordering::SeqCst) > 0 {
            if mutants::on(Mutant::FalseNoSpace) {
                return Hope::None;
            }
            return Hope::Later;
        }
        let before = std::mem::replace(ended, self.ended.load(Ordering::SeqCst));
        if *ended == before { Hope::None } else { Hope::Again }
    }

    /// The request goes on when a removal has ended. Returned: none is pending any more.
    pub fn wait(&self, ram: &Ram, job: Job) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        // Who ends one looks at the list after that.
        if self.pending.load(Ordering::SeqCst) == 0 {
            return Some(job);
        }
        waiting.push((ram.clone(), job));
        None
    }
}
