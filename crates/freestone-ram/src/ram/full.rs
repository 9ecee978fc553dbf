//! The policy of a family for writes without space.

use std::time::Duration;

use super::Ram;
use super::device_space::{DeviceSpace, UsageWarning};
use super::job::Job;
use super::space_waiters::SpaceWaiters;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Default time-out of writes that wait for space: that of a dm-thin pool.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Default share of a limit above which a warning is logged, in percent.
const WARN_PERCENT: u8 = 90;

/// Policy for a full family: memory, and the backing device if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WhenFull {
    /// Whether writes wait for space; else they fail at once.
    pub wait: bool,
    /// Time-out of waiting writes, from the start of the request. After one time-out, all waiting
    /// and later writes of the device fail until space is free again.
    pub timeout: Duration,
    /// Share of a limit above which a warning is logged, in percent; 0 disables it. Limits are the
    /// family's memory limit and device caps; with a backing device, the size of that device.
    pub warn_percent: u8,
}

impl Default for WhenFull {
    fn default() -> Self {
        Self { wait: false, timeout: TIMEOUT, warn_percent: WARN_PERCENT }
    }
}

/// The policy of a family for a lack of space, and its waiting requests.
///
/// Lock order: `when` is a leaf lock.
pub(super) struct SpacePolicy {
    when: Mutex<WhenFull>,
    pub waiters: SpaceWaiters<(Ram, Job)>,
    /// Warning state of the family's limit.
    pub usage_warning: UsageWarning,
    /// Not 0 if a device has, or had, its own cap.
    caps: AtomicU32,
    /// Pages of the pool at the last check.
    pages: AtomicU64,
}

impl SpacePolicy {
    pub fn new(when: WhenFull) -> Self {
        Self {
            when: Mutex::new(when),
            waiters: SpaceWaiters::default(),
            usage_warning: UsageWarning::default(),
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

    /// Returns true if a request of this device that found no space may wait.
    pub fn may_wait(&self, device: &DeviceSpace) -> bool {
        device.wait_override().unwrap_or(self.when().wait)
            && !device.are_waits_disabled()
            && !device.has_timed_out(self.waiters.generation())
    }

    /// Records that a device has its own cap.
    pub fn set_has_caps(&self) {
        // Relaxed: read once a second.
        self.caps.store(1, Ordering::Relaxed);
    }

    pub fn has_caps(&self) -> bool {
        // Relaxed: as above.
        self.caps.load(Ordering::Relaxed) != 0
    }

    /// Returns true if the pool has fewer pages than at the previous call.
    pub fn has_shrunk(&self, pages: u64) -> bool {
        // Relaxed: used by one thread.
        pages < self.pages.swap(pages, Ordering::Relaxed)
    }
}
