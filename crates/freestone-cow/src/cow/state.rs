//! What an origin and its snapshots share: the origin's list of snapshots, the state of each of
//! them, and the rights to copy.
//!
//! # Copies in flight
//! A request takes a permit before it takes a slot or a chunk of the COW device. Where there is
//! none it queues, holding nothing, and goes on with the permit of a copy that ended. So permits
//! never wait for each other: whoever holds one either runs a copy, which ends by itself, or is
//! about to begin one, and gives it back if it need not. (The kernel's counter did deadlock when it
//! was a semaphore that was waited for with a lock held.)
//!
//! # Lock order
//! 1. The origin's `changing`.
//! 2. The gate of the origin, then that of a snapshot.
//! 3. A slot of `exceptions`.
//! 4. Under a slot, one after the other: the store's queue, `rights`, a gatherer,
//!    `waiting_for_loss`, the tracking of `merge`.
//! 5. The work queue, with none of 4 held.
//!
//! No lock is held while a device is called, except that a request which is only tried is pinned.

use std::ops::Deref;
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::age::{Age, Missed};
use super::blocks::Blocks;
use super::config::{Config, StoreKind};
use super::exceptions::Exceptions;
use super::gather::Waiter;
use super::loss::Loss;
use super::merge_state::Merge;
use super::notes::Notes;
use super::store::Store;
use super::tokens::Tokens;
use freestone_core::device::{Completion, Device, Error, Geometry, IoBuf, Request, Result};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::percpu::{self, Counters};
use freestone_core::slot::Common;
use freestone_core::sync::{AtomicU32, Mutex, OnceLock, Ordering};
use freestone_core::work_queue::WorkQueue;
use freestone_core::zeroes::leading_zeroes;

/// Bytes that a copy moves at once: the kernel's sub-jobs. Memory of a copy in flight.
pub const COPY_PIECE_BYTES: u64 = 512 << 10;
/// Copies in flight a snapshot unless told otherwise: the kernel's `snapshot_cow_threshold`.
const COPIES_MAX_DEFAULT: usize = 2048;
/// Memory that the copies of one snapshot may take in flight, in bytes: bounds them where chunks
/// are large.
const COPY_MEMORY_BYTES_MAX: u64 = 64 << 20;

/// Which numbers a snapshot counts.
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
    /// Its own accesses fail.
    pub const INVALID: u32 = 1;
    /// The COW device says so too: the origin need not care any more.
    pub const LOST: u32 = 1 << 1;
    pub const OVERFLOW: u32 = 1 << 2;
    pub const DETACHED: u32 = 1 << 3;
    pub const MERGING: u32 = 1 << 4;
    /// The log says that it is lost.
    pub const TOLD: u32 = 1 << 5;
    /// The machine's power was lost: nothing that it had begun goes on.
    pub const OFF: u32 = 1 << 6;
}

/// A CPU's reference to an origin, on a cache line of its own.
pub(super) struct OriginCore(CachePadded<Arc<OriginState>>);

/// What all references to an origin share.
pub(super) struct OriginState {
    pub device: Arc<dyn Device>,
    pub notes: Option<Box<dyn Notes>>,
    /// Passed by writes to the origin. Closed while a snapshot begins, or starts to be merged.
    pub gate: FreezeGate<View>,
    pub work_queue: Arc<WorkQueue>,
    /// Looks at the origin's extents, which may wait for a disk.
    pub extents_queue: Arc<WorkQueue>,
    pub common: OnceLock<Arc<Common>>,
    /// Who changes the list of snapshots. Held by no request; where a merge begins, also while it
    /// waits for writes that are under way.
    pub changing: Mutex<Changing>,
    /// 1 from just before the first snapshot plays its part: until then reads need not look at the
    /// view.
    merges: AtomicU32,
    /// Which content it holds: tells whether a store missed writes.
    pub age: Age,
    /// Writes to the snapshot that plays the origin's part.
    pub write_merging: WriteSnapshot,
}

/// Takes over a write, write zeroes or discard of a snapshot.
pub(super) type WriteSnapshot = fn(Arc<Snap>, Request, IoBuf, Completion);

/// Snapshots that are about to begin, and whether one is merged.
#[derive(Default)]
pub(super) struct Changing {
    /// The COW devices of snapshots that are prepared and have not begun.
    pub preparing: Vec<Arc<dyn Device>>,
    pub merging: Merging,
}

/// Whether a snapshot is being merged.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Merging {
    #[default]
    No,
    /// One was opened whose merge was under way, and nothing was merged since. Other snapshots that
    /// were there before can still be opened.
    TakenUp,
    Yes,
}

/// The snapshots that a write has to look at.
#[derive(Clone, Default)]
pub(super) struct View {
    /// Largest chunks first.
    pub snapshots: Vec<PerCpuArc<Snap>>,
    /// Plays the origin's part.
    pub merging: Option<PerCpuArc<Snap>>,
    /// Another number in every view.
    pub generation: u64,
    /// Another number after each loss of power.
    pub boot: u64,
}

/// How a snapshot treats writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// They make exceptions.
    Normal,
    /// It is merged into the origin, whose part it plays.
    Merging,
}

/// A CPU's reference to a snapshot, on a cache line of its own.
pub(super) struct Snap(CachePadded<Arc<SnapState>>);

/// What all references to a snapshot share.
pub(super) struct SnapState {
    pub core: PerCpuArc<OriginCore>,
    pub store: Arc<Store>,
    pub exceptions: Exceptions<Waiter>,
    /// Passed by writes to the snapshot, and by what makes exceptions.
    pub gate: FreezeGate<Mode>,
    /// To copy. Its lock is held for a few instructions.
    rights: Tokens<Next>,
    pub config: Config,
    pub size: u64,
    pub merge: Merge,
    /// Where the store is, for people.
    pub place: OnceLock<String>,
    /// Set when it has begun.
    pub missed: OnceLock<Missed>,
    pub counters: Counters<{ counter::COUNT }>,
    /// The COW device, in logical blocks no larger than the origin's.
    pub cow: Arc<dyn Device>,
    pub logical_block: u32,
    state: AtomicU32,
    /// Writes of the origin that wait until it is known on disk that the snapshot is lost. Held for
    /// a few instructions.
    waiting_for_loss: Mutex<Vec<Waiter>>,
}

/// The right to have one copy in flight, of one snapshot.
pub(super) struct Permit(Arc<Snap>);

/// What goes on with a permit.
type Next = Box<dyn FnOnce(Permit) + Send>;

// ---- an origin ----------------------------------------------------------------------------------

impl Deref for OriginCore {
    type Target = OriginState;
    fn deref(&self) -> &OriginState {
        &self.0
    }
}

impl OriginCore {
    /// An origin without snapshots.
    pub fn new(
        device: Arc<dyn Device>,
        notes: Option<Box<dyn Notes>>,
        write_merging: WriteSnapshot,
    ) -> PerCpuArc<Self> {
        let core = Arc::new(OriginState {
            age: Age::new(notes.as_deref()),
            device,
            notes,
            gate: FreezeGate::new(View::default()),
            work_queue: WorkQueue::plugged("cow"),
            extents_queue: WorkQueue::new("cow-extents"),
            common: OnceLock::new(),
            changing: Mutex::default(),
            merges: AtomicU32::new(0),
            write_merging,
        });
        PerCpuArc::new(|| Self(CachePadded::new(Arc::clone(&core))))
    }
}

impl OriginState {
    /// The merge that is under way, as the origin itself says.
    pub fn noted_merge(&self) -> Option<u64> {
        self.notes.as_ref()?.merge()
    }

    /// A snapshot is about to play its part.
    pub fn will_merge(&self) {
        self.merges.store(1, Ordering::SeqCst);
    }

    /// Whether one may play its part.
    pub fn may_merge(&self) -> bool {
        self.merges.load(Ordering::SeqCst) != 0
    }

    /// Returns the end of the zeroes that a range begins with, and of the data that is known to follow
    /// them. May wait for a disk: on the thread of [`extents_queue`](Self::extents_queue).
    pub fn leading_zeroes(&self, at: u64, end: u64) -> (u64, u64) {
        leading_zeroes(at, end, |from, len, row| self.device.extents(from, len, row).map(drop))
    }

    /// Takes a snapshot out of the list.
    pub fn forget(&self, snap: &Snap) {
        self.gate.change(|view| {
            view.changed(|view| {
                view.snapshots.retain(|other| !other.is(snap));
                view.merging.take_if(|other| other.is(snap));
            })
        });
    }
}

impl Drop for OriginState {
    fn drop(&mut self) {
        self.work_queue.stop();
        self.extents_queue.stop();
        // All that was begun was answered.
        if let (Some(notes), Some(content)) = (&self.notes, self.age.content()) {
            notes.closed(content);
        }
    }
}

impl View {
    /// The same view after a change.
    pub fn changed(&self, change: impl FnOnce(&mut Self)) -> Self {
        let mut view = self.clone();
        change(&mut view);
        view.generation += 1;
        view.snapshots.sort_by_key(|snap| std::cmp::Reverse(snap.chunk()));
        view
    }
}

// ---- a snapshot ---------------------------------------------------------------------------------

impl Deref for Snap {
    type Target = SnapState;
    fn deref(&self) -> &SnapState {
        &self.0
    }
}

impl SnapState {
    /// The store is closed while the origin holds its present content, and records that.
    fn closes(&self) {
        // A snapshot that never began may have missed writes.
        if self.missed.get().is_some()
            && let Some(content) = self.core.age.content()
        {
            self.store.closes(content);
        }
    }
}

impl Drop for SnapState {
    fn drop(&mut self) {
        // A snapshot that is merged is in use until its origin is dropped. Where all is merged, the
        // store is empty.
        let merging = self.state.load(Ordering::SeqCst) & (bit::MERGING | bit::DETACHED) == bit::MERGING;
        if merging && !self.merge.is_finished() {
            self.closes();
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
            Arc::new(Blocks::new(Arc::clone(store.device()), origin.logical_block, work_queue))
        } else {
            Arc::clone(store.device())
        };
        let lost = if store.is_valid() { 0 } else { bit::INVALID | bit::LOST };
        // The merge was under way when the store was closed.
        let taken_up = store.merge_id().is_some();
        let lost = if taken_up { lost | bit::MERGING } else { lost };
        let most = COPIES_MAX_DEFAULT.min(copies_max(store.chunk_bytes()));
        let state = Arc::new(SnapState {
            core: core.clone(),
            exceptions,
            gate: FreezeGate::new(if taken_up { Mode::Merging } else { Mode::Normal }),
            rights: Tokens::new(most as u64, percpu::cpus()),
            config,
            size: origin.size,
            merge: if taken_up { Merge::stopped() } else { Merge::default() },
            place: OnceLock::new(),
            missed: OnceLock::new(),
            counters: Counters::default(),
            cow,
            logical_block: origin.logical_block.max(cow_block),
            state: AtomicU32::new(lost),
            waiting_for_loss: Mutex::default(),
            store,
        });
        PerCpuArc::new(|| Self(CachePadded::new(Arc::clone(&state))))
    }

    /// Whether both are of one snapshot.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    pub fn chunk(&self) -> u64 {
        self.store.chunk_bytes()
    }

    /// The logical block in bytes: the larger one of the origin's and the COW device's.
    pub fn block(&self) -> u64 {
        self.logical_block.into()
    }

    /// `end`, rounded down to whole blocks of the snapshot: a device with smaller blocks may have
    /// stopped within one.
    pub fn whole_blocks(&self, end: u64) -> u64 {
        end - end % self.block()
    }

    /// The COW device's logical block in bytes.
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

    /// Whether what was read from the origin since the state was `before` is the snapshot's:
    /// `Some(false)` where it may not be.
    ///
    /// # Errors
    /// The snapshot is invalid or detached.
    pub fn still(&self, before: u32) -> Result<bool> {
        self.readable()?;
        Ok((self.state() ^ before) & bit::MERGING == 0)
    }

    pub fn readable(&self) -> Result<()> {
        match self.state() {
            now if now & bit::DETACHED != 0 => Err(Error::Gone),
            now if now & bit::INVALID != 0 => Err(Error::Media),
            _ => Ok(()),
        }
    }

    pub fn writable(&self) -> Result<()> {
        self.readable()?;
        if self.has_overflowed() { Err(Error::NoSpace) } else { Ok(()) }
    }

    /// Whether the origin has to preserve anything for it.
    pub fn is_active(&self) -> bool {
        !self.has(bit::LOST | bit::DETACHED)
    }

    pub fn is_invalid(&self) -> bool {
        self.has(bit::INVALID)
    }

    /// There was no room for a write to it. While it is merged that has no meaning.
    pub fn has_overflowed(&self) -> bool {
        self.state() & (bit::OVERFLOW | bit::MERGING) == bit::OVERFLOW
    }

    pub fn is_merging(&self) -> bool {
        self.has(bit::MERGING)
    }

    pub fn set_merging(&self) {
        self.set(bit::MERGING);
    }

    /// It is invalid: every access fails from now on.
    pub fn fails(&self) {
        self.set(bit::INVALID);
    }

    /// The COW device says, too, that the snapshot is invalid: writes of the origin that waited for
    /// that go on.
    pub fn lost(&self) {
        self.set(bit::INVALID | bit::LOST);
        for waiter in std::mem::take(&mut *self.waiting_for_loss.lock()) {
            waiter.arrived(Ok(()));
        }
    }

    /// `waiter` hears when the COW device, too, says that the snapshot is invalid.
    pub fn wait_for_loss(&self, waiter: Waiter) {
        let mut waiting = self.waiting_for_loss.lock();
        if self.is_active() {
            return waiting.push(waiter);
        }
        drop(waiting);
        waiter.arrived(Ok(()));
    }

    /// Fails every access from now on, and logs the reason once.
    pub fn lose(&self, loss: Loss) {
        self.fails();
        if self.state.fetch_or(bit::TOLD, Ordering::SeqCst) & bit::TOLD == 0 {
            let store = self.place.get().map_or("an exception store", |place| place);
            tracing::warn!("{store}: the snapshot is lost: {loss}");
        }
    }

    /// Gives the snapshot up; `waiter` hears when the COW device says so. Calls a device: not under
    /// a pin.
    pub fn invalidate(self: &Arc<Self>, loss: Loss, waiter: Option<Waiter>) {
        self.lose(loss);
        if let Some(waiter) = waiter {
            self.wait_for_loss(waiter);
        }
        let snap = Arc::clone(self);
        self.store.invalidate(move || snap.lost());
    }

    /// There is no room for a write to the snapshot itself.
    pub fn overflows(self: &Arc<Self>) {
        if self.store.kind() == StoreKind::PersistentOverflow {
            self.set(bit::OVERFLOW);
        } else {
            self.invalidate(Loss::NoRoom, None);
        }
    }

    /// Takes it off its origin: its accesses fail, and nothing is preserved for it.
    pub fn detach(self: &Arc<Self>) {
        if !self.has(bit::DETACHED) && !self.is_merging() {
            // Before it leaves the origin's list: later writes preserve nothing for it.
            self.closes();
        }
        self.leave();
    }

    /// As [`detach`](Self::detach) where the machine's power is lost: nothing is recorded.
    pub fn loses_power(self: &Arc<Self>) {
        self.set(bit::INVALID | bit::TOLD | bit::OFF);
        self.leave();
    }

    /// Whether nothing that it had begun may go on.
    pub fn is_off(&self) -> bool {
        self.has(bit::OFF)
    }

    fn leave(self: &Arc<Self>) {
        // Before it leaves the list: whoever read from the origin what such a write left there sees
        // this, and fails.
        self.set(bit::DETACHED);
        self.core.forget(self);
        self.store.release();
        // Writes of the origin need not wait for its COW device any more.
        for waiter in std::mem::take(&mut *self.waiting_for_loss.lock()) {
            waiter.arrived(Ok(()));
        }
    }
}

// ---- the rights to copy -------------------------------------------------------------------------

impl Snap {
    /// At most so many copies in flight, at least 1 and as many as memory allows, from now on;
    /// those in flight stay.
    pub fn set_copies_max(self: &Arc<Self>, most: usize) {
        let most = most.clamp(1, copies_max(self.chunk()));
        self.hand_over(self.rights.set_most(most as u64));
    }

    /// A permit, if one is free.
    pub fn permit(self: &Arc<Self>) -> Option<Permit> {
        self.rights.take(percpu::current()).then(|| Permit(Arc::clone(self)))
    }

    /// Runs `next` with a permit when there is one, on the work queue.
    pub fn queue(self: &Arc<Self>, next: impl FnOnce(Permit) + Send + 'static) {
        self.hand_over(self.rights.wait(Box::new(next)));
    }

    fn hand_over(self: &Arc<Self>, served: Vec<Next>) {
        for next in served {
            let permit = Permit(Arc::clone(self));
            self.core.work_queue.push(move || next(permit));
        }
    }
}

/// How many copies of chunks of this size memory allows.
fn copies_max(chunk: u64) -> usize {
    (COPY_MEMORY_BYTES_MAX / chunk.min(COPY_PIECE_BYTES)) as usize
}

impl Permit {
    /// The snapshot that gave it.
    pub fn snap(&self) -> &Arc<Snap> {
        &self.0
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.hand_over(self.0.rights.give(percpu::current()));
    }
}
