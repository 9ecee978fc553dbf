//! Forks, snapshots and rewinds in a family of RAM disks (devices that share memory). Each device
//! keeps its content when others change.

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::consistency_group;
use freestone::device::{Blocking, Change, Device, Error, ExtentKind, Flags};
use freestone::ram::{Config, Family, ForkConfig, Ram, SetupError};
use freestone_testkit::{DeferPolicy, DeferringDevice, Model, Rng};

const PAGE: u64 = 4096;
const MIB: u64 = 1 << 20;

fn content(seed: u64, slot: u64) -> Vec<u8> {
    // The second half of the page compresses, and the first half does not.
    let mut page = vec![slot as u8; PAGE as usize];
    Rng::new(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ slot).fill(&mut page[..2048]);
    page
}

fn write(device: &Ram, slot: u64, seed: u64) {
    device.write_at(slot * PAGE, &content(seed, slot), Flags::empty()).unwrap();
}

fn read(device: &Ram, slot: u64) -> Vec<u8> {
    let mut page = vec![0; PAGE as usize];
    device.read_at(slot * PAGE, &mut page).unwrap();
    page
}

fn assert_shows(device: &Ram, slot: u64, seed: u64) {
    assert!(read(device, slot) == content(seed, slot), "page {slot} is not of {seed}");
}

fn disk(size: u64) -> Ram {
    Ram::new(Config { disksize: size, ..Config::default() }).unwrap()
}

/// Returns a read-only base device of 16.5 pages for forks.
fn base() -> Arc<Model> {
    let mut bytes: Vec<u8> = (0..17).flat_map(|slot| content(7, slot)).collect();
    bytes.truncate(16 * PAGE as usize + 2048);
    Arc::new(Model::read_only(bytes, 512))
}

fn family() -> Family {
    Family::new(Config::default()).unwrap()
}

fn eventually(what: &str, mut is: impl FnMut() -> bool) {
    let began = Instant::now();
    while !is() {
        assert!(began.elapsed() < Duration::from_secs(120), "{what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn fork_shows_its_base_until_written() {
    for deferred in [false, true] {
        let base: Arc<dyn Device> =
            if deferred { Arc::new(DeferringDevice::new(base(), DeferPolicy::Always, 3)) } else { base() };
        let fork =
            family().fork(base, &ForkConfig { size: Some(64 * PAGE), ..ForkConfig::default() }).unwrap();
        for slot in 0..16 {
            assert_shows(&fork, slot, 7);
        }
        let mut half = content(7, 16);
        half[2048..].fill(0);
        assert!(read(&fork, 16) == half, "the base's last page is a short one");
        assert!(read(&fork, 17) == [0; PAGE as usize]);
        // A write to a part of a page keeps the rest of the base's page.
        fork.write_at(3 * PAGE + 512, &[9; 512], Flags::empty()).unwrap();
        let mut wanted = content(7, 3);
        wanted[512..1024].fill(9);
        assert!(read(&fork, 3) == wanted);
        fork.write_at(16 * PAGE + 1024, &[9; 2048], Flags::empty()).unwrap();
        half[1024..3072].fill(9);
        assert!(read(&fork, 16) == half);
        // A discard in a fork hides the base's data, so the fork stores zeroes.
        fork.discard(5 * PAGE, 2 * PAGE).unwrap();
        assert!(read(&fork, 5) == [0; PAGE as usize] && read(&fork, 6) == [0; PAGE as usize]);
        fork.write_zeroes(7 * PAGE + 512, 512, Flags::empty()).unwrap();
        let mut wanted = content(7, 7);
        wanted[512..1024].fill(0);
        assert!(read(&fork, 7) == wanted);
        // Reads the whole fork in one request.
        let mut all = vec![0; 64 * PAGE as usize];
        fork.read_at(0, &mut all).unwrap();
        for slot in 0..64 {
            assert!(all[(slot * PAGE) as usize..][..PAGE as usize] == read(&fork, slot), "page {slot}");
        }
        fork.rewind().unwrap();
        for slot in 0..16 {
            assert_shows(&fork, slot, 7);
        }
        assert_eq!(fork.over_stat().own_bytes, 0);
    }
}

/// Forks of a base of 16.5 pages have the size of the base. So do snapshots of these forks, and
/// forks of these snapshots.
#[test]
fn fork_has_the_size_of_its_base() {
    const SIZE: u64 = 16 * PAGE + 2048;
    let fork = |size| family().fork(base(), &ForkConfig { size, ..ForkConfig::default() });
    let first = fork(None).unwrap();
    let snapshot = first.snapshot().unwrap();
    let second = snapshot.fork(&ForkConfig::default()).unwrap();
    let end = |device: &Ram, at: u64| {
        let mut bytes = vec![1; (device.geometry().size - at) as usize];
        device.read_at(at, &mut bytes).unwrap();
        bytes
    };
    for device in [&first, &snapshot, &second] {
        assert_eq!(device.geometry().size, SIZE);
        assert!(end(device, 16 * PAGE) == content(7, 16)[..2048]);
        assert_eq!(device.read_at(SIZE - 512, &mut [0; 1024]), Err(Error::OutOfRange));
        let mut last = None;
        device
            .extents(16 * PAGE, 2048, &mut |extent| {
                last = Some(extent.offset + extent.len);
                true
            })
            .unwrap();
        assert_eq!(last, Some(SIZE));
    }
    // The partial last page can be written, read and discarded like any other page.
    for device in [&first, &second] {
        device.write_at(SIZE - 512, &[5; 512], Flags::empty()).unwrap();
        assert_eq!(end(device, SIZE - 512), [5; 512]);
        assert_eq!(device.write_at(SIZE - 512, &[5; 1024], Flags::empty()), Err(Error::OutOfRange));
        assert!(end(device, 16 * PAGE)[..1536] == content(7, 16)[..1536]);
        assert_eq!(own(device, SIZE), [(16, 0)], "half a page");
        // A discard of only a part of the partial last page has no effect.
        device.discard(16 * PAGE, 1536).unwrap();
        assert_eq!(end(device, SIZE - 512), [5; 512]);
        assert!(end(device, 16 * PAGE)[..1536] == content(7, 16)[..1536]);
        device.discard(16 * PAGE, 2048).unwrap();
        assert_eq!(end(device, 16 * PAGE), [0; 2048]);
        assert_eq!(device.over_stat().own_bytes, PAGE);
        assert_eq!(device.over_stat().charged, 0, "nothing is kept of it");
        device.write_at(16 * PAGE, &content(1, 16)[..2048], Flags::empty()).unwrap();
        device.write_zeroes(SIZE - 1024, 1024, Flags::empty()).unwrap();
        assert!(end(device, 16 * PAGE)[..1024] == content(1, 16)[..1024]);
        assert_eq!(end(device, SIZE - 1024), [0; 1024]);
        device.write_zeroes(0, SIZE, Flags::MAY_FREE).unwrap();
        assert!(end(device, 0).iter().all(|&byte| byte == 0));
        device.rewind().unwrap();
        assert!(end(device, 16 * PAGE) == content(7, 16)[..2048]);
    }
    // A requested or grown size is rounded up to whole blocks. The range beyond the base's end
    // reads as zeroes.
    assert_eq!(fork(Some(SIZE + 512)).unwrap().geometry().size, SIZE + 512);
    assert_eq!(fork(Some(SIZE + 1)).unwrap().geometry().size, SIZE + 512);
    assert!(matches!(fork(Some(SIZE - 512)), Err(SetupError::SmallerThanBase { .. })));
    first.write_at(SIZE - 512, &[5; 512], Flags::empty()).unwrap();
    let before = first.snapshot().unwrap();
    for (wanted, size) in [(SIZE, SIZE), (SIZE + 1, SIZE + 512), (20 * PAGE + 1024, 20 * PAGE + 1024)] {
        first.grow(wanted).unwrap();
        assert_eq!(first.geometry().size, size);
        assert!(end(&first, SIZE - 512)[512..].iter().all(|&byte| byte == 0));
    }
    assert!(matches!(first.grow(SIZE), Err(SetupError::Shrinks { .. })));
    first.write_at(SIZE, &[6; 1024], Flags::empty()).unwrap();
    assert_eq!(before.geometry().size, SIZE);
    assert_eq!(end(&before, SIZE - 512), [5; 512]);
    let over = before.fork(&ForkConfig { size: Some(17 * PAGE), ..ForkConfig::default() }).unwrap();
    assert_eq!(end(&over, SIZE), [0; 2048]);
    // The size of a RAM disk without a base is rounded up to whole pages, as in zram.
    let disk = disk(SIZE);
    assert_eq!(disk.geometry().size, 17 * PAGE);
    disk.grow(17 * PAGE + 512).unwrap();
    assert_eq!(disk.geometry().size, 18 * PAGE);
}

#[test]
fn forks_are_independent_and_live_bases_refused() {
    let family = family();
    let base: Arc<dyn Device> = base();
    let forks: Vec<Ram> =
        (0..20).map(|_| family.fork(Arc::clone(&base), &ForkConfig::default()).unwrap()).collect();
    for (seed, fork) in (100..).zip(&forks) {
        write(fork, 2, seed);
    }
    for (seed, fork) in (100..).zip(&forks) {
        assert_shows(fork, 2, seed);
        assert_shows(fork, 1, 7);
    }
    let live = family.fork(Arc::new(forks[0].clone()), &ForkConfig::default());
    assert!(matches!(live, Err(SetupError::WritableBase)));
    assert!(matches!(forks[0].fork(&ForkConfig::default()), Err(SetupError::WritableBase)));
    let small = ForkConfig { size: Some(PAGE), ..ForkConfig::default() };
    assert!(matches!(family.fork(base, &small), Err(SetupError::SmallerThanBase { .. })));
    let before = family.stat();
    assert!(before.charged > 0);
    drop(forks);
    eventually("all memory comes back", || {
        let stat = family.stat();
        stat.mem_used_total == 0 && stat.layers == 0 && stat.retiring == 0
    });
}

#[test]
fn chained_snapshots_keep_their_content() {
    let disk = disk(4 * MIB);
    for slot in 0..100 {
        write(&disk, slot, 1);
    }
    let mut snapshots = Vec::new();
    for round in 2..8 {
        snapshots.push((round - 1, disk.snapshot().unwrap()));
        for slot in (0..100).filter(|slot| slot % round == 0) {
            write(&disk, slot, round);
        }
        disk.discard(round * 3 * PAGE, PAGE).unwrap();
        disk.write_at((200 + round) * PAGE + 512, &[round as u8; 512], Flags::empty()).unwrap();
    }
    let wanted = |at: u64, slot: u64| {
        let mut page = if slot < 100 { content(1, slot) } else { vec![0; PAGE as usize] };
        for round in 2..=at {
            if slot < 100 && slot.is_multiple_of(round) {
                page = content(round, slot);
            }
            if slot == round * 3 {
                page.fill(0);
            }
            if slot == 200 + round {
                page[512..1024].fill(round as u8);
            }
        }
        page
    };
    let check = |snapshots: &[(u64, Ram)]| {
        for (at, snapshot) in snapshots {
            for slot in 0..220 {
                assert!(read(snapshot, slot) == wanted(*at, slot), "page {slot} of snapshot {at}");
            }
            // Also reads all pages in one request.
            let mut all = vec![0; 220 * PAGE as usize];
            snapshot.read_at(0, &mut all).unwrap();
            assert!((0..220).all(|slot| all[(slot * PAGE) as usize..][..PAGE as usize] == wanted(*at, slot)));
        }
        for slot in 0..220 {
            assert!(read(&disk, slot) == wanted(7, slot), "page {slot} of the disk");
        }
    };
    check(&snapshots);
    assert!(disk.over_stat().handed_over > 0);
    assert_eq!(snapshots[0].1.write_at(0, &[0; 512], Flags::empty()), Err(Error::ReadOnly));
    // Removes a snapshot in the middle, then the oldest one, then the newest one.
    for at in [2, 0, 3] {
        drop(snapshots.remove(at));
        check(&snapshots);
        let left = snapshots.len() as u64 + 1;
        eventually("a removed snapshot's layer goes", || disk.family().stat().layers == left);
        check(&snapshots);
    }
    // Rewinds the origin, and then drops it, while its snapshots still exist.
    disk.rewind().unwrap();
    assert!(read(&disk, 1) == [0; PAGE as usize]);
    for (at, snapshot) in &snapshots {
        assert!((0..220).all(|slot| read(snapshot, slot) == wanted(*at, slot)));
    }
    let family = disk.family();
    drop(disk);
    for (at, snapshot) in &snapshots {
        assert!((0..220).all(|slot| read(snapshot, slot) == wanted(*at, slot)));
    }
    drop(snapshots);
    eventually("all memory comes back", || family.stat().mem_used_total == 0 && family.stat().layers == 0);
}

#[test]
fn forks_of_snapshots_and_snapshots_of_forks() {
    let base: Arc<dyn Device> = base();
    let fork = family().fork(base, &ForkConfig { size: Some(MIB), ..ForkConfig::default() }).unwrap();
    write(&fork, 1, 20);
    let first = fork.snapshot().unwrap();
    write(&fork, 1, 21);
    write(&fork, 2, 21);
    let second = first.fork(&ForkConfig { size: Some(2 * MIB), ..ForkConfig::default() }).unwrap();
    write(&second, 3, 30);
    fork.discard(4 * PAGE, PAGE).unwrap();
    assert_shows(&first, 1, 20);
    assert_shows(&first, 2, 7);
    assert_shows(&first, 4, 7);
    assert_shows(&second, 1, 20);
    assert_shows(&second, 3, 30);
    assert_shows(&first, 3, 7);
    second.write_at(4 * PAGE, &[5; 512], Flags::empty()).unwrap();
    let mut wanted = content(7, 4);
    wanted[..512].fill(5);
    assert!(read(&second, 4) == wanted);
    assert!(read(&second, 300) == [0; PAGE as usize]);
    fork.rewind().unwrap();
    assert_shows(&fork, 1, 7);
    assert_shows(&first, 1, 20);
    assert_shows(&second, 1, 20);
    let third = second.snapshot().unwrap();
    second.rewind().unwrap();
    assert_shows(&second, 3, 7);
    assert_shows(&third, 3, 30);
}

fn own(device: &Ram, len: u64) -> Vec<(u64, u64)> {
    let mut own = Vec::new();
    let mut at = 0;
    while at < len {
        at += Device::changes(device)
            .unwrap()
            .changes(at, len - at, &mut |Change { offset, len, own: is }| {
                if is {
                    own.push((offset / PAGE, len / PAGE));
                }
                true
            })
            .unwrap();
    }
    own
}

#[test]
fn changes_and_extents_report_the_owner() {
    let base: Arc<dyn Device> = base();
    let fork = family().fork(base, &ForkConfig { size: Some(8 * MIB), ..ForkConfig::default() }).unwrap();
    assert_eq!(own(&fork, 8 * MIB), []);
    write(&fork, 3, 1);
    write(&fork, 4, 1);
    fork.discard(9 * PAGE, PAGE).unwrap();
    write(&fork, 1500, 1);
    assert_eq!(own(&fork, 8 * MIB), [(3, 2), (9, 1), (1500, 1)]);
    let mut rows = Vec::new();
    let mut at = 0;
    while at < 8 * MIB {
        at += fork
            .extents(at, 8 * MIB - at, &mut |extent| {
                rows.push(extent);
                true
            })
            .unwrap();
    }
    assert_eq!(rows.iter().map(|row| row.len).sum::<u64>(), 8 * MIB);
    let kind = |slot: u64| {
        rows.iter().find(|row| row.offset <= slot * PAGE && slot * PAGE < row.offset + row.len).unwrap().kind
    };
    assert_eq!(
        [kind(0), kind(3), kind(9), kind(20), kind(1500), kind(1501)],
        [
            ExtentKind::Data,
            ExtentKind::Data,
            ExtentKind::Zero,
            ExtentKind::Hole,
            ExtentKind::Data,
            ExtentKind::Hole
        ]
    );
    let snapshot = fork.snapshot().unwrap();
    assert_eq!(own(&snapshot, 8 * MIB), []);
    write(&fork, 0, 2);
    assert_eq!(own(&snapshot, 8 * MIB), [(0, 1)]);
    assert!(Device::changes(&disk(MIB)).is_none());
}

#[test]
fn snapshot_set_is_of_one_moment() {
    let (a, b) = (disk(MIB), disk(MIB));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let number = |device: &Ram| u64::from_le_bytes(read(device, 0)[..8].try_into().unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut page = vec![0; PAGE as usize];
            for n in 1_u64.. {
                if stop.load(std::sync::atomic::Ordering::SeqCst) {
                    break;
                }
                page[..8].copy_from_slice(&n.to_le_bytes());
                // Disk a is written before b. So at no moment is b ahead of a, or more than one
                // write behind.
                a.write_at(0, &page, Flags::empty()).unwrap();
                b.write_at(0, &page, Flags::empty()).unwrap();
            }
        });
        for _ in 0..200 {
            let (mut first, mut second) = (a.prepare_snapshot().unwrap(), b.prepare_snapshot().unwrap());
            consistency_group::take_snapshots(&mut [&mut first, &mut second]).unwrap();
            let (first, second) = (first.into_snapshot(), second.into_snapshot());
            let (of_a, of_b) = (number(&first), number(&second));
            assert!(of_a == of_b || of_a == of_b + 1, "{of_a} {of_b}");
            std::thread::yield_now();
            assert_eq!((number(&first), number(&second)), (of_a, of_b), "frozen");
        }
        stop.store(true, std::sync::atomic::Ordering::SeqCst);
    });
}

#[test]
fn limits_and_guarantees_hold() {
    let config = Config { mem_limit: 8 * MIB, ..Config::default() };
    let family = Family::new(config).unwrap();
    let base: Arc<dyn Device> = base();
    let fork = |limit: u64, least: u64| {
        let config = ForkConfig { size: Some(64 * MIB), mem_limit: limit, mem_min: least };
        family.fork(Arc::clone(&base), &config)
    };
    let capped = fork(MIB, 0).unwrap();
    let greedy = fork(0, 0).unwrap();
    let sure = fork(0, 2 * MIB).unwrap();
    assert!(matches!(fork(0, 7 * MIB), Err(SetupError::Guarantee { .. })));
    assert!(matches!(fork(MIB, 2 * MIB), Err(SetupError::GuaranteeAboveCap { .. })));
    let fill = |device: &Ram| {
        let mut slot = 32;
        while device.write_at(slot * PAGE, &content(slot, slot), Flags::empty()).is_ok() {
            slot += 1;
        }
        device.over_stat().charged
    };
    let of_capped = fill(&capped);
    assert!((MIB - 65536..=MIB).contains(&of_capped), "{of_capped}");
    let of_greedy = fill(&greedy);
    assert!(of_greedy > 3 * MIB && of_greedy < 5 * MIB, "{of_greedy}");
    let of_sure = fill(&sure);
    assert!(of_sure >= 2 * MIB, "{of_sure} of the guaranteed 2 MiB");
    // Memory that is being freed in the background never makes a write fail.
    for _ in 0..20 {
        greedy.rewind().unwrap();
        for slot in 32..32 + 500 {
            write(&greedy, slot, 5);
        }
    }
}
