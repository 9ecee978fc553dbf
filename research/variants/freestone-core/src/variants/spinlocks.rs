//! The kernel's spinning locks, for threads that can be preempted: after some tries a waiter yields
//! its CPU.
//!
//! The read-write lock is the simple one that the kernel had at the time of the experiment: readers
//! increment a count, a writer needs the lock to be free, and waiters do not queue.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};

/// Tries before a waiter yields, as many as the product's lock makes before it parks.
const SPINS: u32 = 64;

/// Calls `done` until it returns true.
#[inline]
pub fn spin_until(mut done: impl FnMut() -> bool) {
    let mut spins = 0;
    while !done() {
        if spins < SPINS {
            spins += 1;
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }
}

/// A spinlock that serves waiters in the order of their tickets.
pub(crate) struct Ticket {
    next: AtomicU16,
    served: AtomicU16,
}

impl Ticket {
    /// Creates an unlocked lock.
    pub const fn new() -> Self {
        Self { next: AtomicU16::new(0), served: AtomicU16::new(0) }
    }

    /// Locks exclusively.
    #[inline]
    pub fn lock(&self) {
        // Relaxed: a ticket is only a number; `served` orders the holders.
        let mine = self.next.fetch_add(1, Ordering::Relaxed);
        // Acquire: pairs with the Release of the previous unlock.
        spin_until(|| self.served.load(Ordering::Acquire) == mine);
    }

    /// Unlocks.
    #[inline]
    pub fn unlock(&self) {
        // Relaxed: only the holder writes `served`.
        let mine = self.served.load(Ordering::Relaxed);
        // Release: pairs with the Acquire of the next lock.
        self.served.store(mine.wrapping_add(1), Ordering::Release);
    }
}

/// A read-write lock: the number of readers, and a bit for the writer.
pub(crate) struct ReadWrite(AtomicU32);

const WRITER: u32 = 1 << 31;

impl ReadWrite {
    /// Creates an unlocked lock.
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Locks for reading, shared with other readers.
    #[inline]
    pub fn lock_shared(&self) {
        // Acquire: pairs with the Release of the previous writer.
        while self.0.fetch_add(1, Ordering::Acquire) & WRITER != 0 {
            // Relaxed: nothing was read under the lock.
            self.0.fetch_sub(1, Ordering::Relaxed);
            // Relaxed: only decides when to try again.
            spin_until(|| self.0.load(Ordering::Relaxed) & WRITER == 0);
        }
    }

    /// Unlocks after reading.
    #[inline]
    pub fn unlock_shared(&self) {
        // Release: pairs with the Acquire of the next writer.
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Locks exclusively.
    #[inline]
    pub fn lock(&self) {
        // Acquire: pairs with the Release of all previous holders (Relaxed on failure: tried
        // again).
        spin_until(|| self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok());
    }

    /// Unlocks after writing.
    #[inline]
    pub fn unlock(&self) {
        // Release: pairs with the Acquire of the next holder. Keeps the count of readers that tried
        // in the meantime.
        self.0.fetch_sub(WRITER, Ordering::Release);
    }
}

/// A spinlock of one bit, as in the kernel's heads of hash buckets.
#[derive(Default)]
pub struct Bit(AtomicBool);

impl Bit {
    /// Locks exclusively.
    #[inline]
    pub fn lock(&self) {
        // Acquire: pairs with the Release of the previous unlock.
        while self.0.swap(true, Ordering::Acquire) {
            // Relaxed: only decides when to try again.
            spin_until(|| !self.0.load(Ordering::Relaxed));
        }
    }

    /// Unlocks.
    #[inline]
    pub fn unlock(&self) {
        // Release: pairs with the Acquire of the next lock.
        self.0.store(false, Ordering::Release);
    }
}
