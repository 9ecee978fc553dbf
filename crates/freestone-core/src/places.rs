//! A semaphore with an adjustable limit, for example on the number of connections.

use crate::sync::{Arc, AtomicU64, Ordering};

/// A limit on concurrent users. Each user takes one place.
#[derive(Debug, Default)]
pub struct Places {
    /// Maximum number of users; 0 means unlimited.
    most: AtomicU64,
    taken: AtomicU64,
}

/// A place that is taken. Released on drop.
#[derive(Debug)]
pub struct Place(Arc<Places>);

impl Places {
    /// Sets the limit; 0 means unlimited. Places taken already remain.
    pub fn set(&self, most: u64) {
        self.most.store(most, Ordering::SeqCst);
    }

    /// Returns the limit; 0 means unlimited.
    pub fn most(&self) -> u64 {
        self.most.load(Ordering::SeqCst)
    }

    /// Returns the number of places taken.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// Takes a place, or returns `None` if the limit is reached.
    pub fn take(self: &Arc<Self>) -> Option<Place> {
        let most = self.most();
        let one_more = |taken| (most == 0 || taken < most).then(|| taken + 1);
        self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        Some(Place(Arc::clone(self)))
    }

    /// Takes one place of each limit, or none at all.
    ///
    /// # Errors
    /// The first limit without a free place.
    pub fn take_all(all: &[Arc<Self>]) -> Result<Vec<Place>, &Arc<Self>> {
        all.iter().map(|places| places.take().ok_or(places)).collect()
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn place_is_taken_once_and_released() {
        let places = Arc::new(Places::default());
        let unlimited: Vec<_> = (0..10).map(|_| places.take().unwrap()).collect();
        places.set(2);
        assert!(places.take().is_none(), "places taken already remain");
        drop(unlimited);
        let one = places.take().unwrap();
        let other = Arc::new(Places::default());
        other.set(1);
        let both = [Arc::clone(&places), Arc::clone(&other)];
        let taken = Places::take_all(&both).unwrap();
        drop(one);
        assert!(Arc::ptr_eq(Places::take_all(&both).unwrap_err(), &other));
        assert_eq!((places.taken(), other.taken()), (1, 1), "a failed take_all releases its places");
        drop(taken);
        assert_eq!((places.taken(), other.taken(), places.most()), (0, 0, 2));
    }
}
