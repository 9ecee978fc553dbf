//! The virtual clock of a simulation.

use std::ops::{Add, AddAssign, Sub};
use std::sync::LazyLock;

pub use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::schedule;

/// A time of the virtual clock, or of the real clock outside a simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// Returns the present time.
    pub fn now() -> Self {
        static START: LazyLock<std::time::Instant> = LazyLock::new(std::time::Instant::now);
        Self(schedule::nanos().unwrap_or_else(|| nanos(START.elapsed())))
    }

    /// Returns the time that has passed since this instant.
    pub fn elapsed(&self) -> Duration {
        Self::now().duration_since(*self)
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    pub fn duration_since(&self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    pub fn saturating_duration_since(&self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns the time since `earlier`, or `None` if `earlier` is later.
    pub fn checked_duration_since(&self, earlier: Self) -> Option<Duration> {
        self.0.checked_sub(earlier.0).map(Duration::from_nanos)
    }

    /// Returns the instant `duration` later, or `None` on overflow.
    pub fn checked_add(&self, duration: Duration) -> Option<Self> {
        u64::try_from(duration.as_nanos()).ok().and_then(|nanos| self.0.checked_add(nanos)).map(Self)
    }

    /// Returns the instant `duration` earlier, or `None` on underflow.
    pub fn checked_sub(&self, duration: Duration) -> Option<Self> {
        u64::try_from(duration.as_nanos()).ok().and_then(|nanos| self.0.checked_sub(nanos)).map(Self)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, duration: Duration) {
        *self = *self + duration;
    }
}

impl Sub<Duration> for Instant {
    type Output = Self;
    fn sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(duration)))
    }
}

impl Sub for Instant {
    type Output = Duration;
    fn sub(self, earlier: Self) -> Duration {
        self.saturating_duration_since(earlier)
    }
}
