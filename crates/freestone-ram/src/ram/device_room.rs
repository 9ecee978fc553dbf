//! What a device has waiting for room, and whether its requests still wait; what the log calls it.

use std::time::Duration;

use freestone_core::log_limit::LogLimit;
use freestone_core::sync::{Arc, AtomicU32, AtomicU64, OnceLock, Ordering};

/// Of what a limit has, a warning is given again only after the use fell below this share of the
/// mark, in tenths: what goes up and down around it is told once.
const CALM_TENTHS: u64 = 9;

/// What a device has waiting for room.
#[derive(Default)]
pub(super) struct DeviceRoom {
    name: OnceLock<Box<str>>,
    /// Requests.
    waiting: AtomicU64,
    /// How often room had come when a request waited in vain; 0 where none did.
    gave_up: AtomicU64,
    /// How many want that nothing waits now.
    closed: AtomicU32,
    /// What it does where there is no room: [`FAILS`], [`WAITS`], or what its family does.
    own: AtomicU32,
    /// Of the device's own cap.
    pub warned: Warned,
    lines: LogLimit<Line>,
}

/// Writes of the device fail, or wait for room.
const FAILS: u32 = 1;
const WAITS: u32 = 2;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Waits,
    GivesUp,
}

/// A request waits for room as long as this is there.
pub(super) struct Waits(Arc<DeviceRoom>);

impl DeviceRoom {
    /// What the log calls the device. The first name stays.
    pub fn set_name(&self, name: &str) {
        let _ = self.name.set(name.into());
    }

    pub fn name(&self) -> &str {
        self.name.get().map_or("a RAM disk", |name| name)
    }

    /// A request begins to wait, until room comes or its time is up.
    pub fn begin(self: &Arc<Self>, most: Duration) -> Waits {
        // Relaxed: a statistic.
        self.waiting.fetch_add(1, Ordering::Relaxed);
        if let Some(held_back) = self.lines.line(Line::Waits) {
            let (name, most) = (self.name(), most.as_secs());
            tracing::warn!("{name}: is full: writes wait for room, for at most {most} s{held_back}");
        }
        Waits(Arc::clone(self))
    }

    /// How many requests wait.
    pub fn waiting(&self) -> u64 {
        // Relaxed: a statistic.
        self.waiting.load(Ordering::Relaxed)
    }

    /// A request has waited in vain: until room comes, of which `times` counts, none waits any
    /// more.
    pub fn give_up(&self, times: u64) {
        if self.gave_up.swap(times, Ordering::SeqCst) != times
            && let Some(held_back) = self.lines.line(Line::GivesUp)
        {
            let name = self.name();
            tracing::warn!("{name}: is full, and no room came in time: writes fail until it does{held_back}");
        }
    }

    /// Whether it has given up, and no room came since.
    pub fn gave_up(&self, times: u64) -> bool {
        self.gave_up.load(Ordering::SeqCst) == times
    }

    /// Whether its writes wait for room, where it does not do what its family does.
    pub fn own(&self) -> Option<bool> {
        match self.own.load(Ordering::SeqCst) {
            FAILS => Some(false),
            WAITS => Some(true),
            _ => None,
        }
    }

    /// Sets that; what it had given up is forgotten.
    pub fn set_own(&self, waits: Option<bool>) {
        self.own.store(waits.map_or(0, |waits| if waits { WAITS } else { FAILS }), Ordering::SeqCst);
        self.gave_up.store(0, Ordering::SeqCst);
    }

    /// Nothing waits until as many calls of [`open`](Self::open) have come.
    pub fn close(&self) {
        self.closed.fetch_add(1, Ordering::SeqCst);
    }

    pub fn open(&self) {
        self.closed.fetch_sub(1, Ordering::SeqCst);
    }

    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst) > 0
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        // Relaxed: a statistic.
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Whether a warning was given that a limit is near.
#[derive(Default)]
pub(super) struct Warned(AtomicU32);

impl Warned {
    /// Whether to warn now that `used` of `limit` is used: above `percent` of it (0 is never), for
    /// the first time since it was well below. Asked by one thread.
    pub fn is_due(&self, used: u64, limit: u64, percent: u8) -> bool {
        let mark = limit / 100 * u64::from(percent);
        if mark == 0 || used < mark / 10 * CALM_TENTHS {
            // Relaxed: of one thread.
            self.0.store(0, Ordering::Relaxed);
            return false;
        }
        // Relaxed: of one thread.
        used >= mark && self.0.swap(1, Ordering::Relaxed) == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_is_told_of_once_until_the_use_fell_well_below_the_mark() {
        let warned = Warned::default();
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
