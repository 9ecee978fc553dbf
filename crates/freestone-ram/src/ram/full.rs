//! What a family does where there is no room for a write.

use std::time::Duration;

use super::Ram;
use super::device_room::{DeviceRoom, Warned};
use super::job::Job;
use super::room_waiters::RoomWaiters;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// How long writes wait for room, unless said otherwise: as long as those of a thin pool.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The share of a limit above which a warning is logged, unless said otherwise, in percent.
const WARN_PERCENT: u8 = 90;

/// What is done where memory is full, and the backing device, if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WhenFull {
    /// Writes wait for room; else they fail at once.
    pub wait: bool,
    /// For so long, from when the request began. When one has waited in vain, the device's others
    /// fail with it, and those that come, until there is room again.
    pub timeout: Duration,
    /// The share of a limit above which a warning is logged, in percent; 0 is none. The limit is
    /// that of memory, the family's and a device's own; where pages can be spilled it is the size
    /// of the backing device.
    pub warn_percent: u8,
}

impl Default for WhenFull {
    fn default() -> Self {
        Self { wait: false, timeout: TIMEOUT, warn_percent: WARN_PERCENT }
    }
}

/// What a family does where there is no room, and who waits for some.
///
/// Lock order: `when` is innermost.
pub(super) struct Full {
    when: Mutex<WhenFull>,
    pub waiters: RoomWaiters<(Ram, Job)>,
    /// Of the family's limit.
    pub warned: Warned,
    /// A device has, or had, a cap of its own.
    caps: AtomicU32,
    /// Pages of the pool, as last seen.
    pages: AtomicU64,
}

impl Full {
    pub fn new(when: WhenFull) -> Self {
        Self {
            when: Mutex::new(when),
            waiters: RoomWaiters::default(),
            warned: Warned::default(),
            caps: AtomicU32::new(0),
            pages: AtomicU64::new(0),
        }
    }

    pub fn when(&self) -> WhenFull {
        *self.when.lock()
    }

    pub fn set_when(&self, when: WhenFull) {
        *self.when.lock() = when;
    }

    /// Whether a request of this device that found no room may wait for some.
    pub fn waits(&self, device: &DeviceRoom) -> bool {
        device.own().unwrap_or(self.when().wait)
            && !device.is_closed()
            && !device.gave_up(self.waiters.times())
    }

    /// A device has a cap of its own.
    pub fn note_cap(&self) {
        // Relaxed: looked at now and then.
        self.caps.store(1, Ordering::Relaxed);
    }

    pub fn has_caps(&self) -> bool {
        // Relaxed: as above.
        self.caps.load(Ordering::Relaxed) != 0
    }

    /// Whether the pool has fewer pages than when this was asked before.
    pub fn has_shrunk(&self, pages: u64) -> bool {
        // Relaxed: of one thread.
        pages < self.pages.swap(pages, Ordering::Relaxed)
    }
}
