//! Optional layers over a device's data. Each is a `Device` over a `Device`. From the top down, with
//! the keys or kinds that add a layer:
//!
//! ```text
//! faults        delays, fails or hangs requests    faults, seed
//! pace          mbps, completion_nsec              null
//! quiesce       counts requests, can be shut       any other layer
//! zones         write pointers                     zoned=1
//! bad blocks    fails requests                     null
//! power         holds unflushed writes, the log    power_cut, power_cut_unit, cache_size, record
//! data          null, memory, ram, fork, file, nbd, rbd
//! ```
//!
//! `kinds::build` adds the layers. Verbs reach them through [`Layers`] of a device's entry.

mod bad_blocks;
mod faults;
mod power;
mod zones;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use freestone::device::{self, Account, Counted, Counter, Device};
use freestone::faults::Faults;
use freestone::null::{BadBlocks, BadConfig, PaceConfig, Paced};
use freestone::power::{After, Cut, Point, Power, RecordError, Visited};
use freestone::quiesce::Quiesce;
use freestone::replace::MadeFile;
use freestone::zone::Zones;
use serde_json::{Value, json};

pub(crate) use self::bad_blocks::{bad_ranges, parse_badblocks};
pub use self::faults::fault_stat;
pub use self::power::{parse_after, power_stat};
pub(crate) use self::zones::{KEYS as ZONE_KEYS, check_unzoned};
pub use self::zones::{ZoneSpec, parse_offset, place, zone_stat};
use crate::entries::SpecError;
use crate::keys::{Keys, parse_bool, parse_path};
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::size;

/// Keys of faults and power cuts.
pub const FAULT_KEYS: [&str; 5] = ["faults", "seed", "power_cut", "power_cut_unit", "record"];

/// Placeholder for the number of a device, if several devices are created with the same keys.
pub const NUMBER: &str = "%n";

/// How long a power cut waits for requests in flight, which a slow disk can delay.
const QUIET_WAIT: Duration = Duration::from_secs(60);

/// Specification of the layers of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerSpec {
    /// Zones of a zoned device.
    pub zones: Option<Box<ZoneSpec>>,
    /// Checked fault rules, or `none`.
    pub faults: Option<String>,
    /// Seed of faults and power cuts; None for a random one.
    pub seed: Option<u64>,
    /// Unflushed writes are kept apart, so that a power cut can lose them.
    pub power_cut: bool,
    /// Bytes that a power cut does not tear; None for the default.
    pub power_cut_unit: Option<u32>,
    /// File of the log that records every write.
    pub record: Option<PathBuf>,
}

impl LayerSpec {
    /// Returns the layers of one of several devices, with a log file of its own.
    #[must_use]
    pub fn numbered(&self, number: u64) -> Self {
        let of_number = |path: &PathBuf| {
            let text = path_text::text(path).replace(NUMBER, &number.to_string());
            path_text::path(&text)
        };
        Self { record: self.record.as_ref().map(of_number), ..self.clone() }
    }

    /// Returns true if several devices created with these layers would not share a log file.
    pub fn has_logs(&self) -> bool {
        self.record.as_ref().is_none_or(|path| path_text::text(path).contains(NUMBER))
    }

    pub(crate) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let layers = Self {
            zones: ZoneSpec::take(keys)?.map(Box::new),
            faults: keys.take("faults", faults::parse_faults)?,
            seed: keys.take("seed", faults::parse_seed)?,
            power_cut: keys.take("power_cut", parse_bool)?.unwrap_or(false),
            power_cut_unit: keys.take("power_cut_unit", power::parse_unit)?,
            record: keys.take("record", parse_path)?,
        };
        let cached = matches!(keys.take("cache_size", parse_cache), Ok(Some(Some(_))));
        if cached && !layers.power_cut && keys.typed("power_cut").is_some() {
            return Err(keys.refuse("power_cut", "cache_size is a cache that a loss of power loses"));
        }
        let cut = layers.power_cut || cached;
        if layers.power_cut_unit.is_some() && !cut {
            return Err(
                keys.refuse("power_cut_unit", "what a power cut does not tear; only with power_cut=yes")
            );
        }
        if layers.seed.is_some() && layers.faults.is_none() && !cut {
            return Err(
                keys.refuse("seed", "decides about faults and power cuts; only with faults or power_cut=yes")
            );
        }
        Ok(layers)
    }

    /// Returns true if no layer is specified.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses layers that do not fit the data: data of `size` bytes, if that is known, read-only data,
    /// or data that is not a file.
    pub(crate) fn check(
        &self,
        keys: &Keys,
        size: Option<u64>,
        readonly: bool,
        is_file: bool,
    ) -> Result<(), SpecError> {
        if let Some(zones) = &self.zones {
            if let Some(size) = size.filter(|size| *size < zones.size) {
                let why = format!("the device has {}; it must hold at least one zone", size::exact(size));
                let key = if keys.typed("zone_size").is_some() { "zone_size" } else { "zoned" };
                let typed = if key == "zoned" { ", a zone_size of 256M is the default" } else { "" };
                return Err(keys.refuse(key, format!("{why}{typed}")));
            }
            if zones.state.is_some() && !is_file {
                let why = "only for a file: a device in memory ends with the process, and so do its zones";
                return Err(keys.refuse("zone_state", why));
            }
            if readonly && is_file {
                return Err(keys.refuse("zoned", "not with readonly=yes: the zones could not change"));
            }
        }
        for key in ["power_cut", "record"] {
            let given = if key == "record" { self.record.is_some() } else { self.power_cut };
            if given && readonly {
                return Err(keys.refuse(key, "not with readonly=yes: nothing is written that could be lost"));
            }
        }
        Ok(())
    }
}

/// Parses the size of a cache; 0 is no cache.
pub(crate) fn parse_cache(text: &str) -> Result<Option<u64>, String> {
    if text == "0" {
        return Ok(None);
    }
    size::parse(text).map(Some).map_err(|e| format!("{e}; 0 is no cache"))
}

/// Layers of a device.
#[derive(Default)]
pub struct Layers {
    /// Power-cut layer, which keeps unflushed writes apart.
    pub power: Option<Arc<Power>>,
    /// Power cuts are allowed. Otherwise the power layer only records a log.
    pub can_cut: bool,
    /// Bad-block layer.
    pub bad: Option<Arc<BadBlocks>>,
    /// Zone layer.
    pub zones: Option<Arc<Zones>>,
    /// Quiesce layer, which counts requests and can be shut.
    pub quiesce: Option<Arc<Quiesce>>,
    /// Fault layer.
    pub faults: Option<Arc<Faults>>,
    /// Zones that are initially read-only or offline: attribute and offset.
    pub conditions: Vec<(&'static str, u64)>,
    /// Initial seed of faults and power cuts.
    pub seed: u64,
    /// The seed was chosen at random, so it must be reported.
    pub seed_is_random: bool,
    /// Number of power cuts and visited points of the log.
    pub cuts: AtomicU64,
    /// Last and next power cut. Held only to read or replace a value.
    cut_history: Mutex<CutHistory>,
}

/// Last and next power cut, for statistics.
#[derive(Debug, Default, Clone, Copy)]
struct CutHistory {
    /// Result of the last cut.
    last: Option<Cut>,
    /// Seed of the next cut, if the power goes off by itself.
    seed: Option<u64>,
}

/// Errors from cutting the power.
#[derive(Debug, thiserror::Error)]
pub enum CutError {
    /// Requests in flight did not complete in time.
    #[error("requests in flight do not complete")]
    Busy,
    /// The device failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// The log cannot be read or written.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Layers {
    /// Returns the reason why an operation on the data alone would not match what users of the device
    /// see, or None.
    pub fn hide(&self) -> Option<&'static str> {
        let power = "it keeps unflushed writes apart (power_cut, cache_size, record), which would be missing";
        self.zones_hide().or(self.power.is_some().then_some(power))
    }

    /// Returns the reason of [`hide`](Self::hide) for zones only. A copy of the whole device does not
    /// contain their state.
    pub(crate) fn zones_hide(&self) -> Option<&'static str> {
        self.zones.is_some().then_some("it is zoned, and the state of its zones would be missing")
    }

    /// Returns the seed of the next cut. Each cut has another seed, and the same seed of the device gives
    /// the same sequence.
    pub fn next_seed(&self) -> u64 {
        let seed = self.faults.as_ref().map_or(self.seed, |faults| faults.seed());
        seed.wrapping_add(self.cuts.load(Ordering::SeqCst))
    }

    /// Returns the specification with the present fault rules and seed.
    pub fn as_now(&self, spec: &LayerSpec) -> LayerSpec {
        let mut layers = spec.clone();
        if let Some(layer) = &self.faults {
            (layers.faults, layers.seed) = (Some(faults::rules(layer)), Some(layer.seed()));
        }
        layers
    }

    /// Cuts the power. Clients should be disconnected.
    pub fn cut(&self, power: &Power, seed: u64) -> Result<Cut, CutError> {
        let cut = self.with_requests_stopped(power, || {
            Ok(match &self.zones {
                Some(zones) => zones.power_cut(power, seed)?,
                None => power.cut(seed)?,
            })
        })?;
        self.cut_history().last = Some(cut);
        Ok(cut)
    }

    /// Switches the power off after a number of writes or flushes. Then `off` is called. It must have
    /// another thread call [`cut`](Self::cut) with this seed.
    ///
    /// # Errors
    /// Fails if the power is just going off.
    pub fn cut_after(
        &self,
        power: &Power,
        after: After,
        seed: u64,
        off: impl FnOnce() + Send + 'static,
    ) -> device::Result<()> {
        power.cut_after(after, off)?;
        self.cut_history().seed = Some(seed);
        Ok(())
    }

    fn cut_history(&self) -> MutexGuard<'_, CutHistory> {
        // A panic cannot leave an assignment half done, so poisoning is ignored.
        self.cut_history.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sets the device to a point of the log. Clients should be disconnected.
    pub fn visit(
        &self,
        power: &Power,
        point: &Point,
        seed: Option<u64>,
        wipe_data: &dyn Fn() -> device::Result<()>,
    ) -> Result<Visited, CutError> {
        self.with_requests_stopped(power, || Ok(power.visit(point, seed, wipe_data)?))
    }

    fn with_requests_stopped<T>(
        &self,
        power: &Power,
        action: impl FnOnce() -> Result<T, CutError>,
    ) -> Result<T, CutError> {
        // Clients are disconnected, so requests held by an elapsed countdown can fail.
        power.let_go();
        let done = self.with_device_shut(action);
        power.keep_on();
        let done = done?;
        self.cuts.fetch_add(1, Ordering::SeqCst);
        Ok(done)
    }

    fn with_device_shut<T>(&self, action: impl FnOnce() -> Result<T, CutError>) -> Result<T, CutError> {
        // Clients are disconnected, so hanging requests, which have been executed, can complete.
        if let Some(faults) = &self.faults {
            faults.release();
        }
        let _shut = match &self.quiesce {
            Some(quiesce) => Some(quiesce.shut(QUIET_WAIT).ok_or(CutError::Busy)?),
            None => None,
        };
        // The power layer returns Gone if the device below does not complete requests.
        action().map_err(|error| match error {
            CutError::Device(device::Error::Gone)
            | CutError::Record(RecordError::Device(device::Error::Gone)) => CutError::Busy,
            error => error,
        })
    }

    /// Wipes the device. `wipe_data` wipes the data below the layers.
    pub fn wipe(&self, wipe_data: &dyn Fn() -> device::Result<()>) -> device::Result<()> {
        match &self.power {
            Some(power) => power.reset(wipe_data)?,
            None => wipe_data()?,
        }
        let Some(zones) = &self.zones else { return Ok(()) };
        zones.wipe()?;
        for (attr, offset) in &self.conditions {
            zones::set_condition(zones, attr, *offset)?;
        }
        Ok(())
    }
}

// ---- setting up ---------------------------------------------------------------------------------

/// Properties of the data that determine the layers over it.
#[derive(Debug, Default)]
pub struct DataInfo<'a> {
    /// Path of the file, if the data is a file.
    pub file: Option<&'a Path>,
    /// Settings of a test drive, which has layers of its own.
    pub drive: Option<Drive<'a>>,
}

/// Settings of a test drive (kind `null`).
#[derive(Debug)]
pub struct Drive<'a> {
    /// The drive stores data that is written.
    pub stores: bool,
    /// Bytes of the volatile cache.
    pub cache_size: Option<u64>,
    /// How bad blocks fail.
    pub bad: BadConfig,
    /// Changes of the list of bad blocks.
    pub badblocks: &'a [String],
    /// Bandwidth and completion time.
    pub pace: PaceConfig,
}

/// Adds layers to `device`. On failure, removes the files that it created.
pub(crate) fn add_layers(
    spec: &LayerSpec,
    data: &DataInfo<'_>,
    device: Arc<dyn Device>,
) -> Result<(Arc<dyn Device>, Layers), Refusal> {
    let mut new_files = Vec::new();
    stack_layers(spec, data, device, &mut new_files)
        .inspect_err(|_| new_files.iter().for_each(MadeFile::remove))
}

fn stack_layers(
    spec: &LayerSpec,
    data: &DataInfo<'_>,
    device: Arc<dyn Device>,
    new_files: &mut Vec<MadeFile>,
) -> Result<(Arc<dyn Device>, Layers), Refusal> {
    let drive = data.drive.as_ref();
    let (mut top, mut layers) = (device, Layers::default());
    if spec.is_empty() && drive.is_none() {
        return Ok((top, layers));
    }
    let cache_size = drive.and_then(|drive| drive.cache_size);
    layers.can_cut = spec.power_cut || cache_size.is_some();
    if layers.can_cut || spec.record.is_some() {
        let power = Arc::new(power::add_layer(top, cache_size.unwrap_or(0), spec, new_files)?);
        layers.power = Some(Arc::clone(&power));
        top = power;
    }
    if let Some(drive) = drive {
        let bad = Arc::new(bad_blocks::add_layer(top, drive.bad, drive.badblocks)?);
        layers.bad = Some(Arc::clone(&bad));
        top = bad;
    }
    if let Some(zones) = &spec.zones {
        let stores = drive.is_none_or(|drive| drive.stores);
        let zoned = Arc::new(zones::add_layer(zones, top, layers.bad.clone(), stores, data.file, new_files)?);
        layers.conditions = zones::conditions(zones);
        layers.zones = Some(Arc::clone(&zoned));
        top = zoned;
    }
    let quiesce = Arc::new(Quiesce::new(top));
    layers.quiesce = Some(Arc::clone(&quiesce));
    top = quiesce;
    if let Some(Drive { pace, .. }) = drive
        && (pace.mbps != 0 || !pace.completion.is_zero())
    {
        let paced = Paced::new(top, *pace).map_err(|e| Refusal::failed(Errno::ENOMEM, e))?;
        top = Arc::new(paced);
    }
    layers.seed = spec.seed.unwrap_or_else(faults::random_seed);
    if let Some(rules) = &spec.faults {
        layers.seed_is_random = spec.seed.is_none();
        let faults = Faults::new(top, faults::rules_of(rules), layers.seed);
        let faults = Arc::new(faults.map_err(|e| Refusal::failed(Errno::ENOMEM, e))?);
        layers.faults = Some(Arc::clone(&faults));
        top = faults;
    }
    Ok((top, layers))
}

// ---- attributes ---------------------------------------------------------------------------------

impl Layers {
    /// Returns the attributes of these layers.
    pub(crate) fn names(&self) -> Vec<&'static str> {
        let mut names = Vec::new();
        if self.zones.is_some() {
            names.extend(zones::ATTRS);
        }
        if self.faults.is_some() {
            names.extend(faults::ATTRS);
        }
        if self.power.is_some() {
            names.extend(power::ATTRS);
        }
        names
    }

    /// Returns the value of an attribute. `top` is the device with its layers.
    pub(crate) fn value(&self, spec: &LayerSpec, top: &dyn Device, attr: &str) -> Option<Value> {
        if let (Some(layer), true) = (&self.faults, faults::ATTRS.contains(&attr)) {
            return Some(faults::value(layer, attr));
        }
        if let (Some(layer), true) = (&self.power, power::ATTRS.contains(&attr)) {
            return Some(power::value(layer, self.can_cut, spec.record.as_deref(), attr));
        }
        zones::value(spec.zones.as_ref()?, self.zones.as_ref()?, &top.geometry().zones?, attr)
    }
}

/// Formats the requests of a device, like the block layer's `stat` file: zone appends count as
/// writes.
pub fn io(counts: &Counted) -> Value {
    json!({
        "reads": counts.reads,
        "read_bytes": counts.read_bytes,
        "writes": counts.writes + counts.appends,
        "written_bytes": counts.written_bytes,
        "discards": counts.discards,
        "discarded_bytes": counts.discarded_bytes,
        "zeroes": counts.zeroes,
        "zeroed_bytes": counts.zeroed_bytes,
        "flushes": counts.flushes,
        "errors": counts.errors,
        "in_flight": counts.in_flight,
        "limited": counts.limited,
    })
}

/// Formats the latency of a device's requests by operation, without operations that did not occur.
pub fn latency(account: &Account) -> Value {
    let nanoseconds = |took: Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    let operation = |counter: Counter| {
        let latency = &account.latency[counter];
        let requests = latency.requests();
        (requests > 0).then(|| {
            let within = |thousandths| latency.within(thousandths).map(nanoseconds);
            let fields = json!({
                "requests": requests,
                "mean_ns": nanoseconds(latency.total()) / requests,
                "p50_ns": within(500),
                "p99_ns": within(990),
                "p999_ns": within(999),
            });
            (counter.word().to_owned(), fields)
        })
    };
    Value::Object(Counter::ALL.into_iter().filter_map(operation).collect())
}

/// Formats the requests that reached the data of a test drive, by operation.
pub fn ops(counts: &Counted) -> Value {
    json!({
        "reads": counts.reads,
        "writes": counts.writes,
        "discards": counts.discards,
        "zeroes": counts.zeroes,
        "flushes": counts.flushes,
        "appends": counts.appends,
        "read_bytes": counts.read_bytes,
        "written_bytes": counts.written_bytes,
        "errors": counts.errors,
    })
}

// ---- changes ------------------------------------------------------------------------------------

/// Checked changes of layers by a `set`.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    faults: Option<String>,
    seed: Option<u64>,
    badblocks: Vec<String>,
    /// Attribute and offset.
    conditions: Vec<(String, u64)>,
}

impl Changes {
    /// Parses an attribute of the layers of the device `name`. Returns false if no layer has it as a
    /// settable attribute.
    pub(crate) fn take(
        &mut self,
        layers: &Layers,
        name: &str,
        readonly: bool,
        attr: &str,
        text: &str,
    ) -> Result<bool, Refusal> {
        let invalid = |why: String| Refusal::invalid(format!("{name}: {attr}={text}: {why}"));
        match attr {
            "faults" | "seed" if layers.faults.is_none() => {
                // A kind without layers reports an unknown attribute instead.
                if layers.quiesce.is_none() && readonly {
                    return Ok(false);
                }
                let why =
                    "the device was created without faults; create it with faults=none to set them later";
                return Err(Refusal::failed(Errno::EINVAL, format!("{name}: {attr}={text}: {why}")));
            }
            "faults" => self.faults = Some(faults::parse_faults(text).map_err(invalid)?),
            "seed" => self.seed = Some(faults::parse_seed(text).map_err(invalid)?),
            "badblocks" if layers.bad.is_some() => {
                self.badblocks = bad_blocks::parse_badblocks(text).map_err(invalid)?;
            }
            "zone_readonly" | "zone_offline" => {
                let Some(zones) = &layers.zones else { return Ok(false) };
                let offsets = zones::parse_zone_offsets(zones, text).map_err(invalid)?;
                self.conditions.extend(offsets.into_iter().map(|offset| (attr.to_owned(), offset)));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Applies the changes.
    pub(crate) fn apply(self, layers: &Layers, name: &str) -> Result<(), Refusal> {
        if let Some(bad) = &layers.bad {
            let changed = bad.change_all(&self.badblocks);
            changed.map_err(|e| Refusal::failed(Errno::EINVAL, format!("{name}: {e}")))?;
        }
        if let Some(zones) = &layers.zones {
            for (attr, offset) in &self.conditions {
                zones::set(zones, name, attr, *offset)?;
            }
        }
        if let Some(layer) = &layers.faults {
            match (self.faults, self.seed) {
                (None, None) => {}
                (Some(rules), seed) => layer.set(faults::rules_of(&rules), seed),
                (None, seed) => layer.set(layer.rules(), seed),
            }
        }
        Ok(())
    }
}
