//! Lock-free table of fixed size that counts keys. A key is the hash of a rule, an operation and an
//! offset.
//!
//! A cell contains the upper bits of a key's hash and a count. A key uses the first free cell of a
//! window chosen by its hash. Cells are never freed, so a key stays in its cell. If the window is
//! full, the key is not counted: every call of [`Tally::count`] for it returns 1.

use zerocopy::FromZeros;

use freestone_core::sync::{AtomicU64, Ordering};

/// Number of cells of a table, 8 bytes each. Pages of the table that are never touched use no
/// memory.
const CELLS: usize = 1 << 20;
/// Number of cells searched for one key. The first windows are full when the table is about 90%
/// full.
const WINDOW_CELLS: usize = 64;
/// Number of lower bits of a cell that contain the count.
const COUNT_BITS: u32 = 24;
/// Largest count. A counter that reached it does not change any more.
pub const COUNT_MAX: u64 = (1 << COUNT_BITS) - 1;

pub struct Tally {
    cells: Box<[AtomicU64]>,
    uncounted: AtomicU64,
}

impl Default for Tally {
    fn default() -> Self {
        Self::new(CELLS)
    }
}

impl Tally {
    /// Creates a table of `cells` cells, a power of two. If the allocation fails, the table is
    /// empty and nothing is counted.
    fn new(cells: usize) -> Self {
        // The allocation is zeroed pages of the system, which provides their memory on first use.
        let cells = <[AtomicU64]>::new_box_zeroed_with_elems(cells).unwrap_or_default();
        Self { cells, uncounted: AtomicU64::new(0) }
    }

    /// Counts the key with this hash. Returns how often the key was counted, 1 for the first time,
    /// or 1 if the table has no cell for the key.
    pub fn count(&self, hash: u64) -> u64 {
        let tag = hash >> COUNT_BITS;
        for step in 0..WINDOW_CELLS.min(self.cells.len()) {
            let cell = &self.cells[(hash as usize).wrapping_add(step) & (self.cells.len() - 1)];
            // Relaxed: a cell contains the complete state of a key, and publishes no other memory.
            let mut seen = cell.load(Ordering::Relaxed);
            while seen == 0 || seen >> COUNT_BITS == tag {
                let count = seen & COUNT_MAX;
                if count == COUNT_MAX {
                    return count;
                }
                match cell.compare_exchange_weak(
                    seen,
                    (tag << COUNT_BITS) | (count + 1),
                    // Relaxed: no other memory is published with a cell. Each count is returned
                    // once because the cell changes atomically.
                    Ordering::Relaxed,
                    Ordering::Relaxed,
                ) {
                    Ok(_) => return count + 1,
                    Err(other) => seen = other,
                }
            }
        }
        // Relaxed: the counter is only a statistic.
        self.uncounted.fetch_add(1, Ordering::Relaxed);
        1
    }

    /// Returns how many calls of [`count`](Self::count) found no cell for the key.
    pub fn uncounted(&self) -> u64 {
        // Relaxed: the counter is only a statistic.
        self.uncounted.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::thread;

    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    fn hash(key: u64) -> u64 {
        xxh3_64(&key.to_le_bytes())
    }

    #[test]
    fn counts_are_exact_in_half_full_table() {
        let tally = Tally::default();
        for time in 1..=3 {
            for key in 0..CELLS as u64 / 2 {
                assert_eq!(tally.count(hash(key)), time, "key {key}");
            }
        }
        assert_eq!(tally.uncounted(), 0);
    }

    #[test]
    fn full_table_counts_only_known_keys() {
        let tally = Tally::new(256);
        for key in 0..10_000 {
            assert_eq!(tally.count(hash(key)), 1, "key {key}");
        }
        let mut known = 0;
        for key in 0..10_000 {
            match tally.count(hash(key)) {
                1 => {}
                2 => known += 1,
                other => panic!("key {key} was counted {other} times"),
            }
        }
        assert_eq!(known, 256, "every cell must have a key");
        assert_eq!(tally.uncounted(), 2 * (10_000 - 256));
    }

    #[test]
    fn count_saturates_at_maximum() {
        let tally = Tally::new(64);
        for _ in 0..COUNT_MAX + 2 {
            tally.count(hash(1));
        }
        assert_eq!(tally.count(hash(1)), COUNT_MAX);
        assert_eq!(tally.count(hash(2)), 1, "the neighbour changed");
    }

    #[test]
    fn concurrent_counts_are_unique() {
        const THREADS: u64 = 4;
        const KEYS: u64 = 50;
        const ROUNDS: u64 = 200;
        let tally = Tally::new(64);
        let all: Vec<(u64, u64)> = thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|_| {
                    scope.spawn(|| {
                        let keys = (0..ROUNDS).flat_map(|_| 0..KEYS);
                        keys.map(|key| (key, tally.count(hash(key)))).collect::<Vec<_>>()
                    })
                })
                .collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        let mut by_key: HashMap<u64, Vec<u64>> = HashMap::new();
        for (key, count) in all {
            by_key.entry(key).or_default().push(count);
        }
        for (key, mut counts) in by_key {
            counts.sort_unstable();
            assert_eq!(counts, (1..=THREADS * ROUNDS).collect::<Vec<_>>(), "key {key}");
        }
    }
}
