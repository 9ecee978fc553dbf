//! The keys of what lies over other devices: forks, templates and snapshots.

use std::path::PathBuf;
use std::time::Duration;

use freestone::cow::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, StoreKind};

use super::family::{self, FamilySpec};
use super::layers::FAULT_KEYS;
use super::{Keys, joined, parse_bool, parse_disksize, parse_length, parse_limit};
use crate::entries::{SpecError, check_name};
use crate::size;

const FORK_KEYS: [&str; 9] = joined(&["base", "size", "mem_limit", "mem_min"], &FAULT_KEYS, &["publish"]);
const TEMPLATE_KEYS: [&str; 6] = ["base", "size", "mem_limit", "mem_min", "ttl", "publish"];
const SNAPSHOT_OWN_KEYS: [&str; 10] = [
    "origin",
    "cow",
    "cow_size",
    "store",
    "chunk_size",
    "readonly",
    "discard_zeroes_cow",
    "discard_passdown_origin",
    "force",
    "merge",
];
const SNAPSHOT_KEYS: [&str; 22] = joined(&SNAPSHOT_OWN_KEYS, &family::KEYS, &["publish"]);
/// Keys that mean nothing where the copies are kept in memory.
const COW_KEYS: [&str; 4] = ["cow_size", "store", "force", "merge"];

/// The longest life of a connection to a template.
const TTL_SECONDS_MAX: u64 = 366 * 86_400;

/// A fork as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForkSpec {
    /// The name of its base.
    pub base: String,
    /// Bytes, where not the base's.
    pub size: Option<u64>,
    /// The most that its own objects may take in bytes; 0 for none.
    pub mem_limit: u64,
    /// Bytes of its family's limit that are guaranteed to it.
    pub mem_min: u64,
}

/// A template as it was asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TemplateSpec {
    /// What every connection gets.
    pub fork: ForkSpec,
    /// How long a connection may last.
    pub ttl: Option<Duration>,
}

/// A snapshot as it was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct SnapshotSpec {
    /// The name of its origin.
    pub origin: String,
    /// Where copies of a file's chunks go; a private RAM disk where nothing was said.
    pub cow: Option<CowSpec>,
    /// Unit of copies in bytes, for a file.
    pub chunk_size: Option<u64>,
    /// Its users only read. Where nothing was said: with `cow` they write too.
    pub readonly: Option<bool>,
    /// A discard of the snapshot zeroes its own chunks.
    pub discard_zeroes_cow: bool,
    /// It also goes to the origin.
    pub discard_passdown_origin: bool,
    /// What its forks share.
    pub family: FamilySpec,
    /// Whether anything of that was said.
    pub family_said: bool,
}

/// Where a snapshot's copies go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CowSpec {
    /// The device.
    pub place: CowPlace,
    /// Bytes, where not the file's own.
    pub size: Option<u64>,
    /// What is remembered where.
    pub store: StoreKind,
    /// Also where origin or device end with the process.
    pub force: bool,
    /// It is merged into its origin from the beginning on.
    pub merge: bool,
}

/// A COW device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CowPlace {
    /// A file or disk.
    Path(PathBuf),
    /// A device of the server.
    Device(String),
}

impl ForkSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        keys.allow(&FORK_KEYS)?;
        Self::take_allowed("fork", keys)
    }

    fn take_allowed(kind: &'static str, keys: &Keys) -> Result<Self, SpecError> {
        let fork = Self {
            base: keys.need(kind, "base", "base=golden", parse_name)?,
            size: keys.take("size", parse_disksize)?,
            mem_limit: keys.take("mem_limit", parse_limit)?.unwrap_or(0),
            mem_min: keys.take("mem_min", parse_limit)?.unwrap_or(0),
        };
        if fork.mem_limit > 0 && fork.mem_min > fork.mem_limit {
            return Err(keys.refuse("mem_min", format!("above mem_limit={}", size::exact(fork.mem_limit))));
        }
        Ok(fork)
    }
}

impl TemplateSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        keys.allow(&TEMPLATE_KEYS)?;
        Ok(Self {
            fork: ForkSpec::take_allowed("template", keys)?,
            ttl: keys.take("ttl", parse_ttl)?.flatten(),
        })
    }
}

impl SnapshotSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        keys.allow(&SNAPSHOT_KEYS)?;
        let origin = keys.need("snapshot", "origin", "origin=ram0", parse_name)?;
        let cow = match keys.take("cow", parse_cow)? {
            Some(place) => Some(CowSpec {
                size: keys.take("cow_size", parse_length)?,
                store: keys.take("store", parse_store)?.unwrap_or_default(),
                force: keys.take("force", parse_bool)?.unwrap_or(false),
                merge: keys.take("merge", parse_bool)?.unwrap_or(false),
                place,
            }),
            None => match COW_KEYS.iter().find(|key| keys.typed(key).is_some()) {
                Some(key) => return Err(keys.refuse(key, "only with cow=PATH or cow=DEVICE")),
                None => None,
            },
        };
        if let Some(CowSpec { place: CowPlace::Device(_), size: Some(_), .. }) = &cow {
            return Err(keys.refuse("cow_size", "only where cow is a file; a path has a slash, ./x.cow"));
        }
        if cow.as_ref().is_some_and(|cow| cow.merge && !cow.store.is_persistent()) {
            return Err(keys.refuse("merge", "a transient snapshot (store=N) cannot be merged"));
        }
        let discard_zeroes_cow = keys.take("discard_zeroes_cow", parse_bool)?.unwrap_or(false);
        let discard_passdown_origin = keys.take("discard_passdown_origin", parse_bool)?.unwrap_or(false);
        if discard_passdown_origin && !discard_zeroes_cow {
            return Err(keys.refuse("discard_passdown_origin", "only with discard_zeroes_cow=yes"));
        }
        Ok(Self {
            origin,
            cow,
            chunk_size: keys.take("chunk_size", parse_chunk)?,
            readonly: keys.take("readonly", parse_bool)?,
            discard_zeroes_cow,
            discard_passdown_origin,
            family: FamilySpec::take(keys)?,
            family_said: family::KEYS.iter().any(|key| keys.typed(key).is_some()),
        })
    }
}

/// The name of a device that is there.
fn parse_name(text: &str) -> Result<String, String> {
    match check_name(text) {
        Ok(()) => Ok(text.to_owned()),
        Err(_) => Err("must be the name of a device".into()),
    }
}

/// A path has a slash, a device's name has none.
fn parse_cow(text: &str) -> Result<CowPlace, String> {
    if text.contains('/') {
        return Ok(CowPlace::Path(text.into()));
    }
    let device = parse_name(text);
    device.map(CowPlace::Device).map_err(|_| "must be a path with a slash, ./x.cow, or a device".into())
}

fn parse_store(text: &str) -> Result<StoreKind, String> {
    let must = "must be P (persistent), PO (persistent, with overflow) or N (transient)";
    text.parse().map_err(|_| must.into())
}

fn parse_chunk(text: &str) -> Result<u64, String> {
    let bytes = size::parse(text).map_err(|e| e.to_string())?;
    if bytes.is_power_of_two() && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&bytes) {
        return Ok(bytes);
    }
    let (min, max) = (size::exact(CHUNK_BYTES_MIN), size::exact(CHUNK_BYTES_MAX));
    Err(format!("must be a power of two from {min} to {max}"))
}

fn parse_ttl(text: &str) -> Result<Option<Duration>, String> {
    match text.parse() {
        Ok(0) => Ok(None),
        Ok(seconds) if seconds <= TTL_SECONDS_MAX => Ok(Some(Duration::from_secs(seconds))),
        Err(_) if text == "none" => Ok(None),
        _ => Err(format!("must be none, or the seconds a connection may last, 1 to {TTL_SECONDS_MAX}")),
    }
}
