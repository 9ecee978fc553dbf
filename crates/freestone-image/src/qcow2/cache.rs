//! What was read or unpacked once: a bounded number of places, one lock each.

use freestone_core::sync::RwLock;
use std::sync::{Arc, PoisonError};

/// Maps a number to one place, and a place remembers what was put there last. Content never goes
/// stale: images are only read. Each lock is held for the copy of an `Arc`, and never together with
/// another.
pub(super) struct Cache<T: ?Sized> {
    places: Box<[Place<T>]>,
}

type Place<T> = RwLock<Option<(u64, Arc<T>)>>;

impl<T: ?Sized> Cache<T> {
    /// For numbers below `numbers`, of which at most `most` are kept (both at least one).
    pub fn new(numbers: u64, most: u64) -> Self {
        // A power of two, so that a place is found with a mask.
        let places = numbers.min(most).max(1);
        let places = if places == numbers { places.next_power_of_two() } else { 1 << places.ilog2() };
        Self { places: (0..places).map(|_| RwLock::new(None)).collect() }
    }

    pub fn get(&self, number: u64) -> Option<Arc<T>> {
        let place = self.place(number).read().unwrap_or_else(PoisonError::into_inner);
        place.as_ref().filter(|(held, _)| *held == number).map(|(_, value)| Arc::clone(value))
    }

    pub fn put(&self, number: u64, value: Arc<T>) {
        // What was there is freed after the lock is let go.
        let old = self.place(number).write().unwrap_or_else(PoisonError::into_inner).replace((number, value));
        drop(old);
    }

    fn place(&self, number: u64) -> &Place<T> {
        &self.places[(number & (self.places.len() as u64 - 1)) as usize]
    }
}
