//! Snapshots that are about to begin.

use std::sync::Arc;

use super::chain::{Chain, carry_on};
use super::layer::Layer;
use super::{Ram, SetupError, retire};
use freestone_core::consistency_group::{NotInTime, Pending};
use freestone_core::slot::chain::Dirty;
use freestone_core::sync::Instant;

/// A snapshot that is ready to begin.
pub struct PendingSnapshot {
    origin: Ram,
    layer: Arc<Layer>,
    chain: Option<Arc<Chain>>,
    snapshot: Option<Ram>,
    /// Where it is to be noted what changes from its moment on.
    dirty: Option<Arc<Dirty>>,
}

impl PendingSnapshot {
    pub(super) fn new(origin: Ram) -> Result<Self, SetupError> {
        let layer = origin.0.pages.layers.make(&origin.0.pages.common, Arc::default())?;
        Ok(Self { origin, layer, chain: None, snapshot: None, dirty: None })
    }

    /// From its moment on it is noted here what of the origin changes.
    pub(crate) fn note_changes(&mut self, dirty: Arc<Dirty>) {
        self.dirty = Some(dirty);
    }

    /// Once it has begun: where it was noted before.
    pub(crate) fn noted(&mut self) -> Option<Arc<Dirty>> {
        self.dirty.take()
    }

    /// The snapshot, once it has begun.
    ///
    /// # Panics
    /// If it has not: [`consistency_group::take`](freestone_core::consistency_group::take) comes
    /// first.
    pub fn into_snapshot(mut self) -> Ram {
        match self.snapshot.take() {
            Some(snapshot) => snapshot,
            None => unreachable!("into_snapshot comes after consistency_group::take"),
        }
    }
}

impl Pending for PendingSnapshot {
    /// Waits for pins alone, under which nothing waits.
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
            carry_on(chain.thaw());
        }
    }
}

impl Drop for PendingSnapshot {
    fn drop(&mut self) {
        if let Some(chain) = self.chain.take() {
            carry_on(chain.thaw());
        }
        // One that has not begun.
        if !self.layer.is_in_chain() {
            retire::layer(&self.origin.0.pages, Arc::clone(&self.layer));
        }
    }
}
