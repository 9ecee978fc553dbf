//! Ages and idle marks of pages.

use std::time::Duration;

use super::Ram;
use super::layer::Layer;
use super::page_search::is_spillable;
use super::pages::Pages;
use crate::clock::{self, now_ms};
use freestone_core::PAGE_BYTES;
use freestone_core::slot::{LEAF_SLOTS, Word};

/// Slots per second of an epoch's minimum length.
const AGED_SLOTS_PER_SECOND: u64 = 1 << 20;

/// Selection of pages to mark idle.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Idle {
    /// All pages in memory.
    All,
    /// Pages not accessed for this duration; all others lose the mark. Ages are exact to a second
    /// at first, later to about a third. A page never counts as older than it is.
    OlderThan(Duration),
}

impl Ram {
    /// Marks pages idle. Returns the number of pages with the mark.
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
    layer.for_each_leaf(|start, leaf| {
        for slot in start..start + LEAF_SLOTS {
            if !is_spillable(leaf.peek(slot)) {
                continue;
            }
            let guard = leaf.lock(slot);
            let word = guard.word();
            // The age of a picked page is unknown: it keeps its mark.
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

/// Opens a new epoch about once a second; less often on families with much content, so that merging
/// epochs stays cheap.
pub(super) fn tick_ages(pages: &Pages) {
    let leaves = pages.common.nodes.bytes() / PAGE_BYTES as u64;
    let long_ms = 1000 * (leaves * LEAF_SLOTS / AGED_SLOTS_PER_SECOND).max(1);
    if now_ms().saturating_sub(pages.ages.opened_ms()) + 100 >= long_ms {
        pages.ages.advance(now_ms());
        renumber_ages(pages);
    }
}

/// Merges old epochs if their numbers run short.
pub(super) fn renumber_ages(pages: &Pages) {
    let Some(renumbering) = pages.ages.merge() else { return };
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
    pages.ages.merged(&renumbering);
}
