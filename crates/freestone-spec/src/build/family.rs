//! Families: pool, limit, codecs and backing device of a RAM disk, or of the forks of one base.

use std::path::Path;
use std::sync::{Arc, PoisonError};

use freestone::PAGE_BYTES;
use freestone::codec::Params;
use freestone::file::File;
use freestone::ram::{self, Backing, Family, Ram, Secondary};
use tracing::warn;

use super::{errno_of, in_typed_sizes};
use crate::advice::{self, Place};
use crate::entry::{Entry, Kind, NullData};
use crate::machine;
use crate::refusal::{Errno, Refusal};
use crate::registry::Registry;
use crate::spec::FamilySpec;

/// What the forks of a base have in common; made at the first one.
pub fn family_of(base: &Arc<Entry>, registry: &Registry) -> Result<Family, Refusal> {
    if let Some(ram) = base.ram() {
        return Ok(ram.family());
    }
    let mut made = base.family.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(family) = &*made {
        return Ok(family.clone());
    }
    let Some(spec) = base.spec.family() else {
        let why = format!("{}: a {} device is no base", base.name(), base.kind_name());
        return Err(Refusal::failed(Errno::EINVAL, why));
    };
    // Asked before the lock would be: of all others.
    let family = new(base.name(), spec, base.size(), registry);
    let family = family.map_err(|error| error.of(base.name()))?;
    *made = Some(family.clone());
    Ok(family)
}

/// A new family; `size` is that of its disks. Warns of what may not be meant.
pub fn new(name: &str, spec: &FamilySpec, size: u64, registry: &Registry) -> Result<Family, Refusal> {
    // Before it is there: a file that is made has no name to look at.
    let place = spec.backing.as_ref().map(|backing| Place::of(&backing.path));
    let config = config(spec)?;
    let family = Family::new(config.clone()).map_err(refused)?;
    if let Some(backing) = &spec.backing {
        // The family's settings are reached through its disks.
        let disk = family.ram(PAGE_BYTES as u64).map_err(refused)?;
        disk.set_writeback_limit(backing.limit);
        disk.set_writeback_limit_enable(backing.limit_enable);
        if let Some(pages) = backing.batch_size {
            disk.set_writeback_batch_size(pages);
        }
        warn_of_backing(name, &config, &disk, place.unwrap_or_default());
    }
    // Without /proc there is nothing to compare with.
    if let Ok(memory) = machine::memory() {
        let limits = registry.all().iter().filter_map(limit).collect::<Vec<_>>();
        let config = ram::Config { disksize: size, ..config };
        for warning in advice::of_memory(name, &config, limits.into_iter(), memory) {
            warn!("{warning}");
        }
    }
    Ok(family)
}

/// The limit of the family that began with this device.
fn limit(entry: &Arc<Entry>) -> Option<u64> {
    match &entry.kind {
        Kind::Null(NullData::Compressed(ram)) | Kind::Ram(ram) => Some(ram.family().mem_limit()),
        // One that is being made is not there yet.
        _ if entry.is_outer_base() => Some(entry.family.try_lock().ok()?.as_ref()?.mem_limit()),
        _ => None,
    }
}

fn warn_of_backing(name: &str, config: &ram::Config, disk: &Ram, place: Place) {
    if let (Some(backing), Some(stat)) = (&config.backing, disk.backing()) {
        for warning in advice::of_backing(
            name,
            backing.path.as_deref().unwrap_or(Path::new("")),
            stat.size,
            config.mem_limit,
            place,
        ) {
            warn!("{warning}");
        }
    }
}

fn config(spec: &FamilySpec) -> Result<ram::Config, Refusal> {
    let params = |words: &str| {
        Params::parse(words).map_err(|e| Refusal::failed(Errno::EIO, format!("algorithm_params: {e}")))
    };
    let mem_limit = match spec.mem_limit {
        Some(bytes) => bytes,
        None => machine::half_of_memory().map_err(|e| Refusal::failed(Errno::EIO, e))?,
    };
    let mut config = ram::Config {
        comp_algorithm: spec.comp_algorithm,
        algorithm_params: params(&spec.algorithm_params)?,
        mem_limit,
        auto_recompress: spec.auto_recompress,
        ..ram::Config::default()
    };
    for (secondary, asked) in config.recomp_algorithms.iter_mut().zip(&spec.recomp_algorithms) {
        if let Some(asked) = asked {
            *secondary = Some(Secondary { algorithm: asked.algorithm, params: params(&asked.params)? });
        }
    }
    if let Some(backing) = &spec.backing {
        let file = File::open_for_spilling(&backing.path, backing.size).map_err(|e| {
            Refusal::failed(errno_of(&e), format!("backing_dev: {}", in_typed_sizes("backing_size", &e)))
        })?;
        let (device, path) = (Arc::new(file), Some(backing.path.clone()));
        config.backing = Some(Backing { device, compressed_writeback: backing.compressed, path });
    }
    Ok(config)
}

/// Why a family or a disk of it was refused.
pub fn refused(error: ram::SetupError) -> Refusal {
    match error {
        ram::SetupError::NoMemory => Refusal::failed(Errno::ENOMEM, error),
        e => Refusal::failed(Errno::EIO, e),
    }
}
