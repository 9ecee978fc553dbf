//! Writeback on request, with the kernel's page selection and order.

use std::cell::Cell;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::evict_batches::{Eviction, OfferOutcome};
use super::evict_rounds::{Evict, RECLAIMED_MIN_BLOCKS};
use crate::ram::geometry::PAGE;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::outcome::{WritebackError, WritebackReport};
use crate::ram::memory::page_search::{Sizes, is_spillable};
use freestone_core::PAGE_BYTES;
use freestone_core::slot::{Kind, Word};
use freestone_core::sync::Instant;
use freestone_spill::layout;
use freestone_spill::store::Store;

/// Maximum time that a manual writeback waits for blocks that removed devices still hold.
const REMOVED_TIME_MAX: Duration = Duration::from_secs(10);
/// Number of pages offered between two calls of the progress callback.
const WATCH_PAGES: u64 = 64;

/// Selection of the pages to write back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writeback {
    /// Pages marked idle and not accessed since.
    Idle,
    /// Pages stored uncompressed.
    Huge,
    /// Pages that are both huge and idle.
    HugeIdle,
    /// Pages that no algorithm could compress.
    Incompressible,
    /// Pages by number, whether idle or huge or neither.
    Pages(Vec<RangeInclusive<u64>>),
}

/// The three columns of the kernel's `bd_stat`, in units of 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BdStat {
    /// Number of blocks in use on the backing device. Several packed pages share one block.
    pub bd_count: u64,
    /// Number of blocks read from the device so far.
    pub bd_reads: u64,
    /// Number of blocks written to the device so far.
    pub bd_writes: u64,
}

/// Statistics of the backing device of a family (devices that share a memory pool).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackingStat {
    /// Usable bytes of the device, at most 1 TiB.
    pub size: u64,
    /// Bytes of the blocks in use, including holes within them.
    pub used_bytes: u64,
    /// Bytes of the objects in these blocks.
    pub live_bytes: u64,
    /// Number of pages that are on the device only.
    pub spilled_pages: u64,
    /// Number of pages in memory whose object is also on the device. If they are evicted unchanged,
    /// nothing is written.
    pub clean_pages: u64,
    /// Number of failed read requests and of pages read damaged.
    pub failed_reads: u64,
    /// Number of failed and timed-out write requests.
    pub failed_writes: u64,
    /// Number of writes that timed out and that the device still has not completed.
    pub abandoned_writes: u32,
    /// True if the last read of a page failed or returned damaged content.
    pub last_read_failed: bool,
    /// True if no block is free for writeback.
    pub is_full: bool,
    /// True if compressed objects are packed; false for one uncompressed page per block.
    pub compressed_writeback: bool,
}

impl BackingStat {
    pub(in crate::ram) fn of(store: &Store) -> Self {
        let n = store.stat();
        Self {
            size: n.blocks * PAGE,
            used_bytes: n.used * PAGE,
            live_bytes: n.live_bytes,
            spilled_pages: n.pages,
            clean_pages: n.clean_pages,
            failed_reads: n.failed_reads,
            failed_writes: n.failed_writes,
            abandoned_writes: n.abandoned,
            last_read_failed: n.last_read_failed,
            is_full: n.is_full,
            compressed_writeback: store.is_packed(),
        }
    }
}

/// Ranges of slots, sorted for lookups.
struct Scope(Vec<RangeInclusive<u64>>);

impl Scope {
    fn of(ranges: &[RangeInclusive<u64>]) -> Self {
        let mut sorted: Vec<RangeInclusive<u64>> = Vec::with_capacity(ranges.len());
        sorted.extend_from_slice(ranges);
        sorted.sort_unstable_by_key(|range| *range.start());
        sorted.dedup_by(|next, last| {
            let touches = next.start() <= last.end();
            if touches {
                *last = *last.start()..=*last.end().max(next.end());
            }
            touches
        });
        Self(sorted)
    }

    fn has(&self, slot: u64) -> bool {
        let after = self.0.partition_point(|range| *range.start() <= slot);
        after > 0 && slot <= *self.0[after - 1].end()
    }
}

impl Evict {
    /// Writes the selected pages of a device's `layer` to the backing device. The device has
    /// `slots` pages. See
    /// [`Ram::writeback_with_progress`](crate::ram::Ram::writeback_with_progress).
    pub fn writeback(
        &self,
        layer: &Arc<Layer>,
        slots: u64,
        selection: &Writeback,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<WritebackReport, (WritebackReport, WritebackError)> {
        let fail = |error| (WritebackReport::default(), error);
        let pages = &*self.pages;
        let store = pages.store.as_ref().ok_or(fail(WritebackError::NoBacking))?;
        let end = slots - 1;
        let everything = [0..=end];
        let ranges = match selection {
            Writeback::Pages(ranges) => {
                for range in ranges {
                    let (first, last) = (*range.start(), *range.end());
                    if first > last || last > end {
                        return Err(fail(WritebackError::Range { first, last, end }));
                    }
                }
                ranges.as_slice()
            }
            _ => &everything,
        };
        let wanted = |word: Word| match selection {
            Writeback::Idle => word.is_idle(),
            Writeback::Huge => word.kind() == Kind::Huge,
            Writeback::HugeIdle => word.kind() == Kind::Huge && word.is_idle(),
            Writeback::Incompressible => word.is_incompressible(),
            Writeback::Pages(_) => true,
        };
        let told = Cell::new((0, 0));
        let watch = &mut |done, all| {
            told.set((done, all));
            watch(done, all)
        };
        let turn = pages.lock_background(&mut || !watch(0, 0));
        let _one = turn.ok_or(fail(WritebackError::Cancelled))?;
        let mut done = WritebackReport::default();
        let mut reclaimed = false;
        let until = Instant::now() + REMOVED_TIME_MAX;
        loop {
            let mut eviction = Eviction::new(pages, store);
            let outcome = layer.select(store, ranges, &wanted, &mut eviction, watch);
            let (written, ended) = eviction.end();
            done.pages += written.pages;
            done.blocks += written.blocks;
            let go_on = &mut || watch(told.get().0, told.get().1);
            match outcome.and(ended) {
                Ok(()) => return Ok(done),
                Err(WritebackError::NoSpace) if self.wait_for_removed_blocks(store, until, go_on) => {}
                // A device full of holes has space: reclaim the holes and retry. Retry only once,
                // as requests may create holes and selected pages endlessly.
                Err(WritebackError::NoSpace)
                    if !std::mem::replace(&mut reclaimed, true)
                        && self.reclaim.reclaim_blocks(u64::MAX, go_on) > RECLAIMED_MIN_BLOCKS => {}
                Err(WritebackError::NoSpace) if !go_on() => return Err((done, WritebackError::Cancelled)),
                Err(error) => return Err((done, error)),
            }
        }
    }
}

impl Layer {
    /// Offers the selected pages to `eviction`. If all of them fit on the device, offers them in
    /// order of address, so that neighbours stay together. If the budget or the device's size will
    /// end the writeback early, offers the largest objects first, as in the kernel: they free most
    /// memory.
    fn select(
        self: &Arc<Self>,
        store: &Arc<Store>,
        ranges: &[RangeInclusive<u64>],
        wanted: &impl Fn(Word) -> bool,
        eviction: &mut Eviction<'_>,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<(), WritebackError> {
        let wanted = &|word: Word| is_spillable(word) && wanted(word);
        let scope = Scope::of(ranges);
        let mut sizes = Sizes::default();
        let mut blocks = 0_u64;
        let mut units = 0_u64;
        self.for_each_candidate(ranges, wanted, |_, word| {
            sizes.count(word);
            blocks += 1;
            // A group is written as a whole if half of its pages are selected, and pages alone
            // otherwise: assume twice the share of a page.
            let bytes = if word.is_grouped() { word.memory_bytes() * 2 } else { word.memory_bytes() };
            units += u64::from(layout::units(bytes.min(PAGE_BYTES)));
            true
        });
        let (mut offered, all) = (0_u64, blocks);
        if store.is_packed() {
            // Estimate with 1/8 extra, as the end of each run of blocks stays empty. The loss is at
            // most a page per MiB, but larger if free blocks are fragmented.
            blocks = units * layout::UNIT_BYTES as u64 / PAGE * 9 / 8 + 2 * u64::from(store.batch_blocks());
        }
        let budget = store.budget().get();
        let mut outcome = Ok(());
        let mut offer = |slot, outcome: &mut Result<(), WritebackError>| {
            if offered.is_multiple_of(WATCH_PAGES) && !watch(offered.min(all) * PAGE, all * PAGE) {
                *outcome = Err(WritebackError::Cancelled);
                return false;
            }
            offered += 1;
            match eviction.offer(self, slot, |slot, word| wanted(word) && scope.has(slot)) {
                Ok(OfferOutcome::Taken(_) | OfferOutcome::Skipped) => true,
                Err(error) => {
                    *outcome = Err(error);
                    false
                }
            }
        };
        if blocks <= store.free_blocks() && (!budget.enabled || blocks <= budget.left) {
            self.for_each_candidate(ranges, wanted, |slot, _| offer(slot, &mut outcome));
            return outcome;
        }
        let listed = self.largest_first(&sizes, ranges, wanted, |slot| offer(slot, &mut outcome));
        outcome.and(listed.map_err(WritebackError::Device))
    }
}
