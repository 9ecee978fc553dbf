//! An origin with its snapshots and their COW devices: parts of one machine, whose power is lost for
//! all of them at one moment.

use std::sync::Arc;
use std::time::Duration;

use freestone::power::Cut;
use freestone::quiesce::Shut;

use super::super::registry::Registry;
use super::super::{Entry, KindSpec, finished};
use super::cow::PendingCow;
use super::{Begun, Which, take};
use crate::layers::CutError;
use crate::refusal::{Errno, Refusal};

/// How long the power waits for what the devices are doing.
const QUIET_WAIT: Duration = Duration::from_secs(10);

/// What a cut did to a drive.
pub type CutOutcome = Result<Cut, CutError>;

/// All that has something to do with the snapshots of one origin.
pub struct Stack {
    origin: Arc<Entry>,
    /// Those with copies.
    pub snapshots: Vec<Arc<Entry>>,
}

impl Stack {
    /// Of which `snapshot` is one; `None` where it is no snapshot with copies.
    pub fn of(snapshot: &Entry, registry: &Registry) -> Option<Self> {
        snapshot.kind.cow()?;
        let origin = registry.find(snapshot.spec.kind.below()?)?;
        let is_of = |entry: &Arc<Entry>| {
            entry.kind.cow().is_some() && entry.needs().iter().any(|needed| Arc::ptr_eq(needed, &origin))
        };
        let snapshots = registry.all().into_iter().filter(is_of).collect();
        Some(Self { origin, snapshots })
    }

    /// Origin and COW devices.
    pub fn drives(&self) -> Vec<&Arc<Entry>> {
        let cows = self.snapshots.iter().flat_map(|snapshot| snapshot.needs());
        let cows = cows.filter(|needed| !Arc::ptr_eq(needed, &self.origin));
        std::iter::once(&self.origin).chain(cows).collect()
    }

    /// What is worked on: drives and snapshots.
    pub fn names(&self) -> Vec<&str> {
        self.drives().into_iter().chain(&self.snapshots).map(|entry| entry.name()).collect()
    }

    /// Cuts the power of all drives that have a switch, by one seed, while nothing gets to any of
    /// them. Says what that did to each. After that the snapshots are lost, until they are
    /// [opened](Self::reopen) again. Nobody should be connected any more.
    ///
    /// # Errors
    /// Who is busy for too long. No power was cut.
    pub fn cut(&self, seed: u64) -> Result<Vec<(String, CutOutcome)>, String> {
        let busy = |entry: &Entry| entry.name().to_owned();
        let drives = self.drives();
        let Some(origin) = &self.origin.cow_origin else { return Ok(Vec::new()) };
        let _on = KeepOn(&drives);
        let mut late = None;
        let off = origin.power_off(QUIET_WAIT, || {
            drives.iter().skip(1).copied().for_each(let_go);
            let mut shut = Vec::new();
            for snapshot in &self.snapshots {
                let Some(device) = snapshot.kind.cow_device() else { continue };
                let Some(lead) = device.lead.shut(QUIET_WAIT) else {
                    late = Some(busy(snapshot));
                    return false;
                };
                shut.push(lead);
            }
            // No way back: what comes from the stores from now on is lost.
            shut.into_iter().for_each(Shut::for_good);
            let_go(&self.origin);
            true
        });
        let Some(off) = off else { return Err(late.unwrap_or_else(|| busy(&self.origin))) };
        let switched = drives.iter().filter_map(|entry| Some((entry, entry.layers.power.as_ref()?)));
        let switched = switched.filter(|(entry, _)| entry.layers.can_cut);
        let cuts = switched.map(|(entry, power)| (entry.name().to_owned(), entry.layers.cut(power, seed)));
        let cuts = cuts.collect();
        off.lose();
        Ok(cuts)
    }

    /// What is there after the reboot in the place of one of the snapshots: what its store holds.
    ///
    /// # Errors
    /// A transient store is lost; one that cannot be opened.
    pub fn reopen(&self, old: &Entry) -> Result<Entry, Refusal> {
        let KindSpec::Snapshot(asked) = &old.spec.kind else { unreachable!("only snapshots come here") };
        if !asked.cow.as_ref().is_some_and(|cow| cow.store.is_persistent()) {
            let why = "a transient store does not outlive the loss of power";
            return Err(Refusal::failed(Errno::EIO, format!("{}: {why}", old.name())));
        }
        let pending = PendingCow::again(asked, &self.origin, old).map_err(|why| why.of(old.name()))?;
        let mut begun = [Begun { pending: Which::Cow(pending), origin: Arc::clone(&self.origin) }];
        take(&mut begun).map_err(|(_, why)| why.of(old.name()))?;
        let [begun] = begun;
        let mut new = finished(old.spec.clone(), begun.finish())?;
        new.take_limits_of(old)?;
        Ok(new)
    }
}

/// What hangs is done already, and who waits for the power to be cut is gone.
fn let_go(drive: &Arc<Entry>) {
    if let Some(faults) = &drive.layers.faults {
        faults.release();
    }
    if let Some(power) = &drive.layers.power {
        power.let_go();
    }
}

/// Whatever comes of it, the drives have power in the end.
struct KeepOn<'a>(&'a [&'a Arc<Entry>]);

impl Drop for KeepOn<'_> {
    fn drop(&mut self) {
        self.0.iter().filter_map(|drive| drive.layers.power.as_ref()).for_each(|power| power.keep_on());
    }
}
