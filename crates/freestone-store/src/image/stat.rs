//! What an image was asked, and what it cost.

use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::sync::{Mutex, PoisonError};

/// Counters of an image.
#[derive(Default)]
pub struct Stats {
    pub fetched: AtomicU64,
    pub fetched_bytes: AtomicU64,
    pub found: AtomicU64,
    pub ahead: AtomicU64,
    pub failed: AtomicU64,
    last_error: Mutex<Option<String>>,
}

/// What they say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stat {
    /// Chunks, or units of chunks, that came from the store.
    pub fetched: u64,
    /// Bytes of their pages.
    pub fetched_bytes: u64,
    /// Chunks that were found in the cache when they were first needed.
    pub found: u64,
    /// Chunks that were fetched before anybody asked for them; they are among `fetched`.
    pub ahead: u64,
    /// Fetches that failed.
    pub failed: u64,
    /// Why, at last.
    pub last_error: Option<String>,
}

impl Stats {
    pub fn add(counter: &AtomicU64, count: u64) {
        // Relaxed: numbers for people, which order nothing.
        counter.fetch_add(count, Ordering::Relaxed);
    }

    pub fn failed(&self, why: String) {
        Self::add(&self.failed, 1);
        *self.last_error.lock().unwrap_or_else(PoisonError::into_inner) = Some(why);
    }

    pub fn stat(&self) -> Stat {
        // Relaxed: as above.
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
