//! Where a thread gets a stream from: one a CPU.

use crossbeam_utils::CachePadded;

use freestone_core::device::Result;
use freestone_core::percpu;
use freestone_core::sync::{Mutex, MutexGuard};

/// One `T` for each CPU.
pub struct Lender<T>(Box<[CachePadded<Mutex<T>>]>);

impl<T> Lender<T> {
    /// Makes every CPU's.
    ///
    /// # Errors
    /// The first that `make` has.
    pub fn new(mut make: impl FnMut() -> Result<T>) -> Result<Self> {
        let all = (0..percpu::cpus()).map(|_| Ok(CachePadded::new(Mutex::new(make()?))));
        Ok(Self(all.collect::<Result<_>>()?))
    }

    /// This CPU's; where a descheduled thread holds it, another CPU's, before this one is waited
    /// for.
    #[inline]
    pub fn take(&self) -> MutexGuard<'_, T> {
        percpu::lock_nearest(|cpu| &*self.0[cpu])
    }

    /// Every CPU's.
    pub fn all(&self) -> impl ExactSizeIterator<Item = &Mutex<T>> {
        self.0.iter().map(|one| &**one)
    }
}
