//! Snapshot of an origin: the origin's content at one moment, plus later writes to the snapshot.
//!
//! The states are those of dm-snapshot. *Invalid*: a copy failed, or found no space on the COW
//! device. Every access to the snapshot fails; the origin continues. *Overflow* (`PO`): a write to
//! the snapshot found no space. The write and later writes fail; reads stay correct. *Merge
//! failed*: see [`merge`](super::merge).
//!
//! Intentional differences from dm-snapshot:
//! * Reads of the origin are checked afterwards instead of tracked (see
//!   [`exceptions`](crate::cow::exceptions)). So writes to the origin never wait for a reader.
//! * A write that needs several exceptions requests them together, so that one commit records all
//!   of them.
//! * A write after an overflow fails with "no space" (dm: I/O error).
//! * The last chunk is copied up to the origin's current end.
//! * An invalid snapshot is marked on disk before the origin is overwritten. If the COW device
//!   fails, the origin's writes wait at most two seconds for this mark.
//!
//! Lock order: see [`state`](crate::cow::state).

use std::fmt;
use std::sync::Arc;

use super::origin::{Anchor, Origin};
use crate::cow::config::{Config, StoreKind};
use crate::cow::requests::{reads, writes};
use crate::cow::state::{Snap, counter};
use crate::cow::{MissedWrites, Status};
use freestone_core::device::{
    Buffer, Change, Changes, Completion, Device, DropObserver, Error, Extent, Geometry, IoBuf, Op, Request,
    Result, TryResult,
};
use freestone_core::per_cpu_arc::PerCpuArc;

/// Counters of a snapshot since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotStats {
    /// Number of chunks copied from the origin.
    pub copied_chunks: u64,
    /// Number of writes to the snapshot that covered a whole chunk, so that nothing was copied.
    pub full_chunk_writes: u64,
    /// Number of writes to the origin that waited for exceptions of this snapshot.
    pub origin_writes_waited: u64,
    /// Number of reads of the snapshot, or parts of reads, served by the origin.
    pub origin_reads: u64,
    /// Number of reads of the origin that were repeated because the origin was written meanwhile.
    pub rereads: u64,
    /// Number of committed exceptions.
    pub exceptions: u64,
    /// Number of commits, each of which writes a group of exceptions to the store's metadata. 0 for
    /// a transient store.
    pub commits: u64,
    /// Number of exceptions in the largest commit.
    pub largest_commit: u64,
}

/// Handle to a snapshot of an origin. Clones share one snapshot. Dropping the last handle detaches
/// the snapshot: data overwritten on the origin later is not preserved.
///
/// Before the snapshot is opened again, end all use of the origin, call
/// [`stop_merge`](Self::stop_merge), and drop the handles.
#[derive(Clone)]
pub struct Snapshot(pub(super) Arc<Handle>);

/// State shared by the handles to a snapshot.
pub(super) struct Handle {
    pub snap: PerCpuArc<Snap>,
    /// Declared, and thus dropped, after `snap`: the snapshot is removed from the origin's list
    /// before the list is cleared.
    anchor: Arc<Anchor>,
}

impl Snapshot {
    pub(super) fn new(snap: PerCpuArc<Snap>, anchor: Arc<Anchor>) -> Self {
        Self(Arc::new(Handle { snap, anchor }))
    }

    /// Returns the status, as in `dmsetup status`.
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

    /// Returns the chunk size in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.0.snap.chunk()
    }

    /// Returns the kind of the exception store.
    pub fn kind(&self) -> StoreKind {
        self.0.snap.store.kind()
    }

    /// Returns the COW device.
    pub fn cow(&self) -> &Arc<dyn Device> {
        self.0.snap.store.device()
    }

    /// Returns an observer of the end of the exception store, when it is closed.
    pub fn drop_observer(&self) -> DropObserver {
        self.0.snap.store.drop_observer()
    }

    /// Returns the configuration with which the snapshot was opened.
    pub fn config(&self) -> Config {
        self.0.snap.config
    }

    /// Returns the counters since the snapshot was opened.
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

    /// Sets the maximum number of copies in flight, as the kernel's `snapshot_cow_threshold`: at
    /// least 1, by default 2048. The number is also limited so that copies use at most 64 MiB of
    /// memory. Other requests wait in a queue.
    pub fn set_cow_threshold(&self, copies: usize) {
        self.0.snap.set_copies_max(copies);
    }

    /// Returns true if the snapshot is invalid, but the COW device could not be marked in time and
    /// the origin continues. After a crash such an exception store may look valid, but its content
    /// is wrong.
    pub fn is_unmarked(&self) -> bool {
        self.0.snap.store.is_unmarked()
    }

    /// Returns whether the exception store missed writes of the origin before the snapshot was
    /// opened.
    pub fn missed_writes(&self) -> MissedWrites {
        self.0.snap.missed_writes.get().copied().unwrap_or(MissedWrites::Nothing)
    }

    /// Detaches the snapshot from its origin. Later accesses to the snapshot fail. The COW device
    /// keeps its content.
    pub fn remove(&self) {
        self.0.snap.detach();
    }
}

impl Snapshot {
    /// Returns the origin if the merge is finished, otherwise `None`. The origin then executes the
    /// snapshot's requests, because another snapshot may be merging into it by now.
    fn merged(&self) -> Option<Origin> {
        let snap = &self.0.snap;
        let is_origin = snap.is_merging() && snap.merge.is_finished() && snap.check_readable().is_ok();
        is_origin.then(|| Origin(Arc::clone(&self.0.anchor)))
    }
}

impl Device for Snapshot {
    fn geometry(&self) -> Geometry {
        geometry(&self.0.snap)
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let snap = &self.0.snap;
        request.check_range(snap.size, snap.logical_block)?;
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
        if let Err(error) = request.check_range(snap.size, snap.logical_block) {
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
        // A merge stops after the current run, and this snapshot continues to serve the origin. The
        // drop does not wait for the stop, because the merge may need this thread.
        self.snap.merge.request_stop();
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

/// Returns the snapshot's geometry: its own size, and limits that suit both the origin and the COW
/// device.
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
        // After a merge the data is on the origin, so a volatile cache of the origin counts, too.
        volatile_cache: cow.volatile_cache || persistent && origin.volatile_cache,
        padding: 0,
        volatile_media: origin.volatile_media || cow.volatile_media || !persistent,
        rotational: origin.rotational,
        max_request: 0,
        read_only: false,
        ignores_data: false,
        zones: None,
    }
}
