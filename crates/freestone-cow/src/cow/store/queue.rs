//! Queue of allocated and committed chunks, and the thread that writes exceptions to the COW device
//! in groups.

use std::collections::{BTreeMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::area::{Area, Block};
use super::format::{self, Entry, Layout, Mark};
use super::header_retry::HeaderRetry;
use super::types::{AllocateError, Invalid, MergeError, Run, Stats};
use crate::cow::Usage;
use crate::cow::notes::Stamp;
use crate::cow::status::SECTOR_BYTES;
use freestone_core::device::{self, Blocking, Device, Flags};
use freestone_core::sync::{Condvar, Instant, Mutex};

type Callback<E> = Box<dyn FnOnce(Result<(), E>) + Send>;

pub type CommitCallback = Callback<Invalid>;
/// Callback for entries that were restored on disk, or whose restore failed.
pub type RestoreCallback = Callback<device::Error>;

/// Outcome of the copy to an allocated chunk of the COW device.
pub enum ChunkResult {
    Entry(CopiedEntry),
    Failed(CommitCallback),
    /// The chunk was not needed and stays unused.
    Unused,
}

/// Exception whose copy is written, but whose entry is not durable yet.
pub struct CopiedEntry {
    entry: Entry,
    done: CommitCallback,
}

impl ChunkResult {
    pub fn entry(old: u64, new: u64, copied: device::Result<()>, done: CommitCallback) -> Self {
        match copied {
            Ok(()) => Self::Entry(CopiedEntry { entry: Entry::new(old, new), done }),
            Err(_) => Self::Failed(done),
        }
    }
}

/// Allocated chunks of a persistent store, and exceptions to be committed. All methods work in
/// memory and are short.
#[expect(clippy::struct_excessive_bools, reason = "four independent facts, each with a name")]
pub struct Queue {
    layout: Layout,
    pub valid: bool,
    /// First chunk of the COW device that was never allocated.
    next_free: u64,
    /// End of the durable list of exceptions: the number of the area, and the number of entries in
    /// this area (`committed`).
    area: u64,
    committed: u64,
    /// True if a merge has removed entries and no chunk was allocated since.
    merging: bool,
    /// Number of allocated chunks without an entry in the durable list.
    uncommitted: u64,
    /// Sequence number of the next allocated chunk.
    allocated: u64,
    /// First sequence number without a result; all earlier numbers have a result.
    next_sequence: u64,
    /// Results of chunks with later sequence numbers than `next_sequence`.
    out_of_order: BTreeMap<u64, ChunkResult>,
    /// Exceptions of the next groups, in the order of allocation.
    group: VecDeque<CopiedEntry>,
    /// Callbacks that wait until the COW device is marked invalid.
    loss_callbacks: Vec<CommitCallback>,
    /// Set while the snapshot is invalid but the header on disk is still valid.
    unmarked: Option<HeaderRetry>,
    /// True if the origin is written without the snapshot, so that no write waits for the header.
    released: bool,
    /// Callbacks that wait for entries to be restored after a failed removal.
    restore_callbacks: Vec<RestoreCallback>,
    stop: bool,
    /// Scheduled record of an orderly close: the origin's content version, and the mark of a merge
    /// in progress.
    pub closing: Option<(Stamp, Option<Mark>)>,
    pub stats: Stats,
}

impl Queue {
    /// Creates the queue of a store. `position` is the end of the list of exceptions: the number of
    /// the area, and the number of entries in this area.
    pub fn new(layout: Layout, valid: bool, next_free: u64, position: (u64, u64)) -> Self {
        Self {
            layout,
            valid,
            next_free,
            area: position.0,
            committed: position.1,
            merging: false,
            uncommitted: 0,
            allocated: 0,
            next_sequence: 0,
            out_of_order: BTreeMap::new(),
            group: VecDeque::new(),
            loss_callbacks: Vec::new(),
            unmarked: None,
            released: false,
            restore_callbacks: Vec::new(),
            stop: false,
            closing: None,
            stats: Stats::default(),
        }
    }

    /// Allocates a chunk of a COW device of `size` bytes. Returns the number of the chunk and its
    /// sequence number.
    pub fn allocate(&mut self, size: u64) -> Result<(u64, u64), AllocateError> {
        if !self.valid {
            return Err(AllocateError::Invalid);
        }
        let chunks = self.layout.chunks(size);
        // The entry that fills an area needs space for the next area, which ends the list.
        let entries = self.area * self.layout.entries() + self.committed + self.uncommitted + 1;
        let fills = entries.is_multiple_of(self.layout.entries());
        let next_area = self.layout.area_chunk(entries / self.layout.entries());
        if self.next_free >= chunks || fills && next_area >= chunks {
            return Err(AllocateError::Full);
        }
        let chunk = self.next_free;
        self.next_free = self.layout.skip_metadata(chunk + 1);
        self.uncommitted += 1;
        self.merging = false;
        self.allocated += 1;
        Ok((chunk, self.allocated - 1))
    }

    /// Records the outcome for the allocated chunk with this sequence number.
    fn finish(&mut self, sequence: u64, finished: ChunkResult) {
        let finished = match finished {
            ChunkResult::Failed(done) => {
                self.invalidate();
                self.loss_callbacks.push(done);
                return;
            }
            ChunkResult::Entry(entry) if !self.valid => return self.loss_callbacks.push(entry.done),
            other => other,
        };
        if sequence != self.next_sequence {
            self.out_of_order.insert(sequence, finished);
            return;
        }
        let mut next = Some(finished);
        while let Some(finished) = next {
            self.next_sequence += 1;
            match finished {
                ChunkResult::Entry(entry) => self.group.push_back(entry),
                ChunkResult::Failed(_) | ChunkResult::Unused => self.uncommitted -= 1,
            }
            next = self.out_of_order.remove(&self.next_sequence);
        }
    }

    /// Returns true if the group must be written now: no pending copy could join it, or the group
    /// fills an area.
    fn is_due(&self) -> bool {
        let pending = self.allocated != self.next_sequence;
        let fills = self.committed + self.group.len() as u64 >= self.layout.entries();
        self.valid && !self.group.is_empty() && (!pending || fills)
    }

    fn invalidate(&mut self) {
        if self.valid {
            self.valid = false;
            self.unmarked = Some(HeaderRetry::default());
        }
        self.loss_callbacks.extend(self.group.drain(..).map(|entry| entry.done));
        for finished in std::mem::take(&mut self.out_of_order).into_values() {
            if let ChunkResult::Entry(entry) = finished {
                self.loss_callbacks.push(entry.done);
            }
        }
    }

    /// Returns the time of the next attempt to write the invalid header, or `None` if it need not
    /// be written. When the thread stops, the attempt is due at once.
    fn header_due(&self) -> Option<Instant> {
        let unmarked = self.unmarked.as_ref()?;
        let now = Instant::now();
        Some(if self.stop { now } else { unmarked.next_attempt(now) })
    }

    /// Schedules the next attempt after the invalid header could not be written. Without this
    /// header the snapshot would look valid when opened again. When the thread stops, no further
    /// attempt is made.
    fn header_failed(&mut self, error: device::Error) {
        let Some(unmarked) = &mut self.unmarked else { return };
        unmarked.record_failure(error, self.stop);
        if self.stop {
            self.unmarked = None;
        }
    }

    /// Removes and returns the callbacks to run now for the loss of the snapshot. Returns none
    /// while the invalid header must be written first.
    fn take_loss_callbacks(&mut self) -> Vec<CommitCallback> {
        let held = self.unmarked.as_ref().is_some_and(|unmarked| !unmarked.has_given_up());
        if held && !self.released { Vec::new() } else { std::mem::take(&mut self.loss_callbacks) }
    }

    /// Returns true if the snapshot is invalid, the COW device is not marked invalid, and no write
    /// waits for this mark any more.
    pub fn is_unmarked(&self) -> bool {
        self.unmarked.as_ref().is_some_and(HeaderRetry::has_given_up)
    }

    pub fn usage(&self, size: u64) -> Usage {
        let sectors = self.layout.chunk() / SECTOR_BYTES;
        // Like the kernel, counts during a merge as if all chunks had been allocated in the order
        // of the entries.
        let end = self.layout.area_chunk(self.area) + self.committed + 1;
        let allocated = if self.merging { end } else { self.next_free };
        // Number of metadata chunks: the header, and the areas up to the present one.
        let metadata = self.area + 2;
        Usage { allocated: allocated * sectors, total: size / SECTOR_BYTES, metadata: metadata * sectors }
    }
}

/// Part of a persistent store that is shared with the store's thread.
///
/// Lock order:
/// 1. `area`, held during metadata I/O, by the store's thread and by a merge.
/// 2. `queue`, held for a few instructions.
///
/// Callbacks run without locks.
pub struct Committer {
    pub layout: Layout,
    pub device: Arc<dyn Device>,
    /// First block of the COW device, as written when the store was opened.
    pub header: Box<Block>,
    pub area: Mutex<Area>,
    pub queue: Mutex<Queue>,
    /// Notified when there is work for the store's thread.
    pub wake: Condvar,
}

enum Work {
    Header,
    ReportLoss(Vec<CommitCallback>),
    Group,
    Restore(Vec<RestoreCallback>),
}

impl Committer {
    pub fn finish(&self, sequence: u64, finished: ChunkResult) {
        let mut queue = self.queue.lock();
        queue.finish(sequence, finished);
        let wake = queue.is_due() || !queue.loss_callbacks.is_empty();
        drop(queue);
        if wake {
            self.wake.notify_one();
        }
    }

    /// Invalidates the snapshot. `then` runs when the COW device is marked invalid, or could not be
    /// marked in time.
    pub fn invalidate(&self, then: CommitCallback) {
        let mut queue = self.queue.lock();
        queue.invalidate();
        queue.loss_callbacks.push(then);
        drop(queue);
        self.wake.notify_one();
    }

    /// Stops the wait for the invalid header, because the origin is now written without the
    /// snapshot.
    pub fn release(&self) {
        self.queue.lock().released = true;
        self.wake.notify_one();
    }

    /// Requests the restore of entries that a failed removal may have removed from disk.
    pub fn restore_entries(&self, then: RestoreCallback) {
        self.queue.lock().restore_callbacks.push(then);
        self.wake.notify_one();
    }

    /// Makes the store's thread exit after its remaining work.
    pub fn stop(&self) {
        self.queue.lock().stop = true;
        self.wake.notify_one();
    }

    // ---- the store's thread ---------------------------------------------------------------------

    /// Commits groups and runs callbacks until the store is dropped. Then records the orderly close
    /// of the store, if the record was scheduled.
    pub fn run(&self) {
        while let Some(work) = self.next_work() {
            match work {
                Work::Header => match self.write_invalid() {
                    Ok(()) => self.queue.lock().unmarked = None,
                    Err(error) => self.queue.lock().header_failed(error),
                },
                Work::ReportLoss(callbacks) => run_callbacks(callbacks, Err(Invalid)),
                Work::Group => self.commit_group(),
                Work::Restore(callbacks) => {
                    let outcome = self.area.lock().restore_entries();
                    run_callbacks(callbacks, outcome);
                }
            }
        }
        self.record_close();
    }

    fn record_close(&self) {
        let _area = self.area.lock();
        let closing = {
            let mut queue = self.queue.lock();
            queue.closing.take().filter(|_| queue.valid)
        };
        let Some((content, mark)) = closing else { return };
        let mut block = *self.header;
        format::set_mark(&mut block, mark);
        format::set_closed(&mut block, Some(content));
        if let Err(error) = self.device.write_at(0, &block, Flags::FUA) {
            tracing::warn!(%error, "recording the orderly close of an exception store failed");
        }
    }

    fn next_work(&self) -> Option<Work> {
        let mut queue = self.queue.lock();
        loop {
            let header_due = queue.header_due();
            if header_due.is_some_and(|at| at <= Instant::now()) {
                return Some(Work::Header);
            }
            let lost = queue.take_loss_callbacks();
            if !lost.is_empty() {
                return Some(Work::ReportLoss(lost));
            }
            if queue.is_due() {
                return Some(Work::Group);
            }
            if !queue.restore_callbacks.is_empty() {
                return Some(Work::Restore(std::mem::take(&mut queue.restore_callbacks)));
            }
            if queue.stop {
                return None;
            }
            queue = match header_due {
                None => freestone_core::pin::wait(&self.wake, queue),
                Some(at) => {
                    let left = at.saturating_duration_since(Instant::now());
                    self.wake.wait_timeout(queue, left).0
                }
            };
        }
    }

    fn commit_group(&self) {
        let mut area = self.area.lock();
        let group: Vec<CopiedEntry> = {
            let mut queue = self.queue.lock();
            let count = area.free_entries().min(queue.group.len());
            queue.group.drain(..count).collect()
        };
        if group.is_empty() {
            // The snapshot was lost meanwhile, which emptied the group.
            return;
        }
        let (entries, callbacks): (Vec<Entry>, Vec<CommitCallback>) =
            group.into_iter().map(|copied| (copied.entry, copied.done)).unzip();
        let outcome = area.append(&entries);
        let mut queue = self.queue.lock();
        if let Err(error) = outcome {
            tracing::warn!(%error, "the snapshot is lost: device failed: writing its exceptions");
            queue.invalidate();
        } else {
            let count = entries.len() as u64;
            (queue.area, queue.committed) = area.position();
            queue.uncommitted -= count;
            queue.stats.exceptions += count;
            queue.stats.groups += 1;
            queue.stats.largest_group = queue.stats.largest_group.max(count);
        }
        if !queue.valid {
            // The callbacks run after the invalid header was written.
            queue.loss_callbacks.extend(callbacks);
            return;
        }
        drop(queue);
        drop(area);
        run_callbacks(callbacks, Ok(()));
    }

    /// Writes the invalid header. No flush is needed before, because the rest of the COW device
    /// does not matter any more.
    fn write_invalid(&self) -> device::Result<()> {
        // The lock excludes a merge that writes its mark to the header.
        let _area = self.area.lock();
        self.device.write_at(0, &format::header(self.layout.chunk(), false), Flags::FUA)
    }

    // ---- a merge's thread -----------------------------------------------------------------------

    /// Writes the merge mark durably, and returns it, or `None` if there is nothing to merge. All
    /// exceptions must be committed. Returns [`MergeError::Invalid`] if it is unknown whether the
    /// mark is on disk.
    pub fn mark(&self, id: u64) -> Result<Option<Mark>, MergeError> {
        let mut area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        let Some((entries, first)) = area.first_entry()? else { return Ok(None) };
        let mark = Mark { id, entries, first };
        if let Err(error) = self.write_mark(Some(mark)) {
            // The mark may be on disk nevertheless, and the store would then open with a merge that
            // never started. So it is removed.
            let restored = self.write_mark(None);
            return Err(restored.map_or(MergeError::Invalid, |()| MergeError::Device(error)));
        }
        Ok(Some(mark))
    }

    /// Removes the merge mark from the header durably.
    pub fn unmark(&self) -> Result<(), MergeError> {
        let _area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        Ok(self.write_mark(None)?)
    }

    fn write_mark(&self, mark: Option<Mark>) -> device::Result<()> {
        let mut block = *self.header;
        format::set_mark(&mut block, mark);
        self.device.write_at(0, &block, Flags::FUA)
    }

    pub fn last_run(&self) -> Result<Option<Run>, MergeError> {
        let mut area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        area.last_run()
    }

    /// Returns true if it is unknown which exceptions of the last run are on disk.
    pub fn is_torn(&self) -> bool {
        self.area.lock().is_torn()
    }

    pub fn commit_merge(&self, run: &Run, count: u64) -> Result<(), MergeError> {
        let mut area = self.area.lock();
        if !self.queue.lock().valid {
            return Err(MergeError::Invalid);
        }
        if let Err(error) = area.remove(run, count) {
            // The entries may be missing on disk. Restore them, so that memory and disk agree.
            if let Err(error) = area.restore_entries() {
                tracing::warn!(%error, "exceptions of a failed merge step could not be restored; their state on disk is unknown until a retry succeeds");
            }
            return Err(error);
        }
        let mut queue = self.queue.lock();
        (queue.area, queue.committed) = area.position();
        queue.merging = queue.uncommitted == 0;
        if queue.merging && area.position() == (0, 0) {
            queue.next_free = format::FIRST_COPY;
        }
        Ok(())
    }
}

/// Runs all callbacks. A panic ends only the callback that panics, and is reported by the panic
/// hook.
fn run_callbacks<E: Copy>(callbacks: Vec<Callback<E>>, outcome: Result<(), E>) {
    for done in callbacks {
        let _ = catch_unwind(AssertUnwindSafe(|| done(outcome)));
    }
}
