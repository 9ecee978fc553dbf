//! Values of all metrics at one moment. The number of series is limited: forks are summed for each base, and
//! only the busiest have series of their own.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use freestone::device::{Account, Told as _};
use freestone::ram::BackingStat;
use freestone_nbd::Stats;
use freestone_spec::kinds::Entry;

use super::rates::{By, fork_of};
use crate::process;
use crate::service::Service;

/// Maximum number of devices with metrics of their own, forks excluded; the oldest come first.
const DEVICES_MAX: usize = 512;
/// Maximum number of bases with sums of their forks.
const BASES_MAX: usize = 512;
/// Maximum number of exports with metrics. Only devices and forks with metrics of their own count.
const EXPORTS_MAX: usize = 1024;

/// Values of all metrics.
#[derive(Debug)]
pub struct Scrape {
    pub resident_bytes: u64,
    /// Number of devices of each kind.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Devices beyond [`DEVICES_MAX`], forks excluded.
    pub left_out: u64,
    pub nbd: Stats,
    pub devices: Vec<DeviceValues>,
    pub bases: Vec<BaseValues>,
    pub forks: Vec<ForkValues>,
    pub families: Vec<FamilyValues>,
    pub exports: Vec<ExportValues>,
}

/// Values of a device that is not a fork.
#[derive(Debug)]
pub struct DeviceValues {
    pub name: String,
    pub kind: &'static str,
    pub account: Account,
    pub size: u64,
    /// Uncompressed bytes of the device's own pages, and memory charged for them.
    pub stored: Option<(u64, u64)>,
}

/// Sums of all forks of a base.
#[derive(Debug)]
pub struct BaseValues {
    pub base: String,
    pub forks: u64,
    pub account: Account,
}

/// Values of a fork.
#[derive(Debug)]
pub struct ForkValues {
    pub name: String,
    pub base: String,
    pub account: Account,
    /// Memory charged to the fork, in bytes.
    pub memory: u64,
    /// Limit of the fork's own memory, in bytes; 0: none.
    pub limit: u64,
}

/// Values of a family of RAM disks and forks that share one pool.
#[derive(Debug)]
pub struct FamilyValues {
    pub name: String,
    pub used: u64,
    pub limit: u64,
    pub backing: Option<BackingStat>,
}

/// Values of an export.
#[derive(Debug)]
pub struct ExportValues {
    pub device: String,
    pub address: String,
    pub account: Account,
    pub connections: usize,
}

/// Collects the values of all metrics, with at most `forks_max` single forks.
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
        let had_forks = forks > 0 || account != Account::default();
        had_forks.then(|| BaseValues { base: entry.name().to_owned(), forks, account })
    });
    let busiest = busiest(service, forks_max);
    Scrape {
        resident_bytes: process::process_memory().map_or(0, |memory| memory.rss_bytes),
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

/// Returns the forks with most requests between the last two samples.
fn busiest(service: &Service, most: usize) -> Vec<Arc<Entry>> {
    if most == 0 {
        return Vec::new();
    }
    let look = service.rates.look(&service.registry);
    let names = look.busiest(most, By::Requests, |device| device.fork_of.is_some());
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
    let family = entry.family_made().filter(|_| has_own)?;
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
        let ways = entry.ways();
        let all = service.exports.of(entry.name());
        all.into_iter().filter(|export| !export.template).map(move |export| {
            let mut account = Account::default();
            for way in ways.iter().filter(|way| way.place() == Some(&export.address)) {
                account.add(&way.told());
            }
            let (device, connections) = (entry.name().to_owned(), export.connections);
            ExportValues { device, address: export.address, account, connections }
        })
    });
    // A device may be listed twice at an address that is being changed.
    exports
        .filter(|export| known.insert((export.device.clone(), export.address.clone())))
        .take(EXPORTS_MAX)
        .collect()
}
