//! Queue of requests that wait for space, and their wake-up.
//!
//! # Protocol
//! A request that found no space sets `wanted`, checks for space again, and only then is queued. A
//! thread that frees space checks `wanted` afterwards. Both use a read-modify-write of `wanted`, so
//! the second of them sees what the first did before. Either the request finds the space at its
//! second check, or the freeing thread counts a new generation and takes the queue. The request
//! reads the generation and is queued under the lock of `waiting`; the freeing thread counts before
//! it takes this lock. No request is therefore queued after a generation that it has not seen.

use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Requests of a family (devices that share a memory pool) that wait for space.
///
/// Lock order: `waiting` is a leaf lock; requests are resumed and dropped outside it.
pub(in crate::ram) struct SpaceWaiters<T> {
    /// Not 0 if a thread that frees space must wake the waiters.
    wanted: AtomicU32,
    /// Number of wake-ups so far, plus 1. Wake-ups while `wanted` is 0 do not count.
    generation: AtomicU64,
    waiting: Mutex<Vec<T>>,
}

impl<T> Default for SpaceWaiters<T> {
    fn default() -> Self {
        Self { wanted: AtomicU32::new(0), generation: AtomicU64::new(1), waiting: Mutex::new(Vec::new()) }
    }
}

impl<T> SpaceWaiters<T> {
    /// Queues a request that found no space. `seen` returns the request's field with the last
    /// generation it saw, initially 0. Returns the request if it must check for space again first.
    pub fn wait(&self, mut request: T, seen: impl FnOnce(&mut T) -> &mut u64) -> Option<T> {
        let mut waiting = self.waiting.lock();
        self.request_wake();
        let generation = self.generation();
        if std::mem::replace(seen(&mut request), generation) != generation {
            return Some(request);
        }
        waiting.push(request);
        None
    }

    /// Requests that the next thread that frees space wakes the waiters.
    pub fn request_wake(&self) {
        self.wanted.swap(1, Ordering::SeqCst);
    }

    /// Returns the generation, which increases with every wake-up.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Returns true if a thread that frees space must call [`wake_all`](Self::wake_all).
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // Relaxed: a cheap check before the swap. A waiter that is missed here is retried at the
        // next once-a-second tick.
        self.wanted.load(Ordering::Relaxed) != 0
    }

    /// Counts a wake-up and returns the queued requests, which the caller must retry. Does nothing
    /// if no wake-up was requested.
    pub fn wake_all(&self) -> Vec<T> {
        if self.wanted.swap(0, Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.take(|_| true)
    }

    /// Removes and returns the queued requests for which `is` returns true, which must be retried
    /// although no space was freed.
    pub fn take(&self, is: impl Fn(&T) -> bool) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let (now, still) = std::mem::take(&mut *waiting).into_iter().partition(is);
        *waiting = still;
        now
    }
}
