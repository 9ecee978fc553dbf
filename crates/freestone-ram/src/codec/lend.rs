//! Per-CPU values, such as the working memory of compressors.

use crossbeam_utils::CachePadded;

use freestone_core::device::Result;
use freestone_core::percpu;
use freestone_core::sync::{Mutex, MutexGuard};

/// A value of type `T` for each CPU.
pub struct Lender<T>(Box<[CachePadded<Mutex<T>>]>);

impl<T> Lender<T> {
    /// Creates one value for each CPU with `make`.
    ///
    /// # Errors
    /// Returns the first error of `make`, which is called once per CPU.
    pub fn new(mut make: impl FnMut() -> Result<T>) -> Result<Self> {
        let all = (0..percpu::cpus()).map(|_| Ok(CachePadded::new(Mutex::new(make()?))));
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// Locks the value of the current CPU. If a descheduled thread holds that lock, tries the
    /// values of other CPUs before it waits.
    #[inline]
    pub fn take(&self) -> MutexGuard<'_, T> {
        percpu::lock_nearest(|cpu| &*self.0[cpu])
    }

    /// Iterates over the values of all CPUs, which the caller must lock.
    pub fn all(&self) -> impl ExactSizeIterator<Item = &Mutex<T>> {
        self.0.iter().map(|one| &**one)
    }
}
