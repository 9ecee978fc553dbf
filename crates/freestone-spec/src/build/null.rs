//! Null devices: what holds their data.

use std::sync::Arc;

use freestone::device::Device;
use freestone::null::{self, Memory, Null};

use super::family;
use crate::entry::NullData;
use crate::refusal::{Errno, Refusal};
use crate::registry::Registry;
use crate::shape::Shaped;
use crate::size::exact;
use crate::spec::{NullBacking, NullSpec};

/// The lowest layer of a null device.
pub fn data(
    name: &str,
    spec: &NullSpec,
    zoned: bool,
    registry: &Registry,
) -> Result<(NullData, Arc<dyn Device>), Refusal> {
    let config = null::Config {
        size: spec.size,
        logical_block: spec.blocksize,
        rotational: spec.rotational,
        read_only: spec.readonly,
        // Zones free what they reset, and offer nothing of that kind themselves.
        discard: spec.discard || zoned,
        max_request: spec.max_request,
    };
    let refused = |error| match error {
        null::SetupError::NoMemory => Refusal::failed(Errno::ENOMEM, error),
        null::SetupError::Size { size, largest, .. } => {
            let (size, largest) = (exact(size), exact(largest));
            Refusal::failed(Errno::EINVAL, format!("size={size}: with memory_backed=1 at most {largest}"))
        }
        error => Refusal::failed(Errno::EINVAL, error),
    };
    Ok(match &spec.backing {
        NullBacking::Nothing => (NullData::Nothing, Arc::new(Null::new(config).map_err(refused)?)),
        NullBacking::Memory => {
            let memory = Arc::new(Memory::new(config).map_err(refused)?);
            (NullData::Memory(Arc::clone(&memory)), memory)
        }
        NullBacking::Compressed(family) => {
            let family = family::new(name, family, spec.size, registry)?;
            let ram = Arc::new(family.ram(spec.size).map_err(family::refused)?);
            let device = Shaped::new(Arc::clone(&ram) as Arc<dyn Device>, |geometry| {
                geometry.logical_block = config.logical_block;
                geometry.max_request = config.max_request;
                geometry.rotational = config.rotational;
                geometry.read_only = config.read_only;
                if !config.discard {
                    geometry.discard_granularity = 0;
                }
            });
            (NullData::Compressed(ram), Arc::new(device))
        }
    })
}
