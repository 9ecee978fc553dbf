//! The once-a-second check of a family's space (a family: devices that share a memory pool). The
//! check warns about limits that are nearly reached, ends waits that timed out, and wakes waiters.
//!
//! Most code that frees space wakes waiters at once. A write that replaces an object with a smaller
//! one does not, as a notification would slow down every write. The check finds such space.

use super::pages::Pages;
use crate::ram::geometry::PAGE;
use crate::ram::waiting::device_space::DeviceSpace;
use freestone_core::clock::{millis, now_ms};

impl Pages {
    /// Retries requests that wait for an eviction to free memory, and writes that wait for free
    /// space.
    pub(in crate::ram) fn wake_memory_waiters(&self) {
        self.keeper.wake_memory_waiters();
        self.wake_space_waiters();
    }

    /// Retries writes that wait for free space, if any requested a wake-up.
    pub(in crate::ram) fn wake_space_waiters(&self) {
        for request in self.full.waiters.wake_all() {
            self.keeper.resume(request);
        }
    }

    /// Retries writes that wait for free space, even if none requested a wake-up.
    pub(in crate::ram) fn retry_space_waiters(&self) {
        self.full.waiters.request_wake();
        self.wake_space_waiters();
    }

    /// Retries the writes of a device that wait for free space, after waiting was disabled for the
    /// device. Writes that find no space then fail.
    pub(in crate::ram) fn end_space_waits(&self, of: &DeviceSpace) {
        for request in self.full.waiters.take(|request| std::ptr::eq(request.owner.space(), of)) {
            self.keeper.resume(request);
        }
    }

    /// Checks the family's space. Called once a second.
    pub(in crate::ram) fn check_space(&self) {
        self.warn();
        if self.full.has_shrunk(self.pool.pages()) {
            self.wake_space_waiters();
        }
        let waiting = self.full.waiters.take(|_| true);
        if waiting.is_empty() {
            return;
        }
        let (now, timeout) = (now_ms(), millis(self.full.policy().timeout));
        for request in &waiting {
            if request.job.started_ms.saturating_add(timeout) <= now {
                // Freed space must start a new generation even without waiters, as that ends the
                // time-out state.
                self.full.waiters.request_wake();
                request.owner.space().mark_timed_out(self.full.waiters.generation());
            }
        }
        // Retry all: space may be free without a wake-up, as a write that shrinks an object wakes
        // no waiter.
        for request in waiting {
            self.keeper.resume(request);
        }
    }

    fn warn(&self) {
        let policy = self.full.policy();
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
        if self.full.usage_warning.is_due(used, limit, policy.warn_percent) {
            tell(self.name(), used, limit, what, policy.wait);
        }
        // With a backing device no warning is needed: a device at its own memory limit writes back
        // pages.
        if self.store.is_some() || !self.full.has_caps() {
            return;
        }
        for layer in self.layers.all() {
            let Some(limits) = layer.limits().filter(|limits| limits.cap() != u64::MAX) else { continue };
            let used = layer.charged();
            if limits.space.usage_warning.is_due(used, limits.cap(), policy.warn_percent) {
                let waits = limits.space.wait_override().unwrap_or(policy.wait);
                tell(limits.space.name(), used, limits.cap(), "its own mem_limit", waits);
            }
        }
    }
}
