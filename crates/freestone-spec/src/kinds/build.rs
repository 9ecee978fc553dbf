//! Building a device: its kind opens the data, then the layers are added.

use std::sync::{Arc, Weak};

use freestone::cow;
use freestone::device::Device;
use tracing::warn;

use super::registry::Registry;
use super::{Entry, KindInstance, Spec};
use crate::advice;
use crate::layers::{self, Layers};
use crate::refusal::Refusal;

/// A device that its kind has opened, without its layers.
pub struct Built {
    /// Kind-specific part.
    pub(super) kind: Box<dyn KindInstance>,
    /// The device without its layers. A template has none.
    pub(super) device: Option<Arc<dyn Device>>,
    /// Devices that the device depends on.
    pub(super) needs: Vec<Arc<Entry>>,
    /// Backing device of the family, if it is a device of the server. The device depends on it as well.
    pub(super) backing: Option<Arc<Entry>>,
    /// Origin of a snapshot in memory, and the origin's number of resets at that time.
    pub(super) origin: Option<(Weak<Entry>, u64)>,
}

impl Built {
    /// Creates a device that depends on no other.
    pub(super) fn standalone(kind: impl KindInstance + 'static, device: Arc<dyn Device>) -> Self {
        Self { kind: Box::new(kind), device: Some(device), needs: Vec::new(), backing: None, origin: None }
    }
}

/// Builds a device. The devices it depends on are in the registry. The device is not added to it.
pub fn build(spec: Spec, registry: &Registry) -> Result<Entry, Refusal> {
    let built = spec.kind.build(&spec, registry).map_err(|refusal| refusal.of(&spec.name))?;
    finish_entry(spec, built).inspect(warn_of_record)
}

/// Logs the warning of [`Entry::record_warning`].
pub(super) fn warn_of_record(entry: &Entry) {
    if let Some(warning) = entry.record_warning() {
        warn!("{warning}");
    }
}

impl Entry {
    /// Returns a warning if the device records a log whose points cannot be visited, because power cuts are not
    /// enabled. Devices that cannot be set to an earlier point at all have no warning, because their logs are for
    /// `replay-log`.
    pub fn record_warning(&self) -> Option<String> {
        let Spec { name, kind, layers, .. } = &self.spec;
        let log = layers.record.as_deref()?;
        // A template has no layers itself. Its specification has those of its forks.
        let can_cut = self.layers.can_cut || layers.power_cut;
        let can_visit = (self.kind.can_wipe() || kind.fork().is_some()) && layers.zones.is_none();
        (can_visit && !can_cut).then(|| advice::record_warning(name, log))
    }
}

/// Adds the layers and the settings of `spec`.
pub(super) fn finish_entry(spec: Spec, built: Built) -> Result<Entry, Refusal> {
    let Built { kind, device, mut needs, backing, origin } = built;
    if let Some(backing) = &backing
        && !needs.iter().any(|needed| Arc::ptr_eq(needed, backing))
    {
        needs.push(Arc::clone(backing));
    }
    let (device, layers) = match device {
        Some(device) => {
            let over = layers::add_layers(&spec.layers, &spec.kind.data_info(), device);
            let (top, layers) = over.map_err(|refusal| refusal.of(&spec.name))?;
            (Some(top), layers)
        }
        None => (None, Layers::default()),
    };
    // The origin is above all layers, as device-mapper is above a drive. Faults and power cuts are
    // those of the drive.
    let cow_origin = device.as_ref().filter(|device| {
        let geometry = device.geometry();
        kind.check_origin().is_ok() && !geometry.read_only && geometry.zones.is_none()
    });
    let cow_origin = cow_origin.map(|device| cow::Origin::noted(Arc::clone(device), Some(kind.notes())));
    let device = cow_origin.clone().map(|origin| Arc::new(origin) as Arc<dyn Device>).or(device);
    let mut entry = Entry::new(spec, kind, device, needs);
    entry.join_base();
    (entry.layers, entry.origin, entry.cow_origin, entry.backing) = (layers, origin, cow_origin, backing);
    entry.set_limits(entry.spec.limits)?;
    if let Some((key, value)) = entry.kind.resolved_key() {
        entry.words.put(&entry.spec, key, &value);
    }
    Ok(entry)
}
