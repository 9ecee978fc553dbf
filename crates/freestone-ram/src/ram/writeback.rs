//! Writeback by hand, in the kernel's words: which pages are meant, and in which order they go.

use std::cell::Cell;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use super::candidates::{Sizes, is_spillable};
use super::evict::RECLAIMED_MIN_BLOCKS;
use super::eviction::{Eviction, Offered};
use super::layer::Layer;
use super::outcome::{WritebackError, Written};
use super::{Inner, PAGE, Ram};
use crate::spill::layout;
use crate::spill::store::{Numbers, Store};
use freestone_core::slot::{Kind, Word};
use freestone_core::sync::Instant;

/// How long writeback by hand waits at most for blocks of removed devices.
const REMOVED_TIME_MAX: Duration = Duration::from_secs(10);
/// So often who watches is asked.
const WATCH_PAGES: u64 = 64;

/// Which pages are written back.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writeback {
    /// Marked idle and not touched since.
    Idle,
    /// Stored uncompressed.
    Huge,
    /// Both.
    HugeIdle,
    /// Those on which every algorithm failed.
    Incompressible,
    /// Pages by their index, marked or not.
    Pages(Vec<RangeInclusive<u64>>),
}

/// `bd_stat`: the kernel's three columns, in units of 4 KiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BdStat {
    /// Blocks in use on the backing device. Several packed pages share one.
    pub bd_count: u64,
    /// Blocks read from it.
    pub bd_reads: u64,
    /// Blocks written to it.
    pub bd_writes: u64,
}

/// The numbers of a backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BackingStat {
    /// Bytes that are used of the device, at most 1 TiB.
    pub size: u64,
    /// Bytes of blocks in use.
    pub used_bytes: u64,
    /// Bytes of the objects in them.
    pub live_bytes: u64,
    /// Pages that lie there.
    pub spilled_pages: u64,
    /// Requests that failed, and pages that came back damaged.
    pub failed_reads: u64,
    /// Requests that failed or were not answered in time.
    pub failed_writes: u64,
    /// Writes that were given up and are not answered yet.
    pub unanswered_writes: u32,
    /// Whether the page that was read last could not be, or came back damaged.
    pub reads_fail: bool,
    /// Whether objects are packed, or lie uncompressed in a block each.
    pub compressed_writeback: bool,
}

impl Ram {
    /// Writes pages back and returns when that is done. Requests go on meanwhile. A second one
    /// waits for the first. Where removed devices still have the room that it needs, it waits for
    /// that, for 10 s at most.
    ///
    /// # Errors
    /// As [`WritebackError`] says; the first part is what was done all the same.
    pub fn writeback(&self, what: &Writeback) -> Result<Written, (Written, WritebackError)> {
        self.0.writeback(what, &mut |_, _| true)
    }

    /// The same, watched: `watch` is given the bytes of the pages that were looked at and of all
    /// that are meant, every now and then, also while this waits for another one. It ends when that
    /// says false.
    ///
    /// # Errors
    /// As [`writeback`](Self::writeback), and [`WritebackError::Cancelled`].
    pub fn writeback_watched(
        &self,
        what: &Writeback,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Written, (Written, WritebackError)> {
        self.0.writeback(what, watch)
    }

    /// The kernel's `bd_stat`; zeroes without a backing device.
    pub fn bd_stat(&self) -> BdStat {
        let Numbers { used, reads, writes, .. } =
            self.0.pages.store.as_ref().map_or_else(Numbers::default, |s| s.numbers());
        BdStat { bd_count: used, bd_reads: reads, bd_writes: writes }
    }

    /// What is known of the backing device.
    pub fn backing(&self) -> Option<BackingStat> {
        let store = self.0.pages.store.as_ref()?;
        let n = store.numbers();
        Some(BackingStat {
            size: n.blocks * PAGE,
            used_bytes: n.used * PAGE,
            live_bytes: n.live_bytes,
            spilled_pages: n.pages,
            failed_reads: n.failed_reads,
            failed_writes: n.failed_writes,
            unanswered_writes: n.unanswered,
            reads_fail: n.reads_fail,
            compressed_writeback: store.is_packed(),
        })
    }

    /// How many blocks of 4 KiB may still be written while the limit is enabled. Counts down.
    pub fn writeback_limit(&self) -> u64 {
        self.0.pages.store.as_ref().map_or(0, |store| store.budget().get().left)
    }

    /// Sets the budget. Without a backing device there is none, and nothing happens.
    pub fn set_writeback_limit(&self, blocks: u64) {
        if let Some(store) = &self.0.pages.store {
            store.budget().set(|limit| limit.left = blocks);
            self.0.pages.keeper.kick();
        }
    }

    /// Whether the budget counts.
    pub fn writeback_limit_enable(&self) -> bool {
        self.0.pages.store.as_ref().is_some_and(|store| store.budget().get().enabled)
    }

    /// Makes the budget count, or not.
    pub fn set_writeback_limit_enable(&self, enabled: bool) {
        if let Some(store) = &self.0.pages.store {
            store.budget().set(|limit| limit.enabled = enabled);
            self.0.pages.keeper.kick();
        }
    }

    /// Blocks of 4 KiB that are on their way to the backing device at once.
    pub fn writeback_batch_size(&self) -> u32 {
        self.0.pages.store.as_ref().map_or(crate::spill::store::BATCH_BLOCKS, |store| store.batch_blocks())
    }

    /// Sets [`writeback_batch_size`](Self::writeback_batch_size), at least 1. Up to four requests
    /// of a quarter of it, of at most 1 MiB, are in flight.
    pub fn set_writeback_batch_size(&self, blocks: u32) {
        if let Some(store) = &self.0.pages.store {
            store.set_batch_blocks(blocks);
        }
    }

    /// Sets how long the backing device may answer nothing at all while something is asked of it:
    /// 30 s unless set. After that reads fail, and pages that were being written stay in memory. A
    /// single request that it has lost while it answers others is given up after four times as
    /// long.
    pub fn set_backing_timeout(&self, timeout: Duration) {
        if let Some(store) = &self.0.pages.store {
            store.set_timeout(timeout);
        }
    }
}

impl Inner {
    fn writeback(
        &self,
        what: &Writeback,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<Written, (Written, WritebackError)> {
        let fail = |error| (Written::default(), error);
        let (pages, evict, layer) = (&*self.pages, &self.family.evict, self.layer());
        let store = pages.store.as_ref().ok_or(fail(WritebackError::NoBacking))?;
        let end = self.slots() - 1;
        let everything = [0..=end];
        let ranges = match what {
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
        let wanted = |word: Word| match what {
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
        let turn = pages.turn_unless(&mut || !watch(0, 0));
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
                Err(WritebackError::NoSpace) if evict.wait_for_blocks_of_the_removed(store, until, go_on) => {
                }
                // A device that is full of holes has room. Once: requests may go on making holes,
                // and pages that are meant.
                Err(WritebackError::NoSpace)
                    if !std::mem::replace(&mut reclaimed, true)
                        && evict.reclaim.until(u64::MAX, go_on) > RECLAIMED_MIN_BLOCKS => {}
                Err(WritebackError::NoSpace) if !go_on() => return Err((done, WritebackError::Cancelled)),
                Err(error) => return Err((done, error)),
            }
        }
    }
}

impl Layer {
    /// Offers what is wanted. Where everything will go, in the order of addresses, so that
    /// neighbours stay neighbours on disk; where a limit or the device's size will end it early,
    /// the largest objects first, as in the kernel: they free most.
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
        self.each_candidate(ranges, wanted, |_, word| {
            sizes.count(word);
            blocks += 1;
            units += u64::from(layout::units(word.stored_bytes()));
            true
        });
        let (mut offered, all) = (0_u64, blocks);
        if store.is_packed() {
            // Ends of runs stay empty: at most a page in 1 MiB, much of a run where the device is
            // fragmented.
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
            self.each_candidate(ranges, wanted, |slot, _| offer(slot, &mut outcome));
            return outcome;
        }
        let listed = self.largest_first(&sizes, ranges, wanted, |slot| offer(slot, &mut outcome));
        outcome.and(listed.map_err(WritebackError::Device))
    }
}
