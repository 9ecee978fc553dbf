//! Manual writeback with the kernel's page selection and order.

use std::cell::Cell;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::evict_batches::{Eviction, Offered};
use super::evict_rounds::RECLAIMED_MIN_BLOCKS;
use super::layer::Layer;
use super::outcome::{WritebackError, Written};
use super::page_search::{Sizes, is_spillable};
use super::{Inner, PAGE, Ram};
use crate::spill::layout;
use crate::spill::store::{Numbers, Store};
use freestone_core::slot::{Kind, Word};
use freestone_core::sync::Instant;

/// Maximum wait of a manual writeback for blocks of removed devices.
const REMOVED_TIME_MAX: Duration = Duration::from_secs(10);
/// Pages between two calls of the progress callback.
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
    /// Pages by index, regardless of marks.
    Pages(Vec<RangeInclusive<u64>>),
}

/// The three columns of the kernel's `bd_stat`, in units of 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BdStat {
    /// Blocks in use on the backing device. Several packed pages share one block.
    pub bd_count: u64,
    /// Blocks read from the device.
    pub bd_reads: u64,
    /// Blocks written to the device.
    pub bd_writes: u64,
}

/// Statistics of a backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackingStat {
    /// Usable bytes of the device, at most 1 TiB.
    pub size: u64,
    /// Bytes of the blocks in use.
    pub used_bytes: u64,
    /// Bytes of the objects in them.
    pub live_bytes: u64,
    /// Pages on the device.
    pub spilled_pages: u64,
    /// Failed read requests and damaged pages.
    pub failed_reads: u64,
    /// Failed and timed-out write requests.
    pub failed_writes: u64,
    /// Abandoned writes that the device has not completed.
    pub unanswered_writes: u32,
    /// Whether the last page read failed or was damaged.
    pub reads_fail: bool,
    /// Whether no block is free for writeback.
    pub is_full: bool,
    /// Whether objects are packed, as opposed to one uncompressed page per block.
    pub compressed_writeback: bool,
}

impl BackingStat {
    pub(super) fn of(store: &Store) -> Self {
        let n = store.numbers();
        Self {
            size: n.blocks * PAGE,
            used_bytes: n.used * PAGE,
            live_bytes: n.live_bytes,
            spilled_pages: n.pages,
            failed_reads: n.failed_reads,
            failed_writes: n.failed_writes,
            unanswered_writes: n.unanswered,
            reads_fail: n.reads_fail,
            is_full: n.is_full,
            compressed_writeback: store.is_packed(),
        }
    }
}

impl Ram {
    /// Writes pages back and returns when done. Requests continue meanwhile. A concurrent call
    /// waits for the first. If removed devices hold the space that is needed, waits up to 10 s for
    /// it.
    ///
    /// # Errors
    /// Returns a [`WritebackError`] together with the result so far.
    pub fn writeback(&self, selection: &Writeback) -> Result<Written, (Written, WritebackError)> {
        self.0.writeback(selection, &mut |_, _| true)
    }

    /// As [`writeback`](Self::writeback), with progress. `watch` receives the bytes of the pages
    /// visited and of all selected pages, also while waiting for another writeback. The writeback
    /// ends when `watch` returns false.
    ///
    /// # Errors
    /// As [`writeback`](Self::writeback), and [`WritebackError::Cancelled`].
    pub fn writeback_watched(
        &self,
        selection: &Writeback,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Written, (Written, WritebackError)> {
        self.0.writeback(selection, watch)
    }

    /// Returns the statistics of the kernel's `bd_stat`; zeroes without a backing device.
    pub fn bd_stat(&self) -> BdStat {
        let Numbers { used, reads, writes, .. } =
            self.0.pages.store.as_ref().map_or_else(Numbers::default, |s| s.numbers());
        BdStat { bd_count: used, bd_reads: reads, bd_writes: writes }
    }

    /// Returns the statistics of the family's backing device.
    pub fn backing(&self) -> Option<BackingStat> {
        self.0.pages.store.as_deref().map(BackingStat::of)
    }

    /// Returns the remaining writeback budget in blocks of 4 KiB.
    pub fn writeback_limit(&self) -> u64 {
        self.0.pages.store.as_ref().map_or(0, |store| store.budget().get().left)
    }

    /// Sets the writeback budget; no effect without a backing device.
    pub fn set_writeback_limit(&self, blocks: u64) {
        if let Some(store) = &self.0.pages.store {
            store.budget().set(|limit| limit.left = blocks);
            self.0.pages.keeper.kick();
        }
    }

    /// Returns true if the writeback budget is enforced.
    pub fn writeback_limit_enable(&self) -> bool {
        self.0.pages.store.as_ref().is_some_and(|store| store.budget().get().enabled)
    }

    /// Enables or disables the writeback budget.
    pub fn set_writeback_limit_enable(&self, enabled: bool) {
        if let Some(store) = &self.0.pages.store {
            store.budget().set(|limit| limit.enabled = enabled);
            self.0.pages.keeper.kick();
        }
    }

    /// Returns the maximum blocks of 4 KiB in flight to the backing device.
    pub fn writeback_batch_size(&self) -> u32 {
        self.0.pages.store.as_ref().map_or(crate::spill::store::BATCH_BLOCKS, |store| store.batch_blocks())
    }

    /// Sets [`writeback_batch_size`](Self::writeback_batch_size), at least 1. A batch consists of
    /// up to four requests of at most 1 MiB.
    pub fn set_writeback_batch_size(&self, blocks: u32) {
        if let Some(store) = &self.0.pages.store {
            store.set_batch_blocks(blocks);
        }
    }

    /// Sets the time-out of the backing device: the time without any completion while requests are
    /// in flight (default 30 s). After it reads fail, and pages being written stay in memory. A
    /// single request lost by a device that completes others times out after four times as long.
    pub fn set_backing_timeout(&self, timeout: Duration) {
        if let Some(store) = &self.0.pages.store {
            store.set_timeout(timeout);
        }
    }
}

impl Inner {
    fn writeback(
        &self,
        selection: &Writeback,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Written, (Written, WritebackError)> {
        let fail = |error| (Written::default(), error);
        let (pages, evict, layer) = (&*self.pages, &self.family.evict, self.layer());
        let store = pages.store.as_ref().ok_or(fail(WritebackError::NoBacking))?;
        let end = self.slots() - 1;
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
        let mut done = Written::default();
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
                Err(WritebackError::NoSpace) if evict.wait_for_removed_blocks(store, until, go_on) => {}
                // A device full of holes has space. Retry only once: requests may create holes and
                // selected pages all the time.
                Err(WritebackError::NoSpace)
                    if !std::mem::replace(&mut reclaimed, true)
                        && evict.reclaim.reclaim_blocks(u64::MAX, go_on) > RECLAIMED_MIN_BLOCKS => {}
                Err(WritebackError::NoSpace) if !go_on() => return Err((done, WritebackError::Cancelled)),
                Err(error) => return Err((done, error)),
            }
        }
    }
}

impl Layer {
    /// Offers the selected pages. If all of them fit, in order of address, so that neighbours stay
    /// together on the device. If a limit or the device's size will end the writeback early,
    /// largest objects first, as in the kernel: they free most memory.
    fn select(
        self: &Arc<Self>,
        store: &Arc<Store>,
        ranges: &[RangeInclusive<u64>],
        wanted: &impl Fn(Word) -> bool,
        eviction: &mut Eviction<'_>,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<(), WritebackError> {
        let wanted = &|word: Word| is_spillable(word) && wanted(word);
        let mut sizes = Sizes::default();
        let mut blocks = 0_u64;
        let mut units = 0_u64;
        self.for_each_candidate(ranges, wanted, |_, word| {
            sizes.count(word);
            blocks += 1;
            units += u64::from(layout::units(word.stored_bytes()));
            true
        });
        let (mut offered, all) = (0_u64, blocks);
        if store.is_packed() {
            // Ends of runs stay empty: at most a page per MiB, but much of a run on a fragmented
            // device.
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
            match eviction.offer(self, slot, wanted) {
                Ok(Offered::Taken(_) | Offered::Passed) => true,
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
