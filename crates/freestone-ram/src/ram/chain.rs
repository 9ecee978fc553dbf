//! Chains of RAM disks: binds the protocol of [`slot::chain`](freestone_core::slot::chain) to the
//! pool's objects.

use std::sync::Arc;

use super::job::Job;
use super::layer::{Layer, stored};
use super::pages::Pages;
use super::parent::Parent;
use super::{Inner, Ram};
use freestone_core::pin::Swap;
use freestone_core::slot::chain::{self, Kin};
use freestone_core::slot::{Table, Word};

pub(super) type Chain = chain::Chain<Pages>;
pub(super) type Current = chain::Current<Pages>;
pub(super) type Role = chain::Role<Pages>;
pub(super) type View = chain::View<Pages>;

impl Kin for Pages {
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
        layer.account(&self.layers, old, new);
    }

    #[inline]
    fn went_over(&self, origin: &Layer) {
        origin.count(stored::HANDED_OVER, 1);
    }

    fn set_loose(&self, layer: &Layer) {
        layer.set_loose(&self.layers);
    }
}

/// Resumes held requests on the keepers of their families: the caller may have more devices to
/// thaw.
pub(super) fn resume_held_requests(held: Vec<(Ram, Job)>) {
    for (ram, job) in held {
        Arc::clone(&ram.0.pages.keeper).resume(ram, job);
    }
}
