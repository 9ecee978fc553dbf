//! dm-snapshot's locks around the exceptions of one snapshot. Its semaphores that spin before they
//! sleep are std's mutex and read-write lock here, its bits in the heads of buckets a byte each.

use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

use freestone_core::variants::spinlocks::Bit;
use freestone_core::variants::{self, Exceptions as Choice};

/// Buckets of the table of complete exceptions, at the least and at the most: the kernel's for a COW
/// device of 1 GiB with chunks of 4 KiB.
const BUCKETS: [u64; 2] = [64, 262_144];
/// That of pending ones has so many times fewer.
const PENDING_PART: u64 = 8;
/// So many chunks in a row are in one bucket of complete exceptions, which keeps runs.
const RUN_CHUNKS: u64 = 256;

/// The locks of one snapshot.
pub enum Locks {
    /// A slot's own.
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
pub enum Held<'a> {
    None,
    One { _one: MutexGuard<'a, ()> },
    Timed { _timer: Timer, _one: MutexGuard<'a, ()> },
    // Dropped from the inner to the outer one.
    Buckets { _pending: HeldBit<'a>, _complete: HeldBit<'a>, _shared: RwLockReadGuard<'a, ()> },
}

/// Counts, when it is dropped, how long it lived.
pub struct Timer(Instant);

impl Drop for Timer {
    fn drop(&mut self) {
        variants::exception_let_go(self.0);
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
    /// Those of a snapshot of so many chunks.
    pub fn of(choice: Choice, chunks: u64) -> Self {
        match choice {
            Choice::Ours => Self::Ours,
            Choice::One => Self::One(Mutex::default()),
            Choice::Timed => Self::Timed(Mutex::default()),
            Choice::Buckets => {
                let [least, most] = BUCKETS;
                let of = |wanted: u64| {
                    let count = 1 << wanted.clamp(least, most).ilog2();
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

    /// Whether they stand in the place of the product's.
    #[inline]
    pub fn are_the_kernels(&self) -> bool {
        !matches!(self, Self::Ours)
    }

    /// Takes what guards a chunk.
    #[inline]
    pub fn take(&self, chunk: u64) -> Held<'_> {
        match self {
            Self::Ours => Held::None,
            Self::One(one) => Held::One { _one: one.lock().unwrap_or_else(PoisonError::into_inner) },
            Self::Timed(one) => {
                let one = one.lock().unwrap_or_else(PoisonError::into_inner);
                Held::Timed { _timer: Timer(Instant::now()), _one: one }
            }
            Self::Buckets { shared, complete, pending } => {
                let shared = shared.read().unwrap_or_else(PoisonError::into_inner);
                // Their numbers are powers of two.
                let complete = &complete[(chunk / RUN_CHUNKS) as usize & (complete.len() - 1)];
                let complete = HeldBit::lock(complete);
                let pending = HeldBit::lock(&pending[chunk as usize & (pending.len() - 1)]);
                Held::Buckets { _pending: pending, _complete: complete, _shared: shared }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;

    use super::*;

    /// Whether another thread gets the lock of one chunk while that of another is held.
    fn gets_it(locks: &Locks, held: u64, wanted: u64) -> bool {
        let got = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let first = locks.take(held);
            scope.spawn(|| {
                drop(locks.take(wanted));
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
    fn one_lock_keeps_everybody_out() {
        let locks = Locks::of(Choice::One, 1 << 20);
        assert!(!gets_it(&locks, 3, 3) && !gets_it(&locks, 3, 70_000));
        assert!(gets_it(&Locks::of(Choice::Ours, 1 << 20), 3, 3), "the slot's own lock is not here");
    }

    #[test]
    fn buckets_keep_their_own_chunks_apart() {
        let locks = Locks::of(Choice::Buckets, 1 << 20);
        assert!(!gets_it(&locks, 3, 3));
        // In the same run of complete ones; in the same bucket of pending ones.
        assert!(!gets_it(&locks, 0, 255) && !gets_it(&locks, 0, 131_072));
        assert!(gets_it(&locks, 0, 256));
    }

    #[test]
    fn the_time_under_the_lock_is_taken() {
        let locks = Locks::of(Choice::Timed, 8);
        variants::exceptions_held();
        let held = locks.take(1);
        std::thread::sleep(Duration::from_millis(5));
        drop(held);
        drop(locks.take(2));
        let (time, count) = variants::exceptions_held();
        assert!(time >= Duration::from_millis(5) && count == 2, "{time:?} {count}");
    }
}
