//! The keys of what lies over a device's data: zones, faults, loss of power.

use std::path::PathBuf;

use freestone::faults::Rules;

use super::{Keys, joined, parse_bool, parse_path};
use crate::entries::SpecError;
use crate::size::{self, SizeError, exact};

/// The keys of zones.
pub const ZONE_KEYS: [&str; 11] = joined(&ZONE_ATTRS, &["zone_state"], &[]);
/// Those that are attributes of every zoned device.
pub const ZONE_ATTRS: [&str; 10] = [
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
/// The keys of faults and of the loss of power.
pub const FAULT_KEYS: [&str; 4] = ["faults", "seed", "power_cut", "record"];

/// The kernel's unit of counts.
pub const SECTOR_BYTES: u64 = 512;
/// What the kernel makes zones of.
const ZONE_SIZE_BYTES: u64 = 256 << 20;
/// No rule: the layer is there, and rules can be set later.
pub const NO_RULES: &str = "none";

/// What lies over a device's data, as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerSpec {
    /// Zones.
    pub zones: Option<Box<ZoneSpec>>,
    /// Rules of faults; valid, perhaps none.
    pub faults: Option<String>,
    /// What faults and cuts are decided by; chosen at random where it was not said.
    pub seed: Option<u64>,
    /// Unflushed writes are kept apart, so that the power can be cut.
    pub power_cut: bool,
    /// Where every write is recorded.
    pub record: Option<PathBuf>,
}

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

impl LayerSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let layers = Self {
            zones: ZoneSpec::take(keys)?.map(Box::new),
            faults: keys.take("faults", parse_faults)?,
            seed: keys.take("seed", parse_seed)?,
            power_cut: keys.take("power_cut", parse_bool)?.unwrap_or(false),
            record: keys.take("record", parse_path)?,
        };
        let cached = matches!(keys.take("cache_size", parse_cache), Ok(Some(Some(_))));
        if cached && !layers.power_cut && keys.typed("power_cut").is_some() {
            return Err(keys.refuse("power_cut", "cache_size is a cache that a loss of power loses"));
        }
        let cut = layers.power_cut || cached;
        if layers.seed.is_some() && layers.faults.is_none() && !cut {
            return Err(
                keys.refuse("seed", "decides about faults and power cuts; only with faults or power_cut=yes")
            );
        }
        Ok(layers)
    }

    /// Whether anything was asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

impl ZoneSpec {
    fn take(keys: &Keys) -> Result<Option<Self>, SpecError> {
        if !keys.take("zoned", parse_bool)?.unwrap_or(false) {
            return match ZONE_KEYS.iter().find(|key| **key != "zoned" && keys.typed(key).is_some()) {
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

// ---- values --------------------------------------------------------------------------------------------------------

/// Rules of faults, or `none`.
pub fn parse_faults(text: &str) -> Result<String, String> {
    match text.trim() {
        "" | NO_RULES => Ok(NO_RULES.to_owned()),
        // As they were typed: two devices made with the same words are the same.
        rules => rules.parse::<Rules>().map(|_| rules.to_owned()).map_err(|e| e.to_string()),
    }
}

/// The rules of a text that [`parse_faults`] took.
pub fn rules_of(text: &str) -> Rules {
    if text == NO_RULES { Rules::default() } else { text.parse().unwrap_or_default() }
}

/// A seed.
pub fn parse_seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("must be a whole number from 0 to {}", u64::MAX))
}

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

pub(super) fn parse_cache(text: &str) -> Result<Option<u64>, String> {
    if text == "0" {
        return Ok(None);
    }
    crate::size::parse(text).map(Some).map_err(|e| format!("{e}; 0 is no cache"))
}

/// A count of sectors. Not a size.
pub fn parse_sectors(text: &str) -> Result<u64, String> {
    match (text.parse::<u32>(), size::parse(text)) {
        (Ok(sectors), _) => Ok(u64::from(sectors)),
        (_, Ok(bytes)) => Err(format!(
            "a count of {SECTOR_BYTES}-byte sectors, without a letter; {}?",
            bytes.div_ceil(SECTOR_BYTES)
        )),
        _ => Err(format!("must be a whole number: a count of {SECTOR_BYTES}-byte sectors")),
    }
}

/// A place on the device: 0, or a size.
pub fn parse_offset(text: &str) -> Result<u64, String> {
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
pub fn parse_offsets(text: &str) -> Result<Vec<u64>, String> {
    let words = text.split([';', ' ']).filter(|word| !word.is_empty());
    let offsets = words.map(|word| parse_offset(word).map_err(|why| format!("{word}: {why}")));
    match offsets.collect::<Result<Vec<_>, _>>() {
        Ok(none) if none.is_empty() => Err("must be offsets, with ; between several".into()),
        other => other,
    }
}
