//! `power-cut SNAPSHOT`: the power of a machine with an origin, its snapshots and their COW devices.

use std::sync::Arc;

use freestone_spec::kinds::{Entry, Stack};
use freestone_spec::layers::CutError;
use freestone_spec::refusal::Errno;

use super::power_cut::{PowerCut, Reply, refused};
use super::{Verb, power_cut};
use crate::control::protocol::Fault;
use crate::service::{Service, description};

/// A snapshot with copies whose origin or COW device this is.
pub fn standing_on(service: &Service, entry: &Arc<Entry>) -> Option<Arc<Entry>> {
    let on_it = |other: &Arc<Entry>| {
        other.kind.cow().is_some() && other.needs().iter().any(|needed| Arc::ptr_eq(needed, entry))
    };
    // Mostly nobody does.
    service.registry.users(entry)?;
    service.registry.all().into_iter().find(on_it)
}

/// Why such a device is not cut off.
pub fn alone(entry: &Entry, snapshot: &Entry) -> Fault {
    let (name, snapshot) = (entry.name(), snapshot.name());
    let why = format!(
        "{name}: cannot be cut off alone: {snapshot} stands on it; `freestone power-cut {snapshot}` cuts its origin and \
         COW device at one moment"
    );
    Fault::failed(Errno::EBUSY, why)
}

/// Cuts the power of all that the snapshot `name` is part of, and opens what persists again.
pub fn cut(service: &Service, name: String, seed: Option<u64>) -> Result<Reply, Fault> {
    let gone = || Fault::failed(Errno::EBUSY, format!("{name}: power-cut: was removed at the same time"));
    let stack = |entry: &Entry| Stack::of(entry, &service.registry).ok_or_else(gone);
    let found = stack(&*service.find(&name)?)?;
    let names = found.names();
    let _claim = service.claim_all(PowerCut::METHOD, &names)?;
    // What was there before may be gone, and others may have come.
    let stack = stack(&*service.find(&name)?)?;
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
    let _job = service.jobs.begin(&name, "power-cut")?;
    // What waits for room would be waited for.
    let _now: Vec<_> = drives.iter().filter_map(|drive| drive.no_waiting()).collect();
    let (connections_ended, (cuts, snapshots)) = restart(service, &names, &mut || {
        let cuts = stack.cut(seed);
        let opened = |old: &Arc<Entry>| power_cut::Snapshot::of(old, reopen(service, &stack, old));
        // Where nothing was done they are as they were.
        let snapshots = if cuts.is_ok() { stack.snapshots.iter().map(opened).collect() } else { Vec::new() };
        (cuts, snapshots)
    });
    let cuts = cuts.map_err(|busy| refused(&busy, None, &CutError::Busy))?;
    let done = |(drive, cut): (String, Result<_, _>)| match cut {
        Ok(cut) => Ok((drive, cut)),
        Err(error) => Err(refused(&drive, None, &error)),
    };
    let cuts = cuts.into_iter().map(done).collect::<Result<_, _>>()?;
    Ok(Reply::of_stack(name, seed, cuts, snapshots, connections_ended))
}

/// Opens a snapshot again, in its own place.
fn reopen(service: &Service, stack: &Stack, old: &Arc<Entry>) -> Result<Arc<Entry>, Fault> {
    let new = Arc::new(stack.reopen(old)?);
    service.registry.replace(old, &new).map_err(|why| why.of(old.name()))?;
    if let Some(device) = new.device() {
        service.nbd.replace(new.name(), device, &description(&new), &new.failures);
    }
    new.kind.begin_merge(&new, &service.registry)?;
    Ok(new)
}

/// Does it with nobody connected to any of these.
fn restart<T>(service: &Service, names: &[&str], action: &mut dyn FnMut() -> T) -> (usize, T) {
    let [first, rest @ ..] = names else { return (0, action()) };
    let (ended, (more, done)) = service.nbd.restart(first, || restart(service, rest, action));
    (ended + more, done)
}
