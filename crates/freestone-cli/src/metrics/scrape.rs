//! The numbers of one moment, as many as are told: what is many is told in sums.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

use freestone::device::{Account, Told as _};
use freestone_nbd::Stats;
use freestone_spec::kinds::Entry;

use super::rates::{By, fork_of};
use crate::process;
use crate::service::Service;

/// Devices that are no forks and are told one by one: the first ones that were made.
const DEVICES_MAX: usize = 512;
/// Bases whose forks are told in sums.
const BASES_MAX: usize = 512;
/// Exports that are told: of the devices and forks that are.
const EXPORTS_MAX: usize = 1024;

/// What is told.
#[derive(Debug)]
pub struct Scrape {
    pub resident_bytes: u64,
    /// How many devices there are of each kind.
    pub kinds: BTreeMap<&'static str, u64>,
    /// Devices that are no forks, beyond [`DEVICES_MAX`].
    pub left_out: u64,
    pub nbd: Stats,
    pub devices: Vec<OfDevice>,
    pub bases: Vec<OfBase>,
    pub forks: Vec<OfFork>,
    pub families: Vec<OfFamily>,
    pub exports: Vec<OfExport>,
}

/// A device that is no fork.
#[derive(Debug)]
pub struct OfDevice {
    pub name: String,
    pub kind: &'static str,
    pub account: Account,
    pub size: u64,
    /// What it stores, and the memory of that.
    pub stored: Option<(u64, u64)>,
}

/// All forks of a base.
#[derive(Debug)]
pub struct OfBase {
    pub base: String,
    pub forks: u64,
    pub account: Account,
}

/// A fork.
#[derive(Debug)]
pub struct OfFork {
    pub name: String,
    pub base: String,
    pub account: Account,
}

/// Memory that devices have together.
#[derive(Debug)]
pub struct OfFamily {
    pub name: String,
    pub used: u64,
    pub limit: u64,
}

/// An export of a device or fork that is told.
#[derive(Debug)]
pub struct OfExport {
    pub device: String,
    pub address: String,
    pub account: Account,
    pub connections: usize,
}

/// Looks at everything.
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
    let is_told = |entry: &&Arc<Entry>| fork_of(entry).is_none() && entry.device().is_some();
    let devices: Vec<_> = all.iter().filter(is_told).collect();
    let told = &devices[..devices.len().min(DEVICES_MAX)];
    let bases = devices.iter().filter_map(|entry| {
        let account = entry.forks_account();
        let forks = forks_of.get(entry.name()).copied().unwrap_or_default();
        let has_had = forks > 0 || account != Account::default();
        has_had.then(|| OfBase { base: entry.name().to_owned(), forks, account })
    });
    let busiest = busiest(service, forks_max);
    Scrape {
        resident_bytes: process::process_memory().map_or(0, |memory| memory.rss_bytes),
        kinds,
        left_out: (devices.len() - told.len()) as u64,
        nbd: service.exports.nbd.stats(),
        bases: bases.take(BASES_MAX).collect(),
        families: told.iter().filter_map(|entry| family(entry)).collect(),
        exports: exports(service, told.iter().copied().chain(&busiest)),
        devices: told.iter().map(|entry| device(entry)).collect(),
        forks: busiest.iter().filter_map(fork).collect(),
    }
}

/// The forks that did most lately.
fn busiest(service: &Service, most: usize) -> Vec<Arc<Entry>> {
    if most == 0 {
        return Vec::new();
    }
    let look = service.rates.look(&service.registry);
    let names = look.busiest(most, By::Requests, |device| device.fork_of.is_some());
    names.iter().filter_map(|device| service.registry.find(&device.name)).collect()
}

fn device(entry: &Entry) -> OfDevice {
    let stored = entry.kind.ram().map(|ram| {
        let stat = ram.over_stat();
        (stat.own_bytes, stat.charged)
    });
    OfDevice {
        name: entry.name().to_owned(),
        kind: entry.kind.name(),
        account: entry.account().unwrap_or_default(),
        size: entry.size(),
        stored,
    }
}

fn fork(entry: &Arc<Entry>) -> Option<OfFork> {
    let base = fork_of(entry)?.to_owned();
    Some(OfFork { name: entry.name().to_owned(), base, account: entry.account()? })
}

fn family(entry: &Entry) -> Option<OfFamily> {
    let has_own = entry.kind.own_family().is_some() || entry.is_outer_base();
    let stat = entry.family_made().filter(|_| has_own)?.stat();
    Some(OfFamily { name: entry.name().to_owned(), used: stat.mem_used_total, limit: stat.mem_limit })
}

fn exports<'a>(service: &Service, of: impl Iterator<Item = &'a Arc<Entry>>) -> Vec<OfExport> {
    let mut known = HashSet::new();
    let told = of.flat_map(|entry| {
        let ways = entry.ways();
        let all = service.exports.of(entry.name());
        all.into_iter().filter(|export| !export.template).map(move |export| {
            let mut account = Account::default();
            for way in ways.iter().filter(|way| way.place() == Some(&export.address)) {
                account.add(&way.told());
            }
            let (device, connections) = (entry.name().to_owned(), export.connections);
            OfExport { device, address: export.address, account, connections }
        })
    });
    // One device may be shown twice at a place that is being changed.
    told.filter(|export| known.insert((export.device.clone(), export.address.clone())))
        .take(EXPORTS_MAX)
        .collect()
}
