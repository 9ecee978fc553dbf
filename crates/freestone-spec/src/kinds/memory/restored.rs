//! Devices whose initial content is read from a file: restored devices from a file written by
//! `save`, and kept devices (`keep=yes`) from the state directory.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone::device::Device as _;
use freestone::ram::Ram;
use freestone::save::DeviceKind;

use super::fork::Fork;
use super::ram::{RamDisk, user_device};
use crate::entries::Entries;
use crate::family;
use crate::kinds::registry::Registry;
use crate::kinds::snapshot::MemorySnapshot;
use crate::kinds::{
    DataDevice, Entry, ExclusiveUse, KindConfig, KindInstance, KindSpec, RestartPolicy, Spec, finish_entry,
    warn_of_record,
};
use crate::layers::LayerSpec;
use crate::limits::LimitSpec;
use crate::refusal::Refusal;
use crate::tls::TlsClients;

/// Specification of a device restored from a file written by `save`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoredSpec {
    file: PathBuf,
    /// Name of the base if the device is a fork.
    base: Option<String>,
}

impl KindConfig for RestoredSpec {
    fn build(&self, _: &Spec, _: &Registry) -> Result<DataDevice, Refusal> {
        unreachable!("restored devices are not built from words")
    }

    fn parent_name(&self) -> Option<&str> {
        self.base.as_deref()
    }

    fn is_volatile(&self) -> bool {
        true
    }
}

/// Devices on which a restored device depends.
#[derive(Clone, Copy)]
pub struct RestoreDependencies<'a> {
    /// Base if the device is a fork.
    pub base: Option<&'a Arc<Entry>>,
    /// Backing device of the family that the device starts, if it is a device of the server.
    pub backing: Option<&'a Arc<Entry>>,
}

/// Settings of a restored device.
#[derive(Debug, Default)]
pub struct RestoreOptions {
    /// Layers over the restored data.
    pub layers: LayerSpec,
    /// True if the device is read-only for clients.
    pub readonly: bool,
    /// NBD clients that may use the device, or `None` for all.
    pub tls_clients: Option<TlsClients>,
    /// Handling of the content when the server restarts.
    pub restart: RestartPolicy,
}

/// Creates a device from the content `ram` of the saved `file`. `words` specify the most similar
/// device that a specification can describe, or contain the kind `restored`.
pub fn build_restored(
    words: Entries,
    kind: DeviceKind,
    ram: Ram,
    file: PathBuf,
    on: RestoreDependencies<'_>,
    said: RestoreOptions,
) -> Result<Entry, Refusal> {
    let ram = Arc::new(ram);
    let RestoreDependencies { base, backing } = on;
    let RestoreOptions { layers, readonly, tls_clients, restart: RestartPolicy { keep, on_data_loss } } =
        said;
    let dependencies = base.into_iter().cloned().collect::<Vec<_>>();
    let base = base.map(|base| base.name().to_owned());
    let kind_spec = KindSpec::Restored(RestoredSpec { file, base });
    let spec = Spec {
        name: words.name.clone(),
        words,
        publish: None,
        tls_clients,
        on_data_loss,
        keep,
        kind: kind_spec,
        layers,
        limits: LimitSpec::default(),
    };
    let device = Some(user_device(Arc::clone(&ram), readonly));
    let kind: Box<dyn KindInstance> = match kind {
        DeviceKind::Disk => Box::new(RamDisk(ram)),
        DeviceKind::Fork => Box::new(Fork(ram)),
        DeviceKind::Snapshot => Box::new(MemorySnapshot(ram)),
    };
    finish_entry(spec, DataDevice { kind, device, dependencies, backing: backing.cloned(), origin: None })
        .inspect(warn_of_record)
}

/// Creates a device with `keep=yes` from the content `ram`, which an earlier server process saved.
pub fn build_kept(spec: Spec, ram: Ram, registry: &Registry) -> Result<Entry, Refusal> {
    let ram = Arc::new(ram);
    let refused = |error| family::setup_refusal(error).of(&spec.name);
    // The device may have grown after it was saved.
    let grow = |size: Option<u64>| match size {
        Some(size) if size > ram.geometry().size => ram.grow(size).map_err(refused),
        _ => Ok(()),
    };
    let built = match &spec.kind {
        KindSpec::Ram(disk) => {
            grow(Some(disk.disksize))?;
            // The restored family already uses the backing device, which only has to become a
            // dependency.
            let backing =
                ExclusiveUse::of_backing_device(&disk.family).and_then(|takes| registry.find(takes.name));
            let device = user_device(Arc::clone(&ram), disk.readonly);
            DataDevice { backing, ..DataDevice::standalone(RamDisk(Arc::clone(&ram)), device) }
        }
        KindSpec::Fork(fork) => {
            let base =
                registry.find_required("base", &fork.base).map_err(|refusal| refusal.of(&spec.name))?;
            grow(fork.size)?;
            ram.set_own_limits(fork.mem_limit, fork.mem_min).map_err(refused)?;
            ram.set_wait_override(fork.full);
            DataDevice {
                dependencies: vec![base],
                ..DataDevice::standalone(Fork(Arc::clone(&ram)), Arc::clone(&ram) as _)
            }
        }
        KindSpec::Snapshot(snapshot) => {
            let origin = registry.find(&snapshot.origin);
            let dependencies = match &origin {
                Some(origin) => origin.dependencies().to_vec(),
                None => registry.base_of(&ram).into_iter().collect(),
            };
            let backing = origin.as_ref().and_then(|origin| origin.backing.clone());
            let origin =
                origin.map(|origin| (Arc::downgrade(&origin), origin.rewinds.load(Ordering::SeqCst)));
            let device = Arc::clone(&ram) as _;
            DataDevice {
                dependencies,
                backing,
                origin,
                ..DataDevice::standalone(MemorySnapshot(Arc::clone(&ram)), device)
            }
        }
        _ => unreachable!("only devices in memory are kept"),
    };
    finish_entry(spec, built)
}
