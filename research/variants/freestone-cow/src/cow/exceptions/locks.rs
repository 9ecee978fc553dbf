//! dm-snapshot's locks around the exceptions of one snapshot. The kernel's semaphores, which spin
//! before they sleep, are std's mutex and read-write lock here. The kernel's bits in the heads of
//! buckets are a byte each.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

use freestone_core::variants::spinlocks::Bit;
use freestone_core::variants::{self, Exceptions as Choice};

/// Minimum and maximum number of buckets of the table of complete exceptions. The maximum is the
/// kernel's for a COW device of 1 GiB with chunks of 4 KiB.
const BUCKETS: [u64; 2] = [64, 262_144];
/// Divisor of the number of buckets of complete exceptions. The quotient is the number of buckets
/// of pending exceptions.
const PENDING_PART: u64 = 8;
/// Consecutive chunks per bucket of complete exceptions, which stores runs.
const RUN_CHUNKS: u64 = 256;

/// Locks of one snapshot.
pub enum Locks {
    /// The product's locks: each slot has its own lock.
    Ours,
    One(Mutex<()>),
    Timed(Mutex<()>),
    /// Lock order: shared, complete, pending.
    Buckets {
        shared: RwLock<()>,
        complete: Box<[Bit]>,
        pending: Box<[Bit]>,
    },
}

/// Locks that are held.
#[must_use]
pub enum HeldLocks<'a> {
    None,
    One { _one: MutexGuard<'a, ()> },
    Timed { _timer: Timer, _one: MutexGuard<'a, ()> },
    // Fields drop in declaration order, from the innermost lock to the outermost.
    Buckets { _pending: HeldBit<'a>, _complete: HeldBit<'a>, _shared: RwLockReadGuard<'a, ()> },
}

/// Records its lifetime as hold time on drop.
pub struct Timer(Instant);

impl Drop for Timer {
    fn drop(&mut self) {
        variants::add_exception_hold_time(self.0);
    }
}

pub struct HeldBit<'a>(&'a Bit);

impl<'a> HeldBit<'a> {
    #[inline]
    fn lock(bit: &'a Bit) -> Self {
        bit.lock();
        Self(bit)
    }
}

impl Drop for HeldBit<'_> {
    #[inline]
    fn drop(&mut self) {
        self.0.unlock();
    }
}

impl Locks {
    /// Creates the locks of a snapshot of `chunks` chunks.
    pub fn of(choice: Choice, chunks: u64) -> Self {
        match choice {
            Choice::Ours => Self::Ours,
            Choice::One => Self::One(Mutex::default()),
            Choice::Timed => Self::Timed(Mutex::default()),
            Choice::Buckets => {
                let [bucket_min, bucket_max] = BUCKETS;
                let of = |wanted: u64| {
                    let count = 1 << wanted.clamp(bucket_min, bucket_max).ilog2();
                    (0..count).map(|_| Bit::default()).collect()
                };
                Self::Buckets {
                    shared: RwLock::default(),
                    complete: of(chunks),
                    pending: of(chunks / PENDING_PART),
                }
            }
        }
    }

    /// Returns true if the kernel's locks replace the product's.
    #[inline]
    pub fn are_of_kernel(&self) -> bool {
        !matches!(self, Self::Ours)
    }

    /// Acquires the kernel's locks for a chunk; none if the product's locks are selected.
    #[inline]
    pub fn lock(&self, chunk: u64) -> HeldLocks<'_> {
        match self {
            Self::Ours => HeldLocks::None,
            Self::One(one) => HeldLocks::One { _one: one.lock().unwrap_or_else(PoisonError::into_inner) },
            Self::Timed(one) => {
                let one = one.lock().unwrap_or_else(PoisonError::into_inner);
                HeldLocks::Timed { _timer: Timer(Instant::now()), _one: one }
            }
            Self::Buckets { shared, complete, pending } => {
                let shared = shared.read().unwrap_or_else(PoisonError::into_inner);
                // The numbers of buckets are powers of two.
                let complete = &complete[(chunk / RUN_CHUNKS) as usize & (complete.len() - 1)];
                let complete = HeldBit::lock(complete);
                let pending = HeldBit::lock(&pending[chunk as usize & (pending.len() - 1)]);
                HeldLocks::Buckets { _pending: pending, _complete: complete, _shared: shared }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    /// Returns true if another thread can lock chunk `wanted` within 50 ms while chunk `held` is
    /// locked.
    fn can_lock_concurrently(locks: &Locks, held: u64, wanted: u64) -> bool {
        let got = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let first = locks.lock(held);
            scope.spawn(|| {
                drop(locks.lock(wanted));
                got.store(true, Ordering::SeqCst);
            });
            for _ in 0..50 {
                std::thread::sleep(Duration::from_millis(1));
                if got.load(Ordering::SeqCst) {
                    break;
                }
            }
            let got = got.load(Ordering::SeqCst);
            drop(first);
            got
        })
    }

    #[test]
    fn single_lock_excludes_all_chunks() {
        let locks = Locks::of(Choice::One, 1 << 20);
        assert!(!can_lock_concurrently(&locks, 3, 3) && !can_lock_concurrently(&locks, 3, 70_000));
        assert!(
            can_lock_concurrently(&Locks::of(Choice::Ours, 1 << 20), 3, 3),
            "the slot's own lock is not here"
        );
    }

    #[test]
    fn bucket_locks_exclude_only_their_chunks() {
        let locks = Locks::of(Choice::Buckets, 1 << 20);
        assert!(!can_lock_concurrently(&locks, 3, 3));
        // Chunks in the same run of complete exceptions, then chunks in the same bucket of pending
        // ones.
        assert!(!can_lock_concurrently(&locks, 0, 255) && !can_lock_concurrently(&locks, 0, 131_072));
        assert!(can_lock_concurrently(&locks, 0, 256));
    }

    #[test]
    fn timed_lock_records_hold_time() {
        let locks = Locks::of(Choice::Timed, 8);
        variants::take_exception_hold_time();
        let held = locks.lock(1);
        std::thread::sleep(Duration::from_millis(5));
        drop(held);
        drop(locks.lock(2));
        let (time, count) = variants::take_exception_hold_time();
        assert!(time >= Duration::from_millis(5) && count == 2, "{time:?} {count}");
    }
}
