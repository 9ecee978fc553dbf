//! Waiting for space, per device: waiting requests, time-out state, log name.

use std::time::Duration;

use freestone_core::log_limit::LogLimit;
use freestone_core::sync::{Arc, AtomicU32, AtomicU64, OnceLock, Ordering};

/// A repeated warning needs use below this share of the mark, in tenths, first. Use that oscillates
/// around the mark is logged once.
const CALM_TENTHS: u64 = 9;

/// State of a device's waits for space.
#[derive(Default)]
pub(super) struct DeviceSpace {
    name: OnceLock<Box<str>>,
    waiting: AtomicU64,
    /// Generation at which a request timed out; 0 if none did.
    timed_out_generation: AtomicU64,
    /// Number of [`NoWaiting`](super::NoWaiting) guards.
    disabled_count: AtomicU32,
    /// The device's own policy: [`FAILS`], [`WAITS`], or 0 for that of its family.
    wait_override: AtomicU32,
    /// Warning state of the device's own cap.
    pub usage_warning: UsageWarning,
    lines: LogLimit<Line>,
}

/// Values of `wait_override`: writes without space fail, or wait.
const FAILS: u32 = 1;
const WAITS: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Waits,
    TimesOut,
}

/// A guard: counts a request as waiting for space.
pub(super) struct WaitGuard(Arc<DeviceSpace>);

impl DeviceSpace {
    /// Sets the device's name for log lines. Only the first call has an effect.
    pub fn set_name(&self, name: &str) {
        let _ = self.name.set(name.into());
    }

    pub fn name(&self) -> &str {
        self.name.get().map_or("a RAM disk", |name| name)
    }

    /// Counts a request that starts to wait, for at most `most`.
    pub fn begin_wait(self: &Arc<Self>, most: Duration) -> WaitGuard {
        // Relaxed: a statistic.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Some(held_back) = self.lines.line(Line::Waits) {
            let (name, most) = (self.name(), most.as_secs());
            tracing::warn!("{name}: is full: writes wait for room, for at most {most} s{held_back}");
        }
        WaitGuard(Arc::clone(self))
    }

    pub fn waiting(&self) -> u64 {
        // Relaxed: a statistic.
        self.waiting.load(Ordering::Relaxed)
    }

    /// Records a time-out at a generation: until the next generation no request waits.
    pub fn mark_timed_out(&self, generation: u64) {
        if self.timed_out_generation.swap(generation, Ordering::SeqCst) != generation
            && let Some(held_back) = self.lines.line(Line::TimesOut)
        {
            let name = self.name();
            tracing::warn!("{name}: is full, and no room came in time: writes fail until it does{held_back}");
        }
    }

    /// Returns true if a request timed out in this generation.
    pub fn has_timed_out(&self, generation: u64) -> bool {
        self.timed_out_generation.load(Ordering::SeqCst) == generation
    }

    /// Returns the device's own policy; `None` if it follows its family.
    pub fn wait_override(&self) -> Option<bool> {
        match self.wait_override.load(Ordering::SeqCst) {
            FAILS => Some(false),
            WAITS => Some(true),
            _ => None,
        }
    }

    /// Sets the device's own policy and clears the time-out state.
    pub fn set_wait_override(&self, waits: Option<bool>) {
        self.wait_override
            .store(waits.map_or(0, |waits| if waits { WAITS } else { FAILS }), Ordering::SeqCst);
        self.timed_out_generation.store(0, Ordering::SeqCst);
    }

    /// Disables waiting until [`enable_waits`](Self::enable_waits) has been called as often.
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

/// Whether the warning about a limit was logged.
#[derive(Default)]
pub(super) struct UsageWarning(AtomicU32);

impl UsageWarning {
    /// Returns true if a warning is due: use rose above `percent` of `limit` (0: never) for the
    /// first time since it was well below. Called by one thread only.
    pub fn is_due(&self, used: u64, limit: u64, percent: u8) -> bool {
        let mark = limit / 100 * u64::from(percent);
        if mark == 0 || used < mark / 10 * CALM_TENTHS {
            // Relaxed: used by one thread.
            self.0.store(0, Ordering::Relaxed);
            return false;
        }
        // Relaxed: used by one thread.
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
