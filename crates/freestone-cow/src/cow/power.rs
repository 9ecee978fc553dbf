//! Simulated power loss for an origin and its snapshots: requests in flight end and do not
//! continue. The drives below lose their own data.
//!
//! # Protocol
//! 1. The origin's gate is closed: no further write reaches the device below.
//! 2. The caller cuts the COW devices off from their stores. Later failures are not recorded there.
//!    The caller also releases hung requests of the device below.
//! 3. The device below completes its requests, and the caller cuts the power of the drives.
//! 4. The snapshots leave the origin's view, which gets a new *boot* number. Nothing is recorded in
//!    their stores.
//! 5. The gate is opened. Held writes fail with [`Gone`](Error::Gone). So do writes of such a
//!    snapshot, and writes that find another boot number.

use std::sync::Arc;
use std::time::Duration;

use super::origin::Origin;
use super::state::{Merging, OriginCore};

/// Guard that keeps writes from the origin.
pub struct PowerOff<'a> {
    core: &'a OriginCore,
    lost: bool,
}

impl Origin {
    /// Holds writes to the origin, calls `then` to cut off the COW devices, and waits at most
    /// `most` for the device below to complete its writes.
    ///
    /// Returns `None` if `then` returned false. Writes continue when the guard is dropped, unless
    /// [`lose`](PowerOff::lose) was called.
    pub fn power_off(&self, most: Duration, then: impl FnOnce() -> bool) -> Option<PowerOff<'_>> {
        let core = &***self.0.0;
        let off = PowerOff { core: &self.0.0, lost: false };
        // No write is sent from here on.
        let mut quiet = core.gate.close_within(Duration::ZERO);
        if !then() {
            return None;
        }
        if !quiet {
            quiet = core.gate.close_within(most);
            // The gate is closed twice, so this opens nothing.
            drop(core.gate.open());
        }
        if !quiet {
            tracing::warn!("power loss does not wait for an incomplete write to an origin");
        }
        Some(off)
    }
}

impl PowerOff<'_> {
    /// Invalidates all snapshots. The contents of their stores can be opened again. Call this when
    /// no request can reach the COW devices any more.
    pub fn lose(mut self) {
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
                // Dropping the request fails it.
                drop(task);
            } else {
                self.core.work_queue.push(task);
            }
        }
    }
}
