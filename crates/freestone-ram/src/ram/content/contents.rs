//! Counts of the pages of a device by kind.

use std::ops::Range;

use crate::ram::device::chain::{Role, View};
use crate::ram::device::parent::StagedSource;
use crate::ram::device::{Inner, Ram};
use crate::ram::geometry::next_multiple;
use freestone_core::pin::{self, Pin};
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};

/// Number of pages of each kind in a range of a device; see [`Ram::contents`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contents {
    /// Number of compressed pages in memory, alone or in groups, and of all pages that share an
    /// object.
    pub compressed: u64,
    /// Number of incompressible pages in memory.
    pub huge: u64,
    /// Number of pages that repeat a pattern other than zero.
    pub same: u64,
    /// Number of zero pages stored by the device itself: written as zeroes, or emptied over content
    /// of the parent.
    pub zero: u64,
    /// Number of pages on the backing device, or being read from there.
    pub spilled: u64,
    /// Number of pages in the file that the device is restored from, and not loaded yet.
    pub unloaded: u64,
    /// Number of pages that a fork reads from its base, or a snapshot from the parent of its
    /// origin.
    pub below: u64,
    /// Number of holes: pages that are stored nowhere and read as zeroes.
    pub hole: u64,
}

impl Contents {
    fn add(&mut self, kind: OwnKind) {
        *match kind {
            OwnKind::Compressed => &mut self.compressed,
            OwnKind::Huge => &mut self.huge,
            OwnKind::Same => &mut self.same,
            OwnKind::Zero => &mut self.zero,
            OwnKind::Spilled => &mut self.spilled,
        } += 1;
    }
}

/// Kind of a page in the device's own slots.
#[derive(Clone, Copy)]
enum OwnKind {
    Compressed,
    Huge,
    Same,
    Zero,
    Spilled,
}

impl OwnKind {
    /// Returns the kind of a slot's page; `None` if the slot is empty, so that the page is read
    /// from the parent.
    fn of(word: Word) -> Option<Self> {
        Some(match word.kind() {
            Kind::Empty | Kind::Base => return None,
            Kind::Same if word.location() == 0 => Self::Zero,
            Kind::Same | Kind::Pattern => Self::Same,
            Kind::Compressed | Kind::Grouped => Self::Compressed,
            Kind::Huge => Self::Huge,
            Kind::Spilled | Kind::InFlight => Self::Spilled,
        })
    }
}

impl Ram {
    /// Adds the counts of the pages `[first, end)` to `contents`. One call covers the rest of one
    /// leaf (at most 512 pages), or a longer run of pages without slots. Returns the page at which
    /// to continue, or the end of the range (clipped to the device) if it is complete.
    ///
    /// Each page is counted as of some moment during the call. No lock is held between calls, so a
    /// caller can pause or stop. Never waits for a disk: all pages within the parent's size count
    /// as `below`.
    pub fn contents(&self, first: u64, end: u64, contents: &mut Contents) -> u64 {
        let end = end.min(self.0.slots());
        if first >= end {
            return end;
        }
        // Get the file before reading the slots: a page loaded meanwhile is then still found in the
        // file.
        let here = self.0.parent.staged_source();
        let mut below = Vec::new();
        let next = pin::pinned(|pin| {
            let view = self.0.view.load(pin);
            let run = view.run_of_parent(pin, first, end);
            let stop = next_multiple(first, LEAF_SLOTS).min(end);
            push(&mut below, first..first + run);
            let mut slot = first + run;
            while slot < stop {
                match own_kind(pin, view, slot) {
                    Some(kind) => contents.add(kind),
                    None => push(&mut below, slot..slot + 1),
                }
                slot += 1;
            }
            slot
        });
        for run in below {
            self.0.add_below(here.as_ref(), run, contents);
        }
        next
    }
}

/// Appends a run of pages, merged with the last run if it continues that.
fn push(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        _ if run.is_empty() => {}
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs.push(run),
    }
}

fn own_kind(pin: &Pin<'_>, view: &View, slot: u64) -> Option<OwnKind> {
    match view.role {
        // No slot lock is needed: only the kind in the word is read, not the object.
        Role::Live { .. } => view.layer.table().leaf(slot).and_then(|leaf| OwnKind::of(leaf.peek(slot))),
        Role::Snapshot { .. } => {
            view.with_page(pin, slot, |found| found.and_then(|(_, guard)| OwnKind::of(guard.word())))
        }
    }
}

impl Inner {
    /// Counts a run of pages for which the device has no slot content. `here` is the file being
    /// loaded.
    fn add_below(&self, here: Option<&StagedSource>, run: Range<u64>, contents: &mut Contents) {
        let reached = self.parent.pages();
        let mut at = run.start;
        while at < run.end {
            let (pages, is_here) = here.map_or((u64::MAX, false), |here| here.source.run(at, run.end));
            let stop = at.saturating_add(pages.max(1)).min(run.end);
            if is_here {
                contents.unloaded += stop - at;
            } else {
                let below = reached.clamp(at, stop) - at;
                contents.below += below;
                contents.hole += stop - at - below;
            }
            at = stop;
        }
    }
}
