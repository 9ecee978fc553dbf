//! Optional layers over the data of a device. Each layer is a `Device` over another `Device`. The
//! layers from top to bottom, with the keys or kinds that add them:
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
//! `kinds::build` adds the layers. Operations on a device access them through [`Layers`] of its
//! entry.

mod bad_blocks;
mod changes;
mod faults;
mod power;
mod stats;
mod zones;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use freestone::device::{self, Device};
use freestone::faults::Faults;
use freestone::null::{BadBlocks, BadBlocksConfig, PaceConfig, PacedDevice};
use freestone::power::{CutReport, CutTrigger, Point, Power, RecordError, VisitReport};
use freestone::quiesce::Quiesce;
use freestone::replace::CreatedFile;
use freestone::sync::Mutex;
use freestone::zone::Zones;
use serde_json::Value;

pub(crate) use self::bad_blocks::{bad_ranges, parse_badblocks};
pub(crate) use self::changes::Changes;
pub use self::faults::fault_stat;
pub use self::power::{parse_after, power_stat};
pub use self::stats::{latency_stat, operation_stat, request_stat};
pub(crate) use self::zones::check_unzoned;
pub use self::zones::{ZoneSpec, format_offset, parse_offset, zone_stat};
use crate::entries::SpecError;
use crate::keys::{Keys, parse_bool, parse_path};
use crate::path_text;
use crate::refusal::Refusal;
use crate::size;

/// Placeholder in a text for the number of each device, if several devices are created with the
/// same keys.
pub const NUMBER: &str = "%n";

/// Maximum time that a power cut waits for requests in flight. Long enough for a slow disk.
const QUIET_WAIT: Duration = Duration::from_secs(60);

/// Specification of the layers of a device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LayerSpec {
    /// Specification of the zones, or `None` if the device is not zoned.
    pub zones: Option<Box<ZoneSpec>>,
    /// Fault rules, already checked, or the text `none`. `None` adds no fault layer.
    pub faults: Option<String>,
    /// Seed of faults and power cuts, or `None` for a random one.
    pub seed: Option<u64>,
    /// True to keep unflushed writes in a volatile cache, so that a power cut can lose them.
    pub power_cut: bool,
    /// Size in bytes of a unit that a power cut does not tear, or `None` for the default.
    pub power_cut_unit: Option<u32>,
    /// Path of the log file that records every write, or `None` for no recording.
    pub record: Option<PathBuf>,
}

impl LayerSpec {
    /// Returns the layers of one of several devices. `%n` in the path of the log file is replaced
    /// by `number`.
    #[must_use]
    pub fn numbered(&self, number: u64) -> Self {
        let of_number = |path: &PathBuf| {
            let text = path_text::text(path).replace(NUMBER, &number.to_string());
            path_text::path(&text)
        };
        Self { record: self.record.as_ref().map(of_number), ..self.clone() }
    }

    /// Returns true unless several devices created with these layers would share a log file.
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

    /// Returns true if the specification contains no layer.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses layers that do not fit the data. `size` is the size of the data in bytes, if known.
    /// `readonly` and `is_file` are properties of the data.
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

/// Parses the size of a volatile cache in bytes, or 0 for no cache (returns `None`).
pub(crate) fn parse_cache(text: &str) -> Result<Option<u64>, String> {
    if text == "0" {
        return Ok(None);
    }
    size::parse(text).map(Some).map_err(|e| format!("{e}; 0 is no cache"))
}

/// Layers of an open device, and the state of its power cuts.
#[derive(Default)]
pub struct Layers {
    /// Power layer, which keeps unflushed writes in a volatile cache and records a log.
    pub power: Option<Arc<Power>>,
    /// True if power cuts are allowed. Otherwise the power layer only records a log.
    pub can_cut: bool,
    /// Bad-block layer of a test drive.
    pub bad: Option<Arc<BadBlocks>>,
    /// Zone layer of a zoned device.
    pub zones: Option<Arc<Zones>>,
    /// Quiesce layer, which counts requests and can be closed.
    pub quiesce: Option<Arc<Quiesce>>,
    /// Fault layer, which delays, fails or hangs requests.
    pub faults: Option<Arc<Faults>>,
    /// Zones that are initially read-only or offline: attribute name and offset in bytes.
    pub conditions: Vec<(&'static str, u64)>,
    /// Initial seed of faults and power cuts.
    pub seed: u64,
    /// True if the seed was chosen at random, so that it must be reported to the user.
    pub seed_is_random: bool,
    /// Number of power cuts and of visits of points of the log.
    pub cuts: AtomicU64,
    /// Last and next power cut. The lock is held only to read or replace a value.
    cut_history: Mutex<CutHistory>,
}

/// Last and next power cut, for statistics.
#[derive(Debug, Default, Clone, Copy)]
struct CutHistory {
    /// Result of the last power cut.
    last: Option<CutReport>,
    /// Seed of the next power cut, if a countdown to it is set.
    seed: Option<u64>,
}

/// Errors from cutting the power or visiting a point of the log.
#[derive(Debug, thiserror::Error)]
pub enum CutError {
    /// Requests in flight did not complete in time, so the power was not cut.
    #[error("requests in flight do not complete")]
    Busy,
    /// A request to the device failed.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// An operation on the recorded log failed.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Layers {
    /// Returns the reason why an operation on the data without its layers would miss content that
    /// users of the device see. Returns `None` if it would not.
    pub fn bypass_obstacle(&self) -> Option<&'static str> {
        let power = "it keeps unflushed writes apart (power_cut, cache_size, record), which would be missing";
        self.zones_bypass_obstacle().or(self.power.is_some().then_some(power))
    }

    /// Returns the same as [`bypass_obstacle`](Self::bypass_obstacle), but only because of zones:
    /// even a copy of the whole device does not contain the state of its zones.
    pub(crate) fn zones_bypass_obstacle(&self) -> Option<&'static str> {
        self.zones.is_some().then_some("it is zoned, and the state of its zones would be missing")
    }

    /// Returns the seed of the next power cut. Each cut of a device has a different seed, and the
    /// same seed of the device results in the same sequence of seeds.
    pub fn next_seed(&self) -> u64 {
        let seed = self.faults.as_ref().map_or(self.seed, |faults| faults.seed());
        seed.wrapping_add(self.cuts.load(Ordering::SeqCst))
    }

    /// Returns the specification `spec` with the present fault rules and seed.
    pub fn current_spec(&self, spec: &LayerSpec) -> LayerSpec {
        let mut layers = spec.clone();
        if let Some(layer) = &self.faults {
            (layers.faults, layers.seed) = (Some(faults::rules(layer)), Some(layer.seed()));
        }
        layers
    }

    /// Cuts the power of the device. Clients should be disconnected before.
    pub fn cut(&self, power: &Power, seed: u64) -> Result<CutReport, CutError> {
        let cut = self.with_requests_stopped(power, || {
            Ok(match &self.zones {
                Some(zones) => zones.power_cut(power, seed)?,
                None => power.cut(seed)?,
            })
        })?;
        self.cut_history.lock().last = Some(cut);
        Ok(cut)
    }

    /// Switches the power off after a number of writes or flushes. Then `off` is called, which must
    /// make another thread call [`cut`](Self::cut) with this `seed`.
    ///
    /// # Errors
    /// `Gone` if the power is already going off.
    pub fn cut_after(
        &self,
        power: &Power,
        after: CutTrigger,
        seed: u64,
        off: impl FnOnce() + Send + 'static,
    ) -> device::Result<()> {
        power.cut_after(after, off)?;
        self.cut_history.lock().seed = Some(seed);
        Ok(())
    }

    /// Restores the device to a point of its recorded log. Clients should be disconnected before.
    pub fn visit(
        &self,
        power: &Power,
        point: &Point,
        seed: Option<u64>,
        wipe_data: &dyn Fn() -> device::Result<()>,
    ) -> Result<VisitReport, CutError> {
        self.with_requests_stopped(power, || Ok(power.visit(point, seed, wipe_data)?))
    }

    fn with_requests_stopped<T>(
        &self,
        power: &Power,
        action: impl FnOnce() -> Result<T, CutError>,
    ) -> Result<T, CutError> {
        // Clients are disconnected, so requests held since a countdown ended may fail.
        power.fail_held_requests();
        let done = self.with_device_shut(action);
        power.cancel_cut();
        let done = done?;
        self.cuts.fetch_add(1, Ordering::SeqCst);
        Ok(done)
    }

    fn with_device_shut<T>(&self, action: impl FnOnce() -> Result<T, CutError>) -> Result<T, CutError> {
        // Clients are disconnected, so hanging requests, which have already been executed, may
        // complete.
        if let Some(faults) = &self.faults {
            faults.release();
        }
        let _shut = match &self.quiesce {
            Some(quiesce) => Some(quiesce.close(QUIET_WAIT).ok_or(CutError::Busy)?),
            None => None,
        };
        // The power layer returns `Gone` if the device under it does not complete requests in time.
        action().map_err(|error| match error {
            CutError::Device(device::Error::Gone)
            | CutError::Record(RecordError::Device(device::Error::Gone)) => CutError::Busy,
            error => error,
        })
    }

    /// Resets the device to its initial content. `wipe_data` resets the data under the layers.
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

/// Properties of a device's data that determine the layers over it.
#[derive(Debug, Default)]
pub struct DataInfo<'a> {
    /// Path of the file or block device, if the data is stored in one.
    pub file: Option<&'a Path>,
    /// Settings of a test drive, which add layers, or `None` for other kinds.
    pub drive: Option<Drive<'a>>,
}

/// Settings of a test drive (kind `null`).
#[derive(Debug)]
pub struct Drive<'a> {
    /// True if the drive stores written data.
    pub stores: bool,
    /// Size of the volatile cache in bytes, or `None` without a cache.
    pub cache_size: Option<u64>,
    /// Behavior of bad blocks.
    pub bad: BadBlocksConfig,
    /// Changes that are applied to the empty list of bad blocks.
    pub badblocks: &'a [String],
    /// Bandwidth limit and minimum completion time.
    pub pace: PaceConfig,
}

/// Adds the layers of `spec` to `device`. On failure, removes the files that were created for
/// layers.
pub(crate) fn add_layers(
    spec: &LayerSpec,
    data: &DataInfo<'_>,
    device: Arc<dyn Device>,
) -> Result<(Arc<dyn Device>, Layers), Refusal> {
    freestone::trail::step!();
    let mut new_files = Vec::new();
    stack_layers(spec, data, device, &mut new_files)
        .inspect_err(|_| new_files.iter().for_each(CreatedFile::remove))
}

fn stack_layers(
    spec: &LayerSpec,
    data: &DataInfo<'_>,
    device: Arc<dyn Device>,
    new_files: &mut Vec<CreatedFile>,
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
        let paced = PacedDevice::new(top, *pace).map_err(|e| refusal!(ENOMEM, "{e}"))?;
        top = Arc::new(paced);
    }
    layers.seed = spec.seed.unwrap_or_else(faults::random_seed);
    if let Some(rules) = &spec.faults {
        layers.seed_is_random = spec.seed.is_none();
        let faults = Faults::new(top, faults::rules_of(rules), layers.seed);
        let faults = Arc::new(faults.map_err(|e| refusal!(ENOMEM, "{e}"))?);
        layers.faults = Some(Arc::clone(&faults));
        top = faults;
    }
    Ok((top, layers))
}

// ---- attributes ---------------------------------------------------------------------------------

impl Layers {
    /// Returns the names of the attributes of these layers.
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

    /// Returns the value of an attribute, or `None` if no layer has it. `top` is the device with
    /// its layers.
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
