//! Regression tests for families of RAM disks (devices that share memory): no content, memory or
//! write may be lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use freestone::device::{Blocking, Completion, Device, Error, Flags, IoBuf, Op, Request};
use freestone::ram::{Config, Family, ForkConfig, Ram, SetupError, Writeback};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng, effort};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;
/// Number of pages (slots) that one leaf of the page map holds.
const LEAF: u64 = 512;

/// Returns an incompressible page, which depends only on the seed.
fn noise(seed: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE as usize];
    Rng::new(seed).fill(&mut page);
    page
}

fn write(device: &Ram, slot: u64, seed: u64) {
    device.write_at(slot * PAGE, &noise(seed), Flags::empty()).unwrap();
}

fn read(device: &Ram, slot: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE as usize];
    device.read_at(slot * PAGE, &mut page).unwrap();
    page
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn family(mem_limit: u64) -> Family {
    Family::new(Config { mem_limit, ..Config::default() }).unwrap()
}

fn zero_base(size: u64) -> Arc<dyn Device> {
    Arc::new(Model::read_only(vec![0; size as usize], 4096))
}

/// Two adjacent snapshots are removed. Pages of the younger one must move to the oldest snapshot,
/// past the other removed one.
#[test]
fn removed_snapshots_pass_their_pages_on() {
    // More leaves than the background cleaner handles in one turn.
    let leaves = 1500;
    for order in [[1, 2], [2, 1]] {
        let disk = family(0).ram(leaves * LEAF * PAGE).unwrap();
        for leaf in 0..leaves {
            write(&disk, leaf * LEAF, leaf);
        }
        // All three snapshots show the same first page of each leaf. The page is stored in the
        // third one when it is overwritten later.
        let mut snapshots = Vec::new();
        for round in 0..3 {
            snapshots.push(Some(disk.snapshot().unwrap()));
            // Each snapshot also stores another page of every leaf.
            for leaf in 0..leaves {
                write(&disk, leaf * LEAF + 1 + round, 1000 + leaf);
            }
        }
        for leaf in 0..leaves {
            write(&disk, leaf * LEAF, 7777);
        }
        for at in order {
            snapshots[at] = None;
        }
        let family = disk.family();
        eventually("removed snapshots go", || family.stat().layers == 2);
        let oldest = snapshots[0].take().unwrap();
        let lost = (0..leaves).filter(|leaf| read(&oldest, leaf * LEAF) != noise(*leaf)).count();
        assert_eq!(lost, 0, "pages of the oldest snapshot changed, of {leaves}");
    }
}

fn submit_write(device: &Ram, offset: u64, data: &[u8]) -> std::sync::mpsc::Receiver<Result<(), Error>> {
    let (tx, rx) = std::sync::mpsc::channel();
    let mut buffer = IoBuf::zeroed(data.len()).unwrap();
    buffer.copy_from_slice(data);
    let done = Completion::new(move |outcome, _| {
        let _ = tx.send(outcome);
    });
    device.submit(Request::write(offset, data.len() as u64), buffer, done);
    rx
}

/// A device is rewound while a write to a part of an evicted page waits for the read of that page.
#[test]
fn rewind_discards_pages_in_flight() {
    for packed in [true, false] {
        let disk = Arc::new(FaultyDisk::new(4 << 20, 4096));
        let family = Family::new(Config::default().backed_by(disk.clone(), packed)).unwrap();
        let fork = family.fork(zero_base(MIB), &ForkConfig::default()).unwrap();
        write(&fork, 3, 5);
        fork.writeback(&Writeback::Pages(vec![3..=3])).unwrap();
        disk.fault(Some(Op::Read), FaultSchedule::From(0), FaultEffect::Hang);
        // The first write changes the page when its content has been read. The other writes wait
        // for the same read.
        let waits: Vec<_> =
            (0..3).map(|at| submit_write(&fork, 3 * PAGE + at * 512, &[at as u8 + 1; 512])).collect();
        disk.wait_held(1);
        fork.rewind().unwrap();
        disk.heal();
        for one in waits {
            one.recv_timeout(Duration::from_secs(120)).unwrap().unwrap();
        }
        let page = read(&fork, 3);
        for at in 0..3 {
            let part = &page[at * 512..][..512];
            assert!(part == [at as u8 + 1; 512] || part == [0; 512], "part {at}, packed {packed}");
        }
        assert!(page[1536..].iter().all(|&b| b == 0), "content from before the rewind, packed {packed}");
    }
}

const SMALL_LIMIT: u64 = 2 * MIB;
/// Number of incompressible pages that fit into the memory limit once, but not twice.
const MANY: u64 = 450;

fn fill(device: &Ram, what: &str) {
    for slot in 0..MANY {
        if let Err(error) = device.write_at(slot * PAGE, &noise(slot), Flags::empty()) {
            panic!("{what}: page {slot}: {error}");
        }
    }
}

/// The memory of the content before a rewind is freed in the background. Meanwhile no write may
/// fail with "no space".
#[test]
fn memory_of_a_rewind_does_not_fail_writes() {
    let disk = family(SMALL_LIMIT).ram(MANY * PAGE).unwrap();
    for round in 0..effort(40, 200) {
        fill(&disk, &format!("after rewind {round}"));
        disk.rewind().unwrap();
    }
}

/// Two devices write at the same time after a rewind. Neither write fails with "no space".
#[test]
fn memory_of_a_rewind_does_not_fail_two_writers() {
    let family = family(SMALL_LIMIT);
    let (a, b) = (family.ram(MIB).unwrap(), family.ram(MIB).unwrap());
    for round in 0..effort(40, 200) {
        std::thread::scope(|scope| {
            for device in [&a, &b] {
                scope.spawn(move || {
                    for slot in 0..MANY / 2 {
                        if let Err(error) = device.write_at(slot * PAGE, &noise(slot), Flags::empty()) {
                            panic!("round {round}, page {slot}: {error}");
                        }
                    }
                });
            }
        });
        a.rewind().unwrap();
        b.rewind().unwrap();
    }
}

/// The memory of a removed device is freed in the background. Meanwhile no write may fail with "no
/// space".
#[test]
fn memory_of_a_removed_device_does_not_fail_writes() {
    let family = family(SMALL_LIMIT);
    for round in 0..effort(40, 200) {
        let disk = family.ram(MANY * PAGE).unwrap();
        fill(&disk, &format!("after removal {round}"));
    }
}

/// The memory of a removed snapshot is freed in the background. Meanwhile no write may fail with
/// "no space".
#[test]
fn memory_of_a_removed_snapshot_does_not_fail_writes() {
    let disk = family(SMALL_LIMIT).ram(MANY * PAGE).unwrap();
    for round in 0..effort(40, 200) {
        fill(&disk, &format!("after removal {round}"));
        let snapshot = disk.snapshot().unwrap();
        disk.discard(0, MANY * PAGE).unwrap();
        drop(snapshot);
    }
}

/// The guaranteed memory of a device becomes free when the device is removed.
#[test]
fn guarantee_ends_with_its_device() {
    let family = family(8 * MIB);
    let config = ForkConfig { mem_min: 6 * MIB, ..ForkConfig::default() };
    let make = || family.fork(zero_base(4 * MIB), &config);
    for round in 0..50 {
        let fork = make().unwrap_or_else(|error| panic!("round {round}: {error}"));
        write(&fork, 1, 1);
    }
    let fork = make().unwrap();
    write(&fork, 1, 1);
    let snapshot = fork.snapshot().unwrap();
    drop(fork);
    eventually("the guarantee of a device that is gone", || family.stat().guaranteed == 0);
    // Other devices can use the memory that was guaranteed to the removed one.
    let other = family.ram(64 * MIB).unwrap();
    let mut written = 0;
    while written < 16 * MIB / PAGE && other.write_at(written * PAGE, &noise(written), Flags::empty()).is_ok()
    {
        written += 1;
    }
    assert!(written * PAGE > 7 * MIB, "{} MiB of 8", written * PAGE / MIB);
    drop(snapshot);
}

/// The guaranteed memory of a device counts once, even if snapshots keep memory of the device after
/// a rewind.
#[test]
fn rewind_does_not_count_a_guarantee_twice() {
    let family = family(8 * MIB);
    let config = ForkConfig { mem_min: 3 * MIB, ..ForkConfig::default() };
    let fork = family.fork(zero_base(4 * MIB), &config).unwrap();
    let snapshot = fork.snapshot().unwrap();
    write(&fork, 0, 1);
    fork.rewind().unwrap();
    let other = family.ram(64 * MIB).unwrap();
    let mut written = 0;
    while other.write_at(written * PAGE, &noise(written), Flags::empty()).is_ok() {
        written += 1;
    }
    assert!(written * PAGE > 4 * MIB, "{} KiB of 8 MiB less 3", written * PAGE / 1024);
    drop(snapshot);
}

/// A memory limit set on a snapshot either applies or is refused.
#[test]
fn limits_of_a_snapshot_apply() {
    let family = family(8 * MIB);
    let disk = family.ram(4 * MIB).unwrap();
    let snapshot = disk.snapshot().unwrap();
    if let Err(error) = snapshot.set_own_limits(0, 6 * MIB) {
        assert!(matches!(error, SetupError::Snapshot), "{error}");
        return;
    }
    let mut written = 0;
    while written < 1024 && disk.write_at(written * PAGE, &noise(written), Flags::empty()).is_ok() {
        written += 1;
    }
    assert!(written * PAGE < 3 * MIB, "6 MiB of 8 were guaranteed to the snapshot");
}

/// If a device is at its memory limit and has no page to evict, a write fails in time, even while
/// other devices are busy.
#[test]
fn write_above_the_limit_fails_in_time() {
    let disk = Arc::new(FaultyDisk::new(64 << 20, 4096));
    let config = Config { mem_limit: 4 * MIB, ..Config::default() };
    let family = Family::new(config.backed_by(disk, true)).unwrap();
    let capped = ForkConfig { mem_limit: 64 << 10, ..ForkConfig::default() };
    let capped = family.fork(zero_base(32 * MIB), &capped).unwrap();
    // Pages that repeat 8 bytes are never evicted, so after about 4096 of them nothing more can be
    // stored.
    let pattern = |n: u64| (n + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes().repeat(512);
    for n in 0..3900 {
        capped.write_at(n * PAGE, &pattern(n), Flags::empty()).unwrap();
    }
    let neighbour = family.ram(32 * MIB).unwrap();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 0.. {
                if stop.load(Ordering::SeqCst) {
                    break;
                }
                neighbour.write_at(n % 4000 * PAGE, &noise(n), Flags::empty()).unwrap();
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        let began = Instant::now();
        let outcome = submit_write(&capped, 0, &noise(1)).recv_timeout(Duration::from_secs(60));
        let took = began.elapsed();
        stop.store(true, Ordering::SeqCst);
        assert_eq!(outcome, Ok(Err(Error::NoSpace)), "after {took:?}");
    });
}
