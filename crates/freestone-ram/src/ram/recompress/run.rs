//! Recompression of pages in memory with a secondary algorithm, by the kernel's rules:
//!
//! * A run uses one secondary algorithm, given by its priority. The run skips objects below the
//!   threshold, pages that are written back, same-filled or marked incompressible, and objects of
//!   the same or a higher priority.
//! * Largest objects come first.
//! * The new object must be in a smaller size class, and below the threshold. A failure at the
//!   highest configured priority marks the page incompressible until it is rewritten.
//! * An attempt clears the idle mark but does not change the page's age.
//!
//! Differences from the kernel: no slot is locked during compression, so requests are not delayed;
//! a page accessed meanwhile stays as it is. The memory limit is enforced. The new object is stored
//! before the old one is freed, so no failure loses a page. If the memory limit leaves no space for
//! the new object, the pool is compacted, as freed objects are scattered. Pages that still find no
//! space are retried at the end (the kernel exceeds the limit instead).
//!
//! A run is one pass over the pages present at its start, and ends regardless of concurrent writes.
//!
//! Lock order: [`Pages::background`] for the whole run, then the locks of the request path.

use std::time::Duration;

use super::options::{RecompressError, RecompressOptions, RecompressReport};
use super::space::{Attempt, RecompressSpace};
use super::target::Target;
use crate::codec::{Codecs, PRIORITIES};
use crate::ram::geometry::PAGE;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::page_search::Sizes;
use crate::ram::memory::pages::Pages;
use freestone_core::device;
use freestone_core::slot::Word;
use freestone_core::sync::{Arc, MutexGuard};

/// Number of pages between two checks whether requests wait for memory, and the pause in which an
/// eviction can run for these requests.
const GIVE_WAY_PAGES: u64 = 64;
pub(super) const GIVE_WAY: Duration = Duration::from_millis(1);
/// Maximum number of pages that found no space and are listed for a retry. The list takes 512 KiB
/// of memory.
const REFUSED_MAX: usize = 1 << 16;
/// Pages that found no space are retried while at least 1/`RETRY_SHARE` of them succeeded in the
/// last round.
const RETRY_SHARE: u64 = 64;

/// Recompresses the selected pages of a device's `layer`, up to the slot that `last_slot` returns when
/// no other background work runs. `is_auto`: the family
/// recompresses automatically, too. See
/// [`Ram::recompress_with_progress`](crate::ram::Ram::recompress_with_progress).
pub(in crate::ram) fn run(
    pages: &Pages,
    layer: Arc<Layer>,
    last_slot: impl FnOnce() -> u64,
    is_auto: bool,
    selection: &RecompressOptions,
    watch: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<RecompressReport, (RecompressReport, RecompressError)> {
    let target = selection.target(&pages.codecs);
    let fail = |error| (RecompressReport::default(), error);
    let (priority, streams) = target.map_err(fail)?;
    let turn = pages.lock_background(&mut || !watch(0, 0));
    let turn = turn.ok_or(fail(RecompressError::Cancelled))?;
    let target = Target {
        priority,
        streams,
        is_last: priority == highest_priority(&pages.codecs, is_auto),
        threshold: selection.threshold as usize,
        clears_idle: true,
    };
    let wants = |word: Word| target.may_shrink(word) && selection.wants(word);
    let mut run = Run {
        pages,
        layer,
        last_slot: last_slot(),
        target: &target,
        max_pages: selection.max_pages.unwrap_or(u64::MAX),
        done: RecompressReport::default(),
        space: RecompressSpace::default(),
        refused: Vec::new(),
        gave_up: false,
        turn: Some(turn),
        visited: 0,
        all: 0,
        watch,
    };
    let outcome = run.run_pass(&wants);
    outcome.map(|()| run.done).map_err(|error| (run.done, error))
}

/// Returns the highest priority at which a family has an algorithm, or will have one with automatic
/// recompression.
fn highest_priority(codecs: &Codecs, is_auto: bool) -> u8 {
    match codecs.secondary().next_back() {
        _ if is_auto => PRIORITIES as u8,
        Some((priority, _)) => priority as u8,
        None => 0,
    }
}

struct Run<'a> {
    pages: &'a Pages,
    /// Layer of the device at the start. The run ends if a reset replaces this layer.
    layer: Arc<Layer>,
    last_slot: u64,
    target: &'a Target<'a>,
    max_pages: u64,
    done: RecompressReport,
    space: RecompressSpace,
    /// Slots of pages that found no space, to be retried.
    refused: Vec<u64>,
    /// True if some pages that found no space are not retried any more.
    gave_up: bool,
    turn: Option<MutexGuard<'a, ()>>,
    visited: u64,
    /// Number of pages that the run may visit, for progress reports.
    all: u64,
    watch: &'a mut dyn FnMut(u64, u64) -> bool,
}

impl Run<'_> {
    /// Reports progress every `GIVE_WAY_PAGES` pages, and lets an eviction run if requests wait for
    /// memory. Returns false if the run was cancelled.
    fn give_way(&mut self) -> bool {
        let (visited, all) = (self.visited.min(self.all) * PAGE, self.all * PAGE);
        self.visited += 1;
        if !(self.visited - 1).is_multiple_of(GIVE_WAY_PAGES) {
            return true;
        }
        if self.visited > 1 && self.pages.keeper.is_wanted() {
            self.turn = None;
            self.pages.wake_memory_waiters();
            freestone_core::sync::thread::sleep(GIVE_WAY);
            self.turn = self.pages.lock_background(&mut || !(self.watch)(visited, all));
            return self.turn.is_some();
        }
        (self.watch)(visited, all)
    }

    /// Makes one pass over the pages present at the start, and retries those that found no space.
    fn run_pass(&mut self, wants: &impl Fn(Word) -> bool) -> Result<(), RecompressError> {
        let (layer, everything) = (Arc::clone(&self.layer), [0..=self.last_slot]);
        let mut sizes = Sizes::default();
        // If not all slots fit in one list, later lists include pages written meanwhile: limit the
        // attempts to the number of pages present now.
        let mut left = 0_u64;
        layer.for_each_candidate(&everything, wants, |_, word| {
            sizes.count(word);
            left += 1;
            true
        });
        self.all = left.min(self.max_pages);
        let mut outcome = Ok(());
        layer.largest_first(&sizes, &everything, wants, |slot| {
            if left == 0 {
                return false;
            }
            let attempt = self.try_next(slot, wants, &mut outcome);
            left -= u64::from(!matches!(attempt, None | Some(Attempt::Skipped)));
            if attempt == Some(Attempt::NoSpace) {
                self.refused.push(slot);
                if self.space.is_exhausted() || self.refused.len() >= REFUSED_MAX {
                    return self.retry_refused(wants, &mut outcome);
                }
            }
            attempt.is_some()
        })?;
        if outcome.is_ok() && self.done.tried < self.max_pages && !layer.is_retired() {
            self.retry_refused(wants, &mut outcome);
        }
        match outcome {
            Ok(()) if self.gave_up && self.done.shrunk == 0 => Err(RecompressError::NoSpace),
            outcome => outcome,
        }
    }

    /// Retries pages that found no space, in rounds, while enough of them succeed, and gives up the
    /// rest. The list of pages only shrinks, so the rounds end regardless of concurrent writes.
    /// Returns false if the run must end.
    fn retry_refused(
        &mut self,
        wants: &impl Fn(Word) -> bool,
        outcome: &mut Result<(), RecompressError>,
    ) -> bool {
        let at_first = self.done.shrunk;
        let mut refused = std::mem::take(&mut self.refused);
        while !refused.is_empty() {
            self.space.reset_refusals();
            let (before, asked) = (self.done.shrunk, refused.len() as u64);
            let mut again = Vec::new();
            for slot in refused {
                match self.try_next(slot, wants, outcome) {
                    None => return false,
                    Some(Attempt::NoSpace) => again.push(slot),
                    Some(_) => {}
                }
            }
            refused = again;
            if (self.done.shrunk - before) * RETRY_SHARE < asked {
                self.gave_up |= !refused.is_empty();
                self.space.reset_refusals();
                return refused.is_empty() || self.done.shrunk > at_first;
            }
        }
        true
    }

    /// Tries to recompress the page of a slot. Returns `None` if the run must end; `outcome` then
    /// has the error, if any.
    fn try_next(
        &mut self,
        slot: u64,
        wants: &impl Fn(Word) -> bool,
        outcome: &mut Result<(), RecompressError>,
    ) -> Option<Attempt> {
        if self.done.tried >= self.max_pages {
            return None;
        }
        if !self.give_way() {
            *outcome = Err(RecompressError::Cancelled);
            return None;
        }
        match self.try_slot(slot, wants) {
            Ok(attempt) => Some(attempt).filter(|attempt| *attempt != Attempt::Reset),
            Err(error) => {
                *outcome = Err(error.into());
                None
            }
        }
    }

    fn try_slot(&mut self, slot: u64, wants: &impl Fn(Word) -> bool) -> device::Result<Attempt> {
        let mut attempt = self.target.recompress(self.pages, &self.layer, slot, wants)?;
        if attempt == Attempt::NoSpace && self.space.is_worth_compacting() && self.pages.compact() > 0 {
            attempt = self.target.recompress(self.pages, &self.layer, slot, wants)?;
        }
        self.done.count(attempt);
        self.space.count(attempt);
        Ok(attempt)
    }
}

#[cfg(test)]
#[path = "run_tests.rs"]
mod tests;
