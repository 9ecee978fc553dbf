//! Recompression of pages in memory with a secondary algorithm, by the kernel's rules:
//!
//! * A run uses one priority. It skips objects below the threshold, pages that are written back,
//!   same-filled or marked incompressible, and objects of the same or a higher priority.
//! * Largest objects come first.
//! * The new object must be in a smaller size class, and below the threshold. A failure at the
//!   highest configured priority marks the page incompressible until it is rewritten.
//! * An attempt clears the idle mark but does not change the page's age.
//!
//! Differences from the kernel: no slot is locked during compression, so requests are not delayed;
//! a page accessed meanwhile stays as it is. The memory limit is enforced. The new object is stored
//! before the old one is freed, so no failure loses a page. If the limit leaves no space for it,
//! the pool is compacted, as freed objects are scattered. Pages still refused are retried at the
//! end, if anything was freed since (the kernel exceeds the limit).
//!
//! A run is one pass over the pages present at its start, and ends regardless of concurrent writes.
//!
//! Lock order: `background` for the whole run; under it the order of requests.

use std::time::Duration;

use thiserror::Error;

use super::layer::Layer;
use super::page_search::{Sizes, is_spillable};
use super::pages::Pages;
use super::recompress_space::{Attempt, RecompressSpace};
use super::{PAGE, Ram};
use crate::codec::{Algorithm, Codecs, PRIORITIES, Scratch, Streams};
use crate::pool::class::class_of;
use freestone_core::PAGE_BYTES;
use freestone_core::device;
use freestone_core::slot::{Kind, Word};
use freestone_core::sync::{Arc, MutexGuard};

/// Pages between two checks whether requests wait for memory, and the pause for them.
const GIVE_WAY_PAGES: u64 = 64;
const GIVE_WAY: Duration = Duration::from_millis(1);
/// Maximum refused pages kept for a retry: 512 KiB of memory.
const REFUSED_MAX: usize = 1 << 16;
/// Refused pages are retried while at least 1/`RETRY_SHARE` of them succeeded in the last round.
const RETRY_SHARE: u64 = 64;
/// Tag of slots picked by recompression. `background` excludes evictions and their tags.
const TAG: u8 = 0;

/// Selection and target of a recompression run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recompress {
    /// Restricts the run to pages of this kind.
    pub kind: Option<RecompressKind>,
    /// Minimum object size in bytes, which the new object must be below; 0 means no threshold. Must be
    /// below [`Scratch::BYTES`].
    pub threshold: u32,
    /// Maximum pages to try, successful or not.
    pub max_pages: Option<u64>,
    /// Secondary algorithm; the lowest priority that has it.
    pub algo: Option<Algorithm>,
    /// Priority of the secondary algorithm, 1 to 3; 1 if `algo` is not set either.
    pub priority: Option<u8>,
}

/// Selection of pages: the kernel's `type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecompressKind {
    /// Pages marked idle.
    Idle,
    /// Pages stored uncompressed.
    Huge,
    /// Pages that are both huge and idle.
    HugeIdle,
}

/// Result of a recompression run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recompressed {
    /// Pages that were compressed, except those that found no space.
    pub tried: u64,
    /// Pages now stored in a smaller object.
    pub shrunk: u64,
    /// Pages that were marked incompressible.
    pub incompressible: u64,
    /// Bytes saved by smaller objects. Whole pages return to the system as spans become empty; the
    /// rest after a compaction.
    pub saved_bytes: u64,
}

/// Reasons to refuse a run (the first five, EINVAL in the kernel; nothing is changed) or to end it
/// early (pages already recompressed stay so).
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum RecompressError {
    /// The priority is not 1 to 3.
    #[error("priority={0} does not exist: secondary algorithms have 1 to {PRIORITIES}")]
    NoPriority(u8),
    /// The priority has no algorithm.
    #[error("priority={0} has no algorithm; recomp_algorithm sets one")]
    NotConfigured(u8),
    /// No priority has the algorithm.
    #[error("algo={0} is not a secondary algorithm of this disk; recomp_algorithm sets one")]
    NoAlgorithm(Algorithm),
    /// The algorithm and the priority disagree.
    #[error("algo={algo} does not match priority={priority}, which is {configured}")]
    Mismatch {
        /// Requested algorithm.
        algo: Algorithm,
        /// Requested priority.
        priority: u8,
        /// Algorithm of that priority.
        configured: Algorithm,
    },
    /// The threshold is above any object size.
    #[error("threshold={0} is beyond the largest compressed object; it must be below {line}", line = Scratch::BYTES)]
    Threshold(u32),
    /// The memory limit leaves no space for the new objects (ENOSPC; ENOMEM in the kernel).
    #[error("mem_limit leaves no space to store the smaller objects; raise it temporarily")]
    NoSpace,
    /// The machine has no memory (ENOMEM).
    #[error("out of memory")]
    NoMemory,
    /// An object is damaged (EIO).
    #[error("an object in memory cannot be decompressed")]
    Media,
    /// The caller cancelled the run (ECANCELED).
    #[error("the operation was cancelled")]
    Cancelled,
}

impl RecompressError {
    /// Returns the errno with which a write to the kernel's `recompress` file fails.
    pub const fn errno(&self) -> i32 {
        match self {
            Self::NoPriority(_)
            | Self::NotConfigured(_)
            | Self::NoAlgorithm(_)
            | Self::Mismatch { .. }
            | Self::Threshold(_) => libc::EINVAL,
            Self::NoSpace => libc::ENOSPC,
            Self::NoMemory => libc::ENOMEM,
            Self::Media => libc::EIO,
            Self::Cancelled => libc::ECANCELED,
        }
    }
}

impl From<device::Error> for RecompressError {
    fn from(error: device::Error) -> Self {
        match error {
            device::Error::NoSpace => Self::NoSpace,
            device::Error::NoMemory => Self::NoMemory,
            _ => Self::Media,
        }
    }
}

impl Recompress {
    /// Returns the selected priority and its streams.
    fn target<'c>(&self, codecs: &'c Codecs) -> Result<(u8, &'c Streams), RecompressError> {
        if self.threshold as usize >= Scratch::BYTES {
            return Err(RecompressError::Threshold(self.threshold));
        }
        let priority = match (self.priority, self.algo) {
            (Some(priority), _) => priority,
            (None, Some(algo)) => codecs
                .secondary()
                .find(|(_, streams)| streams.algorithm() == algo)
                .map(|(priority, _)| priority as u8)
                .ok_or(RecompressError::NoAlgorithm(algo))?,
            (None, None) => 1,
        };
        if !(1..=PRIORITIES as u8).contains(&priority) {
            return Err(RecompressError::NoPriority(priority));
        }
        let streams = codecs.get(priority.into()).ok_or(RecompressError::NotConfigured(priority))?;
        match (self.algo, streams.algorithm()) {
            (Some(algo), configured) if algo != configured => {
                Err(RecompressError::Mismatch { algo, priority, configured })
            }
            _ => Ok((priority, streams)),
        }
    }

    fn wants(&self, word: Word) -> bool {
        match self.kind {
            None => true,
            Some(RecompressKind::Idle) => word.is_idle(),
            Some(RecompressKind::Huge) => word.kind() == Kind::Huge,
            Some(RecompressKind::HugeIdle) => word.kind() == Kind::Huge && word.is_idle(),
        }
    }
}

impl Ram {
    /// Recompresses pages with a secondary algorithm; see the kernel's `recompress`. Requests
    /// continue meanwhile; other runs and writebacks wait.
    ///
    /// # Errors
    /// Fails if the selection does not fit the disk, or if the run ends early.
    pub fn recompress(
        &self,
        selection: &Recompress,
    ) -> Result<Recompressed, (Recompressed, RecompressError)> {
        self.recompress_watched(selection, &mut |_, _| true)
    }

    /// As [`recompress`](Self::recompress), with progress. `watch` receives the bytes of the pages
    /// visited and of all selected pages, also while waiting for another run. The run ends when
    /// `watch` returns false.
    ///
    /// # Errors
    /// As [`recompress`](Self::recompress), and [`RecompressError::Cancelled`].
    pub fn recompress_watched(
        &self,
        selection: &Recompress,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Recompressed, (Recompressed, RecompressError)> {
        let (family, pages, layer) = (&*self.0.family, &*self.0.pages, self.0.layer());
        let target = selection.target(&pages.codecs);
        let fail = |error| (Recompressed::default(), error);
        let (priority, streams) = target.map_err(fail)?;
        let turn = pages.lock_background(&mut || !watch(0, 0));
        let turn = turn.ok_or(fail(RecompressError::Cancelled))?;
        let target = Target {
            priority,
            streams,
            is_last: priority == highest_priority(&pages.codecs, family.auto.is_on()),
            threshold: selection.threshold as usize,
            clears_idle: true,
        };
        let wants = |word: Word| target.may_shrink(word) && selection.wants(word);
        let mut run = Run {
            pages,
            layer,
            last_slot: self.0.slots() - 1,
            target: &target,
            max_pages: selection.max_pages.unwrap_or(u64::MAX),
            done: Recompressed::default(),
            room: RecompressSpace::default(),
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
}

pub(super) struct Target<'a> {
    pub priority: u8,
    pub streams: &'a Streams,
    /// Whether a failure marks the page incompressible.
    pub is_last: bool,
    pub threshold: usize,
    pub clears_idle: bool,
}

impl Target<'_> {
    /// Returns true if the rules allow an attempt on a slot with this word.
    pub fn may_shrink(&self, word: Word) -> bool {
        is_spillable(word)
            && word.algorithm() < usize::from(self.priority)
            && word.stored_bytes() >= self.threshold
            && !word.is_incompressible()
            && !word.is_picked()
    }
}

// ---- a run over all pages, largest first --------------------------------------------------------

struct Run<'a> {
    pages: &'a Pages,
    /// The run ends if a reset replaces this layer.
    layer: Arc<Layer>,
    last_slot: u64,
    target: &'a Target<'a>,
    max_pages: u64,
    done: Recompressed,
    room: RecompressSpace,
    /// Pages that found no space, to be retried.
    refused: Vec<u64>,
    /// Whether some refused pages were given up.
    gave_up: bool,
    turn: Option<MutexGuard<'a, ()>>,
    visited: u64,
    /// Number of pages that the run may visit.
    all: u64,
    watch: &'a mut dyn FnMut(u64, u64) -> bool,
}

impl Run<'_> {
    /// Reports progress now and then, and lets an eviction run if requests wait for memory. Returns
    /// false if the run was cancelled.
    fn give_way(&mut self) -> bool {
        let (visited, all) = (self.visited.min(self.all) * PAGE, self.all * PAGE);
        self.visited += 1;
        if !(self.visited - 1).is_multiple_of(GIVE_WAY_PAGES) {
            return true;
        }
        if self.visited > 1 && self.pages.keeper.is_wanted() {
            self.turn = None;
            self.pages.memory_freed();
            freestone_core::sync::thread::sleep(GIVE_WAY);
            self.turn = self.pages.lock_background(&mut || !(self.watch)(visited, all));
            return self.turn.is_some();
        }
        (self.watch)(visited, all)
    }

    /// Makes one pass over the present pages, and retries those that found no space.
    fn run_pass(&mut self, wants: &impl Fn(Word) -> bool) -> Result<(), RecompressError> {
        let (layer, everything) = (Arc::clone(&self.layer), [0..=self.last_slot]);
        let mut sizes = Sizes::default();
        // If the slots are not all listed at once, later lists include new pages: limit the
        // attempts to the present number.
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
            if attempt == Some(Attempt::NoRoom) {
                self.refused.push(slot);
                if self.room.is_exhausted() || self.refused.len() >= REFUSED_MAX {
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

    /// Retries refused pages in rounds while that succeeds for enough of them, and gives up the
    /// rest. The list only shrinks, so this ends regardless of concurrent writes. Returns true if
    /// the run continues.
    fn retry_refused(
        &mut self,
        wants: &impl Fn(Word) -> bool,
        outcome: &mut Result<(), RecompressError>,
    ) -> bool {
        let at_first = self.done.shrunk;
        let mut refused = std::mem::take(&mut self.refused);
        while !refused.is_empty() {
            self.room.reset_refusals();
            let (before, asked) = (self.done.shrunk, refused.len() as u64);
            let mut again = Vec::new();
            for slot in refused {
                match self.try_next(slot, wants, outcome) {
                    None => return false,
                    Some(Attempt::NoRoom) => again.push(slot),
                    Some(_) => {}
                }
            }
            refused = again;
            if (self.done.shrunk - before) * RETRY_SHARE < asked {
                self.gave_up |= !refused.is_empty();
                self.room.reset_refusals();
                return refused.is_empty() || self.done.shrunk > at_first;
            }
        }
        true
    }

    /// Tries a page; `None` if the run must end.
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
        if attempt == Attempt::NoRoom && self.room.is_worth_compacting() && self.pages.compact() > 0 {
            attempt = self.target.recompress(self.pages, &self.layer, slot, wants)?;
        }
        self.done.count(attempt);
        self.room.count(attempt);
        Ok(attempt)
    }
}

impl Recompressed {
    pub(super) fn count(&mut self, attempt: Attempt) {
        self.tried += u64::from(!matches!(attempt, Attempt::Skipped | Attempt::NoRoom | Attempt::Reset));
        match attempt {
            Attempt::Shrunk { from, to } => {
                self.shrunk += 1;
                self.saved_bytes += (from - to) as u64;
            }
            Attempt::FailedForGood => self.incompressible += 1,
            Attempt::Skipped | Attempt::Failed | Attempt::NoRoom | Attempt::Reset => {}
        }
    }
}

// ---- one page -----------------------------------------------------------------------------------

/// Returns the highest priority that a family has, or will have in the automatic mode.
fn highest_priority(codecs: &Codecs, is_auto: bool) -> u8 {
    match codecs.secondary().next_back() {
        _ if is_auto => PRIORITIES as u8,
        Some((priority, _)) => priority as u8,
        None => 0,
    }
}

impl Target<'_> {
    /// Recompresses the page of a slot if its word is still wanted. Needs `background`.
    ///
    /// The slot is locked only briefly, to copy its object and to pick the slot. A write or discard
    /// clears the mark, and the result is then dropped.
    /// dropped.
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
        // Publishes the new word if the page was not changed, and returns true then.
        let finish = |new: &dyn Fn(Word) -> Word| {
            let guard = leaf.lock(slot);
            let now = guard.word();
            let unchanged = now.is_picked_by(TAG)
                && (now.kind(), now.stored_bytes(), now.algorithm())
                    == (old.kind(), old.stored_bytes(), old.algorithm());
            if unchanged {
                let new = new(now.unpicked(old.age()));
                guard.publish(new);
                // Compaction may have moved the object: free that of the current word.
                if new.object() != now.object() {
                    pages.release(now);
                    layer.account(&pages.layers, now, new);
                }
            }
            unchanged
        };
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
                    // The page may be retried.
                    finish(&|word| word.with_idle(found.is_idle()));
                    return if error == device::Error::NoSpace { Ok(Attempt::NoRoom) } else { Err(error) };
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

#[cfg(test)]
#[path = "recompress_tests.rs"]
mod tests;
