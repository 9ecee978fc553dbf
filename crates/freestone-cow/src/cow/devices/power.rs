//! Simulated power loss for an origin and its snapshots: requests in flight end and do not
//! continue. The simulated drives under these devices lose their own data.
//!
//! # Protocol
//! 1. The origin's gate is closed: no further write reaches the device under the origin.
//! 2. The caller cuts the COW devices off from their exception stores, so later failures are not
//!    recorded on them. The caller also releases hung requests of the device under the origin.
//! 3. The device under the origin completes its requests, and the caller cuts the power of the
//!    drives.
//! 4. The snapshots are removed from the origin's view, and the view's *boot* number is increased.
//!    Nothing is recorded in their stores.
//! 5. The gate is opened. Held writes fail with [`Gone`](freestone_core::device::Error::Gone). So
//!    do writes of the removed snapshots and writes that find another boot number than at their
//!    start.

use std::sync::Arc;
use std::time::Duration;

use super::origin::Origin;
use crate::cow::state::{Merging, OriginCore};

/// Guard that holds writes to the origin during a simulated power loss.
pub struct PowerOff<'a> {
    core: &'a OriginCore,
    lost: bool,
}

impl Origin {
    /// Holds writes to the origin, and calls `then` to cut off the COW devices. Then waits at most
    /// `most` for the device under the origin to complete its writes.
    ///
    /// Returns `None` if `then` returns false. Held writes continue when the guard is dropped,
    /// unless [`invalidate_snapshots`](PowerOff::invalidate_snapshots) was called.
    pub fn power_off(&self, most: Duration, then: impl FnOnce() -> bool) -> Option<PowerOff<'_>> {
        let core = &***self.0.0;
        let off = PowerOff { core: &self.0.0, lost: false };
        // After this call no write is sent to the device.
        let mut quiet = core.gate.close_within(Duration::ZERO);
        if !then() {
            return None;
        }
        if !quiet {
            quiet = core.gate.close_within(most);
            // The gate was closed twice, so one call of `open` does not open it.
            drop(core.gate.open());
        }
        if !quiet {
            tracing::warn!("power loss does not wait for an incomplete write to an origin");
        }
        Some(off)
    }
}

impl PowerOff<'_> {
    /// Invalidates and detaches all snapshots. Their exception stores can be opened again. Must be
    /// called when no request can reach the COW devices any more.
    pub fn invalidate_snapshots(mut self) {
        self.lost = true;
        let mut setup = self.core.setup.lock();
        let view = self.core.gate.value();
        for snap in view.snapshots.iter().chain(&view.merging) {
            let snap = Arc::clone(snap);
            snap.detach_powered_off();
        }
        self.core.gate.change(|view| view.changed(|view| view.boot += 1));
        setup.merging = Merging::No;
    }
}

impl Drop for PowerOff<'_> {
    fn drop(&mut self) {
        for task in self.core.gate.open() {
            if self.lost {
                // Dropping the task drops its request, which fails with `Error::Gone`.
                drop(task);
            } else {
                self.core.work_queue.push(task);
            }
        }
    }
}
