//! The exception store: where copies go on the COW device, and the record of that.
//!
//! The order that makes a persistent store safe is the kernel's. A place is taken
//! ([`Store::allocate`]), the chunk is copied there, and the copy is handed in ([`Store::commit`]).
//! Entries enter the record in the order in which their places were taken, in groups: the record is
//! written when every place that was taken has its copy, or when an area is full. Before that the
//! next area is zeroed, if this one is full, and the COW device is flushed, so an entry on disk
//! implies its copy is there. Only when the entries are durable are the callers told, who may then
//! overwrite the origin.

use std::fmt;
use std::sync::Arc;

use super::format::{Layout, Mark};
use super::notes::Stamp;
use super::store_area::Area;
use super::store_load::{self, Loaded};
use super::store_queue::{Committer, Finished, Queue};
use super::store_transient::Transient;
use super::{CHUNK_BYTES_DEFAULT, SetupError, StoreKind, Usage};
use freestone_core::device::{self, Device, Geometry};
use freestone_core::sync::{
    Condvar, Mutex,
    thread::{self, JoinHandle},
};

pub use super::config::Damage;
pub use super::store_answers::{Exceptions, Invalid, MergeError, NoPlace, Run, Stats};
pub use super::store_area::RUN_ENTRIES_MAX;

/// An exception store on a COW device. Shared by all that use one snapshot.
///
/// A persistent store has a thread, on which callbacks run. Whoever drops the last reference waits
/// for what was handed in (unless it is that thread).
pub struct Store {
    kind: StoreKind,
    layout: Layout,
    device: Arc<dyn Device>,
    /// The merge that is under way, as the disk says.
    mark: Mutex<Option<Mark>>,
    core: StoreCore,
}

enum StoreCore {
    Persistent { committer: Arc<Committer>, thread: Option<JoinHandle<()>> },
    Transient(Box<Transient>),
}

/// A place for a copy. One that is dropped was not needed: its chunk stays unused.
#[derive(Debug)]
pub struct Allocated {
    chunk: u64,
    chunk_bytes: u64,
    /// A persistent store counts on its coming back. `None`: it does not, or it was handed in.
    due: Option<(Arc<Store>, u64)>,
}

impl Store {
    /// Opens the store on `cow`, or makes a new one where the device begins with zeroes. Blocks.
    /// Gives its exceptions, in the order of the origin. An invalid store opens without any, and
    /// [`is_valid`](Self::is_valid) says so.
    ///
    /// A transient store ignores what the device holds.
    ///
    /// # Errors
    /// [`SetupError`]. Nothing was written then to a store that is not understood, or that is
    /// damaged.
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
            let mark = Mutex::default();
            return Ok((Arc::new(Self { kind, layout, device: cow, mark, core }), Vec::new()));
        }
        let Loaded { layout, header, valid, mark, end, next_free, exceptions } =
            store_load::load(&*cow, chunk_bytes, origin)?;
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
        let mark = Mutex::new(mark);
        Ok((Arc::new(Self { kind, layout, device: cow, mark, core }), exceptions))
    }

    /// Bytes of a chunk.
    pub fn chunk_bytes(&self) -> u64 {
        self.layout.chunk()
    }

    /// The COW device.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.device
    }

    /// What kind of store it is.
    pub fn kind(&self) -> StoreKind {
        self.kind
    }

    /// Whether the snapshot is good. Once it is not, it stays so.
    pub fn is_valid(&self) -> bool {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().valid,
            StoreCore::Transient(store) => store.is_valid(),
        }
    }

    /// Takes a place for a copy. Never waits. The caller bounds how many places it holds; each
    /// costs the store a few words.
    ///
    /// # Errors
    /// [`NoPlace`]. The store stays as it is: whether a lack of room invalidates the snapshot
    /// depends on who wanted the place.
    pub fn allocate(self: &Arc<Self>) -> Result<Allocated, NoPlace> {
        let size = self.device.geometry().size;
        let (chunk, due) = match &self.core {
            StoreCore::Persistent { committer, .. } => {
                let (chunk, sequence) = committer.queue.lock().allocate(size)?;
                (chunk, Some((Arc::clone(self), sequence)))
            }
            StoreCore::Transient(store) => (store.allocate(size)?, None),
        };
        Ok(Allocated { chunk, chunk_bytes: self.chunk_bytes(), due })
    }

    /// Hands in a copy: chunk `old` of the origin was written (not flushed) to the place
    /// `allocated`, or that failed, which invalidates the snapshot. `done` runs once: with `Ok`
    /// when the exception is durable, else when the snapshot is invalid, as
    /// [`invalidate`](Self::invalidate) has it. Never waits.
    ///
    /// A persistent store runs `done` on a thread of its own, where devices may be called and
    /// nothing may wait. A transient one runs it here.
    pub fn commit(
        self: &Arc<Self>,
        mut allocated: Allocated,
        old: u64,
        copied: device::Result<()>,
        done: impl FnOnce(Result<(), Invalid>) + Send + 'static,
    ) {
        match &self.core {
            StoreCore::Persistent { committer, .. } => {
                let Some((store, sequence)) = allocated.due.take() else { return };
                debug_assert!(Arc::ptr_eq(self, &store), "a place of another store");
                let finished = Finished::entry(old, allocated.chunk, copied, Box::new(done));
                committer.finish(sequence, finished);
            }
            StoreCore::Transient(store) => {
                if copied.is_err() {
                    store.lose();
                }
                done(if store.is_valid() { Ok(()) } else { Err(Invalid) });
            }
        }
    }

    /// The snapshot is lost: there was no room for a copy, or its data failed. All that is not yet
    /// durable is answered [`Invalid`]. Never waits. `then` runs as the callback of
    /// [`commit`](Self::commit) does, when the device says so too: only then may the origin be
    /// overwritten, or a crash would bring back a snapshot that is wrong. Where the device fails,
    /// that is tried for two seconds; then `then` runs all the same, and
    /// [`is_unmarked`](Self::is_unmarked) says so.
    pub fn invalidate(&self, then: impl FnOnce() + Send + 'static) {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.invalidate(Box::new(|_| then())),
            StoreCore::Transient(store) => {
                store.lose();
                then();
            }
        }
    }

    /// Whether the snapshot is lost, the COW device still says that it is good, and nobody waits
    /// for that any more.
    pub fn is_unmarked(&self) -> bool {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().is_unmarked(),
            StoreCore::Transient(_) => false,
        }
    }

    /// The origin is written without the snapshot from now on: nobody waits any more for the COW
    /// device to say that it is lost.
    pub fn release(&self) {
        if let StoreCore::Persistent { committer, .. } = &self.core {
            committer.release();
        }
    }

    /// What of the COW device is used.
    pub fn usage(&self) -> Usage {
        let size = self.device.geometry().size;
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().usage(size),
            StoreCore::Transient(store) => store.usage(size),
        }
    }

    /// What was done so far.
    pub fn stats(&self) -> Stats {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.queue.lock().stats,
            StoreCore::Transient(_) => Stats::default(),
        }
    }

    /// The exceptions that were committed last, as far as both their chunks follow each other and
    /// they are in one area; at most [`RUN_ENTRIES_MAX`]. `None`: there are none left. Blocks; for
    /// a merge.
    ///
    /// # Errors
    /// [`MergeError`].
    pub fn last_run(&self) -> Result<Option<Run>, MergeError> {
        self.committer()?.last_run()
    }

    /// Forgets the last `count` exceptions of the last run, whose chunks are in the origin and
    /// durable there. Blocks until that is durable. When the last one is forgotten, the whole
    /// device is free again.
    ///
    /// # Errors
    /// [`MergeError`]. The exceptions are still there then, and it can be tried again. But where
    /// [`is_torn`](Self::is_torn) says so they may be gone on disk: until that is known their
    /// chunks must not be written, in either place.
    pub fn commit_merge(&self, run: &Run, count: u64) -> Result<(), MergeError> {
        self.committer()?.commit_merge(run, count)
    }

    /// Whether it is not known which exceptions of the last run are on disk: a write that was to
    /// forget them failed, and so did the one that was to bring them back. May wait for a write
    /// that is under way.
    pub fn is_torn(&self) -> bool {
        self.committer().is_ok_and(Committer::is_torn)
    }

    /// Brings exceptions back that a failed [`commit_merge`](Self::commit_merge) may have taken
    /// from the disk. `then` runs once, as the callback of [`commit`](Self::commit) does: with `Ok`
    /// when all are there durably. Never waits.
    pub fn put_back(&self, then: impl FnOnce(device::Result<()>) + Send + 'static) {
        match &self.core {
            StoreCore::Persistent { committer, .. } => committer.put_back(Box::new(then)),
            // It has no record.
            StoreCore::Transient(_) => then(Ok(())),
        }
    }

    /// The number of the merge that is under way, from before its first copy until all is in the
    /// origin, also if the store was closed in between.
    pub fn merge_id(&self) -> Option<u64> {
        self.mark.lock().map(|mark| mark.id)
    }

    /// Says on disk that a merge is under way, before anything is copied. No place may be handed
    /// out meanwhile or later. Blocks. Gives the merge's number: the one that the disk has already,
    /// or `new`; `None` where there is nothing to merge.
    ///
    /// # Errors
    /// [`MergeError`]; the store is not marked then. [`MergeError::Invalid`] where the disk may say
    /// so all the same: the caller [invalidates](Self::invalidate) the store.
    pub fn mark_merge(&self, new: u64) -> Result<Option<u64>, MergeError> {
        if let Some(id) = self.merge_id() {
            return Ok(Some(id));
        }
        let mark = self.committer()?.mark(new)?;
        *self.mark.lock() = mark;
        Ok(mark.map(|mark| mark.id))
    }

    /// Says on disk that no merge is under way. Blocks.
    ///
    /// # Errors
    /// [`MergeError`]; it is not known then what the disk says.
    pub fn unmark_merge(&self) -> Result<(), MergeError> {
        self.committer()?.unmark()?;
        *self.mark.lock() = None;
        Ok(())
    }

    /// The store is closed in order while the origin holds `content`: it says so when it is
    /// dropped. Never waits.
    pub fn closes(&self, content: Stamp) {
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
    /// Chunk of the COW device.
    pub fn chunk(&self) -> u64 {
        self.chunk
    }

    /// Byte of the COW device at which it begins.
    pub fn byte(&self) -> u64 {
        self.chunk * self.chunk_bytes
    }
}

impl Drop for Allocated {
    fn drop(&mut self) {
        if let Some((store, sequence)) = self.due.take()
            && let StoreCore::Persistent { committer, .. } = &store.core
        {
            committer.finish(sequence, Finished::Unused);
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
                // A panic there was reported by its own hook.
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
