//! Eviction rounds: write back cold pages when memory is short.
//!
//! Above the high mark of `mem_limit` the keeper evicts the coldest pages of the family until the
//! low mark. Requests are not delayed before the limit itself is reached; there a write waits until
//! a batch has left memory, and continues at the speed of the backing device. A write fails with
//! "no space" only if nothing can be written back: the device is full, fails or hangs, or
//! `writeback_limit` is used up.
//!
//! A device with a cap evicts its own pages in the same way. Guaranteed memory is not evicted for
//! other devices.

use std::sync::Arc;
use std::time::Duration;

use super::Ram;
use super::evict_batches::{Eviction, Offered};
use super::idle::renumber_ages;
use super::layer::Layer;
use super::limits::{LOW_PERCENT, high_mark};
use super::outcome::{Evicted, EvictionHistory, WritebackError};
use super::page_search::is_spillable;
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
/// Minimum bytes that a round frees while requests wait for memory.
const ROUND_BYTES_MIN: u64 = 16 * PAGE;
/// Blocks (4 MiB) that a round reclaims on a device full of holes: small, as writes may be waiting.
const RECLAIMED_BLOCKS: u64 = 1024;
/// A device that was full is retried only if reclaim freed more blocks than this.
pub(super) const RECLAIMED_MIN_BLOCKS: u64 = 4;
/// Poll interval while waiting for removed devices.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The eviction of a family's pages.
pub(super) struct Evict {
    pages: Arc<Pages>,
    pub reclaim: Reclaim,
    /// Results of evictions for the family's limit.
    history: Mutex<EvictionHistory>,
    /// The obstacle to eviction logged last.
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

    /// Evicts pages until the low mark, if memory is above the high mark or requests wait.
    pub(super) fn evict_as_needed(&self, waiting: bool) {
        let waiting = self.evict_under_caps(waiting);
        let Some((high, low)) = self.pages.eviction_marks() else {
            // The limit was removed.
            if waiting {
                self.pages.memory_freed();
            }
            return;
        };
        // Memory reserved for others counts as used.
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
            self.pages.memory_freed();
        }
        let need = self.pages.pool.pages().saturating_sub(low) * PAGE;
        let need = if waiting { need.max(ROUND_BYTES_MIN) } else { need };
        if need == 0 {
            return;
        }
        let spilled = self.spill_and_reclaim(need, None);
        // Freed objects are scattered: only whole free pages can serve other size classes.
        let compacted = if spilled.taken > 0 { self.pages.compact() } else { 0 };
        let progressed = spilled.freed > 0 || compacted > 0;
        let again = self.record_round(&self.history, &spilled, progressed);
        match (progressed, again) {
            (true, _) => self.pages.memory_freed(),
            (false, true) => {}
            (false, false) => return self.pages.keeper.retry_last_time(),
        }
        if again && (self.pages.pool.pages() > high || !progressed) {
            self.pages.keeper.kick();
        }
    }

    /// Evicts pages of devices near their own caps. Returns true if requests of other devices wait.
    fn evict_under_caps(&self, waiting: bool) -> bool {
        let full: Vec<_> = self.pages.layers.all().into_iter().filter(|layer| is_full(layer)).collect();
        if full.is_empty() {
            return waiting;
        }
        let mut next = Vec::new();
        for layer in full {
            let (progressed, again) = self.evict_under_cap(&layer);
            let is_its = |ram: &Ram| ram.layer_id() == layer.id();
            match (progressed, again) {
                (true, _) => {
                    self.pages.keeper.memory_freed_for(is_its);
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
        self.pages.keeper.has_waiting(|ram| next.iter().all(|layer| layer.id() != ram.layer_id()))
    }

    /// Evicts pages of a device near its own cap. Returns whether the device has space, and whether
    /// another round makes sense.
    fn evict_under_cap(&self, layer: &Arc<Layer>) -> (bool, bool) {
        if layer.history().lock().is_paused() {
            return (false, false);
        }
        let _one = self.pages.background.lock();
        if !is_full(layer) {
            // A manual writeback made space meanwhile.
            return (true, false);
        }
        let cap = layer.cap();
        let low = (cap / 100 * LOW_PERCENT).min(cap.saturating_sub(4 * PAGE));
        let spilled = self.spill_and_reclaim(layer.charged().saturating_sub(low).max(1), Some(layer));
        let progressed = spilled.freed > 0 || !is_full(layer);
        (progressed, self.record_round(layer.history(), &spilled, progressed))
    }

    /// Records the result of a round. Returns true if another round makes sense.
    fn record_round(&self, history: &Mutex<EvictionHistory>, spilled: &Evicted, progressed: bool) -> bool {
        let error = spilled.outcome.err();
        let before = std::mem::replace(&mut *self.obstacle.lock(), error);
        // Log a change of the obstacle only, rate limited.
        if let Some(error) = error.filter(|_| before != error)
            && let Some(held_back) = self.lines.line(error)
        {
            tracing::warn!("{}: cannot evict pages to backing_dev: {error}{held_back}", self.pages.name());
        }
        history.lock().record_round(spilled, progressed, self.is_hanging())
    }

    fn charged(&self) -> u64 {
        self.pages.layers.all().iter().map(|layer| layer.charged()).sum()
    }

    fn is_hanging(&self) -> bool {
        self.pages.store.as_ref().is_some_and(|store| store.unanswered() > 0)
    }

    /// Evicts as [`spill`](Self::spill). If the device is full, frees blocks of removed devices or
    /// reclaims holes, and retries once.
    fn spill_and_reclaim(&self, need: u64, only: Option<&Arc<Layer>>) -> Evicted {
        let first = self.spill(need, only);
        if first.outcome != Err(WritebackError::NoSpace)
            || !self.free_removed_blocks()
                && self.reclaim.reclaim_blocks(RECLAIMED_BLOCKS, &mut || true) <= RECLAIMED_MIN_BLOCKS
        {
            return first;
        }
        let again = self.spill(need.saturating_sub(first.taken).max(1), only);
        Evicted { taken: first.taken + again.taken, freed: first.freed + again.freed, outcome: again.outcome }
    }

    /// Frees the pages of removed devices on the backing device. Returns true if that freed blocks.
    fn free_removed_blocks(&self) -> bool {
        let Some(store) = &self.pages.store else { return false };
        let before = store.free_blocks();
        while store.free_blocks() < before + RECLAIMED_BLOCKS && self.pages.free_leaf_or_yield() {}
        store.free_blocks() > before
    }

    /// Frees the pages of removed devices on the backing device, and waits for removals in
    /// progress, until `until` or until `go_on` returns false. Returns true if there is space.
    pub(super) fn wait_for_removed_blocks(
        &self,
        store: &Store,
        until: Instant,
        go_on: &mut dyn FnMut() -> bool,
    ) -> bool {
        let is_full = || store.free_blocks() <= RECLAIMED_MIN_BLOCKS;
        while Instant::now() < until && go_on() {
            // Read before the queue of retired layers: a removal that is no longer pending is in
            // the queue.
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

    /// Evicts about `need` bytes of objects, the coldest first.
    fn spill(&self, need: u64, only: Option<&Arc<Layer>>) -> Evicted {
        let nothing = |outcome| Evicted { taken: 0, freed: 0, outcome };
        let Some(store) = &self.pages.store else { return nothing(Ok(())) };
        if store.unanswered() > 0 {
            return nothing(Err(WritebackError::Device(Error::Media)));
        }
        // Checked before the scan of all slots.
        match store.budget().get() {
            limit if limit.enabled && limit.left == 0 => return nothing(Err(WritebackError::Limit)),
            _ if store.free_blocks() == 0 => return nothing(Err(WritebackError::NoSpace)),
            _ => {}
        }
        // Pages accessed from here on are younger than all existing pages.
        self.pages.ages.advance(now_ms());
        let ranks = self.pages.ages.ranks();
        let rank = |word: Word| ranks[usize::from(word.age())];
        let layers = self.spillable_layers(only);
        let mut by_rank = [0_u64; AGES];
        for (layer, _) in &layers {
            layer.for_each_leaf(|start, leaf| {
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
        // Bytes still needed from the youngest age that is evicted.
        let mut left_of_last = need.saturating_sub(colder);
        let mut eviction = Eviction::new(&self.pages, store);
        let mut taken = 0;
        let mut outcome = Ok(());
        let cold = |word: Word| is_spillable(word) && rank(word) <= last;
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

    /// Returns the layers to evict from, and the maximum bytes for each.
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
