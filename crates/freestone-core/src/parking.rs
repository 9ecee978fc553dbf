//! Where threads sleep that wait for a slot: a hashed table of queues, keyed by the slot's address.
//!
//! In user space the holder of a lock can be descheduled at any moment, so nobody spins for long.
//! The slot's word has room for two bits only (locked, somebody waits); the queue behind the second
//! bit is here, as in the "parking lot" of `WebKit` and in the kernel's hashed wait queues.
//!
//! # Invariant
//! For every key: while its bucket is locked, the slot's "somebody waits" bit is set if and only if
//! the queue holds a waiter with that key. Callers keep it by changing the bit only inside
//! `validate` and `release`.

use std::collections::VecDeque;
use std::sync::PoisonError;

use crate::mutants::{self, Mutant};
use crate::sync::{Arc, Condvar, Mutex, OnceLock};

#[cfg(not(any(loom, freestone_sim)))]
const BUCKETS: usize = 256;
/// With one alone it does not matter where slots lie in memory.
#[cfg(any(loom, freestone_sim))]
const BUCKETS: usize = 1;

/// Buckets of waiting threads. One for each family of slot tables.
///
/// Lock order: a bucket's queue, then the waiter's own `woken` flag. Both are held for a few
/// instructions.
#[derive(Default)]
pub struct Parking {
    /// There from the first time on that somebody sleeps.
    buckets: OnceLock<Box<[Mutex<VecDeque<Waiter>>]>>,
}

struct Waiter {
    key: usize,
    thread: Arc<Sleeper>,
}

struct Sleeper {
    woken: Mutex<bool>,
    condvar: Condvar,
}

impl Parking {
    fn bucket(&self, key: usize) -> &Mutex<VecDeque<Waiter>> {
        // Slots are 8 bytes apart; Fibonacci hashing spreads neighbours over the buckets.
        let hash = ((key >> 3) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let buckets = self.buckets.get_or_init(|| (0..BUCKETS).map(|_| Mutex::default()).collect());
        &buckets[(hash >> 56) as usize % BUCKETS]
    }

    /// Sleeps until [`unpark_one`](Self::unpark_one) picks this thread, if `validate` (called with
    /// the bucket locked) still finds a reason to.
    pub fn park(&self, key: usize, validate: impl FnOnce() -> bool) {
        let sleeper;
        {
            let mut queue = self.bucket(key).lock();
            if !validate() {
                return;
            }
            sleeper = Arc::new(Sleeper { woken: Mutex::new(false), condvar: Condvar::new() });
            queue.push_back(Waiter { key, thread: Arc::clone(&sleeper) });
        }
        let mut woken = sleeper.woken.lock();
        while !*woken {
            // Not `pin::wait`: a slot is what a pinned thread may wait for.
            woken = sleeper.condvar.wait(woken).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Wakes the thread that has waited longest for `key`, if any. `release(more)` runs first, with
    /// the bucket locked; `more` says whether others are still waiting for the key after that one.
    pub fn unpark_one(&self, key: usize, release: impl FnOnce(bool)) {
        let next;
        {
            let mut queue = self.bucket(key).lock();
            let mut positions = queue.iter().enumerate().filter(|(_, w)| w.key == key).map(|(i, _)| i);
            let first = positions.next();
            let more = positions.next().is_some();
            release(more);
            next = first.and_then(|i| queue.remove(i));
        }
        if let Some(waiter) = next
            && !mutants::on(Mutant::LostWakeup)
        {
            *waiter.thread.woken.lock() = true;
            waiter.thread.condvar.notify_one();
        }
    }
}
