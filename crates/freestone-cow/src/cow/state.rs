//! State shared by an origin and its snapshots: the list of snapshots, their states, and the
//! permits to copy.
//!
//! # Copies in flight
//! A request acquires a permit before it locks a slot or allocates a chunk of the COW device. If no
//! permit is free, the request waits in a queue, holding nothing, and receives the permit of a
//! finished copy. So permits cannot deadlock: each permit belongs to a running copy, or to a
//! request that starts a copy or drops the permit. (The kernel's counter did deadlock as a
//! semaphore, because a waiter held a lock.)
//!
//! # Lock order
//! 1. The origin's `setup`.
//! 2. The gate of the origin, then that of a snapshot.
//! 3. A slot of `exceptions`.
//! 4. Under a slot, one after the other: the store's queue, `copy_tokens`, a wait group,
//!    `loss_waiters`, the write tracking of `merge`.
//! 5. The work queue, with no lock of item 4 held.
//!
//! No lock is held during a call of a device, but a try (`try_io`) may run on a pinned thread.

use std::ops::Deref;
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::config::{Config, StoreKind};
use super::content::{ContentVersion, MissedWrites};
use super::exceptions::Exceptions;
use super::loss::Loss;
use super::merge_state::MergeState;
use super::notes::Notes;
use super::small_blocks::SmallBlocks;
use super::store::Store;
use super::tokens::Tokens;
use super::wait_group::Waiter;
use freestone_core::device::{Completion, Device, Error, Geometry, IoBuf, Request, Result};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::percpu::{self, Counters};
use freestone_core::slot::Common;
use freestone_core::sync::{AtomicU32, Mutex, OnceLock, Ordering};
use freestone_core::work_queue::WorkQueue;
use freestone_core::zeroes::leading_zeroes;

/// Maximum number of bytes copied by one read and write, as in the kernel's sub-jobs. Also the
/// memory that a copy in flight uses.
pub const COPY_PIECE_BYTES: u64 = 512 << 10;
/// Default maximum number of copies in flight per snapshot: the kernel's `snapshot_cow_threshold`.
const COPIES_MAX_DEFAULT: usize = 2048;
/// Memory limit for the copies in flight of one snapshot, in bytes. With large chunks this limit is
/// reached before the number of copies.
const COPY_MEMORY_BYTES_MAX: u64 = 64 << 20;

/// Indexes of a snapshot's counters.
pub(super) mod counter {
    pub const COPIED: usize = 0;
    pub const FULL: usize = 1;
    pub const ORIGIN_WAITED: usize = 2;
    pub const ORIGIN_READS: usize = 3;
    pub const REREADS: usize = 4;
    pub const COUNT: usize = 5;
}

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

/// Per-CPU reference to an origin, on its own cache line.
pub(super) struct OriginCore(CachePadded<Arc<OriginState>>);

/// State shared by all references to an origin.
pub(super) struct OriginState {
    pub device: Arc<dyn Device>,
    pub notes: Option<Box<dyn Notes>>,
    /// Entered by writes to the origin. Closed to attach a snapshot or to start a merge.
    pub gate: FreezeGate<View>,
    pub work_queue: Arc<WorkQueue>,
    /// Runs queries of the origin's extents, which may wait for a disk.
    pub extents_queue: Arc<WorkQueue>,
    pub common: OnceLock<Arc<Common>>,
    /// Serializes changes of the snapshot list. Requests do not take this lock. The start of a
    /// merge holds the lock while it waits for writes in flight.
    pub setup: Mutex<SetupState>,
    /// Becomes 1 just before a snapshot serves the origin for the first time. Until then reads skip
    /// the view.
    merge_announced: AtomicU32,
    /// Content version of the origin, to detect exception stores that missed writes.
    pub content_version: ContentVersion,
    /// Function that submits a write to the snapshot that serves the origin.
    pub write_merging: WriteSnapshot,
}

/// Function that submits a write, write zeroes or discard to a snapshot.
pub(super) type WriteSnapshot = fn(Arc<Snap>, Request, IoBuf, Completion);

/// Snapshots in preparation, and the state of a merge into the origin.
#[derive(Default)]
pub(super) struct SetupState {
    /// COW devices of snapshots that are prepared but not attached.
    pub preparing: Vec<Arc<dyn Device>>,
    pub merging: Merging,
}

/// State of a merge into the origin.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Merging {
    #[default]
    No,
    /// A snapshot with an interrupted merge is open, and the merge was not resumed yet. Other
    /// existing exception stores can still be opened.
    Interrupted,
    Yes,
}

/// Snapshots that a write to the origin must check.
#[derive(Clone, Default)]
pub(super) struct View {
    /// Attached snapshots, sorted by chunk size, largest first.
    pub snapshots: Vec<PerCpuArc<Snap>>,
    /// Snapshot that serves the origin during a merge.
    pub merging: Option<PerCpuArc<Snap>>,
    /// Number of the view, increased with every change of the view.
    pub generation: u64,
    /// Boot number, increased with every simulated power loss.
    pub boot: u64,
}

/// Mode in which a snapshot handles writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// Writes to the snapshot make exceptions.
    Normal,
    /// The snapshot is being merged and serves the origin.
    Merging,
}

/// Per-CPU reference to a snapshot, on its own cache line.
pub(super) struct Snap(CachePadded<Arc<SnapState>>);

/// State shared by all references to a snapshot.
pub(super) struct SnapState {
    pub core: PerCpuArc<OriginCore>,
    pub store: Arc<Store>,
    pub exceptions: Exceptions<Waiter>,
    /// Entered by writes to the snapshot and by new exceptions.
    pub gate: FreezeGate<Mode>,
    /// Permits for copies in flight. The lock is held for a few instructions.
    copy_tokens: Tokens<PermitTask>,
    pub config: Config,
    pub size: u64,
    pub merge: MergeState,
    /// Location of the exception store, for messages.
    pub location: OnceLock<String>,
    /// Result of the check for missed writes. Set when the snapshot is attached.
    pub missed_writes: OnceLock<MissedWrites>,
    pub counters: Counters<{ counter::COUNT }>,
    /// COW device, wrapped if necessary so that its logical blocks are at most as large as the
    /// origin's.
    pub cow: Arc<dyn Device>,
    pub logical_block: u32,
    state: AtomicU32,
    /// Writes of the origin that wait until the COW device is marked invalid. The lock is held for
    /// a few instructions.
    loss_waiters: Mutex<Vec<Waiter>>,
}

/// Permit for one copy in flight of one snapshot.
pub(super) struct Permit(Arc<Snap>);

/// Task that waits for a permit.
type PermitTask = Box<dyn FnOnce(Permit) + Send>;

// ---- origin -------------------------------------------------------------------------------------

impl Deref for OriginCore {
    type Target = OriginState;
    fn deref(&self) -> &OriginState {
        &self.0
    }
}

impl OriginCore {
    pub fn new(
        device: Arc<dyn Device>,
        notes: Option<Box<dyn Notes>>,
        write_merging: WriteSnapshot,
    ) -> PerCpuArc<Self> {
        let core = Arc::new(OriginState {
            content_version: ContentVersion::new(notes.as_deref()),
            device,
            notes,
            gate: FreezeGate::new(View::default()),
            work_queue: WorkQueue::plugged("cow"),
            extents_queue: WorkQueue::new("cow-extents"),
            common: OnceLock::new(),
            setup: Mutex::default(),
            merge_announced: AtomicU32::new(0),
            write_merging,
        });
        PerCpuArc::new(|| Self(CachePadded::new(Arc::clone(&core))))
    }
}

impl OriginState {
    /// Returns the id of the merge in progress according to the origin's notes, or `None` without
    /// such a note.
    pub fn noted_merge_id(&self) -> Option<u64> {
        self.notes.as_ref()?.merge_id()
    }

    /// Announces that a snapshot will serve the origin, so that reads check the view.
    pub fn announce_merge(&self) {
        self.merge_announced.store(1, Ordering::SeqCst);
    }

    /// Returns true if a snapshot may serve the origin.
    pub fn may_have_merge(&self) -> bool {
        self.merge_announced.load(Ordering::SeqCst) != 0
    }

    /// Returns the end of the zeroes at the start of a range, and the end of the known data after
    /// these zeroes. May wait for a disk, so must be called on
    /// [`extents_queue`](Self::extents_queue).
    pub fn leading_zeroes(&self, at: u64, end: u64) -> (u64, u64) {
        leading_zeroes(at, end, |from, len, row| self.device.extents(from, len, row).map(drop))
    }

    pub fn remove_snapshot(&self, snap: &Snap) {
        self.gate.change(|view| {
            view.changed(|view| {
                view.snapshots.retain(|other| !other.is_same(snap));
                view.merging.take_if(|other| other.is_same(snap));
            })
        });
    }
}

impl Drop for OriginState {
    fn drop(&mut self) {
        self.work_queue.stop();
        self.extents_queue.stop();
        // No request is in flight, so the content does not change any more.
        if let (Some(notes), Some(content)) = (&self.notes, self.content_version.content()) {
            notes.record_close(content);
        }
    }
}

impl View {
    /// Returns a copy of the view with `change` applied and a new generation.
    pub fn changed(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut view = self.clone();
        change(&mut view);
        view.generation += 1;
        view.snapshots.sort_by_key(|snap| std::cmp::Reverse(snap.chunk()));
        view
    }
}

// ---- snapshot -----------------------------------------------------------------------------------

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

// ---- permits to copy ----------------------------------------------------------------------------

impl Snap {
    /// Sets the maximum number of copies in flight: at least 1, and at most the number that the
    /// memory limit allows. Copies in flight continue.
    pub fn set_copies_max(self: &Arc<Self>, limit: usize) {
        let limit = limit.clamp(1, copies_max(self.chunk()));
        self.run_permitted(self.copy_tokens.set_limit(limit as u64));
    }

    pub fn try_permit(self: &Arc<Self>) -> Option<Permit> {
        self.copy_tokens.take(percpu::current()).then(|| Permit(Arc::clone(self)))
    }

    /// Runs `next` with a permit on the work queue as soon as a permit is free.
    pub fn queue_for_permit(self: &Arc<Self>, next: impl FnOnce(Permit) + Send + 'static) {
        self.run_permitted(self.copy_tokens.wait(Box::new(next)));
    }

    fn run_permitted(self: &Arc<Self>, served: Vec<PermitTask>) {
        for next in served {
            let permit = Permit(Arc::clone(self));
            self.core.work_queue.push(move || next(permit));
        }
    }
}

/// Returns the number of copies whose buffers fit into [`COPY_MEMORY_BYTES_MAX`].
fn copies_max(chunk: u64) -> usize {
    (COPY_MEMORY_BYTES_MAX / chunk.min(COPY_PIECE_BYTES)) as usize
}

impl Permit {
    /// Returns the snapshot that the permit belongs to.
    pub fn snap(&self) -> &Arc<Snap> {
        &self.0
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.run_permitted(self.0.copy_tokens.release(percpu::current()));
    }
}
