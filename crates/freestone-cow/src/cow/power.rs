//! What the loss of a machine's power does to an origin and its snapshots: all that is under way
//! ends where it is, and goes on nowhere. What the drives below have lost is their affair.
//!
//! # Protocol
//! 1. The origin's gate is closed: no other write is sent to the device below.
//! 2. The caller cuts the COW devices off from their stores, so that nothing that fails from here on
//!    is recorded there; and lets go what hangs in the device below.
//! 3. What that device has is answered, and the caller cuts the power of the drives.
//! 4. The snapshots leave the origin's view, which gets another *boot* number. Nothing is recorded
//!    on their stores.
//! 5. The gate is opened. Who came meanwhile is answered [`Gone`](Error::Gone), and so is a write
//!    that looks at the view again and finds another boot, or that comes from such a snapshot.

use std::sync::Arc;
use std::time::Duration;

use super::origin::Origin;
use super::state::{Merging, OriginCore};

/// Nothing is written to the origin while this lives.
pub struct PowerOff<'a> {
    core: &'a OriginCore,
    lost: bool,
}

impl Origin {
    /// Holds up writes to the origin, has `then` cut the COW devices off, and waits, for `most` at
    /// most, until the device below has answered what it has. `None` where `then` is false. Without
    /// [`lose`](PowerOff::lose) writes go on afterwards.
    pub fn power_off(&self, most: Duration, then: impl FnOnce() -> bool) -> Option<PowerOff<'_>> {
        let core = &***self.0.0;
        let off = PowerOff { core: &self.0.0, lost: false };
        // From here on nothing else is sent.
        let mut quiet = core.gate.close_within(Duration::ZERO);
        if !then() {
            return None;
        }
        if !quiet {
            quiet = core.gate.close_within(most);
            // It is closed twice, so nothing is held by this.
            drop(core.gate.open());
        }
        if !quiet {
            tracing::warn!(
                "a write to an origin is not answered; it is not waited for when the power is cut"
            );
        }
        Some(off)
    }
}

impl PowerOff<'_> {
    /// What was under way is lost, and the snapshots are gone: invalid for who has them. What their
    /// stores hold can be opened again. Call this when nothing comes to their COW devices any more.
    pub fn lose(mut self) {
        self.lost = true;
        let mut changing = self.core.changing.lock();
        let view = self.core.gate.value();
        for snap in view.snapshots.iter().chain(&view.merging) {
            let snap = Arc::clone(snap);
            snap.loses_power();
        }
        self.core.gate.change(|view| view.changed(|view| view.boot += 1));
        changing.merging = Merging::No;
    }
}

impl Drop for PowerOff<'_> {
    fn drop(&mut self) {
        for task in self.core.gate.open() {
            if self.lost {
                // A request that is dropped is answered.
                drop(task);
            } else {
                self.core.work_queue.push(task);
            }
        }
    }
}
