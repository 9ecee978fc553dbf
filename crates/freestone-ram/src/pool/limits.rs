//! The limit of a pool, the count of its pages, and statistics.

use super::{Alarm, Currents, Pool};
use freestone_core::device::Error;
use freestone_core::sync::Ordering;

impl Pool {
    /// Returns true if the pool is larger than the limit, which can happen after the limit was
    /// lowered.
    #[inline]
    pub fn exceeds_lowered_limit(&self) -> bool {
        // Relaxed: a changed limit applies from the next write on.
        self.pages.load(Ordering::Relaxed) > self.limit_pages.load(Ordering::Relaxed)
    }

    /// Adds pages to the count and returns true, unless that would exceed the limit. The count
    /// never exceeds the limit even for a moment, as another thread would then fail its write.
    pub(super) fn try_charge(&self, pages: u32, reserved: u64) -> bool {
        // Relaxed: a changed limit applies from the next growth on.
        let limit = self.limit_pages.load(Ordering::Relaxed).saturating_sub(reserved);
        // Relaxed: a changed number applies from the next growth on.
        let limit = limit.saturating_sub(self.outside_pages.load(Ordering::Relaxed));
        let add = |now: u64| Some(now + u64::from(pages)).filter(|&sum| sum <= limit);
        // Relaxed: the count orders no other memory access.
        let before = self.pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if let Ok(before) = before {
            // Relaxed: a statistic, which orders no other memory access.
            self.pages_max.fetch_max(before + u64::from(pages), Ordering::Relaxed);
            // Relaxed: a changed alarm threshold applies from the next growth on.
            if before + u64::from(pages) > self.alarm_pages.load(Ordering::Relaxed)
                && let Some(alarm) = self.alarm.get()
            {
                alarm();
            }
        }
        before.is_ok()
    }

    pub(super) fn uncharge(&self, pages: u32) {
        // Relaxed: the count orders no other memory access.
        self.pages.fetch_sub(u64::from(pages), Ordering::Relaxed);
    }

    /// Raises the high-water mark before the write fails, as the kernel does, so the mark can
    /// exceed the limit.
    #[cold]
    pub(super) fn over_limit(&self, pages: u32) -> Error {
        // Relaxed: statistics, which order no other memory access.
        let attempted = self.pages.load(Ordering::Relaxed) + u64::from(pages);
        self.pages_max.fetch_max(attempted, Ordering::Relaxed);
        Error::NoSpace
    }

    /// Sets the limit of the pool in pages; `u64::MAX` means no limit. A limit below the current
    /// size does not evict pages.
    pub fn set_limit_pages(&self, pages: u64) {
        // Relaxed: a changed limit applies from the next allocation on.
        self.limit_pages.store(pages, Ordering::Relaxed);
    }

    /// Returns true if pages outside the pool use up the whole limit.
    pub fn is_limit_used_outside(&self) -> bool {
        // Relaxed: a changed limit applies from the next call on. Each concurrent caller can exceed
        // the limit by a page.
        self.outside_pages.load(Ordering::Relaxed) >= self.limit_pages.load(Ordering::Relaxed)
    }

    /// Sets the callback for growth above [`set_alarm_pages`](Self::set_alarm_pages). Must be
    /// called at most once.
    pub fn on_alarm(&self, alarm: Alarm) {
        let first = self.alarm.set(alarm).is_ok();
        debug_assert!(first, "a pool has one alarm");
    }

    /// Sets the pool size in pages above which growth calls the alarm.
    pub fn set_alarm_pages(&self, pages: u64) {
        // Relaxed: a changed threshold applies from the next growth on.
        self.alarm_pages.store(pages, Ordering::Relaxed);
    }

    pub fn pages(&self) -> u64 {
        // Relaxed: a statistic, which orders no other memory access.
        self.pages.load(Ordering::Relaxed)
    }

    /// Returns the high-water mark: the maximum number of pages resident or requested since
    /// [`reset_pages_max`](Self::reset_pages_max).
    pub fn pages_max(&self) -> u64 {
        // Relaxed: a statistic, which orders no other memory access.
        self.pages_max.load(Ordering::Relaxed)
    }

    pub fn reset_pages_max(&self) {
        // Relaxed: a statistic, which orders no other memory access.
        self.pages_max.store(self.pages(), Ordering::Relaxed);
    }

    pub fn backrefs_bytes(&self) -> u64 {
        self.backrefs.bytes()
    }

    /// Returns the bytes of all span metadata except back-references.
    pub fn metadata_bytes(&self) -> u64 {
        let currents = size_of_val(&*self.current) + self.currents().count() * size_of::<Currents>();
        self.spans.bytes() + self.backrefs.overhead_bytes() + currents as u64
    }
}
