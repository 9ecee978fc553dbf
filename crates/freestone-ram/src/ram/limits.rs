//! What of a family's memory a device may take, and where spilling for a limit begins and ends.

use std::sync::{Arc, Weak};

use super::PAGE;
use super::config::SetupError;
use super::device_room::DeviceRoom;
use freestone_core::sync::{AtomicU64, Mutex, MutexGuard, Ordering};

/// Least cap of a device.
const CAP_BYTES_MIN: u64 = 64 << 10;

/// Share of a limit above which pages are spilled, in percent.
pub(super) const HIGH_PERCENT: u64 = 95;
/// Share of a limit at which spilling ends, in percent.
pub(super) const LOW_PERCENT: u64 = 90;

/// What of a family's memory a device may take, and what is kept for it; in bytes of charged
/// objects. It goes with the device from layer to layer.
pub(super) struct Limits {
    /// Most; `u64::MAX` is no cap.
    cap: AtomicU64,
    /// What others leave to it while it has less.
    least: AtomicU64,
    /// What waits at their end.
    pub room: Arc<DeviceRoom>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cap: AtomicU64::new(u64::MAX), least: AtomicU64::new(0), room: Arc::default() }
    }
}

impl Limits {
    pub fn cap(&self) -> u64 {
        // Relaxed: a limit that changes at this moment counts from the next write on.
        self.cap.load(Ordering::Relaxed)
    }

    pub fn set_cap(&self, bytes: u64) {
        // Relaxed: as above.
        self.cap.store(bytes, Ordering::Relaxed);
    }

    pub fn least(&self) -> u64 {
        // Relaxed: as above.
        self.least.load(Ordering::Relaxed)
    }

    pub fn set_least(&self, bytes: u64) {
        // Relaxed: as above.
        self.least.store(bytes, Ordering::Relaxed);
    }
}

/// Bytes above which a device with this cap spills.
pub(super) fn high_mark(cap: u64) -> u64 {
    (cap / 100 * HIGH_PERCENT).min(cap.saturating_sub(2 * PAGE))
}

/// What of a family's memory is guaranteed to its devices.
///
/// Lock order: taken to change limits, before any other lock.
#[derive(Default)]
pub(super) struct Guarantees(Mutex<Vec<Weak<Limits>>>);

impl Guarantees {
    /// Sets a device's cap (0 is none) and what is guaranteed to it of `total` bytes, the family's
    /// limit.
    ///
    /// # Errors
    /// A guarantee above the cap, or above what the family's limit leaves beside other guarantees.
    pub fn set(
        &self,
        limits: &Arc<Limits>,
        cap: u64,
        least: u64,
        total: impl Fn() -> u64,
    ) -> Result<(), SetupError> {
        if (1..CAP_BYTES_MIN).contains(&cap) {
            return Err(SetupError::CapTooSmall(cap));
        }
        if cap > 0 && least > cap {
            return Err(SetupError::GuaranteeAboveCap { guarantee: least, cap });
        }
        let mut all = self.0.lock();
        // Most devices have no guarantee, and are not looked at.
        if least > 0 || limits.least() > 0 {
            all.retain(|known| {
                known.strong_count() > 0 && !std::ptr::eq(known.as_ptr(), Arc::as_ptr(limits))
            });
            let others: u64 = all.iter().filter_map(Weak::upgrade).map(|other| other.least()).sum();
            let total = total();
            if least > 0 && (total == 0 || others.saturating_add(least) > total) {
                if limits.least() > 0 {
                    all.push(Arc::downgrade(limits));
                }
                return Err(SetupError::Guarantee { wanted: least, left: total.saturating_sub(others) });
            }
            all.push(Arc::downgrade(limits));
        }
        limits.set_cap(if cap == 0 { u64::MAX } else { cap });
        limits.set_least(least);
        Ok(())
    }

    /// Bytes that are guaranteed in all.
    pub fn sum(&self) -> u64 {
        self.0.lock().iter().filter_map(Weak::upgrade).map(|limits| limits.least()).sum()
    }

    /// Limits do not change while this is held.
    pub fn hold(&self) -> MutexGuard<'_, impl Sized> {
        self.0.lock()
    }
}
