//! The kernel's idle marks of a device's pages.

use crate::ram::device::Ram;
use crate::ram::memory::ages::{IdleSelection, mark_layer_idle};

impl Ram {
    /// Marks pages of this device idle. Returns the number of pages that have the mark afterwards.
    pub fn mark_idle(&self, which: IdleSelection) -> u64 {
        mark_layer_idle(&self.0.pages, &self.0.layer(), which)
    }
}
