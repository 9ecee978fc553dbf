//! Clock of an object store, used to compute the ages of objects.

use crate::objects::CallLimits;
use crate::rt::time::{Duration, SystemTime};
use crate::store::{Result, Store};

/// Reading of the object store's clock, extrapolated with a host clock that also counts during suspend.
pub struct Clock<'a> {
    store: &'a Store,
    /// Time at the start, by the clock of the object store.
    began: SystemTime,
    /// Host clock before `began` was read.
    before: Duration,
    /// Host clock after `began` was read.
    after: Duration,
}

impl<'a> Clock<'a> {
    /// Reads the clock of the object store and the host clock as the start of the measurement.
    pub fn start(store: &'a Store, limits: CallLimits<'_>) -> Result<Self> {
        let before = store.uptime();
        let began = store.now(limits)?;
        Ok(Self { store, began, before, after: store.uptime() })
    }

    /// Returns the time since the call of [`start`](Self::start), by the host clock.
    pub fn elapsed(&self) -> Duration {
        self.store.uptime().saturating_sub(self.before)
    }

    /// Returns the time since the start by the clock of the object store, which is read again. Returns zero
    /// if that clock went back.
    pub fn elapsed_at_store(&self, limits: CallLimits<'_>) -> Result<Duration> {
        Ok(self.store.now(limits)?.duration_since(self.began).unwrap_or_default())
    }

    /// Returns the largest possible age of an object with the modification time `modified`. A push uses this
    /// bound to decide whether it may reuse the object.
    pub fn max_age(&self, modified: SystemTime) -> Duration {
        self.age_since(self.before, modified)
    }

    /// Returns the smallest possible age of an object with the modification time `modified`. A prune uses
    /// this bound to decide whether it may delete the object.
    pub fn min_age(&self, modified: SystemTime) -> Duration {
        self.age_since(self.after, modified)
    }

    fn age_since(&self, start: Duration, modified: SystemTime) -> Duration {
        let now = self.began + self.store.uptime().saturating_sub(start);
        now.duration_since(modified).unwrap_or_default()
    }
}
