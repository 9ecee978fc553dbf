//! Queue of requests that the worker thread of the power layer continues.

use std::ops::Range;

use freestone_core::device::{Completion, IoBuf, Request};
use freestone_core::sync::{AtomicU64, Mutex, Ordering::SeqCst};

#[derive(Default)]
pub struct Queue {
    pub state: Mutex<QueueState>,
    pub pending: AtomicU64,
    /// Number of queued writes that wait for cache space. New writes must not overtake them.
    pub waiting: AtomicU64,
}

#[derive(Default)]
pub struct QueueState {
    pub jobs: Vec<Job>,
    pub stop: bool,
}

pub enum Job {
    /// Write that waits for cache space. The first `at` bytes are cached already.
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

/// Flush or write-out. All versions cached before the moment `bound`, in the range `within` or
/// everywhere, must be written to the device under this layer. If `flush` is set, that device is
/// flushed afterwards.
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
