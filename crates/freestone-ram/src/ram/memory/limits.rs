//! Memory limits of single devices, and the thresholds of eviction.

use std::sync::{Arc, Weak};

use super::config::SetupError;
use crate::ram::geometry::PAGE;
use crate::ram::waiting::device_space::DeviceSpace;
use freestone_core::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Smallest memory limit of a device, in bytes.
const CAP_BYTES_MIN: u64 = 64 << 10;

/// Share of a memory limit, in percent, above which eviction starts.
pub(super) const HIGH_PERCENT: u64 = 95;
/// Share of a memory limit, in percent, at which eviction stops.
pub(in crate::ram) const LOW_PERCENT: u64 = 90;

/// A device's own memory limit and its guaranteed memory, both in bytes charged for objects. A
/// reset or rewind replaces the device's layer but keeps its limits.
pub(in crate::ram) struct Limits {
    /// Memory limit of the device; `u64::MAX` means no limit.
    cap: AtomicU64,
    /// Guaranteed memory: bytes that other devices of the family leave to this device.
    guarantee: AtomicU64,
    pub space: Arc<DeviceSpace>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cap: AtomicU64::new(u64::MAX), guarantee: AtomicU64::new(0), space: Arc::default() }
    }
}

impl Limits {
    pub fn cap(&self) -> u64 {
        // Relaxed: a changed limit applies from the next write on.
        self.cap.load(Ordering::Relaxed)
    }

    pub fn set_cap(&self, bytes: u64) {
        // Relaxed: a changed limit applies from the next write on.
        self.cap.store(bytes, Ordering::Relaxed);
    }

    pub fn guarantee(&self) -> u64 {
        // Relaxed: a changed limit applies from the next write on.
        self.guarantee.load(Ordering::Relaxed)
    }

    pub fn set_guarantee(&self, bytes: u64) {
        // Relaxed: a changed limit applies from the next write on.
        self.guarantee.store(bytes, Ordering::Relaxed);
    }
}

/// Returns the charged bytes from which on a device with the memory limit `cap` evicts pages.
pub(in crate::ram) fn high_mark(cap: u64) -> u64 {
    (cap / 100 * HIGH_PERCENT).min(cap.saturating_sub(2 * PAGE))
}

/// Devices with guaranteed memory in a family (devices that share a memory pool).
///
/// Lock order: before any other lock.
#[derive(Default)]
pub(in crate::ram) struct Guarantees(Mutex<Vec<Weak<Limits>>>);

impl Guarantees {
    /// Sets a device's own memory limit `cap` (0: no limit) and its guaranteed memory, both in
    /// bytes. `total` returns the family's memory limit in bytes.
    ///
    /// # Errors
    /// Fails if `cap` is below 64 KiB, or if `guarantee` is above `cap` or above the part of the
    /// family's limit not guaranteed to others.
    pub fn set(
        &self,
        limits: &Arc<Limits>,
        cap: u64,
        guarantee: u64,
        total: impl Fn() -> u64,
    ) -> Result<(), SetupError> {
        if (1..CAP_BYTES_MIN).contains(&cap) {
            return Err(SetupError::CapTooSmall(cap));
        }
        if cap > 0 && guarantee > cap {
            return Err(SetupError::GuaranteeAboveCap { guarantee, cap });
        }
        let mut all = self.0.lock();
        // The list has only devices with guaranteed memory.
        if guarantee > 0 || limits.guarantee() > 0 {
            all.retain(|known| {
                known.strong_count() > 0 && !std::ptr::eq(known.as_ptr(), Arc::as_ptr(limits))
            });
            let others: u64 = all.iter().filter_map(Weak::upgrade).map(|other| other.guarantee()).sum();
            let total = total();
            if guarantee > 0 && (total == 0 || others.saturating_add(guarantee) > total) {
                if limits.guarantee() > 0 {
                    all.push(Arc::downgrade(limits));
                }
                return Err(SetupError::Guarantee { wanted: guarantee, left: total.saturating_sub(others) });
            }
            all.push(Arc::downgrade(limits));
        }
        limits.set_cap(if cap == 0 { u64::MAX } else { cap });
        limits.set_guarantee(guarantee);
        Ok(())
    }

    /// Returns the bytes guaranteed to all devices together.
    pub fn sum(&self) -> u64 {
        self.0.lock().iter().filter_map(Weak::upgrade).map(|limits| limits.guarantee()).sum()
    }

    /// Locks the limits of the family and its devices against changes.
    pub fn lock(&self) -> MutexGuard<'_, impl Sized> {
        self.0.lock()
    }
}
