//! What lies over a device's data: bad blocks, zones, pace, faults, loss of power. From the data
//! up:
//!
//! ```text
//! faults        answers late or wrong              keys faults, seed
//! pace          mbps, completion_nsec              null
//! quiesce       counts, and can be shut            where there is any of the others
//! zones         write pointers                     zoned=1
//! bad blocks                                       null
//! power         unflushed writes apart, the log    power_cut, power_cut_unit, cache_size, record
//! data          null, memory, ram, fork, file, nbd, rbd
//! ```

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

/// The keys of faults and of the loss of power.
pub const FAULT_KEYS: [&str; 5] = ["faults", "seed", "power_cut", "power_cut_unit", "record"];

/// Stands for the number of a device where several are made with the same keys.
pub const NUMBER: &str = "%n";

/// How long a loss of power waits for what is on its way, on a slow disk.
const QUIET_WAIT: Duration = Duration::from_secs(60);

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
    /// Bytes that a cut does not tear, where that was said.
    pub power_cut_unit: Option<u32>,
    /// Where every write is recorded.
    pub record: Option<PathBuf>,
}

impl LayerSpec {
    /// Those of one of several devices, with a log of its own.
    #[must_use]
    pub fn numbered(&self, number: u64) -> Self {
        let of_number = |path: &PathBuf| {
            let text = path_text::text(path).replace(NUMBER, &number.to_string());
            path_text::path(&text)
        };
        Self { record: self.record.as_ref().map(of_number), ..self.clone() }
    }

    /// Whether each of several devices has a log of its own, if it has one.
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

    /// Whether anything was asked for.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// Refuses what has nothing to do over data of `size` bytes, where that is known, or in the
    /// file that it is.
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
                let why = "only for a file: what is in memory ends with the process, and its zones with it";
                return Err(keys.refuse("zone_state", why));
            }
            if readonly && is_file {
                return Err(keys.refuse("zoned", "not with readonly=yes: the zones could not change"));
            }
        }
        for key in ["power_cut", "record"] {
            let said = if key == "record" { self.record.is_some() } else { self.power_cut };
            if said && readonly {
                return Err(keys.refuse(key, "not with readonly=yes: nothing is written that could be lost"));
            }
        }
        Ok(())
    }
}

/// A size of a cache, or 0 for none.
pub(crate) fn parse_cache(text: &str) -> Result<Option<u64>, String> {
    if text == "0" {
        return Ok(None);
    }
    size::parse(text).map(Some).map_err(|e| format!("{e}; 0 is no cache"))
}

/// The layers that a device has.
#[derive(Default)]
pub struct Layers {
    /// Unflushed writes are kept apart.
    pub power: Option<Arc<Power>>,
    /// The power can be cut.
    pub can_cut: bool,
    /// Blocks that fail.
    pub bad: Option<Arc<BadBlocks>>,
    /// Zones.
    pub zones: Option<Arc<Zones>>,
    /// Counts, and can be shut.
    pub quiesce: Option<Arc<Quiesce>>,
    /// Faults.
    pub faults: Option<Arc<Faults>>,
    /// Zones that are read-only or offline from the beginning on: attribute and place.
    pub conditions: Vec<(&'static str, u64)>,
    /// The seed of the device at its beginning, for faults and cuts.
    pub seed: u64,
    /// It was chosen at random, and has to be told.
    pub seed_is_random: bool,
    /// How often the power was cut.
    pub cuts: AtomicU64,
    /// The last time and the next one. Locked for a look or a change.
    known: Mutex<KnownCuts>,
}

/// What is told of cuts.
#[derive(Debug, Default, Clone, Copy)]
struct KnownCuts {
    /// What the last one did.
    last: Option<Cut>,
    /// The seed of the next one, where the power goes off by itself.
    seed: Option<u64>,
}

/// Why the power could not be cut.
#[derive(Debug, thiserror::Error)]
pub enum CutError {
    /// Requests do not end.
    #[error("requests are on their way that do not end")]
    Busy,
    /// The device.
    #[error(transparent)]
    Device(#[from] device::Error),
    /// The log.
    #[error(transparent)]
    Record(#[from] RecordError),
}

impl Layers {
    /// Why what is done to the data alone would not be what users of the device see; `None` where
    /// it is.
    pub fn hide(&self) -> Option<&'static str> {
        let power = "it keeps unflushed writes apart (power_cut, cache_size, record), which would be missing";
        self.zones_hide().or(self.power.is_some().then_some(power))
    }

    /// Of that only the zones, which also those miss who read the whole device.
    pub(crate) fn zones_hide(&self) -> Option<&'static str> {
        self.zones.is_some().then_some("it is zoned, and the state of its zones would be missing")
    }

    /// The seed of the next cut: each cut has another one, and they come again for the same seed of
    /// the device.
    pub fn next_seed(&self) -> u64 {
        let seed = self.faults.as_ref().map_or(self.seed, |faults| faults.seed());
        seed.wrapping_add(self.cuts.load(Ordering::SeqCst))
    }

    /// What was asked for, with the faults as they are now.
    pub fn as_now(&self, asked: &LayerSpec) -> LayerSpec {
        let mut layers = asked.clone();
        if let Some(layer) = &self.faults {
            (layers.faults, layers.seed) = (Some(faults::rules(layer)), Some(layer.seed()));
        }
        layers
    }

    /// Cuts the power. Nobody should be connected any more.
    pub fn cut(&self, power: &Power, seed: u64) -> Result<Cut, CutError> {
        let cut = self.quietly(power, || {
            Ok(match &self.zones {
                Some(zones) => zones.power_cut(power, seed)?,
                None => power.cut(seed)?,
            })
        })?;
        self.known().last = Some(cut);
        Ok(cut)
    }

    /// The power goes off by itself then; `off` is told, and has to see that it is
    /// [`cut`](Self::cut) with this seed.
    ///
    /// # Errors
    /// It is just going off.
    pub fn cut_after(
        &self,
        power: &Power,
        after: After,
        seed: u64,
        off: impl FnOnce() + Send + 'static,
    ) -> device::Result<()> {
        power.cut_after(after, off)?;
        self.known().seed = Some(seed);
        Ok(())
    }

    fn known(&self) -> MutexGuard<'_, KnownCuts> {
        // Nothing in here can be half done.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Goes to a point of the log. Nobody should be connected any more.
    pub fn visit(
        &self,
        power: &Power,
        point: &Point,
        seed: Option<u64>,
        below: &dyn Fn() -> device::Result<()>,
    ) -> Result<Visited, CutError> {
        self.quietly(power, || Ok(power.visit(point, seed, below)?))
    }

    fn quietly<T>(&self, power: &Power, action: impl FnOnce() -> Result<T, CutError>) -> Result<T, CutError> {
        // Who waits for the power to be cut is gone.
        power.let_go();
        let done = self.shut_for(action);
        power.keep_on();
        let done = done?;
        self.cuts.fetch_add(1, Ordering::SeqCst);
        Ok(done)
    }

    fn shut_for<T>(&self, action: impl FnOnce() -> Result<T, CutError>) -> Result<T, CutError> {
        // What hangs is done already; who waited for the answer is gone.
        if let Some(faults) = &self.faults {
            faults.release();
        }
        let _shut = match &self.quiesce {
            Some(quiesce) => Some(quiesce.shut(QUIET_WAIT).ok_or(CutError::Busy)?),
            None => None,
        };
        // Gone is what the power switch answers where the device below does not.
        action().map_err(|error| match error {
            CutError::Device(device::Error::Gone)
            | CutError::Record(RecordError::Device(device::Error::Gone)) => CutError::Busy,
            error => error,
        })
    }

    /// Wipes the device; `below` wipes its data.
    pub fn wipe(&self, below: &dyn Fn() -> device::Result<()>) -> device::Result<()> {
        match &self.power {
            Some(power) => power.reset(below)?,
            None => below()?,
        }
        let Some(zones) = &self.zones else { return Ok(()) };
        zones.wipe()?;
        for (attr, offset) in &self.conditions {
            zones::put(zones, attr, *offset)?;
        }
        Ok(())
    }
}

// ---- setting up ---------------------------------------------------------------------------------

/// What layers have to know of the data below them.
#[derive(Debug, Default)]
pub struct Below<'a> {
    /// The file that it is.
    pub file: Option<&'a Path>,
    /// It is a test drive, which has layers of its own.
    pub drive: Option<Drive<'a>>,
}

/// A test drive.
#[derive(Debug)]
pub struct Drive<'a> {
    /// It keeps what is written.
    pub stores: bool,
    /// Bytes of its volatile cache.
    pub cache_size: Option<u64>,
    /// How bad blocks fail.
    pub bad: BadConfig,
    /// Changes of their list.
    pub badblocks: &'a [String],
    /// How fast it is.
    pub pace: PaceConfig,
}

/// Puts on `device` what was asked for. Where that fails, no file is left that it made.
pub(crate) fn over(
    asked: &LayerSpec,
    below: &Below<'_>,
    device: Arc<dyn Device>,
) -> Result<(Arc<dyn Device>, Layers), Refusal> {
    let mut made = Vec::new();
    stack(asked, below, device, &mut made).inspect_err(|_| made.iter().for_each(MadeFile::remove))
}

fn stack(
    asked: &LayerSpec,
    below: &Below<'_>,
    device: Arc<dyn Device>,
    made: &mut Vec<MadeFile>,
) -> Result<(Arc<dyn Device>, Layers), Refusal> {
    let drive = below.drive.as_ref();
    let (mut top, mut layers) = (device, Layers::default());
    if asked.is_empty() && drive.is_none() {
        return Ok((top, layers));
    }
    let cache_size = drive.and_then(|drive| drive.cache_size);
    layers.can_cut = asked.power_cut || cache_size.is_some();
    if layers.can_cut || asked.record.is_some() {
        let power = Arc::new(power::over(top, cache_size.unwrap_or(0), asked, made)?);
        layers.power = Some(Arc::clone(&power));
        top = power;
    }
    if let Some(drive) = drive {
        let bad = Arc::new(bad_blocks::over(top, drive.bad, drive.badblocks)?);
        layers.bad = Some(Arc::clone(&bad));
        top = bad;
    }
    if let Some(zones) = &asked.zones {
        let stores = drive.is_none_or(|drive| drive.stores);
        let zoned = Arc::new(zones::over(zones, top, layers.bad.clone(), stores, below.file, made)?);
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
    layers.seed = asked.seed.unwrap_or_else(faults::random_seed);
    if let Some(rules) = &asked.faults {
        layers.seed_is_random = asked.seed.is_none();
        let faults = Faults::new(top, faults::rules_of(rules), layers.seed);
        let faults = Arc::new(faults.map_err(|e| Refusal::failed(Errno::ENOMEM, e))?);
        layers.faults = Some(Arc::clone(&faults));
        top = faults;
    }
    Ok((top, layers))
}

// ---- attributes ---------------------------------------------------------------------------------

impl Layers {
    /// The attributes that these layers have.
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

    /// The value of one of them; `top` is the device with its layers.
    pub(crate) fn value(&self, asked: &LayerSpec, top: &dyn Device, attr: &str) -> Option<Value> {
        if let (Some(layer), true) = (&self.faults, faults::ATTRS.contains(&attr)) {
            return Some(faults::value(layer, attr));
        }
        if let (Some(layer), true) = (&self.power, power::ATTRS.contains(&attr)) {
            return Some(power::value(layer, self.can_cut, asked.record.as_deref(), attr));
        }
        zones::value(asked.zones.as_ref()?, self.zones.as_ref()?, &top.geometry().zones?, attr)
    }
}

/// What users asked of a device, whatever it lies on, as the block layer's `stat` file has it of a
/// disk: zone appends are writes.
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

/// How long what users asked of a device took, by operation; nothing of those that were not asked for.
pub fn latency(account: &Account) -> Value {
    let nanoseconds = |took: Duration| u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
    let told = |counter: Counter| {
        let latency = &account.latency[counter];
        let requests = latency.requests();
        (requests > 0).then(|| {
            let within = |thousandths| latency.within(thousandths).map(nanoseconds);
            let told = json!({
                "requests": requests,
                "mean_ns": nanoseconds(latency.total()) / requests,
                "p50_ns": within(500),
                "p99_ns": within(990),
                "p999_ns": within(999),
            });
            (counter.word().to_owned(), told)
        })
    };
    Value::Object(Counter::ALL.into_iter().filter_map(told).collect())
}

/// What came to the data of a test drive, by operation.
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

/// What a `set` does to the layers, once everything was checked.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    faults: Option<String>,
    seed: Option<u64>,
    badblocks: Vec<String>,
    /// Attribute and place.
    conditions: Vec<(String, u64)>,
}

impl Changes {
    /// Takes an attribute of the layers of the device `name`; `false` where it is none that could
    /// be set.
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
                // Not for kinds that cannot have any.
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
                let places = zones::asked_places(zones, text).map_err(invalid)?;
                self.conditions.extend(places.into_iter().map(|offset| (attr.to_owned(), offset)));
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Makes them.
    pub(crate) fn make(self, layers: &Layers, name: &str) -> Result<(), Refusal> {
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
