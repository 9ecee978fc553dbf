//! Overview for the web page: the server, sums of each family, and the selected devices.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use freestone::device::OpStats;
use freestone::file;
use freestone::ram::Ram;
use freestone_spec::family::family_stat;
use freestone_spec::kinds::Entry;
use serde::Serialize;
use serde_json::Value;

use super::api::{ApiError, Parameters};
use crate::devices::rates::{Device, Sample, SortKey, fork_of};
use crate::process_memory;
use crate::service::Service;
use crate::verbs::status::{list, top};

/// Maximum number of devices in a response.
const DEVICES_MAX: usize = 200;
/// Number of devices in a response if the request does not contain `count`.
const DEVICES: usize = 50;
/// Largest offset in the list of devices, above the number of devices that a server can have.
const FROM_MAX: usize = 1 << 20;
/// Maximum number of families in a response; the busiest are returned.
const FAMILIES_MAX: usize = 64;
/// Maximum number of missing devices in a response. Missing devices are recorded in the server's state but
/// could not be created.
const MISSING_MAX: usize = 100;

/// The overview, as the API returns it.
#[derive(Serialize)]
pub struct Overview {
    /// Length of the interval that the rates are averaged over, in seconds; 0 for the first sample.
    seconds: f64,
    server: Server,
    /// Sum of the rates of all devices, as in `top`.
    total: top::Row,
    families: Vec<Family>,
    /// Number of families omitted because of [`FAMILIES_MAX`].
    families_left_out: usize,
    /// Number of devices whose name begins with the requested prefix.
    found: usize,
    /// Number of these devices that precede the first one in `devices`.
    from: usize,
    devices: Vec<Row>,
    missing: Vec<list::Missing>,
    missing_left_out: usize,
}

#[derive(Serialize)]
struct Server {
    version: &'static str,
    pid: u32,
    uptime_seconds: u64,
    process_rss_bytes: u64,
    devices: usize,
    /// Number of forks, included in `devices`.
    forks: usize,
    connections: u64,
}

/// A family: devices that depend on one another, such as forks, snapshots and their base or origin.
#[derive(Default, Serialize)]
struct Family {
    name: String,
    kind: &'static str,
    /// Number of devices in the family, without templates.
    devices: usize,
    forks: usize,
    templates: usize,
    /// Sum of the request rates of the devices. The base is excluded, because its reads are reads of its forks.
    #[serde(skip_serializing_if = "Option::is_none")]
    rates: Option<top::Row>,
    /// Uncompressed size in bytes of the data in memory and on the backing device.
    orig_data_size: u64,
    /// Compressed size in bytes of the same data.
    compr_data_size: u64,
    same_pages: u64,
    /// Memory statistics of the family, as in `stat`; None if the family has no memory of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    memory: Option<Value>,
    #[serde(skip)]
    recent: OpStats,
    #[serde(skip)]
    used: u64,
}

/// A device with the values that `top` and `list` show.
#[derive(Serialize)]
struct Row {
    rates: top::Row,
    state: list::Row,
}

/// Order of the devices in a response.
#[derive(Clone, Copy)]
enum Order {
    Busy(SortKey),
    Name,
}

impl Order {
    fn parse(text: &str) -> Result<Self, ApiError> {
        Ok(match text {
            "requests" => Self::Busy(SortKey::Requests),
            "bytes" => Self::Busy(SortKey::Bytes),
            "latency" => Self::Busy(SortKey::Latency),
            "name" => Self::Name,
            _ => {
                return Err(ApiError::Invalid(format!(
                    "by={text}: must be requests, bytes, latency or name"
                )));
            }
        })
    }
}

/// Returns the overview with the devices that the query parameters select.
///
/// # Errors
/// A parameter is invalid.
pub fn overview(service: &Service, mut parameters: Parameters<'_>) -> Result<Overview, ApiError> {
    let count = parameters.number("count", (0, DEVICES_MAX), DEVICES)?;
    let from = parameters.number("from", (0, FROM_MAX), 0)?;
    let prefix = parameters.take("prefix").unwrap_or_default();
    let order = Order::parse(&parameters.take("by").unwrap_or_else(|| "requests".into()))?;
    parameters.end()?;
    file::check_now(list::LOOK_MAX);
    let sample = service.rates.sample(&service.registry);
    let seconds = sample.since.as_secs_f64();
    let entries = service.registry.all();
    let mut all = OpStats::default();
    for device in &sample.devices {
        all.add(&device.recent.counted);
    }
    let (families, families_left_out) = families(&entries, &sample);
    let chosen = chosen(&sample, order, &prefix);
    let found = chosen.len();
    let row = |device: &Device| {
        let entry = service.registry.find(&device.name)?;
        Some(Row { rates: top::Row::of(device, seconds), state: list::row(&entry, service) })
    };
    let mut missing: Vec<_> = list::missing(service).collect();
    let missing_left_out = missing.len().saturating_sub(MISSING_MAX);
    missing.truncate(MISSING_MAX);
    Ok(Overview {
        seconds,
        server: Server {
            version: env!("CARGO_PKG_VERSION"),
            pid: std::process::id(),
            uptime_seconds: service.started_at.elapsed().as_secs(),
            process_rss_bytes: process_memory::process_memory().map_or(0, |memory| memory.rss_bytes),
            devices: sample.devices.len(),
            forks: sample.devices.iter().filter(|device| device.fork_of.is_some()).count(),
            connections: service.exports.nbd.stats().connections,
        },
        total: top::Row::new(&all, seconds),
        families,
        families_left_out,
        found,
        from,
        devices: chosen.into_iter().skip(from).take(count).filter_map(row).collect(),
        missing,
        missing_left_out,
    })
}

/// Returns the devices whose name begins with `prefix`, in the requested order.
fn chosen<'a>(sample: &'a Sample, order: Order, prefix: &str) -> Vec<&'a Device> {
    let begins = |device: &Device| device.name.starts_with(prefix);
    match order {
        Order::Busy(by) => sample.busiest(usize::MAX, by, begins),
        Order::Name => {
            let mut found: Vec<_> = sample.devices.iter().filter(|device| begins(device)).collect();
            found.sort_by(|a, b| a.name.cmp(&b.name));
            found
        }
    }
}

/// Returns, for each device, the index of its root in `entries`. The root is the device that all others of
/// its family depend on, directly or indirectly.
fn roots(entries: &[Arc<Entry>]) -> Vec<usize> {
    let places: HashMap<_, _> =
        entries.iter().enumerate().map(|(index, entry)| (entry.name(), index)).collect();
    // In the registry, a device comes after the devices that it depends on.
    let mut roots = Vec::with_capacity(entries.len());
    for (index, entry) in entries.iter().enumerate() {
        let below =
            entry.spec.kind.parent_name().and_then(|below| places.get(below)).filter(|below| **below < index);
        roots.push(below.map_or(index, |below| roots[*below]));
    }
    roots
}

/// Returns the busiest families that have more than one device or memory of their own, and the number of
/// families omitted.
fn families(entries: &[Arc<Entry>], sample: &Sample) -> (Vec<Family>, usize) {
    let mut of_root = HashMap::<usize, Family>::new();
    for (entry, root) in entries.iter().zip(roots(entries)) {
        let family = of_root.entry(root).or_default();
        family.add(entry, sample);
        let has_own = entry.kind.own_family().is_some() || entry.is_outer_base();
        if let Some(made) = entry.existing_family().filter(|_| has_own) {
            family.used += made.stat().mem_used_total;
            family.memory = Some(family_stat(&made));
        }
    }
    let mut found: Vec<_> = of_root
        .into_iter()
        .filter(|(_, family)| family.memory.is_some() || family.devices + family.templates > 1)
        .collect();
    found.sort_by_key(|(root, family)| {
        (Reverse(family.recent.completed_requests()), Reverse(family.used), *root)
    });
    let left_out = found.len().saturating_sub(FAMILIES_MAX);
    found.truncate(FAMILIES_MAX);
    let seconds = sample.since.as_secs_f64();
    let shown = found.into_iter().map(|(root, mut family)| {
        entries[root].name().clone_into(&mut family.name);
        family.kind = entries[root].kind.name();
        family.rates = Some(top::Row::new(&family.recent, seconds));
        family
    });
    (shown.collect(), left_out)
}

impl Family {
    fn add(&mut self, entry: &Entry, sample: &Sample) {
        if entry.device().is_none() {
            self.templates += 1;
            return;
        }
        self.devices += 1;
        self.forks += usize::from(fork_of(entry).is_some());
        if let Some(device) = sample.of(entry).filter(|_| !entry.is_outer_base()) {
            self.recent.add(&device.recent.counted);
        }
        if let Some(stat) = entry.ram_data().map(Ram::mm_stat) {
            self.orig_data_size += stat.orig_data_size;
            self.compr_data_size += stat.compr_data_size;
            self.same_pages += stat.same_pages;
        }
    }
}
