//! Snapshots that are prepared and not yet taken. Snapshots of several devices can be taken
//! atomically.

use std::sync::Arc;

use super::chain::{Chain, resume_held_requests};
use super::layer::Layer;
use super::{Ram, SetupError, retire};
use freestone_core::consistency_group::{FreezeTimeout, GroupMember};
use freestone_core::slot::chain::Dirty;
use freestone_core::sync::Instant;

/// A snapshot that is prepared and not yet taken. Dropping it cancels the snapshot.
pub struct PendingSnapshot {
    origin: Ram,
    layer: Arc<Layer>,
    chain: Option<Arc<Chain>>,
    snapshot: Option<Ram>,
    /// Before the snapshot is taken: record for the origin's pages that change afterwards. After
    /// that: the record that it replaced.
    dirty: Option<Arc<Dirty>>,
}

impl PendingSnapshot {
    pub(super) fn new(origin: Ram) -> Result<Self, SetupError> {
        let layer = origin.0.pages.layers.make(&origin.0.pages.common, Arc::default())?;
        Ok(Self { origin, layer, chain: None, snapshot: None, dirty: None })
    }

    /// Sets the record into which the origin's writers add the pages that change after the snapshot
    /// is taken.
    pub(crate) fn track_changes(&mut self, dirty: Arc<Dirty>) {
        self.dirty = Some(dirty);
    }

    /// Returns the record of changed pages that was replaced when the snapshot was taken; `None` if
    /// the origin had none.
    pub(crate) fn take_changes(&mut self) -> Option<Arc<Dirty>> {
        self.dirty.take()
    }

    /// Returns the snapshot that was taken.
    ///
    /// # Panics
    /// Panics if [`take_snapshots`](freestone_core::consistency_group::take_snapshots) was not
    /// called first.
    pub fn into_snapshot(mut self) -> Ram {
        match self.snapshot.take() {
            Some(snapshot) => snapshot,
            None => unreachable!("into_snapshot comes after consistency_group::take_snapshots"),
        }
    }
}

impl GroupMember for PendingSnapshot {
    /// Needs no deadline: waits only for pins of writers, and no writer waits for anything while
    /// pinned.
    fn freeze(&mut self, _: Instant) -> Result<(), FreezeTimeout> {
        self.chain = Some(self.origin.0.chain.freeze());
        Ok(())
    }

    fn attach(&mut self) {
        if let Some(chain) = self.chain.as_ref().filter(|_| self.snapshot.is_none()) {
            if let Some(dirty) = self.dirty.take() {
                self.dirty = chain.replace_dirty(Some(dirty));
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
