//! The lock inside a slot's word.
//!
//! # Protocol
//! * The lock bit is taken by compare-and-swap. Only the holder changes any bit but [`WAITER`].
//! * A waiter spins briefly, then sets the waiter bit and sleeps, both under its parking bucket's lock.
//! * The holder publishes a new word and unlocks in one atomic step; if that step saw the waiter bit, it wakes one
//!   sleeper, and clears the bit when that was the last one. The woken thread competes for the lock like any other.
//!
//! Lock order: a thread holds at most one slot lock at a time, except where a type that owns several tables
//! states an order among them. Under a slot lock come the pool's locks, never another request's I/O.

use super::word::{LOCK, WAITER, Word};
use crate::parking::Parking;
#[cfg(loom)]
use crate::sync::yield_now;
use crate::sync::{AtomicU64, Ordering};

/// Tries before a waiter parks: a hold lasts a few microseconds where the holder runs, and a longer one means that
/// it does not run.
#[cfg(not(loom))]
const SPINS: u32 = 64;
#[cfg(loom)]
const SPINS: u32 = 0;

/// A locked slot. Dropping it unlocks without a change.
#[must_use]
pub struct SlotGuard<'a> {
    slot: &'a AtomicU64,
    parking: &'a Parking,
    word: Word,
}

/// Locks `slot`.
#[inline]
pub fn lock<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> SlotGuard<'a> {
    // Relaxed: only a guess for the exchange below.
    let seen = slot.load(Ordering::Relaxed) & !(LOCK | WAITER);
    // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure: nothing is used).
    if slot.compare_exchange(seen, seen | LOCK, Ordering::Acquire, Ordering::Relaxed).is_ok() {
        return SlotGuard { slot, parking, word: Word::from_bits(seen) };
    }
    lock_contended(slot, parking)
}

#[cold]
fn lock_contended<'a>(slot: &'a AtomicU64, parking: &'a Parking) -> SlotGuard<'a> {
    let mut spins = 0;
    loop {
        // Relaxed: only a guess for the exchanges below.
        let seen = slot.load(Ordering::Relaxed);
        if seen & LOCK == 0 {
            // Acquire: pairs with the Release of the unlock that published the word (Relaxed on failure: retried).
            if slot.compare_exchange(seen, seen | LOCK, Ordering::Acquire, Ordering::Relaxed).is_ok() {
                return SlotGuard { slot, parking, word: Word::from_bits(seen) };
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

impl SlotGuard<'_> {
    /// What the slot holds.
    #[inline]
    pub fn word(&self) -> Word {
        self.word
    }

    /// Replaces what the slot holds and unlocks it, in one step.
    #[inline]
    pub fn publish(self, new: Word) {
        let guard = std::mem::ManuallyDrop::new(self);
        guard.unlock(new);
    }

    #[inline]
    fn unlock(&self, new: Word) {
        // The holder knows every bit but WAITER, so one XOR both publishes and unlocks, and keeps a WAITER bit that was
        // set meanwhile. Release: pairs with the Acquire of the next lock.
        let change = (self.word.bits() ^ new.bits()) | LOCK;
        let before = self.slot.fetch_xor(change, Ordering::Release);
        debug_assert!(before & LOCK != 0, "a slot that was not locked is unlocked");
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

impl Drop for SlotGuard<'_> {
    fn drop(&mut self) {
        self.unlock(self.word);
    }
}
