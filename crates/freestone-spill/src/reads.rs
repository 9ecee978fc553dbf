//! Reads from the backing device: those in flight, and a queue of further reads.
//!
//! At most `READS_MAX` reads are in flight. Further reads wait in order of arrival, without a
//! buffer. The completion of a read frees a read slot. Completions run on threads of the device,
//! which must not call the device. So a thread of the store's owner submits the next read,
//! requested by the callback of `Reads::set_free_slot_callback`.
//!
//! Each read completes exactly once: by the device or by `Reads::take_timed_out`,
//! whichever removes the read first. A timed-out read keeps its slot until the device completes the
//! read after all, so a hanging device does not accumulate buffers.
//!
//! Lock order: `state` and the spare buffers are leaf locks. Callbacks run outside of them.

use std::collections::{HashMap, VecDeque};

use super::deadline::Deadline;
use super::space::BLOCK_BYTES;
use freestone_core::clock::now_ms;
use freestone_core::device::{Error, IoBuf, Result};
use freestone_core::mutants::{self, Mutant};
use freestone_core::percpu::PerCpu;
use freestone_core::sync::{Mutex, MutexGuard, OnceLock};

/// Maximum number of reads in flight: twice the queue depth of the file engine.
pub(super) const READS_MAX: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadError {
    Failed(Error),
    TimedOut,
}

/// Completion callback of a read, which runs on a thread of the device or of the store's owner.
pub(super) type ReadCallback = Box<dyn FnOnce(std::result::Result<&[u8], ReadError>) + Send>;

/// A timed-out read, which the store's owner must [`fail`](Self::fail).
pub struct TimedOutRead(ReadCallback);

impl TimedOutRead {
    pub fn fail(self) {
        (self.0)(Err(ReadError::TimedOut));
    }
}

pub(super) struct QueuedRead {
    pub first: u64,
    pub blocks: u32,
    pub since_ms: u64,
    pub done: ReadCallback,
}

struct SubmittedRead {
    since_ms: u64,
    done: ReadCallback,
}

/// Reads of a backing device, in flight and queued.
#[derive(Default)]
pub(super) struct Reads {
    state: Mutex<ReadsState>,
    free_slot_callback: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct ReadsState {
    next: u64,
    given: HashMap<u64, SubmittedRead>,
    /// Number of used read slots: reads in flight, timed-out reads, and a read being submitted.
    taken: usize,
    waiting: VecDeque<QueuedRead>,
    /// Time of the last completion, in milliseconds of [`now_ms`].
    answered_ms: u64,
    /// True if the callback has already requested the submission of queued reads.
    starting: bool,
}

impl Reads {
    /// Sets the callback that is called when a read slot is freed while reads are queued. The
    /// callback must make a thread that may call the device call [`next`](Self::next) until it
    /// returns `None`.
    pub fn set_free_slot_callback(&self, callback: Box<dyn Fn() + Send + Sync>) {
        // Only the first call sets a callback.
        let _ = self.free_slot_callback.set(callback);
    }

    /// Reserves a slot for a read, or queues the read. Returns the read if the caller must submit
    /// it.
    pub fn admit(&self, read: QueuedRead) -> Option<QueuedRead> {
        let mut state = self.state.lock();
        if state.taken >= 4 && mutants::on(Mutant::TooManyReads) {
            drop(state);
            TimedOutRead(read.done).fail();
            return None;
        }
        if state.taken < READS_MAX && state.waiting.is_empty() {
            state.taken += 1;
            return Some(read);
        }
        state.waiting.push_back(read);
        None
    }

    /// Removes the next queued read and reserves a slot for it; `None` if no read is queued or no
    /// slot is free.
    pub fn next(&self) -> Option<QueuedRead> {
        let mut state = self.state.lock();
        let next = if state.taken < READS_MAX { state.waiting.pop_front() } else { None };
        state.taken += usize::from(next.is_some());
        state.starting = next.is_some();
        next
    }

    /// Registers a read about to be submitted. Returns the number of the read.
    pub fn register(&self, done: ReadCallback) -> u64 {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.given.insert(number, SubmittedRead { since_ms: now_ms(), done });
        number
    }

    /// Frees the slot of a completed read. Returns its callback, or `None` if the read had timed
    /// out.
    pub fn complete(&self, number: u64) -> Option<ReadCallback> {
        let mut state = self.state.lock();
        state.answered_ms = state.answered_ms.max(now_ms());
        let given = state.given.remove(&number);
        self.release_slot(state);
        given.map(|given| given.done)
    }

    /// Frees the slot of a read that was not submitted.
    pub fn release_unsubmitted(&self) {
        self.release_slot(self.state.lock());
    }

    fn release_slot(&self, mut state: MutexGuard<'_, ReadsState>) {
        state.taken -= 1;
        let is_due = !state.waiting.is_empty() && !std::mem::replace(&mut state.starting, true);
        drop(state);
        if is_due && let Some(callback) = self.free_slot_callback.get() {
            callback();
        }
    }

    /// Removes and returns the reads, in flight or queued, that have timed out.
    pub fn take_timed_out(&self, deadline: &Deadline) -> Vec<TimedOutRead> {
        let now = now_ms();
        let mut state = self.state.lock();
        let is_late = |_: &u64, given: &mut SubmittedRead| deadline.due_ms(given.since_ms) <= now;
        let mut late: Vec<TimedOutRead> =
            state.given.extract_if(is_late).map(|(_, given)| TimedOutRead(given.done)).collect();
        let silent_since = state.answered_ms;
        let is_late = |waiting: &QueuedRead| {
            waiting.since_ms.max(silent_since).saturating_add(deadline.timeout_ms()) <= now
        };
        // The queue is in order of arrival, so the first reads time out first.
        while state.waiting.front().is_some_and(is_late) {
            late.extend(state.waiting.pop_front().map(|waiting| TimedOutRead(waiting.done)));
        }
        late
    }
}

/// Reused buffers for small reads, which need not be zeroed again. Each CPU has its own list.
#[derive(Default)]
pub(super) struct SpareBuffers {
    per_cpu: PerCpu<Mutex<Vec<IoBuf>>>,
}

/// Size of reused buffers in bytes: two blocks, the most that one object spans.
const SPARE_BYTES: usize = 2 * BLOCK_BYTES;
/// Maximum number of spare buffers per CPU.
const SPARE_MAX: usize = 32;

impl SpareBuffers {
    pub fn get(&self, len: usize) -> Result<IoBuf> {
        if len > SPARE_BYTES {
            return IoBuf::zeroed(len);
        }
        let kept = self.per_cpu.lock().pop();
        let mut buffer = kept.map_or_else(|| IoBuf::zeroed(SPARE_BYTES), Ok)?;
        buffer.set_len(len);
        Ok(buffer)
    }

    pub fn put(&self, mut buffer: IoBuf) {
        buffer.set_len(usize::MAX);
        if buffer.len() == SPARE_BYTES {
            let mut kept = self.per_cpu.lock();
            if kept.len() < SPARE_MAX {
                kept.push(buffer);
            }
        }
    }
}
