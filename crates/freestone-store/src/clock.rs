//! Clock of a store, used to compute ages of objects.

use crate::objects::Until;
use crate::rt::time::{Duration, SystemTime};
use crate::store::{Result, Store};

/// Reading of the store's clock, extrapolated with a host clock that counts during suspend.
pub struct Clock<'a> {
    store: &'a Store,
    began: SystemTime,
    /// Host clock before and after `began` was read.
    before: Duration,
    after: Duration,
}

impl<'a> Clock<'a> {
    /// Reads the clock of the store.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn start(store: &'a Store, until: Until<'_>) -> Result<Self> {
        let before = store.uptime();
        let began = store.now(until)?;
        Ok(Self { store, began, before, after: store.uptime() })
    }

    /// Returns the time since the start, including the reading of the store's clock.
    pub fn elapsed(&self) -> Duration {
        self.store.uptime().saturating_sub(self.before)
    }

    /// Returns the time since the start by the clock of the store, which is read again.
    ///
    /// # Errors
    /// Errors of the store.
    pub fn elapsed_at_store(&self, until: Until<'_>) -> Result<Duration> {
        Ok(self.store.now(until)?.duration_since(self.began).unwrap_or_default())
    }

    /// Returns the largest possible age of an object. Pushes use this bound.
    pub fn age_at_most(&self, modified: SystemTime) -> Duration {
        self.age_since(self.before, modified)
    }

    /// Returns the smallest possible age of an object. Prunes use this bound.
    pub fn age_at_least(&self, modified: SystemTime) -> Duration {
        self.age_since(self.after, modified)
    }

    fn age_since(&self, start: Duration, modified: SystemTime) -> Duration {
        let now = self.began + self.store.uptime().saturating_sub(start);
        now.duration_since(modified).unwrap_or_default()
    }
}
