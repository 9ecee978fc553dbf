//! Power cut of an origin together with its snapshots and their COW devices, as if they were the
//! drives of one machine.

use std::sync::Arc;
use std::time::Duration;

use freestone::power::CutReport;
use freestone::quiesce::ClosedGuard;

use super::super::registry::Registry;
use super::super::{Entry, KindSpec, finish_entry};
use super::cow::PendingCow;
use super::{PendingKind, PreparedSnapshot, take_all};
use crate::layers::CutError;
use crate::refusal::Refusal;

/// Maximum time that a power cut waits for requests in flight.
const QUIET_WAIT: Duration = Duration::from_secs(10);

/// Result of the power cut of one drive.
pub type CutOutcome = Result<CutReport, CutError>;

/// Origin with its snapshots and their COW devices.
pub struct SnapshotStack {
    origin: Arc<Entry>,
    /// Snapshots of the origin that store copies.
    pub snapshots: Vec<Arc<Entry>>,
}

impl SnapshotStack {
    /// Returns the stack that contains a snapshot, or `None` if the device is not a snapshot that
    /// stores copies.
    pub fn of(snapshot: &Entry, registry: &Registry) -> Option<Self> {
        snapshot.kind.cow()?;
        let origin = registry.find(snapshot.spec.kind.parent_name()?)?;
        let is_of = |entry: &Arc<Entry>| {
            entry.kind.cow().is_some()
                && entry.dependencies().iter().any(|needed| Arc::ptr_eq(needed, &origin))
        };
        let snapshots = registry.all().into_iter().filter(is_of).collect();
        Some(Self { origin, snapshots })
    }

    /// Returns the drives of the stack: the origin, then the COW devices.
    pub fn drives(&self) -> Vec<&Arc<Entry>> {
        let cows = self.snapshots.iter().flat_map(|snapshot| snapshot.dependencies());
        let cows = cows.filter(|needed| !Arc::ptr_eq(needed, &self.origin));
        std::iter::once(&self.origin).chain(cows).collect()
    }

    /// Returns the names of the drives and snapshots of the stack.
    pub fn names(&self) -> Vec<&str> {
        self.drives().into_iter().chain(&self.snapshots).map(|entry| entry.name()).collect()
    }

    /// Cuts the power of all drives that allow power cuts, with one seed, while no requests reach
    /// the drives. Returns the name and result of each of these drives. The snapshots must be
    /// [reopened](Self::reopen) afterwards. Clients should be disconnected before.
    ///
    /// # Errors
    /// Returns the name of a device whose requests did not complete in time. Then the power of no
    /// drive was cut.
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
                let Some(shut_gate) = device.gate.close(QUIET_WAIT) else {
                    busy_snapshot = Some(busy(snapshot));
                    return false;
                };
                shut.push(shut_gate);
            }
            // From now on the cut cannot be undone, because later writes to the COW devices are
            // lost.
            shut.into_iter().for_each(ClosedGuard::keep_closed);
            release_held_requests(&self.origin);
            true
        });
        let Some(off) = off else { return Err(busy_snapshot.unwrap_or_else(|| busy(&self.origin))) };
        let switched = drives.iter().filter_map(|entry| Some((entry, entry.layers.power.as_ref()?)));
        let switched = switched.filter(|(entry, _)| entry.layers.can_cut);
        let cuts = switched.map(|(entry, power)| (entry.name().to_owned(), entry.layers.cut(power, seed)));
        let cuts = cuts.collect();
        off.invalidate_snapshots();
        Ok(cuts)
    }

    /// Opens a snapshot again after the power cut, with the content of its COW device.
    ///
    /// # Errors
    /// Fails if the COW store is transient, so that it was lost, or if it cannot be opened.
    pub fn reopen(&self, old: &Entry) -> Result<Entry, Refusal> {
        let KindSpec::Snapshot(spec) = &old.spec.kind else { unreachable!("the stack has only snapshots") };
        if !spec.cow.as_ref().is_some_and(|cow| cow.store.is_persistent()) {
            refuse!(EIO, "{}: a transient store does not outlive the loss of power", old.name());
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

/// Completes requests that a fault rule hangs after they were executed, and fails those held since
/// a power-cut countdown ended. Clients are disconnected by then.
fn release_held_requests(drive: &Arc<Entry>) {
    if let Some(faults) = &drive.layers.faults {
        faults.release();
    }
    if let Some(power) = &drive.layers.power {
        power.fail_held_requests();
    }
}

/// Guard that switches the power of the drives on again when it is dropped.
struct PowerOnGuard<'a>(&'a [&'a Arc<Entry>]);

impl Drop for PowerOnGuard<'_> {
    fn drop(&mut self) {
        self.0.iter().filter_map(|drive| drive.layers.power.as_ref()).for_each(|power| power.cancel_cut());
    }
}
