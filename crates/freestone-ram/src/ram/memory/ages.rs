//! Ages of pages (time since the last access), and the kernel's idle marks.

use std::time::Duration;

use super::layer::Layer;
use super::page_search::is_spillable;
use super::pages::Pages;
use freestone_core::PAGE_BYTES;
use freestone_core::clock::{self, now_ms};
use freestone_core::slot::{LEAF_SLOTS, Word};

/// An epoch lasts at least one second per this number of slots, so that the scan of a merge stays
/// cheap.
const AGED_SLOTS_PER_SECOND: u64 = 1 << 20;

/// Selection of pages to mark idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdleSelection {
    /// All compressed and huge pages in memory.
    All,
    /// Pages not accessed for this duration; the mark of all others is cleared. Ages are exact to a
    /// second for recent accesses, and to about a third of the age for older ones. A page never
    /// counts as older than it is.
    OlderThan(Duration),
}

/// Marks pages of a layer idle. Returns the number of pages that have the mark afterwards.
pub(in crate::ram) fn mark_layer_idle(pages: &Pages, layer: &Layer, which: IdleSelection) -> u64 {
    let old = match which {
        IdleSelection::All => None,
        IdleSelection::OlderThan(age) => {
            let now = now_ms();
            pages.ages.advance(now);
            Some(pages.ages.untouched_since(now.saturating_sub(clock::millis(age))))
        }
    };
    let mut marked = 0;
    layer.for_each_leaf(|start, leaf| {
        for slot in start..start + LEAF_SLOTS {
            if !is_spillable(leaf.peek(slot)) {
                continue;
            }
            let guard = leaf.lock(slot);
            let word = guard.word();
            // The age of a page picked for eviction is unknown: its idle mark is not changed.
            let idle = match old {
                Some(_) if word.is_picked() => word.is_idle(),
                Some(old) => old[usize::from(word.age())],
                None => true,
            };
            if is_spillable(word) {
                marked += u64::from(idle);
                guard.publish(word.with_idle(idle));
            }
        }
    });
    marked
}

/// Opens a new epoch of page ages about once a second. A family (devices that share a memory pool)
/// with much content opens epochs less often, so that merging them stays cheap.
pub(in crate::ram) fn tick_ages(pages: &Pages) {
    let leaves = pages.common.nodes.bytes() / PAGE_BYTES as u64;
    let long_ms = 1000 * (leaves * LEAF_SLOTS / AGED_SLOTS_PER_SECOND).max(1);
    if now_ms().saturating_sub(pages.ages.opened_ms()) + 100 >= long_ms {
        pages.ages.advance(now_ms());
        renumber_ages(pages);
    }
}

/// Merges old epochs if few of the 63 epoch numbers are free, and renumbers the slots.
pub(in crate::ram) fn renumber_ages(pages: &Pages) {
    let Some(renumbering) = pages.ages.begin_merge() else { return };
    let changes = |word: Word| {
        is_spillable(word) && !word.is_picked() && renumbering[usize::from(word.age())] != word.age()
    };
    for layer in pages.layers.all() {
        layer.for_each_leaf(|start, leaf| {
            for slot in start..start + LEAF_SLOTS {
                if changes(leaf.peek(slot)) {
                    let guard = leaf.lock(slot);
                    let word = guard.word();
                    if changes(word) {
                        guard.publish(word.with_age(renumbering[usize::from(word.age())]));
                    }
                }
            }
        });
    }
    pages.ages.finish_merge(&renumbering);
}
