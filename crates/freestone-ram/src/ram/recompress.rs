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

/// Number of pages between two checks whether requests wait for memory, and the pause in which an
/// eviction can run for these requests.
const GIVE_WAY_PAGES: u64 = 64;
const GIVE_WAY: Duration = Duration::from_millis(1);
/// Maximum number of pages that found no space and are listed for a retry. The list takes 512 KiB
/// of memory.
const REFUSED_MAX: usize = 1 << 16;
/// Pages that found no space are retried while at least 1/`RETRY_SHARE` of them succeeded in the
/// last round.
const RETRY_SHARE: u64 = 64;
/// Tag of slots picked by recompression. Batches of evictions use the same tags, but `background`
/// excludes evictions during a run.
const TAG: u8 = 0;

/// Selection and target of a recompression run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecompressOptions {
    /// Restricts the run to pages of this kind; `None` selects all pages.
    pub kind: Option<RecompressKind>,
    /// Size in bytes: smaller objects are skipped, and the new object must be smaller. 0 means no
    /// threshold. Must be below [`Scratch::BYTES`].
    pub threshold: u32,
    /// Maximum number of pages to compress, successfully or not; `None` means no maximum.
    pub max_pages: Option<u64>,
    /// Secondary algorithm. Without `priority`, the lowest priority with this algorithm is used.
    pub algo: Option<Algorithm>,
    /// Priority of the secondary algorithm, 1 to 3. If neither `priority` nor `algo` is set,
    /// priority 1 is used.
    pub priority: Option<u8>,
}

/// Kind of pages to recompress: the kernel's `type` parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecompressKind {
    /// Pages marked idle and not accessed since.
    Idle,
    /// Pages stored uncompressed.
    Huge,
    /// Pages that are both huge and idle.
    HugeIdle,
}

/// Result of a recompression run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RecompressReport {
    /// Number of pages that were compressed, except those whose new object found no space.
    pub tried: u64,
    /// Number of pages that are now stored in a smaller object.
    pub shrunk: u64,
    /// Number of pages that were marked incompressible.
    pub incompressible: u64,
    /// Bytes by which objects shrank. Pool memory returns to the system when spans become empty;
    /// the rest returns after a compaction.
    pub saved_bytes: u64,
}

/// Reasons to refuse a recompression run or to end it early. The first five (EINVAL) refuse the
/// run, and nothing is changed. After the others, pages already recompressed stay recompressed.
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum RecompressError {
    /// The priority is not in the range 1 to 3.
    #[error("priority={0} does not exist: secondary algorithms have 1 to {PRIORITIES}")]
    NoPriority(u8),
    /// No secondary algorithm is configured at this priority.
    #[error("priority={0} has no algorithm; recomp_algorithm sets one")]
    NotConfigured(u8),
    /// The algorithm is not configured at any priority.
    #[error("algo={0} is not a secondary algorithm of this disk; recomp_algorithm sets one")]
    NoAlgorithm(Algorithm),
    /// The priority has another algorithm than the requested one.
    #[error("algo={algo} does not match priority={priority}, which is {configured}")]
    Mismatch {
        /// Requested algorithm.
        algo: Algorithm,
        /// Requested priority.
        priority: u8,
        /// Algorithm of that priority.
        configured: Algorithm,
    },
    /// The threshold is at or above the size of the largest compressed object.
    #[error("threshold={0} is beyond the largest compressed object; it must be below {line}", line = Scratch::BYTES)]
    Threshold(u32),
    /// The memory limit leaves no space for the new objects (ENOSPC; ENOMEM in the kernel).
    #[error("mem_limit leaves no space to store the smaller objects; raise it temporarily")]
    NoSpace,
    /// The system has no memory left (ENOMEM).
    #[error("out of memory")]
    NoMemory,
    /// The object of a page in memory is damaged (EIO).
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

impl RecompressOptions {
    /// Returns the selected priority and the compression streams of its algorithm.
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
    /// Recompresses the selected pages with a secondary algorithm, as the kernel's `recompress`.
    /// Requests continue meanwhile; other recompression runs and writebacks of the family (devices
    /// that share a memory pool) wait.
    ///
    /// # Errors
    /// Fails if the selected algorithm is not configured, or if the run ends early. The error
    /// includes the report of the pages recompressed so far.
    pub fn recompress(
        &self,
        selection: &RecompressOptions,
    ) -> Result<RecompressReport, (RecompressReport, RecompressError)> {
        self.recompress_with_progress(selection, &mut |_, _| true)
    }

    /// As [`recompress`](Self::recompress), with progress. `watch` receives the bytes of the pages
    /// visited and of all selected pages. `watch` is called also while this run waits for another.
    /// The run ends when `watch` returns false.
    ///
    /// # Errors
    /// As [`recompress`](Self::recompress), and [`RecompressError::Cancelled`].
    pub fn recompress_with_progress(
        &self,
        selection: &RecompressOptions,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<RecompressReport, (RecompressReport, RecompressError)> {
        let (family, pages, layer) = (&*self.0.family, &*self.0.pages, self.0.layer());
        let target = selection.target(&pages.codecs);
        let fail = |error| (RecompressReport::default(), error);
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
}

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

impl RecompressReport {
    pub(super) fn count(&mut self, attempt: Attempt) {
        self.tried += u64::from(!matches!(attempt, Attempt::Skipped | Attempt::NoSpace | Attempt::Reset));
        match attempt {
            Attempt::Shrunk { from, to } => {
                self.shrunk += 1;
                self.saved_bytes += (from - to) as u64;
            }
            Attempt::FailedForGood => self.incompressible += 1,
            Attempt::Skipped | Attempt::Failed | Attempt::NoSpace | Attempt::Reset => {}
        }
    }
}

// ---- one page -----------------------------------------------------------------------------------

/// Returns the highest priority at which a family has an algorithm, or will have one with automatic
/// recompression.
fn highest_priority(codecs: &Codecs, is_auto: bool) -> u8 {
    match codecs.secondary().next_back() {
        _ if is_auto => PRIORITIES as u8,
        Some((priority, _)) => priority as u8,
        None => 0,
    }
}

impl Target<'_> {
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
        // Unpicks the slot and publishes the word that `new` returns, unless the page was changed
        // meanwhile. Returns true if the word was published.
        let finish = |new: &dyn Fn(Word) -> Word| {
            let guard = leaf.lock(slot);
            let now = guard.word();
            let unchanged = now.is_picked_by(TAG)
                && (now.kind(), now.stored_bytes(), now.algorithm())
                    == (old.kind(), old.stored_bytes(), old.algorithm());
            if unchanged {
                let new = new(now.unpicked(old.age()));
                guard.publish(new);
                // Compaction may have moved the old object: free the object of the current word.
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

#[cfg(test)]
#[path = "recompress_tests.rs"]
mod tests;
