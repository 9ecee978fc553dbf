//! Per-CPU streams.

use crossbeam_utils::CachePadded;

use freestone_core::device::Result;
use freestone_core::percpu;
use freestone_core::sync::{Mutex, MutexGuard};

/// One `T` for each CPU.
pub struct Lender<T>(Box<[CachePadded<Mutex<T>>]>);

impl<T> Lender<T> {
    /// Creates the value of every CPU.
    ///
    /// # Errors
    /// Returns the first error of `make`.
    pub fn new(mut make: impl FnMut() -> Result<T>) -> Result<Self> {
        let all = (0..percpu::cpus()).map(|_| Ok(CachePadded::new(Mutex::new(make()?))));
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// Locks the value of this CPU. If a descheduled thread holds it, tries those of other CPUs
    /// before waiting.
    #[inline]
    pub fn take(&self) -> MutexGuard<'_, T> {
        percpu::lock_nearest(|cpu| &*self.0[cpu])
    }

    /// Iterates over the values of all CPUs.
    pub fn all(&self) -> impl ExactSizeIterator<Item = &Mutex<T>> {
        self.0.iter().map(|one| &**one)
    }
}
