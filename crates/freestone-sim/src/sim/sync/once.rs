//! Simulated `std::sync::OnceLock` and `LazyLock`. With the types of `std`, a second thread that
//! initialises the same cell would sleep in the kernel, which would stop the simulation.

use std::fmt;
use std::ops::Deref;

use super::{Mutex, PoisonError};

/// Simulated `std::sync::OnceLock`.
pub struct OnceLock<T> {
    making: Mutex<()>,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    /// Creates an empty cell, which `set` or `get_or_init` fills.
    pub const fn new() -> Self {
        Self { making: Mutex::new(()), value: std::sync::OnceLock::new() }
    }

    /// Returns the value; `None` if the cell is empty.
    pub fn get(&self) -> Option<&T> {
        self.value.get()
    }

    /// Returns a mutable reference to the value; `None` if the cell is empty.
    pub fn get_mut(&mut self) -> Option<&mut T> {
        self.value.get_mut()
    }

    /// Stores a value in an empty cell.
    ///
    /// # Errors
    /// Returns the new value if the cell already has a value.
    pub fn set(&self, value: T) -> Result<(), T> {
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        self.value.set(value)
    }

    /// Returns the value; creates it with `make` if the cell is empty.
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

    /// Consumes the cell and returns the value; `None` if the cell is empty.
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

/// Simulated `std::sync::LazyLock`.
pub struct LazyLock<T> {
    value: OnceLock<T>,
    make: fn() -> T,
}

impl<T> LazyLock<T> {
    /// Creates a cell whose value `make` creates on first access.
    pub const fn new(make: fn() -> T) -> Self {
        Self { value: OnceLock::new(), make }
    }

    /// Returns the value; creates it on first access.
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
