//! Scan of all pages of a family (devices that share a memory pool), in steps.

use crate::ram::memory::layer::{Layer, Layers};
use freestone_core::slot::{MAX_SLOTS, Word};

/// Maximum slot table leaves (2 MiB of a device each) scanned per step.
const STEP_LEAVES: u32 = 1024;

/// Position of the scan: a layer's table id, and a slot.
#[derive(Default)]
pub(super) struct Cursor {
    layer: u32,
    slot: u64,
}

impl Cursor {
    /// Visits the slots of each leaf with a `wanted` word from the cursor on, and advances the
    /// cursor, until `visit` returns the slot at which to continue or [`STEP_LEAVES`] leaves were
    /// scanned. Returns true after the last layer; the cursor is then back at the start.
    pub fn walk(
        &mut self,
        layers: &Layers,
        wanted: &impl Fn(Word) -> bool,
        mut visit: impl FnMut(&Layer, &[(u64, Word)]) -> Option<u64>,
    ) -> bool {
        let mut found = Vec::new();
        for _ in 0..STEP_LEAVES {
            let Some(layer) = layers.at_or_after(self.layer) else {
                *self = Self::default();
                return true;
            };
            if layer.id() != self.layer {
                *self = Self { layer: layer.id(), slot: 0 };
            }
            let Some(next) = layer.peek_leaf(self.slot, MAX_SLOTS - 1, wanted, &mut found) else {
                *self = Self { layer: layer.id() + 1, slot: 0 };
                continue;
            };
            if let Some(slot) = visit(&layer, &found) {
                self.slot = slot;
                return false;
            }
            self.slot = next;
        }
        false
    }
}
