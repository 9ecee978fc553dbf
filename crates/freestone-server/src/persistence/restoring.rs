//! Restores devices from a saved file: finds the base of the forks in the file, and the family that the devices join. A
//! family is a group of RAM disks and forks that share one pool of compressed pages.

use std::path::Path;
use std::sync::Arc;

use freestone::device::{self, Device};
use freestone::ram::{Family, Ram};
use freestone::save::{Base, BaseIdentity, Contents, RestoreError, restore_with_progress};
use freestone_spec::aliases;
use freestone_spec::entries::{Entries, SpecError};
use freestone_spec::kinds::registry::Registry;
use freestone_spec::kinds::{Entry, KindSpec, Spec};
use freestone_spec::refusal::{Errno, Refusal};
use serde_json::{Map, Value};

use crate::jobs::ProgressSink;

/// Keys that apply to each restored device, not to its family.
pub const OWN_KEYS: [&str; 4] = ["readonly", TLS_CLIENTS, "keep", "on_data_loss"];
/// Key for the clients that may use a device over TLS. Restored forks keep this key.
pub const TLS_CLIENTS: &str = "tls_clients";
/// End of the error message for a missing base, if a running server restores the file.
pub const CREATE_BASE: &str = "which does not exist on this server; create that base first";

/// Parameters of a restore.
pub struct RestoreRequest<'a> {
    /// Name of the new family, which is created if the file contains no forks.
    pub name: &'a str,
    /// Specification of a RAM disk with `keys`, from [`disk`].
    pub disk: &'a KindSpec,
    /// Keys that the user has specified, with their values.
    pub keys: &'a Map<String, Value>,
    /// End of the error message for a missing base.
    pub no_base: &'static str,
}

/// Restored devices, not registered yet.
pub struct RestoredDevices {
    /// Base of the restored forks, or `None` if the file contains no forks.
    pub base: Option<Arc<Entry>>,
    /// Backing device of the new family, or `None` without one.
    pub backing: Option<Arc<Entry>>,
    /// Restored devices in the order of the file, each with its saved name.
    pub devices: Vec<(String, Ram)>,
}

/// Returns the specification of a RAM disk with these keys. Its size is a placeholder, because the file contains the
/// sizes.
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
pub fn restore_devices(
    registry: &Registry,
    file: &Path,
    contents: &Contents,
    request: &RestoreRequest<'_>,
    progress: &dyn ProgressSink,
) -> Result<Option<RestoredDevices>, Refusal> {
    let base = find_base(registry, contents, request.no_base, &|| progress.should_stop())?;
    if progress.should_stop() {
        return Ok(None);
    }
    let of_family = request.keys.keys().find(|key| !OWN_KEYS.contains(&aliases::canonical_device_key(key)));
    let (family, bases, backing) = match (&base, of_family) {
        (Some(base), None) => (base.ensure_family(registry)?, vec![as_base(base)], None),
        (Some(base), Some(key)) => {
            let why = format!(
                "{}: {key}: the forks in the file join the family of {}; set it there",
                file.display(),
                base.name()
            );
            return Err(Refusal::failed(Errno::EINVAL, why));
        }
        (None, _) => {
            let (family, backing) = own_family(registry, contents, request)?;
            (family, Vec::new(), backing)
        }
    };
    let watch = &mut |done, total| {
        progress.report(done, total);
        !progress.should_stop()
    };
    match restore_with_progress(file, &family, &bases, watch) {
        Ok(devices) => Ok(Some(RestoredDevices { base, backing, devices })),
        Err(RestoreError::Cancelled) => Ok(None),
        Err(error) => Err(refused(&error)),
    }
}

/// Returns a device as the base of restored forks.
pub fn as_base(entry: &Entry) -> Base {
    match (entry.kind.memory_snapshot(), entry.device()) {
        (Some(snapshot), _) => Base::Snapshot(Ram::clone(snapshot)),
        (None, Some(device)) => Base::Device(Arc::clone(device)),
        (None, None) => unreachable!("a template cannot be a base"),
    }
}

/// Returns the device that is the base of the forks in a file. Returns `None` if the file has no forks or the search
/// was cancelled.
///
/// # Errors
/// Fails if no device is that base (`no_base` ends the message), or if the file has several bases.
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
        let known = BaseIdentity::of_cancellable(device, wanted.check, cancelled);
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

/// Creates the family for devices without a base, and returns it with its backing device. Unless `comp_algorithm` is
/// set, pages are compressed with the algorithm of the first device in the file.
fn own_family(
    registry: &Registry,
    contents: &Contents,
    request: &RestoreRequest<'_>,
) -> Result<(Family, Option<Arc<Entry>>), Refusal> {
    let KindSpec::Ram(disk) = request.disk else { unreachable!("`disk` creates a RAM disk") };
    let mut family = disk.family.clone();
    let size = contents.devices.iter().map(|device| device.size).sum();
    if let (false, Some(first)) = (request.keys.contains_key("comp_algorithm"), contents.devices.first()) {
        family.comp_algorithm = first.comp_algorithm;
        if first.level != 0 && family.algorithm_params.is_empty() {
            family.algorithm_params = format!("level={}", first.level);
        }
    }
    let backing = registry.backing(&family)?;
    let family = registry.new_family(request.name, &family, size, backing.as_ref(), true)?;
    Ok((family, backing))
}

/// Returns the error for a failed restore, with a hint if the pool is full.
pub fn refused(error: &RestoreError) -> Refusal {
    let errno = match error {
        RestoreError::Foreign(_) | RestoreError::Newer { .. } | RestoreError::Incomplete(_) => Errno::EINVAL,
        RestoreError::BaseMissing { .. } | RestoreError::BaseMismatch { .. } => Errno::ENODEV,
        RestoreError::Store { error: device::Error::NoSpace, .. } => Errno::ENOSPC,
        RestoreError::NoMemory => Errno::ENOMEM,
        _ => Errno::EIO,
    };
    let hint = if errno == Errno::ENOSPC { "; use a larger mem_limit, or a backing_dev" } else { "" };
    Refusal::failed(errno, format_args!("{error}{hint}"))
}
