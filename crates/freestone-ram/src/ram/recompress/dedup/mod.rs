//! Pages with the same content share one object ([`memory::shared`](crate::ram::memory::shared)).
//!
//! A pass over the pages of the family computes a [fingerprint](fingerprints) of each page in memory
//! that has an object of its own and was not accessed for long, and looks for a page or shared object
//! with the same one. If the objects are equal, byte by byte, the first page's object becomes a
//! shared one, and the second page frees its own. All work is done in bounded
//! [steps](AutoDedup::step), or [on request](AutoDedup::run). A page leaves the others if it is
//! written, or evicted: on the backing device it has an object of its own.
//!
//! # Protocol
//! * A page is never compared with two slots locked. Its object is copied; the other page's slot is
//!   locked, its object is compared with the copy and becomes a shared one; then the first page is
//!   locked again, and its object, as it is now, is compared with the shared one.
//! * No slot is picked, as no object is compressed. The lock of [`Pages::background`] excludes
//!   passes that pick slots.
//!
//! A pass skips pages that were cold in the last complete pass already. Every sixteenth pass visits
//! all cold pages, as the table loses entries of pages that were replaced, or that moved to a
//! snapshot. A pass gives the object back to a page that shares it with no other page any more.
//!
//! Pages of devices with guaranteed memory stay alone: a write to a page that shares its object
//! needs memory that the guarantee does not count. Pages in groups stay there, so grouping waits
//! until a page has been compared.

mod fingerprints;
mod run;

use std::sync::Arc;
use std::time::Duration;

use self::fingerprints::Fingerprints;
use super::cursor::Cursor;
use super::space::{Attempt, ClassCompaction, RecompressSpace};
use crate::pool::BackRef;
use crate::ram::geometry::PAGE;
use crate::ram::memory::layer::{Layer, stored};
use crate::ram::memory::page_search::has_own_object;
use crate::ram::memory::pages::Pages;
use crate::ram::memory::shared::{SharedObjects, number_of, owner_of};
use freestone_core::PAGE_BYTES;
use freestone_core::clock;
use freestone_core::mutants::{self, Mutant};
use freestone_core::slot::{AGES, Kind, Leaf, Word};
use freestone_core::sync::{AtomicU64, Instant, Mutex, Ordering};

/// Maximum duration of a step.
const STEP: Duration = Duration::from_millis(100);
/// Longest pause between two passes. A pass reads the words of all pages.
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// The pause between two passes is 1/`PAUSE_SHARE` of the age at which pages are compared.
const PAUSE_SHARE: u32 = 8;
/// Number of passes until one visits all cold pages.
const FULL_PASS: u32 = 16;
/// Least size of an object to share, in bytes. For smaller objects the two slots and the fingerprint
/// take too large a part of the gain.
const OBJECT_BYTES_MIN: usize = 64;

/// Statistics of the objects that pages of a family (devices that share a memory pool) share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DedupStat {
    /// Number of shared objects.
    pub objects: u64,
    /// Number of pages that refer to them.
    pub pages: u64,
    /// Bytes of pool memory of the objects.
    pub bytes: u64,
    /// Bytes of pool memory that the pages would use in addition if each had an object of its own.
    /// The devices are charged for them.
    pub saved_bytes: u64,
    /// Bytes of the slot table of the objects, which does not shrink. [`MemoryOverhead`] has them in
    /// `leaves_bytes`.
    ///
    /// [`MemoryOverhead`]: crate::ram::MemoryOverhead
    pub table_bytes: u64,
    /// Bytes of the fingerprints by which pages are found, at most 64 MiB. [`MemoryOverhead`] has
    /// them in `metadata_bytes`.
    ///
    /// [`MemoryOverhead`]: crate::ram::MemoryOverhead
    pub fingerprint_bytes: u64,
    /// Number of times that a page gave up its object for one of another page.
    pub shared: u64,
}

/// Comparison of a family's pages.
///
/// Lock order: [`Pages::background`], then `state`, then the locks of the request path.
pub(in crate::ram) struct AutoDedup {
    pages: Arc<Pages>,
    /// Minimum time without access before a page is compared in the background; `None` if pages are
    /// compared on request only.
    age: Option<Duration>,
    state: Mutex<State>,
    /// Statistics since the last reset of the counters.
    shared: AtomicU64,
}

#[derive(Default)]
struct State {
    fingerprints: Fingerprints,
    cursor: Cursor,
    /// Time before which pages were cold when the present pass began, in milliseconds of the clock.
    pass_ms: Option<u64>,
    /// The same for the last complete pass, if the next pass skips pages that were cold then.
    complete_ms: Option<u64>,
    /// Time at which the next pass begins.
    next_pass_ms: u64,
    passes: u32,
    space: RecompressSpace,
    compaction: ClassCompaction,
}

/// A page to compare.
struct Candidate<'a> {
    layer: &'a Layer,
    leaf: Leaf<'a>,
    slot: u64,
}

/// Returns true if the page can share an object.
fn can_share(word: Word) -> bool {
    has_own_object(word) && !word.is_picked() && word.stored_bytes() >= OBJECT_BYTES_MIN
}

/// Returns true if the page is the only user of a shared object.
fn is_left_alone(shared: &SharedObjects, word: Word) -> bool {
    word.is_shared() && !word.is_picked() && shared.users_of(word) == 1
}

/// Returns true if pages of the layer are left as they are.
fn is_excluded(layer: &Layer) -> bool {
    layer.is_retired() || layer.guarantee() > 0
}

impl AutoDedup {
    pub fn new(pages: Arc<Pages>, age: Option<Duration>) -> Self {
        Self { pages, age, state: Mutex::default(), shared: AtomicU64::new(0) }
    }

    pub fn stat(&self) -> Option<DedupStat> {
        let sizes = self.pages.shared()?.sizes();
        Some(DedupStat {
            objects: sizes.objects,
            pages: sizes.pages,
            bytes: sizes.bytes,
            saved_bytes: sizes.saved_bytes,
            table_bytes: sizes.table_bytes,
            fingerprint_bytes: sizes.fingerprint_bytes,
            // Relaxed: a statistic that orders nothing.
            shared: self.shared.load(Ordering::Relaxed),
        })
    }

    pub fn clear(&self) {
        // Relaxed: a statistic that orders nothing.
        self.shared.store(0, Ordering::Relaxed);
    }

    /// Runs a step of at most about 100 ms. Called about once a second by the keeper thread. Does
    /// nothing while other background work is running. Returns true if the step completed a pass
    /// over all pages.
    pub fn step(&self) -> bool {
        let (Some(age), Some(shared)) = (self.age, self.pages.shared()) else { return false };
        let Some(_one) = self.pages.background.try_lock() else { return false };
        let began = Instant::now();
        let mut state = self.state.lock();
        let now_ms = clock::now_ms();
        if !state.compaction.run(&self.pages, || began.elapsed() < STEP) || now_ms < state.next_pass_ms {
            return false;
        }
        let cold_ms = now_ms.saturating_sub(clock::millis(age));
        if state.pass_ms.is_none() && !self.begin_pass(&mut state, shared) {
            // Without memory the next step tries again.
            return false;
        }
        let pass = *state.pass_ms.get_or_insert(cold_ms);
        let cold = self.pages.ages.untouched_since(cold_ms);
        let known = state.complete_ms.map_or([false; AGES], |ms| self.pages.ages.untouched_since(ms));
        let is_wanted = |word: Word| can_share(word) && cold[usize::from(word.age())];
        let is_visited =
            |word: Word| is_wanted(word) && !known[usize::from(word.age())] || is_left_alone(shared, word);
        let State { fingerprints, cursor, space, .. } = &mut *state;
        let over = cursor.walk(&self.pages.layers, &is_visited, |layer, found| {
            for &(slot, word) in found {
                let Some(leaf) = layer.table().leaf(slot).filter(|_| !is_excluded(layer)) else { break };
                let page = Candidate { layer, leaf, slot };
                space.count(self.visit(shared, fingerprints, &page, word, &is_wanted));
                if began.elapsed() >= STEP {
                    return Some(slot + 1);
                }
            }
            None
        });
        if over {
            state.pass_ms = None;
            state.passes += 1;
            state.complete_ms = Some(pass).filter(|_| !state.passes.is_multiple_of(FULL_PASS));
            state.next_pass_ms = now_ms + clock::millis((age / PAUSE_SHARE).min(PAUSE_MAX));
            shared.set_compared_ms(pass);
            if state.space.is_compaction_due(self.pages.pool.pages() * PAGE) {
                state.compaction.start();
                state.space = RecompressSpace::default();
            }
        }
        over
    }

    /// Prepares the table of fingerprints. Returns false if memory is short.
    fn begin_pass(&self, state: &mut State, shared: &SharedObjects) -> bool {
        if state.complete_ms.is_none() {
            state.fingerprints.retain_shared(|number| shared.users(number) > 0);
        }
        let done = state.fingerprints.fit(self.pages_in_memory());
        shared.set_fingerprint_bytes(state.fingerprints.bytes());
        done.is_ok()
    }

    /// Returns the approximate number of pages of the family that may have objects in memory.
    fn pages_in_memory(&self) -> u64 {
        let stored =
            |layer: &Arc<Layer>| layer.get(stored::PAGES).saturating_sub(layer.get(stored::SAME_PAGES));
        let stored: u64 = self.pages.layers.all().iter().map(stored).sum();
        stored.saturating_sub(self.pages.store.as_ref().map_or(0, |store| store.stat().pages))
    }

    /// Works on a page, given with its word as it was before.
    fn visit(
        &self,
        shared: &SharedObjects,
        fingerprints: &mut Fingerprints,
        page: &Candidate<'_>,
        word: Word,
        is_wanted: &impl Fn(Word) -> bool,
    ) -> Attempt {
        if word.is_shared() {
            self.take_back(shared, page);
        }
        self.compare(shared, fingerprints, page, is_wanted)
    }

    /// Gives a page its object back if it shares the object with no other page.
    fn take_back(&self, shared: &SharedObjects, page: &Candidate<'_>) {
        let guard = page.leaf.lock(page.slot);
        if !is_left_alone(shared, guard.word()) {
            return;
        }
        if let Some(change) = shared.take_back(&self.pages.pool, guard, page.layer.owner(page.slot)) {
            page.layer.account(&self.pages.layers, change.old, change.new);
            // The page was not stored anew.
            page.layer.count(stored::HUGE_PAGES_SINCE, -i64::from(change.new.kind() == Kind::Huge));
        }
    }

    /// Looks for a page with the same content, and shares the object with it.
    fn compare(
        &self,
        shared: &SharedObjects,
        fingerprints: &mut Fingerprints,
        page: &Candidate<'_>,
        is_wanted: &impl Fn(Word) -> bool,
    ) -> Attempt {
        let (pages, own) = (&*self.pages, page.layer.owner(page.slot));
        let mut copy = [0; PAGE_BYTES];
        let guard = page.leaf.lock(page.slot);
        let word = guard.word();
        if !is_wanted(word) {
            return Attempt::Skipped;
        }
        let object = &mut copy[..word.stored_bytes()];
        object.copy_from_slice(pages.pool.object(&guard));
        drop(guard);
        let key = fingerprints.key(word, object);
        let number = match fingerprints.find(key) {
            Some(place) if place == own => return Attempt::Failed,
            Some(place) => number_of(place).or_else(|| self.share(shared, place, (word, object), is_wanted)),
            None => None,
        };
        let Some(number) = number else {
            fingerprints.insert(key, own);
            return Attempt::Failed;
        };
        let guard = page.leaf.lock(page.slot);
        if !is_wanted(guard.word()) {
            // The page has changed meanwhile. Its former object may be the one that is shared now.
            fingerprints.insert(key, owner_of(number));
            return Attempt::Skipped;
        }
        let Some(change) = shared.join(&pages.pool, number, guard) else {
            fingerprints.insert(key, own);
            return Attempt::Failed;
        };
        page.layer.account(&pages.layers, change.old, change.new);
        fingerprints.insert(key, owner_of(number));
        // Relaxed: a statistic that orders nothing.
        self.shared.fetch_add(1, Ordering::Relaxed);
        Attempt::Shrunk { from: change.old.stored_bytes(), to: 0 }
    }

    /// Makes the object of the page at `place` a shared one, if it equals `object` and the page is
    /// wanted, too. Returns the number of the shared object.
    fn share(
        &self,
        shared: &SharedObjects,
        place: BackRef,
        (word, object): (Word, &[u8]),
        is_wanted: &impl Fn(Word) -> bool,
    ) -> Option<u64> {
        let pages = &*self.pages;
        let layer = pages.layers.get(place.table()).filter(|layer| !is_excluded(layer))?;
        let guard = layer.table().leaf(place.slot())?.lock(place.slot());
        let form = |word: Word| (word.kind(), word.algorithm());
        let is_same = form(guard.word()) == form(word) && pages.pool.object(&guard) == object;
        if !is_wanted(guard.word()) || !is_same && !mutants::on(Mutant::DedupBelievesFingerprint) {
            return None;
        }
        let (number, change) = shared.share(&pages.pool, guard).ok()?;
        layer.account(&pages.layers, change.old, change.new);
        Some(number)
    }
}

#[cfg(test)]
mod tests;
