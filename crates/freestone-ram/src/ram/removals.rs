//! Removals in progress: layers that are being freed, and removed devices that have not retired
//! their layers yet.

use std::collections::VecDeque;

use super::Ram;
use super::job::Job;
use super::layer::Layer;
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::{LEAF_SLOTS, MAX_SLOTS};
use freestone_core::sync::{Arc, AtomicU64, Mutex, Ordering};

/// Layers that are being freed, by any number of threads. Lock order: taken only to choose or
/// finish a leaf, with no slot locked under it.
#[derive(Default)]
pub(super) struct Retiring(Mutex<VecDeque<Draining>>);

struct Draining {
    layer: Arc<Layer>,
    next: u64,
    /// Threads that free leaves of this layer.
    busy: u32,
    /// Leaves to visit again, as a page was in flight from the backing device.
    revisit: Vec<u64>,
}

/// Result of a freeing step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    Freed,
    /// Other threads free the rest, or it is in flight from the backing device.
    Later,
    Nothing,
}

impl Retiring {
    /// Queues a layer for freeing; no request can reach it any more.
    pub fn add(&self, layer: Arc<Layer>) {
        self.0.lock().push_back(Draining { layer, next: 0, busy: 0, revisit: Vec::new() });
    }

    /// Drops the queue: the family's memory is freed as a whole.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }

    /// Takes a leaf for the caller to free: its layer and first slot.
    pub fn take_leaf(&self) -> Result<(Arc<Layer>, u64), Step> {
        let mut queue = self.0.lock();
        for draining in queue.iter_mut() {
            let start = match draining.layer.table().next_present(draining.next, MAX_SLOTS) {
                Some(next) => {
                    draining.next = (next | (LEAF_SLOTS - 1)) + 1;
                    next & !(LEAF_SLOTS - 1)
                }
                None => match draining.revisit.pop() {
                    Some(start) => start,
                    None => continue,
                },
            };
            draining.busy += 1;
            return Ok((Arc::clone(&draining.layer), start));
        }
        Err(if queue.is_empty() { Step::Nothing } else { Step::Later })
    }

    /// Ends the freeing of a leaf; `left` if pages in flight remain. Returns true if the layer is
    /// empty.
    pub fn finish_leaf(&self, layer: &Arc<Layer>, start: u64, left: bool) -> bool {
        let mut queue = self.0.lock();
        let Some(at) = queue.iter().position(|draining| Arc::ptr_eq(&draining.layer, layer)) else {
            return false;
        };
        let draining = &mut queue[at];
        draining.busy -= 1;
        if left {
            draining.revisit.push(start);
        }
        let is_done = draining.busy == 0
            && draining.revisit.is_empty()
            && layer.table().next_present(draining.next, MAX_SLOTS).is_none();
        if is_done {
            queue.remove(at);
        }
        is_done
    }

    pub fn is_empty(&self) -> bool {
        self.0.lock().is_empty()
    }

    /// Returns true if a thread is freeing a leaf.
    pub fn is_busy(&self) -> bool {
        self.0.lock().iter().any(|draining| draining.busy > 0)
    }

    pub fn bytes(&self) -> u64 {
        self.0.lock().iter().map(|draining| draining.layer.charged()).sum()
    }
}

/// Removals that have not retired their layers yet: removed devices the cleaner must process first,
/// and rewinds. A removal that is no longer `pending` is already counted in `ended`, and its pages
/// are in [`Retiring`].
///
/// Lock order: `waiting` is a leaf lock.
#[derive(Default)]
pub(super) struct Removals {
    pending: AtomicU64,
    ended: AtomicU64,
    /// Requests to retry after the next end of a removal. Every removal ends, so no request waits
    /// for ever.
    waiting: Mutex<Vec<(Ram, Job)>>,
}

/// How a write without memory proceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SpaceRetry {
    No,
    /// Retry now: a removal ended since the last attempt.
    Now,
    /// Retry later: a removal is pending.
    AfterRemoval,
}

impl Removals {
    /// Makes writes without memory wait.
    pub fn begin(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts a removal that freed more memory after it stopped being pending.
    pub fn count_progress(&self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends a pending removal. Returns the requests to retry.
    pub fn end(&self) -> Vec<(Ram, Job)> {
        self.ended.fetch_add(1, Ordering::SeqCst);
        self.pending.fetch_sub(1, Ordering::SeqCst);
        std::mem::take(&mut *self.waiting.lock())
    }

    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst) > 0
    }

    /// Returns how a write without memory proceeds. `ended` is the count at the request's previous
    /// attempt, initially 0.
    pub fn space_retry(&self, ended: &mut u64) -> SpaceRetry {
        if self.pending.load(Ordering::SeqCst) > 0 {
            if mutants::on(Mutant::FalseNoSpace) {
                return SpaceRetry::No;
            }
            return SpaceRetry::AfterRemoval;
        }
        let before = std::mem::replace(ended, self.ended.load(Ordering::SeqCst));
        if *ended == before { SpaceRetry::No } else { SpaceRetry::Now }
    }

    /// Queues a request until a removal ends. Returns the request if none is pending any more.
    pub fn wait(&self, ram: &Ram, job: Job) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        // A thread that ends a removal takes this list afterwards.
        if self.pending.load(Ordering::SeqCst) == 0 {
            return Some(job);
        }
        waiting.push((ram.clone(), job));
        None
    }
}
