//! Families of RAM disks: the disks of a family share one memory pool. This module handles the
//! keys, setup and attributes of families. Each RAM disk starts a family, which its snapshots and
//! their forks join. The forks of any other base form a family of their own.

mod algorithms;
mod note;

use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use freestone::PAGE_BYTES;
use freestone::codec::{Algorithm, Params, ParamsError};
use freestone::device::Device;
use freestone::file::File;
use freestone::ram::{
    self, AdoptError, Adopted, Backing, Family, FamilyMemory, FamilyStat, FullPolicy, Ram, Secondary,
};
use serde_json::{Value, json};
use tracing::warn;

use self::algorithms::{parse_params, parse_secondaries};
use crate::advice::{self, BackingLocation};
use crate::entries::{DEVICE, SpecError, check_name};
use crate::files::{errno_of, error_text};
use crate::full;
use crate::keys::{Keys, parse_algorithm, parse_bool, parse_length, parse_limit, parse_path};
use crate::machine;
use crate::path_text;
use crate::refusal::{Errno, Refusal};
use crate::size;

/// Attributes of a base that show the family of its forks.
pub(crate) const NAMES: [&str; 6] =
    ["comp_algorithm", "mem_limit", full::KEYS[0], full::KEYS[1], full::KEYS[2], "family"];
/// Keys that are allowed only together with `backing_dev`.
const BACKING_KEYS: [&str; 5] = [
    "backing_size",
    "compressed_writeback",
    "writeback_limit",
    "writeback_limit_enable",
    "writeback_batch_size",
];

/// Maximum number of secondary algorithms, which recompress idle pages. Their priorities are 1 to
/// `SECONDARIES`.
pub const SECONDARIES: usize = 3;
/// Largest value of `auto_recompress`, `auto_group` and `auto_dedup` in seconds: a day.
const IDLE_SECONDS_MAX: u64 = 86_400;
/// Unit of `writeback_limit` in bytes, as in the kernel's zram.
const LIMIT_UNIT_BYTES: u64 = 4096;

/// Specification of a family of RAM disks.
#[derive(Debug, Clone, PartialEq)]
pub struct FamilySpec {
    /// Algorithm that compresses new pages.
    pub comp_algorithm: Algorithm,
    /// Parameters of `comp_algorithm`, already checked. A dictionary file in them is read later.
    pub algorithm_params: String,
    /// Memory limit of the family in bytes. 0 means unlimited; `None` means half of the machine's
    /// memory.
    pub mem_limit: Option<u64>,
    /// Secondary algorithms, which recompress pages. Index 0 has priority 1.
    pub recomp_algorithms: [Option<SecondarySpec>; SECONDARIES],
    /// Time after which the keeper thread recompresses idle pages, or `None` to recompress only on
    /// command.
    pub auto_recompress: Option<Duration>,
    /// Time after which the keeper thread compresses neighbouring idle pages together, or `None` to
    /// compress each page alone.
    pub auto_group: Option<Duration>,
    /// Time after which the keeper thread stores idle pages with the same content once, or `None` to
    /// share objects only on command.
    pub auto_dedup: Option<Duration>,
    /// Backing device to which pages are written back from memory, or `None`.
    pub backing: Option<BackingSpec>,
    /// Behavior of writes when the memory limit is reached.
    pub when_full: FullPolicy,
}

/// Secondary algorithm, which recompresses pages.
#[derive(Debug, Clone, PartialEq)]
pub struct SecondarySpec {
    /// Compression algorithm.
    pub algorithm: Algorithm,
    /// Parameters of the algorithm, already checked.
    pub params: String,
}

/// Specification of a backing device and of writeback to it.
#[derive(Debug, Clone, PartialEq)]
pub struct BackingSpec {
    /// Location of the backing device: a file, a block device, or a device of the server.
    pub place: BackingPlace,
    /// Size in bytes of a backing file, or `None` for the size of the existing file. A file that
    /// does not exist is created with this size.
    pub size: Option<u64>,
    /// True if pages are written compressed and packed, as the pool stores them.
    pub compressed: bool,
    /// Number of 4 KiB units that writeback may write if the limit is enabled. The default is 0, as
    /// in the kernel.
    pub limit: u64,
    /// True if `limit` is enabled.
    pub limit_enable: bool,
    /// Number of pages that writeback keeps in flight as a batch, or `None` for the default.
    pub batch_size: Option<u32>,
}

/// Location of a backing device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BackingPlace {
    /// A file or a block device.
    Path(PathBuf),
    /// A device of this server.
    Device {
        /// Name of the device with the prefix `device:`, as it was typed.
        typed: String,
        /// Name of the device.
        name: String,
    },
}

impl BackingPlace {
    fn parse(text: &str) -> Result<Self, String> {
        let Some(name) = text.strip_prefix(DEVICE) else { return parse_path(text).map(Self::Path) };
        match check_name(name) {
            Ok(()) => Ok(Self::Device { typed: text.to_owned(), name: name.to_owned() }),
            Err(_) => Err(format!(
                "after {DEVICE} must be the name of a device; a file of that name is written ./{text}"
            )),
        }
    }

    /// Returns the location in the form of the key's value.
    fn path(&self) -> PathBuf {
        match self {
            Self::Path(path) => path.clone(),
            Self::Device { typed, .. } => PathBuf::from(typed),
        }
    }
}

impl FamilySpec {
    pub(crate) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let comp_algorithm = keys.take("comp_algorithm", parse_algorithm)?.unwrap_or(Algorithm::Lz4);
        let mut recomp_algorithms = keys.take("recomp_algorithm", parse_secondaries)?.unwrap_or_default();
        let algorithm_params = parse_params(keys, comp_algorithm, &mut recomp_algorithms)?;
        let auto_recompress = keys.take("auto_recompress", parse_idle)?.flatten();
        if auto_recompress.is_some() && recomp_algorithms[SECONDARIES - 1].is_some() {
            let why =
                "takes priority 3 for a dictionary of its own, and recomp_algorithm has an algorithm there";
            return Err(keys.refuse("auto_recompress", why));
        }
        Ok(Self {
            comp_algorithm,
            algorithm_params,
            mem_limit: keys.take("mem_limit", parse_limit)?,
            recomp_algorithms,
            auto_recompress,
            auto_group: keys.take("auto_group", parse_idle)?.flatten(),
            auto_dedup: keys.take("auto_dedup", parse_idle)?.flatten(),
            backing: backing(keys)?,
            when_full: full::take(keys)?,
        })
    }
}

fn backing(keys: &Keys) -> Result<Option<BackingSpec>, SpecError> {
    let Some(place) = keys.take("backing_dev", BackingPlace::parse)? else {
        return match BACKING_KEYS.iter().find(|key| keys.typed(key).is_some()) {
            Some(key) => Err(keys.refuse(key, "only with backing_dev=PATH or backing_dev=device:NAME")),
            None => Ok(None),
        };
    };
    let size = keys.take("backing_size", parse_length)?;
    if size.is_some() && matches!(place, BackingPlace::Device { .. }) {
        return Err(
            keys.refuse("backing_size", "only where backing_dev is a file; a device has its own size")
        );
    }
    Ok(Some(BackingSpec {
        place,
        size,
        compressed: keys.take("compressed_writeback", parse_bool)?.unwrap_or(true),
        limit: keys.take("writeback_limit", parse_units)?.unwrap_or(0),
        limit_enable: keys.take("writeback_limit_enable", parse_bool)?.unwrap_or(false),
        batch_size: keys.take("writeback_batch_size", parse_batch)?,
    }))
}

/// Hands the memory of families to a process that holds it.
pub trait FamilyHolder: Send + Sync {
    /// Has the memory of a family held for as long as the family exists.
    ///
    /// # Errors
    /// Fails if the holding process cannot be reached, or holds too many families.
    fn hold(&self, family: &Family) -> Result<(), Refusal>;
}

// ---- numbers ------------------------------------------------------------------------------------

/// Parses the value of `auto_recompress`, `auto_group` or `auto_dedup`: the idle time in seconds, or `no` (returns `None`).
fn parse_idle(text: &str) -> Result<Option<Duration>, String> {
    match text.parse() {
        Ok(0) => Ok(None),
        Ok(seconds) if seconds <= IDLE_SECONDS_MAX => Ok(Some(Duration::from_secs(seconds))),
        Err(_) if parse_bool(text) == Ok(false) => Ok(None),
        _ => Err(format!("must be no, or the seconds a page must be idle, 1 to {IDLE_SECONDS_MAX}")),
    }
}

/// Parses the value of `writeback_limit`: a number of 4 KiB units as in the kernel, not a size.
pub(crate) fn parse_units(text: &str) -> Result<u64, String> {
    match (text.parse(), size::parse(text)) {
        (Ok(units), _) => Ok(units),
        (_, Ok(bytes)) => {
            Err(format!("a count of 4 KiB units, without a letter; {}?", bytes.div_ceil(LIMIT_UNIT_BYTES)))
        }
        _ => Err("must be a whole number: a count of 4 KiB units".into()),
    }
}

/// Parses the value of `writeback_batch_size`: a number of pages, at least 1.
pub(crate) fn parse_batch(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(pages) if pages > 0 => Ok(pages),
        _ => Err(format!("must be a whole number of 4 KiB blocks, 1 to {}", u32::MAX)),
    }
}

// ---- setting up ---------------------------------------------------------------------------------

/// Device of the server that is the backing device of a family.
pub(crate) struct BackingDevice<'a> {
    /// The backing device, including its layers.
    pub device: &'a Arc<dyn Device>,
    /// True if each write must be flushed, because the device can lose completed writes while this
    /// process runs.
    pub write_through: bool,
    /// True if the device stores its data in memory.
    pub in_memory: bool,
}

/// Creates a family. `size` is the size of its disks in bytes. `backing_device` must be set if
/// `spec` names a device of the server as backing device. `is_adoptable`: another process can take over
/// the family, unless its settings exclude that. `others` returns the memory limits of the
/// existing families. Logs warnings about probable mistakes.
pub(crate) fn new(
    name: &str,
    spec: &FamilySpec,
    size: u64,
    backing_device: Option<&BackingDevice<'_>>,
    is_adoptable: bool,
    others: impl FnOnce() -> Vec<u64>,
) -> Result<Family, Refusal> {
    // The location is examined before the family is created, because creating the family may create
    // the file.
    let location = match spec.backing.as_ref().map(|backing| &backing.place) {
        Some(BackingPlace::Path(path)) => BackingLocation::of(path),
        _ => BackingLocation {
            in_memory: backing_device.is_some_and(|backing_device| backing_device.in_memory),
            free: None,
        },
    };
    let backing = spec.backing.as_ref().map(|backing| match &backing.place {
        BackingPlace::Path(path) => {
            let file = spill_file(File::open_for_writeback(path, backing.size))?;
            // Only another process needs the second descriptor.
            let again = if is_adoptable { Some(second_descriptor(&file)?) } else { None };
            Ok(Backing { file: again, ..of_file(backing, file) })
        }
        BackingPlace::Device { .. } => {
            let Some(BackingDevice { device, write_through, .. }) = backing_device else {
                unreachable!("the caller looked up the device")
            };
            let path = Some(backing.place.path());
            Ok(Backing {
                write_through: *write_through,
                path,
                ..Backing::new(Arc::clone(device), backing.compressed)
            })
        }
    });
    let params = |_, words: &str| Params::parse_with(words, path_text::path);
    let mut config = config(spec, backing.transpose()?, &params)?;
    config.adoptable = is_adoptable;
    if config.check_adoptable().is_err() {
        warn!("{name}: its backing_dev is no file, so that it loses its content if the server is killed");
        config.adoptable = false;
    }
    let family = Family::new(config.clone()).map_err(setup_refusal)?;
    family.set_name(name);
    if config.adoptable {
        // The note is much shorter than a page.
        let _ = family.set_note(note::of(spec).as_bytes());
    }
    if let Some(backing) = &spec.backing {
        // Settings of a family are changed through one of its disks, so a temporary disk is
        // created.
        let disk = family.ram(PAGE_BYTES as u64).map_err(setup_refusal)?;
        set_writeback(&disk, backing);
        warn_of_backing(name, &config, &disk, location);
    }
    // Without /proc the memory of the machine is unknown, and the warning is omitted.
    if let Ok(memory) = machine::memory() {
        let config = ram::Config { disksize: size, ..config };
        for warning in advice::memory_warnings(name, &config, others().into_iter(), memory) {
            warn!("{warning}");
        }
    }
    Ok(family)
}

fn warn_of_backing(name: &str, config: &ram::Config, disk: &Ram, location: BackingLocation) {
    if let (Some(backing), Some(stat)) = (&config.backing, disk.backing()) {
        for warning in advice::backing_warnings(
            name,
            &backing.path.clone().unwrap_or_default(),
            stat.size,
            config.mem_limit,
            location,
        ) {
            warn!("{warning}");
        }
    }
}

/// Applies the settings of writeback to the family of a disk.
fn set_writeback(disk: &Ram, backing: &BackingSpec) {
    disk.set_writeback_limit(backing.limit);
    disk.set_writeback_limit_enable(backing.limit_enable);
    if let Some(pages) = backing.batch_size {
        disk.set_writeback_batch_size(pages);
    }
}

/// Takes over the family of a server that has ended.
///
/// # Errors
/// As [`FamilyMemory::adopt`]; `EINVAL` if the settings are invalid. The memory stays as it was.
pub(crate) fn adopt(
    spec: &FamilySpec,
    memory: FamilyMemory,
    base: &mut dyn FnMut(u64) -> Option<Arc<dyn Device>>,
) -> Result<(Family, Vec<Adopted>), Refusal> {
    let backing = match (&spec.backing, memory.backing()) {
        (Some(backing), Some(file)) => {
            let device = spill_file(File::open_again_for_writeback(file.as_fd(), backing.place.path()))?;
            Some(Backing { file: Some(Arc::clone(file)), ..of_file(backing, device) })
        }
        _ => None,
    };
    let params = |priority, words: &str| {
        Params::parse_stored(words, path_text::path, memory.dictionary(priority).unwrap_or_default())
    };
    let config = ram::Config { adoptable: true, ..config(spec, backing, &params)? };
    let (family, devices) = memory.adopt(config, base).map_err(|error| match error {
        AdoptError::Setup(error) => setup_refusal(error),
        AdoptError::NoBase(_) => refusal!(ENODEV, "its base does not exist"),
        error => refusal!(EIO, "{error}"),
    })?;
    // From here on nothing may fail: devices that are dropped are removed.
    if let (Some(backing), Some(first)) = (&spec.backing, devices.first()) {
        set_writeback(&first.ram, backing);
    }
    Ok((family, devices))
}

/// Returns the settings of a family. `parse` parses the parameters of the algorithm with a priority.
fn config(
    spec: &FamilySpec,
    backing: Option<Backing>,
    parse: &dyn Fn(usize, &str) -> Result<Params, ParamsError>,
) -> Result<ram::Config, Refusal> {
    let params = |priority, words: &str| {
        parse(priority, words).map_err(|error| refusal!(EIO, "algorithm_params: {error}"))
    };
    let mem_limit = match spec.mem_limit {
        Some(bytes) => bytes,
        None => machine::half_of_memory().map_err(|e| refusal!(EIO, "{e}"))?,
    };
    let mut config = ram::Config {
        comp_algorithm: spec.comp_algorithm,
        algorithm_params: params(0, &spec.algorithm_params)?,
        mem_limit,
        auto_recompress: spec.auto_recompress,
        auto_group: spec.auto_group,
        auto_dedup: spec.auto_dedup,
        full_policy: spec.when_full,
        backing,
        ..ram::Config::default()
    };
    for (priority, place) in (1..).zip(&mut config.recomp_algorithms) {
        if let Some(spec) = &spec.recomp_algorithms[priority - 1] {
            *place = Some(Secondary { algorithm: spec.algorithm, params: params(priority, &spec.params)? });
        }
    }
    Ok(config)
}

fn of_file(spec: &BackingSpec, file: File) -> Backing {
    Backing { path: Some(spec.place.path()), ..Backing::new(Arc::new(file), spec.compressed) }
}

fn spill_file(opened: Result<File, freestone::file::SetupError>) -> Result<File, Refusal> {
    opened.map_err(|error| {
        let why = format!("backing_dev: {}", error_text("backing_size", &error));
        Refusal::failed(errno_of(&error), why)
    })
}

fn second_descriptor(file: &File) -> Result<Arc<OwnedFd>, Refusal> {
    let again = file.second_descriptor().map_err(|error| {
        Refusal::failed(
            Errno::of_file(&error),
            format!("backing_dev: cannot be opened a second time: {error}"),
        )
    });
    again.map(Arc::new)
}

/// Converts an error from creating a family or a RAM disk to a refusal with an errno.
pub(crate) fn setup_refusal(error: ram::SetupError) -> Refusal {
    match error {
        ram::SetupError::NoMemory => refusal!(ENOMEM, "{error}"),
        e => refusal!(EIO, "{e}"),
    }
}

// ---- attributes ---------------------------------------------------------------------------------

/// Returns the value of an attribute that a base shows for the family of its forks, or `None` if it
/// is not such an attribute. Before the first fork, `family` is `None` and the value is that of the
/// specification.
pub(crate) fn value(spec: &FamilySpec, family: Option<Family>, attr: &str) -> Option<Value> {
    Some(match (attr, family) {
        ("comp_algorithm", _) => json!(spec.comp_algorithm.to_string()),
        ("mem_limit", Some(family)) => json!(family.mem_limit()),
        ("mem_limit", None) => {
            json!(spec.mem_limit.or_else(|| machine::half_of_memory().ok()).unwrap_or(0))
        }
        (attr, family) if full::KEYS.contains(&attr) => {
            return full::value(family.map_or(spec.when_full, |family| family.full_policy()), attr);
        }
        ("family", Some(family)) => family_stat(&family),
        ("family", None) => stat_json(&FamilyStat::default()),
        _ => return None,
    })
}

/// Returns the memory statistics of a family as a JSON object.
pub fn family_stat(family: &Family) -> Value {
    stat_json(&family.stat())
}

fn stat_json(s: &FamilyStat) -> Value {
    json!({
        "mem_used_total": s.mem_used_total,
        "mem_limit": s.mem_limit,
        "charged_bytes": s.charged,
        "retiring_bytes": s.retiring,
        "guaranteed_bytes": s.guaranteed,
        "layers": s.layers,
    })
}
