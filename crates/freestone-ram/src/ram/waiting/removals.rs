//! Removals in progress whose layers (slot tables) are not queued for freeing yet, and the requests
//! that wait for their end.

use super::job::{Job, WaitingRequest};
use freestone_core::mutants::{self, Mutant};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};

/// Removals whose layers are not in [`Retiring`](crate::ram::memory::retiring::Retiring) yet: removed devices that the cleaner thread has
/// not processed, and rewinds. A removal that is no longer `pending` is already counted in `ended`,
/// and its layers are in [`Retiring`](crate::ram::memory::retiring::Retiring).
///
/// Lock order: `waiting` is a leaf lock.
#[derive(Default)]
pub(in crate::ram) struct Removals {
    pending: AtomicU64,
    ended: AtomicU64,
    /// Requests to retry when the next removal ends. Every removal ends, so no request waits for
    /// ever.
    waiting: Mutex<Vec<WaitingRequest>>,
}

/// How a write that found no memory proceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::ram) enum SpaceRetry {
    No,
    /// Retry now: a removal ended since the last attempt, and may have freed memory.
    Now,
    /// Retry when a removal ends: at least one is pending.
    AfterRemoval,
}

impl Removals {
    /// Begins a removal: writes that find no memory wait for its end.
    pub fn begin(&self) {
        self.pending.fetch_add(1, Ordering::SeqCst);
    }

    /// Counts a removal as ended once more after it freed more memory, so that writes that found no
    /// memory retry.
    pub fn count_progress(&self) {
        self.ended.fetch_add(1, Ordering::SeqCst);
    }

    /// Ends a pending removal. Returns the waiting requests, which the caller must retry.
    pub fn end(&self) -> Vec<WaitingRequest> {
        self.ended.fetch_add(1, Ordering::SeqCst);
        self.pending.fetch_sub(1, Ordering::SeqCst);
        std::mem::take(&mut *self.waiting.lock())
    }

    pub fn is_pending(&self) -> bool {
        self.pending.load(Ordering::SeqCst) > 0
    }

    /// Returns how a write that found no memory proceeds. `ended` is the number of ended removals
    /// at the request's previous attempt, initially 0; it is updated.
    pub fn space_retry(&self, ended: &mut u64) -> SpaceRetry {
        if self.pending.load(Ordering::SeqCst) > 0 {
            if mutants::on(Mutant::FalseNoSpace) {
                return SpaceRetry::No;
            }
            return SpaceRetry::AfterRemoval;
        }
        let before = std::mem::replace(ended, self.ended.load(Ordering::SeqCst));
        if *ended == before { SpaceRetry::No } else { SpaceRetry::Now }
    }

    /// Queues a request until a removal ends. Returns the request if no removal is pending any
    /// more.
    pub fn wait(&self, request: WaitingRequest) -> Option<Job> {
        let mut waiting = self.waiting.lock();
        // Check under the lock: a thread that ends a removal decrements `pending` before it takes
        // this list.
        if self.pending.load(Ordering::SeqCst) == 0 {
            return Some(request.job);
        }
        waiting.push(request);
        None
    }
}
