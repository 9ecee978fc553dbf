//! A lock inside a 64-bit word that it guards: of a page's slot, of a zone.
//!
//! # Protocol
//! * The lock bit is taken by compare-and-swap. Only the holder changes any bit but [`WAITER`].
//! * A waiter spins briefly, then sets the waiter bit and sleeps, both under its parking bucket's
//!   lock.
//! * The holder publishes a new word and unlocks in one atomic step; if that step saw the waiter
//!   bit, it wakes one sleeper, and clears the bit when that was the last one. The woken thread
//!   competes for the lock like any other.

use crate::parking::Parking;
#[cfg(loom)]
use crate::sync::yield_now;
use crate::sync::{AtomicU64, Ordering};

/// Tries before a waiter parks: a hold lasts a few microseconds where the holder runs, and a longer
/// one means that it does not run.
#[cfg(not(loom))]
const SPINS: u32 = 64;
#[cfg(loom)]
const SPINS: u32 = 0;

/// The bit of the lock.
pub const LOCK: u64 = 1;
/// Somebody waits for the lock.
pub const WAITER: u64 = 1 << 1;

/// What a word says, but for the bits [`LOCK`] and [`WAITER`].
pub trait Word: Copy {
    /// What these bits say.
    fn from_bits(bits: u64) -> Self;
    /// Its bits.
    fn bits(self) -> u64;
}

/// A locked word. Dropping it unlocks without a change.
#[must_use]
pub struct Guard<'a, W: Word> {
    place: &'a AtomicU64,
    parking: &'a Parking,
    word: W,
}

/// Locks a word.
#[inline]
pub fn lock<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Guard<'a, W> {
    match try_lock(place, parking) {
        Some(guard) => guard,
        None => lock_contended(place, parking),
    }
}

/// Locks a word if nobody holds it. Also `None` where somebody was quicker.
#[inline]
pub fn try_lock<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Option<Guard<'a, W>> {
    // Relaxed: only a guess for the exchange below, which cannot succeed where it says "locked" or
    // "waited for".
    let seen = place.load(Ordering::Relaxed) & !(LOCK | WAITER);
    // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure:
    // nothing is used).
    let taken = place.compare_exchange(seen, seen | LOCK, Ordering::Acquire, Ordering::Relaxed);
    // Made only where it is true: a guard that is dropped unlocks.
    taken.is_ok().then(|| Guard { place, parking, word: W::from_bits(seen) })
}

#[cold]
fn lock_contended<'a, W: Word>(place: &'a AtomicU64, parking: &'a Parking) -> Guard<'a, W> {
    let mut spins = 0;
    loop {
        // Relaxed: only a guess for the exchanges below.
        let seen = place.load(Ordering::Relaxed);
        if seen & LOCK == 0 {
            // Acquire: pairs with the Release of the unlock that published the word (Relaxed on
            // failure: retried).
            if place.compare_exchange(seen, seen | LOCK, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Guard { place, parking, word: W::from_bits(seen) };
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
            let seen = place.load(Ordering::Relaxed);
            seen & LOCK != 0
                && (seen & WAITER != 0
                    // Relaxed: the bit carries no data; the bucket's lock orders it against
                    // unlock's slow path.
                    || place.compare_exchange(seen, seen | WAITER, Ordering::Relaxed, Ordering::Relaxed).is_ok())
        });
        #[cfg(loom)]
        yield_now();
    }
}

fn key(place: &AtomicU64) -> usize {
    std::ptr::from_ref(place) as usize
}

impl<W: Word> Guard<'_, W> {
    /// What it says.
    #[inline]
    pub fn word(&self) -> W {
        self.word
    }

    /// Says something else and unlocks it, in one step.
    #[inline]
    pub fn publish(self, new: W) {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.unlock(new);
    }

    #[inline]
    fn unlock(&self, new: W) {
        // The holder knows every bit but WAITER, so one XOR both publishes and unlocks, and keeps a
        // WAITER bit that was set meanwhile.
        let change = (self.word.bits() ^ new.bits()) | LOCK;
        // Release: pairs with the Acquire of the next lock, and of readers. The WAITER bit that comes
        // back carries no data, so this needs no Acquire.
        let before = self.place.fetch_xor(change, Ordering::Release);
        debug_assert!(before & LOCK != 0, "a word that was not locked is unlocked");
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
