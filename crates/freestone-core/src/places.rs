//! How many may use something at one time.

use crate::sync::{Arc, AtomicU64, Ordering};

/// Places, of which each user takes one.
#[derive(Debug, Default)]
pub struct Places {
    /// How many there are; 0 for any number.
    most: AtomicU64,
    taken: AtomicU64,
}

/// A place that somebody has, until it is dropped.
#[derive(Debug)]
pub struct Place(Arc<Places>);

impl Places {
    /// From now on there are so many, 0 for any number. Who has one keeps it.
    pub fn set(&self, most: u64) {
        self.most.store(most, Ordering::SeqCst);
    }

    /// How many there are; 0 for any number.
    pub fn most(&self) -> u64 {
        self.most.load(Ordering::SeqCst)
    }

    /// How many are taken.
    pub fn taken(&self) -> u64 {
        self.taken.load(Ordering::SeqCst)
    }

    /// A place, if there is one.
    pub fn take(self: &Arc<Self>) -> Option<Place> {
        let most = self.most();
        let one_more = |taken| (most == 0 || taken < most).then(|| taken + 1);
        self.taken.fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_more).ok()?;
        Some(Place(Arc::clone(self)))
    }

    /// One in each of these; where one has none that one is told, and none is taken.
    ///
    /// # Errors
    /// The first that has none.
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
    fn a_place_is_taken_once_and_given_back() {
        let places = Arc::new(Places::default());
        let many: Vec<_> = (0..10).map(|_| places.take().unwrap()).collect();
        places.set(2);
        assert!(places.take().is_none(), "who was there stays");
        drop(many);
        let one = places.take().unwrap();
        let other = Arc::new(Places::default());
        other.set(1);
        let both = [Arc::clone(&places), Arc::clone(&other)];
        let taken = Places::take_all(&both).unwrap();
        drop(one);
        assert!(Arc::ptr_eq(Places::take_all(&both).unwrap_err(), &other));
        assert_eq!((places.taken(), other.taken()), (1, 1), "none is left taken");
        drop(taken);
        assert_eq!((places.taken(), other.taken(), places.most()), (0, 0, 2));
    }
}
