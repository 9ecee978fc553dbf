//! Freeing of retired layers (old content of reset, rewound or removed devices), one slot table
//! leaf at a time. Threads that need memory and the [cleaner](crate::ram::device::retire) do it. Also wakes
//! writes that wait for a removal.

use super::pages::Pages;
use crate::ram::memory::retiring::Step;
use freestone_core::slot::chain;

impl Pages {
    /// Frees the objects of one leaf of the retired layers.
    pub(in crate::ram) fn free_leaf_of_retired(&self) -> Step {
        let (layer, start) = match self.retiring.take_leaf() {
            Ok(taken) => taken,
            Err(step) => return step,
        };
        let (freed, left) = chain::free_leaf(self, &layer, start);
        if self.retiring.finish_leaf(&layer, start, left) {
            self.layers.remove(layer.id());
            if let Some(store) = &self.store {
                store.free_copies_of(layer.id());
            }
        }
        if freed || !left { Step::Freed } else { Step::Later }
    }

    pub(in crate::ram) fn is_freeing(&self) -> bool {
        !self.retiring.is_empty()
    }

    /// Frees the objects of one leaf of the retired layers, or yields while other threads do so.
    /// Returns false if nothing is left to free, except pages in flight from the backing device.
    pub(in crate::ram) fn free_leaf_or_yield(&self) -> bool {
        match self.free_leaf_of_retired() {
            Step::Freed => true,
            Step::Later if self.retiring.is_busy() => {
                freestone_core::sync::thread::yield_now();
                true
            }
            Step::Later | Step::Nothing => false,
        }
    }

    /// Begins a removal: until [`end_removal`](Self::end_removal), writes that find no memory wait
    /// instead of failing.
    pub(in crate::ram) fn begin_removal(&self) {
        self.removals.begin();
    }

    /// Ends a removal and wakes writes that wait for removals. The removal's layers are retired, or
    /// hold no memory that a write could use.
    pub(in crate::ram) fn end_removal(&self) {
        for request in self.removals.end() {
            self.keeper.resume(request);
        }
        self.wake_space_waiters();
    }
}
