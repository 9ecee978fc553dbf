//! The keys of a null device: those of the kernel's `null_blk`, and why some of them mean nothing here.

use std::time::Duration;

use freestone::null::{COMPLETION_MAX, MBPS_MAX};

use super::layers::{FAULT_KEYS, SECTOR_BYTES, ZONE_KEYS, parse_cache, parse_sectors};
use super::{FamilySpec, Keys, joined, parse_blocksize, parse_bool, parse_length};
use crate::entries::SpecError;

/// Keys that are attributes of every null device.
pub const NULL_KEYS: [&str; 14] = [
    "size",
    "blocksize",
    "memory_backed",
    "discard",
    "cache_size",
    "fua",
    "mbps",
    "completion_nsec",
    "badblocks",
    "badblocks_once",
    "badblocks_partial_io",
    "max_sectors",
    "rotational",
    "readonly",
];
const OWN_KEYS: [&str; 16] = joined(&NULL_KEYS, &["comp_algorithm", "algorithm_params"], &[]);
const OTHER_KEYS: [&str; 17] =
    joined(&["mem_limit"], &ZONE_KEYS, &["faults", "seed", "power_cut", "record", "publish"]);
const KEYS: [&str; 33] = joined(&OWN_KEYS, &OTHER_KEYS, &[]);
const _: () = assert!(FAULT_KEYS.len() == 4, "they are all in the list above");
/// Keys of compressed memory.
const COMPRESSED_KEYS: [&str; 2] = ["algorithm_params", "mem_limit"];

const BLOCKSIZE_BYTES: u32 = 4096;
/// Longest time to an answer: longer ones are what `faults` is for.
const COMPLETION_NSEC_MAX: u64 = COMPLETION_MAX.as_nanos() as u64;
/// Smallest `max_sectors`, as in the kernel: a page.
const MAX_REQUEST_MIN_BYTES: u64 = 4096;
/// Largest: more than any client sends.
const MAX_REQUEST_MAX_BYTES: u64 = 1 << 30;

/// The kernel's other parameters, and what to do instead.
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
        "requests that are answered late or never are faults='all delay=5s chance=1%' or faults='all hang chance=1%'",
    ),
    (
        "timeout_inject",
        "requests that are answered late or never are faults='all delay=5s chance=1%' or faults='all hang chance=1%'",
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

/// A null device as it was asked for.
#[derive(Debug, Clone, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "the kernel's switches, each with its name")]
pub struct NullSpec {
    /// Bytes.
    pub size: u64,
    /// Logical block in bytes.
    pub blocksize: u32,
    /// Where data is kept.
    pub backing: NullBacking,
    /// Discards are offered.
    pub discard: bool,
    /// Bytes of the volatile write cache.
    pub cache_size: Option<u64>,
    /// FUA is offered.
    pub fua: bool,
    /// MiB a second; 0 is no limit.
    pub mbps: u32,
    /// Time to an answer.
    pub completion: Duration,
    /// Changes of the list of bad blocks, `+8-15`.
    pub badblocks: Vec<String>,
    /// A range is good again after it failed one request.
    pub badblocks_once: bool,
    /// What lies before the first bad sector is transferred.
    pub badblocks_partial_io: bool,
    /// Largest request in bytes; 0 is no limit.
    pub max_request: u32,
    /// Clients are told that the disk turns.
    pub rotational: bool,
    /// Only reads are served.
    pub readonly: bool,
}

/// Where a null device keeps data.
#[derive(Debug, Clone, PartialEq)]
pub enum NullBacking {
    /// Nowhere.
    Nothing,
    /// In memory.
    Memory,
    /// In memory, compressed.
    Compressed(Box<FamilySpec>),
}

impl NullSpec {
    pub(super) fn take(keys: &Keys) -> Result<Self, SpecError> {
        if let Some((key, why)) = FOREIGN_KEYS.iter().find(|(key, _)| keys.typed(key).is_some()) {
            return Err(keys.refuse(key, format!("is not for user space: {why}")));
        }
        keys.allow(&KEYS)?;
        let blocksize = keys.take("blocksize", parse_blocksize)?.unwrap_or(BLOCKSIZE_BYTES);
        let size = keys.need("null", "size", "size=4G", parse_length)?;
        if !size.is_multiple_of(u64::from(blocksize)) {
            let why = format!("must be a multiple of the blocksize, {blocksize} bytes");
            return Err(keys.refuse("size", why));
        }
        let yes = |key| Ok::<_, SpecError>(keys.take(key, parse_bool)?.unwrap_or(false));
        let kept = yes("memory_backed")?;
        let discard = yes("discard")?;
        if discard && !kept {
            return Err(
                keys.refuse("discard", "only with memory_backed=1: without memory there is nothing to free")
            );
        }
        if discard && yes("zoned")? {
            return Err(keys.refuse("discard", "a zoned device has none: its zones are reset"));
        }
        let cache_size = keys.take("cache_size", parse_cache)?.flatten();
        for key in ["power_cut", "record"] {
            let said = if key == "record" { keys.typed(key).is_some() } else { yes(key)? };
            if said && !kept {
                return Err(
                    keys.refuse(key, "only with memory_backed=1: what keeps nothing has nothing to lose")
                );
            }
        }
        if cache_size.is_some() && !kept {
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
            backing: backing(keys, kept)?,
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

fn backing(keys: &Keys, kept: bool) -> Result<NullBacking, SpecError> {
    if keys.typed("comp_algorithm").is_some() {
        if !kept {
            return Err(keys.refuse("comp_algorithm", "only with memory_backed=1"));
        }
        return Ok(NullBacking::Compressed(Box::new(FamilySpec::take(keys)?)));
    }
    match COMPRESSED_KEYS.iter().find(|key| keys.typed(key).is_some()) {
        Some(key) => Err(keys.refuse(key, "only with memory_backed=1 and comp_algorithm")),
        None if kept => Ok(NullBacking::Memory),
        None => Ok(NullBacking::Nothing),
    }
}

fn parse_mbps(text: &str) -> Result<u32, String> {
    let number = text.parse().ok().filter(|mbps| *mbps <= MBPS_MAX);
    number.ok_or_else(|| format!("must be 0 (no limit) to {MBPS_MAX} (MiB a second)"))
}

fn parse_completion(text: &str) -> Result<Duration, String> {
    let number = text.parse().ok().filter(|nsec| *nsec <= COMPLETION_NSEC_MAX);
    number.map(Duration::from_nanos).ok_or_else(|| {
        format!("must be 0 to {COMPLETION_NSEC_MAX} (nanoseconds); longer is faults='all delay=120s'")
    })
}

/// `+8-15` and `-8-15`, with `;` or blanks between several.
pub fn parse_badblocks(text: &str) -> Result<Vec<String>, String> {
    let words = text.split([';', ' ']).filter(|word| !word.is_empty()).map(str::to_owned);
    let words: Vec<_> = words.collect();
    let good = |word: &String| {
        let range = word.strip_prefix(['+', '-']).and_then(|range| range.split_once('-'));
        let sectors = range.and_then(|(a, b)| Some((a.parse::<u64>().ok()?, b.parse::<u64>().ok()?)));
        sectors.is_some_and(|(a, b)| a <= b)
    };
    if words.is_empty() || !words.iter().all(good) {
        return Err(format!(
            "must be +FIRST-LAST (bad) or -FIRST-LAST (good again) in {SECTOR_BYTES}-byte sectors, as in +8-15, with ; \
             between several"
        ));
    }
    Ok(words)
}
