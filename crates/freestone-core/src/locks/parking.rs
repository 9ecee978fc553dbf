//! Sleeping threads that wait for a slot: a hash table of queues, keyed by the slot's address.
//!
//! In user space a lock holder can be descheduled at any time, so waiters spin only briefly. A slot's word
//! has only two bits for locking (locked, has waiters). The queue of waiters is in this table, as in
//! `WebKit`'s "parking lot" and the kernel's hashed wait queues.
//!
//! # Invariant
//! While a key's bucket is locked, the slot's "has waiters" bit is set if and only if the queue holds a
//! waiter with that key. Callers therefore change the bit only inside `validate` and `release`.

use std::collections::VecDeque;

use crate::mutants::{self, Mutant};
use crate::sync::{Arc, Condvar, Mutex, OnceLock};

#[cfg(not(any(loom, freestone_sim)))]
const BUCKETS: usize = 256;
/// A single bucket makes models independent of slot addresses.
#[cfg(any(loom, freestone_sim))]
const BUCKETS: usize = 1;

/// Hash table of waiting threads, one for each family (a base and its forks, which share memory).
///
/// Lock order: a bucket's queue, then the waiter's `woken` flag. Both are held for a few instructions.
#[derive(Default)]
pub struct Parking {
    /// Allocated when the first thread sleeps.
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
        // Slots are 8 bytes apart, so the low bits of the key are dropped. Fibonacci hashing spreads
        // neighbours over the buckets.
        let hash = ((key >> 3) as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let buckets = self.buckets.get_or_init(|| (0..BUCKETS).map(|_| Mutex::default()).collect());
        &buckets[(hash >> 56) as usize % BUCKETS]
    }

    /// Sleeps until [`unpark_one`](Self::unpark_one) wakes this thread. Returns at once if `validate`, called
    /// with the bucket locked, returns false.
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
            // `pin::wait` is not used, because it panics for pinned threads, which may wait for a slot.
            woken = sleeper.condvar.wait(woken);
        }
    }

    /// Wakes the thread that has waited longest for `key`, if any. Calls `release(more)` first, with the
    /// bucket locked; `more` is true if other threads still wait for the key.
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
