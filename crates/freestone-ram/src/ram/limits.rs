//! Memory limits of devices, and the thresholds of eviction.

use std::sync::{Arc, Weak};

use super::PAGE;
use super::config::SetupError;
use super::device_space::DeviceSpace;
use freestone_core::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Smallest cap of a device: 64 KiB.
const CAP_BYTES_MIN: u64 = 64 << 10;

/// Eviction starts above this share of a limit, in percent.
pub(super) const HIGH_PERCENT: u64 = 95;
/// Eviction stops at this share of a limit, in percent.
pub(super) const LOW_PERCENT: u64 = 90;

/// The cap and guarantee of a device, in charged bytes. A device keeps its limits when it changes
/// layers.
pub(super) struct Limits {
    /// Cap; `u64::MAX` means no cap.
    cap: AtomicU64,
    /// Guarantee: bytes that other devices leave to this one.
    guarantee: AtomicU64,
    pub room: Arc<DeviceSpace>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cap: AtomicU64::new(u64::MAX), guarantee: AtomicU64::new(0), room: Arc::default() }
    }
}

impl Limits {
    pub fn cap(&self) -> u64 {
        // Relaxed: a changed limit applies from the next write on.
        self.cap.load(Ordering::Relaxed)
    }

    pub fn set_cap(&self, bytes: u64) {
        // Relaxed: as above.
        self.cap.store(bytes, Ordering::Relaxed);
    }

    pub fn guarantee(&self) -> u64 {
        // Relaxed: as above.
        self.guarantee.load(Ordering::Relaxed)
    }

    pub fn set_guarantee(&self, bytes: u64) {
        // Relaxed: as above.
        self.guarantee.store(bytes, Ordering::Relaxed);
    }
}

/// Returns the bytes above which a device with this cap evicts pages.
pub(super) fn high_mark(cap: u64) -> u64 {
    (cap / 100 * HIGH_PERCENT).min(cap.saturating_sub(2 * PAGE))
}

/// The guarantees of a family's devices.
///
/// Lock order: taken first, before any other lock, to change limits.
#[derive(Default)]
pub(super) struct Guarantees(Mutex<Vec<Weak<Limits>>>);

impl Guarantees {
    /// Sets a device's cap (0: no cap) and guarantee. `total` returns the family's limit in bytes.
    ///
    /// # Errors
    /// Fails if the cap is below 64 KiB, or if the guarantee is above the cap or exceeds what the
    /// family's limit leaves beside other guarantees.
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
        // The list has only devices with a guarantee.
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

    /// Returns the sum of all guarantees in bytes.
    pub fn sum(&self) -> u64 {
        self.0.lock().iter().filter_map(Weak::upgrade).map(|limits| limits.guarantee()).sum()
    }

    /// Locks all limits against changes.
    pub fn hold(&self) -> MutexGuard<'_, impl Sized> {
        self.0.lock()
    }
}
