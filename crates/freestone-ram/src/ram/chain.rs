//! The chains of RAM disks ([`slot::chain`](freestone_core::slot::chain) has the protocol): what a word of theirs stands for, and
//! snapshots that are about to begin.

use std::sync::Arc;

use super::family::Shared;
use super::job::Job;
use super::layer::{Layer, stored};
use super::parent::Parent;
use super::{Inner, Ram, SetupError};
use freestone_core::consistency_group::{NotInTime, Pending};
use freestone_core::pin::Swap;
use freestone_core::slot::chain::{self, Kin};
use freestone_core::slot::{Table, Word};
use freestone_core::sync::Instant;

pub(super) type Chain = chain::Chain<Shared>;
pub(super) type Current = chain::Current<Shared>;
pub(super) type Role = chain::Role<Shared>;
pub(super) type View = chain::View<Shared>;

impl Kin for Shared {
    type Layer = Layer;
    type Parent = Parent;
    type Device = Inner;
    type Job = (Ram, Job);

    #[inline]
    fn table(layer: &Layer) -> &Table {
        layer.table()
    }

    #[inline]
    fn view(device: &Inner) -> &Swap<View> {
        &device.view
    }

    #[inline]
    fn now(&self) -> u8 {
        self.ages.now()
    }

    #[inline]
    fn set_owner(&self, object: u64, layer: &Layer, slot: u64) {
        self.pool.set_owner(object, layer.owner(slot));
    }

    #[inline]
    fn free(&self, word: Word) {
        self.release(word);
    }

    #[inline]
    fn account(&self, layer: &Layer, old: Word, new: Word) {
        layer.account(self, old, new);
    }

    #[inline]
    fn went_over(&self, origin: &Layer) {
        origin.count(stored::HANDED_OVER, 1);
    }

    fn set_loose(&self, layer: &Layer) {
        layer.set_loose(self);
    }
}

/// What was held up goes on, on the families' own threads: who thaws has others to thaw.
pub(super) fn carry_on(held: Vec<(Ram, Job)>) {
    for (ram, job) in held {
        Arc::clone(&ram.0.family.keeper).resume(ram, job);
    }
}

/// A snapshot that is ready to begin.
pub struct PendingSnapshot {
    origin: Ram,
    layer: Arc<Layer>,
    chain: Option<Arc<Chain>>,
    snapshot: Option<Ram>,
}

impl PendingSnapshot {
    pub(super) fn new(origin: Ram) -> std::result::Result<Self, SetupError> {
        let layer = origin.0.family.layers.make(&origin.0.family, Arc::default())?;
        Ok(Self { origin, layer, chain: None, snapshot: None })
    }

    /// The snapshot, once it has begun.
    ///
    /// # Panics
    /// If it has not: [`consistency_group::take`](freestone_core::consistency_group::take) comes first.
    pub fn into_snapshot(mut self) -> Ram {
        match self.snapshot.take() {
            Some(snapshot) => snapshot,
            None => unreachable!("into_snapshot comes after consistency_group::take"),
        }
    }
}

impl Pending for PendingSnapshot {
    /// Waits for pins alone, under which nothing waits.
    fn freeze(&mut self, _: Instant) -> std::result::Result<(), NotInTime> {
        self.chain = Some(self.origin.0.chain.freeze());
        Ok(())
    }

    fn attach(&mut self) {
        if let Some(chain) = self.chain.as_ref().filter(|_| self.snapshot.is_none()) {
            self.origin.0.family.layers.join(&self.layer, chain.origin().id());
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
            super::retire::layer(&self.origin.0.family, Arc::clone(&self.layer));
        }
    }
}
