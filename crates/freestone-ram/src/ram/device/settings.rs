//! Settings of a device that can change: its size, its own limits, and its waits for space.

use super::Ram;
use crate::ram::memory::config::{Config, SetupError, round_fork_size, round_size};
use crate::ram::memory::record;
use freestone_core::sync::Ordering;

/// Guard that disables waiting for space. While the guard exists, writes of the device that find no
/// space fail.
pub struct NoWaitGuard(Ram);

impl Drop for NoWaitGuard {
    fn drop(&mut self) {
        self.0.0.limits.space.enable_waits();
    }
}

impl Ram {
    /// Returns the current settings. A fork or snapshot has the settings of its family, except
    /// `disksize`.
    pub fn config(&self) -> Config {
        let family = &self.0.family;
        Config {
            disksize: self.0.size(),
            mem_limit: self.0.pages.mem_limit(),
            full_policy: self.0.pages.full.policy(),
            ..family.config.clone()
        }
    }

    /// Grows a disk to `disksize` bytes, rounded up to a page, or a fork, rounded up to 512 bytes.
    /// The added range reads as zeroes, on a fork too.
    ///
    /// # Errors
    /// Fails if `disksize` is smaller than the current size or too large, or this is a snapshot.
    pub fn grow(&self, disksize: u64) -> Result<(), SetupError> {
        let wanted = if self.is_fork() { round_fork_size(disksize)? } else { round_size(disksize)? };
        let _one = self.0.changing.lock();
        let present = self.0.size();
        if self.0.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        if wanted < present {
            return Err(SetupError::Shrinks { wanted, present });
        }
        record::set_size(self.0.layer().table(), wanted);
        // Release: pairs with the Acquire in `size`.
        self.0.size.store(wanted, Ordering::Release);
        Ok(())
    }

    /// Returns the device's own limits in bytes: its memory limit (0: no limit) and its guaranteed
    /// memory.
    pub fn own_limits(&self) -> (u64, u64) {
        let cap = self.0.limits.cap();
        (if cap == u64::MAX { 0 } else { cap }, self.0.limits.guarantee())
    }

    /// Sets the memory limit of this device's own objects (0: no limit) and the family memory
    /// guaranteed to the device, both in bytes. Near its own limit the device writes back its own
    /// pages; without a backing device its writes find no space.
    ///
    /// # Errors
    /// Fails on a snapshot, if `mem_limit` is below 64 KiB, or if `mem_min` is above `mem_limit` or
    /// above the family's memory not yet guaranteed.
    pub fn set_own_limits(&self, mem_limit: u64, mem_min: u64) -> Result<(), SetupError> {
        if self.0.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        self.0.family.set_device_limits(&self.0.limits, mem_limit, mem_min)?;
        self.0.layer().update_reservation(&self.0.pages.layers);
        self.0.pages.wake_space_waiters();
        self.0.pages.keeper.kick();
        Ok(())
    }

    /// Returns true if writes of the device wait for free space, false if they fail at once; `None`
    /// if the device follows its family's policy (`Family::full_policy`).
    pub fn wait_override(&self) -> Option<bool> {
        self.0.limits.space.wait_override()
    }

    /// Sets whether writes of the device wait for free space or fail at once, including those that
    /// wait now. `None` selects the family's policy.
    pub fn set_wait_override(&self, waits: Option<bool>) {
        self.0.limits.space.set_wait_override(waits);
        self.0.pages.end_space_waits(&self.0.limits.space);
    }

    /// Sets the device's name for log lines. Only the first call has an effect.
    pub fn set_name(&self, name: &str) {
        self.0.limits.space.set_name(name);
    }

    /// Disables waiting for space while the returned guard exists: writes that wait for space now,
    /// and later writes that find no space, fail.
    pub fn disable_waiting(&self) -> NoWaitGuard {
        self.0.limits.space.disable_waits();
        self.0.pages.end_space_waits(&self.0.limits.space);
        NoWaitGuard(self.clone())
    }
}
