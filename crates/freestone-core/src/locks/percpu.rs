//! Per-CPU data: the current CPU, values, locks and counters.

use std::ops::Deref;

use crossbeam_utils::CachePadded;

use crate::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Returns the number of CPUs that the machine can have, at least one. Per-CPU arrays have this size.
pub fn cpus() -> usize {
    use std::sync::OnceLock;
    static CPUS: OnceLock<usize> = OnceLock::new();
    *CPUS.get_or_init(|| cpu::configured().max(1))
}

/// Returns the number of the calling thread's CPU, below [`cpus`]. The number is only a hint, because the
/// thread can migrate at any time.
#[inline]
pub fn current() -> usize {
    let cpu = cpu::current();
    let cpus = cpus();
    if cpu < cpus { cpu } else { cpu % cpus }
}

/// Locks the current CPU's mutex. If another thread holds it, locks a free mutex of another CPU. If all are
/// held, waits for the current CPU's mutex.
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

#[cfg(not(any(freestone_sim, loom)))]
mod cpu {
    #![expect(unsafe_code)]
    // UNSAFETY: two libc calls without a safe wrapper that is as fast (glibc reads the CPU from its rseq
    // area).

    pub fn configured() -> usize {
        // SAFETY: sysconf takes no pointers.
        let count = unsafe { libc::sysconf(libc::_SC_NPROCESSORS_CONF) };
        usize::try_from(count).unwrap_or(1)
    }

    #[inline]
    pub fn current() -> usize {
        // SAFETY: no arguments; returns -1 on failure.
        let cpu = unsafe { libc::sched_getcpu() };
        usize::try_from(cpu).unwrap_or(0)
    }
}

#[cfg(loom)]
mod cpu {
    //! In a loom model there is one CPU.

    pub fn configured() -> usize {
        1
    }

    pub fn current() -> usize {
        0
    }
}

#[cfg(all(freestone_sim, not(loom)))]
mod cpu {
    pub use freestone_sim::sim::cpu as current;

    pub fn configured() -> usize {
        freestone_sim::sim::CPUS
    }
}

/// A `T` for each CPU, in a cache line of its own. Dereferences to the values of all CPUs.
pub struct PerCpu<T>(Box<[CachePadded<T>]>);

impl<T> PerCpu<T> {
    /// Creates the values, calling `make` once for each CPU. Returns its first error.
    pub fn try_new<E>(mut make: impl FnMut() -> Result<T, E>) -> Result<Self, E> {
        (0..cpus()).map(|_| make().map(CachePadded::new)).collect::<Result<_, E>>().map(Self)
    }

    /// Returns the value of the current CPU.
    #[inline]
    pub fn current(&self) -> &T {
        // Finds the same CPU as `current` with one comparison, because the number of values is the number of
        // CPUs.
        let cpu = cpu::current();
        self.get(cpu).unwrap_or_else(|| self.wrapped(cpu))
    }

    #[cold]
    fn wrapped(&self, cpu: usize) -> &CachePadded<T> {
        &self[cpu % self.len()]
    }
}

impl<T> PerCpu<Mutex<T>> {
    /// Locks the value of the current CPU, or that of another one: see [`lock_nearest`].
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        lock_nearest(|cpu| &*self[cpu])
    }
}

impl<T: Default> Default for PerCpu<T> {
    fn default() -> Self {
        Self((0..cpus()).map(|_| CachePadded::default()).collect())
    }
}

impl<T> Deref for PerCpu<T> {
    type Target = [CachePadded<T>];
    #[inline]
    fn deref(&self) -> &[CachePadded<T>] {
        &self.0
    }
}

/// `N` counters, each the sum of one cell for each CPU.
pub struct Counters<const N: usize> {
    cells: PerCpu<[AtomicU64; N]>,
}

impl<const N: usize> Default for Counters<N> {
    fn default() -> Self {
        let zeroes = || std::array::from_fn(|_| AtomicU64::new(0));
        Self { cells: PerCpu((0..cpus()).map(|_| CachePadded::new(zeroes())).collect()) }
    }
}

impl<const N: usize> Counters<N> {
    /// Adds `delta`, which may be negative. A single cell may wrap, the sum of all cells does not.
    #[inline]
    pub fn add(&self, counter: usize, delta: i64) {
        // Relaxed: a counter, which orders no other data.
        self.cells.current()[counter].fetch_add(delta as u64, Ordering::Relaxed);
    }

    /// Adds to two counters as [`add`](Self::add) does, with one look-up of the CPU.
    #[inline]
    pub fn add_both(&self, [(a, delta_a), (b, delta_b)]: [(usize, i64); 2]) {
        let cells = self.cells.current();
        // Relaxed: counters, which order no other data.
        cells[a].fetch_add(delta_a as u64, Ordering::Relaxed);
        // Relaxed: a counter, which orders no other data.
        cells[b].fetch_add(delta_b as u64, Ordering::Relaxed);
    }

    /// Adds to this CPU's cell of a counter whose cells the caller collects in a common sum. If the cell's
    /// absolute value reaches `most`, empties the cell and returns its value. Otherwise returns `None`.
    #[inline]
    pub fn add_and_take(&self, counter: usize, delta: i64, most: u64) -> Option<i64> {
        let cell = &self.cells.current()[counter];
        // Relaxed: a counter, which orders no other data.
        let now = (cell.fetch_add(delta as u64, Ordering::Relaxed) as i64).wrapping_add(delta);
        // Relaxed: additions of other threads since then are included.
        (now.unsigned_abs() >= most).then(|| cell.swap(0, Ordering::Relaxed) as i64)
    }

    /// Returns the sum of all cells, wrapping.
    pub fn sum(&self, counter: usize) -> u64 {
        // Relaxed: a counter, which orders no other data.
        let value = |cell: &CachePadded<[AtomicU64; N]>| cell[counter].load(Ordering::Relaxed);
        self.cells.iter().map(value).fold(0, u64::wrapping_add)
    }

    /// Returns the counter's value, at least 0. The value is exact if no thread adds meanwhile.
    pub fn get(&self, counter: usize) -> u64 {
        let sum = self.sum(counter);
        // Cells are read one after the other, so the sum of running counters can be negative.
        if sum as i64 >= 0 { sum } else { 0 }
    }

    /// Sets a counter to zero. Concurrent additions may be lost.
    pub fn clear(&self, counter: usize) {
        for cell in self.cells.iter() {
            // Relaxed: a counter, which orders no other data.
            cell[counter].store(0, Ordering::Relaxed);
        }
    }
}
