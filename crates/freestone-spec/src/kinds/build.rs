//! Builds devices: the kind of the device opens the data, then the layers are added.

use std::sync::{Arc, Weak};

use freestone::cow;
use freestone::device::Device;
use tracing::warn;

use super::registry::Registry;
use super::{Entry, KindInstance, Spec};
use crate::advice;
use crate::layers::{self, Layers};
use crate::refusal::Refusal;

/// Device opened by its kind, before the layers are added.
pub struct DataDevice {
    /// Kind-specific part of the device.
    pub(super) kind: Box<dyn KindInstance>,
    /// The device without its layers, or `None` for a template.
    pub(super) device: Option<Arc<dyn Device>>,
    /// Other devices of the server on which the device depends.
    pub(super) dependencies: Vec<Arc<Entry>>,
    /// Backing device of the family, if it is a device of the server. Also one of the dependencies
    /// of the device.
    pub(super) backing: Option<Arc<Entry>>,
    /// Origin of a snapshot in memory, and how often the origin had been reset when the snapshot
    /// was taken.
    pub(super) origin: Option<(Weak<Entry>, u64)>,
}

impl DataDevice {
    /// Creates a device that does not depend on other devices.
    pub(super) fn standalone(kind: impl KindInstance + 'static, device: Arc<dyn Device>) -> Self {
        Self {
            kind: Box::new(kind),
            device: Some(device),
            dependencies: Vec::new(),
            backing: None,
            origin: None,
        }
    }
}

/// Builds a device. Devices on which it depends must be in the registry. The new device is not
/// added to the registry.
pub fn build(spec: Spec, registry: &Registry) -> Result<Entry, Refusal> {
    freestone::trail::step!();
    let built = spec.kind.build(&spec, registry).map_err(|refusal| refusal.of(&spec.name))?;
    finish_entry(spec, built).inspect(warn_of_record)
}

/// Logs the warning of [`Entry::record_warning`], if there is one.
pub(super) fn warn_of_record(entry: &Entry) {
    if let Some(warning) = entry.record_warning() {
        warn!("{warning}");
    }
}

impl Entry {
    /// Returns a warning if the device records a log of writes whose points cannot be visited,
    /// because power cuts are not enabled. Returns `None` for devices that can never be restored to
    /// a point, because their logs are for `replay-log`.
    pub fn record_warning(&self) -> Option<String> {
        let Spec { name, kind, layers, .. } = &self.spec;
        let log = layers.record.as_deref()?;
        // A template has no layers itself. Its specification contains the layers of its forks.
        let can_cut = self.layers.can_cut || layers.power_cut;
        let can_visit = (self.kind.can_wipe() || kind.fork().is_some()) && layers.zones.is_none();
        (can_visit && !can_cut).then(|| advice::record_warning(name, log))
    }
}

/// Adds the layers of `spec` to an opened device, and applies the other settings.
pub(super) fn finish_entry(spec: Spec, built: DataDevice) -> Result<Entry, Refusal> {
    let DataDevice { kind, device, mut dependencies, backing, origin } = built;
    if let Some(backing) = &backing
        && !dependencies.iter().any(|needed| Arc::ptr_eq(needed, backing))
    {
        dependencies.push(Arc::clone(backing));
    }
    let (device, layers) = match device {
        Some(device) => {
            let over = layers::add_layers(&spec.layers, &spec.kind.data_info(), device);
            let (top, layers) = over.map_err(|refusal| refusal.of(&spec.name))?;
            (Some(top), layers)
        }
        None => (None, Layers::default()),
    };
    // The origin of snapshots is above all layers, as device-mapper is above a drive. So faults and
    // power cuts act like those of a drive.
    let cow_origin = device.as_ref().filter(|device| {
        let geometry = device.geometry();
        kind.check_origin().is_ok() && !geometry.read_only && geometry.zones.is_none()
    });
    let cow_origin = cow_origin.map(|device| cow::Origin::with_notes(Arc::clone(device), Some(kind.notes())));
    let device = cow_origin.clone().map(|origin| Arc::new(origin) as Arc<dyn Device>).or(device);
    let mut entry = Entry::new(spec, kind, device, dependencies);
    entry.join_base();
    (entry.layers, entry.origin, entry.cow_origin, entry.backing) = (layers, origin, cow_origin, backing);
    entry.set_limits(entry.spec.limits)?;
    if let Some((key, value)) = entry.kind.resolved_key() {
        entry.words.put(&entry.spec, key, &value);
    }
    Ok(entry)
}
