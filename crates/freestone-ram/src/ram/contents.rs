//! What the pages of a range are, in counts: for who draws a map of a device.

use std::ops::Range;

use super::chain::{Role, View};
use super::parent::Here;
use super::{Inner, Ram, next_multiple};
use freestone_core::pin::{self, Pin};
use freestone_core::slot::{Kind, LEAF_SLOTS, Word};

/// How many pages of a range are what; see [`Ram::contents`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Contents {
    /// Compressed, in memory.
    pub compressed: u64,
    /// In memory as they are, because they do not compress.
    pub huge: u64,
    /// They repeat a pattern that is not zero.
    pub same: u64,
    /// Zeroes that the device holds itself: they were written, or hide what lies below.
    pub zero: u64,
    /// On the backing device, or on their way from there.
    pub spilled: u64,
    /// In the file that keeps the device, and not in memory yet.
    pub unloaded: u64,
    /// What a fork's base, or the origin of a snapshot's disk, has there.
    pub below: u64,
    /// Held nowhere: they read as zeroes.
    pub hole: u64,
}

impl Contents {
    fn add(&mut self, kind: Held) {
        *match kind {
            Held::Compressed => &mut self.compressed,
            Held::Huge => &mut self.huge,
            Held::Same => &mut self.same,
            Held::Zero => &mut self.zero,
            Held::Spilled => &mut self.spilled,
        } += 1;
    }
}

/// What the device holds itself.
#[derive(Clone, Copy)]
enum Held {
    Compressed,
    Huge,
    Same,
    Zero,
    Spilled,
}

impl Held {
    /// `None`: nothing, the page is what lies below.
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
    /// Adds to `contents` what the pages from `first` on and before `end` are: those of one leaf at
    /// most (512 pages), or as many as lie together where the device holds nothing. Returns the page
    /// where it goes on; `end`, or the end of the device if that comes first, where nothing is left.
    ///
    /// Each page is as at some moment of the call. Nothing is held when it returns, so that who
    /// wants to know of a whole device can rest or give up between two calls. Never waits for a
    /// disk: what lies below is not asked.
    pub fn contents(&self, first: u64, end: u64, contents: &mut Contents) -> u64 {
        let end = end.min(self.0.slots());
        if first >= end {
            return end;
        }
        // What is loaded meanwhile is in the file all the same.
        let here = self.0.parent.here();
        let mut below = Vec::new();
        let next = pin::pinned(|pin| {
            let view = self.0.view.load(pin);
            let run = view.run_of_parent(pin, first, end);
            let stop = next_multiple(first, LEAF_SLOTS).min(end);
            push(&mut below, first..first + run);
            let mut slot = first + run;
            while slot < stop {
                match held(pin, view, slot) {
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

/// A run behind others.
fn push(runs: &mut Vec<Range<u64>>, run: Range<u64>) {
    match runs.last_mut() {
        _ if run.is_empty() => {}
        Some(last) if last.end == run.start => last.end = run.end,
        _ => runs.push(run),
    }
}

fn held(pin: &Pin<'_>, view: &View, slot: u64) -> Option<Held> {
    match view.role {
        // Only looked at: no lock is needed for that.
        Role::Live { .. } => view.layer.table().leaf(slot).and_then(|leaf| Held::of(leaf.peek(slot))),
        Role::Snapshot { .. } => {
            view.with_page(pin, slot, |found| found.and_then(|(_, guard)| Held::of(guard.word())))
        }
    }
}

impl Inner {
    /// What pages are that no slot of the device holds.
    fn add_below(&self, here: Option<&Here>, run: Range<u64>, contents: &mut Contents) {
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
