//! What lies over a device's data, from the bottom to the top.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone::device::zoned::{ZoneCondition, Zoned as _};
use freestone::device::{self, Device};
use freestone::faults::Faults;
use freestone::null::{BadBlocks, BadConfig, PaceConfig, Paced};
use freestone::power::{self, Power, log};
use freestone::quiesce::Quiesce;
use freestone::zone::{self, State, Zones};

use crate::layers::{self, Layers, random_seed};
use crate::refusal::{Errno, Refusal};
use crate::size::exact;
use crate::spec::{KindSpec, NullBacking, NullSpec, SECTOR_BYTES, Spec, ZoneSpec, rules_of};

/// Puts on `device` what was asked for. Where that fails, no file is left that it made.
pub fn over(spec: &Spec, device: Arc<dyn Device>) -> Result<(Arc<dyn Device>, Layers), Refusal> {
    let state = match (&spec.kind, &spec.layers.zones) {
        (KindSpec::File { path, .. }, Some(zones)) => state_path(path, zones).ok(),
        _ => None,
    };
    let absent = |path: &PathBuf| path.symlink_metadata().is_err();
    let new: Vec<PathBuf> = spec.layers.record.iter().cloned().chain(state).filter(absent).collect();
    stack(spec, device).inspect_err(|_| {
        for path in &new {
            // It may not have come so far.
            let _ = fs::remove_file(path);
        }
    })
}

fn stack(spec: &Spec, device: Arc<dyn Device>) -> Result<(Arc<dyn Device>, Layers), Refusal> {
    let null = match &spec.kind {
        KindSpec::Null(null) => Some(&**null),
        _ => None,
    };
    let asked = &spec.layers;
    let (mut top, mut layers) = (device, Layers::default());
    if asked.is_empty() && null.is_none() {
        return Ok((top, layers));
    }
    let cache_size = null.and_then(|null| null.cache_size);
    layers.can_cut = asked.power_cut || cache_size.is_some();
    if layers.can_cut || asked.record.is_some() {
        let record = asked.record.as_deref().map(record).transpose()?;
        let config = power::Config { capacity: cache_size.unwrap_or(0), record };
        let power = Arc::new(Power::new(top, config).map_err(|e| Refusal::failed(Errno::EIO, e))?);
        layers.power = Some(Arc::clone(&power));
        top = power;
    }
    if let Some(null) = null {
        let bad = Arc::new(bad_blocks(top, null)?);
        layers.bad = Some(Arc::clone(&bad));
        top = bad;
    }
    if let Some(zones) = &asked.zones {
        let made = Arc::new(zoned(spec, zones, top, layers.bad.clone())?);
        layers.conditions = conditions(zones);
        layers.zones = Some(Arc::clone(&made));
        top = made;
    }
    let quiesce = Arc::new(Quiesce::new(top));
    layers.quiesce = Some(Arc::clone(&quiesce));
    top = quiesce;
    if let Some(null) = null
        && (null.mbps != 0 || !null.completion.is_zero())
    {
        let config = PaceConfig { mbps: null.mbps, completion: null.completion };
        let paced = Paced::new(top, config).map_err(|e| Refusal::failed(Errno::ENOMEM, e))?;
        top = Arc::new(paced);
    }
    layers.seed = asked.seed.unwrap_or_else(random_seed);
    if let Some(rules) = &asked.faults {
        layers.seed_is_random = asked.seed.is_none();
        let faults = Faults::new(top, rules_of(rules), layers.seed);
        let faults = Arc::new(faults.map_err(|e| Refusal::failed(Errno::ENOMEM, e))?);
        layers.faults = Some(Arc::clone(&faults));
        top = faults;
    }
    Ok((top, layers))
}

fn record(path: &Path) -> Result<log::Writer, Refusal> {
    log::Writer::create(path).map_err(|error| {
        let errno = if matches!(error, log::Error::Exists { .. }) { Errno::EEXIST } else { Errno::EIO };
        Refusal::failed(errno, format!("record: {error}"))
    })
}

fn bad_blocks(device: Arc<dyn Device>, null: &NullSpec) -> Result<BadBlocks, Refusal> {
    let config = BadConfig { once: null.badblocks_once, partial_io: null.badblocks_partial_io };
    let bad = BadBlocks::new(device, config);
    bad.change_all(&null.badblocks).map_err(|e| Refusal::failed(Errno::EINVAL, e))?;
    Ok(bad)
}

fn zoned(
    spec: &Spec,
    asked: &ZoneSpec,
    device: Arc<dyn Device>,
    bad: Option<Arc<BadBlocks>>,
) -> Result<Zones, Refusal> {
    let stores = !matches!(&spec.kind, KindSpec::Null(null) if null.backing == NullBacking::Nothing);
    let config = zone::Config {
        zone_size: asked.size,
        zone_capacity: asked.capacity,
        zone_nr_conv: asked.nr_conv,
        zone_max_open: asked.max_open,
        zone_max_active: asked.max_active,
        zone_append_max: asked.append_max_sectors.map_or(u64::MAX, |sectors| sectors * SECTOR_BYTES),
        zone_full: asked.full,
        stores,
    };
    let path = match &spec.kind {
        KindSpec::File { path, .. } => Some(state_path(path, asked)?),
        _ => None,
    };
    let state = path.as_deref().map_or(State::Volatile, State::File);
    let zones = Zones::new(device, config, state, bad).map_err(|error| refused(&error))?;
    for (key, offset) in conditions(asked) {
        let is = if key == "zone_offline" { ZoneCondition::Offline } else { ZoneCondition::ReadOnly };
        // The state file remembers; twice would be empty again.
        if condition_at(&zones, offset) == Some(is) {
            continue;
        }
        let done = condition(&zones, key, offset);
        done.map_err(|why| Refusal::failed(Errno::EINVAL, format!("{key}={}: {why}", place(offset))))?;
    }
    Ok(zones)
}

/// Which zones are in which condition from the beginning on.
fn conditions(asked: &ZoneSpec) -> Vec<(&'static str, u64)> {
    let readonly = asked.readonly.iter().map(|&offset| ("zone_readonly", offset));
    readonly.chain(asked.offline.iter().map(|&offset| ("zone_offline", offset))).collect()
}

/// Makes the zone that holds `offset` read-only or offline, from whatever it is; an error is half a sentence.
pub fn condition(zones: &Zones, key: &str, offset: u64) -> Result<(), String> {
    layers::condition(zones, key, offset).map_err(|error| match error {
        device::Error::OutOfRange => "lies behind the end of the device".to_owned(),
        device::Error::ZoneCondition | device::Error::Unsupported => "is in a conventional zone".to_owned(),
        other => other.to_string(),
    })
}

/// How the zone is that holds `offset`.
fn condition_at(zones: &Zones, offset: u64) -> Option<ZoneCondition> {
    let mut found = None;
    let looked = zones.report(offset, &mut |zone| {
        found = Some(zone.condition);
        false
    });
    looked.ok().and(found)
}

/// An offset as it is typed.
pub fn place(offset: u64) -> String {
    if offset == 0 { "0".to_owned() } else { exact(offset) }
}

/// Where the zones of a file are remembered.
fn state_path(path: &Path, asked: &ZoneSpec) -> Result<PathBuf, Refusal> {
    if let Some(state) = &asked.state {
        return Ok(state.clone());
    }
    if path.metadata().is_ok_and(|meta| !meta.is_file()) {
        let why = format!(
            "zoned: {} is no file that another could lie beside; say zone_state=PATH",
            path.display()
        );
        return Err(Refusal::failed(Errno::EINVAL, why));
    }
    let mut state = path.as_os_str().to_owned();
    state.push(".zones");
    Ok(state.into())
}

fn refused(error: &zone::SetupError) -> Refusal {
    let (errno, why) = match error {
        zone::SetupError::ZoneSize { zone_size, size, .. } if zone_size > size => {
            let (zone, size) = (exact(*zone_size), exact(*size));
            (
                Errno::EINVAL,
                format!("zone_size={zone}: the device has {size}; it must hold at least one zone"),
            )
        }
        zone::SetupError::State(error) => (Errno::EIO, format!("zone_state: {error}")),
        zone::SetupError::NoMemory(_) | zone::SetupError::Thread(_) => (Errno::ENOMEM, error.to_string()),
        error => (Errno::EINVAL, error.to_string()),
    };
    Refusal::failed(errno, why)
}
