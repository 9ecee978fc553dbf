//! Locks, condition variables, channels and atomics, with the interfaces of `std::sync`.

use std::fmt;
use std::ops::{Deref, DerefMut};
pub use std::sync::{Arc, Barrier, LockResult, PoisonError, TryLockError, TryLockResult, Weak};
use std::time::Duration;

use super::schedule;
pub use once::{LazyLock, OnceLock};

pub mod atomic;
pub mod mpsc;
mod once;

/// The number by which those are found who wait for this.
pub(super) fn key_of<T: ?Sized>(thing: &T) -> usize {
    std::ptr::from_ref(thing).cast::<()>() as usize
}

/// One in so many waits ends without a reason, as it may.
const SPURIOUS_ONE_IN: u64 = 64;

/// As `std::sync::Mutex`.
#[derive(Default)]
pub struct Mutex<T: ?Sized> {
    /// Only a place of its own: what the mutex holds may begin where other things do.
    _place: u8,
    inner: std::sync::Mutex<T>,
}

/// As `std::sync::MutexGuard`.
pub struct MutexGuard<'a, T: ?Sized> {
    lock: &'a Mutex<T>,
    /// There until it is dropped.
    inner: Option<std::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    /// Unlocked.
    pub const fn new(value: T) -> Self {
        Self { _place: 0, inner: std::sync::Mutex::new(value) }
    }

    /// What it holds.
    ///
    /// # Errors
    /// A thread panicked while it held it.
    pub fn into_inner(self) -> LockResult<T> {
        self.inner.into_inner()
    }
}

impl<T: ?Sized> Mutex<T> {
    /// Waits until it is free.
    ///
    /// # Errors
    /// A thread panicked while it held it.
    pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
        if schedule::me().is_none() {
            return self.held(self.inner.lock());
        }
        schedule::point();
        self.take()
    }

    fn take(&self) -> LockResult<MutexGuard<'_, T>> {
        loop {
            match self.try_take() {
                Ok(guard) => return Ok(guard),
                Err(TryLockError::Poisoned(poisoned)) => return Err(poisoned),
                Err(TryLockError::WouldBlock) => schedule::block(key_of(self), None),
            };
        }
    }

    fn try_take(&self) -> TryLockResult<MutexGuard<'_, T>> {
        match self.inner.try_lock() {
            Ok(guard) => Ok(MutexGuard { lock: self, inner: Some(guard) }),
            Err(TryLockError::Poisoned(poisoned)) => {
                let guard = MutexGuard { lock: self, inner: Some(poisoned.into_inner()) };
                Err(TryLockError::Poisoned(PoisonError::new(guard)))
            }
            Err(TryLockError::WouldBlock) => Err(TryLockError::WouldBlock),
        }
    }

    fn held<'a>(&'a self, result: LockResult<std::sync::MutexGuard<'a, T>>) -> LockResult<MutexGuard<'a, T>> {
        match result {
            Ok(guard) => Ok(MutexGuard { lock: self, inner: Some(guard) }),
            Err(poisoned) => {
                Err(PoisonError::new(MutexGuard { lock: self, inner: Some(poisoned.into_inner()) }))
            }
        }
    }

    /// Takes it where it is free.
    ///
    /// # Errors
    /// It is not, or a thread panicked while it held it.
    pub fn try_lock(&self) -> TryLockResult<MutexGuard<'_, T>> {
        schedule::point();
        self.try_take()
    }

    /// What it holds.
    ///
    /// # Errors
    /// A thread panicked while it held it.
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
        self.inner.as_ref().expect("it is held until it is dropped")
    }
}

impl<T: ?Sized> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("it is held until it is dropped")
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

/// As `std::sync::Condvar`.
#[derive(Debug, Default)]
pub struct Condvar {
    _place: u8,
    inner: std::sync::Condvar,
}

/// As `std::sync::WaitTimeoutResult`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WaitTimeoutResult(bool);

impl WaitTimeoutResult {
    /// The time passed.
    pub fn timed_out(&self) -> bool {
        self.0
    }
}

impl Condvar {
    /// Nobody waits.
    pub const fn new() -> Self {
        Self { _place: 0, inner: std::sync::Condvar::new() }
    }

    /// Waits until notified, or for no reason.
    ///
    /// # Errors
    /// A thread panicked while it held the mutex.
    pub fn wait<'a, T>(&self, mut guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
        let lock = guard.lock;
        if schedule::me().is_none() {
            let inner = guard.inner.take().expect("it is held until it is dropped");
            return lock.held(self.inner.wait(inner));
        }
        drop(guard);
        if !schedule::one_in(SPURIOUS_ONE_IN) {
            schedule::block(key_of(self), None);
        }
        lock.take()
    }

    /// As [`wait`](Self::wait), while there is a reason to.
    ///
    /// # Errors
    /// A thread panicked while it held the mutex.
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

    /// As [`wait`](Self::wait), at most so long.
    ///
    /// # Errors
    /// A thread panicked while it held the mutex.
    pub fn wait_timeout<'a, T>(
        &self,
        mut guard: MutexGuard<'a, T>,
        most: Duration,
    ) -> LockResult<(MutexGuard<'a, T>, WaitTimeoutResult)> {
        let lock = guard.lock;
        let (taken, timed_out) = if schedule::me().is_none() {
            let inner = guard.inner.take().expect("it is held until it is dropped");
            match self.inner.wait_timeout(inner, most) {
                Ok((inner, waited)) => (lock.held(Ok(inner)), waited.timed_out()),
                Err(poisoned) => {
                    let (inner, waited) = poisoned.into_inner();
                    (lock.held(Err(PoisonError::new(inner))), waited.timed_out())
                }
            }
        } else {
            drop(guard);
            let spurious = schedule::one_in(SPURIOUS_ONE_IN);
            let timed_out = !spurious && schedule::block(key_of(self), Some(most));
            (lock.take(), timed_out)
        };
        match taken {
            Ok(guard) => Ok((guard, WaitTimeoutResult(timed_out))),
            Err(poisoned) => Err(PoisonError::new((poisoned.into_inner(), WaitTimeoutResult(timed_out)))),
        }
    }

    /// As [`wait_timeout`](Self::wait_timeout), while there is a reason to wait.
    ///
    /// # Errors
    /// A thread panicked while it held the mutex.
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

    /// One of those who wait goes on.
    pub fn notify_one(&self) {
        schedule::wake(key_of(self), false);
        self.inner.notify_one();
    }

    /// All of them go on.
    pub fn notify_all(&self) {
        schedule::wake(key_of(self), true);
        self.inner.notify_all();
    }
}

/// As `std::sync::RwLock`.
#[derive(Debug, Default)]
pub struct RwLock<T> {
    _place: u8,
    inner: std::sync::RwLock<T>,
}

/// As `std::sync::RwLockReadGuard`.
pub struct RwLockReadGuard<'a, T> {
    lock: &'a RwLock<T>,
    inner: Option<std::sync::RwLockReadGuard<'a, T>>,
}

/// As `std::sync::RwLockWriteGuard`.
pub struct RwLockWriteGuard<'a, T> {
    lock: &'a RwLock<T>,
    inner: Option<std::sync::RwLockWriteGuard<'a, T>>,
}

impl<T> RwLock<T> {
    /// Unlocked.
    pub const fn new(value: T) -> Self {
        Self { _place: 0, inner: std::sync::RwLock::new(value) }
    }

    /// Waits until nobody writes.
    ///
    /// # Errors
    /// A thread panicked while it wrote.
    pub fn read(&self) -> LockResult<RwLockReadGuard<'_, T>> {
        let guard = |inner| RwLockReadGuard { lock: self, inner: Some(inner) };
        if schedule::me().is_none() {
            return self.inner.read().map(guard).map_err(|p| PoisonError::new(guard(p.into_inner())));
        }
        schedule::point();
        loop {
            match self.inner.try_read() {
                Ok(inner) => return Ok(guard(inner)),
                Err(TryLockError::Poisoned(p)) => return Err(PoisonError::new(guard(p.into_inner()))),
                Err(TryLockError::WouldBlock) => schedule::block(key_of(self), None),
            };
        }
    }

    /// An error where somebody writes.
    ///
    /// # Errors
    /// Also where a thread panicked while it wrote.
    pub fn try_read(&self) -> TryLockResult<RwLockReadGuard<'_, T>> {
        schedule::point();
        let guard = |inner| RwLockReadGuard { lock: self, inner: Some(inner) };
        self.inner.try_read().map(guard).map_err(|_| TryLockError::WouldBlock)
    }

    /// An error where somebody reads or writes.
    ///
    /// # Errors
    /// Also where a thread panicked while it wrote.
    pub fn try_write(&self) -> TryLockResult<RwLockWriteGuard<'_, T>> {
        schedule::point();
        let guard = |inner| RwLockWriteGuard { lock: self, inner: Some(inner) };
        self.inner.try_write().map(guard).map_err(|_| TryLockError::WouldBlock)
    }

    /// Waits until nobody reads or writes.
    ///
    /// # Errors
    /// A thread panicked while it wrote.
    pub fn write(&self) -> LockResult<RwLockWriteGuard<'_, T>> {
        let guard = |inner| RwLockWriteGuard { lock: self, inner: Some(inner) };
        if schedule::me().is_none() {
            return self.inner.write().map(guard).map_err(|p| PoisonError::new(guard(p.into_inner())));
        }
        schedule::point();
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
        self.inner.as_ref().expect("it is held until it is dropped")
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
        self.inner.as_ref().expect("it is held until it is dropped")
    }
}

impl<T> DerefMut for RwLockWriteGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.inner.as_mut().expect("it is held until it is dropped")
    }
}

impl<T> Drop for RwLockWriteGuard<'_, T> {
    fn drop(&mut self) {
        if self.inner.take().is_some() {
            schedule::wake(key_of(self.lock), true);
        }
    }
}
