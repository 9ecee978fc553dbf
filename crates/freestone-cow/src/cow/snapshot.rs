//! A snapshot: what the origin held at one moment, and what was written to the snapshot since.
//!
//! The states are dm-snapshot's. *Invalid*: a copy failed, or there was no room for one that the
//! origin needed (or, for `P` and `N`, the snapshot itself); every access fails, the origin goes
//! on. *Overflow* (`PO`): no room for a write to the snapshot; it and later ones fail, reads stay
//! correct. *Merge failed*: see [`merge`](super::merge).
//!
//! Where this differs from dm-snapshot on purpose:
//! * Reads of the origin are checked afterwards and not tracked (see
//!   [`exceptions`](super::exceptions)), so writes to the origin never wait for a reader of a
//!   snapshot.
//! * A write that needs exceptions for several chunks asks for them together, so that they share a
//!   commit.
//! * A write that finds an overflow is answered "no space" (dm: I/O error).
//! * The last chunk is copied as far as the origin reaches at that time.
//! * An invalid snapshot is marked on disk before the origin is overwritten; where the COW device
//!   fails, that is tried for two seconds.
//!
//! Lock order: see [`state`](super::state).

use std::fmt;
use std::sync::Arc;

use super::config::{Config, StoreKind};
use super::origin::{Anchor, Origin};
use super::state::{Snap, counter};
use super::{Missed, Status, reads, writes};
use freestone_core::device::{
    Buffer, Change, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone_core::per_cpu_arc::PerCpuArc;

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

/// A snapshot of an origin. Clones are handles to one snapshot; when the last one is dropped it is
/// detached: later writes to the origin are not preserved for it. To open it again from its COW
/// device, first end all use of the origin, and stop a merge ([`stop_merge`](Self::stop_merge));
/// then drop it.
#[derive(Clone)]
pub struct Snapshot(pub(super) Arc<Handle>);

/// What the user's handles share.
pub(super) struct Handle {
    pub snap: PerCpuArc<Snap>,
    /// Declared, and so dropped, after `snap`: the origin's list is cleared when this snapshot has
    /// left it.
    anchor: Arc<Anchor>,
}

// ---- what the user sees -------------------------------------------------------------------------

impl Snapshot {
    pub(super) fn new(snap: PerCpuArc<Snap>, anchor: Arc<Anchor>) -> Self {
        Self(Arc::new(Handle { snap, anchor }))
    }

    /// Its state, as `dmsetup status` has it.
    pub fn status(&self) -> Status {
        let snap = &self.0.snap;
        if snap.is_invalid() {
            Status::Invalid
        } else if snap.merge.has_failed() {
            Status::MergeFailed
        } else if snap.has_overflowed() {
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

    /// What it was asked to be when it was opened.
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

    /// Bounds the copies in flight, the kernel's `snapshot_cow_threshold`: 1 and up, 2048 to begin
    /// with, and never more than 64 MiB of memory hold. Requests beyond it queue.
    pub fn set_cow_threshold(&self, copies: usize) {
        self.0.snap.set_copies_max(copies);
    }

    /// Whether it is invalid, its COW device could not be made to say so in time, and the origin is
    /// written all the same: opened again after a crash it may look good, and must not be trusted.
    pub fn is_unmarked(&self) -> bool {
        self.0.snap.store.is_unmarked()
    }

    /// Whether its store missed writes of the origin before it was opened.
    pub fn missed_writes(&self) -> Missed {
        self.0.snap.missed.get().copied().unwrap_or(Missed::Nothing)
    }

    /// Takes the snapshot off its origin. Its accesses fail from now on; on the COW device it stays
    /// as it is.
    pub fn remove(&self) {
        self.0.snap.detach();
    }
}

impl Snapshot {
    /// The origin, when the merge is finished: it takes the snapshot's requests, since another
    /// snapshot may be merged into it by now.
    fn merged(&self) -> Option<Origin> {
        let snap = &self.0.snap;
        let is_origin = snap.is_merging() && snap.merge.is_finished() && snap.readable().is_ok();
        is_origin.then(|| Origin(Arc::clone(&self.0.anchor)))
    }
}

impl Device for Snapshot {
    fn geometry(&self) -> Geometry {
        geometry(&self.0.snap)
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let snap = &self.0.snap;
        request.check_place(snap.size, snap.logical_block)?;
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
        if let Err(error) = request.check_place(snap.size, snap.logical_block) {
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

impl Changes for Snapshot {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        self.0.snap.changes(offset, len, row)
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // A merge stops after the run that is under way, and the origin goes on showing what was
        // not merged yet. Not waited for: this may be a thread that the merge needs.
        self.snap.merge.stop();
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

/// Its size, and what fits both devices.
fn geometry(snap: &Snap) -> Geometry {
    let (origin, cow) = (snap.core.device.geometry(), snap.store.device().geometry());
    let chunk = snap.chunk() as u32;
    let persistent = snap.store.kind().is_persistent();
    Geometry {
        size: snap.size,
        logical_block: snap.logical_block,
        physical_block: origin.physical_block.max(cow.physical_block).max(snap.logical_block),
        io_min: origin.io_min.max(snap.logical_block).next_multiple_of(snap.logical_block),
        io_opt: chunk.max(snap.logical_block),
        discard_granularity: if snap.config.discard_zeroes_cow { chunk } else { 0 },
        fast_zeroes: cow.fast_zeroes,
        // What is merged is as durable as the origin's flush makes it.
        volatile_cache: cow.volatile_cache || persistent && origin.volatile_cache,
        padding: 0,
        volatile_media: origin.volatile_media || cow.volatile_media || !persistent,
        rotational: origin.rotational,
        max_request: 0,
        read_only: false,
        zones: None,
    }
}
