//! Requests that wait for space, and their wake-up.
//!
//! # Protocol
//! A request without space sets `wanted`, checks again, and only then queues itself. A thread that
//! frees space checks `wanted` afterwards. Both use a read-modify-write of `wanted`, so one comes
//! second and sees what the other did before: either the request finds the space at its second
//! check, or the freeing thread counts a new generation and takes the queue. The request does this
//! under `waiting`; the freeing thread counts before it locks `waiting`. No request is therefore
//! queued behind a generation that it has not seen.

use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Requests that wait for space.
///
/// Lock order: `waiting` is a leaf lock; requests are resumed and dropped outside it.
pub(super) struct SpaceWaiters<T> {
    /// Not 0 if a thread that frees space must wake waiters.
    wanted: AtomicU32,
    /// Number of wake-ups while space was wanted, starting at 1.
    generation: AtomicU64,
    waiting: Mutex<Vec<T>>,
}

impl<T> Default for SpaceWaiters<T> {
    fn default() -> Self {
        Self { wanted: AtomicU32::new(0), generation: AtomicU64::new(1), waiting: Mutex::new(Vec::new()) }
    }
}

impl<T> SpaceWaiters<T> {
    /// Queues a request that found no space. `seen` returns its last seen generation, initially 0.
    /// Returns the request if it must check for space again first.
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

    /// Requests a wake-up from the next thread that frees space.
    pub fn request_wake(&self) {
        self.wanted.swap(1, Ordering::SeqCst);
    }

    /// Returns the generation: the number of wake-ups.
    pub fn generation(&self) -> u64 {
        self.generation.load(Ordering::SeqCst)
    }

    /// Returns true if freed space must be announced.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // Relaxed: saves a swap. A missed waiter is found at the next tick.
        self.wanted.load(Ordering::Relaxed) != 0
    }

    /// Counts a wake-up and returns the requests to retry.
    pub fn wake_all(&self) -> Vec<T> {
        if self.wanted.swap(0, Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        self.generation.fetch_add(1, Ordering::SeqCst);
        self.take(|_| true)
    }

    /// Removes requests that must retry although no space was freed.
    pub fn take(&self, is: impl Fn(&T) -> bool) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let (now, still) = std::mem::take(&mut *waiting).into_iter().partition(is);
        *waiting = still;
        now
    }
}
