//! The policy of a family (devices that share a memory pool) for writes that find no space.

use std::time::Duration;

use super::device_space::{DeviceSpace, UsageWarning};
use super::job::WaitingRequest;
use super::space_waiters::SpaceWaiters;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Default time-out of writes that wait for space: the same as that of a dm-thin pool.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Default share of a limit, in percent, above which a warning is logged.
const WARN_PERCENT: u8 = 90;

/// Policy for writes of a family whose memory is full, and also its backing device if it has one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FullPolicy {
    /// True if writes that find no space wait for it; false if they fail at once.
    pub wait: bool,
    /// Time-out of waiting writes, from the start of the request. After one time-out, all waiting
    /// writes of the device, and later ones that find no space, fail until space is freed.
    pub timeout: Duration,
    /// Share of a limit, in percent, above which a warning is logged; 0 disables warnings. The
    /// limits are the family's memory limit and those of its devices; with a backing device, only
    /// the size of that device.
    pub warn_percent: u8,
}

impl Default for FullPolicy {
    fn default() -> Self {
        Self { wait: false, timeout: TIMEOUT, warn_percent: WARN_PERCENT }
    }
}

/// The full policy of a family, and the requests that wait for space.
///
/// Lock order: `policy` is a leaf lock.
pub(in crate::ram) struct SpacePolicy {
    policy: Mutex<FullPolicy>,
    pub waiters: SpaceWaiters<WaitingRequest>,
    /// Whether the warning about the family's limit is already logged.
    pub usage_warning: UsageWarning,
    /// Not 0 if a device has, or had, its own memory limit.
    caps: AtomicU32,
    /// Number of pages of the pool at the last call of [`has_shrunk`](Self::has_shrunk).
    pages: AtomicU64,
}

impl SpacePolicy {
    pub fn new(policy: FullPolicy) -> Self {
        Self {
            policy: Mutex::new(policy),
            waiters: SpaceWaiters::default(),
            usage_warning: UsageWarning::default(),
            caps: AtomicU32::new(0),
            pages: AtomicU64::new(0),
        }
    }

    pub fn policy(&self) -> FullPolicy {
        *self.policy.lock()
    }

    pub fn set_policy(&self, policy: FullPolicy) {
        *self.policy.lock() = policy;
    }

    /// Returns true if a request of `device` that found no space may wait for it; false if it must
    /// fail.
    pub fn may_wait(&self, device: &DeviceSpace) -> bool {
        device.wait_override().unwrap_or(self.policy().wait)
            && !device.are_waits_disabled()
            && !device.has_timed_out(self.waiters.generation())
    }

    /// Records that a device has its own memory limit.
    pub fn set_has_caps(&self) {
        // Relaxed: a missed value only delays a warning by a second.
        self.caps.store(1, Ordering::Relaxed);
    }

    pub fn has_caps(&self) -> bool {
        // Relaxed: a missed value only delays a warning by a second.
        self.caps.load(Ordering::Relaxed) != 0
    }

    /// Returns true if `pages`, the pool's number of pages, is smaller than at the previous call.
    pub fn has_shrunk(&self, pages: u64) -> bool {
        // Relaxed: used only by the thread of the once-a-second check.
        pages < self.pages.swap(pages, Ordering::Relaxed)
    }
}
