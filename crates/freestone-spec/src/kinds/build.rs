//! How a device is set up: its data as its kind has it, and its layers over that.

use std::sync::{Arc, Weak};

use freestone::cow;
use freestone::device::Device;

use super::registry::Registry;
use super::{Entry, Made, Spec};
use crate::layers::{self, Layers};
use crate::refusal::Refusal;

/// What came of setting up.
pub struct Built {
    /// The device, for what is not the same for all kinds.
    pub(super) kind: Box<dyn Made>,
    /// As exports see it, without its layers; a template has none.
    pub(super) device: Option<Arc<dyn Device>>,
    /// What it stands on.
    pub(super) needs: Vec<Arc<Entry>>,
    /// The device that takes its family's pages, if it is one of the server. It stands on that as well.
    pub(super) backing: Option<Arc<Entry>>,
    /// Of a snapshot in memory: its origin, and how often that had been rewound.
    pub(super) origin: Option<(Weak<Entry>, u64)>,
}

impl Built {
    /// One that stands on nothing.
    pub(super) fn alone(kind: impl Made + 'static, device: Arc<dyn Device>) -> Self {
        Self { kind: Box::new(kind), device: Some(device), needs: Vec::new(), backing: None, origin: None }
    }
}

/// Sets a device up. What it stands on is looked for in the registry, to which it is not added.
pub fn build(spec: Spec, registry: &Registry) -> Result<Entry, Refusal> {
    let built = spec.kind.build(&spec, registry).map_err(|refusal| refusal.of(&spec.name))?;
    finished(spec, built)
}

/// Puts its layers on it.
pub(super) fn finished(spec: Spec, built: Built) -> Result<Entry, Refusal> {
    let Built { kind, device, mut needs, backing, origin } = built;
    if let Some(backing) = &backing
        && !needs.iter().any(|needed| Arc::ptr_eq(needed, backing))
    {
        needs.push(Arc::clone(backing));
    }
    let (device, layers) = match device {
        Some(device) => {
            let over = layers::over(&spec.layers, &spec.kind.below_layers(), device);
            let (top, layers) = over.map_err(|refusal| refusal.of(&spec.name))?;
            (Some(top), layers)
        }
        None => (None, Layers::default()),
    };
    // Over all layers, as dm has it over a drive: the drive has the faults, and the power.
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
    if let Some((key, value)) = entry.kind.settled() {
        entry.words.put(&entry.spec, key, &value);
    }
    Ok(entry)
}
