//! Snapshots and their forks. A snapshot is prepared first, so that snapshots of several devices can
//! be taken atomically.

use std::sync::Arc;

use super::Ram;
use super::chain::{Chain, Role, resume_held_requests};
use super::parent::{BELOW_DEPTH_MAX, Parent};
use super::retire;
use crate::ram::memory::config::{ForkConfig, SetupError};
use crate::ram::memory::layer::Layer;
use crate::ram::memory::record::{self, LayerRecord};
use freestone_core::consistency_group::{self, FreezeTimeout, GroupMember};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::slot::chain::Dirty;
use freestone_core::sync::Instant;

impl Ram {
    /// Prepares a snapshot. [`consistency_group::take_snapshots`] then takes the snapshot, alone or
    /// atomically with snapshots of other devices.
    ///
    /// # Errors
    /// Fails if this is a snapshot, or memory is short.
    pub fn prepare_snapshot(&self) -> Result<PendingSnapshot, SetupError> {
        if self.0.is_snapshot { Err(SetupError::Snapshot) } else { PendingSnapshot::new(self.clone()) }
    }

    /// Takes a snapshot of the current content of this disk or fork.
    ///
    /// # Errors
    /// As [`prepare_snapshot`](Self::prepare_snapshot); [`SetupError::NotInTime`] if the device
    /// cannot be frozen in time.
    pub fn snapshot(&self) -> Result<Self, SetupError> {
        let mut pending = self.prepare_snapshot()?;
        consistency_group::take_snapshots(&mut [&mut pending])
            .map_err(|_| SetupError::NotInTime(FreezeTimeout))?;
        Ok(pending.into_snapshot())
    }

    /// Returns the number of snapshots of this disk or fork; 0 for a snapshot.
    pub fn snapshots(&self) -> usize {
        if self.0.is_snapshot { 0 } else { self.0.chain.get().snapshots() }
    }

    /// Creates a fork of this snapshot in the same family.
    ///
    /// # Errors
    /// Fails if this is a live device, the size is invalid, or the family's memory limit does not
    /// leave the guaranteed memory.
    pub fn fork(&self, config: &ForkConfig) -> Result<Self, SetupError> {
        if !self.0.is_snapshot {
            return Err(SetupError::WritableBase);
        }
        let parent = Parent::Snapshot(self.clone());
        if parent.depth() > BELOW_DEPTH_MAX {
            return Err(SetupError::TooDeep);
        }
        self.0.family.fork(parent, self.0.size(), config)
    }
}

/// A snapshot that is prepared and not yet taken. Dropping it cancels the snapshot.
pub struct PendingSnapshot {
    origin: Ram,
    layer: Arc<Layer>,
    chain: Option<Arc<Chain>>,
    snapshot: Option<Ram>,
    /// Before the snapshot is taken: record for the origin's pages that change afterwards. After
    /// that: the record that it replaced.
    pub(in crate::ram) dirty: Option<Arc<Dirty>>,
}

impl PendingSnapshot {
    fn new(origin: Ram) -> Result<Self, SetupError> {
        let layer = origin.0.pages.layers.make(&origin.0.pages.common, Arc::default())?;
        Ok(Self { origin, layer, chain: None, snapshot: None, dirty: None })
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
            kill_points::pass(KillPoint::SnapshotAttached);
            let origin = &*self.origin.0;
            if let (Role::Snapshot { number, .. }, Some(of)) =
                (&view.role, record::read(chain.origin().table()))
            {
                let of = LayerRecord::of_snapshot(&of, self.layer.id(), *number);
                record::write(self.layer.table(), &of);
            }
            self.snapshot = Some(Ram::on_snapshot(&origin.family, view, origin.size()));
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
