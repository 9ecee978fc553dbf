//! The backing device: whole runs of blocks are written to it, pages are read from it, and what
//! each holds is counted.
//!
//! The device is any [`Device`]; what it does with requests (threads, `io_uring`, overlap) is its
//! business. What is written is worth nothing after this process, so nothing is ever flushed; only
//! where a device can lose what it has answered while this process lives (the server of an export),
//! each write is durable before its pages leave memory.
//!
//! A write that is not answered in time is given up: its pages stay in memory, and its blocks are
//! not used again until the device has answered after all. When that is,
//! [`deadline`](super::deadline) says.

use std::sync::{Arc, PoisonError};
use std::time::Duration;

use super::blocks::{BLOCK_UNITS, Blocks};
use super::deadline::Deadline;
use super::layout;
use super::reads::{Late, ReadError, Reads, Spare, Waiting};
use super::space::{BLOCK_BYTES, MAX_BLOCKS, Run, Space};
use crate::clock::now_ms;
use freestone_core::device::{Completion, Device, Error, Flags, IoBuf, Request, Result};
use freestone_core::percpu::Counters;
use freestone_core::slot::Word;
use freestone_core::sync::{AtomicU32, Condvar, Mutex, Ordering};

/// Largest write.
pub const WRITE_BLOCKS_MAX: u32 = 256;
/// Writes in flight at once.
pub const WRITES_MAX: usize = 4;
/// Blocks in flight at once, unless said otherwise.
pub const BATCH_BLOCKS: u32 = WRITE_BLOCKS_MAX * WRITES_MAX as u32;

/// A backing device in use.
///
/// Lock order: nothing is taken under the locks of `space`, `budget`, `reads` and of a [`Write`].
pub struct Store {
    device: Arc<dyn Device>,
    packed: bool,
    /// What a write is asked for with.
    write_flags: Flags,
    space: Space,
    blocks: Blocks,
    budget: Budget,
    counters: Counters<{ counter::COUNT }>,
    spare: Spare,
    batch_blocks: AtomicU32,
    deadline: Deadline,
    reads: Reads,
    /// Writes that were given up and are not answered yet.
    unanswered: AtomicU32,
    /// The last read failed, or what came back was damaged.
    reads_fail: AtomicU32,
}

mod counter {
    /// Blocks.
    pub const READS: usize = 0;
    /// Blocks.
    pub const WRITES: usize = 1;
    /// Requests.
    pub const FAILED_READS: usize = 2;
    /// Requests.
    pub const FAILED_WRITES: usize = 3;
    /// Pages that lie here.
    pub const PAGES: usize = 4;
    /// Bytes of their objects.
    pub const LIVE_BYTES: usize = 5;
    pub const COUNT: usize = 6;
}

/// Why no blocks can be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// `writeback_limit` is used up.
    Limit,
    /// All blocks are in use.
    Full,
}

/// The numbers of a backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Numbers {
    /// Blocks there are.
    pub blocks: u64,
    /// Blocks in use.
    pub used: u64,
    /// Blocks read.
    pub reads: u64,
    /// Blocks written.
    pub writes: u64,
    /// Requests that failed.
    pub failed_reads: u64,
    /// Requests that failed.
    pub failed_writes: u64,
    /// Pages that lie here.
    pub pages: u64,
    /// Bytes of their objects, without headers.
    pub live_bytes: u64,
    /// Writes that are not answered in time.
    pub unanswered: u32,
    /// Whether the last read failed, or brought back something damaged.
    pub reads_fail: bool,
}

impl Store {
    /// Takes `device` into use. Its content is lost. With `write_through` a write is answered when it
    /// is durable.
    ///
    /// # Errors
    /// A sentence that says what is wrong with it.
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
            return Err("is a zoned device; zones are written in order only".into());
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
            counters: Counters::default(),
            spare: Spare::default(),
            batch_blocks: AtomicU32::new(BATCH_BLOCKS),
            deadline: Deadline::default(),
            reads: Reads::default(),
            unanswered: AtomicU32::new(0),
            reads_fail: AtomicU32::new(0),
        })
    }

    /// Whether objects are packed, or lie as pages in a block each.
    pub fn is_packed(&self) -> bool {
        self.packed
    }

    // ---- writing --------------------------------------------------------------------------------

    /// Blocks that only the moving of objects may use: without them a device full of holes could
    /// not be tidied up.
    pub fn reserve(&self) -> u64 {
        if self.packed { (self.space.blocks() / 16).min(u64::from(WRITE_BLOCKS_MAX)) } else { 0 }
    }

    /// Reserves up to `wanted` contiguous blocks, out of the budget as well, where more than
    /// `reserve` are free.
    pub fn open_run(&self, wanted: u32, reserve: u64) -> std::result::Result<(Run, Charge), Refused> {
        let free = self.space.free();
        if free <= reserve {
            return Err(Refused::Full);
        }
        let wanted = u64::from(wanted).min(free - reserve) as u32;
        let (granted, charge) = self.budget.take(wanted);
        if granted == 0 {
            return Err(Refused::Limit);
        }
        let Some(run) = self.space.take(granted) else {
            self.budget.refund(granted, charge);
            return Err(Refused::Full);
        };
        self.budget.refund(granted - run.blocks, charge);
        self.blocks.open(run);
        Ok((run, charge))
    }

    /// Gives the blocks behind the first `used` of a run back. Returns what is left of it.
    pub fn trim_run(&self, run: Run, charge: Charge, used: u32) -> Run {
        if used < run.blocks {
            let rest = run.blocks - used;
            self.give(Run { start: run.start + u64::from(used), blocks: rest });
            self.budget.refund(rest, charge);
        }
        Run { start: run.start, blocks: used }
    }

    /// Frees blocks of which no slot was ever told.
    fn give(&self, run: Run) {
        self.blocks.forget(run);
        self.space.give(run.start, run.blocks);
    }

    /// Notes that an object of `stored` bytes lies at `unit` of an open run.
    pub fn place(&self, unit: u64, stored: usize) {
        self.blocks.place(unit, self.units(stored));
    }

    /// Writes a run. `buffer` has as many blocks.
    pub fn write(self: &Arc<Self>, run: Run, charge: Charge, buffer: IoBuf) -> Write {
        debug_assert_eq!(buffer.len(), run.blocks as usize * BLOCK_BYTES);
        let answer = Arc::new(Answer { state: Mutex::new(WriteState::Flying), answered: Condvar::new() });
        let done = {
            let (store, answer) = (Arc::clone(self), Arc::clone(&answer));
            Completion::new(move |outcome, buffer| {
                store.deadline.answered();
                let mut state = answer.state.lock();
                if matches!(*state, WriteState::GivenUp) {
                    drop(state);
                    store.give(run);
                    // Relaxed: a count that is looked at now and then.
                    store.unanswered.fetch_sub(1, Ordering::Relaxed);
                } else {
                    *state = WriteState::Answered(outcome, buffer);
                    answer.answered.notify_one();
                }
            })
        };
        let len = u64::from(run.blocks) * BLOCK_BYTES as u64;
        let given_ms = now_ms();
        let request = Request::write(run.start * BLOCK_BYTES as u64, len).with(self.write_flags);
        self.device.submit(request, buffer, done);
        Write { run, charge, given_ms, answer }
    }

    /// Waits for a write. Where it failed its blocks are free again, and the budget has them back.
    pub fn finish(&self, write: Write) -> Written {
        let Write { run, charge, given_ms, answer } = write;
        let mut state = answer.state.lock();
        loop {
            match std::mem::replace(&mut *state, WriteState::GivenUp) {
                WriteState::Answered(Ok(()), buffer) => {
                    self.counters.add(counter::WRITES, i64::from(run.blocks));
                    return Written::Done(buffer);
                }
                WriteState::Answered(Err(error), _) => {
                    drop(state);
                    self.counters.add(counter::FAILED_WRITES, 1);
                    self.give(run);
                    self.budget.refund(run.blocks, charge);
                    return Written::Failed(error);
                }
                WriteState::Flying | WriteState::GivenUp => {
                    // What the device answers meanwhile puts it off: it is looked at again then.
                    let left = self.deadline.due_ms(given_ms).saturating_sub(now_ms());
                    if left == 0 {
                        self.counters.add(counter::FAILED_WRITES, 1);
                        // Relaxed: a count that is looked at now and then.
                        self.unanswered.fetch_add(1, Ordering::Relaxed);
                        return Written::Unanswered;
                    }
                    *state = WriteState::Flying;
                    let waited = answer.answered.wait_timeout(state, Duration::from_millis(left));
                    state = waited.unwrap_or_else(PoisonError::into_inner).0;
                }
            }
        }
    }

    /// Counts pages whose slots now say that they lie here, and the bytes of their objects.
    pub fn took(&self, pages: u64, stored: u64) {
        self.counters.add(counter::PAGES, pages as i64);
        self.counters.add(counter::LIVE_BYTES, stored as i64);
    }

    /// Frees the place of a page that [`took`](Self::took) counted.
    pub fn release(&self, unit: u64, stored: usize) {
        self.counters.add(counter::PAGES, -1);
        self.counters.add(counter::LIVE_BYTES, -(stored as i64));
        self.abandon(unit, stored);
    }

    /// Frees a place that no slot was ever told of.
    pub fn abandon(&self, unit: u64, stored: usize) {
        self.blocks.remove(unit, self.units(stored), |block| self.space.give(block, 1));
    }

    fn units(&self, stored: usize) -> u32 {
        if self.packed { layout::units(stored) } else { BLOCK_UNITS as u32 }
    }

    // ---- reading --------------------------------------------------------------------------------

    /// The blocks in which a spilled slot's object lies: the first, and how many.
    pub fn blocks_of(&self, spilled: Word) -> (u64, u32) {
        let (unit, stored) = (spilled.location(), spilled.spilled_bytes());
        let last = (unit + u64::from(self.units(stored)) - 1) / BLOCK_UNITS;
        let first = unit / BLOCK_UNITS;
        (first, (last - first + 1) as u32)
    }

    /// Reads blocks; `done` runs on a thread of the device, on this one, or on one that [looks
    /// after](Self::on_room) the store. It is told something within a bounded time. Where the
    /// device has much to do the read waits for room.
    pub fn read(
        self: &Arc<Self>,
        first: u64,
        blocks: u32,
        done: impl FnOnce(std::result::Result<&[u8], ReadError>) + Send + 'static,
    ) {
        let read = Waiting { first, blocks, since_ms: now_ms(), done: Box::new(done) };
        if let Some(read) = self.reads.enter(read) {
            self.give_read(read);
        }
    }

    /// Has `tell` called, on a thread of the device, when reads that wait can be handed over: by
    /// [`start_reads`](Self::start_reads), on another thread. Who does that also looks now and then
    /// at what is [late](Self::late_reads).
    pub fn on_room(&self, tell: impl Fn() + Send + Sync + 'static) {
        self.reads.on_room(Box::new(tell));
    }

    /// Hands reads to the device that have waited for room.
    pub fn start_reads(self: &Arc<Self>) {
        while let Some(read) = self.reads.next() {
            self.give_read(read);
        }
    }

    /// Reads that the device has not answered in time, for the caller to answer.
    pub fn late_reads(&self) -> Vec<Late> {
        self.reads.late(&self.deadline)
    }

    fn give_read(self: &Arc<Self>, Waiting { first, blocks, done, .. }: Waiting) {
        let len = blocks as usize * BLOCK_BYTES;
        let buffer = match self.spare.get(len) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.reads.not_given();
                return done(Err(ReadError::Failed(error)));
            }
        };
        let number = self.reads.give(done);
        let store = Arc::clone(self);
        let answered = Completion::new(move |outcome, buffer: IoBuf| {
            store.deadline.answered();
            match outcome {
                Ok(()) => store.counters.add(counter::READS, i64::from(blocks)),
                Err(_) => store.failed_read(),
            }
            if let Some(done) = store.reads.answered(number) {
                // A device that is gone answers without a buffer.
                let outcome = if buffer.len() == len { outcome } else { outcome.and(Err(Error::Gone)) };
                done(outcome.map(|()| &buffer[..]).map_err(ReadError::Failed));
            }
            store.spare.put(buffer);
        });
        self.device.submit(Request::read(first * BLOCK_BYTES as u64, len as u64), buffer, answered);
    }

    /// Counts a read that failed, or a page that came back damaged, or not in time.
    #[cold]
    pub fn failed_read(&self) {
        self.counters.add(counter::FAILED_READS, 1);
        // Relaxed: a statistic.
        self.reads_fail.store(1, Ordering::Relaxed);
    }

    /// Notes that a page came back as it was.
    pub(super) fn good_read(&self) {
        // Relaxed: a statistic. Most find nothing to change.
        if self.reads_fail.load(Ordering::Relaxed) != 0 {
            // Relaxed: as above.
            self.reads_fail.store(0, Ordering::Relaxed);
        }
    }

    // ---- holes ----------------------------------------------------------------------------------

    /// What is known of the blocks, for who moves objects together.
    pub fn map(&self) -> &Blocks {
        &self.blocks
    }

    // ---- settings and numbers -------------------------------------------------------------------

    /// The budget of writes.
    pub fn budget(&self) -> &Budget {
        &self.budget
    }

    /// Blocks in flight at once.
    pub fn batch_blocks(&self) -> u32 {
        // Relaxed: a setting.
        self.batch_blocks.load(Ordering::Relaxed)
    }

    /// Sets the blocks in flight at once, at least one.
    pub fn set_batch_blocks(&self, blocks: u32) {
        // Relaxed: a setting.
        self.batch_blocks.store(blocks.max(1), Ordering::Relaxed);
    }

    /// How long the device may answer nothing.
    pub fn timeout_ms(&self) -> u64 {
        self.deadline.timeout_ms()
    }

    /// Sets how long the device may answer nothing, at least a millisecond.
    pub fn set_timeout(&self, timeout: Duration) {
        self.deadline.set_timeout(timeout);
    }

    /// Blocks of the device.
    pub fn blocks(&self) -> u64 {
        self.space.blocks()
    }

    /// Blocks that are free, without those that are kept for moving objects.
    pub fn free_blocks(&self) -> u64 {
        self.space.free().saturating_sub(self.reserve())
    }

    /// Blocks that would be free if there were no holes in the others.
    pub fn hole_blocks(&self) -> u64 {
        if !self.packed {
            return 0;
        }
        let Numbers { used, pages, live_bytes, .. } = self.numbers();
        // Header, and half a unit of rounding on average.
        let full = live_bytes + pages * (layout::UNIT_BYTES as u64 * 3 / 2);
        used.saturating_sub(full.div_ceil(BLOCK_BYTES as u64))
    }

    /// Writes that were given up and are not answered yet.
    pub fn unanswered(&self) -> u32 {
        // Relaxed: a count that is looked at now and then.
        self.unanswered.load(Ordering::Relaxed)
    }

    /// Everything that is counted.
    pub fn numbers(&self) -> Numbers {
        let get = |counter| self.counters.get(counter);
        Numbers {
            blocks: self.space.blocks(),
            used: self.space.used(),
            reads: get(counter::READS),
            writes: get(counter::WRITES),
            failed_reads: get(counter::FAILED_READS),
            failed_writes: get(counter::FAILED_WRITES),
            pages: get(counter::PAGES),
            live_bytes: get(counter::LIVE_BYTES),
            unanswered: self.unanswered(),
            // Relaxed: a statistic.
            reads_fail: self.reads_fail.load(Ordering::Relaxed) != 0,
        }
    }

    /// Starts the counts of reads, writes and failures anew.
    pub fn clear_counts(&self) {
        for counter in [counter::READS, counter::WRITES, counter::FAILED_READS, counter::FAILED_WRITES] {
            self.counters.clear(counter);
        }
    }
}

/// A write under way.
pub struct Write {
    run: Run,
    charge: Charge,
    given_ms: u64,
    answer: Arc<Answer>,
}

struct Answer {
    state: Mutex<WriteState>,
    answered: Condvar,
}

enum WriteState {
    Flying,
    Answered(Result<()>, IoBuf),
    /// Nobody waits any more: the completion frees the blocks.
    GivenUp,
}

/// What became of a write.
pub enum Written {
    /// It is on the device; the buffer can be used again.
    Done(IoBuf),
    /// It is not.
    Failed(Error),
    /// The device has not answered in time. It may yet write the blocks, which are kept out of use
    /// until it answers.
    Unanswered,
}

/// `writeback_limit`: how many blocks may still be written. It spares devices that wear.
#[derive(Default)]
pub struct Budget {
    state: Mutex<Limit>,
}

/// The two attributes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limit {
    /// Whether `left` counts.
    pub enabled: bool,
    /// Blocks of 4 KiB.
    pub left: u64,
    /// How often it was set: what was taken before is not refunded after.
    generation: u64,
}

/// To which budget blocks were charged; `None` where none counted.
pub type Charge = Option<u64>;

impl Budget {
    /// What is set, and left.
    pub fn get(&self) -> Limit {
        *self.state.lock()
    }

    /// Changes it.
    pub fn set(&self, change: impl FnOnce(&mut Limit)) {
        let mut limit = self.state.lock();
        change(&mut limit);
        limit.generation += 1;
    }

    /// Takes up to `wanted` blocks out.
    fn take(&self, wanted: u32) -> (u32, Charge) {
        let mut limit = self.state.lock();
        if !limit.enabled {
            return (wanted, None);
        }
        let granted = limit.left.min(u64::from(wanted)) as u32;
        limit.left -= u64::from(granted);
        (granted, Some(limit.generation))
    }

    fn refund(&self, blocks: u32, charge: Charge) {
        let mut limit = self.state.lock();
        if charge == Some(limit.generation) {
            limit.left = limit.left.saturating_add(u64::from(blocks));
        }
    }
}
