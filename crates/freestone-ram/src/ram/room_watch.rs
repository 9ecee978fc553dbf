//! Room of a family, as it is looked at once a second: who is warned that it gets short, who has
//! waited for it too long; and who is told that there is some.

use super::pages::Pages;
use super::{PAGE, Ram};
use crate::clock::{millis, now_ms};

impl Pages {
    /// Memory or blocks of the backing device are free: who waited for them tries again.
    pub(super) fn memory_freed(&self) {
        self.keeper.memory_freed();
        self.room_came();
    }

    /// There may be room: writes that waited because there was none try again.
    pub(super) fn room_came(&self) {
        for (ram, job) in self.full.waiters.room_came() {
            self.keeper.resume(ram, job);
        }
    }

    /// As [`room_came`](Self::room_came), also where nobody has asked for room.
    pub(super) fn begin_anew(&self) {
        self.full.waiters.want();
        self.room_came();
    }

    /// Requests of a device that wait for room try once more, and find that none waits.
    pub(super) fn end_waiting(&self, of: &Ram) {
        for (ram, job) in self.full.waiters.take(|(ram, _)| ram == of) {
            self.keeper.resume(ram, job);
        }
    }

    /// A second has passed.
    pub(super) fn look_at_room(&self) {
        self.warn();
        if self.full.has_shrunk(self.pool.pages()) {
            self.room_came();
        }
        let waiting = self.full.waiters.take(|_| true);
        if waiting.is_empty() {
            return;
        }
        let (now, timeout) = (now_ms(), millis(self.full.when().timeout));
        for (ram, job) in &waiting {
            if job.began_ms.saturating_add(timeout) <= now {
                // From now on room that comes is noted, also where nobody waits for it.
                self.full.waiters.want();
                ram.0.limits.room.give_up(self.full.waiters.times());
            }
        }
        // All of them try: what was overwritten with less has told nobody.
        for (ram, job) in waiting {
            self.keeper.resume(ram, job);
        }
    }

    /// Warns of limits that are near.
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
        if self.full.warned.is_due(used, limit, when.warn_percent) {
            tell(self.name(), used, limit, what, when.wait);
        }
        // Beyond its cap a device spills its own pages.
        if self.store.is_some() || !self.full.has_caps() {
            return;
        }
        for layer in self.layers.all() {
            let Some(limits) = layer.limits().filter(|limits| limits.cap() != u64::MAX) else { continue };
            let used = layer.charged();
            if limits.room.warned.is_due(used, limits.cap(), when.warn_percent) {
                let waits = limits.room.own().unwrap_or(when.wait);
                tell(limits.room.name(), used, limits.cap(), "its own mem_limit", waits);
            }
        }
    }
}
