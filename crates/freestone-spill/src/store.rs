//! The backing device of a family: writes runs of blocks, reads pages back, and counts both.
//!
//! Any [`Device`] can be a backing device; how the device processes requests (threads, `io_uring`)
//! does not matter to this module. The content of the device is used while this process lives, and by
//! a process that adopts the family after a kill, but never after a restart of the machine. So nothing
//! is flushed. Some devices can lose completed writes while this process lives (such as the server of
//! an export). On such a device each write is durable (FUA) before its pages leave memory.
//!
//! A write that times out is abandoned: its pages stay in memory. The blocks are not reused until
//! the device completes the write after all. `deadline` defines the time-outs.

use std::sync::Arc;
use std::time::Duration;

use super::blocks::{BLOCK_UNITS, Blocks, OBJECT_BYTES_MAX};
use super::budget::Budget;
use super::clean_copies::{CleanCopies, CleanCopy, CopyContent};
use super::deadline::Deadline;
use super::layout::{self, Place};
use super::reads::{QueuedRead, ReadError, Reads, SpareBuffers, TimedOutRead};
use super::space::{BLOCK_BYTES, MAX_BLOCKS, Space};
use freestone_core::clock::now_ms;
use freestone_core::device::{Completion, Device, Error, Flags, IoBuf, Request};
use freestone_core::mutants::{self, Mutant};
use freestone_core::percpu::Counters;
use freestone_core::sync::{AtomicU32, Ordering};

/// Size of the largest write in blocks.
pub const WRITE_BLOCKS_MAX: u32 = 256;
/// Maximum number of writes in flight.
pub const WRITES_MAX: usize = 4;
/// Clean copies are kept while more than this part of the blocks is free: a quarter, as for reclaim.
pub const FREE_SHARE: u64 = 4;
/// Number of clean copies that are freed at once.
const FREED_COPIES: usize = 256;
/// Default for the maximum number of blocks in flight.
pub const BATCH_BLOCKS: u32 = WRITE_BLOCKS_MAX * WRITES_MAX as u32;

/// A backing device in use by a family (a base and its forks, which share memory).
///
/// Lock order: the locks of `space`, `budget`, `reads`, `copies` and of a [`Write`](super::writes::Write) are leaf
/// locks.
pub struct Store {
    pub(super) device: Arc<dyn Device>,
    packed: bool,
    pub(super) write_flags: Flags,
    pub(super) space: Space,
    pub(super) blocks: Blocks,
    pub(super) budget: Budget,
    copies: CleanCopies,
    pub(super) counters: Counters<{ counter::COUNT }>,
    spare: SpareBuffers,
    batch_blocks: AtomicU32,
    pub(super) deadline: Deadline,
    reads: Reads,
    /// Number of abandoned writes that the device has not completed.
    pub(super) abandoned: AtomicU32,
    /// 1 if the last read failed or returned damaged content, otherwise 0.
    last_read_failed: AtomicU32,
}

pub(super) mod counter {
    pub const READS: usize = 0;
    pub const WRITES: usize = 1;
    /// Number of failed, damaged or timed-out reads.
    pub const FAILED_READS: usize = 2;
    /// Number of failed or timed-out write requests.
    pub const FAILED_WRITES: usize = 3;
    /// Number of pages on the device.
    pub const PAGES: usize = 4;
    /// Total bytes of the stored pages, without headers.
    pub const LIVE_BYTES: usize = 5;
    /// Number of pages of clean copies, and the bytes of the copies' objects.
    pub const COPIES: usize = 6;
    pub const COPIED_BYTES: usize = 7;
    pub const COUNT: usize = 8;
}

/// Statistics of a backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreStat {
    pub blocks: u64,
    pub used: u64,
    pub reads: u64,
    pub writes: u64,
    /// Number of failed, damaged or timed-out reads.
    pub failed_reads: u64,
    /// Number of failed or timed-out write requests.
    pub failed_writes: u64,
    pub pages: u64,
    /// Total bytes of the stored pages, without headers.
    pub live_bytes: u64,
    /// Number of pages in memory whose object is also on the device.
    pub clean_pages: u64,
    /// Number of abandoned writes that the device has not completed.
    pub abandoned: u32,
    /// True if the last read failed or returned damaged content.
    pub last_read_failed: bool,
    /// True if no block is free for writeback; a reserve for reclaim may still be free.
    pub is_full: bool,
}

impl Store {
    /// Starts to use `device` as a backing device; its content will be overwritten. With
    /// `write_through` each write completes only when it is durable.
    ///
    /// # Errors
    /// Returns a message if the device is unsuitable, or if memory is short.
    pub fn new(
        device: Arc<dyn Device>,
        packed: bool,
        write_through: bool,
    ) -> std::result::Result<Self, String> {
        let geometry = device.geometry();
        if geometry.read_only {
            return Err("is read-only; it must be writable".into());
        }
        if geometry.zones.is_some() {
            return Err("is a zoned device; a backing device must not be zoned".into());
        }
        let blocks = (geometry.size / BLOCK_BYTES as u64).min(MAX_BLOCKS);
        if blocks == 0 {
            return Err(format!("has {} bytes; at least {BLOCK_BYTES} are needed", geometry.size));
        }
        let space = Space::new(blocks).map_err(|error| error.to_string())?;
        let map = Blocks::new(blocks).map_err(|error| error.to_string())?;
        Ok(Self {
            device,
            packed,
            write_flags: if write_through { Flags::FUA } else { Flags::empty() },
            space,
            blocks: map,
            budget: Budget::default(),
            copies: CleanCopies::default(),
            counters: Counters::default(),
            spare: SpareBuffers::default(),
            batch_blocks: AtomicU32::new(BATCH_BLOCKS),
            deadline: Deadline::default(),
            reads: Reads::default(),
            abandoned: AtomicU32::new(0),
            last_read_failed: AtomicU32::new(0),
        })
    }

    /// Returns true for the packed layout of compressed pages, false for one uncompressed page per
    /// block.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    // ---- pages on the device --------------------------------------------------------------------

    /// Returns the number of blocks that only reclaim may use. Reclaim needs free blocks to move
    /// live pages out of blocks with holes.
    pub fn reserve(&self) -> u64 {
        if self.packed { (self.space.blocks() / 16).min(u64::from(WRITE_BLOCKS_MAX)) } else { 0 }
    }

    /// Marks the space of an object as used that a process which has ended had written for `pages` pages. Returns
    /// false if no object of `stored` bytes can be at `unit`. Called before other threads use the device.
    pub fn adopt_object(&self, unit: u64, stored: usize, pages: u64) -> bool {
        let can_be = stored <= OBJECT_BYTES_MAX && (self.packed || unit.is_multiple_of(BLOCK_UNITS));
        let occupy = |block| {
            if !mutants::on(Mutant::AdoptedBlocksFree) {
                self.space.occupy(block);
            }
        };
        let is_there = can_be && self.blocks.restore(unit, self.units(stored), occupy);
        if is_there {
            self.count_written_back(pages, stored as u64);
        }
        is_there
    }

    /// Counts pages whose slots now refer to the device, and the bytes of their stored form.
    pub fn count_written_back(&self, pages: u64, stored: u64) {
        self.count_pages(pages as i64, stored as i64);
    }

    /// Counts pages whose slots no longer refer to the device, and the bytes of objects to which no
    /// slot refers any more. The caller frees these objects.
    pub fn count_left(&self, pages: u64, stored: u64) {
        self.count_pages(-(pages as i64), -(stored as i64));
    }

    /// Frees the space of a page counted by [`count_written_back`](Self::count_written_back).
    pub fn release(&self, unit: u64, stored: usize) {
        self.count_pages(-1, -(stored as i64));
        self.free_object(unit, stored);
    }

    fn count_pages(&self, pages: i64, bytes: i64) {
        self.counters.add(counter::PAGES, pages);
        self.counters.add(counter::LIVE_BYTES, bytes);
    }

    /// Frees the space of an object to which no slot refers.
    pub fn free_object(&self, unit: u64, stored: usize) {
        self.blocks.remove(unit, self.units(stored), |block| self.space.free_run(block, 1));
    }

    // ---- clean copies ---------------------------------------------------------------------------

    /// Keeps the object of a page that moved back to memory, into the slot `slot` of the table
    /// `table`, as a clean copy. Frees the object instead if blocks are short. The pool has
    /// `pool_pages` pages.
    pub fn keep_copy(&self, slot: (u32, u64), unit: u64, content: CopyContent<'_>, pool_pages: u64) {
        self.count_left(1, content.object.len() as u64);
        self.keep_object(slot, unit, 1, content, pool_pages);
    }

    /// As [`keep_copy`](Self::keep_copy), for an object of `pages` pages that is not counted as
    /// written back any more.
    pub fn keep_object(
        &self,
        slot: (u32, u64),
        unit: u64,
        pages: u32,
        content: CopyContent<'_>,
        pool_pages: u64,
    ) {
        let stored = content.object.len();
        if self.is_short() {
            return self.free_object(unit, stored);
        }
        let copy = CleanCopy { unit, stored: stored as u32, pages };
        self.count_copies(copy, 1);
        self.free_copies(self.copies.insert(slot, copy, content, pool_pages));
    }

    /// Frees the clean copy of a slot, if there is one.
    pub fn free_copy(&self, slot: (u32, u64)) {
        self.free_copies(self.copies.take_any(slot));
    }

    /// Returns the unit of the clean copy of a page that leaves memory, if its content is unchanged.
    /// The copy then belongs to the caller, as an object that was just written. Frees a copy with
    /// other content.
    pub fn take_copy(&self, slot: (u32, u64), content: CopyContent<'_>) -> Option<u64> {
        match self.copies.take(slot, content)? {
            Ok(copy) => {
                self.count_copies(copy, -1);
                Some(copy.unit)
            }
            Err(changed) => {
                self.free_copies([changed]);
                None
            }
        }
    }

    /// Frees the oldest clean copies while blocks are short.
    pub fn free_copies_if_short(&self) {
        while self.is_short() && self.free_copies(self.copies.take_oldest(FREED_COPIES)) {}
    }

    /// Frees all clean copies of a slot table that is no longer used.
    pub fn free_copies_of(&self, table: u32) {
        self.free_copies(self.copies.take_table(table));
    }

    /// Frees stale clean copies among up to `count` of the oldest. `is_valid` receives slot table,
    /// slot and object size, and returns true if the page in memory may still be the copied one.
    pub fn sweep_copies(&self, count: usize, is_valid: impl Fn(u32, u64, u32) -> bool) {
        self.free_copies(self.copies.sweep(count, is_valid));
    }

    /// Returns the approximate memory of the table of clean copies in bytes.
    pub fn copies_bytes(&self) -> u64 {
        self.copies.bytes()
    }

    /// Frees copies that were removed from the table. Returns true if there was one.
    fn free_copies(&self, copies: impl IntoIterator<Item = CleanCopy>) -> bool {
        let mut any = false;
        for copy in copies {
            self.count_copies(copy, -1);
            self.free_object(copy.unit, copy.stored as usize);
            any = true;
        }
        any
    }

    /// Adds a clean copy to the counters (`sign` 1), or subtracts the copy (-1).
    fn count_copies(&self, copy: CleanCopy, sign: i64) {
        self.counters.add(counter::COPIES, sign * i64::from(copy.pages));
        self.counters.add(counter::COPIED_BYTES, sign * i64::from(copy.stored));
    }

    /// Returns true if free blocks are too few for clean copies.
    fn is_short(&self) -> bool {
        self.free_blocks() <= self.blocks() / FREE_SHARE
    }

    pub(super) fn units(&self, stored: usize) -> u32 {
        if self.packed { layout::units(stored) } else { BLOCK_UNITS as u32 }
    }

    // ---- reading --------------------------------------------------------------------------------

    /// Returns the first block and the number of blocks that contain an object.
    pub fn blocks_of(&self, Place { unit, stored, .. }: Place) -> (u64, u32) {
        let last = (unit + u64::from(self.units(stored as usize)) - 1) / BLOCK_UNITS;
        let first = unit / BLOCK_UNITS;
        (first, (last - first + 1) as u32)
    }

    /// Reads blocks and calls `done` within a bounded time. `done` runs on a thread of the device,
    /// this thread, or the thread that [fails timed-out reads](Self::take_timed_out_reads). If too
    /// many reads are in flight, queues the read.
    pub fn read(
        self: &Arc<Self>,
        first: u64,
        blocks: u32,
        done: impl FnOnce(std::result::Result<&[u8], ReadError>) + Send + 'static,
    ) {
        let read = QueuedRead { first, blocks, since_ms: now_ms(), done: Box::new(done) };
        if let Some(read) = self.reads.admit(read) {
            self.submit_read(read);
        }
    }

    /// Sets a callback that is called when a read slot is freed while reads are queued. The
    /// callback runs on a thread of the device, and must make another thread call
    /// [`start_reads`](Self::start_reads). The owner must also poll
    /// [`take_timed_out_reads`](Self::take_timed_out_reads).
    pub fn set_free_slot_callback(&self, callback: impl Fn() + Send + Sync + 'static) {
        self.reads.set_free_slot_callback(Box::new(callback));
    }

    /// Submits queued reads until all read slots are used or the queue is empty.
    pub fn start_reads(self: &Arc<Self>) {
        while let Some(read) = self.reads.next() {
            self.submit_read(read);
        }
    }

    /// Removes and returns the reads that have timed out; the caller must fail them.
    pub fn take_timed_out_reads(&self) -> Vec<TimedOutRead> {
        self.reads.take_timed_out(&self.deadline)
    }

    fn submit_read(self: &Arc<Self>, QueuedRead { first, blocks, done, .. }: QueuedRead) {
        let len = blocks as usize * BLOCK_BYTES;
        let buffer = match self.spare.get(len) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.reads.release_unsubmitted();
                return done(Err(ReadError::Failed(error)));
            }
        };
        let number = self.reads.register(done);
        let store = Arc::clone(self);
        let answered = Completion::new(move |outcome, buffer: IoBuf| {
            store.deadline.record_completion();
            match outcome {
                Ok(()) => store.counters.add(counter::READS, i64::from(blocks)),
                Err(_) => store.record_failed_read(),
            }
            if let Some(done) = store.reads.complete(number) {
                // A device that has failed permanently completes the request without a buffer.
                let outcome = if buffer.len() == len { outcome } else { outcome.and(Err(Error::Gone)) };
                done(outcome.map(|()| &buffer[..]).map_err(ReadError::Failed));
            }
            store.spare.put(buffer);
        });
        self.device.submit(Request::read(first * BLOCK_BYTES as u64, len as u64), buffer, answered);
    }

    /// Counts a read that failed, timed out or returned damaged content.
    #[cold]
    pub fn record_failed_read(&self) {
        self.counters.add(counter::FAILED_READS, 1);
        // Relaxed: a statistic, which orders no other memory access.
        self.last_read_failed.store(1, Ordering::Relaxed);
    }

    /// Records that the last read was successful.
    pub(super) fn record_good_read(&self) {
        // Relaxed: a statistic. The check avoids a store in the usual case.
        if self.last_read_failed.load(Ordering::Relaxed) != 0 {
            // Relaxed: a statistic.
            self.last_read_failed.store(0, Ordering::Relaxed);
        }
    }

    // ---- holes ----------------------------------------------------------------------------------

    /// Returns the metadata of all blocks, for reclaim.
    pub fn map(&self) -> &Blocks {
        &self.blocks
    }

    // ---- settings and numbers -------------------------------------------------------------------

    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    pub fn batch_blocks(&self) -> u32 {
        // Relaxed: an independent setting, which orders no other memory access.
        self.batch_blocks.load(Ordering::Relaxed)
    }

    /// Sets the maximum number of blocks in flight, at least 1.
    pub fn set_batch_blocks(&self, blocks: u32) {
        // Relaxed: an independent setting, which orders no other memory access.
        self.batch_blocks.store(blocks.max(1), Ordering::Relaxed);
    }

    pub fn timeout_ms(&self) -> u64 {
        self.deadline.timeout_ms()
    }

    /// Sets the time-out of requests, at least 1 ms.
    pub fn set_timeout(&self, timeout: Duration) {
        self.deadline.set_timeout(timeout);
    }

    pub fn blocks(&self) -> u64 {
        self.space.blocks()
    }

    /// Returns the number of free blocks, without those reserved for reclaim.
    pub fn free_blocks(&self) -> u64 {
        self.space.free().saturating_sub(self.reserve())
    }

    /// Returns the approximate number of blocks that a perfect reclaim would free.
    pub fn hole_blocks(&self) -> u64 {
        if !self.packed {
            return 0;
        }
        let StoreStat { used, pages, live_bytes, clean_pages, .. } = self.stat();
        let (pages, live_bytes) =
            (pages + clean_pages, live_bytes + self.counters.get(counter::COPIED_BYTES));
        // A page needs a header (one unit), and half a unit of padding on average.
        let full = live_bytes + pages * (layout::UNIT_BYTES as u64 * 3 / 2);
        used.saturating_sub(full.div_ceil(BLOCK_BYTES as u64))
    }

    /// Returns the number of abandoned writes that the device has not completed.
    pub fn abandoned(&self) -> u32 {
        // Relaxed: a count that is polled.
        self.abandoned.load(Ordering::Relaxed)
    }

    pub fn stat(&self) -> StoreStat {
        let get = |counter| self.counters.get(counter);
        StoreStat {
            blocks: self.space.blocks(),
            used: self.space.used(),
            reads: get(counter::READS),
            writes: get(counter::WRITES),
            failed_reads: get(counter::FAILED_READS),
            failed_writes: get(counter::FAILED_WRITES),
            pages: get(counter::PAGES),
            live_bytes: get(counter::LIVE_BYTES),
            clean_pages: get(counter::COPIES),
            abandoned: self.abandoned(),
            // Relaxed: a statistic, which orders no other memory access.
            last_read_failed: self.last_read_failed.load(Ordering::Relaxed) != 0,
            is_full: self.space.free() <= self.reserve(),
        }
    }

    /// Resets the counts of reads, writes and failures to 0.
    pub fn clear_counts(&self) {
        for counter in [counter::READS, counter::WRITES, counter::FAILED_READS, counter::FAILED_WRITES] {
            self.counters.clear(counter);
        }
    }
}
