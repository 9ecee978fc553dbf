//! Exception store: allocates chunks of the COW device for copies, and records the copies.
//!
//! A persistent store uses the kernel's order of writes. The caller allocates a chunk
//! ([`Store::allocate`]), copies to it, and commits the copy ([`Store::commit`]). Entries are
//! written to the list of exceptions in the order of allocation, in groups. A group is written once
//! every allocated chunk has its copy, or an area is full. Before it writes a group, the store
//! zeroes the next area if the present one becomes full, and flushes the COW device. So an entry on
//! disk implies that its copy is on disk. Callbacks run when the entries are durable; only then may
//! the origin be overwritten.

mod area;
pub(super) mod format;
mod header_retry;
pub(super) mod load;
mod queue;
mod transient;
mod types;

use std::fmt;
use std::sync::Arc;

use crate::cow::notes::Stamp;
use crate::cow::{SetupError, StoreKind, Usage};
use area::Area;
use format::CHUNK_BYTES_DEFAULT;
use format::{Layout, Mark};
use freestone_core::device::{self, Device, DropObserver, DropSignal, Geometry};
use freestone_core::sync::{
    Condvar, Mutex,
    thread::{self, JoinHandle},
};
use load::LoadedStore;
use queue::{ChunkResult, Committer, Queue};
use transient::Transient;

pub use crate::cow::config::Damage;
pub use area::RUN_ENTRIES_MAX;
pub use types::{AllocateError, Exceptions, Invalid, MergeError, Run, Stats};

/// Exception store on a COW device, shared by all users of one snapshot.
///
/// A persistent store runs callbacks on its own thread. Dropping the last reference waits for that
/// thread, unless it is the calling thread.
pub struct Store {
    kind: StoreKind,
    layout: Layout,
    device: Arc<dyn Device>,
    /// Mark of the merge in progress, as it is on disk.
    mark: Mutex<Option<Mark>>,
    core: StoreCore,
    /// The last field, so that the thread has ended and the device is released before.
    drop_signal: DropSignal,
}

enum StoreCore {
    Persistent { committer: Arc<Committer>, thread: Option<JoinHandle<()>> },
    Transient(Box<Transient>),
}

/// Chunk of the COW device allocated for a copy. If this value is dropped, the chunk stays unused.
#[derive(Debug)]
pub struct Allocated {
    chunk: u64,
    chunk_bytes: u64,
    /// Store, and sequence number of the allocation, while a persistent store waits for this chunk.
    pending_in: Option<(Arc<Store>, u64)>,
}

impl Store {
    /// Opens the store on `cow`, or creates a store if the device starts with zeroes. Blocks.
    ///
    /// Returns the store and its exceptions, sorted by chunk of the origin. An invalid store has no
    /// exceptions; see [`is_valid`](Self::is_valid).
    ///
    /// A transient store ignores the device's content.
    ///
    /// # Errors
    /// [`SetupError`]. A damaged or unknown store is not modified.
    pub fn open(
        cow: Arc<dyn Device>,
        kind: StoreKind,
        chunk_bytes: Option<u64>,
        origin: &Geometry,
    ) -> Result<(Arc<Self>, Exceptions), SetupError> {
        let geometry = cow.geometry();
        if geometry.read_only {
            return Err(SetupError::ReadOnly);
        }
        if geometry.zones.is_some() {
            return Err(SetupError::Zoned("COW device"));
        }
        if !kind.is_persistent() {
            let chunk = chunk_bytes.unwrap_or(CHUNK_BYTES_DEFAULT);
            let layout = Layout::new(chunk, &geometry, origin)?;
            let core = StoreCore::Transient(Box::new(Transient::new(layout)));
            let (mark, drop_signal) = (Mutex::default(), DropSignal::default());
            return Ok((Arc::new(Self { kind, layout, device: cow, mark, core, drop_signal }), Vec::new()));
        }
        let LoadedStore { layout, header, valid, mark, end, next_free, exceptions } =
            load::load(&*cow, chunk_bytes, origin)?;
        let area = Area::new(layout, Arc::clone(&cow), origin.size, end);
        let queue = Queue::new(layout, valid, next_free, area.position());
        let committer = Arc::new(Committer {
            layout,
            device: Arc::clone(&cow),
            header,
            area: Mutex::new(area),
            queue: Mutex::new(queue),
            wake: Condvar::new(),
        });
        let run = Arc::clone(&committer);
        let thread = thread::Builder::new()
            .name("cow-store".into())
            .spawn(move || run.run())
            .map_err(SetupError::Thread)?;
        let core = StoreCore::Persistent { committer, thread: Some(thread) };
        let (mark, drop_signal) = (Mutex::new(mark), DropSignal::default());
        Ok((Arc::new(Self { kind, layout, device: cow, mark, core, drop_signal }), exceptions))
    }

    /// Returns an observer of the end of this store, when it is closed.
    pub fn drop_observer(&self) -> DropObserver {
        self.drop_signal.observer()
    }

    /// Returns the chunk size in bytes.
    pub fn chunk_bytes(&self) -> u64 {
        self.layout.chunk()
    }

    /// Returns the COW device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// Returns the kind of the store.
    pub fn kind(&self) -> StoreKind {
        self.kind
    }

    /// Returns false if the snapshot is lost. A lost snapshot never becomes valid again.
    pub fn is_valid(&self) -> bool {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().valid,
            StoreCore::Transient(store) => store.is_valid(),
        }
    }

    /// Allocates a chunk for a copy. Never waits. The caller limits the number of allocated chunks,
    /// each of which uses a few words of memory.
    ///
    /// # Errors
    /// [`AllocateError`]. The store stays valid: the caller decides whether the snapshot is lost.
    pub fn allocate(self: &Arc<Self>) -> Result<Allocated, AllocateError> {
        let size = self.device.geometry().size;
        let (chunk, pending_in) = match &self.core {
            StoreCore::Persistent { committer, .. } => {
                let (chunk, sequence) = committer.queue.lock().allocate(size)?;
                (chunk, Some((Arc::clone(self), sequence)))
            }
            StoreCore::Transient(store) => (store.allocate(size)?, None),
        };
        Ok(Allocated { chunk, chunk_bytes: self.chunk_bytes(), pending_in })
    }

    /// Commits a copy: the caller wrote chunk `old` of the origin to `allocated`, without a flush.
    /// A failed copy (`copied`) invalidates the snapshot.
    ///
    /// Never waits. `done` runs once: with `Ok` when the exception is durable. After a loss `done`
    /// runs with [`Invalid`] as soon as [`invalidate`](Self::invalidate) would call `then`.
    ///
    /// A persistent store runs `done` on its own thread: `done` may call devices but must not wait.
    /// A transient store runs `done` directly.
    pub fn commit(
        self: &Arc<Self>,
        mut allocated: Allocated,
        old: u64,
        copied: device::Result<()>,
        done: impl FnOnce(Result<(), Invalid>) + Send + 'static,
    ) {
        match &self.core {
            StoreCore::Persistent { committer, .. } => {
                let Some((store, sequence)) = allocated.pending_in.take() else { return };
                debug_assert!(Arc::ptr_eq(self, &store), "a place of another store");
                let finished = ChunkResult::entry(old, allocated.chunk, copied, Box::new(done));
                committer.finish(sequence, finished);
            }
            StoreCore::Transient(store) => {
                if copied.is_err() {
                    store.invalidate();
                }
                done(if store.is_valid() { Ok(()) } else { Err(Invalid) });
            }
        }
    }

    /// Invalidates the snapshot after a copy failed or found no space. Never waits. Exceptions that
    /// are not yet durable fail with [`Invalid`].
    ///
    /// `then` runs like the callback of [`commit`](Self::commit) when the COW device is marked
    /// invalid. The origin may be overwritten only after `then` has run. Otherwise the store would
    /// open as a valid snapshot with wrong content after a crash. If the COW device keeps failing,
    /// `then` runs after two seconds, and [`is_unmarked`](Self::is_unmarked) returns true.
    pub fn invalidate(&self, then: impl FnOnce() + Send + 'static) {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.invalidate(Box::new(|_| then())),
            StoreCore::Transient(store) => {
                store.invalidate();
                then();
            }
        }
    }

    /// Returns true if the snapshot is lost, but the COW device is not marked invalid and the store
    /// has stopped waiting for this mark.
    pub fn is_unmarked(&self) -> bool {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().is_unmarked(),
            StoreCore::Transient(_) => false,
        }
    }

    /// Stops waiting until the COW device of a lost snapshot is marked invalid, because the origin
    /// is now written without the snapshot.
    pub fn release(&self) {
        if let StoreCore::Persistent { committer, .. } = &self.core {
            committer.release();
        }
    }

    /// Returns the used space of the COW device.
    pub fn usage(&self) -> Usage {
        let size = self.device.geometry().size;
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().usage(size),
            StoreCore::Transient(store) => store.usage(size),
        }
    }

    /// Returns the counters of the store; all 0 for a transient store.
    pub fn stats(&self) -> Stats {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().stats,
            StoreCore::Transient(_) => Stats::default(),
        }
    }

    /// Returns the last run: the last committed exceptions whose chunks are contiguous on both
    /// devices, within one area and at most [`RUN_ENTRIES_MAX`]. Returns `None` if no exception is
    /// left. Blocks; used by merges.
    pub fn last_run(&self) -> Result<Option<Run>, MergeError> {
        self.committer()?.last_run()
    }

    /// Removes the last `count` exceptions of the last run durably. Their chunks must be durable in
    /// the origin. Blocks. Removing the last exception frees the whole COW device.
    ///
    /// # Errors
    /// [`MergeError`]. The exceptions still exist in memory, and the caller can retry. If
    /// [`is_torn`](Self::is_torn) returns true, the exceptions may be missing on disk. Until they
    /// are removed or restored, their chunks must not be written on either device.
    pub fn commit_merge(&self, run: &Run, count: u64) -> Result<(), MergeError> {
        self.committer()?.commit_merge(run, count)
    }

    /// Returns true if it is unknown whether the exceptions of the last run are on disk, because
    /// both their removal and their restore failed. May wait for a write in flight.
    pub fn is_torn(&self) -> bool {
        self.committer().is_ok_and(Committer::is_torn)
    }

    /// Restores exceptions that a failed [`commit_merge`](Self::commit_merge) may have removed from
    /// disk. Never waits. `then` runs once, like the callback of [`commit`](Self::commit), with
    /// `Ok` if all exceptions are durable.
    pub fn restore_entries(&self, then: impl FnOnce(device::Result<()>) + Send + 'static) {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.restore_entries(Box::new(then)),
            // A transient store has no exceptions on disk.
            StoreCore::Transient(_) => then(Ok(())),
        }
    }

    /// Returns the id of the merge in progress, also if it was interrupted by a close or crash;
    /// `None` without a merge mark.
    pub fn merge_id(&self) -> Option<u64> {
        self.mark.lock().map(|mark| mark.id)
    }

    /// Writes the merge mark durably to the store's header, before the first chunk of a merge is
    /// copied. No chunk may be allocated during or after this call. Blocks. Returns the id of the
    /// merge: the id of an existing mark, or `new`. Returns `None` if there is nothing to merge.
    ///
    /// # Errors
    /// [`MergeError`]; the store is not marked in memory. After [`MergeError::Invalid`] the mark
    /// may be on disk nevertheless, and the caller must [invalidate](Self::invalidate) the store.
    pub fn mark_merge(&self, new: u64) -> Result<Option<u64>, MergeError> {
        if let Some(id) = self.merge_id() {
            return Ok(Some(id));
        }
        let mark = self.committer()?.mark(new)?;
        *self.mark.lock() = mark;
        Ok(mark.map(|mark| mark.id))
    }

    /// Removes the merge mark from the store's header durably. Blocks.
    ///
    /// # Errors
    /// [`MergeError`]; whether the mark is on disk is then unknown.
    pub fn unmark_merge(&self) -> Result<(), MergeError> {
        self.committer()?.unmark()?;
        *self.mark.lock() = None;
        Ok(())
    }

    /// Schedules the record of an orderly close at the origin's content version `content`. The
    /// record is written when the store is dropped. Never waits.
    pub fn schedule_close_record(&self, content: Stamp) {
        if let StoreCore::Persistent { committer, .. } = &self.core {
            let mark = *self.mark.lock();
            committer.queue.lock().closing = Some((content, mark));
        }
    }

    fn committer(&self) -> Result<&Committer, MergeError> {
        match &self.core {
            StoreCore::Persistent { committer, .. } => Ok(committer),
            StoreCore::Transient(_) => Err(MergeError::Transient),
        }
    }
}

impl Allocated {
    /// Returns the number of the allocated chunk of the COW device.
    pub fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Returns the offset in bytes at which the chunk starts on the COW device.
    pub fn byte(&self) -> u64 {
        self.chunk * self.chunk_bytes
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if let Some((store, sequence)) = self.pending_in.take()
            && let StoreCore::Persistent { committer, .. } = &store.core
        {
            committer.finish(sequence, ChunkResult::Unused);
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if let StoreCore::Persistent { committer, thread } = &mut self.core {
            committer.stop();
            if let Some(thread) = thread.take()
                && thread.thread().id() != thread::current().id()
            {
                // An error is ignored, because the panic hook has reported a panic of the thread.
                let _ = thread.join();
            }
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({} {} of {} bytes a chunk)", self.kind, self.usage(), self.layout.chunk())
    }
}
