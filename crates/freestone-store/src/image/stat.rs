//! Counters of an image.

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::sync::{Mutex, PoisonError};

/// Atomic counters of an image.
#[derive(Default)]
pub struct Stats {
    pub fetched: AtomicU64,
    pub fetched_bytes: AtomicU64,
    pub found: AtomicU64,
    pub ahead: AtomicU64,
    pub failed: AtomicU64,
    last_error: Mutex<Option<String>>,
}

/// Snapshot of the counters of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stat {
    /// Chunks and units fetched from the store.
    pub fetched: u64,
    /// Size of the fetched pages in bytes, uncompressed.
    pub fetched_bytes: u64,
    /// Chunks that were already cached when they were first needed.
    pub found: u64,
    /// Chunks that were prefetched. Also counted in `fetched`.
    pub ahead: u64,
    /// Failed requests and fetches.
    pub failed: u64,
    /// Text of the last failure.
    pub last_error: Option<String>,
}

impl Stats {
    pub fn add(counter: &AtomicU64, count: u64) {
        // Relaxed: statistics, which order no other memory access.
        counter.fetch_add(count, Ordering::Relaxed);
    }

    pub fn failed(&self, why: String) {
        Self::add(&self.failed, 1);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    pub fn stat(&self) -> Stat {
        // Relaxed: statistics, which order no other memory access.
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stat {
            fetched: of(&self.fetched),
            fetched_bytes: of(&self.fetched_bytes),
            found: of(&self.found),
            ahead: of(&self.ahead),
            failed: of(&self.failed),
            last_error: self.last_error.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        }
    }
}
