//! What of a family's memory a device may take, and where spilling for a limit begins and ends.

use super::PAGE;
use freestone_core::sync::{AtomicU64, Ordering};

/// Share of a limit above which pages are spilled, in percent.
pub(super) const HIGH_PERCENT: u64 = 95;
/// Share of a limit at which spilling ends, in percent.
pub(super) const LOW_PERCENT: u64 = 90;

/// What of a family's memory a device may take, and what is kept for it; in bytes of charged objects. It goes with the
/// device from layer to layer.
pub(super) struct Limits {
    /// Most; `u64::MAX` is no cap.
    cap: AtomicU64,
    /// What others leave to it while it has less.
    least: AtomicU64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { cap: AtomicU64::new(u64::MAX), least: AtomicU64::new(0) }
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
