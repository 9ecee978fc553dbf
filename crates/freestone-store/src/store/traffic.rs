//! Counters of requests and bytes to and from a store.

use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::time::Duration;
use std::ops::Range;

use crate::objects::{Fault, Head, Listed, Objects, Read, Result, Until, Version, When};

/// Atomic counters of the requests to a store. Each attempt counts.
#[derive(Debug, Default)]
pub struct Traffic {
    gets: AtomicU64,
    puts: AtomicU64,
    heads: AtomicU64,
    lists: AtomicU64,
    deletes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    failed: AtomicU64,
}

/// Snapshot of the counters in [`Traffic`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Requests {
    /// Reads of objects or of ranges of objects.
    pub gets: u64,
    /// Writes of objects.
    pub puts: u64,
    /// Metadata requests.
    pub heads: u64,
    /// Listings.
    pub lists: u64,
    /// Deletions.
    pub deletes: u64,
    /// Bytes of objects read.
    pub read_bytes: u64,
    /// Bytes of objects sent, including failed writes.
    pub written_bytes: u64,
    /// Failed requests of all kinds, except for missing objects.
    pub failed: u64,
}

impl Traffic {
    /// Returns a snapshot of the counters.
    pub fn requests(&self) -> Requests {
        // Relaxed: statistics, which order no other memory access.
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Requests {
            gets: of(&self.gets),
            puts: of(&self.puts),
            heads: of(&self.heads),
            lists: of(&self.lists),
            deletes: of(&self.deletes),
            read_bytes: of(&self.read_bytes),
            written_bytes: of(&self.written_bytes),
            failed: of(&self.failed),
        }
    }

    fn add(counter: &AtomicU64, count: u64) {
        // Relaxed: statistics, which order no other memory access.
        counter.fetch_add(count, Ordering::Relaxed);
    }

    fn ended<T>(&self, outcome: Result<T>) -> Result<T> {
        if !matches!(outcome, Ok(_) | Err(Fault::NotFound)) {
            Self::add(&self.failed, 1);
        }
        outcome
    }
}

/// Objects with request counters.
pub(super) struct Counted {
    pub inner: Arc<dyn Objects>,
    pub traffic: Traffic,
}

impl Objects for Counted {
    fn url(&self) -> &str {
        self.inner.url()
    }

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, until: Until<'_>) -> Result<Read> {
        Traffic::add(&self.traffic.gets, 1);
        let read = self.traffic.ended(self.inner.get(key, part, most, until))?;
        Traffic::add(&self.traffic.read_bytes, read.bytes.len() as u64);
        Ok(read)
    }

    fn put(&self, key: &str, bytes: &[u8], when: When<'_>, until: Until<'_>) -> Result<Option<Version>> {
        Traffic::add(&self.traffic.puts, 1);
        Traffic::add(&self.traffic.written_bytes, bytes.len() as u64);
        self.traffic.ended(self.inner.put(key, bytes, when, until))
    }

    fn head(&self, key: &str, until: Until<'_>) -> Result<Head> {
        Traffic::add(&self.traffic.heads, 1);
        self.traffic.ended(self.inner.head(key, until))
    }

    fn list(&self, prefix: &str, each: &mut dyn FnMut(Listed) -> bool, until: Until<'_>) -> Result<()> {
        Traffic::add(&self.traffic.lists, 1);
        self.traffic.ended(self.inner.list(prefix, each, until))
    }

    fn delete(&self, key: &str, until: Until<'_>) -> Result<()> {
        Traffic::add(&self.traffic.deletes, 1);
        self.traffic.ended(self.inner.delete(key, until))
    }

    fn delete_unchanged(&self, key: &str, version: &Version, until: Until<'_>) -> Result<()> {
        let outcome = self.inner.delete_unchanged(key, version, until);
        if matches!(outcome, Err(Fault::Unsupported(_))) {
            return outcome;
        }
        Traffic::add(&self.traffic.deletes, 1);
        self.traffic.ended(outcome)
    }

    fn uptime(&self) -> Duration {
        self.inner.uptime()
    }
}
