//! Ages and idle marks of a family's pages.

use std::time::Duration;

use super::Ram;
use super::candidates::is_spillable;
use super::layer::Layer;
use super::pages::Pages;
use crate::clock::{self, now_ms};
use freestone_core::PAGE_BYTES;
use freestone_core::slot::{LEAF_SLOTS, Word};

/// Slots that one second of an epoch's length stands for.
const AGED_SLOTS_PER_SECOND: u64 = 1 << 20;

/// Which pages are marked idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// All that are in memory.
    All,
    /// Those that nobody touched for so long; the mark is taken from all others. Ages are known to
    /// the second at first, and to about a third later on; a page is never taken for older than it
    /// is.
    OlderThan(Duration),
}

impl Ram {
    /// Marks pages idle. Returns how many have the mark now.
    pub fn idle(&self, which: Idle) -> u64 {
        mark_idle(&self.0.pages, &self.0.layer(), which)
    }
}

fn mark_idle(pages: &Pages, layer: &Layer, which: Idle) -> u64 {
    let old = match which {
        Idle::All => None,
        Idle::OlderThan(age) => {
            let now = now_ms();
            pages.ages.advance(now);
            Some(pages.ages.untouched_since(now.saturating_sub(clock::millis(age))))
        }
    };
    let mut marked = 0;
    layer.each_leaf(|start, leaf| {
        for slot in start..start + LEAF_SLOTS {
            if !is_spillable(leaf.peek(slot)) {
                continue;
            }
            let guard = leaf.lock(slot);
            let word = guard.word();
            // A picked page's age is not known: it keeps the mark that it has.
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

/// A second has passed: epochs are a second long, on families with much content longer, so that
/// merging them stays cheap.
pub(super) fn tick_ages(pages: &Pages) {
    let leaves = pages.common.nodes.bytes() / PAGE_BYTES as u64;
    let long_ms = 1000 * (leaves * LEAF_SLOTS / AGED_SLOTS_PER_SECOND).max(1);
    if now_ms().saturating_sub(pages.ages.opened_ms()) + 100 >= long_ms {
        pages.ages.advance(now_ms());
        renumber_ages(pages);
    }
}

/// Merges old epochs where their numbers run short.
pub(super) fn renumber_ages(pages: &Pages) {
    let Some(renumbering) = pages.ages.merge() else { return };
    let changes = |word: Word| {
        is_spillable(word) && !word.is_picked() && renumbering[usize::from(word.age())] != word.age()
    };
    for layer in pages.layers.all() {
        layer.each_leaf(|start, leaf| {
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
    pages.ages.merged(&renumbering);
}
