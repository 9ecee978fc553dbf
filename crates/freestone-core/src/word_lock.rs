//! A lock bit inside the 64-bit word that it guards, such as a page's slot or a zone.
//!
//! # Protocol
//! * The lock bit is taken by compare-and-swap. Only the holder changes any bit but [`WAITER`].
//! * A waiter spins briefly, then sets the waiter bit and sleeps, both under its parking bucket's lock.
//! * The holder publishes a new word and unlocks in one atomic step. If that step finds the waiter bit set,
//!   the holder wakes one sleeper, and clears the bit if that was the last one. The woken thread competes for
//!   the lock like any other.

use crate::parking::Parking;
#[cfg(loom)]
use crate::sync::yield_now;
use crate::sync::{AtomicU64, Ordering};

/// Spins before a waiter parks. A running holder needs a few microseconds; a longer hold means that the
/// holder was descheduled.
#[cfg(not(loom))]
const SPINS: u32 = 64;
#[cfg(loom)]
const SPINS: u32 = 0;

/// Lock bit.
pub const LOCK: u64 = 1;
/// Bit set while threads sleep until the lock is released.
pub const WAITER: u64 = 1 << 1;

/// The content of a word without the bits [`LOCK`] and [`WAITER`].
pub trait Word: Copy {
    /// Decodes the bits.
    fn from_bits(bits: u64) -> Self;
    /// Encodes the word.
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
    match try_lock(place, parking) {
        Some(guard) => guard,
        None => lock_contended(place, parking),
    }
}

/// Locks a word, or returns `None` if the word is locked, has waiters or changed meanwhile.
#[inline]
pub fn try_lock<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Option<Guard<'a, W>> {
    // Relaxed: a guess for the exchange below, which fails if the word is locked or has waiters.
    let bits = place.load(Ordering::Relaxed) & !(LOCK | WAITER);
    // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure: nothing is
    // read).
    let exchange = place.compare_exchange(bits, bits | LOCK, Ordering::Acquire, Ordering::Relaxed);
    // Lazily, because dropping a guard unlocks.
    exchange.is_ok().then(|| Guard { place, parking, word: W::from_bits(bits) })
}

#[cold]
fn lock_contended<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Guard<'a, W> {
    let mut spins = 0;
    loop {
        // Relaxed: a guess for the exchanges below.
        let bits = place.load(Ordering::Relaxed);
        if bits & LOCK == 0 {
            // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure:
            // retried).
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
            // Relaxed: the bucket's lock orders this against the waker; the exchange below decides.
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
    /// Returns the word as of the lock.
    #[inline]
    pub fn word(&self) -> W {
        self.word
    }

    /// Stores a new word and unlocks, in one atomic step.
    #[inline]
    pub fn publish(self, new: W) {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.unlock(new);
    }

    #[inline]
    fn unlock(&self, new: W) {
        // The holder knows every bit but WAITER, so one XOR publishes and unlocks, and preserves a WAITER bit
        // that was set meanwhile.
        let change = (self.word.bits() ^ new.bits()) | LOCK;
        // Release: pairs with the Acquire of the next lock, and of readers. The returned WAITER bit carries
        // no data, so Acquire is not needed.
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
                // Relaxed: ordered by the bucket's lock against the waiters that set the bit.
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
