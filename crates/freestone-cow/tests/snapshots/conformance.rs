//! Origins and snapshots pass the device conformance suite, on every kind of device and exception
//! store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use freestone_core::device::{Blocking, Device, Error, Extent, ExtentKind, Flags, Op};
use freestone_cow::cow::{Config, MergeStatus, Origin, Snapshot, StoreKind};
use freestone_testkit::conformance::{self, Options};
use freestone_testkit::{
    DeferPolicy, DeferringDevice, FaultEffect, FaultSchedule, FaultyDisk, Model, Rng, effort,
};

use crate::support::{KINDS, Kind, Stop, config};

const SIZE: u64 = (1 << 20) + 512;
const COW_SIZE: u64 = 8 << 20;

fn options(seed: u64) -> Options {
    Options {
        seed,
        rounds: effort(25, 60),
        window: 512 << 10,
        max_io: 256 << 10,
        thread_rounds: effort(25, 60),
        ..Options::default()
    }
}

/// Returns a new origin and a snapshot of the origin. The caller must keep the origin as long as
/// the snapshot.
fn snapshot(origin: Kind, cow: Kind, config: &Config) -> (Origin, Snapshot) {
    let origin = Origin::new(origin.make(SIZE));
    let snapshot = origin.snapshot(cow.make(COW_SIZE), config).unwrap();
    (origin, snapshot)
}

#[test]
fn snapshots_conform_on_every_device() {
    for (number, kind) in KINDS.into_iter().enumerate() {
        for store in [StoreKind::Persistent, StoreKind::Transient] {
            let name = format!("snapshot {store} on {kind:?}");
            let make = || -> Arc<dyn Device> { Arc::new(snapshot(kind, kind, &config(store, 4096)).1) };
            conformance::check(&name, &make, options(number as u64));
        }
    }
}

#[test]
fn snapshots_conform_with_large_chunks_and_discards() {
    for (origin, cow) in
        [(Kind::Model, Kind::Deferred), (Kind::Deferred, Kind::Ram), (Kind::Ram, Kind::Sometimes)]
    {
        let config = Config { discard_zeroes_cow: true, ..config(StoreKind::PersistentOverflow, 64 << 10) };
        let make = || -> Arc<dyn Device> { Arc::new(snapshot(origin, cow, &config).1) };
        conformance::check(&format!("snapshot on {origin:?} and {cow:?}"), &make, options(11));
    }
}

/// Of the two devices, the one with smaller blocks may complete inline a part of a snapshot block.
/// Another request may run before the rest of that block. So only the smaller blocks are never
/// torn.
#[test]
fn snapshots_conform_with_blocks_of_two_sizes() {
    for (number, (origin, cow)) in [(4096, 512), (512, 4096)].into_iter().enumerate() {
        let make = || -> Arc<dyn Device> {
            let device = |size: usize, block| {
                let model = Arc::new(Model::new(size, block));
                Arc::new(DeferringDevice::new(model, DeferPolicy::Sometimes(40), 3))
            };
            let origin = Origin::new(device(1 << 20, origin));
            let cow = device(COW_SIZE as usize, cow);
            Arc::new(origin.snapshot(cow, &config(StoreKind::Persistent, 16384)).unwrap())
        };
        let options = Options { atomic_bytes: 512, ..options(20 + number as u64) };
        conformance::check(&format!("snapshot of {origin} on {cow}"), &make, options);
    }
}

/// Extents cover the whole range, and a block with any byte that is not zero is reported as data.
#[test]
fn extents_of_smaller_blocks_are_whole_blocks() {
    let device = |block| Arc::new(Model::new(1 << 20, block));
    let origin = Origin::new(device(4096));
    let snapshot = origin.snapshot(device(512), &config(StoreKind::Persistent, 16384)).unwrap();
    let mut data = vec![0; 16384];
    // Blocks 0 and 3 are zeroes. Block 1 has one other byte at its end, block 2 has one in its
    // middle.
    data[8191] = 1;
    data[9216] = 1;
    snapshot.write_at(0, &data, Flags::empty()).unwrap();
    let mut rows = Vec::new();
    let all = |row: Extent| {
        rows.push((row.offset, row.len, row.kind));
        true
    };
    assert_eq!(snapshot.extents(0, 16384, &mut { all }), Ok(16384));
    let (hole, data) = (ExtentKind::Hole, ExtentKind::Data);
    assert_eq!(rows, [(0, 4096, hole), (4096, 8192, data), (12288, 4096, hole)]);
}

#[test]
fn snapshots_conform_while_the_origin_is_written() {
    for kind in [Kind::Model, Kind::Sometimes, Kind::Ram] {
        let stop = AtomicBool::new(false);
        let origins = Mutex::new(Vec::<Origin>::new());
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            scope.spawn(|| {
                let mut rng = Rng::new(3);
                while !stop.load(Ordering::SeqCst) {
                    let last = origins.lock().unwrap().last().cloned();
                    let Some(origin) = last else { continue };
                    let mut data = vec![0; 512 << rng.below(4)];
                    rng.fill(&mut data);
                    let offset = rng.below((SIZE - data.len() as u64) / 512) * 512;
                    origin.write_at(offset, &data, Flags::empty()).unwrap();
                }
            });
            let make = || -> Arc<dyn Device> {
                let (origin, snapshot) = snapshot(kind, kind, &config(StoreKind::Persistent, 4096));
                origins.lock().unwrap().push(origin);
                Arc::new(snapshot)
            };
            conformance::check(&format!("snapshot of a busy {kind:?}"), &make, options(21));
        });
    }
}

#[test]
fn origins_conform_with_snapshots_of_several_chunk_sizes() {
    for (number, kind) in KINDS.into_iter().enumerate() {
        let kept = Mutex::new(Vec::new());
        let make = || -> Arc<dyn Device> {
            let origin = Origin::new(kind.make(SIZE));
            for (store, chunk) in [
                (StoreKind::Persistent, 4096),
                (StoreKind::Transient, 64 << 10),
                (StoreKind::PersistentOverflow, 16384),
            ] {
                let snapshot = origin.snapshot(kind.make(COW_SIZE), &config(store, chunk)).unwrap();
                kept.lock().unwrap().push(snapshot);
            }
            Arc::new(origin)
        };
        conformance::check(&format!("origin on {kind:?}"), &make, options(31 + number as u64));
    }
}

#[test]
fn origins_conform_without_or_with_full_snapshots() {
    conformance::check("bare origin", &|| Arc::new(Origin::new(Kind::Ram.make(SIZE))), options(41));
    let kept = Mutex::new(Vec::new());
    let make = || -> Arc<dyn Device> {
        let origin = Origin::new(Kind::Sometimes.make(SIZE));
        let snapshot = origin.snapshot(Kind::Deferred.make(128 << 10), &config(StoreKind::Persistent, 4096));
        kept.lock().unwrap().push(snapshot.unwrap());
        Arc::new(origin)
    };
    conformance::check("origin of a snapshot that overflows", &make, options(42));
}

/// Conformance of a snapshot of a snapshot, and of an origin whose device is a snapshot.
#[test]
fn snapshots_conform_on_snapshots() {
    for kind in [Kind::Model, Kind::Sometimes, Kind::Deferred] {
        let kept = Mutex::new(Vec::new());
        let stacked = || {
            let (_, below) = snapshot(kind, kind, &config(StoreKind::Persistent, 16384));
            let origin = Origin::new(Arc::new(below));
            let above = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
            (origin, above)
        };
        let make = || -> Arc<dyn Device> { Arc::new(stacked().1) };
        conformance::check(&format!("snapshot of a snapshot on {kind:?}"), &make, options(61));
        let make = || -> Arc<dyn Device> {
            let (origin, above) = stacked();
            kept.lock().unwrap().push(above);
            Arc::new(origin)
        };
        conformance::check(&format!("snapshot as an origin on {kind:?}"), &make, options(62));
    }
}

#[test]
fn origin_and_snapshot_conform_during_and_after_merge() {
    for kind in [Kind::Model, Kind::Sometimes, Kind::Ram] {
        for of_origin in [false, true] {
            let kept = Mutex::new(Vec::new());
            let make = || -> Arc<dyn Device> {
                let (origin, snapshot) = snapshot(kind, kind, &config(StoreKind::Persistent, 4096));
                let mut rng = Rng::new(9);
                for _ in 0..64 {
                    let mut data = vec![0; 4096];
                    rng.fill(&mut data);
                    snapshot.write_at(rng.below(SIZE / 4096) * 4096, &data, Flags::empty()).unwrap();
                }
                snapshot.merge().unwrap();
                if of_origin {
                    kept.lock().unwrap().push(snapshot);
                    Arc::new(origin)
                } else {
                    Arc::new(snapshot)
                }
            };
            conformance::check(&format!("merge on {kind:?}, origin: {of_origin}"), &make, options(51));
        }
    }
}

/// During a merge, the origin passes the suite although the COW device, and so the snapshot, has
/// larger blocks.
#[test]
fn origin_conforms_during_merge_with_larger_blocks() {
    for (inline, seed) in [(0, 71), (40, 72), (100, 73)] {
        let kept = Mutex::new(Vec::new());
        let make = || -> Arc<dyn Device> {
            let below = Arc::new(FaultyDisk::new(1 << 20, 512));
            let origin = Origin::new(below.clone());
            let cow = DeferringDevice::new(
                Arc::new(Model::new(COW_SIZE as usize, 4096)),
                DeferPolicy::Sometimes(inline),
                seed,
            );
            let snapshot = origin.snapshot(Arc::new(cow), &config(StoreKind::Persistent, 16384)).unwrap();
            // Writes all chunks except every fourth one.
            for chunk in (0..64).filter(|chunk| chunk % 4 != 3) {
                snapshot.write_at(chunk * 16384, &[chunk as u8; 16384], Flags::empty()).unwrap();
            }
            below.fault(Some(Op::Flush), FaultSchedule::At(1), FaultEffect::Fail(Error::Media));
            snapshot.merge().unwrap();
            assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
            below.heal();
            kept.lock().unwrap().push(snapshot);
            Arc::new(origin)
        };
        conformance::check(&format!("half merged, {inline} % inline"), &make, options(seed));
    }
}
