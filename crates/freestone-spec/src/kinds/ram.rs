//! Compressed RAM disks.

use std::fmt::Write as _;
use std::sync::Arc;

use freestone::codec::{Dictionary, Params};
use freestone::device::{self, Device};
use freestone::ram::{Config, Family, Ram, SetupError};
use serde_json::{Map, Value, json};

use super::registry::Registry;
use super::{Asked, Built, Entry, LAYER_KEYS, Made, Spec, is_live};
use crate::entries::SpecError;
use crate::family::{self, FamilySpec, parse_batch, parse_units};
use crate::full::{self, FullChange};
use crate::keys::{Keys, joined, parse_bool, parse_disksize, parse_limit};
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::size;
use freestone::view::ReadOnly;

pub(super) const NAME: &str = "ram";
const KEYS: [&str; 36] = joined(&["disksize", "readonly", "on_lost", "keep"], &family::KEYS, &LAYER_KEYS);

/// A RAM disk as it was asked for.
#[derive(Debug, Clone, PartialEq)]
pub struct RamSpec {
    /// Bytes.
    pub disksize: u64,
    /// Users only read it.
    pub readonly: bool,
    /// Everything else.
    pub family: FamilySpec,
}

impl RamSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        keys.allow(&KEYS)?;
        let disksize = keys.need(NAME, "disksize", "disksize=4G", parse_disksize)?;
        let readonly = keys.take("readonly", parse_bool)?.unwrap_or(false);
        Ok(Self { disksize, readonly, family: FamilySpec::take(keys)? })
    }
}

impl Asked for RamSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<Built, Refusal> {
        let backing = registry.backing(&self.family)?;
        let family = registry.new_family(&spec.name, &self.family, self.disksize, backing.as_ref())?;
        let ram = Arc::new(family.ram(self.disksize).map_err(family::refused)?);
        Ok(Built { backing, ..Built::alone(RamDisk(Arc::clone(&ram)), shown(ram, self.readonly)) })
    }

    fn family(&self) -> Option<&FamilySpec> {
        Some(&self.family)
    }

    fn size(&self) -> Option<u64> {
        Some(self.disksize)
    }

    fn is_read_only(&self) -> bool {
        self.readonly
    }

    fn is_lost(&self) -> bool {
        true
    }
}

/// What users of a RAM disk see.
pub(super) fn shown(ram: Arc<Ram>, readonly: bool) -> Arc<dyn Device> {
    if readonly { Arc::new(ReadOnly(ram)) } else { ram }
}

/// A RAM disk.
pub(super) struct RamDisk(pub Arc<Ram>);

impl Made for RamDisk {
    fn name(&self) -> &'static str {
        NAME
    }

    fn ram(&self) -> Option<&Arc<Ram>> {
        Some(&self.0)
    }

    fn own_family(&self) -> Option<Family> {
        Some(self.0.family())
    }

    fn check_origin(&self) -> Result<(), &'static str> {
        Ok(())
    }

    fn check_base(&self, base: &Entry) -> Result<(), String> {
        Err(is_live(base))
    }

    fn can_wipe(&self) -> bool {
        true
    }

    fn wipe(&self, counters: bool) -> device::Result<()> {
        wipe(&self.0, counters)
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        if attr == "readonly" { Some(json!(entry.is_read_only())) } else { value(&self.0, attr) }
    }

    fn check(&self, entry: &Entry, attr: &str, text: &str) -> Option<Result<Change, Refusal>> {
        check_grow(entry, attr, text).map(Err).or_else(|| Change::check(&self.0, entry.name(), attr, text))
    }

    fn set(
        &self,
        entry: &Arc<Entry>,
        _: &Registry,
        changes: &[(Change, &String, String)],
    ) -> Result<(), Refusal> {
        for (change, attr, text) in changes {
            change.make(&self.0).map_err(|e| {
                Refusal::failed(Errno::EINVAL, format!("{}: {attr}={text}: {e}", entry.name()))
            })?;
        }
        Ok(())
    }
}

/// Sets the data of a disk or fork back to what it was in the beginning; on request the counters as
/// well.
pub(super) fn wipe(ram: &Ram, counters: bool) -> device::Result<()> {
    let done = if counters { ram.reset() } else { ram.rewind() };
    done.map_err(|error| match error {
        SetupError::NoMemory => device::Error::NoMemory,
        _ => device::Error::Unsupported,
    })
}

// ---- attributes ---------------------------------------------------------------------------------

/// Their names, in the order in which they are shown.
const NAMES: [&str; 22] = [
    "disksize",
    "readonly",
    "initstate",
    "comp_algorithm",
    "algorithm_params",
    "recomp_algorithm",
    "auto_recompress",
    "mem_limit",
    "mem_used_max",
    "backing_dev",
    "backing_size",
    "compressed_writeback",
    "writeback_limit",
    "writeback_limit_enable",
    "writeback_batch_size",
    "full",
    "full_timeout",
    "full_warn",
    "mm_stat",
    "io_stat",
    "bd_stat",
    "debug_stat",
];

/// Attributes that can be set, for the sentence that says so.
const SETTABLE: &str = "disksize (grow), mem_limit, mem_used_max (0), writeback_limit, writeback_limit_enable, \
                        writeback_batch_size, full, full_timeout and full_warn can be set";

/// The value of an attribute that the disk has.
fn value(ram: &Ram, attr: &str) -> Option<Value> {
    Some(match attr {
        "disksize" => json!(ram.config().disksize),
        "initstate" => json!(1),
        "comp_algorithm" => json!(ram.config().comp_algorithm.to_string()),
        "algorithm_params" => json!(algorithm_params(&ram.config())),
        "recomp_algorithm" => recomp_algorithm(&ram.config()),
        "auto_recompress" => json!(ram.config().auto_recompress.map_or(0, |idle| idle.as_secs())),
        "mem_limit" => json!(ram.config().mem_limit),
        "mem_used_max" => json!(ram.mm_stat().mem_used_max),
        "backing_dev" => match ram.config().backing {
            Some(backing) => json!(path_text::text(&backing.path.unwrap_or_default())),
            None => json!("none"),
        },
        "backing_size" => json!(ram.backing().map_or(0, |backing| backing.size)),
        "compressed_writeback" => {
            json!(u8::from(ram.config().backing.is_some_and(|b| b.compressed_writeback)))
        }
        "writeback_limit" => json!(ram.writeback_limit()),
        "writeback_limit_enable" => json!(u8::from(ram.writeback_limit_enable())),
        "writeback_batch_size" => json!(ram.writeback_batch_size()),
        "mm_stat" => mm_stat(ram),
        "io_stat" => io_stat(ram),
        "bd_stat" => bd_stat(ram),
        "debug_stat" => debug_stat(ram),
        _ => return full::value(ram.family().when_full(), attr),
    })
}

/// The words as they can be typed again: those of the primary algorithm, then those of the others.
fn algorithm_params(config: &Config) -> String {
    let mut text = words(&config.algorithm_params);
    for (priority, secondary) in (1..).zip(&config.recomp_algorithms) {
        let params = secondary.as_ref().map(|s| words(&s.params)).unwrap_or_default();
        if !params.is_empty() {
            let between = if text.is_empty() { "" } else { "; " };
            // Writing to a string cannot fail.
            let _ = write!(text, "{between}priority={priority} {params}");
        }
    }
    text
}

/// Those of one algorithm.
fn words(params: &Params) -> String {
    match params.dictionary.as_ref().and_then(Dictionary::path) {
        Some(path) => {
            let level = Params { dictionary: None, ..params.clone() }.to_string();
            format!("{level} dict={}", path_text::text(path)).trim_start().to_owned()
        }
        None => params.to_string(),
    }
}

/// `{"1": "zstd"}`: algorithms by priority.
fn recomp_algorithm(config: &Config) -> Value {
    let all = (1..).zip(&config.recomp_algorithms);
    let all =
        all.filter_map(|(priority, s)| Some((format!("{priority}"), json!(s.as_ref()?.algorithm.name()))));
    Value::Object(all.collect())
}

/// The kernel's nine columns, in its order.
pub fn mm_stat(ram: &Ram) -> Value {
    let s = ram.mm_stat();
    json!({
        "orig_data_size": s.orig_data_size,
        "compr_data_size": s.compr_data_size,
        "mem_used_total": s.mem_used_total,
        "mem_limit": s.mem_limit,
        "mem_used_max": s.mem_used_max,
        "same_pages": s.same_pages,
        "pages_compacted": s.pages_compacted,
        "huge_pages": s.huge_pages,
        "huge_pages_since": s.huge_pages_since,
    })
}

/// The kernel's four columns, in its order.
pub fn io_stat(ram: &Ram) -> Value {
    let s = ram.io_stat();
    json!({
        "failed_reads": s.failed_reads,
        "failed_writes": s.failed_writes,
        "invalid_io": s.invalid_io,
        "notify_free": s.notify_free,
    })
}

/// The kernel's three columns, in its order.
pub fn bd_stat(ram: &Ram) -> Value {
    let s = ram.bd_stat();
    json!({ "bd_count": s.bd_count, "bd_reads": s.bd_reads, "bd_writes": s.bd_writes })
}

/// The kernel's two columns, in its order, behind the version of its format.
pub fn debug_stat(ram: &Ram) -> Value {
    let s = ram.debug_stat();
    json!({ "version": 1, "writestall": s.writestall, "miss_free": s.miss_free })
}

/// The backing device, where there is one.
pub fn backing(ram: &Ram) -> Option<Value> {
    let (path, s) = (ram.config().backing?.path.unwrap_or_default(), ram.backing()?);
    Some(json!({
        "path": path_text::text(&path),
        "backing_size": s.size,
        "used_bytes": s.used_bytes,
        "live_bytes": s.live_bytes,
        "spilled_pages": s.spilled_pages,
        "failed_reads": s.failed_reads,
        "failed_writes": s.failed_writes,
        "unanswered_writes": s.unanswered_writes,
        "state": match s {
            _ if s.unanswered_writes > 0 => "does not answer",
            _ if s.reads_fail => "reads fail",
            _ => "ok",
        },
    }))
}

/// What is done where there is no room for a write, and how many wait for some.
pub fn full_stat(ram: &Ram) -> Value {
    let mut when = ram.family().when_full();
    when.wait = ram.own_wait().unwrap_or(when.wait);
    let shown = |key: &&str| Some(((*key).to_owned(), full::value(when, key)?));
    let mut stat: Map<_, _> = full::KEYS.iter().filter_map(shown).collect();
    stat.insert("waiting".into(), json!(ram.waiting()));
    Value::Object(stat)
}

/// What recompression by itself has done, where it is on.
pub fn auto_recompressed(ram: &Ram) -> Option<Value> {
    ram.config().auto_recompress?;
    let s = ram.auto_recompressed();
    Some(json!({
        "pages": s.pages,
        "saved_bytes": s.saved_bytes,
        "dictionary_bytes": s.dictionary_bytes,
    }))
}

// ---- changes ------------------------------------------------------------------------------------

/// A disk or fork with zones stays as large as it is.
pub(super) fn check_grow(entry: &Entry, attr: &str, text: &str) -> Option<Refusal> {
    let zoned = attr == "disksize" && entry.layers.zones.is_some();
    zoned.then(|| {
        let why = "a zoned device does not grow: the table of its zones is made once";
        Refusal::failed(Errno::EINVAL, format!("{}: {attr}={text}: {why}", entry.name()))
    })
}

/// What a `set` does to a RAM disk, once everything was checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// `disksize`, in bytes. First in order: the only one that can still fail.
    Grow(u64),
    /// `mem_limit`, in bytes; 0 for none.
    MemLimit(u64),
    /// `mem_min` of a fork, in bytes.
    MemMin(u64),
    /// `full` of a fork: its own, or what its family does.
    OwnWait(Option<bool>),
    /// `mem_used_max=0`.
    ResetMemUsedMax,
    /// `writeback_limit`, in units of 4 KiB. Before its switch, which then finds it.
    WritebackLimit(u64),
    /// `writeback_limit_enable`.
    WritebackLimitEnable(bool),
    /// `writeback_batch_size`, in blocks of 4 KiB.
    WritebackBatchSize(u32),
    /// `full` and what belongs to it.
    Full(FullChange),
}

impl Change {
    /// Checks a value; `None` where there is no such attribute.
    pub fn check(ram: &Ram, name: &str, attr: &str, text: &str) -> Option<Result<Self, Refusal>> {
        let failed = |errno, why: &str| Refusal::failed(errno, format!("{name}: {attr}={text}: {why}"));
        let invalid = |why: String| Refusal::invalid(format!("{name}: {attr}={text}: {why}"));
        if let Some(change) = Self::of_family(attr, text) {
            return Some(change.map_err(invalid));
        }
        Some(match attr {
            "disksize" => parse_disksize(text).map_err(invalid).and_then(|new| {
                let old = ram.config().disksize;
                let smaller =
                    || format!("smaller than the present {}; a device only grows", size::exact(old));
                if new < old { Err(failed(Errno::EINVAL, &smaller())) } else { Ok(Self::Grow(new)) }
            }),
            "mem_used_max" if text == "0" => Ok(Self::ResetMemUsedMax),
            "mem_used_max" => Err(invalid("only 0 can be set, which starts the maximum anew".into())),
            "writeback_limit" | "writeback_limit_enable" | "writeback_batch_size"
                if ram.config().backing.is_none() =>
            {
                Err(failed(Errno::ENODEV, "the device has no backing_dev; create it with one"))
            }
            "writeback_limit" => parse_units(text).map(Self::WritebackLimit).map_err(invalid),
            "writeback_limit_enable" => parse_bool(text).map(Self::WritebackLimitEnable).map_err(invalid),
            "writeback_batch_size" => parse_batch(text).map(Self::WritebackBatchSize).map_err(invalid),
            "comp_algorithm"
            | "algorithm_params"
            | "recomp_algorithm"
            | "auto_recompress"
            | "backing_dev"
            | "backing_size"
            | "compressed_writeback" => {
                let why = "fixed once the device is initialised; create a new device with another value";
                Err(failed(Errno::EBUSY, why))
            }
            attr if NAMES.contains(&attr) => Err(invalid(format!("read-only; {SETTABLE}"))),
            _ => return None,
        })
    }

    /// Checks a value of what a family has one of; `None` where there is no such attribute.
    pub(super) fn of_family(attr: &str, text: &str) -> Option<Result<Self, String>> {
        match attr {
            "mem_limit" => Some(parse_limit(text).map(Self::MemLimit)),
            _ => FullChange::check(attr, text).map(|checked| checked.map(Self::Full)),
        }
    }

    /// Makes it so for a family, which has nothing of what it does not share.
    pub(super) fn make_of_family(self, family: &Family) {
        match self {
            Self::MemLimit(bytes) => family.set_mem_limit(bytes),
            Self::Full(change) => family.set_when_full(change.of(family.when_full())),
            _ => {}
        }
    }

    /// Makes it so.
    pub fn make(self, ram: &Ram) -> Result<(), SetupError> {
        match self {
            Self::Grow(bytes) => ram.grow(bytes)?,
            Self::MemLimit(_) | Self::Full(_) => self.make_of_family(&ram.family()),
            Self::OwnWait(waits) => ram.set_own_wait(waits),
            Self::MemMin(bytes) => ram.set_own_limits(ram.own_limits().0, bytes)?,
            Self::ResetMemUsedMax => ram.reset_mem_used_max(),
            Self::WritebackLimit(units) => ram.set_writeback_limit(units),
            Self::WritebackLimitEnable(on) => ram.set_writeback_limit_enable(on),
            Self::WritebackBatchSize(blocks) => ram.set_writeback_batch_size(blocks),
        }
        Ok(())
    }
}
