//! The lock inside a zone's word: the protocol of a slot's (`slot/lock.rs`), and a try.
//!
//! Only the holder changes any bit but [`WAITER`]. The lock is held for what a request does on its own thread, never while
//! anybody waits for a device.

use super::word::{LOCK, WAITER, Word};
use freestone_core::parking::Parking;
#[cfg(loom)]
use freestone_core::sync::yield_now;
use freestone_core::sync::{AtomicU64, Ordering};

/// Looks before a waiter parks: a hold lasts as long as one inline write.
#[cfg(not(loom))]
const SPINS: u32 = 64;
#[cfg(loom)]
const SPINS: u32 = 0;

/// A locked zone. Dropping it unlocks without a change.
#[must_use]
pub struct Guard<'a> {
    slot: &'a AtomicU64,
    parking: &'a Parking,
    word: Word,
}

/// Locks a zone.
#[inline]
pub fn lock<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> Guard<'a> {
    match try_lock(slot, parking) {
        Some(guard) => guard,
        None => lock_contended(slot, parking),
    }
}

/// Locks a zone if nobody holds it. Also `None` where somebody was quicker.
#[inline]
pub fn try_lock<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> Option<Guard<'a>> {
    // Relaxed: only a guess for the exchange below, which cannot succeed where it says "locked" or "waited for".
    let seen = slot.load(Ordering::Relaxed) & !(LOCK | WAITER);
    // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure: nothing is used).
    let taken = slot.compare_exchange(seen, seen | LOCK, Ordering::Acquire, Ordering::Relaxed);
    // Made only where it is true: a guard that is dropped unlocks.
    taken.is_ok().then(|| Guard { slot, parking, word: Word::from_bits(seen) })
}

#[cold]
fn lock_contended<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> Guard<'a> {
    let mut spins = 0;
    loop {
        // Relaxed: only a guess for the exchanges below.
        let seen = slot.load(Ordering::Relaxed);
        if seen & LOCK == 0 {
            // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure: retried).
            if slot.compare_exchange(seen, seen | LOCK, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return Guard { slot, parking, word: Word::from_bits(seen) };
            }
            continue;
        }
        if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
            continue;
        }
        parking.park(key(slot), || {
            // Relaxed: the bucket's lock orders this against the waker; the exchange below decides.
            let seen = slot.load(Ordering::Relaxed);
            seen & LOCK != 0
                && (seen & WAITER != 0
                    // Relaxed: the bit carries no data; the bucket's lock orders it against unlock's slow path.
                    || slot.compare_exchange(seen, seen | WAITER, Ordering::Relaxed, Ordering::Relaxed).is_ok())
        });
        #[cfg(loom)]
        yield_now();
    }
}

fn key(slot: &AtomicU64) -> usize {
    std::ptr::from_ref(slot) as usize
}

impl Guard<'_> {
    /// What the zone is.
    #[inline]
    pub fn word(&self) -> Word {
        self.word
    }

    /// Says what the zone is now and unlocks it, in one step.
    #[inline]
    pub fn publish(self, new: Word) {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.unlock(new);
    }

    #[inline]
    fn unlock(&self, new: Word) {
        // The holder knows every bit but WAITER, so one XOR both publishes and unlocks, and keeps a WAITER bit that was set
        // meanwhile. Release: pairs with the Acquire of the next lock, and of readers.
        let change = (self.word.bits() ^ new.bits()) | LOCK;
        let before = self.slot.fetch_xor(change, Ordering::Release);
        debug_assert!(before & LOCK != 0, "a zone that was not locked is unlocked");
        if before & WAITER != 0 {
            self.wake();
        }
    }

    #[cold]
    fn wake(&self) {
        self.parking.unpark_one(key(self.slot), |more| {
            if !more {
                // Relaxed: ordered by the bucket's lock against the waiters that set the bit.
                self.slot.fetch_and(!WAITER, Ordering::Relaxed);
            }
        });
    }
}

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        self.unlock(self.word);
    }
}
