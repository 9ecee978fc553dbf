//! Simulated atomics. Each access is a scheduling point.

pub use std::sync::atomic::{Ordering, compiler_fence, fence};

use super::schedule::point;

macro_rules! integer {
    ($name:ident, $value:ty) => {
        /// Simulated atomic of `std::sync::atomic`.
        #[derive(Debug, Default, zerocopy::FromZeros)]
        #[repr(transparent)]
        pub struct $name(std::sync::atomic::$name);

        impl $name {
            /// Creates an atomic.
            pub const fn new(value: $value) -> Self {
                Self(std::sync::atomic::$name::new(value))
            }
            /// As in `std`.
            pub fn load(&self, order: Ordering) -> $value {
                point();
                self.0.load(order)
            }
            /// As in `std`.
            pub fn store(&self, value: $value, order: Ordering) {
                point();
                self.0.store(value, order);
            }
            /// As in `std`.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.swap(value, order)
            }
            /// As in `std`.
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_add(value, order)
            }
            /// As in `std`.
            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_sub(value, order)
            }
            /// As in `std`.
            pub fn fetch_and(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_and(value, order)
            }
            /// As in `std`.
            pub fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_or(value, order)
            }
            /// As in `std`.
            pub fn fetch_xor(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_xor(value, order)
            }
            /// As in `std`.
            pub fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_max(value, order)
            }
            /// As in `std`.
            pub fn fetch_min(&self, value: $value, order: Ordering) -> $value {
                point();
                self.0.fetch_min(value, order)
            }
            /// As in `std`.
            ///
            /// # Errors
            /// The present value, if it differs from `current`.
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                point();
                self.0.compare_exchange(current, new, success, failure)
            }
            /// As in `std`, but never fails spuriously.
            ///
            /// # Errors
            /// The present value, if it differs from `current`.
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }
            /// As in `std`.
            ///
            /// # Errors
            /// The present value, if `update` returns `None`.
            pub fn fetch_update(
                &self,
                set: Ordering,
                fetch: Ordering,
                update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                point();
                self.0.fetch_update(set, fetch, update)
            }
            /// As in `std`.
            pub fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }
            /// As in `std`.
            pub fn into_inner(self) -> $value {
                self.0.into_inner()
            }
        }
    };
}

integer!(AtomicU32, u32);
integer!(AtomicU64, u64);
integer!(AtomicUsize, usize);

/// Simulated `std::sync::atomic::AtomicBool`.
#[derive(Debug, Default)]
pub struct AtomicBool(std::sync::atomic::AtomicBool);

impl AtomicBool {
    /// Creates an atomic.
    pub const fn new(value: bool) -> Self {
        Self(std::sync::atomic::AtomicBool::new(value))
    }
    /// As in `std`.
    pub fn load(&self, order: Ordering) -> bool {
        point();
        self.0.load(order)
    }
    /// As in `std`.
    pub fn store(&self, value: bool, order: Ordering) {
        point();
        self.0.store(value, order);
    }
    /// As in `std`.
    pub fn swap(&self, value: bool, order: Ordering) -> bool {
        point();
        self.0.swap(value, order)
    }
}

/// Simulated `std::sync::atomic::AtomicPtr`.
#[derive(Debug, zerocopy::FromZeros)]
#[repr(transparent)]
pub struct AtomicPtr<T>(std::sync::atomic::AtomicPtr<T>);

impl<T> Default for AtomicPtr<T> {
    fn default() -> Self {
        Self::new(std::ptr::null_mut())
    }
}

impl<T> AtomicPtr<T> {
    /// Creates an atomic.
    pub const fn new(value: *mut T) -> Self {
        Self(std::sync::atomic::AtomicPtr::new(value))
    }
    /// As in `std`.
    pub fn load(&self, order: Ordering) -> *mut T {
        point();
        self.0.load(order)
    }
    /// As in `std`.
    pub fn store(&self, value: *mut T, order: Ordering) {
        point();
        self.0.store(value, order);
    }
    /// As in `std`.
    pub fn swap(&self, value: *mut T, order: Ordering) -> *mut T {
        point();
        self.0.swap(value, order)
    }
    /// As in `std`.
    ///
    /// # Errors
    /// The present value, if it differs from `current`.
    pub fn compare_exchange(
        &self,
        current: *mut T,
        new: *mut T,
        success: Ordering,
        failure: Ordering,
    ) -> Result<*mut T, *mut T> {
        point();
        self.0.compare_exchange(current, new, success, failure)
    }
    /// As in `std`.
    pub fn get_mut(&mut self) -> &mut *mut T {
        self.0.get_mut()
    }
}
