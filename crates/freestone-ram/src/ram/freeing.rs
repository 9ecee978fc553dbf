//! What nobody uses any more is freed leaf by leaf, by whoever needs the memory or by the
//! [cleaner](super::retire); and writes without memory learn of what is about to be.

use super::pages::Pages;
use super::removals::Step;
use freestone_core::slot::chain;

impl Pages {
    /// Frees a leaf of what is to be freed.
    pub(super) fn free_some(&self) -> Step {
        let (layer, start) = match self.retiring.take_leaf() {
            Ok(taken) => taken,
            Err(step) => return step,
        };
        let (freed, left) = chain::free_leaf(self, &layer, start);
        if self.retiring.done_with_leaf(&layer, start, left) {
            self.layers.remove(layer.id());
        }
        if freed || !left { Step::Freed } else { Step::Later }
    }

    /// Whether anything is still to be freed.
    pub(super) fn is_freeing(&self) -> bool {
        !self.retiring.is_empty()
    }

    /// Frees a leaf of what is to be freed, or lets others do so. False: there is nothing, but for
    /// what is on its way from the backing device.
    pub(super) fn help_to_free(&self) -> bool {
        match self.free_some() {
            Step::Freed => true,
            Step::Later if self.retiring.is_busy() => {
                freestone_core::sync::thread::yield_now();
                true
            }
            Step::Later | Step::Nothing => false,
        }
    }

    /// From now on writes that find no memory wait until [`removal_ended`](Self::removal_ended).
    pub(super) fn removal_begins(&self) {
        self.removals.begin();
    }

    /// What was removed is retired, or of no use to anybody who waits for memory.
    pub(super) fn removal_ended(&self) {
        for (ram, job) in self.removals.end() {
            self.keeper.resume(ram, job);
        }
        self.room_came();
    }
}
