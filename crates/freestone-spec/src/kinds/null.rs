//! Kind `null`: test drives with the keys of the kernel's `null_blk`. Parameters of the kernel's
//! driver that have no equivalent are refused with a reason.

use std::sync::Arc;
use std::time::Duration;

use freestone::device::{self, Device};
use freestone::null::{self, BadBlocksConfig, COMPLETION_MAX, MBPS_MAX, Memory, Null, PaceConfig};
use freestone::ram::{Family, Ram};
use serde_json::{Value, json};

use super::registry::Registry;
use super::{DataDevice, Entry, KindConfig, KindInstance, KindSpec, Spec};
use crate::entries::SpecError;
use crate::family::{self, FamilySpec};
use crate::keys::{Keys, SECTOR_BYTES, parse_bool, parse_length, parse_sectors};
use crate::layers::{DataInfo, Drive, bad_ranges, parse_badblocks, parse_cache};
use crate::refusal::Refusal;
use crate::schema;
use crate::size::{self, exact};
use freestone::view::GeometryView;

pub(super) const NAME: &str = "null";
/// Keys that are also attributes of every null device.
const NAMES: [&str; 14] = schema::names(schema::NULL);
/// Keys that are allowed only together with `comp_algorithm`.
const COMPRESSED_KEYS: [&str; 2] = ["algorithm_params", "mem_limit"];

const BLOCKSIZE_MIN_BYTES: u32 = 512;
const BLOCKSIZE_MAX_BYTES: u32 = 4096;
/// Default block size in bytes.
const BLOCKSIZE_BYTES: u32 = 4096;
/// Largest value of `completion_nsec`. Longer delays can be injected with `faults`.
const COMPLETION_NSEC_MAX: u64 = COMPLETION_MAX.as_nanos() as u64;
/// Smallest request limit in bytes: a page, as in the kernel.
const MAX_REQUEST_MIN_BYTES: u64 = 4096;
/// Largest request limit in bytes. Larger than any request that clients send, so a higher limit
/// would have no effect.
const MAX_REQUEST_MAX_BYTES: u64 = 1 << 30;

/// Parameters of the kernel's driver that are not supported, each with the reason or the
/// alternative.
const FOREIGN_KEYS: [(&str, &str); 27] = [
    ("gb", "write size with a unit: size=4G"),
    ("bs", "write blocksize"),
    ("nr_devices", "a device has a name; make several: n0=null,... n1=null,..."),
    ("queue_mode", "there is no block layer with queues here; requests come straight from their connections"),
    ("submit_queues", "there are no queues here: connections and threads are served side by side"),
    ("poll_queues", "there are no queues to poll: what can be answered at once is answered at once"),
    ("use_per_node_hctx", "there are no hardware queues here"),
    ("hw_queue_depth", "there are no tags here: a connection may have 256 requests in flight"),
    ("shared_tags", "there are no tags here that devices could share"),
    ("shared_tag_bitmap", "there are no tags here that queues could share"),
    ("no_sched", "there is no I/O scheduler here: requests start in the order in which they come"),
    ("home_node", "memory comes from the node of the thread that writes first; numactl binds the server"),
    (
        "irqmode",
        "there are no interrupts: requests are answered where they end, and with completion_nsec=N by a timer",
    ),
    ("blocking", "requests never sleep where they are submitted, with memory_backed=1 neither"),
    ("virt_boundary", "buffers of clients need no alignment here"),
    (
        "timeout",
        "use faults= for delayed and hanging requests, for example faults='all delay=5s chance=1%' or faults='all hang chance=1%'",
    ),
    (
        "timeout_inject",
        "use faults= for delayed and hanging requests, for example faults='all delay=5s chance=1%' or faults='all hang chance=1%'",
    ),
    (
        "requeue",
        "there is no queue to go back to; a request that takes longer is faults='all delay=1ms chance=1%'",
    ),
    (
        "requeue_inject",
        "there is no queue to go back to; a request that takes longer is faults='all delay=1ms chance=1%'",
    ),
    ("init_hctx", "there are no hardware queues whose setup could fail"),
    ("init_hctx_fault_inject", "there are no hardware queues whose setup could fail"),
    (
        "power",
        "a device is on from its creation on; cache_size or power_cut=yes, then freestone power-cut NAME",
    ),
    ("index", "a device has a name and no number"),
    ("features", "freestone get NAME lists what a device has"),
    ("use_lightnvm", "open-channel drives are gone from the kernel too; zoned=1 is what came after them"),
    ("lightnvm", "open-channel drives are gone from the kernel too; zoned=1 is what came after them"),
    ("g_submit_queues", "there are no queues here"),
];

/// Specification of a device of kind `null`.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "the kernel's switches, each with its name")]
pub struct NullSpec {
    /// Size of the device in bytes.
    pub size: u64,
    /// Size of a logical block in bytes.
    pub blocksize: u32,
    /// Place where the data is stored.
    pub backing: NullBacking,
    /// True if discards are supported.
    pub discard: bool,
    /// Size of the simulated volatile write cache in bytes, or `None` without a cache.
    pub cache_size: Option<u64>,
    /// True if FUA writes are supported.
    pub fua: bool,
    /// Maximum bandwidth in MiB per second; 0 means unlimited.
    pub mbps: u32,
    /// Minimum time between submission and completion of a request.
    pub completion: Duration,
    /// Changes of the list of bad blocks, such as `+8-15` in 512-byte sectors.
    pub badblocks: Vec<String>,
    /// True if a bad range becomes good after it has failed one request.
    pub badblocks_once: bool,
    /// True if a failing request transfers the data before its first bad sector.
    pub badblocks_partial_io: bool,
    /// Maximum size of a request in bytes; 0 means unlimited.
    pub max_request: u32,
    /// True if the device reports itself as rotational.
    pub rotational: bool,
    /// True if the device is read-only.
    pub readonly: bool,
}

/// Place where a null device stores data.
#[derive(Debug, Clone, PartialEq)]
pub enum NullBacking {
    /// Nowhere: writes are dropped, and reads return zeroes.
    Nothing,
    /// In memory, uncompressed.
    Memory,
    /// In memory, compressed by a family of RAM disks.
    Compressed(Box<FamilySpec>),
}

/// Refuses parameters of the kernel's driver that are not supported.
pub(super) fn check_supported(keys: &Keys) -> Result<(), SpecError> {
    let is_null = keys.0.kind == NAME;
    match FOREIGN_KEYS.iter().find(|(key, _)| is_null && keys.typed(key).is_some()) {
        Some((key, why)) => Err(keys.refuse(key, format!("is not for user space: {why}"))),
        None => Ok(()),
    }
}

impl NullSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        let blocksize = keys.take("blocksize", parse_blocksize)?.unwrap_or(BLOCKSIZE_BYTES);
        let size = keys.need("size", "size=4G", parse_null_size)?;
        if !size.is_multiple_of(u64::from(blocksize)) {
            let why = format!("must be a multiple of the blocksize, {blocksize} bytes");
            return Err(keys.refuse("size", why));
        }
        let yes = |key| Ok::<_, SpecError>(keys.take(key, parse_bool)?.unwrap_or(false));
        let stored = yes("memory_backed")?;
        if size == 0 && (stored || yes("zoned")?) {
            return Err(keys.refuse("size", "can be 0 only without memory_backed and without zones"));
        }
        let discard = yes("discard")?;
        if discard && !stored {
            return Err(
                keys.refuse("discard", "only with memory_backed=1: without memory there is nothing to free")
            );
        }
        if discard && yes("zoned")? {
            return Err(keys.refuse("discard", "a zoned device has none: its zones are reset"));
        }
        let cache_size = keys.take("cache_size", parse_cache)?.flatten();
        for key in ["power_cut", "record"] {
            let given = if key == "record" { keys.typed(key).is_some() } else { yes(key)? };
            if given && !stored {
                return Err(
                    keys.refuse(key, "only with memory_backed=1: without memory there is no data to lose")
                );
            }
        }
        if cache_size.is_some() && !stored {
            return Err(
                keys.refuse("cache_size", "only with memory_backed=1: there is nothing behind the cache")
            );
        }
        let fua = keys.take("fua", parse_bool)?.unwrap_or(true);
        let cached = cache_size.is_some() || yes("power_cut")? || keys.typed("record").is_some();
        if !fua && !cached {
            return Err(
                keys.refuse("fua", "only with cache_size: without a cache every write is durable as it is")
            );
        }
        let max_request = keys.take("max_sectors", parse_sectors)?.unwrap_or(0) * SECTOR_BYTES;
        let block = u64::from(blocksize);
        let possible = MAX_REQUEST_MIN_BYTES..=MAX_REQUEST_MAX_BYTES;
        if max_request != 0 && !(possible.contains(&max_request) && max_request.is_multiple_of(block)) {
            let (min, max) = (MAX_REQUEST_MIN_BYTES / SECTOR_BYTES, MAX_REQUEST_MAX_BYTES / SECTOR_BYTES);
            let why = format!(
                "must be 0 (no limit), or {min} to {max} and a multiple of the blocksize, {block} bytes"
            );
            return Err(keys.refuse("max_sectors", why));
        }
        Ok(Self {
            size,
            blocksize,
            backing: backing(keys, stored)?,
            discard,
            cache_size,
            fua,
            mbps: keys.take("mbps", parse_mbps)?.unwrap_or(0),
            completion: keys.take("completion_nsec", parse_completion)?.unwrap_or_default(),
            badblocks: keys.take("badblocks", parse_badblocks)?.unwrap_or_default(),
            badblocks_once: yes("badblocks_once")?,
            badblocks_partial_io: yes("badblocks_partial_io")?,
            max_request: u32::try_from(max_request).unwrap_or(0),
            rotational: yes("rotational")?,
            readonly: yes("readonly")?,
        })
    }
}

fn backing(keys: &Keys, stored: bool) -> Result<NullBacking, SpecError> {
    if keys.typed("comp_algorithm").is_some() {
        if !stored {
            return Err(keys.refuse("comp_algorithm", "only with memory_backed=1"));
        }
        return Ok(NullBacking::Compressed(Box::new(FamilySpec::take(keys)?)));
    }
    match COMPRESSED_KEYS.iter().find(|key| keys.typed(key).is_some()) {
        Some(key) => Err(keys.refuse(key, "only with memory_backed=1 and comp_algorithm")),
        None if stored => Ok(NullBacking::Memory),
        None => Ok(NullBacking::Nothing),
    }
}

/// Parses the size of a null device in bytes. Unlike other devices, a null device can have the size
/// 0.
fn parse_null_size(text: &str) -> Result<u64, String> {
    if text == "0" { Ok(0) } else { parse_length(text) }
}

fn parse_blocksize(text: &str) -> Result<u32, String> {
    // Block sizes are usually written in bytes, so a number without a unit is accepted.
    let bytes = text.parse().ok().or_else(|| size::parse(text).ok().and_then(|n| u32::try_from(n).ok()));
    bytes
        .filter(|n: &u32| n.is_power_of_two() && (BLOCKSIZE_MIN_BYTES..=BLOCKSIZE_MAX_BYTES).contains(n))
        .ok_or_else(|| format!("must be 512, 1024, 2048 or {BLOCKSIZE_MAX_BYTES} (bytes)"))
}

fn parse_mbps(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|mbps| *mbps <= MBPS_MAX);
    number.ok_or_else(|| format!("must be 0 (no limit) to {MBPS_MAX} (MiB per second)"))
}

fn parse_completion(text: &str) -> Result<Duration, String> {
    let number = text.parse().ok().filter(|nsec| *nsec <= COMPLETION_NSEC_MAX);
    number.map(Duration::from_nanos).ok_or_else(|| {
        format!("must be 0 to {COMPLETION_NSEC_MAX} (nanoseconds); longer is faults='all delay=120s'")
    })
}

// ---- setting up ---------------------------------------------------------------------------------

impl KindConfig for NullSpec {
    fn build(&self, spec: &Spec, registry: &Registry) -> Result<DataDevice, Refusal> {
        let (data, device) = data(spec, self, registry)?;
        Ok(DataDevice::standalone(data, device))
    }

    fn family(&self) -> Option<&FamilySpec> {
        match &self.backing {
            NullBacking::Compressed(family) => Some(family),
            NullBacking::Nothing | NullBacking::Memory => None,
        }
    }

    fn size(&self) -> Option<u64> {
        Some(self.size)
    }

    fn is_read_only(&self) -> bool {
        self.readonly
    }

    fn is_volatile(&self) -> bool {
        self.backing != NullBacking::Nothing
    }

    fn data_info(&self) -> DataInfo<'_> {
        DataInfo {
            file: None,
            drive: Some(Drive {
                stores: self.backing != NullBacking::Nothing,
                cache_size: self.cache_size,
                bad: BadBlocksConfig { once: self.badblocks_once, partial_io: self.badblocks_partial_io },
                badblocks: &self.badblocks,
                pace: PaceConfig { mbps: self.mbps, completion: self.completion },
            }),
        }
    }
}

/// Creates a null device without its layers.
fn data(
    device_spec: &Spec,
    spec: &NullSpec,
    registry: &Registry,
) -> Result<(NullData, Arc<dyn Device>), Refusal> {
    let config = null::Config {
        size: spec.size,
        logical_block: spec.blocksize,
        rotational: spec.rotational,
        read_only: spec.readonly,
        // The zone layer discards the data of zones that are reset, although it does not support
        // discards by clients.
        discard: spec.discard || device_spec.layers.zones.is_some(),
        max_request: spec.max_request,
    };
    let setup_refusal = |error| match error {
        null::SetupError::NoMemory => refusal!(ENOMEM, "{error}"),
        null::SetupError::MemoryFile(_) => refusal!(EIO, "{error}"),
        null::SetupError::Size { size, largest, .. } => {
            let (size, largest) = (exact(size), exact(largest));
            refusal!(EINVAL, "size={size}: with memory_backed=1 at most {largest}")
        }
        error => refusal!(EINVAL, "{error}"),
    };
    Ok(match &spec.backing {
        NullBacking::Nothing => (NullData::Nothing, Arc::new(Null::new(config).map_err(setup_refusal)?)),
        NullBacking::Memory => {
            let memory = Arc::new(Memory::new(config).map_err(setup_refusal)?);
            (NullData::Memory(Arc::clone(&memory)), memory)
        }
        NullBacking::Compressed(family) => {
            // Null devices do not support `backing_dev`, so there is none.
            let family = registry.new_family(&device_spec.name, family, spec.size, None, false)?;
            let ram = Arc::new(family.ram(spec.size).map_err(family::setup_refusal)?);
            let device = GeometryView::new(Arc::clone(&ram) as Arc<dyn Device>, |geometry| {
                geometry.logical_block = config.logical_block;
                geometry.max_request = config.max_request;
                geometry.rotational = config.rotational;
                geometry.read_only = config.read_only;
                if !config.discard {
                    geometry.discard_granularity = 0;
                }
            });
            (NullData::Compressed(ram), Arc::new(device))
        }
    })
}

/// Open null device without its layers.
pub enum NullData {
    /// Writes are dropped, and reads return zeroes.
    Nothing,
    /// Data is stored in memory, uncompressed: `memory_backed=1`.
    Memory(Arc<Memory>),
    /// Data is stored in memory, compressed: `memory_backed=1` with `comp_algorithm`.
    Compressed(Arc<Ram>),
}

impl KindInstance for NullData {
    fn name(&self) -> &'static str {
        NAME
    }

    fn own_family(&self) -> Option<Family> {
        match self {
            Self::Compressed(ram) => Some(ram.family()),
            Self::Nothing | Self::Memory(_) => None,
        }
    }

    fn check_base(&self, _: &Entry) -> Result<(), String> {
        Err("a null device cannot be a base".into())
    }

    fn can_wipe(&self) -> bool {
        true
    }

    fn wipe(&self, counters: bool) -> device::Result<()> {
        match self {
            Self::Nothing => Ok(()),
            Self::Memory(memory) => memory.reset(),
            Self::Compressed(ram) => super::memory::ram::wipe(ram, counters),
        }
    }

    fn skip_wipe(&self, counters: bool) -> bool {
        match self {
            Self::Nothing => true,
            Self::Memory(memory) => memory.is_untouched(),
            Self::Compressed(ram) => super::memory::ram::skip_wipe(ram, counters),
        }
    }

    fn attrs(&self) -> &'static [&'static str] {
        &NAMES
    }

    fn value(&self, entry: &Entry, attr: &str) -> Option<Value> {
        let KindSpec::Null(spec) = &entry.spec.kind else { return None };
        Some(match attr {
            "size" => json!(entry.size()),
            "blocksize" => json!(spec.blocksize),
            "memory_backed" => json!(u8::from(spec.backing != NullBacking::Nothing)),
            "discard" => json!(u8::from(spec.discard)),
            "cache_size" => json!(spec.cache_size.unwrap_or(0)),
            "fua" => json!(u8::from(spec.fua)),
            "mbps" => json!(spec.mbps),
            "completion_nsec" => json!(spec.completion.as_nanos() as u64),
            "badblocks" => json!(entry.layers.bad.as_ref().map(|bad| bad_ranges(bad)).unwrap_or_default()),
            "badblocks_once" => json!(u8::from(spec.badblocks_once)),
            "badblocks_partial_io" => json!(u8::from(spec.badblocks_partial_io)),
            "max_sectors" => json!(u64::from(spec.max_request) / SECTOR_BYTES),
            "rotational" => json!(u8::from(spec.rotational)),
            "readonly" => json!(u8::from(spec.readonly)),
            _ => return None,
        })
    }

    fn stat(&self) -> Option<(&'static str, Value)> {
        match self {
            Self::Nothing => None,
            Self::Memory(memory) => Some(("null_stat", json!({ "used_bytes": memory.used_bytes() }))),
            Self::Compressed(ram) => Some(("mm_stat", super::memory::ram::mm_stat(ram))),
        }
    }
}
