//! Reads of the backing device: those that it was given, and those that wait until there is room.
//!
//! A device is given [`READS_MAX`] at once. Further ones wait in the order in which they came,
//! without a buffer: too many is no error. Whoever answers a read makes room; it is a thread of the
//! device, from which that must not be called, so the next one is handed over by a thread of the
//! store's owner, who is told by [`Reads::on_room`].
//!
//! Each read is answered once: who takes it out of here, the device's answer or
//! [`late`](Reads::late), answers it. A read that was late keeps its place until the device answers
//! after all, so a silent device does not heap up buffers.
//!
//! Lock order: `state` and the spare buffers are innermost. Answers are given outside of them.

use std::collections::{HashMap, VecDeque};

use crossbeam_utils::CachePadded;

use super::deadline::Deadline;
use super::space::BLOCK_BYTES;
use crate::clock::now_ms;
use freestone_core::device::{Error, IoBuf, Result};
use freestone_core::mutants::{self, Mutant};
use freestone_core::percpu;
use freestone_core::sync::{Mutex, MutexGuard, OnceLock};

/// Reads that a device is given at once: twice what the file engine has in the kernel.
pub(super) const READS_MAX: usize = 256;

/// Why a read gave nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReadError {
    /// The device said so.
    Failed(Error),
    /// The device has not answered in time.
    Late,
}

/// Told what was read, on a thread of the device or of the store's owner.
pub(super) type Done = Box<dyn FnOnce(std::result::Result<&[u8], ReadError>) + Send>;

/// A read that is late, for its owner to say so.
pub struct Late(Done);

impl Late {
    /// Answers it.
    pub fn give_up(self) {
        (self.0)(Err(ReadError::Late));
    }
}

/// A read that the device was not given yet.
pub(super) struct Waiting {
    pub first: u64,
    pub blocks: u32,
    pub since_ms: u64,
    pub done: Done,
}

struct Given {
    since_ms: u64,
    done: Done,
}

/// Reads of the backing device on their way, and those that wait for room.
#[derive(Default)]
pub(super) struct Reads {
    state: Mutex<ReadsState>,
    on_room: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

#[derive(Default)]
struct ReadsState {
    next: u64,
    given: HashMap<u64, Given>,
    /// Places that are taken: those of `given`, of reads that were late, and of one that is just
    /// being handed over.
    taken: usize,
    waiting: VecDeque<Waiting>,
    /// When a read was last answered.
    answered_ms: u64,
    /// Somebody is about to hand over what waits.
    starting: bool,
}

impl Reads {
    /// Has `tell` called whenever reads wait and there is room; it has [`next`](Self::next) called
    /// until that gives nothing, by a thread that may call the device.
    pub fn on_room(&self, tell: Box<dyn Fn() + Send + Sync>) {
        // The first one stays.
        let _ = self.on_room.set(tell);
    }

    /// Takes a place for a read; without one, it waits. Returned: the caller hands it over.
    pub fn enter(&self, read: Waiting) -> Option<Waiting> {
        let mut state = self.state.lock();
        if state.taken >= 4 && mutants::on(Mutant::TooManyReads) {
            drop(state);
            Late(read.done).give_up();
            return None;
        }
        if state.taken < READS_MAX && state.waiting.is_empty() {
            state.taken += 1;
            return Some(read);
        }
        state.waiting.push_back(read);
        None
    }

    /// The next read that waits, with a place for it.
    pub fn next(&self) -> Option<Waiting> {
        let mut state = self.state.lock();
        let next = if state.taken < READS_MAX { state.waiting.pop_front() } else { None };
        state.taken += usize::from(next.is_some());
        state.starting = next.is_some();
        next
    }

    /// The device is about to be given a read that has a place. Returns its number.
    pub fn give(&self, done: Done) -> u64 {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        state.given.insert(number, Given { since_ms: now_ms(), done });
        number
    }

    /// The device has answered a read. `None`: it was late.
    pub fn answered(&self, number: u64) -> Option<Done> {
        let mut state = self.state.lock();
        state.answered_ms = state.answered_ms.max(now_ms());
        let given = state.given.remove(&number);
        self.leave(state);
        given.map(|given| given.done)
    }

    /// A read that has a place was not handed over.
    pub fn not_given(&self) {
        self.leave(self.state.lock());
    }

    fn leave(&self, mut state: MutexGuard<'_, ReadsState>) {
        state.taken -= 1;
        let tell = !state.waiting.is_empty() && !std::mem::replace(&mut state.starting, true);
        drop(state);
        if tell && let Some(tell) = self.on_room.get() {
            tell();
        }
    }

    /// Takes out what is late now.
    pub fn late(&self, deadline: &Deadline) -> Vec<Late> {
        let now = now_ms();
        let mut state = self.state.lock();
        let is_late = |_: &u64, given: &mut Given| deadline.due_ms(given.since_ms) <= now;
        let mut late: Vec<Late> =
            state.given.extract_if(is_late).map(|(_, given)| Late(given.done)).collect();
        let silent_since = state.answered_ms;
        let is_late = |waiting: &Waiting| {
            waiting.since_ms.max(silent_since).saturating_add(deadline.timeout_ms()) <= now
        };
        // Those that came first are late first.
        while state.waiting.front().is_some_and(is_late) {
            late.extend(state.waiting.pop_front().map(|waiting| Late(waiting.done)));
        }
        late
    }
}

/// Buffers of small reads, kept for the next ones: a new one would have to be zeroed first. Each
/// CPU has its own.
pub(super) struct Spare {
    per_cpu: Box<[CachePadded<Mutex<Vec<IoBuf>>>]>,
}

/// Bytes of a buffer that is kept: an object lies in two blocks at most.
const SPARE_BYTES: usize = 2 * BLOCK_BYTES;
/// Buffers that a CPU keeps.
const SPARE_MAX: usize = 32;

impl Default for Spare {
    fn default() -> Self {
        Self { per_cpu: (0..percpu::cpus()).map(|_| CachePadded::default()).collect() }
    }
}

impl Spare {
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
