//! Kind `ram`: compressed RAM disks. Forks and snapshots in memory also use the attributes and
//! changes of this module.

use std::fmt::Write as _;
use std::sync::Arc;

use freestone::codec::{Dictionary, Params};
use freestone::device::{self, Device};
use freestone::ram::{Config, Family, Ram, SetupError};
use serde_json::{Map, Value, json};

use crate::aliases;
use crate::entries::SpecError;
use crate::family::{self, FamilySpec, parse_batch, parse_units};
use crate::full::{self, WhenFullChange};
use crate::keys::{Keys, parse_bool, parse_disksize, parse_limit};
use crate::kinds::registry::Registry;
use crate::kinds::{DataDevice, Entry, KindConfig, KindInstance, Spec};
use crate::refusal::{Errno, Refusal};
use crate::{path_text, schema, size};
use freestone::view::ReadOnly;

pub(in crate::kinds) const NAME: &str = "ram";

/// Specification of a device of kind `ram`.
#[derive(Debug, Clone, PartialEq)]
pub struct RamSpec {
    /// Size of the disk in bytes.
    pub disksize: u64,
    /// True if the disk is read-only for users.
    pub readonly: bool,
    /// Specification of the family (memory pool) that the disk starts. Its snapshots and their
    /// forks join it.
    pub family: FamilySpec,
}

impl RamSpec {
    pub(in crate::kinds) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let disksize = keys.need("disksize", "disksize=4G", parse_disksize)?;
        let readonly = keys.take("readonly", parse_bool)?.unwrap_or(false);
        Ok(Self { disksize, readonly, family: FamilySpec::take(keys)? })
    }
}

impl KindConfig for RamSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let backing = registry.backing(&self.family)?;
        let family = registry.new_family(&spec.name, &self.family, self.disksize, backing.as_ref(), true)?;
        let ram = Arc::new(family.ram(self.disksize).map_err(family::setup_refusal)?);
        Ok(DataDevice {
            backing,
            ..DataDevice::standalone(RamDisk(Arc::clone(&ram)), user_device(ram, self.readonly))
        })
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

    fn is_volatile(&self) -> bool {
        true
    }
}

/// Returns the device over a RAM disk that users access: the disk itself, or a read-only view.
pub(in crate::kinds) fn user_device(ram: Arc<Ram>, readonly: bool) -> Arc<dyn Device> {
    if readonly { Arc::new(ReadOnly(ram)) } else { ram }
}

pub(in crate::kinds) struct RamDisk(pub Arc<Ram>);

impl KindInstance for RamDisk {
    fn name(&self) -> &'static str {
        NAME
    }

    fn ram(&self) -> Option<&Arc<Ram>> {
        Some(&self.0)
    }

    fn own_family(&self) -> Option<Family> {
        Some(self.0.family())
    }

    fn can_wipe(&self) -> bool {
        true
    }

    fn wipe(&self, counters: bool) -> device::Result<()> {
        wipe(&self.0, counters)
    }

    fn skip_wipe(&self, counters: bool) -> bool {
        skip_wipe(&self.0, counters)
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
            change.apply(&self.0).map_err(|e| refusal!(EINVAL, "{}: {attr}={text}: {e}", entry.name()))?;
        }
        Ok(())
    }
}

/// Resets the data of a RAM disk or fork to its initial content, and with `counters` also its
/// counters.
pub(in crate::kinds) fn wipe(ram: &Ram, counters: bool) -> device::Result<()> {
    let done = if counters { ram.reset() } else { ram.rewind() };
    done.map_err(|error| match error {
        SetupError::NoMemory => device::Error::NoMemory,
        _ => device::Error::Unsupported,
    })
}

/// Returns true if [`wipe`] would not change the content. In this case `counters` resets the
/// counters.
pub(in crate::kinds) fn skip_wipe(ram: &Ram, counters: bool) -> bool {
    let skips = ram.is_unmodified();
    if skips && counters {
        ram.clear_counters();
    }
    skips
}

// ---- attributes ---------------------------------------------------------------------------------

/// Names of the attributes of a RAM disk, in the order in which they are listed.
const NAMES: [&str; 24] = [
    "disksize",
    "readonly",
    "initstate",
    "comp_algorithm",
    "algorithm_params",
    "recomp_algorithm",
    "auto_recompress",
    "auto_group",
    "auto_dedup",
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
    "mem_warn_threshold",
    "mm_stat",
    "io_stat",
    "bd_stat",
    "debug_stat",
];

/// Returns the value of an attribute of a RAM disk, or `None` if there is no such attribute.
fn value(ram: &Ram, attr: &str) -> Option<Value> {
    Some(match attr {
        "disksize" => json!(ram.config().disksize),
        "initstate" => json!(1),
        "comp_algorithm" => json!(ram.config().comp_algorithm.to_string()),
        "algorithm_params" => json!(algorithm_params(&ram.config())),
        "recomp_algorithm" => recomp_algorithm(&ram.config()),
        "auto_recompress" => json!(ram.config().auto_recompress.map_or(0, |idle| idle.as_secs())),
        "auto_group" => json!(ram.config().auto_group.map_or(0, |idle| idle.as_secs())),
        "auto_dedup" => json!(ram.config().auto_dedup.map_or(0, |idle| idle.as_secs())),
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
        _ => return full::value(ram.family().full_policy(), attr),
    })
}

/// Returns the value of `algorithm_params` in the form of a specification: the parameters of the
/// primary algorithm, then those of the secondary ones.
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

/// Returns the parameters of one algorithm in the form of a specification.
fn words(params: &Params) -> String {
    match params.dictionary.as_ref().and_then(Dictionary::path) {
        Some(path) => {
            let level = Params { dictionary: None, ..params.clone() }.to_string();
            format!("{level} dict={}", path_text::text(path)).trim_start().to_owned()
        }
        None => params.to_string(),
    }
}

/// Returns the secondary algorithms by priority as a JSON object, such as `{"1": "zstd"}`.
fn recomp_algorithm(config: &Config) -> Value {
    let all = (1..).zip(&config.recomp_algorithms);
    let all =
        all.filter_map(|(priority, s)| Some((format!("{priority}"), json!(s.as_ref()?.algorithm.name()))));
    Value::Object(all.collect())
}

/// Returns the nine columns of `mm_stat` in the order of the kernel's zram.
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

/// Returns the four columns of `io_stat` in the order of the kernel's zram.
pub fn io_stat(ram: &Ram) -> Value {
    let s = ram.io_stat();
    json!({
        "failed_reads": s.failed_reads,
        "failed_writes": s.failed_writes,
        "invalid_io": s.invalid_io,
        "notify_free": s.notify_free,
    })
}

/// Returns the three columns of `bd_stat` in the order of the kernel's zram.
pub fn bd_stat(ram: &Ram) -> Value {
    let s = ram.bd_stat();
    json!({ "bd_count": s.bd_count, "bd_reads": s.bd_reads, "bd_writes": s.bd_writes })
}

/// Returns the format version and the two columns of `debug_stat` in the order of the kernel's
/// zram.
pub fn debug_stat(ram: &Ram) -> Value {
    let s = ram.debug_stat();
    json!({ "version": 1, "writestall": s.writestall, "miss_free": s.miss_free })
}

/// Returns the statistics and the state of the backing device, or `None` without one.
pub fn backing(ram: &Ram) -> Option<Value> {
    let (path, s) = (ram.config().backing?.path.unwrap_or_default(), ram.backing()?);
    Some(json!({
        "path": path_text::text(&path),
        "backing_size": s.size,
        "used_bytes": s.used_bytes,
        "live_bytes": s.live_bytes,
        "spilled_pages": s.spilled_pages,
        "clean_pages": s.clean_pages,
        "failed_reads": s.failed_reads,
        "failed_writes": s.failed_writes,
        "unanswered_writes": s.abandoned_writes,
        "state": match s {
            _ if s.abandoned_writes > 0 => "does not answer",
            _ if s.last_read_failed => "reads fail",
            _ if s.is_full => "full",
            _ => "ok",
        },
    }))
}

/// Returns the behavior at the memory limit, and the number of writes that wait for memory.
pub fn full_stat(ram: &Ram) -> Value {
    let mut when = ram.family().full_policy();
    when.wait = ram.wait_override().unwrap_or(when.wait);
    let attribute = |key: &&str| Some(((*key).to_owned(), full::value(when, key)?));
    let mut stat: Map<_, _> = full::KEYS.iter().filter_map(attribute).collect();
    aliases::add_former_device_keys(&mut stat);
    stat.insert("waiting".into(), json!(ram.waiting_requests()));
    Value::Object(stat)
}

/// Returns the statistics of automatic recompression, or `None` if it is off.
pub fn auto_recompressed(ram: &Ram) -> Option<Value> {
    ram.config().auto_recompress?;
    let s = ram.auto_recompress_stat();
    Some(json!({
        "pages": s.pages,
        "saved_bytes": s.saved_bytes,
        "dictionary_bytes": s.dictionary_bytes,
    }))
}

/// Returns the statistics of groups of pages, or `None` if the family has not formed any.
pub fn groups(ram: &Ram) -> Option<Value> {
    let s = ram.group_stat()?;
    Some(json!({
        "count": s.groups,
        "pages": s.pages,
        "spilled_pages": s.spilled_pages,
        "bytes": s.bytes,
        "table_bytes": s.table_bytes,
        "grouped": s.grouped,
        "ungrouped": s.ungrouped,
    }))
}

/// Returns the statistics of the objects that pages share, or `None` if the family has not compared
/// pages.
pub fn dedup(ram: &Ram) -> Option<Value> {
    let s = ram.dedup_stat()?;
    Some(json!({
        "objects": s.objects,
        "pages": s.pages,
        "bytes": s.bytes,
        "saved_bytes": s.saved_bytes,
        "table_bytes": s.table_bytes,
        "fingerprint_bytes": s.fingerprint_bytes,
        "shared": s.shared,
    }))
}

// ---- changes ------------------------------------------------------------------------------------

/// Returns the error if `attr` would grow a zoned disk or fork, else `None`.
pub(in crate::kinds) fn check_grow(entry: &Entry, attr: &str, text: &str) -> Option<Refusal> {
    let zoned = attr == "disksize" && entry.layers.zones.is_some();
    zoned.then(|| {
        refusal!(
            EINVAL,
            "{}: {attr}={text}: a zoned device does not grow: the table of its zones is made once",
            entry.name()
        )
    })
}

/// Checked change of an attribute of a RAM disk, fork or family. Several changes are applied in the
/// order of these variants.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Change {
    /// New `disksize` in bytes. First in order, because growing can still fail.
    Grow(u64),
    /// New `mem_limit` in bytes; 0 means unlimited.
    MemLimit(u64),
    /// New `mem_min` (guaranteed memory) of a fork in bytes.
    MemMin(u64),
    /// New `full` of a fork: wait (true) or fail (false), or `None` for the behavior of the family.
    OwnWait(Option<bool>),
    /// Reset of `mem_used_max` to the present value.
    ResetMemUsedMax,
    /// New `writeback_limit` in units of 4 KiB. Ordered before `writeback_limit_enable`, which
    /// makes it effective.
    WritebackLimit(u64),
    /// New `writeback_limit_enable`.
    WritebackLimitEnable(bool),
    /// New `writeback_batch_size` in blocks of 4 KiB.
    WritebackBatchSize(u32),
    /// New `full`, `full_timeout` or `mem_warn_threshold` of a family.
    Full(WhenFullChange),
}

impl Change {
    /// Parses a new value of an attribute of a RAM disk. Returns `None` if there is no such
    /// attribute.
    pub fn check(ram: &Ram, name: &str, attr: &str, text: &str) -> Option<Result<Self, Refusal>> {
        let failed = |errno, why: &str| Refusal::failed(errno, format!("{name}: {attr}={text}: {why}"));
        let invalid = |why: String| refusal!(invalid, "{name}: {attr}={text}: {why}");
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
            "mem_used_max" => {
                Err(invalid("only 0 can be set, which restarts the maximum at the present value".into()))
            }
            "writeback_limit" | "writeback_limit_enable" | "writeback_batch_size"
                if ram.config().backing.is_none() =>
            {
                Err(failed(Errno::ENODEV, "the device has no backing_dev; create it with one"))
            }
            "writeback_limit" => parse_units(text).map(Self::WritebackLimit).map_err(invalid),
            "writeback_limit_enable" => parse_bool(text).map(Self::WritebackLimitEnable).map_err(invalid),
            "writeback_batch_size" => parse_batch(text).map(Self::WritebackBatchSize).map_err(invalid),
            attr if schema::has(schema::FAMILY, attr) => {
                let why = "fixed once the device is initialised; create a new device with another value";
                Err(failed(Errno::EBUSY, why))
            }
            attr if NAMES.contains(&attr) => {
                let settable = schema::settable(&[schema::RAM, schema::FAMILY]);
                let settable = settable.replacen("mem_limit", "mem_limit, mem_used_max (0)", 1);
                Err(invalid(format!("read-only; {settable} can be set")))
            }
            _ => return None,
        })
    }

    /// Parses a new value of an attribute of a family. Returns `None` if a family has no such
    /// attribute.
    pub(in crate::kinds) fn of_family(attr: &str, text: &str) -> Option<Result<Self, String>> {
        match attr {
            "mem_limit" => Some(parse_limit(text).map(Self::MemLimit)),
            _ => WhenFullChange::check(attr, text).map(|checked| checked.map(Self::Full)),
        }
    }

    /// Applies the change to a family. A change of a single disk is ignored.
    pub(in crate::kinds) fn apply_to_family(self, family: &Family) {
        match self {
            Self::MemLimit(bytes) => family.set_mem_limit(bytes),
            Self::Full(change) => family.set_full_policy(change.applied_to(family.full_policy())),
            _ => {}
        }
    }

    /// Applies the change to a RAM disk, or to its family.
    pub fn apply(self, ram: &Ram) -> Result<(), SetupError> {
        match self {
            Self::Grow(bytes) => ram.grow(bytes)?,
            Self::MemLimit(_) | Self::Full(_) => self.apply_to_family(&ram.family()),
            Self::OwnWait(waits) => ram.set_wait_override(waits),
            Self::MemMin(bytes) => ram.set_own_limits(ram.own_limits().0, bytes)?,
            Self::ResetMemUsedMax => ram.reset_mem_used_max(),
            Self::WritebackLimit(units) => ram.set_writeback_limit(units),
            Self::WritebackLimitEnable(on) => ram.set_writeback_limit_enable(on),
            Self::WritebackBatchSize(blocks) => ram.set_writeback_batch_size(blocks),
        }
        Ok(())
    }
}
