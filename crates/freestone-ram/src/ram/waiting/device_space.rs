//! State of one device's writes that wait for space: their number, the time-out state, and the
//! device's name for log lines.

use std::time::Duration;

use freestone_core::log_limit::LogLimit;
use freestone_core::sync::{Arc, AtomicU32, AtomicU64, OnceLock, Ordering};

/// Tenths of the warning mark. A warning is repeated only after use fell below this share of the
/// mark, so that use that oscillates around the mark is logged once.
const CALM_TENTHS: u64 = 9;

/// State of a device's writes that wait for space.
#[derive(Default)]
pub(in crate::ram) struct DeviceSpace {
    name: OnceLock<Box<str>>,
    waiting: AtomicU64,
    /// Generation of freed space in which a request timed out; 0 if no request did.
    timed_out_generation: AtomicU64,
    /// Number of existing [`NoWaitGuard`](crate::ram::NoWaitGuard)s of the device.
    disabled_count: AtomicU32,
    /// The device's own policy for writes that find no space: [`FAILS`], [`WAITS`], or 0 to follow
    /// its family.
    wait_override: AtomicU32,
    /// Whether the warning about the device's own memory limit is already logged.
    pub usage_warning: UsageWarning,
    lines: LogLimit<Line>,
}

/// Values of `wait_override`: writes that find no space fail, or wait.
const FAILS: u32 = 1;
const WAITS: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Waits,
    TimesOut,
}

/// Guard that counts a request as waiting for space while it exists.
pub(in crate::ram) struct WaitGuard(Arc<DeviceSpace>);

impl DeviceSpace {
    /// Sets the device's name for log lines. Only the first call has an effect.
    pub fn set_name(&self, name: &str) {
        let _ = self.name.set(name.into());
    }

    pub fn name(&self) -> &str {
        self.name.get().map_or("a RAM disk", |name| name)
    }

    /// Counts a request that starts to wait for space, and logs that writes wait for at most
    /// `most`. The request counts until the guard is dropped.
    pub fn begin_wait(self: &Arc<Self>, most: Duration) -> WaitGuard {
        // Relaxed: a statistic.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Some(held_back) = self.lines.admit(Line::Waits) {
            let (name, most) = (self.name(), most.as_secs());
            tracing::warn!("{name}: is full: writes wait for space, for at most {most} s{held_back}");
        }
        WaitGuard(Arc::clone(self))
    }

    pub fn waiting_requests(&self) -> u64 {
        // Relaxed: a statistic.
        self.waiting.load(Ordering::Relaxed)
    }

    /// Records that a request timed out in this generation of freed space. No request waits until
    /// the next generation, that is until space is freed.
    pub fn mark_timed_out(&self, generation: u64) {
        if self.timed_out_generation.swap(generation, Ordering::SeqCst) != generation
            && let Some(held_back) = self.lines.admit(Line::TimesOut)
        {
            let name = self.name();
            tracing::warn!(
                "{name}: is full, and no space was freed in time: writes fail until some is{held_back}"
            );
        }
    }

    /// Returns true if a request of the device timed out in this generation of freed space.
    pub fn has_timed_out(&self, generation: u64) -> bool {
        self.timed_out_generation.load(Ordering::SeqCst) == generation
    }

    /// Returns true if writes of the device wait for space, false if they fail at once; `None` if
    /// the device follows its family's policy.
    pub fn wait_override(&self) -> Option<bool> {
        match self.wait_override.load(Ordering::SeqCst) {
            FAILS => Some(false),
            WAITS => Some(true),
            _ => None,
        }
    }

    /// Sets whether writes of the device wait for space (`None`: follow the family), and clears the
    /// time-out state.
    pub fn set_wait_override(&self, waits: Option<bool>) {
        self.wait_override
            .store(waits.map_or(0, |waits| if waits { WAITS } else { FAILS }), Ordering::SeqCst);
        self.timed_out_generation.store(0, Ordering::SeqCst);
    }

    /// Disables waiting for space, until [`enable_waits`](Self::enable_waits) was called as often
    /// as this function.
    pub fn disable_waits(&self) {
        self.disabled_count.fetch_add(1, Ordering::SeqCst);
    }

    pub fn enable_waits(&self) {
        self.disabled_count.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn are_waits_disabled(&self) -> bool {
        self.disabled_count.load(Ordering::SeqCst) > 0
    }
}

impl Drop for WaitGuard {
    fn drop(&mut self) {
        // Relaxed: a statistic.
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Not 0 if the warning about a limit is logged already, and use has not fallen well below since.
#[derive(Default)]
pub(in crate::ram) struct UsageWarning(AtomicU32);

impl UsageWarning {
    /// Returns true if a warning is due: `used` reached `percent` of `limit` (0: never) for the
    /// first time since it was well below. Must be called by one thread only.
    pub fn is_due(&self, used: u64, limit: u64, percent: u8) -> bool {
        let mark = limit / 100 * u64::from(percent);
        if mark == 0 || used < mark / 10 * CALM_TENTHS {
            // Relaxed: used only by the thread of the once-a-second check.
            self.0.store(0, Ordering::Relaxed);
            return false;
        }
        // Relaxed: used only by the thread of the once-a-second check.
        used >= mark && self.0.swap(1, Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_warning_repeats_only_after_use_fell() {
        let warned = UsageWarning::default();
        let due = |used| warned.is_due(used, 1000, 90);
        assert_eq!(
            [0, 899, 900, 950, 899, 1000, 811, 900].map(due),
            [false, false, true].into_iter().chain([false; 5]).collect::<Vec<_>>()[..]
        );
        assert!(!due(809) && due(900), "it fell below 81 %");
        assert!(!warned.is_due(900, 0, 90) && !warned.is_due(1000, 1000, 0), "no limit, no warning");
        assert!(warned.is_due(1000, 1000, 100), "at the limit itself");
    }
}
