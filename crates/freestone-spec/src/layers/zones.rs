//! Zone layer: keys, setup and attributes. If the device is a file, the state of its zones is
//! stored in another file beside it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone::device::zoned::{ZoneCondition, ZoneGeometry, Zoned as _};
use freestone::device::{self, Device};
use freestone::null::BadBlocks;
use freestone::replace::CreatedFile;
use freestone::zone::{self, StateLocation, Zones};
use serde_json::{Value, json};

use crate::entries::SpecError;
use crate::keys::{Keys, SECTOR_BYTES, parse_bool, parse_path, parse_sectors};
use crate::refusal::Refusal;
use crate::schema;
use crate::size::{self, SizeError, exact};

/// Keys that are also attributes of every zoned device.
pub(super) const ATTRS: [&str; 10] = schema::names(schema::ZONES);

/// Default zone size in bytes, as in the kernel's `null_blk`.
const ZONE_SIZE_BYTES: u64 = 256 << 20;

/// Specification of the zones of a device. Sizes and offsets are in bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ZoneSpec {
    /// Zone size: the distance between the starts of two adjacent zones.
    pub size: u64,
    /// Number of writable bytes of a zone; 0 means the whole zone.
    pub capacity: u64,
    /// Number of conventional zones at the start of the device.
    pub nr_conv: u32,
    /// Maximum number of open zones; 0 means unlimited.
    pub max_open: u32,
    /// Maximum number of active (open or closed) zones; 0 means unlimited.
    pub max_active: u32,
    /// Maximum size of a zone append in 512-byte sectors, or `None` for the capacity of a zone.
    pub append_max_sectors: Option<u64>,
    /// True if sequential zones are initially full.
    pub full: bool,
    /// Offsets in zones that are initially read-only.
    pub readonly: Vec<u64>,
    /// Offsets in zones that are initially offline.
    pub offline: Vec<u64>,
    /// Path of the zone state file, or `None` for the default.
    pub state: Option<PathBuf>,
}

impl ZoneSpec {
    pub(super) fn take(keys: &Keys) -> Result<Option<Self>, SpecError> {
        if !keys.take("zoned", parse_bool)?.unwrap_or(false) {
            return match keys.first_of(&schema::ZONES[1..]) {
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

/// Parses an offset on a device and returns it in bytes. The text is 0, a size, bytes with a `B`,
/// or hexadecimal sectors such as `0x80000`, as printed by `blkzone report` and `freestone zones`.
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
            // Most other tools print offsets in sectors, so a number without a unit may be sectors.
            let sectors = text.parse::<u64>().ok().and_then(|n| n.checked_mul(SECTOR_BYTES));
            let suggestion = sectors.map(|bytes| format!("; {}, if these are sectors?", exact(bytes)));
            let known = "(K, M, G and T are known, 1024-based)";
            Err(format!("give a unit{} {known}", suggestion.unwrap_or_default()))
        }
        Err(e) => Err(e.to_string()),
    }
}

/// Parses one or more offsets separated by `;` or blanks, and returns them in bytes.
fn parse_offsets(text: &str) -> Result<Vec<u64>, String> {
    let words = text.split([';', ' ']).filter(|word| !word.is_empty());
    let offsets = words.map(|word| parse_offset(word).map_err(|why| format!("{word}: {why}")));
    match offsets.collect::<Result<Vec<_>, _>>() {
        Ok(none) if none.is_empty() => Err("must be offsets, with ; between several".into()),
        other => other,
    }
}

// ---- setting up ---------------------------------------------------------------------------------

/// Adds the zone layer to `device`. `stores` is true if the device stores written data. If the
/// device is a `file`, the zones have a state file. If the state file is new, it is added to
/// `new_files`.
pub(super) fn add_layer(
    spec: &ZoneSpec,
    device: Arc<dyn Device>,
    bad: Option<Arc<BadBlocks>>,
    stores: bool,
    file: Option<&Path>,
    new_files: &mut Vec<CreatedFile>,
) -> Result<Zones, Refusal> {
    let config = zone::Config {
        zone_size: spec.size,
        zone_capacity: spec.capacity,
        zone_nr_conv: spec.nr_conv,
        zone_max_open: spec.max_open,
        zone_max_active: spec.max_active,
        zone_append_max: spec.append_max_sectors.map_or(u64::MAX, |sectors| sectors * SECTOR_BYTES),
        zone_full: spec.full,
        stores,
    };
    let path = file.map(|path| state_path(path, spec)).transpose()?;
    let state = path.as_deref().map_or(StateLocation::Volatile, StateLocation::File);
    let zones = Zones::new(device, config, state, bad).map_err(|error| refused(&error))?;
    new_files.extend(zones.created_file().cloned());
    for (key, offset) in conditions(spec) {
        let wanted = if key == "zone_offline" { ZoneCondition::Offline } else { ZoneCondition::ReadOnly };
        // The zone already has this condition according to the state file. Setting the same
        // condition again would make the zone empty.
        if condition_at(&zones, offset) == Some(wanted) {
            continue;
        }
        let done = change_condition(&zones, key, offset);
        done.map_err(|why| refusal!(EINVAL, "{key}={}: {why}", format_offset(offset)))?;
    }
    Ok(zones)
}

/// Returns the zones that are initially read-only or offline: attribute name and offset in bytes.
pub(super) fn conditions(spec: &ZoneSpec) -> Vec<(&'static str, u64)> {
    let readonly = spec.readonly.iter().map(|&offset| ("zone_readonly", offset));
    readonly.chain(spec.offline.iter().map(|&offset| ("zone_offline", offset))).collect()
}

/// Calls [`set_condition`]. The error is the reason, as the end of a message.
fn change_condition(zones: &Zones, key: &str, offset: u64) -> Result<(), String> {
    set_condition(zones, key, offset).map_err(|error| match error {
        device::Error::OutOfRange => "is beyond the end of the device".to_owned(),
        device::Error::ZoneCondition | device::Error::Unsupported => "is in a conventional zone".to_owned(),
        other => other.to_string(),
    })
}

/// Returns the condition of the zone that contains `offset`, or `None` beyond the end of the
/// device.
fn condition_at(zones: &Zones, offset: u64) -> Option<ZoneCondition> {
    let mut found = None;
    let looked = zones.report(offset, &mut |zone| {
        found = Some(zone.condition);
        false
    });
    looked.ok().and(found)
}

/// Formats an offset in the form that [`parse_offset`] accepts.
pub fn format_offset(offset: u64) -> String {
    if offset == 0 { "0".to_owned() } else { exact(offset) }
}

/// Returns the path of the default zone state file of the file `path`: `PATH.zones`.
fn default_state_path(path: &Path) -> PathBuf {
    let mut state = path.as_os_str().to_owned();
    state.push(".zones");
    state.into()
}

/// Refuses to open a file for writing without zones if it has a zone state file, because writes
/// would not update the state file.
pub(crate) fn check_unzoned(path: &Path) -> Result<(), Refusal> {
    let state = default_state_path(path);
    let found = zone::is_state_file(&state).map_err(|error| {
        let why = "cannot be read, and may contain the zone state of the file, which writes would not update";
        refusal!(EIO, "{}: {why}: {error}; make it readable, or give readonly=yes", state.display())
    })?;
    if found {
        let why = "contains its zone state, which writes would not update";
        refuse!(EBUSY, "{} {why}; give zoned=1, or readonly=yes, or remove that file", state.display());
    }
    Ok(())
}

/// Returns the path of the zone state file of the file `path`.
fn state_path(path: &Path, spec: &ZoneSpec) -> Result<PathBuf, Refusal> {
    if let Some(state) = &spec.state {
        return Ok(state.clone());
    }
    let meta = path
        .metadata()
        .map_err(|error| refusal!(EIO, "zoned: cannot examine {}: {error}", path.display()))?;
    if !meta.is_file() {
        refuse!(
            EINVAL,
            "zoned: {} is not a regular file, so it has no default state file; give zone_state=PATH",
            path.display()
        );
    }
    Ok(default_state_path(path))
}

fn refused(error: &zone::SetupError) -> Refusal {
    match error {
        zone::SetupError::ZoneSize { zone_size, size, .. } if zone_size > size => {
            let (zone, size) = (exact(*zone_size), exact(*size));
            refusal!(EINVAL, "zone_size={zone}: the device has {size}; it must hold at least one zone")
        }
        zone::SetupError::State(error) => refusal!(EIO, "zone_state: {error}"),
        zone::SetupError::NoMemory(_) | zone::SetupError::Thread(_) => refusal!(ENOMEM, "{error}"),
        error => refusal!(EINVAL, "{error}"),
    }
}

/// Makes the zone that contains `offset` read-only or offline. A zone that already is in this
/// condition becomes empty.
pub(super) fn set_condition(zones: &Zones, attr: &str, offset: u64) -> device::Result<()> {
    if attr == "zone_offline" { zones.set_offline(offset) } else { zones.set_read_only(offset) }
}

// ---- attributes ---------------------------------------------------------------------------------

/// Returns the value of one of the attributes [`ATTRS`], or `None` for another attribute.
pub(super) fn value(spec: &ZoneSpec, zones: &Zones, geometry: &ZoneGeometry, attr: &str) -> Option<Value> {
    Some(match attr {
        "zoned" => json!(1),
        "zone_size" => json!(geometry.zone_size),
        "zone_capacity" => json!(if spec.capacity == 0 { spec.size } else { spec.capacity }),
        "zone_nr_conv" => json!(zones.counts().conventional),
        "zone_max_open" => json!(geometry.max_open),
        "zone_max_active" => json!(geometry.max_active),
        "zone_append_max_sectors" => json!(u64::from(geometry.max_append) / SECTOR_BYTES),
        "zone_full" => json!(u8::from(spec.full)),
        "zone_readonly" => json!(in_condition(zones, ZoneCondition::ReadOnly)),
        "zone_offline" => json!(in_condition(zones, ZoneCondition::Offline)),
        _ => return None,
    })
}

fn in_condition(zones: &Zones, condition: ZoneCondition) -> String {
    let mut found = Vec::new();
    // Offset 0 is always in a zone, so the zone report cannot fail.
    let _ = zones.report(0, &mut |zone| {
        if zone.condition == condition {
            found.push(format_offset(zone.start));
        }
        true
    });
    if found.is_empty() { "none".to_owned() } else { found.join(";") }
}

/// Returns the number of zones by condition and of operations on zones, as a JSON object.
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

/// Parses the offsets in a `set` command. Each must be in a sequential zone.
pub(super) fn parse_zone_offsets(zones: &Zones, text: &str) -> Result<Vec<u64>, String> {
    let offsets = parse_offsets(text)?;
    offsets.iter().try_for_each(|offset| check_sequential(zones, *offset))?;
    Ok(offsets)
}

/// Changes the condition of the zone that contains `offset` for a `set` command. `attr` is
/// `zone_readonly` or `zone_offline`.
pub(super) fn set(zones: &Zones, name: &str, attr: &str, offset: u64) -> Result<(), Refusal> {
    change_condition(zones, attr, offset).map_err(|why| not_changed(name, attr, offset, &why))
}

/// Returns the error for a zone whose condition could not be changed for the reason `why`.
pub(super) fn not_changed(name: &str, attr: &str, offset: u64, why: &str) -> Refusal {
    refusal!(EIO, "{name}: {attr}={}: {why}", format_offset(offset))
}

/// Checks that `offset` is in a sequential zone. The error is a message.
fn check_sequential(zones: &Zones, offset: u64) -> Result<(), String> {
    let mut conventional = false;
    let found = zones.report(offset, &mut |zone| {
        conventional = zone.condition == ZoneCondition::NotWritePointer;
        false
    });
    match found {
        Err(_) => Err(format!("{} is beyond the end of the device", format_offset(offset))),
        Ok(()) if conventional => Err(format!("{} is in a conventional zone", format_offset(offset))),
        Ok(()) => Ok(()),
    }
}
