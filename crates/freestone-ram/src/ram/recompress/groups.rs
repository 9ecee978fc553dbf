//! Forms [groups](crate::ram::memory::groups) of pages that were not accessed for long, and takes
//! pages out of groups.
//!
//! A group has the cold pages among 8 neighbouring slots of one layer, at least 4. All work is done
//! in bounded [steps](AutoGroup::step). A page leaves its group if it is written, as every word
//! that is replaced. Steps take out pages that are read often, and all pages of a group that has
//! lost half of its pages.
//!
//! # Protocol
//! * The slots of the pages are *picked* one by one, under their locks, while their objects are
//!   copied. The copies are decompressed and compressed together without any lock. A change of a
//!   page, or a move of its word to a snapshot, clears the mark.
//! * The group is stored. Then each slot that still has the mark gets its new word under its lock,
//!   and its old object is freed. A page without the mark is missing in the group. Nothing can fail
//!   between the first new word and [`Groups::finish`].
//! * If the pages do not shrink, or memory is short, the slots are unpicked, and the pages stay as
//!   they are.
//!
//! A pass over all pages skips neighbours of which none has become cold since the last complete
//! pass. So pages that do not shrink are not compressed again and again.

use std::sync::Arc;
use std::time::Duration;

use super::cursor::Cursor;
use super::space::{Attempt, ClassCompaction, RecompressSpace};
use super::target::{TAG, finish_picked};
use crate::codec::{GROUP_PAGES, GroupCompressor, Page, Scratch};
use crate::pool::Pool;
use crate::ram::geometry::PAGE;
use crate::ram::memory::groups::{self, Groups, OBJECT_BYTES_MAX};
use crate::ram::memory::layer::Layer;
use crate::ram::memory::page_search::{has_own_object, is_spillable};
use crate::ram::memory::pages::Pages;
use crate::ram::memory::shared::SharedObjects;
use freestone_core::PAGE_BYTES;
use freestone_core::clock;
use freestone_core::device::{Error, Result};
use freestone_core::slot::{AGES, Leaf, Word};
use freestone_core::sync::{AtomicU64, Instant, Mutex, Ordering};

/// Maximum duration of a step.
const STEP: Duration = Duration::from_millis(100);
/// Longest pause between two passes. A pass reads the words of all pages.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The pause between two passes is 1/`PAUSE_SHARE` of the age at which pages are grouped.
const PAUSE_SHARE: u32 = 8;
/// Minimum number of pages in a new group. Fewer pages gain less than their slower reads cost.
pub(super) const GROUP_PAGES_MIN: usize = 4;
/// A group must be smaller than its pages by 1/`GAIN_SHARE` of their bytes.
const GAIN_SHARE: u64 = 16;

/// Statistics of the groups of a family (devices that share a memory pool).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GroupStat {
    /// Number of groups, in memory and on the backing device.
    pub groups: u64,
    /// Number of pages in groups in memory.
    pub pages: u64,
    /// Number of pages on the backing device that are in groups.
    pub spilled_pages: u64,
    /// Bytes of pool memory that the groups use.
    pub bytes: u64,
    /// Bytes of the slot table of the groups, which does not shrink. [`MemoryOverhead`] has them in
    /// `leaves_bytes`.
    ///
    /// [`MemoryOverhead`]: crate::ram::MemoryOverhead
    pub table_bytes: u64,
    /// Number of times that a page was added to a group.
    pub grouped: u64,
    /// Number of times that a page was taken out of a group without a write.
    pub ungrouped: u64,
}

/// Automatic grouping of a family's pages.
///
/// Lock order: [`Pages::background`], then `state`, then the locks of the request path.
pub(in crate::ram) struct AutoGroup {
    pub(super) pages: Arc<Pages>,
    /// Minimum time without access before a page is added to a group; `None` if grouping is off.
    age: Option<Duration>,
    state: Mutex<State>,
    /// Statistics since the last reset of the counters.
    grouped: AtomicU64,
    ungrouped: AtomicU64,
}

#[derive(Default)]
struct State {
    cursor: Cursor,
    /// Time before which pages were cold when the present pass began, in milliseconds of the clock.
    pass_ms: Option<u64>,
    /// The same for the last complete pass.
    complete_ms: Option<u64>,
    /// Time at which the next pass begins.
    next_pass_ms: u64,
    /// The memory limit refused a group in the present pass.
    was_refused: bool,
    space: RecompressSpace,
    compaction: ClassCompaction,
    work: Option<Buffers>,
}

/// Working memory to form a group.
pub(super) struct Buffers {
    compressor: GroupCompressor,
    content: Vec<Page>,
    object: Box<[u8]>,
}

impl Buffers {
    pub fn new() -> Result<Self> {
        let (mut content, mut object) = (Vec::new(), Vec::new());
        content.try_reserve_exact(GROUP_PAGES).map_err(|_| Error::NoMemory)?;
        object.try_reserve_exact(OBJECT_BYTES_MAX).map_err(|_| Error::NoMemory)?;
        object.resize(OBJECT_BYTES_MAX, 0);
        Ok(Self { compressor: GroupCompressor::new()?, content, object: object.into() })
    }
}

/// Ages of pages in a pass.
struct PassAges {
    /// True for the ages of cold pages.
    cold: [bool; AGES],
    /// True for the ages of pages that were cold in the last complete pass.
    known: [bool; AGES],
}

impl PassAges {
    fn is_cold(&self, word: Word) -> bool {
        self.cold[usize::from(word.age())]
    }

    /// Returns true if the page has become cold since the last complete pass.
    fn is_new(&self, word: Word) -> bool {
        !self.known[usize::from(word.age())]
    }
}

/// Pages to add to groups.
pub(super) struct Selection<'a> {
    pub groups: &'a Groups,
    /// True for words of pages that are [alone](is_alone) and selected.
    pub is_wanted: &'a dyn Fn(Word) -> bool,
    /// An attempt clears the idle mark, as the kernel's `recompress` does.
    pub clears_idle: bool,
}

/// Returns true if the page can be added to a group.
pub(super) fn is_alone(word: Word) -> bool {
    has_own_object(word) && !word.is_picked()
}

/// Returns true if the page should leave its group.
fn is_misplaced(groups: &Groups, word: Word) -> bool {
    let is_read_often = word.reads() == Word::READS_MAX;
    word.is_grouped() && !word.is_picked() && (is_read_often || groups.is_sparse_in_memory(word))
}

/// Divides the slots of a leaf into those of possible groups.
pub(super) fn neighbours(found: &[(u64, Word)]) -> impl Iterator<Item = &[(u64, Word)]> {
    found.chunk_by(|(a, _), (b, _)| a / GROUP_PAGES as u64 == b / GROUP_PAGES as u64)
}

impl AutoGroup {
    pub fn new(pages: Arc<Pages>, age: Option<Duration>) -> Self {
        Self { pages, age, state: Mutex::default(), grouped: AtomicU64::new(0), ungrouped: AtomicU64::new(0) }
    }

    pub fn stat(&self) -> Option<GroupStat> {
        let sizes = self.pages.groups()?.sizes();
        Some(GroupStat {
            groups: sizes.groups,
            pages: sizes.pages,
            spilled_pages: sizes.spilled_pages,
            bytes: sizes.bytes,
            table_bytes: sizes.table_bytes,
            // Relaxed: statistics that order nothing.
            grouped: self.grouped.load(Ordering::Relaxed),
            ungrouped: self.ungrouped.load(Ordering::Relaxed),
        })
    }

    pub fn clear(&self) {
        // Relaxed: statistics that order nothing.
        self.grouped.store(0, Ordering::Relaxed);
        self.ungrouped.store(0, Ordering::Relaxed);
    }

    /// Runs a step of at most about 100 ms. Called about once a second by the keeper thread. Does
    /// nothing while other background work is running. Returns true if the step completed a pass
    /// over all pages.
    pub fn step(&self) -> bool {
        let Some(groups) = self.pages.groups() else { return false };
        // Pages with the same content should share an object first: pages in groups cannot.
        let compared_ms = self.pages.shared().map_or(Some(u64::MAX), SharedObjects::compared_ms);
        let Some(compared_ms) = compared_ms else { return false };
        let Some(_one) = self.pages.background.try_lock() else { return false };
        let began = Instant::now();
        let mut state = self.state.lock();
        let State { cursor, pass_ms, complete_ms, next_pass_ms, was_refused, space, compaction, work } =
            &mut *state;
        let now_ms = clock::now_ms();
        if !compaction.run(&self.pages, || began.elapsed() < STEP) || now_ms < *next_pass_ms {
            return false;
        }
        if work.is_none() {
            // Without memory the next step tries again.
            *work = Buffers::new().ok();
        }
        let Some(work) = work else { return false };
        let ages = &self.pages.ages;
        // Without an age, groups were formed on request, and steps only take pages out.
        let cold_ms = self.age.map_or(0, |age| now_ms.saturating_sub(clock::millis(age)).min(compared_ms));
        let pass = *pass_ms.get_or_insert(cold_ms);
        let ages = PassAges {
            cold: self.age.map_or([false; AGES], |_| ages.untouched_since(cold_ms)),
            known: complete_ms.map_or([false; AGES], |ms| ages.untouched_since(ms)),
        };
        let over = cursor.walk(&self.pages.layers, &is_spillable, |layer, found| {
            for near in neighbours(found) {
                let mut attempt = self.visit(groups, &ages, work, layer, near);
                if attempt == Attempt::NoSpace && space.is_worth_compacting() && self.pages.compact() > 0 {
                    attempt = self.visit(groups, &ages, work, layer, near);
                }
                *was_refused |= attempt == Attempt::NoSpace;
                space.count(attempt);
                if attempt == Attempt::Reset || space.is_exhausted() || began.elapsed() >= STEP {
                    return near.last().map(|(slot, _)| slot + 1);
                }
            }
            None
        });
        if space.is_exhausted() {
            space.reset_refusals();
        }
        if over {
            if !std::mem::take(was_refused) {
                *complete_ms = Some(pass);
            }
            *pass_ms = None;
            let pause = self.age.map_or(PAUSE_MAX, |age| (age / PAUSE_SHARE).min(PAUSE_MAX));
            *next_pass_ms = now_ms + clock::millis(pause);
            if space.is_compaction_due(self.pages.pool.pages() * PAGE) {
                compaction.start();
                *space = RecompressSpace::default();
            }
        }
        over
    }

    /// Works on neighbouring slots, given with their words as they were before.
    fn visit(
        &self,
        groups: &Groups,
        ages: &PassAges,
        work: &mut Buffers,
        layer: &Layer,
        near: &[(u64, Word)],
    ) -> Attempt {
        let Some(leaf) = near.first().and_then(|(slot, _)| layer.table().leaf(*slot)) else {
            return Attempt::Skipped;
        };
        if layer.is_retired() {
            return Attempt::Reset;
        }
        for &(slot, word) in near.iter().filter(|(_, word)| word.is_grouped()) {
            if is_misplaced(groups, word) {
                self.take_out(groups, layer, leaf, slot);
            } else if word.reads() > 0 && ages.is_cold(word) {
                forget_reads(ages, leaf, slot);
            }
        }
        let is_wanted = |word| is_alone(word) && ages.is_cold(word);
        let cold = || near.iter().filter(|(_, word)| is_wanted(*word));
        if cold().count() < GROUP_PAGES_MIN || !cold().any(|(_, word)| ages.is_new(*word)) {
            return Attempt::Skipped;
        }
        let selection = Selection { groups, is_wanted: &is_wanted, clears_idle: false };
        self.form(&selection, work, layer, leaf, cold().map(|(slot, _)| *slot))
    }

    // ---- a new group ------------------------------------------------------------------------------

    /// Forms a group of the wanted pages among these slots of a leaf.
    pub(super) fn form(
        &self,
        selection: &Selection<'_>,
        work: &mut Buffers,
        layer: &Layer,
        leaf: Leaf<'_>,
        slots: impl Iterator<Item = u64>,
    ) -> Attempt {
        let pages = &*self.pages;
        let mut picked = Vec::with_capacity(GROUP_PAGES);
        work.content.clear();
        for slot in slots {
            if let Some((old, page)) = self.pick(selection, layer, leaf, slot) {
                picked.push((slot, old));
                work.content.push(page);
            }
        }
        let unpick = |attempt| {
            let clears_idle = selection.clears_idle && attempt == Attempt::Failed;
            let keep = |word: Word| word.with_idle(word.is_idle() && !clears_idle);
            for &(slot, old) in &picked {
                finish_picked(pages, layer, leaf, slot, old, &keep);
            }
            attempt
        };
        let old_bytes: u64 = picked.iter().map(|(_, old)| Pool::charged_bytes(old.stored_bytes())).sum();
        let compressed = (picked.len() >= GROUP_PAGES_MIN)
            .then(|| work.compressor.compress(&work.content, &mut work.object))
            .flatten();
        let Some(object) = compressed.map(|bytes| &work.object[..bytes]) else {
            return unpick(Attempt::Failed);
        };
        let new_bytes = groups::charged_bytes(object.len());
        if new_bytes + old_bytes / GAIN_SHARE > old_bytes {
            return unpick(Attempt::Failed);
        }
        let reserved = pages.layers.pages_reserved_for_others(layer);
        let group = match selection.groups.create(&pages.pool, object, picked.len() as u32, reserved) {
            Ok(group) => group,
            Err(Error::NoSpace) => return unpick(Attempt::NoSpace),
            Err(_) => return unpick(Attempt::Failed),
        };
        let mut missing = 0;
        for (position, &(slot, old)) in picked.iter().enumerate() {
            let share = groups::share(new_bytes, picked.len(), position);
            let new = |word: Word| {
                let idle = word.is_idle() && !selection.clears_idle;
                Groups::word(group, position, share).with_age(word.age()).with_idle(idle)
            };
            missing += u32::from(!finish_picked(pages, layer, leaf, slot, old, &new));
        }
        selection.groups.finish(&pages.pool, group, missing);
        // Relaxed: a statistic that orders nothing.
        self.grouped.fetch_add(picked.len() as u64 - u64::from(missing), Ordering::Relaxed);
        Attempt::Shrunk { from: old_bytes as usize, to: new_bytes as usize }
    }

    /// Picks a slot whose page is wanted. Returns the slot's word before, and the page; `None` if the
    /// page was accessed meanwhile, or is damaged, which its readers report.
    fn pick(
        &self,
        selection: &Selection<'_>,
        layer: &Layer,
        leaf: Leaf<'_>,
        slot: u64,
    ) -> Option<(Word, Page)> {
        let (mut copy, mut page) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        let guard = leaf.lock(slot);
        let old = guard.word();
        if !(selection.is_wanted)(old) {
            return None;
        }
        let object = &mut copy[..old.stored_bytes()];
        object.copy_from_slice(self.pages.pool.object(&guard));
        guard.publish(old.picked(TAG));
        if self.pages.unpack(old, object, &mut page).is_err() {
            finish_picked(&self.pages, layer, leaf, slot, old, &|word| word);
            return None;
        }
        Some((old, page))
    }

    // ---- pages that leave their group -------------------------------------------------------------

    /// Gives a page of a group an object of its own again, compressed like a written page. Without
    /// memory the page stays in the group.
    fn take_out(&self, groups: &Groups, layer: &Layer, leaf: Leaf<'_>, slot: u64) {
        let pages = &*self.pages;
        let mut page = [0; PAGE_BYTES];
        let guard = leaf.lock(slot);
        let old = guard.word();
        // The readers of a damaged page report the damage.
        if !is_misplaced(groups, old) || pages.load(&guard, &mut page).is_err() {
            return;
        }
        guard.publish(old.picked(TAG));
        let mut scratch = Scratch::new();
        let compressed = pages.codecs.primary().compress(&page, &mut scratch);
        let object = compressed.unwrap_or(&page);
        let reserved = pages.layers.pages_reserved_for_others(layer);
        let stored = if layer.has_space(object.len()) {
            pages.pool.store(object, layer.owner(slot), reserved)
        } else {
            Err(Error::NoSpace)
        };
        let Ok(location) = stored else {
            finish_picked(pages, layer, leaf, slot, old, &|word| word);
            return;
        };
        let now = pages.ages.now();
        let new = |word: Word| {
            let new = match compressed {
                Some(object) => Word::compressed(location, object.len() as u32, 0),
                None => Word::huge(location),
            };
            // A page of a group that has become sparse is cold again after some time, as if it was
            // accessed now.
            new.with_age(now).with_idle(word.is_idle())
        };
        if finish_picked(pages, layer, leaf, slot, old, &new) {
            // Relaxed: a statistic that orders nothing.
            self.ungrouped.fetch_add(1, Ordering::Relaxed);
        } else {
            pages.pool.free(location);
        }
    }
}

/// Clears the count of reads of a page that has not been read for long.
fn forget_reads(ages: &PassAges, leaf: Leaf<'_>, slot: u64) {
    let guard = leaf.lock(slot);
    let word = guard.word();
    if word.is_grouped() && !word.is_picked() && ages.is_cold(word) {
        guard.publish(word.without_reads());
    }
}

#[cfg(test)]
#[path = "groups_tests.rs"]
pub(super) mod tests;
