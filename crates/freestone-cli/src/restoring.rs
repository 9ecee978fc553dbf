//! How what was saved becomes devices again: the base that it needs, the family that it is in.

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

/// Keys that are not of the family, but of what is restored: clients cannot write, and who they are.
pub const OWN_KEYS: [&str; 2] = ["readonly", TLS_CLIENTS];
/// The latter, which forks have as well.
pub const TLS_CLIENTS: &str = "tls_clients";
/// The base that is missing has to be there on a server.
pub const CREATE_BASE: &str = "which no device here is; create that base first";

/// What was asked for besides the file.
pub struct Asked<'a> {
    /// The name of a family that is made.
    pub name: &'a str,
    /// A RAM disk with the keys that were given.
    pub disk: &'a KindSpec,
    /// These keys.
    pub said: &'a Map<String, Value>,
    /// What is told of a base that is not there.
    pub no_base: &'static str,
}

/// The devices of a file. Nobody else has them.
pub struct Restored {
    /// What its forks were made of.
    pub base: Option<Arc<Entry>>,
    /// What takes pages of the family that begins with them.
    pub backing: Option<Arc<Entry>>,
    /// In the order of the file, each with the name that it was saved with.
    pub devices: Vec<(String, Ram)>,
}

/// A RAM disk with keys of a family, and what else such a disk has but its size, which is the
/// file's.
pub fn disk<'a>(label: &str, keys: impl Iterator<Item = (&'a String, &'a Value)>) -> Result<Spec, SpecError> {
    let mut entries = Entries::new(label, "ram")?;
    entries.add("disksize", "1M")?;
    for (key, value) in keys {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        entries.add(key, &text)?;
    }
    Spec::from_entries(entries)
}

/// Makes all devices of a file. `None`: it was ended early, and nothing is left.
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

/// What the forks of a device read where they have nothing of their own.
pub fn as_base(entry: &Entry) -> Base {
    match (entry.kind.memory_snapshot(), entry.device()) {
        (Some(snapshot), _) => Base::Snapshot(Ram::clone(snapshot)),
        (None, Some(device)) => Base::Device(Arc::clone(device)),
        (None, None) => unreachable!("a template is no base"),
    }
}

/// The base that the forks in a file were made of, among the devices that are there; `no_base` is
/// told where it is not.
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
            let why = "its devices were made from several bases, which cannot share one family here";
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
        // One that cannot be read is not it.
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

/// The family of disks that stand on nothing, and the device that takes its pages. They are compressed
/// as they were, unless something else was said.
fn own_family(
    registry: &Registry,
    contents: &Contents,
    asked: &Asked<'_>,
) -> Result<(Family, Option<Arc<Entry>>), Refusal> {
    let KindSpec::Ram(disk) = asked.disk else { unreachable!("it was made as one") };
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

/// Why nothing was restored.
pub fn refused(error: &RestoreError) -> Refusal {
    let errno = match error {
        RestoreError::Foreign(_) | RestoreError::Newer { .. } | RestoreError::Incomplete(_) => Errno::EINVAL,
        RestoreError::BaseMissing { .. } | RestoreError::BaseDiffers { .. } => Errno::ENODEV,
        RestoreError::Store { error: device::Error::NoSpace, .. } => Errno::ENOSPC,
        RestoreError::NoMemory => Errno::ENOMEM,
        _ => Errno::EIO,
    };
    let hint = if errno == Errno::ENOSPC { "; a larger mem_limit, or a backing_dev, makes room" } else { "" };
    Refusal::failed(errno, format_args!("{error}{hint}"))
}
