//! Power cut of an origin together with its snapshots and their COW devices, like the drives of one
//! machine.

use std::sync::Arc;
use std::time::Duration;

use freestone::power::Cut;
use freestone::quiesce::Shut;

use super::super::registry::Registry;
use super::super::{Entry, KindSpec, finish_entry};
use super::cow::PendingCow;
use super::{PendingKind, PreparedSnapshot, take_all};
use crate::layers::CutError;
use crate::refusal::{Errno, Refusal};

/// How long a power cut waits for requests in flight.
const QUIET_WAIT: Duration = Duration::from_secs(10);

/// Result of a power cut of one drive.
pub type CutOutcome = Result<Cut, CutError>;

/// An origin with its snapshots and their COW devices.
pub struct Stack {
    origin: Arc<Entry>,
    /// Snapshots with copies.
    pub snapshots: Vec<Arc<Entry>>,
}

impl Stack {
    /// Returns the stack of a snapshot, or None if it is not a snapshot with copies.
    pub fn of(snapshot: &Entry, registry: &Registry) -> Option<Self> {
        snapshot.kind.cow()?;
        let origin = registry.find(snapshot.spec.kind.below()?)?;
        let is_of = |entry: &Arc<Entry>| {
            entry.kind.cow().is_some() && entry.needs().iter().any(|needed| Arc::ptr_eq(needed, &origin))
        };
        let snapshots = registry.all().into_iter().filter(is_of).collect();
        Some(Self { origin, snapshots })
    }

    /// Returns the origin and the COW devices.
    pub fn drives(&self) -> Vec<&Arc<Entry>> {
        let cows = self.snapshots.iter().flat_map(|snapshot| snapshot.needs());
        let cows = cows.filter(|needed| !Arc::ptr_eq(needed, &self.origin));
        std::iter::once(&self.origin).chain(cows).collect()
    }

    /// Returns the names of the drives and snapshots.
    pub fn names(&self) -> Vec<&str> {
        self.drives().into_iter().chain(&self.snapshots).map(|entry| entry.name()).collect()
    }

    /// Cuts the power of all drives that allow power cuts, with one seed, while no requests reach them.
    /// Returns the result for each drive. The snapshots must be [reopened](Self::reopen) after this.
    /// Clients should be disconnected.
    ///
    /// # Errors
    /// Returns the name of a device whose requests do not complete in time. No power was cut then.
    pub fn cut(&self, seed: u64) -> Result<Vec<(String, CutOutcome)>, String> {
        let busy = |entry: &Entry| entry.name().to_owned();
        let drives = self.drives();
        let Some(origin) = &self.origin.cow_origin else { return Ok(Vec::new()) };
        let _power_on = PowerOnGuard(&drives);
        let mut busy_snapshot = None;
        let off = origin.power_off(QUIET_WAIT, || {
            drives.iter().skip(1).copied().for_each(release_held_requests);
            let mut shut = Vec::new();
            for snapshot in &self.snapshots {
                let Some(device) = snapshot.kind.cow_device() else { continue };
                let Some(shut_gate) = device.gate.shut(QUIET_WAIT) else {
                    busy_snapshot = Some(busy(snapshot));
                    return false;
                };
                shut.push(shut_gate);
            }
            // The cut cannot be undone from here on: later writes of the stores are lost.
            shut.into_iter().for_each(Shut::for_good);
            release_held_requests(&self.origin);
            true
        });
        let Some(off) = off else { return Err(busy_snapshot.unwrap_or_else(|| busy(&self.origin))) };
        let switched = drives.iter().filter_map(|entry| Some((entry, entry.layers.power.as_ref()?)));
        let switched = switched.filter(|(entry, _)| entry.layers.can_cut);
        let cuts = switched.map(|(entry, power)| (entry.name().to_owned(), entry.layers.cut(power, seed)));
        let cuts = cuts.collect();
        off.lose();
        Ok(cuts)
    }

    /// Opens a snapshot again after the power cut, with the content of its store.
    ///
    /// # Errors
    /// Fails if the store is transient, and so is lost, or if it cannot be opened.
    pub fn reopen(&self, old: &Entry) -> Result<Entry, Refusal> {
        let KindSpec::Snapshot(spec) = &old.spec.kind else { unreachable!("the stack has only snapshots") };
        if !spec.cow.as_ref().is_some_and(|cow| cow.store.is_persistent()) {
            let why = "a transient store does not outlive the loss of power";
            return Err(Refusal::failed(Errno::EIO, format!("{}: {why}", old.name())));
        }
        let pending = PendingCow::reopen(spec, &self.origin, old).map_err(|why| why.of(old.name()))?;
        let mut prepared =
            [PreparedSnapshot { pending: PendingKind::Cow(pending), origin: Arc::clone(&self.origin) }];
        take_all(&mut prepared).map_err(|(_, why)| why.of(old.name()))?;
        let [prepared] = prepared;
        let mut new = finish_entry(old.spec.clone(), prepared.finish())?;
        new.take_limits_of(old)?;
        Ok(new)
    }
}

/// Completes hanging requests, which have been executed, and fails those held by an elapsed
/// countdown. Their clients are disconnected.
fn release_held_requests(drive: &Arc<Entry>) {
    if let Some(faults) = &drive.layers.faults {
        faults.release();
    }
    if let Some(power) = &drive.layers.power {
        power.let_go();
    }
}

/// Guard that switches the power of the drives on when it is dropped.
struct PowerOnGuard<'a>(&'a [&'a Arc<Entry>]);

impl Drop for PowerOnGuard<'_> {
    fn drop(&mut self) {
        self.0.iter().filter_map(|drive| drive.layers.power.as_ref()).for_each(|power| power.keep_on());
    }
}
