//! Devices of a file that `save` wrote.

use std::path::PathBuf;
use std::sync::Arc;

use freestone::ram::Ram;
use freestone::save::DeviceKind;

use super::fork::Fork;
use super::ram::{RamDisk, shown};
use super::registry::Registry;
use super::snapshot::MemorySnapshot;
use super::{Asked, Built, Entry, KindSpec, Made, Spec, finished};
use crate::entries::Entries;
use crate::layers::LayerSpec;
use crate::refusal::Refusal;

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

/// A device that was in `file`, and stood on `base`; with these layers. Its words are those of the
/// nearest that can be asked for, if there is one.
pub fn restored(
    words: Entries,
    kind: DeviceKind,
    ram: Ram,
    file: PathBuf,
    base: Option<&Arc<Entry>>,
    layers: LayerSpec,
    readonly: bool,
) -> Result<Entry, Refusal> {
    let ram = Arc::new(ram);
    let needs = base.into_iter().cloned().collect::<Vec<_>>();
    let base = base.map(|base| base.name().to_owned());
    let kind_spec = KindSpec::Restored(RestoredSpec { file, base });
    let spec =
        Spec { name: words.name.clone(), words, publish: None, on_lost: None, kind: kind_spec, layers };
    let device = Some(shown(Arc::clone(&ram), readonly));
    let kind: Box<dyn Made> = match kind {
        DeviceKind::Disk => Box::new(RamDisk(ram)),
        DeviceKind::Fork => Box::new(Fork(ram)),
        DeviceKind::Snapshot => Box::new(MemorySnapshot(ram)),
    };
    finished(spec, Built { kind, device, needs, origin: None })
}
