//! Things of which every CPU has its own.

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Number of CPUs this machine can have, at least one: the bound of everything per CPU.
pub fn cpus() -> usize {
    use std::sync::OnceLock;
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| cpu::configured().max(1))
}

/// The CPU that the calling thread runs on, below [`cpus`]. Stale as soon as it is known: a hint
/// for what is likely free, never a claim.
#[inline]
pub fn current() -> usize {
    let cpu = cpu::current();
    let cpus = cpus();
    if cpu < cpus { cpu } else { cpu % cpus }
}

/// Locks what `of` says this CPU has; where a descheduled thread holds that, another CPU's that is
/// free, before this one is waited for.
#[inline]
pub fn lock_nearest<'a, T: 'a>(of: impl Fn(usize) -> &'a Mutex<T>) -> MutexGuard<'a, T> {
    let cpu = current();
    match of(cpu).try_lock() {
        Some(guard) => guard,
        None => lock_another(cpu, of),
    }
}

#[cold]
fn lock_another<'a, T: 'a>(cpu: usize, of: impl Fn(usize) -> &'a Mutex<T>) -> MutexGuard<'a, T> {
    let cpus = cpus();
    (1..cpus).find_map(|n| of((cpu + n) % cpus).try_lock()).unwrap_or_else(|| of(cpu).lock())
}

#[cfg(not(freestone_sim))]
mod cpu {
    #![expect(unsafe_code)]
    // UNSAFETY: two libc calls without a safe wrapper that is as fast (glibc reads the CPU from its
    // rseq area).

    pub fn configured() -> usize {
        // SAFETY: no arguments that could be wrong.
        let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
        usize::try_from(count).unwrap_or(1)
    }

    #[inline]
    pub fn current() -> usize {
        // SAFETY: no arguments; a failure is -1.
        let cpu = unsafe { libc::sched_getcpu() };
        usize::try_from(cpu).unwrap_or(0)
    }
}

#[cfg(freestone_sim)]
mod cpu {
    pub use freestone_sim::sim::cpu as current;

    pub fn configured() -> usize {
        freestone_sim::sim::CPUS
    }
}

/// `N` counters, each the sum of one cell a CPU.
pub struct Counters<const N: usize> {
    cells: Box<[CachePadded<[AtomicU64; N]>]>,
}

impl<const N: usize> Default for Counters<N> {
    fn default() -> Self {
        Self {
            cells: (0..cpus())
                .map(|_| CachePadded::new(std::array::from_fn(|_| AtomicU64::new(0))))
                .collect(),
        }
    }
}

impl<const N: usize> Counters<N> {
    /// Those of the CPU that the calling thread runs on.
    #[inline]
    fn own(&self) -> &[AtomicU64; N] {
        // As `current` has it, with one comparison: there are as many cells as CPUs.
        let cpu = cpu::current();
        self.cells.get(cpu).unwrap_or_else(|| self.of_another(cpu))
    }

    #[cold]
    fn of_another(&self, cpu: usize) -> &CachePadded<[AtomicU64; N]> {
        &self.cells[cpu % self.cells.len()]
    }

    /// Adds `delta`, which may be negative: a cell wraps, the sum of all cells does not.
    #[inline]
    pub fn add(&self, counter: usize, delta: i64) {
        // Relaxed: a statistic.
        self.own()[counter].fetch_add(delta as u64, Ordering::Relaxed);
    }

    /// As [`add`](Self::add), of two counters: who adds looks up the CPU once.
    #[inline]
    pub fn add_both(&self, [(a, of_a), (b, of_b)]: [(usize, i64); 2]) {
        let cells = self.own();
        // Relaxed: statistics.
        cells[a].fetch_add(of_a as u64, Ordering::Relaxed);
        // Relaxed: as above.
        cells[b].fetch_add(of_b as u64, Ordering::Relaxed);
    }

    /// As [`add`](Self::add), of a counter whose cells are emptied into a common sum: returns what
    /// this CPU's cell had, and empties it, once that is `most` or more, either way.
    #[inline]
    pub fn add_and_take(&self, counter: usize, delta: i64, most: u64) -> Option<i64> {
        let cell = &self.own()[counter];
        // Relaxed: a statistic.
        let now = (cell.fetch_add(delta as u64, Ordering::Relaxed) as i64).wrapping_add(delta);
        // Relaxed: what others add meanwhile is taken along.
        (now.unsigned_abs() >= most).then(|| cell.swap(0, Ordering::Relaxed) as i64)
    }

    /// The sum of all cells, of which single ones may be negative.
    pub fn sum(&self, counter: usize) -> u64 {
        // Relaxed: a statistic.
        let value = |cell: &CachePadded<[AtomicU64; N]>| cell[counter].load(Ordering::Relaxed);
        self.cells.iter().map(value).fold(0, u64::wrapping_add)
    }

    /// The counter's value; exact when nobody adds.
    pub fn get(&self, counter: usize) -> u64 {
        let sum = self.sum(counter);
        // Cells are read one after the other: a sum of running counters can dip below zero.
        if sum as i64 >= 0 { sum } else { 0 }
    }

    /// Sets a counter to zero. Additions meanwhile may be lost.
    pub fn clear(&self, counter: usize) {
        for cell in &self.cells {
            // Relaxed: a statistic.
            cell[counter].store(0, Ordering::Relaxed);
        }
    }
}
