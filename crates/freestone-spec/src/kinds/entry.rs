//! A device of the server with its layers, counters, limits and dependencies.

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use freestone::concurrency_limit::ConcurrencyLimit;
use freestone::cow;
use freestone::device::{Counting, Device, Failures, Sum, Tally};
use freestone::ram::{Family, Ram};
use freestone::sync::Mutex;

use super::identity::{Identity, RestartPolicy};
use super::words::Words;
use super::{KindInstance, Spec};
use crate::layers::Layers;
use crate::limits::LimitSpec;

/// Device of the server, as stored in the registry.
pub struct Entry {
    /// Specification with which the device was created. Settings may have changed since.
    pub spec: Spec,
    /// Specification text that would create the device with its present settings.
    pub words: Words,
    /// Identity, which distinguishes the device from earlier devices of the same name.
    pub identity: Identity,
    /// Kind-specific part of the device.
    pub kind: Box<dyn KindInstance>,
    /// True if the device was adopted from a server that was killed.
    pub is_adopted: bool,
    /// Template name of a connection's fork, which is removed when the connection ends.
    pub template: Option<String>,
    /// Open layers over the data, such as zones and faults.
    pub layers: Layers,
    /// Device with all layers, as exports use it, or `None` for a template.
    pub(in crate::kinds) device: Option<Arc<dyn Device>>,
    /// Record of failed requests of clients.
    pub failures: Arc<Failures>,
    /// Layer that counts the requests of `device`, in total and per export.
    pub(in crate::kinds) counting: Option<Arc<Counting>>,
    /// Present limits. The lock is held only to read or replace the value.
    pub(in crate::kinds) limits: Mutex<LimitSpec>,
    pub(in crate::kinds) restart: Mutex<RestartPolicy>,
    /// Limit and number of connections to the device, over all exports.
    pub clients: Arc<ConcurrencyLimit>,
    /// Sum of the request counters of the device's forks, including removed ones.
    pub(in crate::kinds) forks: Sum<Sum<Tally>>,
    /// Devices on which this device depends.
    pub(in crate::kinds) dependencies: Vec<Arc<Entry>>,
    /// Backing device of the family, if it is a device of the server. Also in `dependencies`.
    pub(crate) backing: Option<Arc<Entry>>,
    /// Family of a base's forks, from the first fork on. Locked also while the family is created.
    pub family: Mutex<Option<Family>>,
    /// Number of resets to the initial content, which for a fork is that of its base.
    pub rewinds: AtomicU64,
    /// Number of client changes counted up to the last reset of the content.
    pub(in crate::kinds) changes_at_wipe: AtomicU64,
    /// Origin of a snapshot in memory, and the origin's `rewinds` when the snapshot was taken.
    pub origin: Option<(Weak<Entry>, u64)>,
    /// Layer for snapshots of this device with COW devices, which all writes pass. `None` if the
    /// device cannot be an origin, for example if it is zoned.
    pub cow_origin: Option<cow::Origin>,
}

impl Entry {
    /// Creates an entry without layers. `dependencies` are the devices on which it depends.
    pub fn new(
        spec: Spec,
        kind: Box<dyn KindInstance>,
        device: Option<Arc<dyn Device>>,
        dependencies: Vec<Arc<Entry>>,
    ) -> Self {
        freestone::trail::step!();
        if let Some(ram) = kind.ram() {
            ram.set_name(&spec.name);
        }
        let counting = device.map(|device| Arc::new(Counting::new(&spec.name, device)));
        let device = counting.clone().map(|counting| counting as Arc<dyn Device>);
        Self {
            words: Words::default(),
            identity: Identity::new(),
            restart: Mutex::new(RestartPolicy { keep: spec.keep, on_data_loss: spec.on_data_loss }),
            spec,
            kind,
            is_adopted: false,
            template: None,
            layers: Layers::default(),
            device,
            failures: Arc::default(),
            counting,
            limits: Mutex::default(),
            clients: Arc::default(),
            forks: Sum::default(),
            dependencies,
            backing: None,
            family: Mutex::default(),
            rewinds: AtomicU64::new(0),
            changes_at_wipe: AtomicU64::new(0),
            origin: None,
            cow_origin: None,
        }
    }

    /// Returns the name of the device.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// Returns the device with all layers, as exports use it, or `None` for a template.
    pub fn device(&self) -> Option<&Arc<dyn Device>> {
        self.device.as_ref()
    }

    /// Returns a RAM disk, fork or snapshot in memory, or the RAM disk with a snapshot's copies.
    pub fn ram_data(&self) -> Option<&Ram> {
        self.kind.ram().map(|ram| &**ram).or_else(|| self.kind.cow_ram())
    }

    /// Returns the size of the device, or of a template's forks, in bytes.
    pub fn size(&self) -> u64 {
        match (&self.device, self.spec.kind.fork().and_then(|fork| fork.size)) {
            (Some(device), _) => {
                let geometry = device.geometry();
                geometry.size - u64::from(geometry.padding)
            }
            (None, Some(size)) => size,
            (None, None) => self.dependencies.first().map_or(0, |base| base.size()),
        }
    }

    /// Returns true if the device is read-only.
    pub fn is_read_only(&self) -> bool {
        self.device.as_ref().is_some_and(|device| device.geometry().read_only)
    }

    /// Returns the devices on which this device depends. They cannot be removed before it.
    pub fn dependencies(&self) -> &[Arc<Entry>] {
        &self.dependencies
    }
}
