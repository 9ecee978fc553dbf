//! Writeback of a device on request, with its budget and statistics.

use std::time::Duration;

use crate::ram::device::Ram;
use crate::ram::memory::outcome::{WritebackError, WritebackReport};
use crate::ram::spilling::writeback::{BackingStat, BdStat, Writeback};
use freestone_spill::store::{BATCH_BLOCKS, StoreStat};

impl Ram {
    /// Writes the selected pages to the backing device and returns when they are written. Requests
    /// continue meanwhile; concurrent writebacks wait for each other. If removed devices still hold
    /// the needed blocks, waits up to 10 s for these blocks.
    ///
    /// # Errors
    /// Returns a [`WritebackError`] together with the report of the pages written so far.
    pub fn writeback(
        &self,
        selection: &Writeback,
    ) -> Result<WritebackReport, (WritebackReport, WritebackError)> {
        self.writeback_with_progress(selection, &mut |_, _| true)
    }

    /// As [`writeback`](Self::writeback), with progress. `watch` receives the bytes of the pages
    /// visited and of all selected pages. `watch` is called also while this call waits for another
    /// writeback. The writeback ends when `watch` returns false.
    ///
    /// # Errors
    /// As [`writeback`](Self::writeback), and [`WritebackError::Cancelled`].
    pub fn writeback_with_progress(
        &self,
        selection: &Writeback,
        watch: &mut dyn FnMut(u64, u64) -> bool,
    ) -> Result<WritebackReport, (WritebackReport, WritebackError)> {
        self.0.family.evict.writeback(&self.0.layer(), self.0.slots(), selection, watch)
    }

    /// Returns the statistics of the kernel's `bd_stat`; all zero without a backing device.
    pub fn bd_stat(&self) -> BdStat {
        let StoreStat { used, reads, writes, .. } =
            self.0.pages.store.as_ref().map_or_else(StoreStat::default, |s| s.stat());
        BdStat { bd_count: used, bd_reads: reads, bd_writes: writes }
    }

    /// Returns the statistics of the family's backing device; `None` without one.
    pub fn backing(&self) -> Option<BackingStat> {
        self.0.pages.store.as_deref().map(BackingStat::of)
    }

    /// Returns the remaining writeback budget in blocks of 4 KiB; 0 without a backing device.
    pub fn writeback_limit(&self) -> u64 {
        self.0.pages.store.as_ref().map_or(0, |store| store.budget().get().left)
    }

    /// Sets the remaining writeback budget in blocks of 4 KiB; no effect without a backing device.
    pub fn set_writeback_limit(&self, blocks: u64) {
        if let Some(store) = &self.0.pages.store {
            store.budget().set(|limit| limit.left = blocks);
            self.0.pages.keeper.kick();
        }
    }

    /// Returns true if the writeback budget is enforced; false without a backing device.
    pub fn writeback_limit_enable(&self) -> bool {
        self.0.pages.store.as_ref().is_some_and(|store| store.budget().get().enabled)
    }

    /// Enables or disables the writeback budget; no effect without a backing device.
    pub fn set_writeback_limit_enable(&self, enabled: bool) {
        if let Some(store) = &self.0.pages.store {
            store.budget().set(|limit| limit.enabled = enabled);
            self.0.pages.keeper.kick();
        }
    }

    /// Returns the maximum number of blocks of 4 KiB that are in flight to the backing device.
    pub fn writeback_batch_size(&self) -> u32 {
        self.0.pages.store.as_ref().map_or(BATCH_BLOCKS, |store| store.batch_blocks())
    }

    /// Sets [`writeback_batch_size`](Self::writeback_batch_size), at least 1. The blocks in flight
    /// form up to four requests of at most 1 MiB.
    pub fn set_writeback_batch_size(&self, blocks: u32) {
        if let Some(store) = &self.0.pages.store {
            store.set_batch_blocks(blocks);
        }
    }

    /// Sets the time-out of the backing device: the time without any completion while requests are
    /// in flight (default 30 s). After that time reads fail, and pages being written stay in
    /// memory. If the device completes other requests, a single request times out after four times
    /// as long.
    pub fn set_backing_timeout(&self, timeout: Duration) {
        if let Some(store) = &self.0.pages.store {
            store.set_timeout(timeout);
        }
    }
}
