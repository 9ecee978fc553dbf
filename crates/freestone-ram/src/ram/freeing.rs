//! Freeing of retired layers leaf by leaf, by threads that need memory or by the
//! [cleaner](super::retire), and wake-up of writes that wait for a removal.

use super::pages::Pages;
use super::removals::Step;
use freestone_core::slot::chain;

impl Pages {
    /// Frees one leaf of the retired layers.
    pub(super) fn free_leaf_of_retired(&self) -> Step {
        let (layer, start) = match self.retiring.take_leaf() {
            Ok(taken) => taken,
            Err(step) => return step,
        };
        let (freed, left) = chain::free_leaf(self, &layer, start);
        if self.retiring.finish_leaf(&layer, start, left) {
            self.layers.remove(layer.id());
        }
        if freed || !left { Step::Freed } else { Step::Later }
    }

    pub(super) fn is_freeing(&self) -> bool {
        !self.retiring.is_empty()
    }

    /// Frees one leaf of the retired layers, or yields while other threads do. Returns false if
    /// nothing is left, except pages in flight from the backing device.
    pub(super) fn free_leaf_or_yield(&self) -> bool {
        match self.free_leaf_of_retired() {
            Step::Freed => true,
            Step::Later if self.retiring.is_busy() => {
                freestone_core::sync::thread::yield_now();
                true
            }
            Step::Later | Step::Nothing => false,
        }
    }

    /// Makes writes without memory wait until [`end_removal`](Self::end_removal).
    pub(super) fn begin_removal(&self) {
        self.removals.begin();
    }

    /// Ends a removal: its layers are retired, or hold no memory that a waiting write could get.
    pub(super) fn end_removal(&self) {
        for (ram, job) in self.removals.end() {
            self.keeper.resume(ram, job);
        }
        self.wake_space_waiters();
    }
}
