//! Creates a device of the state directory again, with its saved content.

use std::collections::HashSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use freestone::mutants::{self, Mutant};
use freestone_control::protocol::RpcError;
use freestone_spec::kinds::{self, DataLossPolicy, Entry, Identity, Spec};
use freestone_spec::size;
use freestone_state::Device;
use tracing::{error, warn};

use crate::changes::recording;
use crate::exports::Withheld;
use crate::persistence::recorded::{RecordedDevice, RecordedDevices};
use crate::persistence::saves::start::{SavedContent, SavedContents};
use crate::service::Service;
use crate::settings::paths::parse_address;
use crate::startup::adoption::HeldFamilies;

/// Reason of an absent export of a device that has just been created.
pub(super) const NOT_YET: &str = "the device has just been created";

/// Context for creating the devices of the state directory again.
pub struct RestartContext {
    pub(super) recorded: RecordedDevices,
    pub(super) saved: SavedContents,
    pub(super) held: HeldFamilies,
    /// Names of the devices that are missing or have lost content.
    pub(super) lost: HashSet<String>,
    /// True once the control sockets are open: a verb may remove a missing device, or create another one with
    /// its name.
    pub(super) is_late: bool,
}

impl RestartContext {
    /// Finds the saved content of the devices in `recorded`, and reserves their default exports.
    pub fn new(service: &Service, recorded: RecordedDevices) -> Result<Self, RpcError> {
        let saved = service.saves.find(&recorded)?;
        for Device { name, default_at, .. } in recorded.all().iter().map(|device| &device.record) {
            for address in default_at.iter().filter_map(|text| parse_address(text, None).ok()) {
                service.exports.reserve_default(address, name);
            }
        }
        let held = HeldFamilies::open(service, &recorded);
        Ok(Self { recorded, saved, held, lost: HashSet::new(), is_late: false })
    }
}

/// Returns true if a device of the state is missing, and no verb has removed or replaced it.
pub(super) fn is_missing(service: &Service, device: &Device) -> bool {
    service.records.why_missing(&device.name).is_some()
}

/// Creates a device of the state again, with its exports in the table, but not published. The boolean is true if the
/// content of the device differs from that at the end of the previous server.
pub(super) fn recreate(
    service: &Service,
    recorded_device: &RecordedDevice,
    restart: &mut RestartContext,
) -> Result<(Arc<Entry>, bool), RpcError> {
    let RestartContext { recorded, saved, held, lost, is_late } = restart;
    let device = &recorded_device.record;
    let invalid = |why: String| rpc_error!(EINVAL, "{why}");
    let mut spec = recorded_device.spec.clone().map_err(invalid)?;
    let with_key = |spec: Spec, key, value: &str| {
        let mut words = spec.words;
        words.put(key, value);
        Spec::from_entries(words).map_err(|why| invalid(why.to_string()))
    };
    if let Some(log) = &spec.layers.record
        && path_exists(log)
            .map_err(|why| invalid(format!("record={}: cannot be examined: {why}", log.display())))?
    {
        warn!("{}: {}: the recording ended with the previous server", device.name, log.display());
        let mut words = spec.words;
        words.pairs.retain(|(key, _)| key != "record");
        spec = Spec::from_entries(words).map_err(|why| invalid(why.to_string()))?;
    }
    let known = recorded_device.identity().ok_or_else(|| invalid("its UUID is invalid".to_owned()))?;
    // Checked before anything is opened: if the check fails, no client could use the device.
    service.exports.tls.check_device(&spec)?;
    let adopted = held.find(service, recorded, &spec, known.key())?;
    let is_adopted = adopted.is_some();
    let content = match adopted {
        Some(ram) => {
            saved.supersede(service, device, &ram);
            Some(SavedContent { ram, when: SystemTime::now(), is_exact: true })
        }
        None if spec.keep => saved.take(service, recorded, device, &spec)?,
        None => None,
    };
    let changed = content.as_ref().and_then(|_| changed_base(service, device, &spec));
    if let Some(file) = &changed {
        warn!(device = %device.name, file = %file.display(), "its base changed while no server ran");
        service.saves.put_changed_base(&device.name, file.clone());
    }
    let is_behind = content.as_ref().is_some_and(|content| !content.is_exact);
    let is_base_newly_changed = changed.is_some() && !device.withheld;
    let is_own = is_behind || is_base_newly_changed || (content.is_none() && spec.is_volatile());
    let gone = |name: Option<&str>| name.is_some_and(|name| lost.contains(name));
    let is_lost = is_own || gone(spec.kind.parent_name()) || gone(spec.kind.cow_device_name());
    if is_lost {
        held.lose(known.key());
    }
    if let Some(blocks) = service.exports.block_recovery.get() {
        // Before the content can be used: a failed removal leaves the device missing, with its content.
        let keeps =
            is_adopted && !is_lost && !device.withheld && recorded_device.export_set.has_block_device();
        blocks.remove(&device.name, known, keeps)?;
    }
    if content.is_none()
        && let Some(size) = grown_base_size(service, &spec)
    {
        // The smallest unit of a size in a specification is 1 KiB.
        let size = size::exact(size.next_multiple_of(1 << 10));
        warn!("{}: has {size} now, because its base has grown", device.name);
        spec = with_key(spec, "size", &size)?;
    }
    if gone(spec.kind.cow_device_name()) {
        // The COW device is new and contains nothing to overwrite. When the snapshot was created, the user
        // accepted the loss of the COW device at the end of the server.
        spec = with_key(spec, "force", "yes")?;
    }
    let identity = Identity { generation: known.generation + u64::from(is_lost), ..known };
    let _claim = service.claim_new("serve", [&spec])?;
    if *is_late && !is_missing(service, device) {
        return Err(invalid("was removed or replaced meanwhile".to_owned()));
    }
    let entry = match content {
        None => service.build_entry(spec, Some(identity))?,
        Some(content) => {
            if is_behind {
                service.saves.set_stale(&device.name, content.when);
            }
            let mut entry = kinds::build_kept(spec, content.ram, &service.registry)?;
            entry.identity = identity;
            entry.is_adopted = is_adopted;
            let entry = Arc::new(entry);
            service.add(&entry)?;
            held.remove(known.key());
            entry
        }
    };
    // Set while the device is claimed, so that a verb that removes the device also removes its exports.
    set_exports(service, recorded_device, &entry, is_lost, *is_late);
    Ok((entry, is_lost))
}

/// Puts the exports of a device into the table. The device is withheld if its content is lost.
fn set_exports(service: &Service, recorded: &RecordedDevice, entry: &Entry, is_lost: bool, is_late: bool) {
    let RecordedDevice { record, export_set, unparsed, .. } = recorded;
    for export in unparsed {
        error!("{}: not published at {}: {}", record.name, export.address(), export.why);
    }
    let withholds = entry.restart_policy().on_data_loss.unwrap_or_default() == DataLossPolicy::Withhold
        && !mutants::on(Mutant::LostIsShown);
    service.exports.change(&record.name, |device| {
        device.set_unpublished(export_set.clone(), NOT_YET);
        device.unparsed.clone_from(unparsed);
        device.withheld = (record.withheld || (is_lost && withholds)).then_some(Withheld::LostContent);
        device.is_declared |= record.declared;
        device.is_new = is_late;
    });
}

/// Returns the file of a device's base that has changed since the content of the device was saved, by size,
/// modification time or inode. Returns `None` if no file has changed.
fn changed_base(service: &Service, device: &Device, spec: &Spec) -> Option<PathBuf> {
    let now = recording::base_identities(service, spec, spec.keep);
    // The list is empty if an older version wrote the record, or if the base is a disk without a file
    // identity.
    if device.base.is_empty() {
        return None;
    }
    let same = |number: usize, identity: &String| device.base.get(number) == Some(identity);
    let changed = now.iter().enumerate().find(|(number, (_, identity))| !same(*number, identity));
    let shorter = || now.first().filter(|_| now.len() < device.base.len());
    changed.map(|(_, file)| file).or_else(shorter).map(|(file, _)| file.clone())
}

/// Returns the size in bytes of a fork's or template's base if it is above the recorded size of the fork. A
/// snapshot whose content is lost is created again with the present size of its origin, and the file of a base
/// can grow while no server runs.
fn grown_base_size(service: &Service, spec: &Spec) -> Option<u64> {
    let fork = spec.kind.fork()?;
    let base = service.registry.find(&fork.base)?.device()?.geometry().size;
    fork.size.filter(|size| *size < base).map(|_| base)
}

/// Returns true if a path exists, even as a dangling symbolic link.
fn path_exists(path: &Path) -> io::Result<bool> {
    match path.symlink_metadata() {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}
