//! Counters of requests and bytes to and from an object store.

use crate::rt::sync::Arc;
use crate::rt::sync::atomic::{AtomicU64, Ordering};
use crate::rt::time::Duration;
use std::ops::Range;

use crate::objects::{CallLimits, Fault, Head, ListEntry, Objects, Read, Result, Version, WriteCondition};

/// Atomic counters of the requests to an object store. Each attempt of a retried request counts.
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
    /// Number of reads of objects or of ranges of objects.
    pub gets: u64,
    /// Number of writes of objects.
    pub puts: u64,
    /// Number of metadata requests.
    pub heads: u64,
    /// Number of listings.
    pub lists: u64,
    /// Number of deletions.
    pub deletes: u64,
    /// Number of object bytes read.
    pub read_bytes: u64,
    /// Number of object bytes sent, including failed writes.
    pub written_bytes: u64,
    /// Number of failed requests of all kinds, not counting missing objects.
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

    fn count_outcome<T>(&self, outcome: Result<T>) -> Result<T> {
        if !matches!(outcome, Ok(_) | Err(Fault::NotFound)) {
            Self::add(&self.failed, 1);
        }
        outcome
    }
}

/// Object storage that counts the requests to `inner`.
pub(super) struct CountedObjects {
    pub inner: Arc<dyn Objects>,
    pub traffic: Traffic,
}

impl Objects for CountedObjects {
    fn url(&self) -> &str {
        self.inner.url()
    }

    fn get(&self, key: &str, part: Option<Range<u64>>, most: u64, limits: CallLimits<'_>) -> Result<Read> {
        freestone_core::trail::step!();
        Traffic::add(&self.traffic.gets, 1);
        let read = self.traffic.count_outcome(self.inner.get(key, part, most, limits))?;
        Traffic::add(&self.traffic.read_bytes, read.bytes.len() as u64);
        Ok(read)
    }

    fn put(
        &self,
        key: &str,
        bytes: &[u8],
        condition: WriteCondition<'_>,
        limits: CallLimits<'_>,
    ) -> Result<Option<Version>> {
        Traffic::add(&self.traffic.puts, 1);
        Traffic::add(&self.traffic.written_bytes, bytes.len() as u64);
        self.traffic.count_outcome(self.inner.put(key, bytes, condition, limits))
    }

    fn head(&self, key: &str, limits: CallLimits<'_>) -> Result<Head> {
        Traffic::add(&self.traffic.heads, 1);
        self.traffic.count_outcome(self.inner.head(key, limits))
    }

    fn list(
        &self,
        prefix: &str,
        each: &mut dyn FnMut(ListEntry) -> bool,
        limits: CallLimits<'_>,
    ) -> Result<()> {
        Traffic::add(&self.traffic.lists, 1);
        self.traffic.count_outcome(self.inner.list(prefix, each, limits))
    }

    fn delete(&self, key: &str, limits: CallLimits<'_>) -> Result<()> {
        Traffic::add(&self.traffic.deletes, 1);
        self.traffic.count_outcome(self.inner.delete(key, limits))
    }

    fn delete_unchanged(&self, key: &str, version: &Version, limits: CallLimits<'_>) -> Result<()> {
        let outcome = self.inner.delete_unchanged(key, version, limits);
        if matches!(outcome, Err(Fault::Unsupported(_))) {
            return outcome;
        }
        Traffic::add(&self.traffic.deletes, 1);
        self.traffic.count_outcome(outcome)
    }

    fn uptime(&self) -> Duration {
        self.inner.uptime()
    }
}
