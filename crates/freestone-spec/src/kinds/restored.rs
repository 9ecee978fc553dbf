//! Devices of a file that `save` wrote.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone::device::Device as _;
use freestone::ram::Ram;
use freestone::save::DeviceKind;

use super::fork::Fork;
use super::ram::{RamDisk, shown};
use super::registry::Registry;
use super::snapshot::MemorySnapshot;
use super::{Asked, Built, Entry, KindSpec, Made, Spec, Takes, finished};
use crate::entries::Entries;
use crate::family;
use crate::layers::LayerSpec;
use crate::limits::LimitSpec;
use crate::refusal::Refusal;
use crate::tls::TlsClients;

/// The kind of what came out of a file and cannot be asked for by other words.
pub const RESTORED: &str = "restored";

/// From a saved file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RestoredSpec {
    /// Where that is.
    file: PathBuf,
    /// The name of the base that forks stand on.
    base: Option<String>,
}

impl Asked for RestoredSpec {
    fn build(&self, _: &Spec, _: &Registry) -> Result<Built, Refusal> {
        unreachable!("these come from a file")
    }

    fn below(&self) -> Option<&str> {
        self.base.as_deref()
    }

    fn is_lost(&self) -> bool {
        true
    }
}

/// What devices of a file stand on.
#[derive(Clone, Copy)]
pub struct StandsOn<'a> {
    /// That of forks.
    pub base: Option<&'a Arc<Entry>>,
    /// What takes pages of the family that begins with them.
    pub backing: Option<&'a Arc<Entry>>,
}

/// What was said of such a device.
#[derive(Debug, Default)]
pub struct Said {
    /// What lies over it.
    pub layers: LayerSpec,
    /// Clients cannot write.
    pub readonly: bool,
    /// Who sees it.
    pub tls_clients: Option<TlsClients>,
}

/// A device that was in `file`. Its words are those of the nearest that can be asked for, if there is
/// one.
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
    let Said { layers, readonly, tls_clients } = said;
    let needs = base.into_iter().cloned().collect::<Vec<_>>();
    let base = base.map(|base| base.name().to_owned());
    let kind_spec = KindSpec::Restored(RestoredSpec { file, base });
    let spec = Spec {
        name: words.name.clone(),
        words,
        publish: None,
        tls_clients,
        on_lost: None,
        keep: false,
        kind: kind_spec,
        layers,
        limits: LimitSpec::default(),
    };
    let device = Some(shown(Arc::clone(&ram), readonly));
    let kind: Box<dyn Made> = match kind {
        DeviceKind::Disk => Box::new(RamDisk(ram)),
        DeviceKind::Fork => Box::new(Fork(ram)),
        DeviceKind::Snapshot => Box::new(MemorySnapshot(ram)),
    };
    finished(spec, Built { kind, device, needs, backing: backing.cloned(), origin: None })
}

/// A device whose content a server before has saved, with the content that was there then.
pub fn kept(spec: Spec, ram: Ram, registry: &Registry) -> Result<Entry, Refusal> {
    let ram = Arc::new(ram);
    let refused = |error| family::refused(error).of(&spec.name);
    // It may have grown since.
    let grow = |size: Option<u64>| match size {
        Some(size) if size > ram.geometry().size => ram.grow(size).map_err(refused),
        _ => Ok(()),
    };
    let built = match &spec.kind {
        KindSpec::Ram(disk) => {
            grow(Some(disk.disksize))?;
            // Its family has it already.
            let backing = Takes::pages(&disk.family).and_then(|takes| registry.find(takes.name));
            let device = shown(Arc::clone(&ram), disk.readonly);
            Built { backing, ..Built::alone(RamDisk(Arc::clone(&ram)), device) }
        }
        KindSpec::Fork(fork) => {
            let base = registry.needed("base", &fork.base).map_err(|refusal| refusal.of(&spec.name))?;
            grow(fork.size)?;
            ram.set_own_limits(fork.mem_limit, fork.mem_min).map_err(refused)?;
            ram.set_own_wait(fork.full);
            Built { needs: vec![base], ..Built::alone(Fork(Arc::clone(&ram)), Arc::clone(&ram) as _) }
        }
        KindSpec::Snapshot(snapshot) => {
            let origin = registry.find(&snapshot.origin);
            let needs = origin.as_ref().map_or_else(Vec::new, |origin| origin.needs().to_vec());
            let backing = origin.as_ref().and_then(|origin| origin.backing.clone());
            let origin =
                origin.map(|origin| (Arc::downgrade(&origin), origin.rewinds.load(Ordering::SeqCst)));
            let device = Arc::clone(&ram) as _;
            Built { needs, backing, origin, ..Built::alone(MemorySnapshot(Arc::clone(&ram)), device) }
        }
        _ => unreachable!("only what is in memory is kept so"),
    };
    finished(spec, built)
}
