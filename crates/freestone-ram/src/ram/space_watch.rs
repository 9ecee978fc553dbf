//! The once-a-second check of a family's space: warns about limits that are near, ends waits that
//! timed out, and wakes waiters.
//!
//! Most freed space wakes waiters at once. Only this check finds space that a write freed by
//! replacing an object with a smaller one: a notification would burden every write.

use super::pages::Pages;
use super::{PAGE, Ram};
use crate::clock::{millis, now_ms};

impl Pages {
    /// Wakes requests that wait for memory or for space.
    pub(super) fn memory_freed(&self) {
        self.keeper.memory_freed();
        self.wake_space_waiters();
    }

    /// Wakes writes that wait for space.
    pub(super) fn wake_space_waiters(&self) {
        for (ram, job) in self.full.waiters.wake_all() {
            self.keeper.resume(ram, job);
        }
    }

    /// As [`wake_space_waiters`](Self::wake_space_waiters), even if no request asked for a wake-up.
    pub(super) fn retry_space_waiters(&self) {
        self.full.waiters.request_wake();
        self.wake_space_waiters();
    }

    /// Retries the waiting requests of a device, after its waiting was disabled.
    pub(super) fn end_space_waits(&self, of: &Ram) {
        for (ram, job) in self.full.waiters.take(|(ram, _)| ram == of) {
            self.keeper.resume(ram, job);
        }
    }

    /// Runs the check; called once a second.
    pub(super) fn check_space(&self) {
        self.warn();
        if self.full.has_shrunk(self.pool.pages()) {
            self.wake_space_waiters();
        }
        let waiting = self.full.waiters.take(|_| true);
        if waiting.is_empty() {
            return;
        }
        let (now, timeout) = (now_ms(), millis(self.full.when().timeout));
        for (ram, job) in &waiting {
            if job.began_ms.saturating_add(timeout) <= now {
                // Count generations from now on even without waiters, so that freed space ends the
                // time-out state.
                self.full.waiters.request_wake();
                ram.0.limits.room.mark_timed_out(self.full.waiters.generation());
            }
        }
        // Retry all: a write that shrinks an object wakes nobody.
        for (ram, job) in waiting {
            self.keeper.resume(ram, job);
        }
    }

    fn warn(&self) {
        let when = self.full.when();
        let tell = |name: &str, used: u64, limit: u64, what: &str, waits: bool| {
            let percent = u128::from(used) * 100 / u128::from(limit);
            let then = if waits { "wait" } else { "fail" };
            tracing::warn!(
                "{name}: {percent} % of {what} is used, {used} of {limit} bytes; when it is full, writes {then}"
            );
        };
        let (used, limit, what) = match &self.store {
            Some(store) => {
                ((store.blocks() - store.free_blocks()) * PAGE, store.blocks() * PAGE, "backing_dev")
            }
            None => (self.pool.pages() * PAGE, self.mem_limit(), "mem_limit"),
        };
        if self.full.usage_warning.is_due(used, limit, when.warn_percent) {
            tell(self.name(), used, limit, what, when.wait);
        }
        // With a backing device, a device above its cap writes back its own pages.
        if self.store.is_some() || !self.full.has_caps() {
            return;
        }
        for layer in self.layers.all() {
            let Some(limits) = layer.limits().filter(|limits| limits.cap() != u64::MAX) else { continue };
            let used = layer.charged();
            if limits.room.usage_warning.is_due(used, limits.cap(), when.warn_percent) {
                let waits = limits.room.wait_override().unwrap_or(when.wait);
                tell(limits.room.name(), used, limits.cap(), "its own mem_limit", waits);
            }
        }
    }
}
