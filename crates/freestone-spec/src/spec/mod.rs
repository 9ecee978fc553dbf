//! What a device is asked to be: kinds, their keys, and the values these take.

#[cfg(test)]
mod drive_tests;
mod family;
mod layers;
mod null;
mod over;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::str::FromStr;

use freestone::codec::{Algorithm, ParamsError};
use freestone::file::Direct;
use freestone::null::MAX_SIZE_BYTES;
use freestone::ram::DISKSIZE_BYTES_MAX;

pub use self::family::{FamilySpec, KEYS as FAMILY_KEYS, parse_batch, parse_units};
pub use self::layers::{
    LayerSpec, SECTOR_BYTES, ZONE_ATTRS, ZoneSpec, parse_faults, parse_offset, parse_offsets, parse_seed,
    rules_of,
};
pub use self::null::{NULL_KEYS, NullBacking, NullSpec, parse_badblocks};
pub use self::over::{CowPlace, CowSpec, ForkSpec, SnapshotSpec, TemplateSpec};
use crate::entries::{Entries, SpecError, nearest};
use crate::size::{self, SizeError};

/// Every kind of device.
pub const KINDS: [&str; 7] = ["ram", "fork", "snapshot", "template", "null", "file", "qcow2"];
const LAYER_KEYS: [&str; 16] = joined(&layers::ZONE_KEYS, &layers::FAULT_KEYS, &["publish"]);
const RAM_KEYS: [&str; 28] = joined(&["disksize"], &family::KEYS, &LAYER_KEYS);
const FILE_KEYS: [&str; 31] = joined(&["path", "readonly", "direct", "size"], &family::KEYS, &LAYER_KEYS);
const QCOW2_KEYS: [&str; 14] = joined(&["path", "standalone"], &family::KEYS, &["publish"]);

const BLOCKSIZE_MIN_BYTES: u32 = 512;
const BLOCKSIZE_MAX_BYTES: u32 = 4096;
const _: () = assert!(MAX_SIZE_BYTES == i64::MAX as u64, "what a file has at most too, says parse_length");

/// A device as it was asked for; every value is checked, nothing is opened yet.
#[derive(Debug, Clone, PartialEq)]
pub struct Spec {
    /// Its name.
    pub name: String,
    /// Publish it on the addresses of `serve`, where this was said.
    pub publish: Option<bool>,
    /// What it is.
    pub kind: KindSpec,
    /// What lies over its data.
    pub layers: LayerSpec,
}

/// The kinds with their keys.
#[derive(Debug, Clone, PartialEq)]
pub enum KindSpec {
    /// A compressed RAM disk.
    Ram {
        /// Bytes.
        disksize: u64,
        /// Everything else.
        family: Box<FamilySpec>,
    },
    /// A disk over a base.
    Fork(ForkSpec),
    /// What a device held at one moment.
    Snapshot(Box<SnapshotSpec>),
    /// A fork for every connection.
    Template(TemplateSpec),
    /// A test drive.
    Null(Box<NullSpec>),
    /// A raw image or a block device.
    File {
        /// Where it is.
        path: PathBuf,
        /// Only reads are served.
        readonly: bool,
        /// Use of `O_DIRECT`.
        direct: Direct,
        /// Bytes, where not the file's own.
        size: Option<u64>,
        /// What its forks share.
        family: Box<FamilySpec>,
    },
    /// From a saved file.
    Restored {
        /// Where that is.
        file: PathBuf,
        /// The name of the base that forks stand on.
        base: Option<String>,
    },
    /// A qcow2 image, read-only.
    Qcow2 {
        /// Where it is.
        path: PathBuf,
        /// Refuse one that stands on other files.
        standalone: bool,
        /// What its forks share.
        family: Box<FamilySpec>,
    },
}

impl FromStr for Spec {
    type Err = SpecError;
    fn from_str(text: &str) -> Result<Self, SpecError> {
        Self::from_entries(Entries::parse(text)?)
    }
}

impl Spec {
    /// What it shares with others: with its own snapshots and their forks, or its forks with one another.
    pub fn family(&self) -> Option<&FamilySpec> {
        match &self.kind {
            KindSpec::Ram { family, .. } | KindSpec::File { family, .. } | KindSpec::Qcow2 { family, .. } => {
                Some(family)
            }
            KindSpec::Snapshot(spec) => Some(&spec.family),
            KindSpec::Null(null) => match &null.backing {
                NullBacking::Compressed(family) => Some(family),
                NullBacking::Nothing | NullBacking::Memory => None,
            },
            KindSpec::Fork(_) | KindSpec::Template(_) | KindSpec::Restored { .. } => None,
        }
    }

    /// Checks kinds, keys and values.
    pub fn from_entries(entries: Entries) -> Result<Self, SpecError> {
        let keys = Keys(entries);
        let kind = match keys.0.kind.as_str() {
            "ram" => {
                keys.allow(&RAM_KEYS)?;
                let disksize = keys.need("ram", "disksize", "disksize=4G", parse_disksize)?;
                KindSpec::Ram { disksize, family: Box::new(FamilySpec::take(&keys)?) }
            }
            "fork" => KindSpec::Fork(ForkSpec::take(&keys)?),
            "snapshot" => KindSpec::Snapshot(Box::new(SnapshotSpec::take(&keys)?)),
            "template" => KindSpec::Template(TemplateSpec::take(&keys)?),
            "null" => KindSpec::Null(Box::new(NullSpec::take(&keys)?)),
            "file" => {
                keys.allow(&FILE_KEYS)?;
                let path = keys.need("file", "path", "path=disk.img", parse_path)?;
                let readonly = keys.take("readonly", parse_bool)?.unwrap_or(false);
                if let (false, Some(key)) = (readonly, family::KEYS.iter().find(|k| keys.typed(k).is_some()))
                {
                    return Err(keys.refuse(key, "only with readonly=yes; it is for the forks of the file"));
                }
                KindSpec::File {
                    path,
                    readonly,
                    direct: keys.take("direct", parse_direct)?.unwrap_or(Direct::Auto),
                    size: keys.take("size", parse_length)?,
                    family: Box::new(FamilySpec::take(&keys)?),
                }
            }
            "qcow2" => {
                keys.allow(&QCOW2_KEYS)?;
                KindSpec::Qcow2 {
                    path: keys.need("qcow2", "path", "path=disk.qcow2", parse_path)?,
                    standalone: keys.take("standalone", parse_bool)?.unwrap_or(false),
                    family: Box::new(FamilySpec::take(&keys)?),
                }
            }
            other => {
                let (kind, hint) = (other.to_owned(), nearest(other, &KINDS));
                return Err(SpecError::Kind { name: keys.0.name, kind, hint, kinds: &KINDS });
            }
        };
        let publish = keys.take("publish", parse_bool)?;
        let layers = LayerSpec::take(&keys)?;
        check_layers(&keys, &kind, &layers)?;
        Ok(Self { name: keys.0.name, publish, kind, layers })
    }
}

/// What lies over a device's data must have something to do there.
fn check_layers(keys: &Keys, kind: &KindSpec, layers: &LayerSpec) -> Result<(), SpecError> {
    let size = match kind {
        KindSpec::Ram { disksize, .. } => Some(*disksize),
        KindSpec::Null(null) => Some(null.size),
        KindSpec::File { size, .. } => *size,
        _ => None,
    };
    let readonly = match kind {
        KindSpec::File { readonly, .. } => *readonly,
        KindSpec::Null(null) => null.readonly,
        _ => false,
    };
    if let Some(zones) = &layers.zones {
        if let Some(size) = size.filter(|size| *size < zones.size) {
            let why = format!("the device has {}; it must hold at least one zone", size::exact(size));
            let key = if keys.typed("zone_size").is_some() { "zone_size" } else { "zoned" };
            let typed = if key == "zoned" { ", a zone_size of 256M is the default" } else { "" };
            return Err(keys.refuse(key, format!("{why}{typed}")));
        }
        if zones.state.is_some() && !matches!(kind, KindSpec::File { .. }) {
            let why = "only for a file: what is in memory ends with the process, and its zones with it";
            return Err(keys.refuse("zone_state", why));
        }
        if readonly && matches!(kind, KindSpec::File { .. }) {
            return Err(keys.refuse("zoned", "not with readonly=yes: the zones could not change"));
        }
    }
    for key in ["power_cut", "record"] {
        let said = if key == "record" { layers.record.is_some() } else { layers.power_cut };
        if said && readonly {
            return Err(keys.refuse(key, "not with readonly=yes: nothing is written that could be lost"));
        }
    }
    Ok(())
}

/// Lists one after the other.
const fn joined<const N: usize>(
    first: &[&'static str],
    then: &[&'static str],
    last: &[&'static str],
) -> [&'static str; N] {
    let (mut all, lists) = ([""; N], [first, then, last]);
    let (mut index, mut from, mut to) = (0, 0, 0);
    while index < lists.len() {
        if from == lists[index].len() {
            (index, from) = (index + 1, 0);
        } else {
            all[to] = lists[index][from];
            (from, to) = (from + 1, to + 1);
        }
    }
    assert!(to == N, "the length is the sum");
    all
}

/// Hands out keys one by one.
struct Keys(Entries);

impl Keys {
    fn allow(&self, allowed: &'static [&'static str]) -> Result<(), SpecError> {
        let Entries { name, kind, pairs } = &self.0;
        match pairs.iter().find(|(key, _)| !allowed.contains(&key.as_str())) {
            None => Ok(()),
            Some((key, _)) => Err(SpecError::Key {
                name: name.clone(),
                kind: kind.clone(),
                key: key.clone(),
                hint: nearest(key, allowed),
                allowed,
            }),
        }
    }

    fn take<T>(&self, key: &str, parse: fn(&str) -> Result<T, String>) -> Result<Option<T>, SpecError> {
        let Some(value) = self.typed(key) else { return Ok(None) };
        parse(value).map(Some).map_err(|why| self.value_error(key, value, why))
    }

    fn need<T>(
        &self,
        kind: &'static str,
        key: &'static str,
        example: &'static str,
        parse: fn(&str) -> Result<T, String>,
    ) -> Result<T, SpecError> {
        let missing = || SpecError::Missing { name: self.0.name.clone(), kind, key, example };
        self.take(key, parse)?.ok_or_else(missing)
    }

    fn typed(&self, key: &str) -> Option<&str> {
        self.0.pairs.iter().find(|(k, _)| k == key).map(|(_, value)| value.as_str())
    }

    fn value_error(&self, key: &str, value: &str, why: String) -> SpecError {
        SpecError::Value { name: self.0.name.clone(), key: key.into(), value: value.into(), why }
    }

    /// Refuses the value of a key that is there.
    fn refuse(&self, key: &str, why: impl Into<String>) -> SpecError {
        self.value_error(key, self.typed(key).unwrap_or_default(), why.into())
    }

    fn params_error(&self, why: String) -> SpecError {
        SpecError::Params { name: self.0.name.clone(), why }
    }
}

/// The size of a RAM disk, with a unit.
pub fn parse_disksize(text: &str) -> Result<u64, String> {
    let max = size::exact(DISKSIZE_BYTES_MAX);
    parse_size(text, DISKSIZE_BYTES_MAX, &format!("a ram device has at most {max}"))
}

/// The size of a null device or a file, with a unit: what a signed 64-bit offset reaches.
fn parse_length(text: &str) -> Result<u64, String> {
    parse_size(text, MAX_SIZE_BYTES, "the size must be less than 8388608T (2^63 bytes)")
}

fn parse_size(text: &str, max: u64, allowed: &str) -> Result<u64, String> {
    match size::parse(text) {
        Ok(bytes) if bytes <= max => Ok(bytes),
        Ok(_) | Err(SizeError::Overflow) => Err(format!("too large; {allowed}")),
        Err(e) => Err(e.to_string()),
    }
}

/// A size with a unit; `0` and `none` are no limit.
pub fn parse_limit(text: &str) -> Result<u64, String> {
    match text {
        "0" | "none" => Ok(0),
        _ => size::parse(text).map_err(|e| format!("{e}; 0 or none is no limit")),
    }
}

/// The name of an algorithm.
pub fn parse_algorithm(text: &str) -> Result<Algorithm, String> {
    text.parse().map_err(|e| {
        if let ParamsError::Lzo(_) = e {
            return e.to_string();
        }
        let names = Algorithm::ALL.map(|a| a.to_string());
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let hint = nearest(text, &names).map(|h| format!("; {h}?")).unwrap_or_default();
        format!("unknown algorithm{hint}; allowed are {}", names.join(", "))
    })
}

fn parse_blocksize(text: &str) -> Result<u32, String> {
    // A block size is written in bytes by everybody, so the bare number is welcome here.
    let bytes = text.parse().ok().or_else(|| size::parse(text).ok().and_then(|n| u32::try_from(n).ok()));
    bytes
        .filter(|n: &u32| n.is_power_of_two() && (BLOCKSIZE_MIN_BYTES..=BLOCKSIZE_MAX_BYTES).contains(n))
        .ok_or_else(|| format!("must be 512, 1024, 2048 or {BLOCKSIZE_MAX_BYTES} (bytes)"))
}

fn parse_path(text: &str) -> Result<PathBuf, String> {
    if text.is_empty() { Err("a path is missing".into()) } else { Ok(text.into()) }
}

/// `yes` or `no`, in the usual ways to say it.
pub fn parse_bool(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "yes" | "on" | "true" | "1" => Ok(true),
        "no" | "off" | "false" | "0" => Ok(false),
        _ => Err("must be yes or no".into()),
    }
}

fn parse_direct(text: &str) -> Result<Direct, String> {
    match text {
        "auto" => Ok(Direct::Auto),
        "on" => Ok(Direct::On),
        "off" => Ok(Direct::Off),
        _ => Err("must be auto, on or off".into()),
    }
}
