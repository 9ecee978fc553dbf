//! Chains (a live device and its snapshots) of RAM disks: binds the protocol of
//! [`slot::chain`](freestone_core::slot::chain) to the pool's objects.

use std::sync::Arc;

use super::parent::Parent;
use super::{Inner, Ram};
use crate::ram::memory::layer::{Layer, stored};
use crate::ram::memory::pages::Pages;
use crate::ram::waiting::job::Job;
use freestone_core::pin::Swap;
use freestone_core::slot::chain::{self, ChainFamily};
use freestone_core::slot::{Table, Word};

pub(in crate::ram) type Chain = chain::Chain<Pages>;
pub(in crate::ram) type Current = chain::CurrentChain<Pages>;
pub(in crate::ram) type Role = chain::Role<Pages>;
pub(in crate::ram) type View = chain::View<Pages>;

impl ChainFamily for Pages {
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
    fn epoch(&self) -> u8 {
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
    fn update_stats(&self, layer: &Layer, old: Word, new: Word) {
        layer.account(&self.layers, old, new);
    }

    #[inline]
    fn count_preserved_page(&self, origin: &Layer) {
        origin.count(stored::HANDED_OVER, 1);
    }

    fn mark_unused(&self, layer: &Layer) {
        layer.mark_unused(&self.layers);
    }
}

/// Resumes requests that were held while a snapshot was taken. The work queues of their families
/// run them, as the caller may have more devices to thaw.
pub(super) fn resume_held_requests(held: Vec<(Ram, Job)>) {
    for (ram, job) in held {
        Arc::clone(&ram.0.pages.keeper).resume(ram.into_waiting(job));
    }
}
