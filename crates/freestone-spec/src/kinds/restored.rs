//! Devices whose content comes from a file: restored ones from a file of `save`, kept ones from the
//! state directory.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone::device::Device as _;
use freestone::ram::Ram;
use freestone::save::DeviceKind;

use super::fork::Fork;
use super::ram::{RamDisk, user_device};
use super::registry::Registry;
use super::snapshot::MemorySnapshot;
use super::{
    Built, Entry, ExclusiveUse, KindConfig, KindInstance, KindSpec, RestartPolicy, Spec, finish_entry,
    warn_of_record,
};
use crate::entries::Entries;
use crate::family;
use crate::layers::LayerSpec;
use crate::limits::LimitSpec;
use crate::refusal::Refusal;
use crate::tls::TlsClients;

/// Specification of a device from a file of `save`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoredSpec {
    /// Path of the file.
    file: PathBuf,
    /// Name of a fork's base.
    base: Option<String>,
}

impl KindConfig for RestoredSpec {
    fn build(&self, _: &Spec, _: &Registry) -> Result<Built, Refusal> {
        unreachable!("restored devices are not built from words")
    }

    fn below(&self) -> Option<&str> {
        self.base.as_deref()
    }

    fn is_lost(&self) -> bool {
        true
    }
}

/// Devices that restored devices depend on.
#[derive(Clone, Copy)]
pub struct StandsOn<'a> {
    /// Base of a fork.
    pub base: Option<&'a Arc<Entry>>,
    /// Backing device of the family that begins with the device.
    pub backing: Option<&'a Arc<Entry>>,
}

/// Settings of a restored device.
#[derive(Debug, Default)]
pub struct Said {
    /// Layers over the data.
    pub layers: LayerSpec,
    /// The device is read-only for clients.
    pub readonly: bool,
    /// NBD clients that may use the device; None for all.
    pub tls_clients: Option<TlsClients>,
    /// What the next start of the server does with the content.
    pub restart: RestartPolicy,
}

/// Creates a device from `file`. `words` are those of the most similar device that words can
/// describe, or have the kind `restored`.
pub fn restored(
    words: Entries,
    kind: DeviceKind,
    ram: Ram,
    file: PathBuf,
    on: StandsOn<'_>,
    said: Said,
) -> Result<Entry, Refusal> {
    let ram = Arc::new(ram);
    let StandsOn { base, backing } = on;
    let Said { layers, readonly, tls_clients, restart: RestartPolicy { keep, on_lost } } = said;
    let needs = base.into_iter().cloned().collect::<Vec<_>>();
    let base = base.map(|base| base.name().to_owned());
    let kind_spec = KindSpec::Restored(RestoredSpec { file, base });
    let spec = Spec {
        name: words.name.clone(),
        words,
        publish: None,
        tls_clients,
        on_lost,
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
    finish_entry(spec, Built { kind, device, needs, backing: backing.cloned(), origin: None })
        .inspect(warn_of_record)
}

/// Creates a device with `keep=yes` from the content `ram` that an earlier server has saved.
pub fn kept(spec: Spec, ram: Ram, registry: &Registry) -> Result<Entry, Refusal> {
    let ram = Arc::new(ram);
    let refused = |error| family::setup_refusal(error).of(&spec.name);
    // The device may have grown since the save.
    let grow = |size: Option<u64>| match size {
        Some(size) if size > ram.geometry().size => ram.grow(size).map_err(refused),
        _ => Ok(()),
    };
    let built = match &spec.kind {
        KindSpec::Ram(disk) => {
            grow(Some(disk.disksize))?;
            // The restored family uses the backing device already; here it only becomes a dependency.
            let backing = ExclusiveUse::pages(&disk.family).and_then(|takes| registry.find(takes.name));
            let device = user_device(Arc::clone(&ram), disk.readonly);
            Built { backing, ..Built::standalone(RamDisk(Arc::clone(&ram)), device) }
        }
        KindSpec::Fork(fork) => {
            let base = registry.needed("base", &fork.base).map_err(|refusal| refusal.of(&spec.name))?;
            grow(fork.size)?;
            ram.set_own_limits(fork.mem_limit, fork.mem_min).map_err(refused)?;
            ram.set_own_wait(fork.full);
            Built { needs: vec![base], ..Built::standalone(Fork(Arc::clone(&ram)), Arc::clone(&ram) as _) }
        }
        KindSpec::Snapshot(snapshot) => {
            let origin = registry.find(&snapshot.origin);
            let needs = origin.as_ref().map_or_else(Vec::new, |origin| origin.needs().to_vec());
            let backing = origin.as_ref().and_then(|origin| origin.backing.clone());
            let origin =
                origin.map(|origin| (Arc::downgrade(&origin), origin.rewinds.load(Ordering::SeqCst)));
            let device = Arc::clone(&ram) as _;
            Built { needs, backing, origin, ..Built::standalone(MemorySnapshot(Arc::clone(&ram)), device) }
        }
        _ => unreachable!("only devices in memory are kept"),
    };
    finish_entry(spec, built)
}
