//! The kernel's spinning locks, for threads that can lose their CPU: after some tries a waiter yields
//! it.
//!
//! The read-write lock is the simple one that the kernel had when the experiment was made: readers
//! count up, a writer needs it to be free, nobody queues.

use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU32, Ordering};

/// Tries before a waiter yields: as many as the product's lock makes before it parks.
const SPINS: u32 = 64;

/// Calls `done` until it is true.
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

/// A spinlock whose waiters come in the order of their tickets.
pub(crate) struct Ticket {
    next: AtomicU16,
    served: AtomicU16,
}

impl Ticket {
    /// Nobody holds it.
    pub const fn new() -> Self {
        Self { next: AtomicU16::new(0), served: AtomicU16::new(0) }
    }

    /// Takes it alone.
    #[inline]
    pub fn lock(&self) {
        // Relaxed: a ticket is only a number; `served` orders the holders.
        let mine = self.next.fetch_add(1, Ordering::Relaxed);
        // Acquire: pairs with the Release of the unlock before.
        spin_until(|| self.served.load(Ordering::Acquire) == mine);
    }

    /// Lets it go.
    #[inline]
    pub fn unlock(&self) {
        // Relaxed: only the holder writes it.
        let mine = self.served.load(Ordering::Relaxed);
        // Release: pairs with the Acquire of the next lock.
        self.served.store(mine.wrapping_add(1), Ordering::Release);
    }
}

/// A read-write lock: the number of readers, and a bit for the writer.
pub(crate) struct ReadWrite(AtomicU32);

const WRITER: u32 = 1 << 31;

impl ReadWrite {
    /// Nobody holds it.
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Takes it together with other readers.
    #[inline]
    pub fn lock_shared(&self) {
        // Acquire: pairs with the Release of the writer before.
        while self.0.fetch_add(1, Ordering::Acquire) & WRITER != 0 {
            // Relaxed: nothing was read under it.
            self.0.fetch_sub(1, Ordering::Relaxed);
            // Relaxed: only a guess when to try again.
            spin_until(|| self.0.load(Ordering::Relaxed) & WRITER == 0);
        }
    }

    /// Lets it go.
    #[inline]
    pub fn unlock_shared(&self) {
        // Release: pairs with the Acquire of the next writer.
        self.0.fetch_sub(1, Ordering::Release);
    }

    /// Takes it alone.
    #[inline]
    pub fn lock(&self) {
        // Acquire: pairs with the Release of all who held it before (Relaxed on failure: tried
        // again).
        spin_until(|| self.0.compare_exchange(0, WRITER, Ordering::Acquire, Ordering::Relaxed).is_ok());
    }

    /// Lets it go.
    #[inline]
    pub fn unlock(&self) {
        // Release: pairs with the Acquire of whoever is next. A reader that tried meanwhile keeps
        // its count.
        self.0.fetch_sub(WRITER, Ordering::Release);
    }
}

/// A spinlock that is one bit, as the kernel has one in the head of a hash bucket.
#[derive(Default)]
pub struct Bit(AtomicBool);

impl Bit {
    /// Takes it alone.
    #[inline]
    pub fn lock(&self) {
        // Acquire: pairs with the Release of the unlock before.
        while self.0.swap(true, Ordering::Acquire) {
            // Relaxed: only a guess when to try again.
            spin_until(|| !self.0.load(Ordering::Relaxed));
        }
    }

    /// Lets it go.
    #[inline]
    pub fn unlock(&self) {
        // Release: pairs with the Acquire of the next lock.
        self.0.store(false, Ordering::Release);
    }
}
