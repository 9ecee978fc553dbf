//! Rounds of spilling: pages leave memory when that gets short.
//!
//! Above the high mark of `mem_limit` the coldest pages of the family are written until the low
//! mark. Requests are not slowed by that until the limit itself is reached; there a write waits
//! until a batch has left memory, and goes on at the pace of the backing device. It fails with "no
//! space" only where nothing can be spilled: the device is full, fails, does not answer, or
//! `writeback_limit` is used up.
//!
//! A device with a cap of its own spills pages of its own in the same way. What is guaranteed to a
//! device is not taken from it for others.

use std::sync::Arc;
use std::time::Duration;

use super::Ram;
use super::candidates::is_spillable;
use super::eviction::{Eviction, Offered};
use super::idle::renumber_ages;
use super::layer::Layer;
use super::limits::{LOW_PERCENT, high_mark};
use super::outcome::{Evicted, EvictionHistory, WritebackError};
use super::pages::Pages;
use super::reclaim::Reclaim;
use crate::clock::now_ms;
use crate::pool::Pool;
use crate::spill::store::Store;
use freestone_core::PAGE_BYTES;
use freestone_core::device::Error;
use freestone_core::log_limit::LogLimit;
use freestone_core::slot::{AGES, LEAF_SLOTS, MAX_SLOTS, Word};
use freestone_core::sync::{Instant, Mutex, thread};

const PAGE: u64 = PAGE_BYTES as u64;
/// Least that a round frees while requests wait for memory.
const ROUND_BYTES_MIN: u64 = 16 * PAGE;
/// Blocks that a round reclaims where the device is full of holes, 4 MiB: writes may be waiting for
/// it.
const RECLAIMED_BLOCKS: u64 = 1024;
/// No more than this is not worth another try on a device that was full.
pub(super) const RECLAIMED_MIN_BLOCKS: u64 = 4;
/// How long who waits for removed devices sleeps at a time.
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// The eviction of a family's pages.
pub(super) struct Evict {
    pages: Arc<Pages>,
    pub reclaim: Reclaim,
    /// How it went so far, for the family's limit.
    history: Mutex<EvictionHistory>,
    /// What keeps pages from being spilled, as it was logged last.
    hindrance: Mutex<Option<WritebackError>>,
    lines: LogLimit<WritebackError>,
}

impl Evict {
    /// Nothing was spilled yet.
    pub fn new(pages: Arc<Pages>) -> Self {
        let reclaim = Reclaim::new(Arc::clone(&pages));
        Self {
            pages,
            reclaim,
            history: Mutex::default(),
            hindrance: Mutex::default(),
            lines: LogLimit::default(),
        }
    }

    /// Spills until the low mark, if memory is above the high one or requests wait.
    pub(super) fn make_room(&self, waiting: bool) {
        let waiting = self.make_room_under_caps(waiting);
        let Some((high, low)) = self.pages.marks() else {
            // The limit was lifted.
            if waiting {
                self.pages.memory_freed();
            }
            return;
        };
        // What is kept for others is as good as used.
        let kept = self.pages.layers.kept_pages();
        let (high, low) = (high.saturating_sub(kept), low.saturating_sub(kept));
        if self.pages.pool.pages() <= high && !waiting {
            return;
        }
        if self.history.lock().pause() {
            return self.pages.keeper.give_up();
        }
        let _one = self.pages.background.lock();
        renumber_ages(&self.pages);
        let (pages, charged) = (self.pages.pool.pages(), self.charged());
        if (pages * PAGE).saturating_sub(charged) > pages * PAGE / 8 && self.pages.compact() > 0 {
            self.pages.memory_freed();
        }
        let need = self.pages.pool.pages().saturating_sub(low) * PAGE;
        let need = if waiting { need.max(ROUND_BYTES_MIN) } else { need };
        if need == 0 {
            return;
        }
        let spilled = self.spill_and_reclaim(need, None);
        // Places are scattered: only whole pages can serve other sizes.
        let compacted = if spilled.taken > 0 { self.pages.compact() } else { 0 };
        let got_on = spilled.freed > 0 || compacted > 0;
        let again = self.after(&self.history, &spilled, got_on);
        match (got_on, again) {
            (true, _) => self.pages.memory_freed(),
            (false, true) => {}
            (false, false) => return self.pages.keeper.give_up(),
        }
        if again && (self.pages.pool.pages() > high || !got_on) {
            self.pages.keeper.kick();
        }
    }

    /// Spills pages of devices that are near their own caps. Returns whether requests of other
    /// devices wait.
    fn make_room_under_caps(&self, waiting: bool) -> bool {
        let full: Vec<_> = self.pages.layers.all().into_iter().filter(|layer| is_full(layer)).collect();
        if full.is_empty() {
            return waiting;
        }
        let mut next = Vec::new();
        for layer in full {
            let (got_on, again) = self.make_room_under_cap(&layer);
            let is_its = |ram: &Ram| ram.layer_id() == layer.id();
            match (got_on, again) {
                (true, _) => {
                    self.pages.keeper.memory_freed_for(is_its);
                    self.pages.room_came();
                }
                (false, true) => {}
                (false, false) => self.pages.keeper.give_up_for(is_its),
            }
            if again && if got_on { is_full(&layer) } else { self.pages.keeper.is_awaited(is_its) } {
                next.push(layer);
            }
        }
        if !next.is_empty() {
            self.pages.keeper.kick();
        }
        self.pages.keeper.is_awaited(|ram| next.iter().all(|layer| layer.id() != ram.layer_id()))
    }

    /// Spills pages of a device that is near its own cap. Returns whether it has room, and whether
    /// another round makes sense.
    fn make_room_under_cap(&self, layer: &Arc<Layer>) -> (bool, bool) {
        if layer.history().lock().pause() {
            return (false, false);
        }
        let _one = self.pages.background.lock();
        if !is_full(layer) {
            // Its pages left memory by hand meanwhile.
            return (true, false);
        }
        let cap = layer.cap();
        let low = (cap / 100 * LOW_PERCENT).min(cap.saturating_sub(4 * PAGE));
        let spilled = self.spill_and_reclaim(layer.charged().saturating_sub(low).max(1), Some(layer));
        let got_on = spilled.freed > 0 || !is_full(layer);
        (got_on, self.after(layer.history(), &spilled, got_on))
    }

    /// Notes what a round came to. Returns whether another one makes sense.
    fn after(&self, history: &Mutex<EvictionHistory>, spilled: &Evicted, got_on: bool) -> bool {
        let error = spilled.outcome.err();
        let before = std::mem::replace(&mut *self.hindrance.lock(), error);
        // Once, also where it comes and goes.
        if let Some(error) = error.filter(|_| before != error)
            && let Some(held_back) = self.lines.line(error)
        {
            tracing::warn!("{}: pages cannot be spilled: {error}{held_back}", self.pages.name());
        }
        history.lock().after(spilled, got_on, self.is_silent())
    }

    /// Bytes of the classes of all objects.
    fn charged(&self) -> u64 {
        self.pages.layers.all().iter().map(|layer| layer.charged()).sum()
    }

    fn is_silent(&self) -> bool {
        self.pages.store.as_ref().is_some_and(|store| store.unanswered() > 0)
    }

    /// As [`spill`](Self::spill), on a device that may be full of what removed devices left, and of
    /// holes.
    fn spill_and_reclaim(&self, need: u64, only: Option<&Arc<Layer>>) -> Evicted {
        let first = self.spill(need, only);
        if first.outcome != Err(WritebackError::NoSpace)
            || !self.free_blocks_of_the_removed()
                && self.reclaim.until(RECLAIMED_BLOCKS, &mut || true) <= RECLAIMED_MIN_BLOCKS
        {
            return first;
        }
        let again = self.spill(need.saturating_sub(first.taken).max(1), only);
        Evicted { taken: first.taken + again.taken, freed: first.freed + again.freed, outcome: again.outcome }
    }

    /// Frees pages that removed devices have on the backing device. Returns whether that made room
    /// there.
    fn free_blocks_of_the_removed(&self) -> bool {
        let Some(store) = &self.pages.store else { return false };
        let before = store.free_blocks();
        while store.free_blocks() < before + RECLAIMED_BLOCKS && self.pages.help_to_free() {}
        store.free_blocks() > before
    }

    /// Frees pages that removed devices have on the backing device, and waits for those of devices
    /// that are about to be retired, but not beyond `until`, and while it may `go_on`. Returns
    /// whether there is room.
    pub(super) fn wait_for_blocks_of_the_removed(
        &self,
        store: &Store,
        until: Instant,
        go_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        let is_full = || store.free_blocks() <= RECLAIMED_MIN_BLOCKS;
        while Instant::now() < until && go_on() {
            // Asked before the look at what is retired: what is not pending any more is there.
            let pending = self.pages.removals.is_pending();
            while is_full() && self.pages.help_to_free() {}
            if !is_full() {
                return true;
            }
            if !pending && !self.pages.is_freeing() {
                return false;
            }
            thread::sleep(LOOK_AGAIN);
        }
        false
    }

    /// Spills about `need` bytes of objects, the coldest first.
    fn spill(&self, need: u64, only: Option<&Arc<Layer>>) -> Evicted {
        let nothing = |outcome| Evicted { taken: 0, freed: 0, outcome };
        let Some(store) = &self.pages.store else { return nothing(Ok(())) };
        if store.unanswered() > 0 {
            return nothing(Err(WritebackError::Device(Error::Media)));
        }
        // Before all slots are looked at in vain.
        match store.budget().get() {
            limit if limit.enabled && limit.left == 0 => return nothing(Err(WritebackError::Limit)),
            _ if store.free_blocks() == 0 => return nothing(Err(WritebackError::NoSpace)),
            _ => {}
        }
        // What is touched from here on is younger than everything that was there.
        self.pages.ages.advance(now_ms());
        let ranks = self.pages.ages.ranks();
        let rank = |word: Word| ranks[usize::from(word.age())];
        let layers = self.spillable_layers(only);
        let mut by_rank = [0_u64; AGES];
        for (layer, _) in &layers {
            layer.each_leaf(|start, leaf| {
                for slot in start..start + LEAF_SLOTS {
                    let word = leaf.peek(slot);
                    if is_spillable(word) && !word.is_picked() {
                        by_rank[usize::from(rank(word))] += Pool::charged_bytes(word.stored_bytes());
                    }
                }
            });
        }
        let mut colder = 0;
        let mut last = 0;
        while last + 1 < AGES && colder + by_rank[last] < need {
            colder += by_rank[last];
            last += 1;
        }
        let last = last as u8;
        // Of the last age only what is still needed.
        let mut left_of_last = need.saturating_sub(colder);
        let mut eviction = Eviction::new(&self.pages, store);
        let mut taken = 0;
        let mut outcome = Ok(());
        let cold = |word: Word| is_spillable(word) && rank(word) <= last;
        for (layer, most) in &layers {
            let mut of_layer = 0;
            layer.each_candidate(&[0..=MAX_SLOTS - 1], &cold, |slot, word| {
                if taken >= need || of_layer >= *most {
                    return false;
                }
                let age = rank(word);
                if age == last && left_of_last == 0 {
                    return true;
                }
                match eviction.offer(layer, slot, |word| rank(word) <= last) {
                    Ok(Offered::Taken(stored)) => {
                        let charged = Pool::charged_bytes(stored);
                        taken += charged;
                        of_layer += charged;
                        if age == last {
                            left_of_last = left_of_last.saturating_sub(charged);
                        }
                        true
                    }
                    Ok(Offered::Passed) => true,
                    Err(error) => {
                        outcome = Err(error);
                        false
                    }
                }
            });
            if taken >= need || outcome.is_err() {
                break;
            }
        }
        let (done, ended) = eviction.end();
        Evicted { taken, freed: done.pages, outcome: outcome.and(ended) }
    }

    /// The layers that pages may be taken from, and how many bytes of each.
    fn spillable_layers(&self, only: Option<&Arc<Layer>>) -> Vec<(Arc<Layer>, u64)> {
        if let Some(only) = only {
            return vec![(Arc::clone(only), u64::MAX)];
        }
        let may_take = |layer: Arc<Layer>| {
            let most = match layer.least() {
                0 => u64::MAX,
                least => layer.charged().saturating_sub(least),
            };
            (!layer.is_retired() && most > 0).then_some((layer, most))
        };
        self.pages.layers.all().into_iter().filter_map(may_take).collect()
    }
}

fn is_full(layer: &Layer) -> bool {
    let cap = layer.cap();
    cap != u64::MAX && layer.charged() >= high_mark(cap)
}
