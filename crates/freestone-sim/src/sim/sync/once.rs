//! Values that are made once, with the interfaces of `std::sync::OnceLock` and `LazyLock`. There
//! whoever comes second sleeps in the kernel, which would stop the simulation.

use std::fmt;
use std::ops::Deref;

use super::{Mutex, PoisonError};

/// As `std::sync::OnceLock`.
pub struct OnceLock<T> {
    making: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    /// Empty.
    pub const fn new() -> Self {
        Self { making: Mutex::new(()), value: std::sync::OnceLock::new() }
    }

    /// The value, if there is one.
    pub fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// The value, if there is one.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        self.value.get_mut()
    }

    /// Puts a value in.
    ///
    /// # Errors
    /// There is one: gives the new one back.
    pub fn set(&self, value: T) -> Result<(), T> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        self.value.set(value)
    }

    /// The value, which is made where there is none.
    pub fn get_or_init(&self, make: impl FnOnce() -> T) -> &T {
        if let Some(value) = self.value.get() {
            return value;
        }
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = self.value.get() {
            return value;
        }
        let value = make();
        self.value.get_or_init(|| value)
    }

    /// What it held.
    pub fn into_inner(self) -> Option<T> {
        self.value.into_inner()
    }
}

impl<T> Default for OnceLock<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T: fmt::Debug> fmt::Debug for OnceLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// As `std::sync::LazyLock`.
pub struct LazyLock<T> {
    value: OnceLock<T>,
    make: fn() -> T,
}

impl<T> LazyLock<T> {
    /// Made when it is first looked at.
    pub const fn new(make: fn() -> T) -> Self {
        Self { value: OnceLock::new(), make }
    }

    /// The value.
    pub fn force(this: &Self) -> &T {
        this.value.get_or_init(this.make)
    }
}

impl<T> Deref for LazyLock<T> {
    type Target = T;
    fn deref(&self) -> &T {
        Self::force(self)
    }
}

impl<T: fmt::Debug> fmt::Debug for LazyLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}
