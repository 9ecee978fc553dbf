//! State of one snapshot: its bits, its loss, and its detachment from the origin.

use std::ops::Deref;
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::loss::Loss;
use super::merge_state::MergeState;
use super::permits::{COPIES_MAX_DEFAULT, copies_max};
use super::small_blocks::SmallBlocks;
use super::wait_group::Waiter;
use super::{Mode, OriginCore, Snap, SnapState};
use crate::cow::config::{Config, StoreKind};
use crate::cow::exceptions::Exceptions;
use crate::cow::store::Store;
use crate::cow::tokens::Tokens;
use freestone_core::device::{Device, Error, Geometry, Result};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::percpu::{self, Counters};
use freestone_core::sync::{AtomicU32, Mutex, OnceLock, Ordering};

/// Bits of a snapshot's state.
mod bit {
    /// Every access to the snapshot fails.
    pub const INVALID: u32 = 1;
    /// The COW device is marked invalid, too, so the origin need not preserve chunks any more.
    pub const LOST: u32 = 1 << 1;
    pub const OVERFLOW: u32 = 1 << 2;
    pub const DETACHED: u32 = 1 << 3;
    pub const MERGING: u32 = 1 << 4;
    /// The loss of the snapshot was logged.
    pub const LOGGED: u32 = 1 << 5;
    /// The simulated power was lost. Requests that started before must not continue.
    pub const POWERED_OFF: u32 = 1 << 6;
}

impl Deref for Snap {
    type Target = SnapState;
    fn deref(&self) -> &SnapState {
        &self.0
    }
}

impl SnapState {
    /// Schedules a record in the store that the store is closed at the origin's present content
    /// version.
    fn record_close(&self) {
        // No record is written for a snapshot that was never attached, because its store may have
        // missed writes.
        if self.missed_writes.get().is_some()
            && let Some(content) = self.core.content_version.content()
        {
            self.store.schedule_close_record(content);
        }
    }
}

impl Drop for SnapState {
    fn drop(&mut self) {
        // A merging snapshot is in use until its origin is dropped, so it is closed here. After a
        // finished merge the store is empty and needs no record.
        let merging = self.state.load(Ordering::SeqCst) & (bit::MERGING | bit::DETACHED) == bit::MERGING;
        if merging && !self.merge.is_finished() {
            self.record_close();
        }
    }
}

impl Snap {
    pub fn new(
        core: &PerCpuArc<OriginCore>,
        store: Arc<Store>,
        exceptions: Exceptions<Waiter>,
        config: Config,
        origin: &Geometry,
    ) -> PerCpuArc<Self> {
        let cow_block = store.device().geometry().logical_block;
        let cow: Arc<dyn Device> = if cow_block > origin.logical_block {
            let work_queue = Arc::clone(&core.work_queue);
            Arc::new(SmallBlocks::new(Arc::clone(store.device()), origin.logical_block, work_queue))
        } else {
            Arc::clone(store.device())
        };
        let bits = if store.is_valid() { 0 } else { bit::INVALID | bit::LOST };
        // An interrupted merge is resumed later; the snapshot serves the origin already.
        let resumes_merge = store.merge_id().is_some();
        let bits = if resumes_merge { bits | bit::MERGING } else { bits };
        let limit = COPIES_MAX_DEFAULT.min(copies_max(store.chunk_bytes()));
        let state = Arc::new(SnapState {
            core: core.clone(),
            exceptions,
            gate: FreezeGate::new(if resumes_merge { Mode::Merging } else { Mode::Normal }),
            copy_tokens: Tokens::new(limit as u64, percpu::cpus()),
            config,
            size: origin.size,
            merge: if resumes_merge { MergeState::interrupted() } else { MergeState::default() },
            location: OnceLock::new(),
            missed_writes: OnceLock::new(),
            counters: Counters::default(),
            cow,
            logical_block: origin.logical_block.max(cow_block),
            state: AtomicU32::new(bits),
            loss_waiters: Mutex::default(),
            store,
        });
        PerCpuArc::new(|| Self(CachePadded::new(Arc::clone(&state))))
    }

    /// Returns true if both references belong to the same snapshot.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub fn chunk(&self) -> u64 {
        self.store.chunk_bytes()
    }

    /// Returns the logical block size in bytes: the larger of the origin's and the COW device's.
    pub fn block(&self) -> u64 {
        self.logical_block.into()
    }

    /// Rounds `end` down to a logical block of the snapshot. A device with smaller blocks may stop
    /// within a block of the snapshot.
    pub fn round_down_to_block(&self, end: u64) -> u64 {
        end - end % self.block()
    }

    pub fn cow_block(&self) -> u64 {
        u64::from(self.store.device().geometry().logical_block)
    }

    fn has(&self, bits: u32) -> bool {
        self.state.load(Ordering::SeqCst) & bits != 0
    }

    fn set(&self, bits: u32) {
        self.state.fetch_or(bits, Ordering::SeqCst);
    }

    pub fn state(&self) -> u32 {
        self.state.load(Ordering::SeqCst)
    }

    /// Returns true if data read from the origin since the state was `before` may be used, because
    /// no merge has begun since.
    ///
    /// # Errors
    /// The snapshot is invalid or detached.
    pub fn is_same_mode_since(&self, before: u32) -> Result<bool> {
        self.check_readable()?;
        Ok((self.state() ^ before) & bit::MERGING == 0)
    }

    pub fn check_readable(&self) -> Result<()> {
        match self.state() {
            now if now & bit::DETACHED != 0 => Err(Error::Gone),
            now if now & bit::INVALID != 0 => Err(Error::Media),
            _ => Ok(()),
        }
    }

    pub fn check_writable(&self) -> Result<()> {
        self.check_readable()?;
        if self.has_overflowed() { Err(Error::NoSpace) } else { Ok(()) }
    }

    /// Returns true if the origin must preserve chunks for this snapshot.
    pub fn is_active(&self) -> bool {
        !self.has(bit::LOST | bit::DETACHED)
    }

    pub fn is_invalid(&self) -> bool {
        self.has(bit::INVALID)
    }

    /// Returns true if a write to the snapshot found no space on the COW device. Always false
    /// during a merge.
    pub fn has_overflowed(&self) -> bool {
        self.state() & (bit::OVERFLOW | bit::MERGING) == bit::OVERFLOW
    }

    pub fn is_merging(&self) -> bool {
        self.has(bit::MERGING)
    }

    pub fn set_merging(&self) {
        self.set(bit::MERGING);
    }

    /// Marks the snapshot invalid in memory. Every later access fails.
    pub fn mark_invalid(&self) {
        self.set(bit::INVALID);
    }

    /// Records that the COW device is marked invalid, and wakes the origin's writes that wait for
    /// this mark.
    pub fn finish_loss(&self) {
        self.set(bit::INVALID | bit::LOST);
        for waiter in std::mem::take(&mut *self.loss_waiters.lock()) {
            waiter.notify(Ok(()));
        }
    }

    /// Notifies `waiter` when the COW device is marked invalid, or at once if the origin need not
    /// preserve chunks any more.
    pub fn wait_for_loss(&self, waiter: Waiter) {
        let mut waiting = self.loss_waiters.lock();
        if self.is_active() {
            return waiting.push(waiter);
        }
        drop(waiting);
        waiter.notify(Ok(()));
    }

    /// Marks the snapshot invalid in memory, and logs the reason once.
    pub fn lose(&self, loss: Loss) {
        self.mark_invalid();
        if self.state.fetch_or(bit::LOGGED, Ordering::SeqCst) & bit::LOGGED == 0 {
            let store = self.location.get().map_or("an exception store", |location| location);
            tracing::warn!("{store}: the snapshot is lost: {loss}");
        }
    }

    /// Invalidates the snapshot, and notifies `waiter` when the COW device is marked. Calls a
    /// device, so the thread must not be pinned.
    pub fn invalidate(self: &Arc<Self>, loss: Loss, waiter: Option<Waiter>) {
        self.lose(loss);
        if let Some(waiter) = waiter {
            self.wait_for_loss(waiter);
        }
        let snap = Arc::clone(self);
        self.store.invalidate(move || snap.finish_loss());
    }

    /// Handles a write to the snapshot that found no space on the COW device.
    pub fn handle_overflow(self: &Arc<Self>) {
        if self.store.kind() == StoreKind::PersistentOverflow {
            self.set(bit::OVERFLOW);
        } else {
            self.invalidate(Loss::NoRoom, None);
        }
    }

    /// Detaches the snapshot from its origin. Later accesses fail, and the origin preserves no more
    /// chunks for the snapshot.
    pub fn detach(self: &Arc<Self>) {
        if !self.has(bit::DETACHED) && !self.is_merging() {
            // The version is recorded before the snapshot leaves the origin's list, because later
            // writes preserve no chunks for the snapshot.
            self.record_close();
        }
        self.leave_origin();
    }

    /// Detaches the snapshot after a simulated power loss, without recording anything.
    pub fn detach_powered_off(self: &Arc<Self>) {
        self.set(bit::INVALID | bit::LOGGED | bit::POWERED_OFF);
        self.leave_origin();
    }

    /// Returns true if the snapshot was detached by a simulated power loss, so that its requests
    /// must not continue.
    pub fn is_powered_off(&self) -> bool {
        self.has(bit::POWERED_OFF)
    }

    fn leave_origin(self: &Arc<Self>) {
        // The bit is set before the snapshot leaves the list. A read of the snapshot may return
        // data that a later write stored on the origin; the read then finds the bit and fails.
        self.set(bit::DETACHED);
        self.core.remove_snapshot(self);
        self.store.release();
        // The origin's writes need not wait for the COW device any more.
        for waiter in std::mem::take(&mut *self.loss_waiters.lock()) {
            waiter.notify(Ok(()));
        }
    }
}
