//! `power-cut SNAPSHOT`: simulates a power loss of an origin, its snapshots and their COW devices
//! at one moment.
//!
//! Called by [`super::power_cut`]. Afterwards, the persistent snapshots are opened again, as after
//! a reboot.

use std::sync::Arc;

use freestone::power::Cut;
use freestone_spec::kinds::{CutOutcome, Entry, Stack};
use freestone_spec::layers::CutError;
use freestone_spec::refusal::Errno;
use serde::{Deserialize, Serialize};

use crate::control::protocol::Fault;
use crate::job::JobKind;
use crate::service::Service;

/// Result of a cut.
pub struct StackCut {
    pub seed: u64,
    pub drives: Vec<Drive>,
    pub snapshots: Vec<Snapshot>,
    pub connections_ended: usize,
}

/// An origin or COW device that was cut.
#[derive(Debug, Serialize, Deserialize)]
pub struct Drive {
    pub name: String,
    pub kept_blocks: u64,
    pub lost_blocks: u64,
}

/// A snapshot after the cut.
#[derive(Debug, Serialize, Deserialize)]
pub struct Snapshot {
    pub name: String,
    /// Status as in dm-snapshot.
    pub status: String,
    /// Reason why the snapshot could not be opened again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

impl Snapshot {
    /// Returns the state of the snapshot `old`, which was opened again as `new` or could not be.
    fn of(old: &Entry, new: Result<Arc<Entry>, Fault>) -> Self {
        let status = |entry: &Entry| entry.kind.cow().map(|snapshot| snapshot.status().to_string());
        let name = old.name().to_owned();
        match new {
            Ok(new) => Self { name, status: status(&new).unwrap_or_default(), lost: None },
            Err(why) => Self { name, status: status(old).unwrap_or_default(), lost: Some(why.message) },
        }
    }
}

/// Returns a snapshot that has the device as its origin or COW device.
pub fn find_snapshot_on(service: &Service, entry: &Arc<Entry>) -> Option<Arc<Entry>> {
    let depends = |other: &Arc<Entry>| {
        other.kind.cow().is_some() && other.needs().iter().any(|needed| Arc::ptr_eq(needed, entry))
    };
    // Fast path: most devices have no dependents.
    service.registry.users(entry)?;
    service.registry.all().into_iter().find(depends)
}

/// Returns the error for a cut of a device that a snapshot depends on.
pub fn single_cut_fault(entry: &Entry, snapshot: &Entry) -> Fault {
    let (name, snapshot) = (entry.name(), snapshot.name());
    let why = format!(
        "{name}: cannot be cut off alone: {snapshot} stands on it; `freestone power-cut {snapshot}` cuts its origin and \
         COW device at one moment"
    );
    Fault::failed(Errno::EBUSY, why)
}

/// Cuts the power of the stack of the snapshot `name`, and opens the persistent snapshots again.
/// `failed` converts the error of a drive.
pub fn cut(
    service: &Service,
    name: &str,
    seed: Option<u64>,
    failed: &dyn Fn(&str, CutError) -> Fault,
) -> Result<StackCut, Fault> {
    let gone = || Fault::failed(Errno::EBUSY, format!("{name}: power-cut: was removed meanwhile"));
    let stack = |entry: &Entry| Stack::of(entry, &service.registry).ok_or_else(gone);
    let found = stack(&*service.find(name)?)?;
    let names = found.names();
    let _claim = service.claim_all("power-cut", &names)?;
    // The stack may have changed before the claim.
    let stack = stack(&*service.find(name)?)?;
    if stack.names() != names {
        return Err(gone());
    }
    for snapshot in &stack.snapshots {
        service.registry.check_unused(snapshot, "cut off")?;
    }
    let drives = stack.drives();
    let Some(first) = drives.iter().find(|drive| drive.layers.can_cut) else {
        let [origin, ..] = drives[..] else { return Err(gone()) };
        let why = format!("create {} or its COW device with power_cut=yes", origin.name());
        return Err(Fault::failed(Errno::EOPNOTSUPP, format!("{name}: its power cannot be cut: {why}")));
    };
    let seed = seed.unwrap_or_else(|| first.layers.next_seed());
    // Only the origin has a job: a merge of a snapshot does not prevent the cut.
    let _job = service.jobs.begin(drives[0].name(), "power-cut", JobKind::EXCLUSIVE_UNCANCELLABLE)?;
    // Requests that wait for space would delay the restart, and requests that wait for a rate limit
    // belong to the old content: both fail.
    let all = drives.iter().copied().chain(&stack.snapshots);
    let _now: Vec<_> = all.flat_map(|entry| service.exports.end_waiting(entry)).collect();
    let (connections_ended, (cuts, snapshots)) = restart(service, &names, &mut || {
        let cuts = stack.cut(seed);
        let opened = |old: &Arc<Entry>| Snapshot::of(old, reopen(service, &stack, old));
        // If the cut failed, the snapshots are unchanged.
        let snapshots = if cuts.is_ok() { stack.snapshots.iter().map(opened).collect() } else { Vec::new() };
        (cuts, snapshots)
    });
    let cuts = cuts.map_err(|busy| failed(&busy, CutError::Busy))?;
    let drive = |(name, cut): (String, CutOutcome)| match cut {
        Ok(Cut { kept_blocks, lost_blocks, .. }) => Ok(Drive { name, kept_blocks, lost_blocks }),
        Err(error) => Err(failed(&name, error)),
    };
    let drives = cuts.into_iter().map(drive).collect::<Result<_, _>>()?;
    Ok(StackCut { seed, drives, snapshots, connections_ended })
}

/// Opens a snapshot again, and replaces its entry.
fn reopen(service: &Service, stack: &Stack, old: &Arc<Entry>) -> Result<Arc<Entry>, Fault> {
    let new = Arc::new(stack.reopen(old)?);
    service.registry.replace(old, &new).map_err(|why| why.of(old.name()))?;
    service.exports.replace(&new);
    new.kind.begin_merge(&new, &service.registry)?;
    Ok(new)
}

/// Runs `action` while no client is connected to any of the devices. Returns the number of closed
/// connections.
fn restart<T>(service: &Service, names: &[&str], action: &mut dyn FnMut() -> T) -> (usize, T) {
    let [first, rest @ ..] = names else { return (0, action()) };
    let (ended, (more, done)) = service.exports.restart(first, || restart(service, rest, action));
    (ended + more, done)
}
