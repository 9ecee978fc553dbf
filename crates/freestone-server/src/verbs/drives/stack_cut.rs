//! `power-cut SNAPSHOT`: simulates a power loss of an origin, its snapshots and their COW devices at one moment.
//!
//! [`super::power_cut`] calls this module. After the power cut, the persistent snapshots are opened again, as
//! after a reboot.

use std::sync::Arc;

use freestone::power::CutReport;
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{CutOutcome, Entry, SnapshotStack};
use freestone_spec::layers::CutError;
use serde::{Deserialize, Serialize};

use crate::jobs::JobKind;
use crate::service::Service;

/// Result of a power cut of an origin with its snapshots.
pub struct StackCut {
    pub seed: u64,
    pub drives: Vec<Drive>,
    pub snapshots: Vec<Snapshot>,
    pub connections_ended: usize,
}

/// An origin or COW device whose power was cut, with its numbers of unflushed blocks.
#[derive(Debug, Serialize, Deserialize)]
pub struct Drive {
    pub name: String,
    pub kept_blocks: u64,
    pub lost_blocks: u64,
}

/// State of a snapshot after the power cut.
#[derive(Debug, Serialize, Deserialize)]
pub struct Snapshot {
    pub name: String,
    /// Status of the snapshot as in dm-snapshot.
    pub status: String,
    /// Reason why the snapshot could not be opened again; None if it was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<String>,
}

impl Snapshot {
    /// Returns the state of the snapshot `old`. `new` is the snapshot opened again, or the reason why it could not be.
    fn of(old: &Entry, new: Result<Arc<Entry>, RpcError>) -> Self {
        let status = |entry: &Entry| entry.kind.cow().map(|snapshot| snapshot.status().to_string());
        let name = old.name().to_owned();
        match new {
            Ok(new) => Self { name, status: status(&new).unwrap_or_default(), lost: None },
            Err(why) => Self { name, status: status(old).unwrap_or_default(), lost: Some(why.message) },
        }
    }
}

/// Returns a snapshot whose origin or COW device is this device, or None if there is no such snapshot.
pub fn find_snapshot_on(service: &Service, entry: &Arc<Entry>) -> Option<Arc<Entry>> {
    let depends = |other: &Arc<Entry>| {
        other.kind.cow().is_some() && other.dependencies().iter().any(|needed| Arc::ptr_eq(needed, entry))
    };
    // Fast path: most devices have no dependents, so the search of all devices is skipped.
    service.registry.users(entry)?;
    service.registry.all().into_iter().find(depends)
}

/// Returns the error for a power cut of a device that is the origin or COW device of `snapshot`.
pub fn single_cut_fault(entry: &Entry, snapshot: &Entry) -> RpcError {
    let (name, snapshot) = (entry.name(), snapshot.name());
    let cut = format!("`freestone power-cut {snapshot}` cuts its origin and COW device at one moment");
    rpc_error!(EBUSY, "{name}: cannot be cut off alone: {snapshot} stands on it; {cut}")
}

/// Cuts the power of the origin of the snapshot `name`, of its snapshots and of their COW devices. Then opens
/// the persistent snapshots again. `failed` converts the error of a device.
pub fn cut(
    service: &Service,
    name: &str,
    seed: Option<u64>,
    failed: &dyn Fn(&str, CutError) -> RpcError,
) -> Result<StackCut, RpcError> {
    let gone = || rpc_error!(EBUSY, "{name}: power-cut: was removed meanwhile");
    let stack = |entry: &Entry| SnapshotStack::of(entry, &service.registry).ok_or_else(gone);
    let found = stack(&*service.find(name)?)?;
    let names = found.names();
    let _claim = service.claim_all("power-cut", &names)?;
    // The set of devices may have changed before they were claimed, so it is determined again.
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
        refuse!(EOPNOTSUPP, "{name}: its power cannot be cut: {why}");
    };
    let seed = seed.unwrap_or_else(|| first.layers.next_seed());
    // Only the origin has a job, so that a running merge of a snapshot does not prevent the cut.
    let _job = service.jobs.begin(drives[0].name(), "power-cut", JobKind::EXCLUSIVE_UNCANCELLABLE)?;
    // Requests that wait for space would delay the restart of the exports. Requests that wait for a rate
    // limit belong to the old content. Therefore both fail.
    let all = drives.iter().copied().chain(&stack.snapshots);
    let _now: Vec<_> = all.flat_map(|entry| service.exports.fail_waiting(entry)).collect();
    let (connections_ended, (cuts, snapshots)) = restart(service, &names, &mut || {
        let cuts = stack.cut(seed);
        let opened = |old: &Arc<Entry>| Snapshot::of(old, reopen(service, &stack, old));
        // If the cut failed, the snapshots are unchanged and need not be opened again.
        let snapshots = if cuts.is_ok() { stack.snapshots.iter().map(opened).collect() } else { Vec::new() };
        (cuts, snapshots)
    });
    let cuts = cuts.map_err(|busy| failed(&busy, CutError::Busy))?;
    let drive = |(name, cut): (String, CutOutcome)| match cut {
        Ok(CutReport { kept_blocks, lost_blocks, .. }) => Ok(Drive { name, kept_blocks, lost_blocks }),
        Err(error) => Err(failed(&name, error)),
    };
    let drives = cuts.into_iter().map(drive).collect::<Result<_, _>>()?;
    Ok(StackCut { seed, drives, snapshots, connections_ended })
}

/// Opens a snapshot again, and replaces its entry in the registry and in the exports.
fn reopen(service: &Service, stack: &SnapshotStack, old: &Arc<Entry>) -> Result<Arc<Entry>, RpcError> {
    let new = Arc::new(stack.reopen(old)?);
    service.registry.replace(old, &new).map_err(|why| why.of(old.name()))?;
    service.exports.replace(&new);
    new.kind.begin_merge(&new, &service.registry)?;
    Ok(new)
}

/// Runs `action` while no client is connected to any of the devices. Returns the number of client connections
/// that were closed, and the result of `action`.
fn restart<T>(service: &Service, names: &[&str], action: &mut dyn FnMut() -> T) -> (usize, T) {
    let [first, rest @ ..] = names else { return (0, action()) };
    let (ended, (more, done)) = service.exports.restart(first, || restart(service, rest, action));
    (ended + more, done)
}
