//! Page counts by kind for a range of a device.

use std::ops::Range;

use super::chain::{Role, View};
use super::parent::StagedSource;
use super::{Inner, Ram, next_multiple};
use freestone_core::pin::{self, Pin};
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};

/// Number of pages of each kind; see [`Ram::contents`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contents {
    /// Compressed pages in memory.
    pub compressed: u64,
    /// Incompressible pages in memory.
    pub huge: u64,
    /// Pages that repeat a pattern other than zero.
    pub same: u64,
    /// Zero pages of the device itself: written, or hiding the parent's content.
    pub zero: u64,
    /// Pages on the backing device, or being read from there.
    pub spilled: u64,
    /// Pages in the device's keep file that are not in memory yet.
    pub unloaded: u64,
    /// Pages read from the base of a fork, or from the parent of a snapshot's origin.
    pub below: u64,
    /// Holes: pages stored nowhere, which read as zeroes.
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
    /// Returns the kind; `None` if the page is read from the parent.
    fn of(word: Word) -> Option<Self> {
        Some(match word.kind() {
            Kind::Empty | Kind::Base => return None,
            Kind::Same if word.location() == 0 => Self::Zero,
            Kind::Same | Kind::Pattern => Self::Same,
            Kind::Compressed => Self::Compressed,
            Kind::Huge => Self::Huge,
            Kind::Spilled | Kind::InFlight => Self::Spilled,
        })
    }
}

impl Ram {
    /// Adds the pages of `[first, end)` to `contents`: those of at most one leaf (512 pages), or a
    /// run of pages without a slot. Returns the page to continue at; `end` or the end of the device
    /// if nothing is left.
    ///
    /// Each page is counted as of some moment during the call. The call holds no lock on return, so
    /// a caller can pause or stop between two calls. Never waits for a disk: the parent's extents
    /// are not read.
    pub fn contents(&self, first: u64, end: u64, contents: &mut Contents) -> u64 {
        let end = end.min(self.0.slots());
        if first >= end {
            return end;
        }
        // Taken before the slots are read: a page loaded meanwhile is found in the file.
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

/// Appends a run, merging it with the last.
fn push(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        _ if run.is_empty() => {}
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs.push(run),
    }
}

fn own_kind(pin: &Pin<'_>, view: &View, slot: u64) -> Option<OwnKind> {
    match view.role {
        // No lock: the word is only read.
        Role::Live { .. } => view.layer.table().leaf(slot).and_then(|leaf| OwnKind::of(leaf.peek(slot))),
        Role::Snapshot { .. } => {
            view.with_page(pin, slot, |found| found.and_then(|(_, guard)| OwnKind::of(guard.word())))
        }
    }
}

impl Inner {
    /// Counts pages without a slot in the device.
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
