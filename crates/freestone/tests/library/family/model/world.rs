//! A family, the content that each of its devices must have, and the random steps.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::codec::Params;
use freestone::consistency_group;
use freestone::device::{Blocking, Device, Error, Flags};
use freestone::ram::{
    Config, Family, ForkConfig, IdleSelection, Ram, RecompressOptions, Secondary, SetupError, Writeback,
};
use freestone_testkit::{DeferringDevice, FaultyDisk, Model, Rng};

use super::expected::{ExpectedDevice, Pages};
use super::{HOT, PAGE, Setup};

/// Size of the base in bytes. The last page of the base is partial.
const BASE_BYTES: usize = 1031 * PAGE + 1536;
/// Size of a new disk in pages, and the size up to which devices grow.
const PAGES: u64 = 1032;
const PAGES_MAX: u64 = 1100;
/// Maximum number of devices, and of snapshots, that exist at the same time.
const DEVICES_MAX: usize = 5;
const SNAPSHOTS_MAX: usize = 8;

struct Live {
    shown: ExpectedDevice,
    /// Expected content after a rewind, and the number of pages of the device's base.
    base: Pages,
    below: u64,
    /// Numbers of the pages that the device itself stores. None if unknown, after a failed write.
    own: Option<BTreeSet<u64>>,
    /// Pages where a part that reads as zeroes below was zeroed again. Whether the device stores such a page depends
    /// on the granularity of the extents below.
    uncertain: BTreeSet<u64>,
    /// Depth of the device in the family: disks are at level 0, and forks of disks at level 1.
    level: u32,
}

struct Snapshot {
    shown: ExpectedDevice,
    level: u32,
}

pub(super) struct World {
    rng: Rng,
    family: Family,
    /// An empty disk that is only used to query the statistics of the family.
    probe: Ram,
    live: Vec<Live>,
    snapshots: Vec<Snapshot>,
    has_backing: bool,
    pub log: Vec<String>,
}

impl World {
    pub fn new(setup: Setup, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let secondary = Secondary { algorithm: "zstd".parse().unwrap(), params: Params::default() };
        let config = Config {
            mem_limit: setup.mem_limit,
            recomp_algorithms: [Some(secondary), None, None],
            ..Config::default()
        };
        let family = match setup.backing {
            None => Family::new(config).unwrap(),
            Some(packed) => {
                let disk = FaultyDisk::new(16 << 20, 4096).shuffled(seed);
                Family::new(config.backed_by(Arc::new(disk), packed)).unwrap()
            }
        };
        let probe = family.ram(PAGE as u64).unwrap();
        let mut world = Self {
            has_backing: setup.backing.is_some(),
            probe,
            live: Vec::new(),
            snapshots: Vec::new(),
            log: Vec::new(),
            family,
            rng: rng.clone(),
        };
        if setup.forks {
            let mut content = vec![0; BASE_BYTES];
            let mut base = Pages::new();
            for (first, pages) in HOT {
                for slot in first..first + pages {
                    let at = slot as usize * PAGE;
                    if at < BASE_BYTES {
                        let end = (at + PAGE).min(BASE_BYTES);
                        rng.content(&mut content[at..end]);
                        let mut page = [0; PAGE];
                        page[..end - at].copy_from_slice(&content[at..end]);
                        base.insert(slot, Arc::new(page));
                    }
                }
            }
            let mut device: Arc<dyn Device> = Arc::new(Model::read_only(content, 512));
            if let Some(policy) = setup.deferred {
                device = Arc::new(DeferringDevice::new(device, policy, seed));
            }
            for _ in 0..2 {
                let config = ForkConfig { size: Some(PAGES * PAGE as u64), ..ForkConfig::default() };
                let ram = world.family.fork(Arc::clone(&device), &config).unwrap();
                world.add(ram, base.clone(), PAGES, PAGES, 1);
            }
        } else {
            for _ in 0..2 {
                let ram = world.family.ram(PAGES * PAGE as u64).unwrap();
                world.add(ram, Pages::new(), PAGES, 0, 0);
            }
        }
        world
    }

    fn add(&mut self, ram: Ram, base: Pages, size: u64, below: u64, level: u32) {
        let shown = ExpectedDevice { ram, pages: base.clone(), size };
        let (own, uncertain) = (Some(BTreeSet::new()), BTreeSet::new());
        self.live.push(Live { shown, base, below, own, uncertain, level });
    }

    fn below(&mut self, bound: usize) -> usize {
        self.rng.below(bound as u64) as usize
    }

    /// Returns a range as offset and length in bytes, inside one of the used parts. In half of the cases the range
    /// consists of whole pages.
    fn range(&mut self, size: u64) -> (u64, u64) {
        loop {
            let at = self.below(HOT.len());
            let (first, pages) = HOT[at];
            let end = (first + pages).min(size) * PAGE as u64;
            let unit = if self.rng.chance(50) { PAGE as u64 } else { 512 };
            let first = first * PAGE as u64;
            if first < end {
                let offset = first + self.rng.below((end - first) / unit) * unit;
                let len = unit * (1 + self.rng.below(((end - offset) / unit).min(20)));
                return (offset, len);
            }
        }
    }

    /// Checks the result of a change. A change may fail only because of a memory limit.
    fn changed(&mut self, at: usize, outcome: Result<(), Error>, offset: u64, before: &ExpectedDevice) {
        match outcome {
            Ok(()) => {}
            Err(Error::NoSpace) => {
                self.live[at].shown.settle(offset, before);
                self.live[at].own = None;
            }
            Err(error) => panic!("a change was refused: {error}"),
        }
    }

    fn write(&mut self) {
        let at = self.below(self.live.len());
        let (offset, len) = self.range(self.live[at].shown.size);
        let mut data = vec![0; len as usize];
        for page in data.chunks_mut(PAGE) {
            self.rng.content(page);
            // Some pages are equal to others, so that they can share objects.
            if self.rng.chance(30) {
                Rng::new(self.rng.below(8)).content(page);
            }
        }
        self.log.push(format!("write {at} {offset}+{len}"));
        let before = self.live[at].shown.copy();
        let outcome = before.ram.write_at(offset, &data, Flags::empty());
        let live = &mut self.live[at];
        live.shown.patch(offset, &data);
        if let Some(own) = &mut live.own {
            own.extend(offset / PAGE as u64..(offset + len).div_ceil(PAGE as u64));
            live.uncertain.retain(|slot| !own.contains(slot));
        }
        self.changed(at, outcome, offset, &before);
    }

    fn zero(&mut self, exact: bool) {
        let at = self.below(self.live.len());
        let (offset, len) = self.range(self.live[at].shown.size);
        // Write zeroes without MAY_FREE stores the zeroes like data.
        let stays = exact && self.rng.chance(30);
        self.log.push(format!("zero {at} {offset}+{len} exact {exact} stays {stays}"));
        let before = self.live[at].shown.copy();
        let outcome = if exact {
            let flags = if stays { Flags::empty() } else { Flags::MAY_FREE };
            before.ram.write_zeroes(offset, len, flags)
        } else {
            before.ram.discard(offset, len)
        };
        let live = &mut self.live[at];
        let page = PAGE as u64;
        let (first, last) = (offset.div_ceil(page), (offset + len) / page);
        if let Some(own) = &mut live.own {
            for slot in offset / page..(offset + len).div_ceil(page) {
                let (from, to) = (offset.max(slot * page), (offset + len).min((slot + 1) * page));
                let part = (from - slot * page) as usize..(to - slot * page) as usize;
                let is_whole = (first..last).contains(&slot);
                // If the base has zeroes in this range, the device needs to store nothing.
                let is_bare = slot >= live.below
                    || live.base.get(&slot).is_none_or(|below| below[part].iter().all(|&byte| byte == 0));
                if stays || (is_whole || exact) && !is_bare {
                    own.insert(slot);
                    live.uncertain.remove(&slot);
                } else if is_whole {
                    own.remove(&slot);
                    live.uncertain.remove(&slot);
                } else if exact && slot < live.below && !own.contains(&slot) {
                    live.uncertain.insert(slot);
                }
            }
        }
        if exact {
            live.shown.patch(offset, &vec![0; len as usize]);
        } else if first < last {
            live.shown.patch(first * page, &vec![0; (last - first) as usize * PAGE]);
        }
        self.changed(at, outcome, offset, &before);
    }

    fn snapshot(&mut self) {
        if self.snapshots.len() + 2 > SNAPSHOTS_MAX {
            return;
        }
        let several = self.rng.chance(30);
        let origins: Vec<usize> =
            (0..if several { 2 } else { 1 }).map(|_| self.below(self.live.len())).collect();
        self.log.push(format!("snapshot {origins:?}"));
        let mut pending: Vec<_> =
            origins.iter().map(|&at| self.live[at].shown.ram.prepare_snapshot().unwrap()).collect();
        let mut all: Vec<&mut dyn consistency_group::GroupMember> =
            pending.iter_mut().map(|one| one as _).collect();
        consistency_group::take_snapshots(&mut all).unwrap();
        for (at, pending) in origins.into_iter().zip(pending) {
            let live = &self.live[at];
            let shown = ExpectedDevice { ram: pending.into_snapshot(), ..live.shown.copy() };
            assert!(shown.ram.is_snapshot());
            assert_eq!(shown.ram.write_at(0, &[0; 512], Flags::empty()), Err(Error::ReadOnly));
            self.snapshots.push(Snapshot { shown, level: live.level });
        }
    }

    fn fork(&mut self) {
        if self.snapshots.is_empty() || self.live.len() == DEVICES_MAX {
            return;
        }
        let at = self.below(self.snapshots.len());
        let Snapshot { shown, level } = &self.snapshots[at];
        if *level >= 2 {
            return;
        }
        let (below, level) = (shown.size, level + 1);
        let size = below + self.rng.clone().below(PAGES_MAX - below + 1);
        self.log.push(format!("fork {at} of {size} pages"));
        let config = ForkConfig { size: Some(size * PAGE as u64), ..ForkConfig::default() };
        let (ram, base) = (shown.ram.fork(&config).unwrap(), shown.pages.clone());
        self.add(ram, base, size, below, level);
    }

    fn back(&mut self) {
        let at = self.below(self.live.len());
        self.log.push(format!("rewind {at}"));
        let reset = self.rng.chance(30);
        let live = &mut self.live[at];
        let outcome = if reset { live.shown.ram.reset() } else { live.shown.ram.rewind() };
        outcome.unwrap();
        live.shown.pages = live.base.clone();
        live.own = Some(BTreeSet::new());
        live.uncertain.clear();
    }

    fn grow(&mut self) {
        let at = self.below(self.live.len());
        let live = &mut self.live[at];
        if live.shown.size + 8 <= PAGES_MAX {
            live.shown.size += 8;
            live.shown.ram.grow(live.shown.size * PAGE as u64).unwrap();
            self.log.push(format!("grow {at}"));
        }
    }

    fn remove(&mut self) {
        if self.rng.chance(70) && !self.snapshots.is_empty() {
            let at = self.below(self.snapshots.len());
            self.log.push(format!("remove snapshot {at}"));
            self.snapshots.remove(at);
        } else if self.live.len() > 1 {
            let at = self.below(self.live.len());
            self.log.push(format!("remove {at}"));
            let live = self.live.remove(at);
            if self.live.iter().all(|other| other.level > 0) && live.level == 0 {
                // At least one disk always remains, so that new forks and snapshots have an origin.
                let ram = self.family.ram(PAGES * PAGE as u64).unwrap();
                self.add(ram, Pages::new(), PAGES, 0, 0);
            }
        }
    }

    fn background(&mut self) {
        let at = self.below(self.live.len() + self.snapshots.len());
        let shown = match at.checked_sub(self.live.len()) {
            None => &self.live[at].shown,
            Some(at) => &self.snapshots[at].shown,
        };
        let ram = shown.ram.clone();
        match self.rng.below(4) {
            0 => {
                self.log.push("compact".into());
                ram.compact();
            }
            1 => {
                self.log.push(format!("recompress {at}"));
                let (group, dedup) =
                    [(false, false), (true, false), (false, true)][self.rng.below(3) as usize];
                match ram.recompress(&RecompressOptions { group, dedup, ..RecompressOptions::default() }) {
                    Ok(_) | Err((_, freestone::ram::RecompressError::NoSpace)) => {}
                    Err((_, error)) => panic!("recompress: {error}"),
                }
            }
            _ if self.has_backing => {
                self.log.push(format!("writeback {at}"));
                ram.mark_idle(IdleSelection::All);
                if let Err((_, error)) = ram.writeback(&Writeback::Idle) {
                    panic!("writeback: {error}");
                }
            }
            _ => {}
        }
    }

    fn limits(&mut self) {
        let at = self.below(self.live.len());
        // The limit is none, too small for the used parts, or large enough.
        let cap = [0, 64 << 10, 1 << 20][self.below(3)];
        let limit = self.family.mem_limit();
        let least = if limit > 0 && self.rng.chance(50) { limit / 16 } else { 0 };
        self.log.push(format!("limits {at}: {cap} {least}"));
        match self.live[at].shown.ram.set_own_limits(cap, least) {
            Ok(()) => assert_eq!(self.live[at].shown.ram.own_limits(), (cap, least)),
            Err(SetupError::GuaranteeAboveCap { .. }) => assert!(cap > 0 && least > cap),
            Err(error) => panic!("{error}"),
        }
    }

    pub fn step(&mut self) {
        match self.rng.below(100) {
            0..40 => self.write(),
            40..48 => self.zero(false),
            48..58 => self.zero(true),
            58..68 => self.snapshot(),
            68..74 => self.fork(),
            74..79 => self.back(),
            79..81 => self.grow(),
            81..89 => self.remove(),
            89..98 => self.background(),
            _ => self.limits(),
        }
    }

    pub fn check(&self) {
        for (at, live) in self.live.iter().enumerate() {
            live.shown.check(&format!("device {at}"));
            let (Some(own), true) = (&live.own, live.shown.ram.is_fork()) else { continue };
            let mut held = owned(&live.shown.ram, live.shown.size);
            held.retain(|slot| !live.uncertain.contains(slot));
            assert_eq!(&held, own, "what device {at} holds itself");
        }
        for (at, snapshot) in self.snapshots.iter().enumerate() {
            snapshot.shown.check(&format!("snapshot {at}"));
        }
    }

    /// Drops all devices and snapshots in random order. Afterwards the family must use no memory.
    pub fn end(mut self) {
        while !self.live.is_empty() || !self.snapshots.is_empty() {
            if self.rng.chance(50) && !self.live.is_empty() {
                let at = self.below(self.live.len());
                self.live.swap_remove(at);
            } else if !self.snapshots.is_empty() {
                let at = self.below(self.snapshots.len());
                self.snapshots.swap_remove(at);
            }
        }
        let began = Instant::now();
        loop {
            let (stat, memory) = (self.family.stat(), self.probe.memory_overhead());
            let backing = self.probe.backing().unwrap_or_default();
            let (groups, dedup) =
                (self.probe.group_stat().unwrap_or_default(), self.probe.dedup_stat().unwrap_or_default());
            let left = [
                stat.mem_used_total,
                stat.charged,
                stat.retiring,
                stat.guaranteed,
                stat.layers - 1,
                memory.leaves_bytes - groups.table_bytes - dedup.table_bytes,
                groups.bytes,
                dedup.pages,
                dedup.bytes,
                backing.used_bytes,
                backing.live_bytes,
                backing.spilled_pages,
            ];
            if left == [0; 12] {
                return;
            }
            assert!(
                began.elapsed() < Duration::from_secs(60),
                "left behind: {stat:?} {memory:?} {groups:?} {dedup:?} {backing:?}"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn owned(ram: &Ram, size: u64) -> BTreeSet<u64> {
    let changes = Device::changes(ram).unwrap();
    let mut own = BTreeSet::new();
    let (mut at, end) = (0, size * PAGE as u64);
    while at < end {
        let mut seen = at;
        at += changes
            .changes(at, end - at, &mut |change| {
                assert_eq!(change.offset, seen, "rows follow one another");
                seen += change.len;
                if change.own {
                    own.extend(change.offset / PAGE as u64..(change.offset + change.len) / PAGE as u64);
                }
                true
            })
            .unwrap();
        assert_eq!(at, seen);
    }
    own
}
