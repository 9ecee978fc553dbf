//! Zones over any device: keys, how they are set up, attributes.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone::device::zoned::{ZoneCondition, ZoneGeometry, Zoned as _};
use freestone::device::{self, Device};
use freestone::null::BadBlocks;
use freestone::replace::MadeFile;
use freestone::zone::{self, State, Zones};
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::keys::{Keys, SECTOR_BYTES, joined, parse_bool, parse_path, parse_sectors};
use crate::refusal::{Errno, Refusal};
use crate::size::{self, SizeError, exact};

/// The keys of zones.
pub(crate) const KEYS: [&str; 11] = joined(&ATTRS, &["zone_state"], &[]);
/// Those that are attributes of every zoned device.
pub(super) const ATTRS: [&str; 10] = [
    "zoned",
    "zone_size",
    "zone_capacity",
    "zone_nr_conv",
    "zone_max_open",
    "zone_max_active",
    "zone_append_max_sectors",
    "zone_full",
    "zone_readonly",
    "zone_offline",
];

/// What the kernel makes zones of.
const ZONE_SIZE_BYTES: u64 = 256 << 20;

/// Zones as they were asked for; sizes and offsets in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Distance between two zones.
    pub size: u64,
    /// How much of a zone can be written; 0 is all.
    pub capacity: u64,
    /// Conventional zones.
    pub nr_conv: u32,
    /// 0 is no limit.
    pub max_open: u32,
    /// 0 is no limit.
    pub max_active: u32,
    /// The largest append, in sectors; without it, as large as a zone.
    pub append_max_sectors: Option<u64>,
    /// Zones are full at the beginning.
    pub full: bool,
    /// These zones are read-only from the beginning on.
    pub readonly: Vec<u64>,
    /// These are offline.
    pub offline: Vec<u64>,
    /// Where a file's zones are remembered.
    pub state: Option<PathBuf>,
}

impl ZoneSpec {
    pub(super) fn take(keys: &Keys) -> Result<Option<Self>, SpecError> {
        if !keys.take("zoned", parse_bool)?.unwrap_or(false) {
            return match KEYS.iter().find(|key| **key != "zoned" && keys.typed(key).is_some()) {
                Some(key) => Err(keys.refuse(key, "only with zoned=1")),
                None => Ok(None),
            };
        }
        let size = keys.take("zone_size", parse_zone_size)?.unwrap_or(ZONE_SIZE_BYTES);
        let capacity = keys.take("zone_capacity", parse_capacity)?.unwrap_or(0);
        if capacity > size {
            return Err(
                keys.refuse("zone_capacity", format!("larger than a zone, which has {}", exact(size)))
            );
        }
        Ok(Some(Self {
            size,
            capacity,
            nr_conv: keys.take("zone_nr_conv", parse_count)?.unwrap_or(0),
            max_open: keys.take("zone_max_open", parse_count)?.unwrap_or(0),
            max_active: keys.take("zone_max_active", parse_count)?.unwrap_or(0),
            append_max_sectors: keys.take("zone_append_max_sectors", parse_sectors)?,
            full: keys.take("zone_full", parse_bool)?.unwrap_or(false),
            readonly: keys.take("zone_readonly", parse_offsets)?.unwrap_or_default(),
            offline: keys.take("zone_offline", parse_offsets)?.unwrap_or_default(),
            state: keys.take("zone_state", parse_path)?,
        }))
    }
}

// ---- values -------------------------------------------------------------------------------------

fn parse_zone_size(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|e| e.to_string())?;
    if bytes.is_power_of_two() { Ok(bytes) } else { Err("must be a power of two".into()) }
}

fn parse_capacity(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { size::parse(text).map_err(|e| format!("{e}; 0 is all of the zone")) }
}

fn parse_count(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "must be a whole number: a count of zones".into())
}

/// A place on the device: 0, a size, bytes with a `B`, or sectors as `blkzone report` and ours
/// show them, which nothing else is written like: `0x80000`.
pub fn parse_offset(text: &str) -> Result<u64, String> {
    if let Some(digits) = text.strip_prefix("0x") {
        let sectors = u64::from_str_radix(digits, 16).ok().and_then(|n| n.checked_mul(SECTOR_BYTES));
        return sectors
            .ok_or_else(|| format!("0x and hexadecimal digits are a count of {SECTOR_BYTES}-byte sectors"));
    }
    if let Some(Ok(bytes)) = text.strip_suffix(['B', 'b']).map(str::parse) {
        return Ok(bytes);
    }
    match size::parse(text) {
        Ok(bytes) => Ok(bytes),
        Err(SizeError::Zero) => Ok(0),
        Err(SizeError::Bare(_)) => {
            // What other tools call a place is in sectors mostly.
            let sectors = text.parse::<u64>().ok().and_then(|n| n.checked_mul(SECTOR_BYTES));
            let meant = sectors.map(|bytes| format!("; {}, if these are sectors?", exact(bytes)));
            let known = "(K, M, G and T are known, 1024-based)";
            Err(format!("give a unit{} {known}", meant.unwrap_or_default()))
        }
        Err(e) => Err(e.to_string()),
    }
}

/// Places with `;` or blanks between them.
fn parse_offsets(text: &str) -> Result<Vec<u64>, String> {
    let words = text.split([';', ' ']).filter(|word| !word.is_empty());
    let offsets = words.map(|word| parse_offset(word).map_err(|why| format!("{word}: {why}")));
    match offsets.collect::<Result<Vec<_>, _>>() {
        Ok(none) if none.is_empty() => Err("must be offsets, with ; between several".into()),
        other => other,
    }
}

// ---- setting up ---------------------------------------------------------------------------------

/// Zones over `device`, which `stores` what is written or not. Those of a file are remembered
/// beside it; a state file that is new is added to `made`.
pub(super) fn over(
    asked: &ZoneSpec,
    device: Arc<dyn Device>,
    bad: Option<Arc<BadBlocks>>,
    stores: bool,
    file: Option<&Path>,
    made: &mut Vec<MadeFile>,
) -> Result<Zones, Refusal> {
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
    let path = file.map(|path| state_path(path, asked)).transpose()?;
    let state = path.as_deref().map_or(State::Volatile, State::File);
    let zones = Zones::new(device, config, state, bad).map_err(|error| refused(&error))?;
    made.extend(zones.made().cloned());
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
pub(super) fn conditions(asked: &ZoneSpec) -> Vec<(&'static str, u64)> {
    let readonly = asked.readonly.iter().map(|&offset| ("zone_readonly", offset));
    readonly.chain(asked.offline.iter().map(|&offset| ("zone_offline", offset))).collect()
}

/// Makes the zone that holds `offset` read-only or offline, from whatever it is; an error is half a
/// sentence.
fn condition(zones: &Zones, key: &str, offset: u64) -> Result<(), String> {
    put(zones, key, offset).map_err(|error| match error {
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

/// Where the zones of a file are remembered where nothing else was said.
fn beside(path: &Path) -> PathBuf {
    let mut state = path.as_os_str().to_owned();
    state.push(".zones");
    state.into()
}

/// Refuses to write to a file without its zones, which would say then what is not so.
pub(crate) fn check_unzoned(path: &Path) -> Result<(), Refusal> {
    let state = beside(path);
    let found = zone::is_state_file(&state).map_err(|error| {
        let why = format!(
            "{}: cannot be read, and may remember the zones of the file, which writes would pass over: {error}; \
             make it readable, or give readonly=yes",
            state.display()
        );
        Refusal::failed(Errno::EIO, why)
    })?;
    if !found {
        return Ok(());
    }
    let why = format!(
        "{} remembers its zones, which writes would pass over; give zoned=1, or readonly=yes, or remove that file",
        state.display()
    );
    Err(Refusal::failed(Errno::EBUSY, why))
}

/// Where the zones of a file are remembered.
fn state_path(path: &Path, asked: &ZoneSpec) -> Result<PathBuf, Refusal> {
    if let Some(state) = &asked.state {
        return Ok(state.clone());
    }
    let meta = path.metadata().map_err(|error| {
        Refusal::failed(Errno::EIO, format!("zoned: cannot examine {}: {error}", path.display()))
    })?;
    if !meta.is_file() {
        let why = format!(
            "zoned: {} is no file that another could lie beside; say zone_state=PATH",
            path.display()
        );
        return Err(Refusal::failed(Errno::EINVAL, why));
    }
    Ok(beside(path))
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

/// Makes the zone that holds `offset` read-only or offline, from whatever it is; empty where it is
/// that already.
pub(super) fn put(zones: &Zones, attr: &str, offset: u64) -> device::Result<()> {
    if attr == "zone_offline" { zones.set_offline(offset) } else { zones.set_read_only(offset) }
}

// ---- attributes ---------------------------------------------------------------------------------

/// The value of an attribute of a zoned device.
pub(super) fn value(asked: &ZoneSpec, zones: &Zones, geometry: &ZoneGeometry, attr: &str) -> Option<Value> {
    Some(match attr {
        "zoned" => json!(1),
        "zone_size" => json!(geometry.zone_size),
        "zone_capacity" => json!(if asked.capacity == 0 { asked.size } else { asked.capacity }),
        "zone_nr_conv" => json!(zones.counts().conventional),
        "zone_max_open" => json!(geometry.max_open),
        "zone_max_active" => json!(geometry.max_active),
        "zone_append_max_sectors" => json!(u64::from(geometry.max_append) / SECTOR_BYTES),
        "zone_full" => json!(u8::from(asked.full)),
        "zone_readonly" => json!(in_condition(zones, ZoneCondition::ReadOnly)),
        "zone_offline" => json!(in_condition(zones, ZoneCondition::Offline)),
        _ => return None,
    })
}

fn in_condition(zones: &Zones, condition: ZoneCondition) -> String {
    let mut found = Vec::new();
    // That there is a zone at the start is certain.
    let _ = zones.report(0, &mut |zone| {
        if zone.condition == condition {
            found.push(place(zone.start));
        }
        true
    });
    if found.is_empty() { "none".to_owned() } else { found.join(";") }
}

/// Zones by condition, and what was done to them.
pub fn zone_stat(zones: &Zones) -> Value {
    let c = zones.counts();
    json!({
        "conventional": c.conventional,
        "empty": c.empty,
        "implicit_open": c.implicit_open,
        "explicit_open": c.explicit_open,
        "closed": c.closed,
        "full": c.full,
        "read_only": c.read_only,
        "offline": c.offline,
        "appends": c.ops.appends,
        "opens": c.opens,
        "closes": c.closes,
        "finishes": c.finishes,
        "resets": c.resets,
        "implicit_closes": c.implicit_closes,
    })
}

/// What a `set` of `attr` asks for: places, each in a zone that can be so.
pub(super) fn asked_places(zones: &Zones, text: &str) -> Result<Vec<u64>, String> {
    let places = parse_offsets(text)?;
    places.iter().try_for_each(|offset| check_place(zones, *offset))?;
    Ok(places)
}

/// Makes it so.
pub(super) fn set(zones: &Zones, name: &str, attr: &str, offset: u64) -> Result<(), Refusal> {
    condition(zones, attr, offset)
        .map_err(|why| Refusal::failed(Errno::EIO, format!("{name}: {attr}={}: {why}", place(offset))))
}

/// There must be a sequential zone there.
fn check_place(zones: &Zones, offset: u64) -> Result<(), String> {
    let mut conventional = false;
    let found = zones.report(offset, &mut |zone| {
        conventional = zone.condition == ZoneCondition::NotWritePointer;
        false
    });
    match found {
        Err(_) => Err(format!("{} lies behind the end of the device", place(offset))),
        Ok(()) if conventional => Err(format!("{} is in a conventional zone", place(offset))),
        Ok(()) => Ok(()),
    }
}
