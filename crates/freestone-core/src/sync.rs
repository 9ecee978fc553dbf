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
    pub use super::origin::sync::{Arc, LazyLock, OnceLock, mpsc};
    pub use super::origin::thread;
    pub use super::origin::thread::yield_now;
    pub use super::origin::time::Instant;
    pub use std::thread_local;
}

#[cfg(loom)]
mod real {
    pub use loom::sync::Arc;
    pub use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
    pub use loom::thread::yield_now;
    pub use loom::thread_local;
    // These types are not part of a modelled protocol.
    pub use std::sync::{LazyLock, OnceLock, mpsc};
    pub use std::thread;
    pub use std::time::Instant;
}

pub use real::*;

use std::sync::{PoisonError, TryLockError, TryLockResult};
use std::time::Duration;

#[cfg(not(loom))]
use origin::sync::{self as locks, self as rw_locks};
// A reader-writer lock is not part of a modelled protocol.
#[cfg(loom)]
use {loom::sync as locks, std::sync as rw_locks};

pub use locks::MutexGuard;
pub use rw_locks::{RwLockReadGuard, RwLockWriteGuard};

/// A mutex without poisoning. The guarded data is consistent at every step, or the panic that broke it ends
/// the use of the device in any case.
#[derive(Debug, Default)]
pub struct Mutex<T>(locks::Mutex<T>);

impl<T> Mutex<T> {
    /// Creates an unlocked mutex.
    #[cfg(not(loom))]
    pub const fn new(value: T) -> Self {
        Self(locks::Mutex::new(value))
    }

    /// Creates an unlocked mutex.
    #[cfg(loom)]
    pub fn new(value: T) -> Self {
        Self(locks::Mutex::new(value))
    }

    /// Locks the mutex, waiting for the present holder.
    #[inline]
    pub fn lock(&self) -> MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the mutex, or returns `None` if another thread holds it.
    #[inline]
    pub fn try_lock(&self) -> Option<MutexGuard<'_, T>> {
        guard_of(self.0.try_lock())
    }

    /// Returns the value of a mutex that is no longer used.
    pub fn into_inner(self) -> T {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A condition variable for [`Mutex`]. Each wait may end spuriously.
#[derive(Debug, Default)]
pub struct Condvar(locks::Condvar);

impl Condvar {
    /// Creates a condition variable without waiters.
    #[cfg(not(loom))]
    pub const fn new() -> Self {
        Self(locks::Condvar::new())
    }

    /// Creates a condition variable without waiters.
    #[cfg(loom)]
    pub fn new() -> Self {
        Self(locks::Condvar::new())
    }

    /// Waits until notified.
    #[inline]
    pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> MutexGuard<'a, T> {
        self.0.wait(guard).unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits while `condition` returns true.
    pub fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> MutexGuard<'a, T> {
        while condition(&mut guard) {
            guard = self.wait(guard);
        }
        guard
    }

    /// Waits until notified, at most for `timeout`. Returns true as well if the time has passed.
    #[inline]
    pub fn wait_timeout<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
    ) -> (MutexGuard<'a, T>, bool) {
        let (guard, waited) = self.0.wait_timeout(guard, timeout).unwrap_or_else(PoisonError::into_inner);
        (guard, waited.timed_out())
    }

    /// Waits while `condition` returns true, at most for `timeout`. Returns true as well if the condition is
    /// still true.
    #[cfg(not(loom))]
    pub fn wait_timeout_while<'a, T>(
        &self,
        guard: MutexGuard<'a, T>,
        timeout: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> (MutexGuard<'a, T>, bool) {
        let waited = self.0.wait_timeout_while(guard, timeout, condition);
        let (guard, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        (guard, waited.timed_out())
    }

    /// Wakes one waiter.
    #[inline]
    pub fn notify_one(&self) {
        self.0.notify_one();
    }

    /// Wakes all waiters.
    #[inline]
    pub fn notify_all(&self) {
        self.0.notify_all();
    }
}

/// A reader-writer lock without poisoning.
#[derive(Debug, Default)]
pub struct RwLock<T>(rw_locks::RwLock<T>);

impl<T> RwLock<T> {
    /// Creates an unlocked lock.
    pub const fn new(value: T) -> Self {
        Self(rw_locks::RwLock::new(value))
    }

    /// Locks for reading, waiting for a writer.
    #[inline]
    pub fn read(&self) -> RwLockReadGuard<'_, T> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks for writing, waiting for the present holders.
    #[inline]
    pub fn write(&self) -> RwLockWriteGuard<'_, T> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks for reading, or returns `None` if a writer holds the lock.
    pub fn try_read(&self) -> Option<RwLockReadGuard<'_, T>> {
        guard_of(self.0.try_read())
    }

    /// Locks for writing, or returns `None` if another thread holds the lock.
    pub fn try_write(&self) -> Option<RwLockWriteGuard<'_, T>> {
        guard_of(self.0.try_write())
    }
}

#[inline]
fn guard_of<G>(tried: TryLockResult<G>) -> Option<G> {
    match tried {
        Ok(guard) => Some(guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}
