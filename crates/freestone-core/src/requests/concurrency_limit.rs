//! A semaphore with an adjustable limit, for example on the number of connections.

use crate::sync::{Arc, AtomicU64, Ordering};

/// A limit on concurrent users. Each user holds one permit.
#[derive(Debug, Default)]
pub struct ConcurrencyLimit {
    /// Maximum number of users; 0 means unlimited.
    max: AtomicU64,
    in_use: AtomicU64,
}

/// A permit in use. Dropping it releases the permit.
#[derive(Debug)]
pub struct Permit(Arc<ConcurrencyLimit>);

impl ConcurrencyLimit {
    /// Sets the maximum number of users; 0 means unlimited. Permits in use stay valid.
    pub fn set(&self, max: u64) {
        self.max.store(max, Ordering::SeqCst);
    }

    /// Returns the maximum number of users; 0 means unlimited.
    pub fn limit(&self) -> u64 {
        self.max.load(Ordering::SeqCst)
    }

    /// Returns the number of permits in use.
    pub fn in_use(&self) -> u64 {
        self.in_use.load(Ordering::SeqCst)
    }

    /// Acquires a permit, or returns `None` if the limit is reached.
    pub fn acquire(self: &Arc<Self>) -> Option<Permit> {
        let max = self.limit();
        let one_more = |in_use| (max == 0 || in_use < max).then(|| in_use + 1);
        self.in_use.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        Some(Permit(Arc::clone(self)))
    }

    /// Acquires one permit of each limit, or no permit at all.
    ///
    /// # Errors
    /// The first limit without a free permit.
    pub fn acquire_all(all: &[Arc<Self>]) -> Result<Vec<Permit>, &Arc<Self>> {
        all.iter().map(|limit| limit.acquire().ok_or(limit)).collect()
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.in_use.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permit_is_acquired_once_and_released() {
        let limit = Arc::new(ConcurrencyLimit::default());
        let unlimited: Vec<_> = (0..10).map(|_| limit.acquire().unwrap()).collect();
        limit.set(2);
        assert!(limit.acquire().is_none(), "permits in use remain");
        drop(unlimited);
        let one = limit.acquire().unwrap();
        let other = Arc::new(ConcurrencyLimit::default());
        other.set(1);
        let both = [Arc::clone(&limit), Arc::clone(&other)];
        let in_use = ConcurrencyLimit::acquire_all(&both).unwrap();
        drop(one);
        assert!(Arc::ptr_eq(ConcurrencyLimit::acquire_all(&both).unwrap_err(), &other));
        assert_eq!((limit.in_use(), other.in_use()), (1, 1), "a failed acquire_all releases its permits");
        drop(in_use);
        assert_eq!((limit.in_use(), other.in_use(), limit.limit()), (0, 0, 2));
    }
}
