//! A lock bit inside the 64-bit word that it guards, such as the slot of a page or the state of a zone.
//!
//! # Protocol
//! * The lock bit is set by compare-and-swap. Only the holder of the lock changes any bit but [`WAITER`].
//! * A waiter spins briefly, then sets the waiter bit and sleeps, both under its parking bucket's lock.
//! * The holder publishes a new word and unlocks in one atomic step. If that step finds the waiter bit set,
//!   the holder wakes one sleeper, and clears the bit if that was the last one. The woken thread competes for
//!   the lock like any other.

use crate::parking::Parking;
#[cfg(loom)]
use crate::sync::yield_now;
use crate::sync::{AtomicU64, Ordering};

/// Number of spins before a waiter sleeps. A running holder unlocks within a few microseconds; if the lock is
/// held longer, the holder was descheduled.
#[cfg(not(loom))]
const SPINS: u32 = 64;
#[cfg(loom)]
const SPINS: u32 = 0;

/// Bit set while a thread holds the lock.
pub const LOCK: u64 = 1;
/// Bit set while threads sleep until the lock is released.
pub const WAITER: u64 = 1 << 1;

/// The content of a word without the bits [`LOCK`] and [`WAITER`].
pub trait Word: Copy {
    /// Decodes a word from `bits`, ignoring [`LOCK`] and [`WAITER`].
    fn from_bits(bits: u64) -> Self;
    /// Returns the bits of the word, without [`LOCK`] and [`WAITER`].
    fn bits(self) -> u64;
}

/// A locked word. Dropping it unlocks the word unchanged.
#[must_use]
pub struct Guard<'a, W: Word> {
    place: &'a AtomicU64,
    parking: &'a Parking,
    word: W,
}

/// Locks a word, spinning and then sleeping while another thread holds it.
#[inline]
pub fn lock<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Guard<'a, W> {
    crate::trail::step!();
    match try_lock(place, parking) {
        Some(guard) => guard,
        None => lock_contended(place, parking),
    }
}

/// Locks a word, or returns `None` if the word is locked, has waiters or changed meanwhile.
#[inline]
pub fn try_lock<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Option<Guard<'a, W>> {
    // Relaxed: a guess for the exchange that follows, which fails if the word is locked or has waiters.
    let bits = place.load(Ordering::Relaxed) & !(LOCK | WAITER);
    // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure: no data is
    // read).
    let exchange = place.compare_exchange(bits, bits | LOCK, Ordering::Acquire, Ordering::Relaxed);
    // The guard is created only on success, because dropping a guard unlocks the word.
    exchange.is_ok().then(|| Guard { place, parking, word: W::from_bits(bits) })
}

#[cold]
fn lock_contended<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Guard<'a, W> {
    let mut spins = 0;
    loop {
        // Relaxed: a guess for the exchanges that follow.
        let bits = place.load(Ordering::Relaxed);
        if bits & LOCK == 0 {
            // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure: the
            // loop tries again).
            if place.compare_exchange(bits, bits | LOCK, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Guard { place, parking, word: W::from_bits(bits) };
            }
            continue;
        }
        if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
            continue;
        }
        parking.park(key(place), || {
            // Relaxed: the bucket's lock orders this load against the waking thread; the exchange that
            // follows decides.
            let bits = place.load(Ordering::Relaxed);
            bits & LOCK != 0
                && (bits & WAITER != 0
                    // Relaxed: the bit carries no data; the bucket's lock orders it against unlock's slow
                    // path.
                    || place.compare_exchange(bits, bits | WAITER, Ordering::Relaxed, Ordering::Relaxed).is_ok())
        });
        #[cfg(loom)]
        yield_now();
    }
}

fn key(place: &AtomicU64) -> usize {
    std::ptr::from_ref(place) as usize
}

impl<W: Word> Guard<'_, W> {
    /// Returns the word at the time it was locked.
    #[inline]
    pub fn word(&self) -> W {
        self.word
    }

    /// Returns the address of the word in memory, which no other word has.
    #[inline]
    pub fn address(&self) -> usize {
        key(self.place)
    }

    /// Stores a new word, which stays locked.
    #[inline]
    pub fn store(&mut self, new: W) {
        // As in `unlock`, with the lock bit kept.
        // Release: pairs with the Acquire of readers.
        self.place.fetch_xor(self.word.bits() ^ new.bits(), Ordering::Release);
        self.word = new;
    }

    /// Stores a new word and unlocks it, in one atomic step.
    #[inline]
    pub fn publish(self, new: W) {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.unlock(new);
    }

    #[inline]
    fn unlock(&self, new: W) {
        // The holder knows every bit but WAITER, so one XOR stores the new word, clears LOCK, and preserves a
        // WAITER bit that was set meanwhile.
        let change = (self.word.bits() ^ new.bits()) | LOCK;
        // Release: pairs with the Acquire of the next lock operation, and of readers. The returned WAITER bit
        // carries no data, so Acquire is not needed.
        let before = self.place.fetch_xor(change, Ordering::Release);
        debug_assert!(before & LOCK != 0, "unlock of a word that is not locked");
        if before & WAITER != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.parking.unpark_one(key(self.place), |more| {
            if !more {
                // Relaxed: the bucket's lock orders this against the waiters that set the bit.
                self.place.fetch_and(!WAITER, Ordering::Relaxed);
            }
        });
    }
}

impl<W: Word> Drop for Guard<'_, W> {
    fn drop(&mut self) {
        self.unlock(self.word);
    }
}
