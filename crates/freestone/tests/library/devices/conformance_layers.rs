//! Conformance of every combination of bases, forks and snapshots two levels deep, with and without
//! a backing device for evicted pages.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use freestone::device::{Blocking, Device, Flags};
use freestone::file::{self, File};
use freestone::ram::{Config, Family, ForkConfig, Ram};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng, effort};

const MIB: u64 = 1 << 20;
/// Size of a base in bytes, which ends inside a page.
const BASE_BYTES: usize = (2 << 20) + 1536;

#[derive(Debug, Clone, Copy)]
enum Base {
    Disk,
    File,
    DeferredFile,
    Snapshot,
    SnapshotOfFork,
}

const BASES: [Base; 5] = [Base::Disk, Base::File, Base::DeferredFile, Base::Snapshot, Base::SnapshotOfFork];

#[derive(Debug, Clone, Copy)]
enum Memory {
    Ample,
    /// A memory limit below the size of the data, so that pages are evicted all the time.
    Scarce {
        packed: bool,
    },
}

const MEMORIES: [Memory; 3] =
    [Memory::Ample, Memory::Scarce { packed: true }, Memory::Scarce { packed: false }];

fn family(memory: Memory) -> Family {
    match memory {
        Memory::Ample => Family::new(Config::default()).unwrap(),
        Memory::Scarce { packed } => {
            let config = Config { mem_limit: MIB, ..Config::default() };
            Family::new(config.backed_by(Arc::new(Model::new(64 << 20, 4096)), packed)).unwrap()
        }
    }
}

fn filled_file() -> Arc<dyn Device> {
    let file = tempfile::NamedTempFile::new().unwrap();
    let mut content = vec![0; BASE_BYTES];
    Rng::new(1).fill(&mut content[..BASE_BYTES / 2]);
    std::fs::write(file.path(), &content).unwrap();
    let mut config = file::Config::new(file.path());
    config.read_only = true;
    Arc::new(File::open(&config).unwrap())
}

fn fill(device: &Ram, seed: u64) {
    let mut rng = Rng::new(seed);
    let mut page = [0; 4096];
    for _ in 0..200 {
        rng.fill(&mut page[..2048]);
        let slot = rng.below(device.geometry().size / 4096);
        device.write_at(slot * 4096, &page, Flags::empty()).unwrap();
    }
}

fn fork_config() -> ForkConfig {
    ForkConfig { size: Some(3 * MIB), ..ForkConfig::default() }
}

/// Returns a writable device over a base of this kind. Depending on the base, the size is a whole
/// number of pages or not.
fn live(base: Base, family: &Family) -> Ram {
    match base {
        Base::Disk => family.ram(3 * MIB).unwrap(),
        Base::File => family.fork(filled_file(), &fork_config()).unwrap(),
        Base::DeferredFile => {
            let deferred = Arc::new(DeferringDevice::new(filled_file(), DeferPolicy::Sometimes(50), 3));
            // The fork has the size of its base, so it also ends inside a page.
            family.fork(deferred, &ForkConfig::default()).unwrap()
        }
        Base::Snapshot => {
            let disk = family.ram(2 * MIB).unwrap();
            fill(&disk, 5);
            let snapshot = disk.snapshot().unwrap();
            fill(&disk, 6);
            snapshot.fork(&fork_config()).unwrap()
        }
        Base::SnapshotOfFork => {
            let fork = family.fork(filled_file(), &ForkConfig::default()).unwrap();
            fill(&fork, 7);
            let snapshot = fork.snapshot().unwrap();
            fill(&fork, 8);
            snapshot.fork(&fork_config()).unwrap()
        }
    }
}

fn options() -> Options {
    Options {
        rounds: effort(15, 40),
        window: MIB,
        max_io: 256 << 10,
        threads: 3,
        thread_rounds: effort(25, 60),
        ..Options::default()
    }
}

fn for_each_combination(mut check: impl FnMut(&str, Base, Memory)) {
    for memory in MEMORIES {
        for base in BASES {
            check(&format!("{base:?}, memory {memory:?}"), base, memory);
        }
    }
}

#[test]
fn live_devices_conform_over_every_base() {
    for_each_combination(|name, base, memory| {
        conformance::check(name, &|| Arc::new(live(base, &family(memory))), options());
    });
}

#[test]
fn live_devices_conform_during_snapshots() {
    for_each_combination(|name, base, memory| {
        let stop = AtomicBool::new(false);
        let device = live(base, &family(memory));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut snapshots = Vec::new();
                let mut rng = Rng::new(2);
                while !stop.load(Ordering::SeqCst) {
                    snapshots.push(device.snapshot().unwrap());
                    if snapshots.len() > 3 {
                        snapshots.remove(rng.below(4) as usize);
                    }
                    std::thread::sleep(std::time::Duration::from_millis(1));
                }
            });
            let make = || -> Arc<dyn Device> {
                device.rewind().unwrap();
                Arc::new(device.clone())
            };
            let checked = conformance::run(&make, &options());
            stop.store(true, Ordering::SeqCst);
            checked.unwrap_or_else(|violation| panic!("{name}: {violation}"));
        });
    });
}

/// Checks the device that `make` derives from an origin while another thread writes to that origin
/// all the time.
fn check_over_busy_origin(make: impl Fn(&Ram) -> Ram) {
    for_each_combination(|name, base, memory| {
        let stop = AtomicBool::new(false);
        let origin = live(base, &family(memory));
        fill(&origin, 3);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut seed = 100;
                while !stop.load(Ordering::SeqCst) {
                    fill(&origin, seed);
                    seed += 1;
                    // The pause leaves processor time to the suite.
                    std::thread::sleep(std::time::Duration::from_micros(500));
                }
            });
            let device = || -> Arc<dyn Device> { Arc::new(make(&origin)) };
            let checked = conformance::run(&device, &options());
            stop.store(true, Ordering::SeqCst);
            checked.unwrap_or_else(|violation| panic!("{name}: {violation}"));
        });
    });
}

#[test]
fn snapshots_of_a_busy_origin_conform() {
    check_over_busy_origin(|origin| origin.snapshot().unwrap());
}

#[test]
fn forks_of_snapshots_of_a_busy_origin_conform() {
    check_over_busy_origin(|origin| origin.snapshot().unwrap().fork(&ForkConfig::default()).unwrap());
}
