//! Eviction rounds, which write back cold pages when memory is short.
//!
//! A family (devices that share a memory pool) has a background thread, the keeper. Above the high
//! mark (95 % of `mem_limit`) the keeper evicts the family's coldest pages until the low mark (90
//! %). Requests are not delayed before the limit itself is reached. At the limit a write waits
//! until a batch of pages has left memory, so writes run at the speed of the backing device. A
//! write fails with "no space" only if nothing can be written back. The backing device is then
//! full, fails or hangs, or `writeback_limit` is used up.
//!
//! A device with its own memory limit evicts its own pages in the same way. Pages within a device's
//! guaranteed memory are not evicted for other devices.

use std::sync::Arc;
use std::time::Duration;

use super::evict_batches::{Eviction, OfferOutcome};
use super::reclaim::Reclaim;
use crate::pool::Pool;
use crate::ram::memory::ages::renumber_ages;
use crate::ram::memory::groups;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::limits::{LOW_PERCENT, high_mark};
use crate::ram::memory::outcome::{EvictionHistory, EvictionRound, WritebackError};
use crate::ram::memory::page_search::is_spillable;
use crate::ram::memory::pages::Pages;
use crate::ram::waiting::job::RequestOwner;
use freestone_core::PAGE_BYTES;
use freestone_core::clock::now_ms;
use freestone_core::device::Error;
use freestone_core::log_limit::LogLimit;
use freestone_core::slot::{AGES, LEAF_SLOTS, MAX_SLOTS, Word};
use freestone_core::sync::{Instant, Mutex, thread};
use freestone_spill::store::Store;

const PAGE: u64 = PAGE_BYTES as u64;
/// Minimum bytes that a round evicts while requests wait for memory.
const ROUND_BYTES_MIN: u64 = 16 * PAGE;
/// Blocks (4 MiB) that a round reclaims on a backing device full of holes. Small, as writes may be
/// waiting for the round.
const RECLAIMED_BLOCKS: u64 = 1024;
/// A backing device that was full is used again only if reclaim freed more blocks than this.
pub(super) const RECLAIMED_MIN_BLOCKS: u64 = 4;
/// Clean copies checked in one background step.
const SWEPT_COPIES: usize = 1 << 14;
/// Poll interval while waiting for blocks of removed devices.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

pub(in crate::ram) struct Evict {
    pub(super) pages: Arc<Pages>,
    pub reclaim: Reclaim,
    /// Results of recent evictions for the family's memory limit.
    history: Mutex<EvictionHistory>,
    /// Error of the last round, `None` if it succeeded: only a change is logged.
    obstacle: Mutex<Option<WritebackError>>,
    lines: LogLimit<WritebackError>,
}

impl Evict {
    pub fn new(pages: Arc<Pages>) -> Self {
        let reclaim = Reclaim::new(Arc::clone(&pages));
        Self {
            pages,
            reclaim,
            history: Mutex::default(),
            obstacle: Mutex::default(),
            lines: LogLimit::default(),
        }
    }

    /// Evicts pages until the low mark, if the pool is above the high mark or requests are
    /// `waiting` for memory.
    pub(in crate::ram) fn evict_as_needed(&self, waiting: bool) {
        let waiting = self.evict_under_caps(waiting);
        let Some((high, low)) = self.pages.eviction_marks() else {
            // Without a limit memory is free: retry the waiting requests.
            if waiting {
                self.pages.wake_memory_waiters();
            }
            return;
        };
        // Memory that is guaranteed to devices and not used yet counts as used.
        let kept = self.pages.layers.reserved_pages();
        let (high, low) = (high.saturating_sub(kept), low.saturating_sub(kept));
        if self.pages.pool.pages() <= high && !waiting {
            return;
        }
        if self.history.lock().is_paused() {
            return self.pages.keeper.retry_last_time();
        }
        let _one = self.pages.background.lock();
        renumber_ages(&self.pages);
        let (pages, charged) = (self.pages.pool.pages(), self.charged());
        if (pages * PAGE).saturating_sub(charged) > pages * PAGE / 8 && self.pages.compact() > 0 {
            self.pages.wake_memory_waiters();
        }
        let need = self.pages.pool.pages().saturating_sub(low) * PAGE;
        let need = if waiting { need.max(ROUND_BYTES_MIN) } else { need };
        if need == 0 {
            return;
        }
        let spilled = self.spill_and_reclaim(need, None);
        // Freed objects are scattered over the pool's pages. Only whole free pages can be used by
        // other size classes.
        let compacted = if spilled.taken > 0 { self.pages.compact() } else { 0 };
        let progressed = spilled.freed > 0 || compacted > 0;
        let again = self.record_round(&self.history, &spilled, progressed);
        match (progressed, again) {
            (true, _) => self.pages.wake_memory_waiters(),
            (false, true) => {}
            (false, false) => return self.pages.keeper.retry_last_time(),
        }
        if again && (self.pages.pool.pages() > high || !progressed) {
            self.pages.keeper.kick();
        }
    }

    /// Evicts pages of devices that are near their own memory limits. Returns true if requests of
    /// other devices wait for memory.
    fn evict_under_caps(&self, waiting: bool) -> bool {
        let full: Vec<_> = self.pages.layers.all().into_iter().filter(|layer| is_full(layer)).collect();
        if full.is_empty() {
            return waiting;
        }
        let mut next = Vec::new();
        for layer in full {
            let (progressed, again) = self.evict_under_cap(&layer);
            let is_its = |owner: &dyn RequestOwner| owner.layer_id() == layer.id();
            match (progressed, again) {
                (true, _) => {
                    self.pages.keeper.wake_memory_waiters_for(is_its);
                    self.pages.wake_space_waiters();
                }
                (false, true) => {}
                (false, false) => self.pages.keeper.retry_last_time_for(is_its),
            }
            if again && if progressed { is_full(&layer) } else { self.pages.keeper.has_waiting(is_its) } {
                next.push(layer);
            }
        }
        if !next.is_empty() {
            self.pages.keeper.kick();
        }
        self.pages.keeper.has_waiting(|owner| next.iter().all(|layer| layer.id() != owner.layer_id()))
    }

    /// Evicts pages of a device that is near its own memory limit. Returns two flags: the device
    /// has more space now, and another round makes sense.
    fn evict_under_cap(&self, layer: &Arc<Layer>) -> (bool, bool) {
        if layer.history().lock().is_paused() {
            return (false, false);
        }
        let _one = self.pages.background.lock();
        if !is_full(layer) {
            // Meanwhile a manual writeback made space.
            return (true, false);
        }
        let cap = layer.cap();
        let low = (cap / 100 * LOW_PERCENT).min(cap.saturating_sub(4 * PAGE));
        let spilled = self.spill_and_reclaim(layer.charged().saturating_sub(low).max(1), Some(layer));
        let progressed = spilled.freed > 0 || !is_full(layer);
        (progressed, self.record_round(layer.history(), &spilled, progressed))
    }

    /// Records the result of a round in `history`, and logs a new obstacle. Returns true if another
    /// round makes sense.
    fn record_round(
        &self,
        history: &Mutex<EvictionHistory>,
        spilled: &EvictionRound,
        progressed: bool,
    ) -> bool {
        let error = spilled.outcome.err();
        let before = std::mem::replace(&mut *self.obstacle.lock(), error);
        // Log only if the obstacle to eviction changed, rate limited.
        if let Some(error) = error.filter(|_| before != error)
            && let Some(held_back) = self.lines.admit(error)
        {
            tracing::warn!("{}: cannot evict pages to backing_dev: {error}{held_back}", self.pages.name());
        }
        history.lock().record_round(spilled, progressed, self.is_hanging())
    }

    /// Frees clean copies on the backing device that are stale: their pages were overwritten or
    /// discarded. Called once a second.
    pub(in crate::ram) fn sweep_copies(&self) {
        let Some(store) = &self.pages.store else { return };
        store.free_copies_if_short();
        store.sweep_copies(SWEPT_COPIES, |table, slot, stored| {
            // The copy of a group is freed with the group, whose content does not change.
            if table == groups::TABLE_ID {
                return true;
            }
            let word =
                self.pages.layers.get(table).and_then(|layer| Some(layer.table().leaf(slot)?.peek(slot)));
            // A slot that is being changed or read keeps its copy until a later sweep.
            word.is_some_and(|word| is_spillable(word) && word.stored_bytes() == stored as usize)
        });
    }

    /// Returns the bytes of pool memory of all objects.
    fn charged(&self) -> u64 {
        let charged: u64 = self.pages.layers.all().iter().map(|layer| layer.charged()).sum();
        charged.saturating_sub(self.pages.saved_bytes())
    }

    fn is_hanging(&self) -> bool {
        self.pages.store.as_ref().is_some_and(|store| store.abandoned() > 0)
    }

    /// Evicts as [`spill`](Self::spill). If the backing device is full, frees blocks of removed
    /// devices or reclaims holes, and retries once.
    fn spill_and_reclaim(&self, need: u64, only: Option<&Arc<Layer>>) -> EvictionRound {
        let first = self.spill(need, only);
        if first.outcome != Err(WritebackError::NoSpace)
            || !self.free_removed_blocks()
                && self.reclaim.reclaim_blocks(RECLAIMED_BLOCKS, &mut || true) <= RECLAIMED_MIN_BLOCKS
        {
            return first;
        }
        let again = self.spill(need.saturating_sub(first.taken).max(1), only);
        EvictionRound {
            taken: first.taken + again.taken,
            freed: first.freed + again.freed,
            outcome: again.outcome,
        }
    }

    /// Frees pages that removed devices have on the backing device, up to [`RECLAIMED_BLOCKS`]
    /// blocks. Returns true if that freed blocks.
    fn free_removed_blocks(&self) -> bool {
        let Some(store) = &self.pages.store else { return false };
        let before = store.free_blocks();
        while store.free_blocks() < before + RECLAIMED_BLOCKS && self.pages.free_leaf_or_yield() {}
        store.free_blocks() > before
    }

    /// Frees pages that removed devices have on the backing device, and waits for removals in
    /// progress, at most until `until` or until `go_on` returns false. Returns true if the backing
    /// device has space.
    pub(super) fn wait_for_removed_blocks(
        &self,
        store: &Store,
        until: Instant,
        go_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        let is_full = || store.free_blocks() <= RECLAIMED_MIN_BLOCKS;
        while Instant::now() < until && go_on() {
            // Read `pending` before the queue of retired layers: the layers of a removal that is no
            // longer pending are in the queue.
            let pending = self.pages.removals.is_pending();
            while is_full() && self.pages.free_leaf_or_yield() {}
            if !is_full() {
                return true;
            }
            if !pending && !self.pages.is_freeing() {
                return false;
            }
            thread::sleep(POLL_INTERVAL);
        }
        false
    }

    /// Evicts the coldest pages, about `need` bytes of objects: of the layer `only`, or of all
    /// layers if it is `None`.
    fn spill(&self, need: u64, only: Option<&Arc<Layer>>) -> EvictionRound {
        let nothing = |outcome| EvictionRound { taken: 0, freed: 0, outcome };
        let Some(store) = &self.pages.store else { return nothing(Ok(())) };
        if store.abandoned() > 0 {
            return nothing(Err(WritebackError::Device(Error::Media)));
        }
        store.free_copies_if_short();
        // Check for obstacles before the scan of all slots, which takes long.
        match store.budget().get() {
            limit if limit.enabled && limit.left == 0 => return nothing(Err(WritebackError::Limit)),
            _ if store.free_blocks() == 0 => return nothing(Err(WritebackError::NoSpace)),
            _ => {}
        }
        // Pages accessed from now on get a younger age than all pages counted below.
        self.pages.ages.advance(now_ms());
        let ranks = self.pages.ages.ranks();
        let rank = |word: Word| ranks[usize::from(word.age())];
        // A device's own limit counts the whole object of each page, the family's counts a shared
        // object once.
        let gain = |word: Word| match only {
            Some(_) => Pool::charged_bytes(word.memory_bytes()),
            None => self.pages.evictable_bytes(word),
        };
        let layers = self.spillable_layers(only);
        let mut by_rank = [0_u64; AGES];
        for (layer, _) in &layers {
            layer.for_each_leaf(|start, leaf| {
                for slot in start..start + LEAF_SLOTS {
                    let word = leaf.peek(slot);
                    if is_spillable(word) && !word.is_picked() {
                        by_rank[usize::from(rank(word))] += gain(word);
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
        // Bytes still needed from pages of rank `last`, the youngest age that is evicted.
        let mut left_of_last = need.saturating_sub(colder);
        let mut eviction = Eviction::of_cold_pages(&self.pages, store);
        let mut taken = 0;
        let mut outcome = Ok(());
        let is_cold = |word: Word| rank(word) <= last;
        // Shared objects follow below, if other pages do not suffice.
        let cold = |word: Word| is_spillable(word) && is_cold(word) && (only.is_some() || !word.is_shared());
        for (layer, most) in &layers {
            let mut of_layer = 0;
            layer.for_each_candidate(&[0..=MAX_SLOTS - 1], &cold, |slot, word| {
                if taken >= need || of_layer >= *most {
                    return false;
                }
                let age = rank(word);
                if age == last && left_of_last == 0 {
                    return true;
                }
                match eviction.offer(layer, slot, |_, word| rank(word) <= last) {
                    Ok(OfferOutcome::Taken(charged)) => {
                        taken += charged;
                        of_layer += charged;
                        if age == last {
                            left_of_last = left_of_last.saturating_sub(charged);
                        }
                        true
                    }
                    Ok(OfferOutcome::Skipped) => true,
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
        if taken < need && outcome.is_ok() && only.is_none() {
            let shared = self.spill_shared(&mut eviction, &layers, &is_cold, need - taken);
            taken += shared.0;
            outcome = shared.1;
        }
        let (done, ended) = eviction.end();
        EvictionRound { taken, freed: done.pages, outcome: outcome.and(ended) }
    }

    /// Returns the layers to evict from, and the maximum bytes to evict from each: those above the
    /// guaranteed memory.
    fn spillable_layers(&self, only: Option<&Arc<Layer>>) -> Vec<(Arc<Layer>, u64)> {
        if let Some(only) = only {
            return vec![(Arc::clone(only), u64::MAX)];
        }
        let may_take = |layer: Arc<Layer>| {
            let most = match layer.guarantee() {
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
