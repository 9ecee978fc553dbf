//! [`cow::exceptions`](super) with selectable locks: the product's lock bit in each slot, or the locks of
//! dm-snapshot.
//!
//! All choices use the product's table. With dm-snapshot's locks, the slots have no locks of their own
//! (`variants::Lock::Outer`), and a lock is acquired where the kernel acquires it: to find and begin an
//! exception, to complete an exception, and to return a complete one. A lookup that finds no exception
//! acquires no lock, because the call that begins the exception follows and acquires the lock. So a write to
//! the origin acquires the lock three times and a write to the snapshot twice, as in the kernel.

mod locks;
mod ours;

use freestone_core::device::Result;
use freestone_core::slot::Common;
use freestone_core::sync::Arc;
use freestone_core::variants;

use self::locks::{HeldLocks, Locks};
pub use self::ours::{CHUNKS_MAX, Exception};

/// Exceptions of a snapshot. `W` is a waiter for a pending exception.
///
/// Lock order: `locks`, then the locks of the product's table.
pub struct Exceptions<W> {
    ours: ours::Exceptions<W>,
    locks: Locks,
}

/// A locked chunk.
#[must_use]
pub struct LockedChunk<'a, W> {
    // Fields are dropped in this order: the inner lock is released first.
    ours: ours::LockedChunk<'a, W>,
    guards: HeldLocks<'a>,
}

impl<W> Exceptions<W> {
    /// Creates the exceptions of a snapshot with the kind of locks that is selected now.
    pub fn new(common: Arc<Common>, chunks: u64) -> Result<Self> {
        let locks = Locks::of(variants::exceptions(), chunks);
        Ok(Self { ours: ours::Exceptions::new(common, chunks)?, locks })
    }

    pub fn load(&self, old: u64, new: u64) -> Result<()> {
        let _guards = self.locks.lock(old);
        self.ours.load(old, new)
    }

    #[inline]
    pub fn get(&self, chunk: u64) -> Exception {
        let found = self.ours.get(chunk);
        if !self.locks.are_of_kernel() || found.chunk().is_none() {
            return found;
        }
        let _guards = self.locks.lock(chunk);
        self.ours.get(chunk)
    }

    pub fn has_none_complete(&self, first: u64, end: u64) -> bool {
        let _guards = self.locks.lock(first);
        self.ours.has_none_complete(first, end)
    }

    /// Like the product's function, but with the kernel's lock of chunk `first` if that chunk has an
    /// exception.
    pub fn run(&self, first: u64, end: u64) -> (Option<u64>, u64) {
        let found = self.ours.run(first, end);
        if !self.locks.are_of_kernel() || found.0.is_none() {
            return found;
        }
        let _guards = self.locks.lock(first);
        self.ours.run(first, end)
    }

    #[inline]
    pub fn lock(&self, chunk: u64) -> Result<LockedChunk<'_, W>> {
        let guards = self.locks.lock(chunk);
        Ok(LockedChunk { ours: self.ours.lock(chunk)?, guards })
    }

    #[inline]
    pub fn lock_present(&self, chunk: u64) -> Option<LockedChunk<'_, W>> {
        let guards = self.locks.lock(chunk);
        Some(LockedChunk { ours: self.ours.lock_present(chunk)?, guards })
    }

    pub fn set_merging(&self, chunk: u64, merging: bool) {
        let _guards = self.locks.lock(chunk);
        self.ours.set_merging(chunk, merging);
    }

    pub fn end_pending(&self, chunk: u64, new: Option<u64>) -> Vec<W> {
        let _guards = self.locks.lock(chunk);
        self.ours.end_pending(chunk, new)
    }
}

impl<W> LockedChunk<'_, W> {
    #[inline]
    pub fn state(&self) -> Exception {
        self.ours.state()
    }

    pub fn set_pending(self, waiter: W) {
        let Self { ours, guards } = self;
        ours.set_pending(waiter);
        drop(guards);
    }

    pub fn add_waiter(self, waiter: W) {
        let Self { ours, guards } = self;
        ours.add_waiter(waiter);
        drop(guards);
    }

    pub fn set_merging(self, merging: bool) {
        let Self { ours, guards } = self;
        ours.set_merging(merging);
        drop(guards);
    }

    pub fn remove(self) {
        let Self { ours, guards } = self;
        ours.remove();
        drop(guards);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use freestone_core::variants::Exceptions as Choice;

    use super::*;

    const CHUNKS: u64 = 2_000;
    const THREADS: usize = 6;

    /// Begins an exception, waits for it or finds it, as a request does.
    fn copy_chunk(exceptions: &Exceptions<Arc<AtomicBool>>, chunk: u64, copies: &[AtomicU32]) {
        while exceptions.get(chunk).chunk().is_none() {
            let completed = Arc::new(AtomicBool::new(false));
            let locked = exceptions.lock(chunk).unwrap();
            match locked.state() {
                Exception::None => {
                    locked.set_pending(Arc::clone(&completed));
                    copies[chunk as usize].fetch_add(1, Ordering::SeqCst);
                    if chunk.is_multiple_of(16) {
                        std::thread::yield_now();
                    }
                    for waiter in exceptions.end_pending(chunk, Some(chunk + 1)) {
                        waiter.store(true, Ordering::SeqCst);
                    }
                }
                Exception::Pending => locked.add_waiter(Arc::clone(&completed)),
                Exception::Complete(_) | Exception::Merging(_) => continue,
            }
            while !completed.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn exception_is_created_once_with_every_lock() {
        for choice in Choice::ALL {
            variants::set_exceptions(choice);
            let exceptions = Exceptions::new(Arc::new(Common::new().unwrap()), CHUNKS).unwrap();
            let copies: Vec<_> = (0..CHUNKS).map(|_| AtomicU32::new(0)).collect();
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| (0..CHUNKS).for_each(|chunk| copy_chunk(&exceptions, chunk, &copies)));
                }
            });
            assert!(copies.iter().all(|copies| copies.load(Ordering::SeqCst) == 1), "{choice:?}");
            assert_eq!(exceptions.get(CHUNKS - 1), Exception::Complete(CHUNKS), "{choice:?}");
            assert_eq!(exceptions.run(0, CHUNKS), (Some(1), CHUNKS), "{choice:?}");
            assert!(!exceptions.has_none_complete(0, 1), "{choice:?}");
        }
        variants::set_exceptions(Choice::Ours);
    }
}
