//! Requests that wait until there is room again, and who tells them.
//!
//! # Protocol
//! Who found no room says that room is wanted, looks once more, and only then is queued. Who makes
//! room looks after that whether it is wanted. Both do so by a read-modify-write of `wanted`, so one
//! of them comes second and sees what the other did before: either who wants room finds it at the
//! second look, or who makes it counts that and takes the queue. Both happen under `waiting`, or
//! before it is locked to take the queue, so nobody is queued behind a count that he has not seen.

use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Requests that wait for room.
///
/// Lock order: `waiting` is innermost; requests go on, and are dropped, outside of it.
pub(super) struct RoomWaiters<T> {
    /// Not 0: who makes room has to say so.
    wanted: AtomicU32,
    /// How often room may have come while it was wanted, from 1 on.
    times: AtomicU64,
    waiting: Mutex<Vec<T>>,
}

impl<T> Default for RoomWaiters<T> {
    fn default() -> Self {
        Self { wanted: AtomicU32::new(0), times: AtomicU64::new(1), waiting: Mutex::new(Vec::new()) }
    }
}

impl<T> RoomWaiters<T> {
    /// A request that found no room waits. `seen` is where it keeps how often room had come, at
    /// first 0. Returned: it looks again first.
    pub fn wait(&self, mut request: T, seen: impl FnOnce(&mut T) -> &mut u64) -> Option<T> {
        let mut waiting = self.waiting.lock();
        self.want();
        let times = self.times();
        if std::mem::replace(seen(&mut request), times) != times {
            return Some(request);
        }
        waiting.push(request);
        None
    }

    /// From now on who makes room says so.
    pub fn want(&self) {
        self.wanted.swap(1, Ordering::SeqCst);
    }

    /// How often room may have come.
    pub fn times(&self) -> u64 {
        self.times.load(Ordering::SeqCst)
    }

    /// Whether there is anybody to tell of room.
    #[inline]
    pub fn is_wanted(&self) -> bool {
        // Relaxed: saves a swap. What is missed is seen at the next tick.
        self.wanted.load(Ordering::Relaxed) != 0
    }

    /// Room may have come. Returns who tries again.
    pub fn room_came(&self) -> Vec<T> {
        if self.wanted.swap(0, Ordering::SeqCst) == 0 {
            return Vec::new();
        }
        self.times.fetch_add(1, Ordering::SeqCst);
        self.take(|_| true)
    }

    /// Takes out requests that are to try again although no room has come.
    pub fn take(&self, is: impl Fn(&T) -> bool) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        let (now, still) = std::mem::take(&mut *waiting).into_iter().partition(is);
        *waiting = still;
        now
    }
}
