//! Simulated atomics. Each access is a scheduling point, at which another task may be selected.

pub use std::sync::atomic::{Ordering, compiler_fence, fence};

use super::schedule::pass_point;

macro_rules! integer {
    ($name:ident, $value:ty) => {
        /// Simulated atomic integer with the interface of `std::sync::atomic`.
        #[derive(Debug, Default, zerocopy::FromZeros)]
        #[repr(transparent)]
        pub struct $name(std::sync::atomic::$name);

        impl $name {
            /// Creates an atomic integer.
            pub const fn new(value: $value) -> Self {
                Self(std::sync::atomic::$name::new(value))
            }
            /// Returns the value.
            pub fn load(&self, order: Ordering) -> $value {
                pass_point();
                self.0.load(order)
            }
            /// Stores `value`.
            pub fn store(&self, value: $value, order: Ordering) {
                pass_point();
                self.0.store(value, order);
            }
            /// Stores `value`, and returns the previous value.
            pub fn swap(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.swap(value, order)
            }
            /// Adds `value` (wrapping), and returns the previous value.
            pub fn fetch_add(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.fetch_add(value, order)
            }
            /// Subtracts `value` (wrapping), and returns the previous value.
            pub fn fetch_sub(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.fetch_sub(value, order)
            }
            /// Stores the bitwise AND with `value`, and returns the previous value.
            pub fn fetch_and(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.fetch_and(value, order)
            }
            /// Stores the bitwise OR with `value`, and returns the previous value.
            pub fn fetch_or(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.fetch_or(value, order)
            }
            /// Stores the bitwise XOR with `value`, and returns the previous value.
            pub fn fetch_xor(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.fetch_xor(value, order)
            }
            /// Stores the larger of the present value and `value`, and returns the previous value.
            pub fn fetch_max(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.fetch_max(value, order)
            }
            /// Stores the smaller of the present value and `value`, and returns the previous value.
            pub fn fetch_min(&self, value: $value, order: Ordering) -> $value {
                pass_point();
                self.0.fetch_min(value, order)
            }
            /// Stores `new` if the present value equals `current`, and returns the previous value.
            ///
            /// # Errors
            /// Returns the present value if it differs from `current`.
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                pass_point();
                self.0.compare_exchange(current, new, success, failure)
            }
            /// Does the same as [`compare_exchange`](Self::compare_exchange): unlike in `std`, it
            /// never fails spuriously.
            ///
            /// # Errors
            /// Returns the present value if it differs from `current`.
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }
            /// Stores the value that `update` returns for the present one, and returns the previous
            /// value.
            ///
            /// # Errors
            /// Returns the present value if `update` returns `None`.
            pub fn fetch_update(
                &self,
                set: Ordering,
                fetch: Ordering,
                update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                pass_point();
                self.0.fetch_update(set, fetch, update)
            }
            /// Returns a mutable reference to the value. Not a scheduling point.
            pub fn get_mut(&mut self) -> &mut $value {
                self.0.get_mut()
            }
            /// Consumes the atomic and returns the value. Not a scheduling point.
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
    /// Creates an atomic boolean.
    pub const fn new(value: bool) -> Self {
        Self(std::sync::atomic::AtomicBool::new(value))
    }
    /// Returns the value.
    pub fn load(&self, order: Ordering) -> bool {
        pass_point();
        self.0.load(order)
    }
    /// Stores `value`.
    pub fn store(&self, value: bool, order: Ordering) {
        pass_point();
        self.0.store(value, order);
    }
    /// Stores `value`, and returns the previous value.
    pub fn swap(&self, value: bool, order: Ordering) -> bool {
        pass_point();
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
    /// Creates an atomic pointer.
    pub const fn new(value: *mut T) -> Self {
        Self(std::sync::atomic::AtomicPtr::new(value))
    }
    /// Returns the pointer.
    pub fn load(&self, order: Ordering) -> *mut T {
        pass_point();
        self.0.load(order)
    }
    /// Stores `value`.
    pub fn store(&self, value: *mut T, order: Ordering) {
        pass_point();
        self.0.store(value, order);
    }
    /// Stores `value`, and returns the previous pointer.
    pub fn swap(&self, value: *mut T, order: Ordering) -> *mut T {
        pass_point();
        self.0.swap(value, order)
    }
    /// Stores `new` if the present pointer equals `current`, and returns the previous pointer.
    ///
    /// # Errors
    /// Returns the present pointer if it differs from `current`.
    pub fn compare_exchange(
        &self,
        current: *mut T,
        new: *mut T,
        success: Ordering,
        failure: Ordering,
    ) -> Result<*mut T, *mut T> {
        pass_point();
        self.0.compare_exchange(current, new, success, failure)
    }
    /// Returns a mutable reference to the pointer. Not a scheduling point.
    pub fn get_mut(&mut self) -> &mut *mut T {
        self.0.get_mut()
    }
}
