//! Reads of the backing device: submitted ones, and a queue of further ones.
//!
//! At most [`READS_MAX`] reads are in flight. Further reads wait in order of arrival, without a
//! buffer. The completion of a read frees a slot; as completions run on threads of the device,
//! which must not call it, a thread of the store's owner submits the next read after
//! [`Reads::on_room`].
//!
//! Each read completes exactly once: by the device or by [`late`](Reads::late), whichever removes
//! it first. A timed-out read keeps its slot until the device completes it after all, so a hanging
//! device does not accumulate buffers.
//!
//! Lock order: `state` and the spare buffers are leaf locks. Callbacks run outside of them.

use std::collections::{HashMap, VecDeque};

use crossbeam_utils::CachePadded;

use super::deadline::Deadline;
use super::space::BLOCK_BYTES;
use crate::clock::now_ms;
use freestone_core::device::{Error, IoBuf, Result};
use freestone_core::mutants::{self, Mutant};
use freestone_core::percpu;
use freestone_core::sync::{Mutex, MutexGuard, OnceLock};

/// Maximum reads in flight: twice the queue depth of the file engine.
pub(super) const READS_MAX: usize = 256;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadError {
    Failed(Error),
    TimedOut,
}

/// Completion callback, run on a thread of the device or of the store's owner.
pub(super) type ReadCallback = Box<dyn FnOnce(std::result::Result<&[u8], ReadError>) + Send>;

/// A timed-out read, to be failed by the owner.
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

/// Submitted and queued reads of a backing device.
#[derive(Default)]
pub(super) struct Reads {
    state: Mutex<ReadsState>,
    on_room: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct ReadsState {
    next: u64,
    given: HashMap<u64, SubmittedRead>,
    /// Used slots: submitted reads, timed-out reads, and a read being submitted.
    taken: usize,
    waiting: VecDeque<QueuedRead>,
    /// Time of the last completion.
    answered_ms: u64,
    /// Whether the submission of queued reads is already requested.
    starting: bool,
}

impl Reads {
    /// Sets the callback for free slots while reads are queued. It must have [`next`](Self::next)
    /// called until that returns `None`, by a thread that may call the device.
    pub fn on_room(&self, tell: Box<dyn Fn() + Send + Sync>) {
        // Only the first call has an effect.
        let _ = self.on_room.set(tell);
    }

    /// Takes a slot for a read, or queues it. Returns the read if the caller must submit it.
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

    /// Takes the next queued read, with a slot.
    pub fn next(&self) -> Option<QueuedRead> {
        let mut state = self.state.lock();
        let next = if state.taken < READS_MAX { state.waiting.pop_front() } else { None };
        state.taken += usize::from(next.is_some());
        state.starting = next.is_some();
        next
    }

    /// Registers a read about to be submitted. Returns its number.
    pub fn register(&self, done: ReadCallback) -> u64 {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.given.insert(number, SubmittedRead { since_ms: now_ms(), done });
        number
    }

    /// Removes a completed read; `None` if it had timed out.
    pub fn complete(&self, number: u64) -> Option<ReadCallback> {
        let mut state = self.state.lock();
        state.answered_ms = state.answered_ms.max(now_ms());
        let given = state.given.remove(&number);
        self.release_slot(state);
        given.map(|given| given.done)
    }

    /// Releases the slot of a read that was not submitted.
    pub fn release_unsubmitted(&self) {
        self.release_slot(self.state.lock());
    }

    fn release_slot(&self, mut state: MutexGuard<'_, ReadsState>) {
        state.taken -= 1;
        let tell = !state.waiting.is_empty() && !std::mem::replace(&mut state.starting, true);
        drop(state);
        if tell && let Some(tell) = self.on_room.get() {
            tell();
        }
    }

    /// Removes and returns the reads that have timed out.
    pub fn late(&self, deadline: &Deadline) -> Vec<TimedOutRead> {
        let now = now_ms();
        let mut state = self.state.lock();
        let is_late = |_: &u64, given: &mut SubmittedRead| deadline.due_ms(given.since_ms) <= now;
        let mut late: Vec<TimedOutRead> =
            state.given.extract_if(is_late).map(|(_, given)| TimedOutRead(given.done)).collect();
        let silent_since = state.answered_ms;
        let is_late = |waiting: &QueuedRead| {
            waiting.since_ms.max(silent_since).saturating_add(deadline.timeout_ms()) <= now
        };
        // The queue is in order of arrival, so the first time out first.
        while state.waiting.front().is_some_and(is_late) {
            late.extend(state.waiting.pop_front().map(|waiting| TimedOutRead(waiting.done)));
        }
        late
    }
}

/// Buffers of small reads, reused to avoid zeroing new ones. Each CPU has its own.
pub(super) struct SpareBuffers {
    per_cpu: Box<[CachePadded<Mutex<Vec<IoBuf>>>]>,
}

/// Size of reused buffers in bytes: an object spans at most two blocks.
const SPARE_BYTES: usize = 2 * BLOCK_BYTES;
/// Maximum buffers per CPU.
const SPARE_MAX: usize = 32;

impl Default for SpareBuffers {
    fn default() -> Self {
        Self { per_cpu: (0..percpu::cpus()).map(|_| CachePadded::default()).collect() }
    }
}

impl SpareBuffers {
    pub fn get(&self, len: usize) -> Result<IoBuf> {
        if len > SPARE_BYTES {
            return IoBuf::zeroed(len);
        }
        let kept = percpu::lock_nearest(|cpu| &*self.per_cpu[cpu]).pop();
        let mut buffer = kept.map_or_else(|| IoBuf::zeroed(SPARE_BYTES), Ok)?;
        buffer.show(len);
        Ok(buffer)
    }

    pub fn put(&self, mut buffer: IoBuf) {
        buffer.show(usize::MAX);
        if buffer.len() == SPARE_BYTES {
            let mut kept = percpu::lock_nearest(|cpu| &*self.per_cpu[cpu]);
            if kept.len() < SPARE_MAX {
                kept.push(buffer);
            }
        }
    }
}
