//! Recompression: pages that are in memory are compressed again, with a secondary algorithm, by the
//! kernel's rules:
//!
//! * One priority a run. Objects below the threshold, pages that are spilled, same-filled or marked
//!   incompressible, and objects of the same or a higher priority are left alone.
//! * Largest objects first.
//! * It is worth it only where the new object falls in a lower class of the pool, and below the
//!   threshold. A failure at the highest priority there is marks the page incompressible: it is not
//!   tried again until it is rewritten.
//! * An attempt clears the idle mark, but a page does not become younger by it.
//!
//! What differs: no slot is locked while its page is compressed, so requests are not held up; a
//! page that is read or written meanwhile stays as it is. And the memory limit holds. The new
//! object is there before the old one goes, so that no failure loses a page; where the limit leaves
//! no room for it the pool is compacted, since what the run has freed is scattered, and pages that
//! find no room even so have another try at the end, if anything was freed since (the kernel
//! exceeds the limit).
//!
//! A run is one pass over what is there when it begins, and ends, whatever is written meanwhile.
//!
//! Lock order: `background` for the whole run; under it as requests do.

use std::time::Duration;

use thiserror::Error;

use super::candidates::{Sizes, is_spillable};
use super::layer::Layer;
use super::pages::Pages;
use super::room::{Attempt, Room};
use super::{PAGE, Ram};
use crate::codec::{Algorithm, Codecs, PRIORITIES, Scratch, Streams};
use crate::pool::class::class_of;
use freestone_core::PAGE_BYTES;
use freestone_core::device;
use freestone_core::slot::{Kind, Word};
use freestone_core::sync::{Arc, MutexGuard};

/// So often a run looks whether requests wait for memory, and so long it stands aside for them.
const GIVE_WAY_PAGES: u64 = 64;
const GIVE_WAY: Duration = Duration::from_millis(1);
/// Pages without room that are remembered for that, at most: 512 KiB of them.
const REFUSED_MAX: usize = 1 << 16;
/// They are tried again as long as this share of them found room the last time.
const AGAIN_SHARE: u64 = 64;
/// The tag of slots that recompression has picked. `background` keeps writeback and its tags out.
const TAG: u8 = 0;

/// What is to be recompressed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recompress {
    /// Pages of this kind only; `None` is all of them.
    pub kind: Option<RecompressKind>,
    /// Objects of at least so many bytes only; the result must be smaller. 0 is no threshold. Below
    /// [`Scratch::BYTES`].
    pub threshold: u32,
    /// Most pages to try, whether that succeeds or not.
    pub max_pages: Option<u64>,
    /// The secondary algorithm; where several priorities have it, the first.
    pub algo: Option<Algorithm>,
    /// The secondary algorithm's priority, 1 to 3. Without it and `algo` it is 1.
    pub priority: Option<u8>,
}

/// Which pages: the kernel's `type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RecompressKind {
    /// Marked idle.
    Idle,
    /// Stored uncompressed.
    Huge,
    /// Both.
    HugeIdle,
}

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Recompressed {
    /// Pages that were compressed to see what comes of it. Those that found no room are not
    /// counted.
    pub tried: u64,
    /// Pages that are stored smaller now.
    pub shrunk: u64,
    /// Pages that were marked incompressible.
    pub incompressible: u64,
    /// Bytes by which objects became smaller. Of that, whole pages go back to the system as spans
    /// get empty; the rest when the pool is compacted.
    pub saved_bytes: u64,
}

/// Why a run was refused (the first five, EINVAL in the kernel; nothing was done) or broke off
/// (what was done stays).
#[derive(Debug, Clone, Copy, Error, PartialEq, Eq)]
pub enum RecompressError {
    /// Not 1 to 3.
    #[error("priority={0} does not exist: secondary algorithms have 1 to {PRIORITIES}")]
    NoPriority(u8),
    /// Nothing configured there.
    #[error("priority={0} has no algorithm; recomp_algorithm sets one")]
    NotConfigured(u8),
    /// Configured nowhere.
    #[error("algo={0} is no secondary algorithm of this disk; recomp_algorithm sets one")]
    NoAlgorithm(Algorithm),
    /// They disagree.
    #[error("algo={algo} is not what priority={priority} has: that is {configured}")]
    Mismatch {
        /// What was asked for.
        algo: Algorithm,
        /// Where.
        priority: u8,
        /// What is there.
        configured: Algorithm,
    },
    /// No object can be so large.
    #[error("threshold={0} is beyond the largest compressed object; it must be below {line}", line = Scratch::BYTES)]
    Threshold(u32),
    /// The memory limit leaves no room for the new objects (ENOSPC; ENOMEM in the kernel).
    #[error("mem_limit leaves no room to store the smaller objects; raise it for a moment")]
    NoSpace,
    /// The machine has no memory (ENOMEM).
    #[error("out of memory")]
    NoMemory,
    /// An object is damaged (EIO).
    #[error("an object in memory cannot be decompressed")]
    Media,
    /// Who watches it had it stop (ECANCELED).
    #[error("it was cancelled")]
    Cancelled,
}

impl RecompressError {
    /// The Linux errno that a write to the kernel's `recompress` file fails with.
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
    /// The priority that is asked for, and its streams.
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
    /// Compresses pages again with a secondary algorithm; see the kernel's `recompress`. Takes as
    /// long as it takes; requests go on meanwhile, other runs and writeback wait.
    ///
    /// # Errors
    /// What was asked for does not fit the disk; or the run broke off.
    pub fn recompress(&self, what: &Recompress) -> Result<Recompressed, (Recompressed, RecompressError)> {
        self.recompress_watched(what, &mut |_, _| true)
    }

    /// The same, watched: `watch` is given the bytes of the pages that were visited and of all that
    /// may be, every now and then, also while this waits for another run. It ends when that says
    /// false.
    ///
    /// # Errors
    /// As [`recompress`](Self::recompress), and [`RecompressError::Cancelled`].
    pub fn recompress_watched(
        &self,
        what: &Recompress,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Recompressed, (Recompressed, RecompressError)> {
        let (family, pages, layer) = (&*self.0.family, &*self.0.pages, self.0.layer());
        let target = what.target(&pages.codecs);
        let fail = |error| (Recompressed::default(), error);
        let (priority, streams) = target.map_err(fail)?;
        let turn = pages.turn_unless(&mut || !watch(0, 0));
        let turn = turn.ok_or(fail(RecompressError::Cancelled))?;
        let target = Target {
            priority,
            streams,
            is_last: priority == highest_priority(&pages.codecs, family.auto.is_on()),
            threshold: what.threshold as usize,
            clears_idle: true,
        };
        let wants = |word: Word| target.may_shrink(word) && what.wants(word);
        let mut run = Run {
            pages,
            layer,
            last_slot: self.0.slots() - 1,
            target: &target,
            max_pages: what.max_pages.unwrap_or(u64::MAX),
            done: Recompressed::default(),
            room: Room::default(),
            refused: Vec::new(),
            gave_up: false,
            turn: Some(turn),
            visited: 0,
            all: 0,
            watch,
        };
        let outcome = run.work(&wants);
        outcome.map(|()| run.done).map_err(|error| (run.done, error))
    }
}

/// Where a run leads to.
pub(super) struct Target<'a> {
    pub priority: u8,
    pub streams: &'a Streams,
    /// What fails here is incompressible.
    pub is_last: bool,
    pub threshold: usize,
    pub clears_idle: bool,
}

impl Target<'_> {
    /// Whether the rules allow an attempt on a slot that holds this.
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
    /// The run ends where a reset puts another one in its place.
    layer: Arc<Layer>,
    last_slot: u64,
    target: &'a Target<'a>,
    max_pages: u64,
    done: Recompressed,
    room: Room,
    /// Pages that found no room, and are tried again.
    refused: Vec<u64>,
    /// Some of them never found any.
    gave_up: bool,
    /// [`Pages::background`].
    turn: Option<MutexGuard<'a, ()>>,
    visited: u64,
    /// Pages that it may visit.
    all: u64,
    watch: &'a mut dyn FnMut(u64, u64) -> bool,
}

impl Run<'_> {
    /// Now and then tells how far it is, and stands aside where requests wait for memory: spilling
    /// has its turn. False: it was cancelled.
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
            self.turn = self.pages.turn_unless(&mut || !(self.watch)(visited, all));
            return self.turn.is_some();
        }
        (self.watch)(visited, all)
    }

    /// One pass over what is there now; pages that find no room are tried again while others make
    /// some.
    fn work(&mut self, wants: &impl Fn(Word) -> bool) -> Result<(), RecompressError> {
        let (layer, everything) = (Arc::clone(&self.layer), [0..=self.last_slot]);
        let mut sizes = Sizes::default();
        // Where not all are listed at once, what was written since is listed as well: no more are
        // tried than there are now.
        let mut left = 0_u64;
        layer.each_candidate(&everything, wants, |_, word| {
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
            let attempt = self.next(slot, wants, &mut outcome);
            left -= u64::from(!matches!(attempt, None | Some(Attempt::Left)));
            if attempt == Some(Attempt::NoRoom) {
                self.refused.push(slot);
                if self.room.is_hopeless() || self.refused.len() >= REFUSED_MAX {
                    return self.try_again(wants, &mut outcome);
                }
            }
            attempt.is_some()
        })?;
        if outcome.is_ok() && self.done.tried < self.max_pages && !layer.is_retired() {
            self.try_again(wants, &mut outcome);
        }
        match outcome {
            Ok(()) if self.gave_up && self.done.shrunk == 0 => Err(RecompressError::NoSpace),
            outcome => outcome,
        }
    }

    /// Tries pages again that found no room, round by round, as long as that makes room for enough
    /// of the others; the rest is given up. Nothing is added to them meanwhile, so it ends however
    /// much is written. Whether the run goes on.
    fn try_again(
        &mut self,
        wants: &impl Fn(Word) -> bool,
        outcome: &mut Result<(), RecompressError>,
    ) -> bool {
        let at_first = self.done.shrunk;
        let mut refused = std::mem::take(&mut self.refused);
        while !refused.is_empty() {
            self.room.hope();
            let (before, asked) = (self.done.shrunk, refused.len() as u64);
            let mut again = Vec::new();
            for slot in refused {
                match self.next(slot, wants, outcome) {
                    None => return false,
                    Some(Attempt::NoRoom) => again.push(slot),
                    Some(_) => {}
                }
            }
            refused = again;
            if (self.done.shrunk - before) * AGAIN_SHARE < asked {
                self.gave_up |= !refused.is_empty();
                self.room.hope();
                return refused.is_empty() || self.done.shrunk > at_first;
            }
        }
        true
    }

    /// Tries a page; `None` where the run is to end.
    fn next(
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
        self.tried += u64::from(!matches!(attempt, Attempt::Left | Attempt::NoRoom | Attempt::Reset));
        match attempt {
            Attempt::Shrunk { from, to } => {
                self.shrunk += 1;
                self.saved_bytes += (from - to) as u64;
            }
            Attempt::FailedForGood => self.incompressible += 1,
            Attempt::Left | Attempt::Failed | Attempt::NoRoom | Attempt::Reset => {}
        }
    }
}

// ---- one page -----------------------------------------------------------------------------------

/// The highest priority that a family has or, for the automatic mode's, will have.
fn highest_priority(codecs: &Codecs, is_auto: bool) -> u8 {
    match codecs.secondary().next_back() {
        _ if is_auto => PRIORITIES as u8,
        Some((priority, _)) => priority as u8,
        None => 0,
    }
}

impl Target<'_> {
    /// Compresses the page of a slot again, if it still is as `wants` says. Needs `background`.
    ///
    /// The slot is not locked for long: its object is copied and the slot is marked as picked; the
    /// mark goes when anybody writes or frees the page, and then what was made of the copy is
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
        let Some(leaf) = layer.table().leaf(slot) else { return Ok(Attempt::Left) };
        let mut copy = [0; PAGE_BYTES];
        let guard = leaf.lock(slot);
        let found = guard.word();
        if !wants(found) {
            return Ok(Attempt::Left);
        }
        let object = &mut copy[..found.stored_bytes()];
        object.copy_from_slice(pages.pool.object(&guard));
        let old = found.with_idle(found.is_idle() && !self.clears_idle);
        guard.publish(old.picked(TAG));
        // Publishes what the page is now, unless it was changed; true if so.
        let finish = |new: &dyn Fn(Word) -> Word| {
            let guard = leaf.lock(slot);
            let now = guard.word();
            let unchanged = now.is_picked_by(TAG)
                && (now.kind(), now.stored_bytes(), now.algorithm())
                    == (old.kind(), old.stored_bytes(), old.algorithm());
            if unchanged {
                let new = new(now.unpicked(old.age()));
                guard.publish(new);
                // Its object may have been moved meanwhile, so it is this word's that goes.
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
        let location = match pages.pool.store(new, layer.owner(slot), pages.layers.kept_from(layer)) {
            Ok(location) => location,
            Err(error) => {
                // It may be tried again.
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
