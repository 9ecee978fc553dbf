//! Restores devices from a file: finds the base of the forks in it, and the family of RAM disks sharing one
//! pool that the devices join.

use std::path::Path;
use std::sync::Arc;

use freestone::device::{self, Device};
use freestone::ram::{Family, Ram};
use freestone::save::{Base, BaseIdentity, Contents, RestoreError, restore_watched};
use freestone_spec::entries::{Entries, SpecError};
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{Entry, KindSpec, Spec};
use freestone_spec::refusal::{Errno, Refusal};
use serde_json::{Map, Value};

use crate::job::Watched;

/// Keys of each restored device, not of its family.
pub const OWN_KEYS: [&str; 4] = ["readonly", TLS_CLIENTS, "keep", "on_lost"];
/// Key that restored forks have as well.
pub const TLS_CLIENTS: &str = "tls_clients";
/// End of the error for a missing base, on a server.
pub const CREATE_BASE: &str = "which does not exist on this server; create that base first";

/// Parameters of a restore.
pub struct Asked<'a> {
    /// Name of the family that is created, if the file has no forks.
    pub name: &'a str,
    /// Specification of a RAM disk with the given keys.
    pub disk: &'a KindSpec,
    /// The given keys.
    pub said: &'a Map<String, Value>,
    /// End of the error for a missing base.
    pub no_base: &'static str,
}

/// Restored devices, not registered yet.
pub struct Restored {
    /// Base of the forks.
    pub base: Option<Arc<Entry>>,
    /// Backing device of a new family.
    pub backing: Option<Arc<Entry>>,
    /// Devices in the order of the file, each with its saved name.
    pub devices: Vec<(String, Ram)>,
}

/// Returns the specification of a RAM disk with these keys. Its size is a placeholder: the file has the sizes.
pub fn disk<'a>(label: &str, keys: impl Iterator<Item = (&'a String, &'a Value)>) -> Result<Spec, SpecError> {
    let mut entries = Entries::new(label, "ram")?;
    entries.add("disksize", "1M")?;
    for (key, value) in keys {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        entries.add(key, &text)?;
    }
    Spec::from_entries(entries)
}

/// Restores all devices of a file. Returns `None` if the job was cancelled; then no device remains.
pub fn make(
    registry: &Registry,
    file: &Path,
    contents: &Contents,
    asked: &Asked<'_>,
    watched: &dyn Watched,
) -> Result<Option<Restored>, Refusal> {
    let base = find_base(registry, contents, asked.no_base, &|| watched.is_over())?;
    if watched.is_over() {
        return Ok(None);
    }
    let of_family = asked.said.keys().find(|key| !OWN_KEYS.contains(&key.as_str()));
    let (family, bases, backing) = match (&base, of_family) {
        (Some(base), None) => (base.family_of(registry)?, vec![as_base(base)], None),
        (Some(base), Some(key)) => {
            let why = format!(
                "{}: {key}: the forks in the file join the family of {}; set it there",
                file.display(),
                base.name()
            );
            return Err(Refusal::failed(Errno::EINVAL, why));
        }
        (None, _) => {
            let (family, backing) = own_family(registry, contents, asked)?;
            (family, Vec::new(), backing)
        }
    };
    let watch = &mut |done, total| {
        watched.note(done, total);
        !watched.is_over()
    };
    match restore_watched(file, &family, &bases, watch) {
        Ok(devices) => Ok(Some(Restored { base, backing, devices })),
        Err(RestoreError::Cancelled) => Ok(None),
        Err(error) => Err(refused(&error)),
    }
}

/// Returns a device as the base of forks.
pub fn as_base(entry: &Entry) -> Base {
    match (entry.kind.memory_snapshot(), entry.device()) {
        (Some(snapshot), _) => Base::Snapshot(Ram::clone(snapshot)),
        (None, Some(device)) => Base::Device(Arc::clone(device)),
        (None, None) => unreachable!("a template cannot be a base"),
    }
}

/// Returns the device that is the base of the forks in a file, or `None` if the file has no forks or the
/// search was cancelled.
///
/// # Errors
/// No device is that base; `no_base` ends the message. Or the file has several bases.
pub fn find_base(
    registry: &Registry,
    contents: &Contents,
    no_base: &str,
    cancelled: &dyn Fn() -> bool,
) -> Result<Option<Arc<Entry>>, Refusal> {
    let wanted = match contents.bases.as_slice() {
        [] => return Ok(None),
        [wanted] => wanted,
        [..] => {
            let why = "its devices were made from several bases; restore supports only one";
            return Err(Refusal::failed(Errno::EINVAL, why));
        }
    };
    for entry in registry.all() {
        let device: &dyn Device = match (entry.kind.memory_snapshot(), entry.device()) {
            (Some(snapshot), _) => &**snapshot,
            (None, Some(device)) if entry.is_outer_base() => &**device,
            _ => continue,
        };
        if device.geometry().size != wanted.size {
            continue;
        }
        // A device that cannot be read does not match.
        let known = BaseIdentity::of_unless(device, wanted.check, cancelled);
        if known == Ok(Some(*wanted)) {
            return Ok(Some(entry));
        }
        if cancelled() {
            return Ok(None);
        }
    }
    let device = contents.devices.iter().find(|device| device.base.is_some());
    let device = device.map_or("its fork", |device| &device.name);
    Err(Refusal::failed(Errno::ENODEV, format!("{device} was made from {wanted}, {no_base}")))
}

/// Creates the family for devices without a base, and returns it with its backing device. Unless the keys
/// say otherwise, the pages are compressed as in the file.
fn own_family(
    registry: &Registry,
    contents: &Contents,
    asked: &Asked<'_>,
) -> Result<(Family, Option<Arc<Entry>>), Refusal> {
    let KindSpec::Ram(disk) = asked.disk else { unreachable!("`disk` creates a RAM disk") };
    let mut family = disk.family.clone();
    let size = contents.devices.iter().map(|device| device.size).sum();
    if let (false, Some(first)) = (asked.said.contains_key("comp_algorithm"), contents.devices.first()) {
        family.comp_algorithm = first.comp_algorithm;
        if first.level != 0 && family.algorithm_params.is_empty() {
            family.algorithm_params = format!("level={}", first.level);
        }
    }
    let backing = registry.backing(&family)?;
    let family = registry.new_family(asked.name, &family, size, backing.as_ref())?;
    Ok((family, backing))
}

/// Returns the error of a failed restore.
pub fn refused(error: &RestoreError) -> Refusal {
    let errno = match error {
        RestoreError::Foreign(_) | RestoreError::Newer { .. } | RestoreError::Incomplete(_) => Errno::EINVAL,
        RestoreError::BaseMissing { .. } | RestoreError::BaseDiffers { .. } => Errno::ENODEV,
        RestoreError::Store { error: device::Error::NoSpace, .. } => Errno::ENOSPC,
        RestoreError::NoMemory => Errno::ENOMEM,
        _ => Errno::EIO,
    };
    let hint = if errno == Errno::ENOSPC { "; use a larger mem_limit, or a backing_dev" } else { "" };
    Refusal::failed(errno, format_args!("{error}{hint}"))
}
