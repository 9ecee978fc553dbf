//! A snapshot: what the origin held at one moment, and what was written to the snapshot since.
//!
//! The states are dm-snapshot's. *Invalid*: a copy failed, or there was no room for one that the origin needed (or, for `P` and
//! `N`, the snapshot itself); every access fails, the origin goes on. *Overflow* (`PO`): no room for a write to the snapshot; it
//! and later ones fail, reads stay correct. *Merge failed*: see [`merge`](super::merge).
//!
//! Where this differs from dm-snapshot on purpose:
//! * Reads of the origin are checked afterwards and not tracked (see [`exceptions`](super::exceptions)), so writes to the origin never
//!   wait for a reader of a snapshot.
//! * A write that needs exceptions for several chunks asks for them together, so that they share a commit.
//! * A write that finds an overflow is answered "no space" (dm: I/O error).
//! * The last chunk is copied as far as the origin reaches at that time.
//! * An invalid snapshot is marked on disk before the origin is overwritten; where the COW device fails, that is tried for two seconds.
//!
//! Lock order: a gate; a slot; below a slot the store's queue, the rights to copy, a gatherer, the lost list or the merge's tracking, one
//! after the other; the work queue last. No lock is held while a device is called, except that a request which is only tried
//! is pinned.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;

use crossbeam_utils::CachePadded;

use super::blocks::Blocks;
use super::exceptions::Exceptions;
use super::gather::Waiter;
use super::merge::Merge;
use super::origin::{Anchor, Core, Origin};
use super::store::Store;
use super::throttle::{self, COPIES_MAX_DEFAULT, Next};
use super::tokens::Tokens;
use super::{Config, Missed, Status, StoreKind, reads, writes};
use crate::cow::copy::PIECE_BYTES;
use freestone_core::device::{
    Buffer, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::percpu::Counters;
use freestone_core::sync::{AtomicU32, Mutex, OnceLock, Ordering};

/// Memory that the copies of one snapshot may take in flight, in bytes: bounds them where chunks are large.
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
mod state {
    /// Its own accesses fail.
    pub const INVALID: u32 = 1;
    /// The COW device says so too: the origin need not care any more.
    pub const LOST: u32 = 1 << 1;
    pub const OVERFLOW: u32 = 1 << 2;
    pub const DETACHED: u32 = 1 << 3;
    pub const MERGING: u32 = 1 << 4;
    /// The log says that it is lost.
    pub const TOLD: u32 = 1 << 5;
}

/// What a snapshot did so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotStats {
    /// Chunks that were copied from the origin.
    pub copied_chunks: u64,
    /// Chunks that a write to the snapshot covered, so that nothing was copied.
    pub full_chunk_writes: u64,
    /// Writes to the origin that waited for a copy of this snapshot.
    pub origin_writes_waited: u64,
    /// Reads, or parts of reads, that the origin answered.
    pub origin_reads: u64,
    /// Of these, those that were repeated because the origin was written meanwhile.
    pub rereads: u64,
    /// Exceptions that are in the record.
    pub exceptions: u64,
    /// Commits: writes of the record. Each covers a group of exceptions. 0 for a transient store.
    pub commits: u64,
    /// Exceptions of the largest group.
    pub largest_commit: u64,
}

/// How a snapshot treats writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Mode {
    /// They make exceptions.
    Normal,
    /// It is merged into the origin, whose part it plays.
    Merging,
}

/// A CPU's hold on a snapshot.
pub(super) struct Snap(CachePadded<Arc<SnapState>>);

/// A snapshot, without what users hold of it.
pub(super) struct SnapState {
    pub core: PerCpuArc<Core>,
    pub store: Arc<Store>,
    pub exceptions: Exceptions<Waiter>,
    /// Passed by writes to the snapshot, and by what makes exceptions.
    pub gate: FreezeGate<Mode>,
    pub rights: Tokens<Next>,
    pub config: Config,
    pub size: u64,
    pub merge: Merge,
    /// Where the store is, for people.
    pub place: OnceLock<String>,
    /// Set when it has begun.
    pub missed: OnceLock<Missed>,
    pub counters: Counters<{ counter::COUNT }>,
    /// The COW device in blocks that the origin's requests fit.
    pub cow: Arc<dyn Device>,
    block: u32,
    state: AtomicU32,
    /// Writes of the origin that wait until it is known on disk that the snapshot is lost.
    waiting_for_loss: Mutex<Vec<Waiter>>,
}

/// A snapshot of an origin. Clones are handles to one snapshot; when the last one is dropped it is detached: later writes to the
/// origin are not preserved for it. To open it again from its COW device, first end all use of the origin, and stop a merge
/// ([`stop_merge`](Self::stop_merge)); then drop it.
#[derive(Clone)]
pub struct Snapshot(pub(super) Arc<Handle>);

/// What the user's handles share.
pub(super) struct Handle {
    pub snap: PerCpuArc<Snap>,
    /// Below `snap`: the origin's list is cleared after this snapshot has left it.
    anchor: Arc<Anchor>,
}

// ---- what the user sees ------------------------------------------------------------------------------------------------------

impl Snapshot {
    pub(super) fn new(snap: PerCpuArc<Snap>, anchor: Arc<Anchor>) -> Self {
        Self(Arc::new(Handle { snap, anchor }))
    }

    /// Its state, as `dmsetup status` has it.
    pub fn status(&self) -> Status {
        let snap = &self.0.snap;
        if snap.has(state::INVALID) {
            Status::Invalid
        } else if snap.merge.has_failed() {
            Status::MergeFailed
        } else if snap.has(state::OVERFLOW) && !snap.has(state::MERGING) {
            Status::Overflow
        } else {
            Status::Usage(snap.store.usage())
        }
    }

    /// Unit of copies in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.0.snap.chunk()
    }

    /// The exception store.
    pub fn kind(&self) -> StoreKind {
        self.0.snap.store.kind()
    }

    /// The COW device.
    pub fn cow(&self) -> &Arc<dyn Device> {
        self.0.snap.store.device()
    }

    /// What it was asked to be.
    pub fn config(&self) -> Config {
        self.0.snap.config
    }

    /// Numbers since it was opened.
    pub fn stats(&self) -> SnapshotStats {
        let snap = &self.0.snap;
        let store = snap.store.stats();
        SnapshotStats {
            copied_chunks: snap.counters.get(counter::COPIED),
            full_chunk_writes: snap.counters.get(counter::FULL),
            origin_writes_waited: snap.counters.get(counter::ORIGIN_WAITED),
            origin_reads: snap.counters.get(counter::ORIGIN_READS),
            rereads: snap.counters.get(counter::REREADS),
            exceptions: store.exceptions,
            commits: store.groups,
            largest_commit: store.largest_group,
        }
    }

    /// Bounds the copies in flight, the kernel's `snapshot_cow_threshold`: 1 and up, 2048 to begin with, and never more than
    /// 64 MiB of memory hold. Requests beyond it queue.
    pub fn set_cow_threshold(&self, copies: usize) {
        let snap = &self.0.snap;
        snap.set_copies(copies.clamp(1, copies_max(snap.chunk())));
    }

    /// Whether it is invalid, its COW device could not be made to say so in time, and the origin is written all the same: opened again
    /// after a crash it may look good, and must not be trusted.
    pub fn is_unmarked(&self) -> bool {
        self.0.snap.store.is_unmarked()
    }

    /// Whether its store missed writes of the origin before it was opened.
    pub fn missed_writes(&self) -> Missed {
        self.0.snap.missed.get().copied().unwrap_or(Missed::Nothing)
    }

    /// Takes the snapshot off its origin. Its accesses fail from now on; on the COW device it stays as it is.
    pub fn remove(&self) {
        self.0.snap.detach();
    }
}

impl Snapshot {
    /// All of it is in the origin: what comes to it is the origin's, which another snapshot may be merged into.
    fn merged(&self) -> Option<Origin> {
        let snap = &self.0.snap;
        let is_origin = snap.is_merging() && snap.merge.is_finished() && snap.readable().is_ok();
        is_origin.then(|| Origin(Arc::clone(&self.0.anchor)))
    }
}

impl Device for Snapshot {
    fn geometry(&self) -> Geometry {
        self.0.snap.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let snap = &self.0.snap;
        request.check_place(snap.size, snap.block)?;
        if let Some(origin) = self.merged() {
            return origin.try_io(request, buffer);
        }
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(into)) => reads::try_read(snap, request, into),
            (Op::Flush, _) => snap.try_flush(request),
            (Op::Write, Buffer::Write(data)) => writes::try_write(snap, request, Some(data)),
            (Op::WriteZeroes, _) => writes::try_write(snap, request, None),
            (Op::Discard, _) => writes::try_discard(snap),
            (Op::Read | Op::Write, _) => Err(Error::Misaligned),
        }
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let snap = &self.0.snap;
        if let Err(error) = request.check_place(snap.size, snap.block) {
            return done.complete(Err(error), buffer);
        }
        if let Some(origin) = self.merged() {
            return origin.submit(request, buffer, done);
        }
        match request.op {
            Op::Read => reads::submit(snap, request, buffer, done),
            Op::Flush => snap.flush(request, buffer, done),
            Op::Discard => writes::submit_discard(snap, request, buffer, done),
            Op::Write | Op::WriteZeroes => writes::submit(snap, request, buffer, done),
        }
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let len_there = self.0.snap.size.saturating_sub(offset);
        match self.merged().filter(|_| len <= len_there) {
            Some(origin) => origin.extents(offset, len, row),
            None => self.0.snap.extents(offset, len, row),
        }
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.0.snap.prefetch(offset, len);
    }

    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A merge stops after the run that is under way, and the origin goes on showing what was not merged yet. Not waited
        // for: this may be a thread that the merge needs.
        self.snap.stop_merge();
        if !self.snap.is_merging() {
            self.snap.detach();
        }
    }
}

impl fmt::Debug for Snapshot {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Snapshot({} {})", self.kind(), self.status())
    }
}

// ---- its state ---------------------------------------------------------------------------------------------------------------

fn copies_max(chunk: u64) -> usize {
    (COPY_MEMORY_BYTES_MAX / chunk.min(PIECE_BYTES)) as usize
}

impl Deref for Snap {
    type Target = SnapState;
    fn deref(&self) -> &SnapState {
        &self.0
    }
}

impl SnapState {
    /// The store is told what the origin holds now.
    fn closes(&self) {
        // One that never began may have missed writes.
        if self.missed.get().is_some()
            && let Some(content) = self.core.age.content()
        {
            self.store.closes(content);
        }
    }
}

impl Drop for SnapState {
    fn drop(&mut self) {
        // It plays the origin's part to the end. Where all is merged, the store is as good as new.
        let merging =
            self.state.load(Ordering::SeqCst) & (state::MERGING | state::DETACHED) == state::MERGING;
        if merging && !self.merge.is_finished() {
            self.closes();
        }
    }
}

impl Snap {
    pub fn new(
        core: &PerCpuArc<Core>,
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
        let lost = if store.is_valid() { 0 } else { state::INVALID | state::LOST };
        // The merge was under way when the store was closed.
        let taken_up = store.merge_id().is_some();
        let lost = if taken_up { lost | state::MERGING } else { lost };
        let most = COPIES_MAX_DEFAULT.min(copies_max(store.chunk_bytes()));
        let state = Arc::new(SnapState {
            core: core.clone(),
            exceptions,
            gate: FreezeGate::new(if taken_up { Mode::Merging } else { Mode::Normal }),
            rights: throttle::rights(most),
            config,
            size: origin.size,
            merge: if taken_up { Merge::stopped() } else { Merge::default() },
            place: OnceLock::new(),
            missed: OnceLock::new(),
            counters: Counters::default(),
            cow,
            block: origin.logical_block.max(cow_block),
            state: AtomicU32::new(lost),
            waiting_for_loss: Mutex::default(),
            store,
        });
        PerCpuArc::new(|| Self(CachePadded::new(Arc::clone(&state))))
    }

    /// Logs what its store missed before it was opened.
    pub fn tell_missed(&self, missed: Missed) {
        let store = self.place.get().map_or("an exception store", |place| place);
        match missed {
            Missed::Nothing => {}
            Missed::Unknown => tracing::warn!(
                "{store}: it is unknown whether the origin was written without this store since; then its snapshot is a mixture"
            ),
            Missed::Writes => tracing::warn!(
                "{store}: the origin was written or used without this store since; its snapshot is a mixture of old and new"
            ),
        }
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
        self.block.into()
    }

    /// The end of the last whole block before a byte: as far as something is done of which a device with smaller blocks did the
    /// rest.
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

    /// Whether what was read from the origin since the state was `before` is the snapshot's: `Some(false)` where it may not be.
    ///
    /// # Errors
    /// It is nobody's any more.
    pub fn still(&self, before: u32) -> Result<bool> {
        self.readable()?;
        Ok((self.state() ^ before) & state::MERGING == 0)
    }

    pub fn readable(&self) -> Result<()> {
        match self.state() {
            now if now & state::DETACHED != 0 => Err(Error::Gone),
            now if now & state::INVALID != 0 => Err(Error::Media),
            _ => Ok(()),
        }
    }

    pub fn writable(&self) -> Result<()> {
        self.readable()?;
        let overflow = self.state() & (state::OVERFLOW | state::MERGING) == state::OVERFLOW;
        if overflow { Err(Error::NoSpace) } else { Ok(()) }
    }

    /// Whether the origin has to preserve anything for it.
    pub fn is_active(&self) -> bool {
        !self.has(state::LOST | state::DETACHED)
    }

    pub fn is_invalid(&self) -> bool {
        self.has(state::INVALID)
    }

    pub fn is_merging(&self) -> bool {
        self.has(state::MERGING)
    }

    pub fn set_merging(&self) {
        self.set(state::MERGING);
    }

    /// Every access fails from now on.
    pub fn fails(&self) {
        self.set(state::INVALID);
    }

    /// The snapshot is lost, as its COW device says too: those who waited for that go on.
    pub fn lost(&self) {
        self.set(state::INVALID | state::LOST);
        for waiter in std::mem::take(&mut *self.waiting_for_loss.lock()) {
            waiter.arrived(Ok(()));
        }
    }

    /// `waiter` hears when the COW device says that the snapshot, which is invalid, is lost.
    pub fn wait_for_loss(&self, waiter: Waiter) {
        let mut waiting = self.waiting_for_loss.lock();
        if self.is_active() {
            return waiting.push(waiter);
        }
        drop(waiting);
        waiter.arrived(Ok(()));
    }

    /// Gives the snapshot up; `waiter` hears when the COW device says so. Calls a device: not under a pin.
    pub fn invalidate(self: &Arc<Self>, waiter: Option<Waiter>) {
        self.fails();
        if self.state.fetch_or(state::TOLD, Ordering::SeqCst) & state::TOLD == 0 {
            let store = self.place.get().map_or("an exception store", |place| place);
            tracing::warn!(
                "{store}: the snapshot is lost: the COW device failed or has no room for a copy, or there is no memory"
            );
        }
        if let Some(waiter) = waiter {
            self.wait_for_loss(waiter);
        }
        let snap = Arc::clone(self);
        self.store.invalidate(move || snap.lost());
    }

    /// There is no room for a write to the snapshot itself.
    pub fn overflows(self: &Arc<Self>) {
        if self.store.kind() == StoreKind::PersistentOverflow {
            self.set(state::OVERFLOW);
        } else {
            self.invalidate(None);
        }
    }

    fn detach(self: &Arc<Self>) {
        if !self.has(state::DETACHED) && !self.is_merging() {
            // Before: what is written from now on may be written without it.
            self.closes();
        }
        // First: whoever reads the origin after a write that did not care for this snapshot sees it.
        self.set(state::DETACHED);
        self.core.forget(self);
        self.store.release();
        // Writes of the origin that waited for it need not any more.
        for waiter in std::mem::take(&mut *self.waiting_for_loss.lock()) {
            waiter.arrived(Ok(()));
        }
    }

    fn geometry(&self) -> Geometry {
        let (origin, cow) = (self.core.device.geometry(), self.store.device().geometry());
        let chunk = self.chunk() as u32;
        let persistent = self.store.kind().is_persistent();
        Geometry {
            size: self.size,
            logical_block: self.block,
            physical_block: origin.physical_block.max(cow.physical_block).max(self.block),
            io_min: origin.io_min.max(self.block).next_multiple_of(self.block),
            io_opt: chunk.max(self.block),
            discard_granularity: if self.config.discard_zeroes_cow { chunk } else { 0 },
            fast_zeroes: cow.fast_zeroes,
            // What is merged is as durable as the origin's flush makes it.
            volatile_cache: cow.volatile_cache || persistent && origin.volatile_cache,
            volatile_media: origin.volatile_media || cow.volatile_media || !persistent,
            rotational: origin.rotational,
            max_request: 0,
            read_only: false,
            zones: None,
        }
    }

    // ---- flush: to the COW device; of a snapshot that is merged to the origin as well ---------------------------------------

    pub fn try_flush(&self, request: &Request) -> Result<Tried> {
        self.readable()?;
        if self.is_merging() {
            return Ok(Tried::WouldBlock);
        }
        self.store.device().try_io(request, Buffer::None)
    }

    pub fn flush(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = self.readable() {
            return done.complete(Err(error), buffer);
        }
        if !self.is_merging() {
            return self.store.device().submit(request, buffer, done);
        }
        let snap = Arc::clone(self);
        let then = Completion::new(move |outcome: Result<()>, buffer| match outcome {
            Ok(()) => {
                let work_queue = Arc::clone(&snap.core.work_queue);
                work_queue.push(move || snap.core.device.submit(request, buffer, done));
            }
            Err(error) => done.complete(Err(error), buffer),
        });
        self.store.device().submit(request, buffer, then);
    }
}
