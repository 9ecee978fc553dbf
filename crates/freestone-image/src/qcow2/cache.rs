//! A direct-mapped cache with a fixed number of entries, and one lock per entry.

use freestone_core::sync::RwLock;
use std::sync::Arc;

/// A cache of values by number. Each number maps to one entry, which stores the last value put
/// there. Values never become stale, since images are read-only. Each lock is held while an `Arc`
/// is copied, and never together with another lock.
pub(super) struct Cache<T: ?Sized> {
    entries: Box<[Entry<T>]>,
}

type Entry<T> = RwLock<Option<(u64, Arc<T>)>>;

impl<T: ?Sized> Cache<T> {
    /// Returns an empty cache for numbers below `numbers` with at most `max_entries` entries (both
    /// at least 1).
    pub fn new(numbers: u64, max_entries: u64) -> Self {
        // The number of entries is a power of two, so that a mask of the number selects the entry.
        let entries = numbers.min(max_entries).max(1);
        let entries = if entries == numbers { entries.next_power_of_two() } else { 1 << entries.ilog2() };
        Self { entries: (0..entries).map(|_| RwLock::new(None)).collect() }
    }

    pub fn get(&self, number: u64) -> Option<Arc<T>> {
        let entry = self.entry(number).read();
        entry.as_ref().filter(|(held, _)| *held == number).map(|(_, value)| Arc::clone(value))
    }

    pub fn put(&self, number: u64, value: Arc<T>) {
        // Drop the old value after the lock is released, as freeing it may take long.
        let old = self.entry(number).write().replace((number, value));
        drop(old);
    }

    fn entry(&self, number: u64) -> &Entry<T> {
        &self.entries[(number & (self.entries.len() as u64 - 1)) as usize]
    }
}
