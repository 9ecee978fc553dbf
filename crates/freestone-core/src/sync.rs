//! Synchronisation types of std, of loom's models, or of the simulation.
//!
//! All code that waits or takes part in a lock protocol imports from here. `RUSTFLAGS="--cfg loom"` turns the
//! same code into a model; capacities are smaller in models, because a model explores every interleaving.
//! `--cfg freestone_sim` makes the code part of a simulation with a seeded scheduler and a virtual clock.

#[cfg(all(freestone_sim, not(loom)))]
use freestone_sim as origin;
#[cfg(not(any(freestone_sim, loom)))]
use std as origin;

#[cfg(not(loom))]
mod real {
    pub use super::origin::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence, fence};
    pub use super::origin::sync::{Arc, Condvar, LazyLock, OnceLock, RwLock, RwLockReadGuard, mpsc};
    pub use super::origin::thread;
    pub use super::origin::thread::yield_now;
    pub use super::origin::time::Instant;
    pub use std::thread_local;
}

#[cfg(loom)]
mod real {
    pub use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::sync::{Arc, Condvar};
    pub use loom::thread::yield_now;
    pub use loom::thread_local;
    // These types are not part of a modelled protocol.
    pub use std::sync::{LazyLock, OnceLock, RwLock, RwLockReadGuard, mpsc};
    pub use std::thread;
    pub use std::time::Instant;
}

pub use real::*;

/// A mutex without poisoning. The guarded data is consistent at every step, or the panic that broke it ends
/// the use of the device in any case.
#[derive(Debug)]
pub struct Mutex<T>(Inner<T>);

#[cfg(not(loom))]
type Inner<T> = origin::sync::Mutex<T>;
#[cfg(loom)]
type Inner<T> = loom::sync::Mutex<T>;
/// Guard of a locked [`Mutex`].
#[cfg(not(loom))]
pub type MutexGuard<'a, T> = origin::sync::MutexGuard<'a, T>;
/// Guard of a locked [`Mutex`].
#[cfg(loom)]
pub type MutexGuard<'a, T> = loom::sync::MutexGuard<'a, T>;

impl<T> Mutex<T> {
    /// Creates an unlocked mutex.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self(Inner::new(value))
    }

    /// Creates an unlocked mutex.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self(Inner::new(value))
    }

    /// Locks the mutex, waiting for the present holder.
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Locks the mutex, or returns `None` if another thread holds it.
    #[cfg(not(loom))]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        match self.0.try_lock() {
            Ok(guard) => Some(guard),
            Err(std::sync::TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(std::sync::TryLockError::WouldBlock) => None,
        }
    }
}

impl<T: Default> Default for Mutex<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}
