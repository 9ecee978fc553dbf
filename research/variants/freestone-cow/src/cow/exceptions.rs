//! `cow::exceptions` with a choice: the product's own file, or the locks that dm-snapshot had.
//!
//! The table is the product's in all of them. With the kernel's locks its slots have none
//! (`variants::Lock::Outer`), and the lock is taken where the kernel takes it: once to find and begin
//! an exception, once to complete it, and once where a complete one is found. A look that finds none
//! takes no lock by itself, as what follows it is the one that begins the exception. So a write to the
//! origin takes the lock three times and one to the snapshot twice, as there.

mod locks;
mod ours;

use freestone_core::device::Result;
use freestone_core::slot::Common;
use freestone_core::sync::Arc;
use freestone_core::variants;

use self::locks::{Held, Locks};
pub use self::ours::{CHUNKS_MAX, Exception};

/// The exceptions of a snapshot. `W` is what waits for a pending one.
///
/// Lock order: `locks`, then what the product has under the lock of a slot.
pub struct Exceptions<W> {
    ours: ours::Exceptions<W>,
    locks: Locks,
}

/// A chunk that is locked.
#[must_use]
pub struct Locked<'a, W> {
    // In this order: what is inside is let go first.
    ours: ours::Locked<'a, W>,
    held: Held<'a>,
}

impl<W> Exceptions<W> {
    /// As in the product's file, with the lock that is chosen now.
    pub fn new(common: Arc<Common>, chunks: u64) -> Result<Self> {
        let locks = Locks::of(variants::exceptions(), chunks);
        Ok(Self { ours: ours::Exceptions::new(common, chunks)?, locks })
    }

    pub fn load(&self, old: u64, new: u64) -> Result<()> {
        let _held = self.locks.take(old);
        self.ours.load(old, new)
    }

    #[inline]
    pub fn get(&self, chunk: u64) -> Exception {
        let seen = self.ours.get(chunk);
        if !self.locks.are_the_kernels() || seen.chunk().is_none() {
            return seen;
        }
        let _held = self.locks.take(chunk);
        self.ours.get(chunk)
    }

    pub fn none_complete(&self, first: u64, end: u64) -> bool {
        let _held = self.locks.take(first);
        self.ours.none_complete(first, end)
    }

    /// Under the lock of its first chunk, where that has an exception.
    pub fn run(&self, first: u64, end: u64) -> (Option<u64>, u64) {
        let seen = self.ours.run(first, end);
        if !self.locks.are_the_kernels() || seen.0.is_none() {
            return seen;
        }
        let _held = self.locks.take(first);
        self.ours.run(first, end)
    }

    #[inline]
    pub fn lock(&self, chunk: u64) -> Result<Locked<'_, W>> {
        let held = self.locks.take(chunk);
        Ok(Locked { ours: self.ours.lock(chunk)?, held })
    }

    #[inline]
    pub fn lock_present(&self, chunk: u64) -> Option<Locked<'_, W>> {
        let held = self.locks.take(chunk);
        Some(Locked { ours: self.ours.lock_present(chunk)?, held })
    }

    pub fn mark(&self, chunk: u64, merging: bool) {
        let _held = self.locks.take(chunk);
        self.ours.mark(chunk, merging);
    }

    pub fn land(&self, chunk: u64, new: Option<u64>) -> Vec<W> {
        let _held = self.locks.take(chunk);
        self.ours.land(chunk, new)
    }
}

impl<W> Locked<'_, W> {
    #[inline]
    pub fn now(&self) -> Exception {
        self.ours.now()
    }

    pub fn begin(self, waiter: W) {
        let Self { ours, held } = self;
        ours.begin(waiter);
        drop(held);
    }

    pub fn wait(self, waiter: W) {
        let Self { ours, held } = self;
        ours.wait(waiter);
        drop(held);
    }

    pub fn mark(self, merging: bool) {
        let Self { ours, held } = self;
        ours.mark(merging);
        drop(held);
    }

    pub fn forget(self) {
        let Self { ours, held } = self;
        ours.forget();
        drop(held);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

    use freestone_core::variants::Exceptions as Choice;

    use super::*;

    const CHUNKS: u64 = 2_000;
    const THREADS: usize = 6;

    /// As requests do: begins it, waits for it or finds it.
    fn make(exceptions: &Exceptions<Arc<AtomicBool>>, chunk: u64, copies: &[AtomicU32]) {
        while exceptions.get(chunk).chunk().is_none() {
            let heard = Arc::new(AtomicBool::new(false));
            let locked = exceptions.lock(chunk).unwrap();
            match locked.now() {
                Exception::None => {
                    locked.begin(Arc::clone(&heard));
                    copies[chunk as usize].fetch_add(1, Ordering::SeqCst);
                    if chunk.is_multiple_of(16) {
                        std::thread::yield_now();
                    }
                    for waiter in exceptions.land(chunk, Some(chunk + 1)) {
                        waiter.store(true, Ordering::SeqCst);
                    }
                }
                Exception::Pending => locked.wait(Arc::clone(&heard)),
                Exception::At(_) | Exception::Merging(_) => continue,
            }
            while !heard.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
        }
    }

    #[test]
    fn with_every_lock_an_exception_is_made_once() {
        for choice in Choice::ALL {
            variants::set_exceptions(choice);
            let exceptions = Exceptions::new(Arc::new(Common::new().unwrap()), CHUNKS).unwrap();
            let copies: Vec<_> = (0..CHUNKS).map(|_| AtomicU32::new(0)).collect();
            std::thread::scope(|scope| {
                for _ in 0..THREADS {
                    scope.spawn(|| (0..CHUNKS).for_each(|chunk| make(&exceptions, chunk, &copies)));
                }
            });
            assert!(copies.iter().all(|copies| copies.load(Ordering::SeqCst) == 1), "{choice:?}");
            assert_eq!(exceptions.get(CHUNKS - 1), Exception::At(CHUNKS), "{choice:?}");
            assert_eq!(exceptions.run(0, CHUNKS), (Some(1), CHUNKS), "{choice:?}");
            assert!(!exceptions.none_complete(0, 1), "{choice:?}");
        }
        variants::set_exceptions(Choice::Ours);
    }
}
