//! Layers (slot tables) that are being freed.

use std::collections::VecDeque;

use super::layer::Layer;
use freestone_core::slot::{LEAF_SLOTS, MAX_SLOTS};
use freestone_core::sync::{Arc, Mutex};

/// Layers that are being freed, by any number of threads. Lock order: held only to choose or finish
/// a leaf; no slot is locked meanwhile.
#[derive(Default)]
pub(in crate::ram) struct Retiring(Mutex<VecDeque<Draining>>);

struct Draining {
    layer: Arc<Layer>,
    next: u64,
    /// Number of threads that free leaves of this layer now.
    busy: u32,
    /// First slots of leaves to visit again, as a page was in flight from the backing device.
    revisit: Vec<u64>,
}

/// Result of freeing one leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ram) enum Step {
    Freed,
    /// Nothing was freed: other threads free the remaining pages, or these are in flight from the
    /// backing device.
    Later,
    Nothing,
}

impl Retiring {
    /// Queues a layer for freeing. No request can reach the layer any more.
    pub fn add(&self, layer: Arc<Layer>) {
        self.0.lock().push_back(Draining { layer, next: 0, busy: 0, revisit: Vec::new() });
    }

    /// Drops the queue, because the family's memory is about to be freed as a whole.
    pub fn clear(&self) {
        let all = std::mem::take(&mut *self.0.lock());
        drop(all);
    }

    /// Returns the layer and first slot of a leaf, which the caller must free. Without such a leaf
    /// returns [`Step::Later`] or [`Step::Nothing`].
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

    /// Ends the freeing of a leaf. `left`: pages in flight remain in the leaf. Returns true if the
    /// whole layer is freed.
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

    /// Returns true if a thread is freeing a leaf now.
    pub fn is_busy(&self) -> bool {
        self.0.lock().iter().any(|draining| draining.busy > 0)
    }

    pub fn bytes(&self) -> u64 {
        self.0.lock().iter().map(|draining| draining.layer.charged()).sum()
    }
}
