//! Random operations on an origin and its snapshots, compared with byte vectors, while readers
//! check snapshots that nobody writes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use freestone_core::device::{Blocking, Completion, Device, Flags, IoBuf, Request};
use freestone_cow::cow::{Config, MergeStatus, Origin, Snapshot, StoreKind};
use freestone_testkit::Rng;

use crate::support::{KINDS, Kind, Stop, bytes, config, read, read_all};

const SIZE: u64 = (192 << 10) + 1024;
const COW_SIZE: u64 = 2 << 20;
const NONE: Flags = Flags::empty();

/// Returns the number of rounds: `COW_ROUNDS` from the environment, else `usual`.
fn rounds(usual: u64) -> u64 {
    std::env::var("COW_ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(usual)
}

/// A snapshot, its COW device and configuration, and its expected content.
struct ExpectedSnapshot {
    snapshot: Snapshot,
    cow: Arc<dyn Device>,
    config: Config,
    content: Vec<u8>,
}

/// Returns a random range as offset and length in bytes: mostly short, and often at chunk
/// boundaries.
fn range(rng: &mut Rng, size: u64) -> (u64, u64) {
    let unit = [512, 4096, 16384][rng.below(3) as usize];
    let offset = rng.below(size / unit) * unit;
    let len = match rng.below(8) {
        0 => rng.below(64) * 512 + 512,
        1 => 16384,
        2 => 4096,
        _ => 512 << rng.below(4),
    };
    (offset, len.min(size - offset))
}

fn change(rng: &mut Rng, device: &dyn Device, content: &mut [u8]) {
    let (offset, len) = range(rng, content.len() as u64);
    let mine = &mut content[offset as usize..(offset + len) as usize];
    if rng.chance(20) {
        device.write_zeroes(offset, len, Flags::MAY_FREE).unwrap();
        mine.fill(0);
    } else {
        rng.content(mine);
        device.write_at(offset, mine, if rng.chance(10) { Flags::FUA } else { NONE }).unwrap();
    }
}

fn random_config(rng: &mut Rng) -> Config {
    let kinds = [StoreKind::Persistent, StoreKind::PersistentOverflow, StoreKind::Transient];
    config(kinds[rng.below(3) as usize], 4096 << (2 * rng.below(3)))
}

/// Runs one seed on a single thread, so that the expected content is known exactly.
fn run(kind: Kind, seed: u64) {
    let mut rng = Rng::new(seed);
    let device = kind.make(SIZE);
    let size = device.geometry().size;
    let mut content = bytes(seed, size);
    device.write_at(0, &content, NONE).unwrap();
    let origin = Origin::new(Arc::clone(&device));
    let mut snapshots: Vec<ExpectedSnapshot> = Vec::new();
    for step in 0..150 {
        let what = format!("{kind:?}, seed {seed}, step {step}");
        let picked = rng.below(snapshots.len().max(1) as u64) as usize;
        match rng.below(100) {
            0..30 => change(&mut rng, &origin, &mut content),
            30..50 => {
                if let Some(shown) = snapshots.get_mut(picked) {
                    change(&mut rng, &shown.snapshot, &mut shown.content);
                }
            }
            50..75 => {
                let (offset, len) = range(&mut rng, size);
                let part = offset as usize..(offset + len) as usize;
                assert!(read(&origin, offset, len) == content[part.clone()], "{what}: the origin");
                if let Some(shown) = snapshots.get(picked) {
                    assert!(read(&shown.snapshot, offset, len) == shown.content[part], "{what}: a snapshot");
                }
            }
            75..82 if snapshots.len() < 4 => {
                let (cow, config) = (kind.make(COW_SIZE), random_config(&mut rng));
                let snapshot = origin.snapshot(Arc::clone(&cow), &config).unwrap();
                snapshot.set_cow_threshold(1 + rng.below(20) as usize);
                snapshots.push(ExpectedSnapshot { snapshot, cow, config, content: content.clone() });
            }
            82..86 if !snapshots.is_empty() => {
                snapshots.swap_remove(picked);
            }
            // Closes and reopens a snapshot.
            86..90 if !snapshots.is_empty() => {
                let ExpectedSnapshot { snapshot, cow, config, content } = snapshots.swap_remove(picked);
                if config.kind.is_persistent() {
                    drop(snapshot);
                    let snapshot = origin.snapshot(Arc::clone(&cow), &config).unwrap();
                    snapshots.push(ExpectedSnapshot { snapshot, cow, config, content });
                }
            }
            90..94 if !snapshots.is_empty() => {
                if snapshots[picked].config.kind.is_persistent() {
                    let mut merged = snapshots.swap_remove(picked);
                    merged.snapshot.merge().unwrap();
                    content.clone_from(&merged.content);
                    for _ in 0..rng.below(5) {
                        change(&mut rng, &origin, &mut content);
                        change(&mut rng, &merged.snapshot, &mut content);
                        merged.content.copy_from_slice(&content);
                    }
                    assert!(read_all(&merged.snapshot) == content, "{what}: while it is merged");
                    assert_eq!(merged.snapshot.wait_merge(), MergeStatus::Finished, "{what}");
                    assert!(read_all(&*device) == content, "{what}: merged");
                }
            }
            _ => {
                if let Some(shown) = snapshots.get(picked) {
                    shown.snapshot.flush().unwrap();
                }
                origin.flush().unwrap();
            }
        }
    }
    assert!(read_all(&origin) == content, "{kind:?}, seed {seed}: the origin in the end");
    for shown in &snapshots {
        let what = format!("{kind:?}, seed {seed}: {:?} in the end", shown.snapshot);
        assert!(read_all(&shown.snapshot) == shown.content, "{what}");
        assert!(shown.snapshot.status().to_string().contains('/'), "{what}");
    }
}

#[test]
fn random_operations_match_byte_vectors() {
    for seed in 0..rounds(6) {
        for kind in KINDS {
            run(kind, seed);
        }
    }
}

/// Writers change their own blocks of the origin and of snapshots, and snapshots are taken and
/// removed. Readers check snapshots with known content.
#[test]
fn frozen_content_stays_during_writes() {
    for kind in [Kind::Model, Kind::Sometimes, Kind::Deferred, Kind::Ram] {
        for seed in 0..rounds(2) {
            concurrent(kind, seed);
        }
    }
}

fn concurrent(kind: Kind, seed: u64) {
    let device = kind.make(SIZE);
    let origin = Origin::new(Arc::clone(&device));
    origin.write_at(0, &bytes(seed, SIZE), NONE).unwrap();
    let stop = AtomicBool::new(false);
    // Snapshots that nobody writes, with their content.
    let frozen: Mutex<Vec<(Snapshot, Arc<Vec<u8>>)>> = Mutex::default();
    std::thread::scope(|scope| {
        let _stop = Stop(&stop);
        for thread in 0..2 {
            let (origin, stop) = (&origin, &stop);
            scope.spawn(move || {
                let mut rng = Rng::new(seed * 10 + thread);
                while !stop.load(Ordering::SeqCst) {
                    // Writes single blocks, so that two writers share chunks but not blocks.
                    let block = rng.below(SIZE / 1024) * 2 + thread;
                    origin.write_at(block * 512, &bytes(rng.word(), 512), NONE).unwrap();
                }
            });
        }
        for thread in 0..2 {
            let (frozen, stop) = (&frozen, &stop);
            scope.spawn(move || {
                let mut rng = Rng::new(seed * 10 + 5 + thread);
                while !stop.load(Ordering::SeqCst) {
                    let picked = {
                        let frozen = frozen.lock().unwrap();
                        let count = frozen.len() as u64;
                        (count > 0).then(|| frozen[rng.below(count) as usize].clone())
                    };
                    let Some((snapshot, content)) = picked else { continue };
                    let (offset, len) = range(&mut rng, SIZE);
                    let back = read(&snapshot, offset, len);
                    let expected = &content[offset as usize..(offset + len) as usize];
                    assert!(back == expected, "{kind:?}, seed {seed}: {snapshot:?} at {offset}, {len}");
                }
            });
        }
        let mut rng = Rng::new(seed);
        for _ in 0..25 {
            let snapshot = origin.snapshot(kind.make(COW_SIZE), &random_config(&mut rng)).unwrap();
            snapshot.set_cow_threshold(1 + rng.below(8) as usize);
            let content = Arc::new(read_all(&snapshot));
            let mut list = frozen.lock().unwrap();
            list.push((snapshot, content));
            if list.len() > 3 {
                let gone = rng.below(3) as usize;
                drop(list.swap_remove(gone));
            }
            drop(list);
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
        // At the end, all unwritten snapshots must still have their content.
        for (snapshot, content) in frozen.lock().unwrap().iter() {
            assert!(read_all(snapshot) == **content, "{kind:?}, seed {seed}: {snapshot:?}");
        }
    });
}

/// Many requests in flight to a snapshot and its origin. No two of them share a block.
#[test]
fn many_requests_in_flight_do_not_mix() {
    for kind in KINDS {
        let origin = Origin::new(kind.make(SIZE));
        origin.write_at(0, &bytes(1, SIZE), NONE).unwrap();
        let snapshot = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 16384)).unwrap();
        let kept = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
        let (mut of_origin, mut of_snapshot) = (bytes(1, SIZE), bytes(1, SIZE));
        let (tx, rx) = std::sync::mpsc::channel();
        let mut rng = Rng::new(3);
        let mut block = 0;
        let mut sent = 0;
        while block < SIZE / 512 {
            let blocks = (1 + rng.below(40)).min(SIZE / 512 - block);
            let (offset, len) = (block * 512, blocks * 512);
            let devices: [(&dyn Device, &mut Vec<u8>); 2] =
                [(&origin, &mut of_origin), (&snapshot, &mut of_snapshot)];
            for (device, content) in devices {
                let data = bytes(rng.word(), len);
                content[offset as usize..(offset + len) as usize].copy_from_slice(&data);
                let tx = tx.clone();
                let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
                device.submit(Request::write(offset, len), IoBuf::copy_of(&data).unwrap(), done);
                sent += 1;
            }
            block += blocks;
        }
        for _ in 0..sent {
            assert_eq!(rx.recv_timeout(std::time::Duration::from_secs(30)), Ok(Ok(())), "{kind:?}");
        }
        assert!(read_all(&origin)[..SIZE as usize] == of_origin, "{kind:?}: the origin");
        assert!(read_all(&snapshot)[..SIZE as usize] == of_snapshot, "{kind:?}: the snapshot");
        assert!(
            read_all(&kept)[..SIZE as usize] == bytes(1, SIZE),
            "{kind:?}: the snapshot that was not written"
        );
    }
}
