//! One place that chooses between the real synchronisation types and loom's models of them.
//!
//! Everything that takes part in a lock protocol imports from here, so that `RUSTFLAGS="--cfg loom"` turns the
//! same code into a model. Capacities shrink there: a model explores every interleaving.

#[cfg(not(loom))]
mod real {
    pub use std::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
    pub use std::sync::{Arc, Condvar};
    pub use std::thread::yield_now;
    pub use std::thread_local;
}

#[cfg(loom)]
mod real {
    pub use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::sync::{Arc, Condvar};
    pub use loom::thread::yield_now;
    pub use loom::thread_local;
}

pub use real::*;

/// A mutex without poisoning: the data it guards here is kept consistent at every step, or the panic that broke
/// it ends the process's use of that device anyway.
#[derive(Debug)]
pub struct Mutex<T>(Inner<T>);

#[cfg(not(loom))]
type Inner<T> = std::sync::Mutex<T>;
#[cfg(loom)]
type Inner<T> = loom::sync::Mutex<T>;
#[cfg(not(loom))]
pub type MutexGuard<'a, T> = std::sync::MutexGuard<'a, T>;
#[cfg(loom)]
pub type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(Inner::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    #[cfg(not(loom))]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}

/// Waits on `condvar` until notified; may wake up without reason.
pub fn wait<'a, T>(condvar: &Condvar, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
    crate::pin::assert_unpinned();
    condvar.wait(guard).unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}
