//! Simulated locks, condition variables, channels and atomics, with the interfaces of `std::sync`.

use std::fmt;
use std::ops::{Deref, DerefMut};
pub use std::sync::{Arc, Barrier, LockResult, PoisonError, TryLockError, TryLockResult, Weak};
use std::time::Duration;

use super::schedule;
pub use once::{LazyLock, OnceLock};

pub mod atomic;
pub mod mpsc;
mod once;

/// Returns the key (address) of an object on which tasks wait.
pub(super) fn key_of<T: ?Sized>(thing: &T) -> usize {
    std::ptr::from_ref(thing).cast::<()>() as usize
}

/// A wait on a condition variable ends spuriously with probability 1 in this number.
const SPURIOUS_ONE_IN: u64 = 64;

/// Simulated `std::sync::Mutex`.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    /// Makes the address of the mutex, which is its key, different from that of the content.
    _address: u8,
    inner: std::sync::Mutex<T>,
}

/// Simulated `std::sync::MutexGuard`.
pub struct MutexGuard<'a, T: ?Sized> {
    lock: &'a Mutex<T>,
    /// Guard of the real mutex; `None` only while this guard is being dropped.
    inner: Option<std::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Creates an unlocked mutex with this value.
    pub const fn new(value: T) -> Self {
        Self { _address: 0, inner: std::sync::Mutex::new(value) }
    }

    /// Consumes the mutex and returns the value.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the lock.
    pub fn into_inner(self) -> LockResult<T> {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Locks the mutex; waits if another thread holds the lock.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the lock.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        if schedule::current_task().is_none() {
            return self.wrap_guard(self.inner.lock());
        }
        schedule::pass_point();
        self.lock_simulated()
    }

    fn lock_simulated(&self) -> LockResult<MutexGuard<'_, T>> {
        loop {
            match self.try_lock_simulated() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(poisoned)) => return Err(poisoned),
                Err(TryLockError::WouldBlock) => schedule::block(key_of(self), None),
            };
        }
    }

    fn try_lock_simulated(&self) -> TryLockResult<MutexGuard<'_, T>> {
        match self.inner.try_lock() {
            Ok(guard) => Ok(MutexGuard { lock: self, inner: Some(guard) }),
            Err(TryLockError::Poisoned(poisoned)) => {
                let guard = MutexGuard { lock: self, inner: Some(poisoned.into_inner()) };
                Err(TryLockError::Poisoned(PoisonError::new(guard)))
            }
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
        }
    }

    fn wrap_guard<'a>(
        &'a self,
        result: LockResult<std::sync::MutexGuard<'a, T>>,
    ) -> LockResult<MutexGuard<'a, T>> {
        match result {
            Ok(guard) => Ok(MutexGuard { lock: self, inner: Some(guard) }),
            Err(poisoned) => {
                Err(PoisonError::new(MutexGuard { lock: self, inner: Some(poisoned.into_inner()) }))
            }
        }
    }

    /// Locks the mutex if no thread holds the lock.
    ///
    /// # Errors
    /// Fails if the lock is held, or if a thread panicked while it held the lock.
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        schedule::pass_point();
        self.try_lock_simulated()
    }

    /// Returns a mutable reference to the value, without locking.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the lock.
    pub fn get_mut(&mut self) -> LockResult<&mut T> {
        self.inner.get_mut()
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.inner.fmt(f)
    }
}

impl<T: ?Sized> Deref for MutexGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held until dropped")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("held until dropped")
    }
}

impl<T: ?Sized> Drop for MutexGuard<'_, T> {
    fn drop(&mut self) {
        if self.inner.take().is_some() {
            schedule::wake(key_of(self.lock), true);
        }
    }
}

impl<T: ?Sized + fmt::Debug> fmt::Debug for MutexGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// Simulated `std::sync::Condvar`.
#[derive(Debug, Default)]
pub struct Condvar {
    _address: u8,
    inner: std::sync::Condvar,
}

/// Simulated `std::sync::WaitTimeoutResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// Returns true if the wait ended by the timeout, not by a wake-up.
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Creates a condition variable without waiting threads.
    pub const fn new() -> Self {
        Self { _address: 0, inner: std::sync::Condvar::new() }
    }

    /// Releases the lock, waits until notified, and locks again. Spurious wake-ups are possible.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the mutex.
    pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let lock = guard.lock;
        if schedule::current_task().is_none() {
            let inner = guard.inner.take().expect("held until dropped");
            return lock.wrap_guard(self.inner.wait(inner));
        }
        drop(guard);
        if !schedule::one_in(SPURIOUS_ONE_IN) {
            schedule::block(key_of(self), None);
        }
        lock.lock_simulated()
    }

    /// Waits until `condition` returns false.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the mutex.
    pub fn wait_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<MutexGuard<'a, T>> {
        while condition(&mut guard) {
            guard = self.wait(guard)?;
        }
        Ok(guard)
    }

    /// Releases the lock, waits until notified or for `most`, and locks again. Spurious wake-ups
    /// are possible.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the mutex.
    pub fn wait_timeout<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        most: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let lock = guard.lock;
        let (taken, timed_out) = if schedule::current_task().is_none() {
            let inner = guard.inner.take().expect("held until dropped");
            match self.inner.wait_timeout(inner, most) {
                Ok((inner, waited)) => (lock.wrap_guard(Ok(inner)), waited.timed_out()),
                Err(poisoned) => {
                    let (inner, waited) = poisoned.into_inner();
                    (lock.wrap_guard(Err(PoisonError::new(inner))), waited.timed_out())
                }
            }
        } else {
            drop(guard);
            let spurious = schedule::one_in(SPURIOUS_ONE_IN);
            let timed_out = !spurious && schedule::block(key_of(self), Some(most));
            (lock.lock_simulated(), timed_out)
        };
        match taken {
            Ok(guard) => Ok((guard, WaitTimeoutResult(timed_out))),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), WaitTimeoutResult(timed_out)))),
        }
    }

    /// Waits until `condition` returns false, at most for `most`.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the mutex.
    pub fn wait_timeout_while<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        most: Duration,
        mut condition: impl FnMut(&mut T) -> bool,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let until = super::time::Instant::now() + most;
        loop {
            if !condition(&mut guard) {
                return Ok((guard, WaitTimeoutResult(false)));
            }
            let left = until.saturating_duration_since(super::time::Instant::now());
            if left.is_zero() {
                return Ok((guard, WaitTimeoutResult(true)));
            }
            guard = self.wait_timeout(guard, left)?.0;
        }
    }

    /// Wakes one thread that waits on this condition variable.
    pub fn notify_one(&self) {
        schedule::wake(key_of(self), false);
        self.inner.notify_one();
    }

    /// Wakes all threads that wait on this condition variable.
    pub fn notify_all(&self) {
        schedule::wake(key_of(self), true);
        self.inner.notify_all();
    }
}

/// Simulated `std::sync::RwLock`.
#[derive(Debug, Default)]
pub struct RwLock<T> {
    _address: u8,
    inner: std::sync::RwLock<T>,
}

/// Simulated `std::sync::RwLockReadGuard`.
pub struct RwLockReadGuard<'a, T> {
    lock: &'a RwLock<T>,
    inner: Option<std::sync::RwLockReadGuard<'a, T>>,
}

/// Simulated `std::sync::RwLockWriteGuard`.
pub struct RwLockWriteGuard<'a, T> {
    lock: &'a RwLock<T>,
    inner: Option<std::sync::RwLockWriteGuard<'a, T>>,
}

impl<T> RwLock<T> {
    /// Creates an unlocked reader-writer lock.
    pub const fn new(value: T) -> Self {
        Self { _address: 0, inner: std::sync::RwLock::new(value) }
    }

    /// Locks for reading; waits while a writer holds the lock.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the lock for writing.
    pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        let guard = |inner| RwLockReadGuard { lock: self, inner: Some(inner) };
        if schedule::current_task().is_none() {
            return self.inner.read().map(guard).map_err(|p| PoisonError::new(guard(p.into_inner())));
        }
        schedule::pass_point();
        loop {
            match self.inner.try_read() {
                Ok(inner) => return Ok(guard(inner)),
                Err(TryLockError::Poisoned(p)) => return Err(PoisonError::new(guard(p.into_inner()))),
                Err(TryLockError::WouldBlock) => schedule::block(key_of(self), None),
            };
        }
    }

    /// Locks for reading if no writer holds the lock.
    ///
    /// # Errors
    /// Fails if a writer holds the lock, or if a thread panicked while it held the lock for
    /// writing.
    pub fn try_read(&self) -> TryLockResult<RwLockReadGuard<'_, T>> {
        schedule::pass_point();
        let guard = |inner| RwLockReadGuard { lock: self, inner: Some(inner) };
        self.inner.try_read().map(guard).map_err(|error| match error {
            TryLockError::Poisoned(p) => PoisonError::new(guard(p.into_inner())).into(),
            TryLockError::WouldBlock => TryLockError::WouldBlock,
        })
    }

    /// Locks for writing if no thread holds the lock.
    ///
    /// # Errors
    /// Fails if the lock is held, or if a thread panicked while it held the lock for writing.
    pub fn try_write(&self) -> TryLockResult<RwLockWriteGuard<'_, T>> {
        schedule::pass_point();
        let guard = |inner| RwLockWriteGuard { lock: self, inner: Some(inner) };
        self.inner.try_write().map(guard).map_err(|error| match error {
            TryLockError::Poisoned(p) => PoisonError::new(guard(p.into_inner())).into(),
            TryLockError::WouldBlock => TryLockError::WouldBlock,
        })
    }

    /// Locks for writing; waits while readers or a writer hold the lock.
    ///
    /// # Errors
    /// Fails if a thread panicked while it held the lock for writing.
    pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        let guard = |inner| RwLockWriteGuard { lock: self, inner: Some(inner) };
        if schedule::current_task().is_none() {
            return self.inner.write().map(guard).map_err(|p| PoisonError::new(guard(p.into_inner())));
        }
        schedule::pass_point();
        loop {
            match self.inner.try_write() {
                Ok(inner) => return Ok(guard(inner)),
                Err(TryLockError::Poisoned(p)) => return Err(PoisonError::new(guard(p.into_inner()))),
                Err(TryLockError::WouldBlock) => schedule::block(key_of(self), None),
            };
        }
    }
}

impl<T> Deref for RwLockReadGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held until dropped")
    }
}

impl<T> Drop for RwLockReadGuard<'_, T> {
    fn drop(&mut self) {
        if self.inner.take().is_some() {
            schedule::wake(key_of(self.lock), true);
        }
    }
}

impl<T> Deref for RwLockWriteGuard<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.inner.as_ref().expect("held until dropped")
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("held until dropped")
    }
}

impl<T> Drop for RwLockWriteGuard<'_, T> {
    fn drop(&mut self) {
        if self.inner.take().is_some() {
            schedule::wake(key_of(self.lock), true);
        }
    }
}
