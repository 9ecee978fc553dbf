//! Pending snapshots: prepared and not yet taken.

use std::sync::Arc;

use super::chain::{Chain, resume_held_requests};
use super::layer::Layer;
use super::{Ram, SetupError, retire};
use freestone_core::consistency_group::{NotInTime, Pending};
use freestone_core::slot::chain::Dirty;
use freestone_core::sync::Instant;

/// A snapshot that is prepared and not yet taken.
pub struct PendingSnapshot {
    origin: Ram,
    layer: Arc<Layer>,
    chain: Option<Arc<Chain>>,
    snapshot: Option<Ram>,
    /// Records pages that change after the snapshot is taken; afterwards the previous record.
    dirty: Option<Arc<Dirty>>,
}

impl PendingSnapshot {
    pub(super) fn new(origin: Ram) -> Result<Self, SetupError> {
        let layer = origin.0.pages.layers.make(&origin.0.pages.common, Arc::default())?;
        Ok(Self { origin, layer, chain: None, snapshot: None, dirty: None })
    }

    /// Sets the record of pages that change after the snapshot is taken.
    pub(crate) fn note_changes(&mut self, dirty: Arc<Dirty>) {
        self.dirty = Some(dirty);
    }

    /// Returns the previous change record, once the snapshot is taken.
    pub(crate) fn take_changes(&mut self) -> Option<Arc<Dirty>> {
        self.dirty.take()
    }

    /// Returns the snapshot, once it is taken.
    ///
    /// # Panics
    /// Panics if [`consistency_group::take`](freestone_core::consistency_group::take) was not
    /// called first.
    pub fn into_snapshot(mut self) -> Ram {
        match self.snapshot.take() {
            Some(snapshot) => snapshot,
            None => unreachable!("into_snapshot comes after consistency_group::take"),
        }
    }
}

impl Pending for PendingSnapshot {
    /// Waits only for pins, under which no request waits.
    fn freeze(&mut self, _: Instant) -> Result<(), NotInTime> {
        self.chain = Some(self.origin.0.chain.freeze());
        Ok(())
    }

    fn attach(&mut self) {
        if let Some(chain) = self.chain.as_ref().filter(|_| self.snapshot.is_none()) {
            if let Some(dirty) = self.dirty.take() {
                self.dirty = chain.note_changes(Some(dirty));
            }
            self.origin.0.pages.layers.join(&self.layer, chain.origin().id());
            let view = Chain::attach(chain, Arc::clone(&self.layer));
            self.snapshot = Some(self.origin.0.snapshot_device(view));
        }
    }

    fn thaw(&mut self) {
        if let Some(chain) = self.chain.take() {
            resume_held_requests(chain.thaw());
        }
    }
}

impl Drop for PendingSnapshot {
    fn drop(&mut self) {
        if let Some(chain) = self.chain.take() {
            resume_held_requests(chain.thaw());
        }
        // The snapshot was not taken.
        if !self.layer.is_in_chain() {
            retire::retire_layer(&self.origin.0.pages, Arc::clone(&self.layer));
        }
    }
}
