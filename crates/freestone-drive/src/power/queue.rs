//! Requests that the worker continues.

use std::ops::Range;

use freestone_core::device::{Completion, IoBuf, Request};
use freestone_core::sync::{AtomicU64, Mutex, Ordering::SeqCst};

#[derive(Default)]
pub struct Queue {
    pub state: Mutex<QueueState>,
    pub pending: AtomicU64,
    /// Writes among them that wait for room. New writes do not overtake them.
    pub waiting: AtomicU64,
}

#[derive(Default)]
pub struct QueueState {
    pub jobs: Vec<Job>,
    pub stop: bool,
}

pub enum Job {
    /// Write to the cache; the first `at` bytes are cached.
    Write {
        request: Request,
        buffer: IoBuf,
        at: u64,
        failures: u64,
        done: Completion,
    },
    PastCache {
        request: Request,
        buffer: IoBuf,
        done: Completion,
    },
    WriteOut(WriteOut),
}

/// Flush or write-out: all data unflushed at `bound`, within `within` or everywhere, must be
/// written below. Then a flush follows if `flush` is set.
pub struct WriteOut {
    pub bound: u64,
    pub within: Option<Range<u64>>,
    pub flush: bool,
    pub slot: Option<u64>,
    pub failures: u64,
    pub done: Completion,
}

impl Queue {
    pub fn has_waiting_writes(&self) -> bool {
        self.waiting.load(SeqCst) > 0
    }

    pub fn is_empty(&self) -> bool {
        self.pending.load(SeqCst) == 0
    }
}
