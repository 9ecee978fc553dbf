//! A fork is written, discarded, grown, rewound and frozen in any order. Each delta and each save
//! of the fork must show its moment, when it is read, applied to another fork, or restored.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use freestone::device::{Blocking as _, Device, Extent, ExtentKind, Flags, Op, Request};
use freestone::file::{self, File};
use freestone::qcow2::Format;
use freestone::qcow2::delta;
use freestone::ram::{Config, Family, ForkConfig, Ram};
use freestone::save::{self, Base, BaseCheck};
use freestone_testkit::{Model, Rng, effort, first_difference};
use proptest::prelude::*;

use super::tools::{Dir, content};

const SECTOR: u64 = 512;
/// Maximum size of a base, and maximum size of a fork beyond the end of its base, in sectors.
/// Together they exceed one leaf of the page map.
const BASE_MAX: u64 = 50 * 8;
const MORE_MAX: u64 = 600 * 8;
const MOMENTS_MAX: usize = 4;

#[derive(Debug, Clone, Copy)]
enum Step {
    Write(Place),
    Zero(Place),
    Discard(Place),
    Grow(u64),
    Snapshot,
    Forget(usize),
    Rewind,
    /// Saves a delta of the snapshot with this number.
    Delta(usize),
    /// Saves a delta of the fork's current content, while a range of the fork is discarded.
    DeltaOfFork(Place),
    Save,
}

#[derive(Debug, Clone, Copy)]
struct Place {
    behind_base: bool,
    /// Start of the range, in thousandths of the disk, or of the part beyond the end of the base.
    at: u64,
    /// Length in sectors.
    len: u64,
}

impl Place {
    fn bytes(self, base: u64, size: u64) -> (u64, u64) {
        let first = if self.behind_base && base < size { base / SECTOR } else { 0 };
        let sectors = size / SECTOR - first;
        let at = sectors * self.at / 1000;
        ((first + at) * SECTOR, self.len.min(sectors - at).max(1) * SECTOR)
    }
}

fn place() -> impl Strategy<Value = Place> {
    let len = prop_oneof![1_u64..30, Just(1), 100_u64..900, Just(u64::MAX)];
    (any::<bool>(), 0_u64..1000, len).prop_map(|(behind_base, at, len)| Place { behind_base, at, len })
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => place().prop_map(Step::Write),
        2 => place().prop_map(Step::Zero),
        4 => place().prop_map(Step::Discard),
        1 => (1_u64..40).prop_map(Step::Grow),
        3 => Just(Step::Snapshot),
        1 => (0..MOMENTS_MAX).prop_map(Step::Forget),
        1 => Just(Step::Rewind),
        2 => (0..MOMENTS_MAX).prop_map(Step::Delta),
        1 => place().prop_map(Step::DeltaOfFork),
        1 => Just(Step::Save),
    ]
}

struct World {
    dir: Dir,
    base: Vec<u8>,
    file: Arc<dyn Device>,
    fork: Ram,
    spills: bool,
    /// Expected current content of the fork.
    shown: Vec<u8>,
    moments: Vec<(Ram, Vec<u8>)>,
    rng: Rng,
}

impl World {
    fn new(base_sectors: u64, more_sectors: u64, seed: u64, spills: bool) -> Self {
        let dir = Dir::new();
        let base = content((base_sectors * SECTOR) as usize, seed);
        fs::write(dir.path("base.raw"), &base).unwrap();
        let mut config = file::Config::new(dir.path("base.raw"));
        config.read_only = true;
        let file: Arc<dyn Device> = Arc::new(File::open(&config).unwrap());
        let size = (more_sectors > 0).then_some((base_sectors + more_sectors) * SECTOR);
        let fork = fork(&file, size, spills);
        assert_eq!(fork.geometry().size, (base_sectors + more_sectors) * SECTOR);
        let mut shown = base.clone();
        shown.resize(fork.geometry().size as usize, 0);
        Self { dir, base, file, fork, spills, shown, moments: Vec::new(), rng: Rng::new(seed) }
    }

    fn place(&self, place: Place) -> (u64, u64) {
        place.bytes(self.base.len() as u64, self.shown.len() as u64)
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Write(place) => {
                let (at, len) = self.place(place);
                let data = content(len as usize, self.rng.word());
                self.fork.write_at(at, &data, Flags::empty()).unwrap();
                self.shown[at as usize..][..len as usize].copy_from_slice(&data);
            }
            Step::Zero(place) => {
                let (at, len) = self.place(place);
                self.fork.write_zeroes(at, len, Flags::MAY_FREE).unwrap();
                self.shown[at as usize..][..len as usize].fill(0);
            }
            Step::Discard(place) => {
                let (at, len) = self.place(place);
                discard(&self.fork, at, len, &mut self.shown);
            }
            Step::Grow(sectors) => {
                self.fork.grow(self.shown.len() as u64 + sectors * SECTOR).unwrap();
                self.shown.resize(self.shown.len() + (sectors * SECTOR) as usize, 0);
            }
            Step::Snapshot if self.moments.len() < MOMENTS_MAX => {
                self.moments.push((self.fork.snapshot().unwrap(), self.shown.clone()));
            }
            Step::Snapshot => {}
            Step::Forget(number) => {
                if number < self.moments.len() {
                    self.moments.remove(number);
                }
            }
            Step::Rewind => {
                self.fork.rewind().unwrap();
                self.shown.fill(0);
                self.shown[..self.base.len()].copy_from_slice(&self.base);
            }
            Step::Delta(number) => {
                if let Some((snapshot, shown)) = self.moments.get(number) {
                    let path = self.delta(snapshot, &mut || ());
                    self.check_delta(&path, shown);
                }
            }
            Step::DeltaOfFork(place) => {
                let snapshot = self.fork.snapshot().unwrap();
                let then = self.shown.clone();
                let (at, len) = self.place(place);
                let mut now = then.clone();
                // The fork changes when the delta is started, between its batches, and at its end.
                let path = self.delta(&snapshot, &mut || discard(&self.fork, at, len, &mut now));
                self.shown = now;
                self.check_delta(&path, &then);
            }
            Step::Save => self.save(),
        }
        self.check(&self.fork, &self.shown);
        for (snapshot, shown) in &self.moments {
            same(snapshot, shown, "a snapshot");
            self.check(&snapshot.over_base().unwrap(), shown);
        }
    }

    fn delta(&self, snapshot: &Ram, meanwhile: &mut dyn FnMut()) -> PathBuf {
        let to = self.dir.path("delta.qcow2");
        let snapshot = snapshot.over_base().unwrap();
        delta::save(&snapshot, &self.dir.path("base.raw"), Format::Raw, &to, &mut |_, _| meanwhile())
            .unwrap();
        to
    }

    fn check_delta(&self, path: &Path, shown: &[u8]) {
        same(&self.dir.open("delta.qcow2"), shown, "the overlay");
        let other = fork(&self.file, Some(shown.len() as u64), false);
        delta::apply(path, &other, Some(&self.dir.path("base.raw")), &mut |_, _| ()).unwrap();
        same(&other, shown, "another fork");
    }

    fn save(&self) {
        let names: Vec<String> = (0..self.moments.len()).map(|number| format!("s{number}")).collect();
        let mut devices: Vec<(&str, &Ram)> =
            names.iter().zip(&self.moments).map(|(name, (ram, _))| (name.as_str(), ram)).collect();
        devices.push(("fork", &self.fork));
        let to = self.dir.path("saved");
        save::save(&devices, &to, BaseCheck::Whole, &mut |_, _| ()).unwrap();
        let family = family(self.spills);
        let restored =
            save::restore(&to, &family, &[Base::Device(Arc::clone(&self.file))], &mut |_, _| ()).unwrap();
        let shown = |name: &str| match names.iter().position(|known| known == name) {
            Some(number) => &self.moments[number].1,
            None => &self.shown,
        };
        assert_eq!(restored.len(), devices.len());
        for (name, ram) in &restored {
            same(ram, shown(name), name);
        }
    }

    /// Checks the content, the extents and the reported changes of a device.
    fn check(&self, device: &dyn Device, shown: &[u8]) {
        same(device, shown, "a device");
        let size = shown.len() as u64;
        let mut at = 0;
        while at < size {
            let row = &mut |Extent { offset, len, kind }| {
                let range = offset as usize..(offset + len) as usize;
                assert!(kind == ExtentKind::Data || shown[range].iter().all(|&byte| byte == 0));
                true
            };
            at += device.extents(at, size - at, row).unwrap();
        }
        let base_at = |at: usize| self.base.get(at).copied().unwrap_or(0);
        let changes = device.changes().expect("it lies over something");
        let mut at = 0;
        while at < size {
            at += changes
                .changes(at, size - at, &mut |row| {
                    let range = row.offset as usize..(row.offset + row.len) as usize;
                    assert!(row.own || range.into_iter().all(|at| shown[at] == base_at(at)), "{row:?}");
                    true
                })
                .unwrap();
        }
    }
}

/// Returns a family (a base and its forks, which share memory). If `spills` is set, most of its
/// pages are evicted to a backing device.
fn family(spills: bool) -> Family {
    if !spills {
        return Family::new(Config::default()).unwrap();
    }
    let config = Config { mem_limit: 256 << 10, ..Config::default() };
    Family::new(config.backed_by(Arc::new(Model::new(64 << 20, 4096)), true)).unwrap()
}

fn fork(base: &Arc<dyn Device>, size: Option<u64>, spills: bool) -> Ram {
    family(spills).fork(Arc::clone(base), &ForkConfig { size, ..ForkConfig::default() }).unwrap()
}

/// Discards a range and updates the expected content. Whole pages become zeroes; parts of pages may
/// keep their content.
fn discard(fork: &Ram, at: u64, len: u64, shown: &mut [u8]) {
    fork.run(Request::new(Op::Discard, at, len)).unwrap();
    let mut now = vec![1; len as usize];
    fork.read_at(at, &mut now).unwrap();
    let before = &mut shown[at as usize..(at + len) as usize];
    assert!(now.iter().zip(&*before).all(|(now, before)| *now == 0 || now == before));
    before.copy_from_slice(&now);
}

#[track_caller]
fn same(device: &dyn Device, shown: &[u8], what: &str) {
    let mut all = vec![1; device.geometry().size as usize];
    device.read_at(0, &mut all).unwrap();
    assert_eq!(all.len(), shown.len(), "{what}");
    assert_eq!(first_difference(&all, shown), None, "{what}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var_os("PROPTEST_CASES").is_some() { ProptestConfig::default().cases } else { effort(5, 48) }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn deltas_and_saves_are_of_their_moment(
        base in prop_oneof![1..BASE_MAX, (1..BASE_MAX / 8).prop_map(|pages| pages * 8)],
        more in prop_oneof![Just(0), 1_u64..100, 1..MORE_MAX],
        seed in any::<u64>(),
        spills in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..25),
    ) {
        let mut world = World::new(base, more, seed, spills);
        for step in steps {
            world.step(step);
        }
    }
}
