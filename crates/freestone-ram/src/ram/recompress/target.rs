//! Recompression of one page.

use super::space::Attempt;
use crate::codec::{Scratch, Streams};
use crate::pool::class::class_of;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::page_search::has_own_object;
use crate::ram::memory::pages::Pages;
use freestone_core::PAGE_BYTES;
use freestone_core::device;
use freestone_core::slot::{Kind, Leaf, Word};

/// Tag of slots picked by recompression. Batches of evictions use the same tags, but `background`
/// excludes evictions during a run.
pub(super) const TAG: u8 = 0;

/// Unpicks a slot that had the word `old` when it was picked, and publishes the word that `new`
/// returns, unless the page was changed meanwhile. Returns true if the word was published.
pub(super) fn finish_picked(
    pages: &Pages,
    layer: &Layer,
    leaf: Leaf<'_>,
    slot: u64,
    old: Word,
    new: &dyn Fn(Word) -> Word,
) -> bool {
    let guard = leaf.lock(slot);
    let now = guard.word();
    let unchanged = now.is_picked_by(TAG)
        && (now.kind(), now.stored_bytes(), now.algorithm())
            == (old.kind(), old.stored_bytes(), old.algorithm());
    if unchanged {
        let new = new(now.unpicked(old.age()));
        guard.publish(new);
        // Compaction may have moved the old object: free the object of the current word.
        if (new.kind(), new.object()) != (now.kind(), now.object()) {
            pages.release(now);
            layer.account(&pages.layers, now, new);
        }
    }
    unchanged
}

/// Algorithm and conditions of a recompression.
pub(super) struct Target<'a> {
    pub priority: u8,
    pub streams: &'a Streams,
    /// True if `priority` is the highest of the family: a page that does not shrink is then marked
    /// incompressible.
    pub is_last: bool,
    pub threshold: usize,
    pub clears_idle: bool,
}

impl Target<'_> {
    /// Returns true if the page of a slot with this word may be recompressed with this target.
    pub fn may_shrink(&self, word: Word) -> bool {
        has_own_object(word)
            && word.algorithm() < usize::from(self.priority)
            && word.stored_bytes() >= self.threshold
            && !word.is_incompressible()
            && !word.is_picked()
    }

    /// Recompresses the page of a slot if its word is still wanted. The caller must hold
    /// [`Pages::background`].
    ///
    /// The slot is locked only briefly, to copy its object and to pick the slot. A write or discard
    /// clears the mark; the new object is then dropped.
    pub fn recompress(
        &self,
        pages: &Pages,
        layer: &Layer,
        slot: u64,
        wants: &impl Fn(Word) -> bool,
    ) -> device::Result<Attempt> {
        if layer.is_retired() {
            return Ok(Attempt::Reset);
        }
        let Some(leaf) = layer.table().leaf(slot) else { return Ok(Attempt::Skipped) };
        let mut copy = [0; PAGE_BYTES];
        let guard = leaf.lock(slot);
        let found = guard.word();
        if !wants(found) {
            return Ok(Attempt::Skipped);
        }
        let object = &mut copy[..found.stored_bytes()];
        object.copy_from_slice(pages.pool.object(&guard));
        let old = found.with_idle(found.is_idle() && !self.clears_idle);
        guard.publish(old.picked(TAG));
        let finish = |new: &dyn Fn(Word) -> Word| finish_picked(pages, layer, leaf, slot, old, new);
        let mut page = [0; PAGE_BYTES];
        let page = if old.kind() == Kind::Huge {
            &copy
        } else if let Err(error) = pages.codecs.decompress(old.algorithm(), object, &mut page) {
            finish(&|word| word);
            return Err(error);
        } else {
            &page
        };
        let mut scratch = Scratch::new();
        let smaller = self.streams.compress(page, &mut scratch).filter(|new| {
            class_of(new.len()) < class_of(old.stored_bytes())
                && (self.threshold == 0 || new.len() < self.threshold)
        });
        let Some(new) = smaller else {
            let fails = |word: Word| if self.is_last { word.with_incompressible() } else { word };
            let marked = finish(&fails) && self.is_last;
            return Ok(if marked { Attempt::FailedForGood } else { Attempt::Failed });
        };
        let location =
            match pages.pool.store(new, layer.owner(slot), pages.layers.pages_reserved_for_others(layer)) {
                Ok(location) => location,
                Err(error) => {
                    // Keep the idle mark: the page may be retried.
                    finish(&|word| word.with_idle(found.is_idle()));
                    return if error == device::Error::NoSpace { Ok(Attempt::NoSpace) } else { Err(error) };
                }
            };
        let stored = |word: Word| {
            Word::compressed(location, new.len() as u32, self.priority)
                .with_age(word.age())
                .with_idle(word.is_idle())
        };
        if finish(&stored) {
            Ok(Attempt::Shrunk { from: old.stored_bytes(), to: new.len() })
        } else {
            pages.pool.free(location);
            Ok(Attempt::Failed)
        }
    }
}
