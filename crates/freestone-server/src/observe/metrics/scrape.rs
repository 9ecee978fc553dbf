//! Collection of the values of all metrics at one moment. The number of time series is limited: forks are
//! summed for each base, and only the busiest forks have series of their own.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use freestone::device::{IoStats, StatSource as _};
use freestone::ram::BackingStat;
use freestone_nbd::Stats;
use freestone_spec::kinds::Entry;

use crate::devices::rates::{SortKey, fork_of};
use crate::process_memory;
use crate::service::Service;

/// Maximum number of devices with metrics of their own, forks excluded. If there are more, the oldest are
/// listed.
const DEVICES_MAX: usize = 512;
/// Maximum number of bases with metrics that sum their forks.
const BASES_MAX: usize = 512;
/// Maximum number of exports with metrics. Only exports of devices and forks with metrics of their own are
/// listed.
const EXPORTS_MAX: usize = 1024;

/// Values of all metrics at one moment.
#[derive(Debug)]
pub struct Scrape {
    pub resident_bytes: u64,
    /// Number of devices by kind.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Number of devices omitted because of [`DEVICES_MAX`], forks excluded.
    pub left_out: u64,
    pub nbd: Stats,
    pub devices: Vec<DeviceValues>,
    pub bases: Vec<BaseValues>,
    pub forks: Vec<ForkValues>,
    pub families: Vec<FamilyValues>,
    pub exports: Vec<ExportValues>,
}

/// Metric values of a device that is not a fork.
#[derive(Debug)]
pub struct DeviceValues {
    pub name: String,
    pub kind: &'static str,
    pub account: IoStats,
    pub size: u64,
    /// For a RAM disk or a snapshot in memory: uncompressed bytes of the device's own pages, and bytes of
    /// memory charged for these pages.
    pub stored: Option<(u64, u64)>,
}

/// Metric values of a base: the sums of all its forks.
#[derive(Debug)]
pub struct BaseValues {
    pub base: String,
    pub forks: u64,
    pub account: IoStats,
}

/// Metric values of a fork.
#[derive(Debug)]
pub struct ForkValues {
    pub name: String,
    pub base: String,
    pub account: IoStats,
    /// Memory charged to the fork, in bytes.
    pub memory: u64,
    /// Memory limit of the fork itself, in bytes; 0 for no limit.
    pub limit: u64,
}

/// Metric values of a family (RAM disks and forks that share one memory pool).
#[derive(Debug)]
pub struct FamilyValues {
    pub name: String,
    pub used: u64,
    pub limit: u64,
    pub backing: Option<BackingStat>,
}

/// Metric values of an export.
#[derive(Debug)]
pub struct ExportValues {
    pub device: String,
    pub address: String,
    pub account: IoStats,
    pub connections: usize,
}

/// Collects the values of all metrics. At most `forks_max` forks have values of their own.
pub fn scrape(service: &Service, forks_max: usize) -> Scrape {
    let all = service.registry.all();
    let mut kinds = BTreeMap::new();
    let mut forks_of = BTreeMap::<&str, u64>::new();
    for entry in &all {
        *kinds.entry(entry.kind.name()).or_default() += 1;
        if let Some(base) = fork_of(entry) {
            *forks_of.entry(base).or_default() += 1;
        }
    }
    let is_listed = |entry: &&Arc<Entry>| fork_of(entry).is_none() && entry.device().is_some();
    let devices: Vec<_> = all.iter().filter(is_listed).collect();
    let listed = &devices[..devices.len().min(DEVICES_MAX)];
    let bases = devices.iter().filter_map(|entry| {
        let account = entry.forks_account();
        let forks = forks_of.get(entry.name()).copied().unwrap_or_default();
        let had_forks = forks > 0 || account != IoStats::default();
        had_forks.then(|| BaseValues { base: entry.name().to_owned(), forks, account })
    });
    let busiest = busiest(service, forks_max);
    Scrape {
        resident_bytes: process_memory::process_memory().map_or(0, |memory| memory.rss_bytes),
        kinds,
        left_out: (devices.len() - listed.len()) as u64,
        nbd: service.exports.nbd.stats(),
        bases: bases.take(BASES_MAX).collect(),
        families: listed.iter().filter_map(|entry| family(entry)).collect(),
        exports: exports(service, listed.iter().copied().chain(&busiest)),
        devices: listed.iter().map(|entry| device(entry)).collect(),
        forks: busiest.iter().filter_map(fork).collect(),
    }
}

/// Returns at most `most` forks: those with the most requests between the last two samples.
fn busiest(service: &Service, most: usize) -> Vec<Arc<Entry>> {
    if most == 0 {
        return Vec::new();
    }
    let sample = service.rates.sample(&service.registry);
    let names = sample.busiest(most, SortKey::Requests, |device| device.fork_of.is_some());
    names.iter().filter_map(|device| service.registry.find(&device.name)).collect()
}

fn device(entry: &Entry) -> DeviceValues {
    let stored = entry.kind.ram().map(|ram| {
        let stat = ram.over_stat();
        (stat.own_bytes, stat.charged)
    });
    DeviceValues {
        name: entry.name().to_owned(),
        kind: entry.kind.name(),
        account: entry.account().unwrap_or_default(),
        size: entry.size(),
        stored,
    }
}

fn fork(entry: &Arc<Entry>) -> Option<ForkValues> {
    let base = fork_of(entry)?.to_owned();
    let stat = entry.kind.ram().map(|ram| ram.over_stat()).unwrap_or_default();
    let (memory, limit) = (stat.charged, stat.mem_limit);
    Some(ForkValues { name: entry.name().to_owned(), base, account: entry.account()?, memory, limit })
}

fn family(entry: &Entry) -> Option<FamilyValues> {
    let has_own = entry.kind.own_family().is_some() || entry.is_outer_base();
    let family = entry.existing_family().filter(|_| has_own)?;
    let (stat, backing) = (family.stat(), family.backing());
    Some(FamilyValues {
        name: entry.name().to_owned(),
        used: stat.mem_used_total,
        limit: stat.mem_limit,
        backing,
    })
}

fn exports<'a>(service: &Service, of: impl Iterator<Item = &'a Arc<Entry>>) -> Vec<ExportValues> {
    let mut known = HashSet::new();
    let exports = of.flat_map(|entry| {
        let tallies = entry.access_path_tallies();
        let all = service.exports.of(entry.name());
        all.into_iter().filter(|export| !export.template).map(move |export| {
            let mut account = IoStats::default();
            for tally in tallies.iter().filter(|tally| tally.address() == Some(&export.address)) {
                account.add(&tally.stats());
            }
            let (device, connections) = (entry.name().to_owned(), export.connections);
            ExportValues { device, address: export.address, account, connections }
        })
    });
    // A device may have two exports with the same address while that address is being changed.
    exports
        .filter(|export| known.insert((export.device.clone(), export.address.clone())))
        .take(EXPORTS_MAX)
        .collect()
}
