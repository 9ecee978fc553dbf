//! Requests that the worker carries on.

use std::ops::Range;

use freestone_core::device::{Completion, IoBuf, Request};
use freestone_core::sync::{AtomicU64, Mutex, Ordering::SeqCst};

/// What waits for the worker.
#[derive(Default)]
pub struct Queue {
    pub state: Mutex<QueueState>,
    /// Jobs that are not answered.
    pub pending: AtomicU64,
    /// Of those, writes that wait for room. New ones do not pass them.
    pub waiting: AtomicU64,
}

#[derive(Default)]
pub struct QueueState {
    pub jobs: Vec<Job>,
    pub stop: bool,
}

pub enum Job {
    /// A write to the cache, `at` bytes of which are there.
    Write {
        request: Request,
        buffer: IoBuf,
        at: u64,
        failures: u64,
        done: Completion,
    },
    Through {
        request: Request,
        buffer: IoBuf,
        done: Completion,
    },
    Settle(Settle),
}

/// What was unflushed at `bound`, of `within` or all, has to be below; then a flush, where that is
/// wanted.
pub struct Settle {
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
