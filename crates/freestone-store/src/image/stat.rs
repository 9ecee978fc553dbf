//! Counters of the reads and fetches of an image.

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use freestone_core::sync::Mutex;

/// Atomic counters of the reads and fetches of an image.
#[derive(Default)]
pub struct ImageCounters {
    pub fetched: AtomicU64,
    pub fetched_bytes: AtomicU64,
    pub cache_hits: AtomicU64,
    pub prefetched: AtomicU64,
    pub failed: AtomicU64,
    last_error: Mutex<Option<String>>,
}

/// Snapshot of the counters of the reads and fetches of an image.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageStat {
    /// Number of chunks and units fetched from the object store.
    pub fetched: u64,
    /// Uncompressed size of the fetched pages in bytes.
    pub fetched_bytes: u64,
    /// Number of chunks that were already cached when they were first needed.
    pub cache_hits: u64,
    /// Number of chunks that were prefetched. These chunks are also counted in `fetched`.
    pub prefetched: u64,
    /// Number of failed requests and fetches.
    pub failed: u64,
    /// Error text of the last failed request or fetch; `None` if nothing has failed.
    pub last_error: Option<String>,
}

impl ImageCounters {
    pub fn add(counter: &AtomicU64, count: u64) {
        // Relaxed: statistics, which order no other memory access.
        counter.fetch_add(count, Ordering::Relaxed);
    }

    pub fn failed(&self, why: String) {
        Self::add(&self.failed, 1);
        *self.last_error.lock() = Some(why);
    }

    pub fn stat(&self) -> ImageStat {
        // Relaxed: statistics, which order no other memory access.
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ImageStat {
            fetched: of(&self.fetched),
            fetched_bytes: of(&self.fetched_bytes),
            cache_hits: of(&self.cache_hits),
            prefetched: of(&self.prefetched),
            failed: of(&self.failed),
            last_error: self.last_error.lock().clone(),
        }
    }
}
