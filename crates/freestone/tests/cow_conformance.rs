//! Origins and snapshots keep the device contract, on every kind of device, with every kind of store.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use freestone::cow::{Config, Origin, Snapshot, StoreKind};
use freestone::device::{Blocking, Device, Flags};
use freestone_testkit::Rng;
use freestone_testkit::conformance::{self, Options};

mod cow_map_support;
use cow_map_support::{KINDS, Kind, Stop, config};

const SIZE: u64 = (1 << 20) + 512;
const COW_SIZE: u64 = 8 << 20;

fn options(seed: u64) -> Options {
    Options {
        seed,
        rounds: 60,
        window: 512 << 10,
        max_io: 256 << 10,
        thread_rounds: 60,
        ..Options::default()
    }
}

/// A snapshot of a new origin; what is made for it lives as long as the test.
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
fn origins_conform_without_snapshots_and_when_they_are_full() {
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

/// A snapshot of a snapshot, and an origin that is a snapshot with one of its own.
#[test]
fn they_conform_on_each_other() {
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
fn both_conform_while_and_after_a_snapshot_is_merged() {
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
