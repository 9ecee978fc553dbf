//! Content of snapshots, failures of snapshots, and the effects of both on the origin.

mod copies;
mod moments;
mod random;

use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_cow::cow::{Config, Origin, SetupError, Status, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model};

use crate::support::{KINDS, Kind, bytes, config, read, read_all};

const SIZE: u64 = 1 << 20;
const COW_SIZE: u64 = 4 << 20;
const NONE: Flags = Flags::empty();

/// Returns an origin with content, and that content.
fn origin(kind: Kind, size: u64) -> (Origin, Vec<u8>) {
    let device = kind.make(size);
    device.write_at(0, &bytes(size, size), NONE).unwrap();
    // The size of a RAM disk is rounded up to whole pages, so the content is read back.
    let content = read_all(&*device);
    (Origin::new(device), content)
}

#[test]
fn snapshot_keeps_content_of_its_origin() {
    for kind in KINDS {
        for (store, chunk) in
            [(StoreKind::Persistent, 4096), (StoreKind::Transient, 16384), (StoreKind::Persistent, 1 << 17)]
        {
            let (origin, content) = origin(kind, SIZE + 1536);
            let snapshot = origin.snapshot(kind.make(COW_SIZE), &config(store, chunk)).unwrap();
            assert!(read_all(&snapshot) == content, "{kind:?} at first");
            // Changes a part of a chunk, several whole chunks, a range across a chunk boundary, and
            // the short last chunk. Then writes zeroes and discards.
            origin.write_at(512, &bytes(1, 512), NONE).unwrap();
            origin.write_at(2 * chunk, &bytes(2, 2 * chunk), NONE).unwrap();
            origin.write_at(5 * chunk - 1024, &bytes(3, 2048), Flags::FUA).unwrap();
            origin.write_at(SIZE + 512, &bytes(4, 1024), NONE).unwrap();
            origin.write_zeroes(7 * chunk + 512, 4096, Flags::MAY_FREE).unwrap();
            origin.discard(0, 2 * chunk).unwrap();
            assert!(read_all(&snapshot) == content, "{kind:?} after the origin was written");
            assert_eq!(read(&origin, SIZE + 512, 1024), bytes(4, 1024));
            assert_eq!(read(&origin, 2 * chunk, 2 * chunk), bytes(2, 2 * chunk));
            let stats = snapshot.stats();
            assert!(stats.copied_chunks >= 6 && stats.origin_writes_waited > 0, "{stats:?}");
            assert_eq!(stats.full_chunk_writes, 0, "the origin's content was to be kept");
            // A second write to the same chunks copies nothing.
            origin.write_at(2 * chunk, &bytes(5, 2 * chunk), NONE).unwrap();
            assert_eq!(snapshot.stats().copied_chunks, stats.copied_chunks);
            assert!(read_all(&snapshot) == content, "{kind:?} after the second write");
        }
    }
}

#[test]
fn snapshot_writes_do_not_change_origin() {
    for kind in KINDS {
        let (origin, mut content) = origin(kind, SIZE);
        let kept = content.clone();
        let snapshot = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 8192)).unwrap();
        for (offset, len) in
            [(0, 8192), (8192, 512), (3 * 8192 - 512, 1024), (8 * 8192, 8 * 8192), (SIZE - 4096, 4096)]
        {
            let data = bytes(offset, len);
            snapshot.write_at(offset, &data, NONE).unwrap();
            content[offset as usize..(offset + len) as usize].copy_from_slice(&data);
        }
        snapshot.write_zeroes(20 * 8192 + 512, 3 * 8192, NONE).unwrap();
        content[20 * 8192 + 512..23 * 8192 + 512].fill(0);
        assert!(read_all(&snapshot) == content, "{kind:?}");
        assert!(read_all(&origin) == kept, "{kind:?}: the origin was written");
        assert_eq!(snapshot.stats().full_chunk_writes, 1 + 8 + 2, "{kind:?}: whole chunks are not copied");
        // The origin overwrites the chunks that were written through the snapshot.
        origin.write_at(0, &bytes(77, SIZE), NONE).unwrap();
        assert!(read_all(&snapshot) == content, "{kind:?} after the origin was written");
        snapshot.flush().unwrap();
        // A reopened snapshot has the same content.
        let cow = Arc::clone(snapshot.cow());
        drop(snapshot);
        let again = origin.snapshot(cow, &config(StoreKind::Persistent, 4096)).unwrap();
        assert_eq!(again.chunk_bytes(), 8192, "the header's chunk counts");
        assert!(read_all(&again) == content, "{kind:?} opened again");
    }
}

#[test]
fn snapshots_of_one_origin_are_independent() {
    for kind in KINDS {
        let (origin, first) = origin(kind, SIZE);
        let make = |store, chunk| origin.snapshot(kind.make(COW_SIZE), &config(store, chunk)).unwrap();
        let old = make(StoreKind::Persistent, 4096);
        origin.write_at(40_960, &bytes(1, 65536), NONE).unwrap();
        let second = read_all(&origin);
        let middle = make(StoreKind::Transient, 65536);
        origin.write_at(81_920, &bytes(2, 131_072), NONE).unwrap();
        let third = read_all(&origin);
        let young = make(StoreKind::PersistentOverflow, 16384);
        assert_eq!(origin.snapshot_count(), 3);
        origin.write_at(0, &bytes(3, SIZE), NONE).unwrap();
        for (snapshot, content) in [(&old, &first), (&middle, &second), (&young, &third)] {
            assert!(read_all(snapshot) == *content, "{kind:?} {snapshot:?}");
        }
        drop(middle);
        assert_eq!(origin.snapshot_count(), 2);
        origin.write_at(0, &bytes(4, SIZE), NONE).unwrap();
        assert!(read_all(&old) == first && read_all(&young) == third, "{kind:?} after one was removed");
        old.remove();
        assert_eq!(old.read_at(0, &mut [0; 512]), Err(Error::Gone));
        assert_eq!(origin.snapshot_count(), 1);
    }
}

/// A store is filled by writes to the origin, or by writes to the snapshot itself.
#[test]
fn full_store_invalidates_snapshot_but_not_origin() {
    for kind in [Kind::Model, Kind::Deferred, Kind::Ram] {
        for store in [StoreKind::Persistent, StoreKind::PersistentOverflow, StoreKind::Transient] {
            // Each exception store has space for a few chunks only.
            let small = || kind.make(10 * 4096);
            let (origin, content) = origin(kind, SIZE);
            let by_origin = origin.snapshot(small(), &config(store, 4096)).unwrap();
            let by_itself = origin.snapshot(small(), &config(store, 4096)).unwrap();
            by_itself.write_at(4096, &bytes(9, 4096), NONE).unwrap();
            let failed = by_itself.write_at(0, &bytes(8, 16 * 4096), NONE);
            assert_eq!(failed, Err(Error::NoSpace), "{kind:?} {store}");
            if store == StoreKind::PersistentOverflow {
                assert_eq!(by_itself.status(), Status::Overflow);
                assert_eq!(
                    by_itself.write_at(4096, &[0; 512], NONE),
                    Err(Error::NoSpace),
                    "later ones fail too"
                );
                let shown = read(&by_itself, 100 * 4096, 4096);
                assert_eq!(shown, content[100 * 4096..101 * 4096], "reads stay correct");
            } else {
                assert_eq!(by_itself.status(), Status::Invalid);
                assert_eq!(by_itself.read_at(0, &mut [0; 512]), Err(Error::Media));
            }
            assert!(read_all(&origin) == content);
            assert!(read_all(&by_origin) == content);
            origin.write_at(0, &bytes(7, 64 * 4096), NONE).unwrap();
            assert_eq!(read(&origin, 0, 64 * 4096), bytes(7, 64 * 4096), "{kind:?} {store}");
            for snapshot in [&by_origin, &by_itself] {
                assert_eq!(snapshot.status().to_string(), "Invalid", "{kind:?} {store}");
                assert_eq!(snapshot.read_at(0, &mut [0; 512]), Err(Error::Media));
                assert_eq!(snapshot.write_at(0, &[0; 512], NONE), Err(Error::Media));
                assert_eq!(snapshot.flush(), Err(Error::Media));
                assert_eq!(snapshot.changes().unwrap().changes(0, 512, &mut |_| true), Err(Error::Gone));
            }
            // The store is also marked invalid on disk, so the snapshot stays invalid when it is
            // reopened.
            if store.is_persistent() {
                let cow = Arc::clone(by_origin.cow());
                drop(by_origin);
                let again = origin.snapshot(cow, &config(store, 4096)).unwrap();
                assert_eq!(again.status(), Status::Invalid);
            }
        }
    }
}

#[test]
fn failed_devices_invalidate_snapshot_but_not_origin() {
    for (writes_fail, kind) in
        [(false, StoreKind::Persistent), (true, StoreKind::Persistent), (true, StoreKind::Transient)]
    {
        let device = Arc::new(FaultyDisk::new(SIZE as usize, 512));
        let cow = Arc::new(FaultyDisk::new(COW_SIZE as usize, 512));
        let origin = Origin::new(device.clone());
        let snapshot = origin.snapshot(cow.clone(), &config(kind, 4096)).unwrap();
        origin.write_at(0, &bytes(1, 8192), NONE).unwrap();
        assert_eq!(read(&snapshot, 0, 8192), vec![0; 8192]);
        if writes_fail {
            cow.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        } else {
            device.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        }
        origin.write_at(4096, &bytes(2, 16384), NONE).unwrap();
        assert_eq!(snapshot.status(), Status::Invalid);
        device.heal();
        cow.heal();
        assert_eq!(read(&origin, 4096, 16384), bytes(2, 16384));
        assert_eq!((device.violations(), cow.violations()), (vec![], vec![]), "writes of one place met");
    }
}

#[test]
fn discards_follow_the_options() {
    for (zeroes, passdown) in [(false, false), (true, false), (true, true)] {
        let (origin, content) = origin(Kind::Model, SIZE);
        let config = Config {
            discard_zeroes_cow: zeroes,
            discard_passdown_origin: passdown,
            ..config(StoreKind::Persistent, 8192)
        };
        let snapshot = origin.snapshot(Kind::Model.make(COW_SIZE), &config).unwrap();
        assert_eq!(snapshot.geometry().discard_granularity, if zeroes { 8192 } else { 0 });
        snapshot.write_at(0, &bytes(1, 3 * 8192), NONE).unwrap();
        // Discards one chunk with an exception as a whole and another one in part, then two chunks
        // without exceptions.
        snapshot.discard(8192, 8192 + 4096).unwrap();
        snapshot.discard(5 * 8192, 2 * 8192).unwrap();
        let shown = read(&snapshot, 0, 3 * 8192);
        if zeroes {
            assert!(shown[8192..2 * 8192].iter().all(|&b| b == 0));
            assert_eq!(shown[2 * 8192 + 4096..], bytes(1, 3 * 8192)[2 * 8192 + 4096..]);
        } else {
            assert_eq!(shown, bytes(1, 3 * 8192));
        }
        assert_eq!(shown[..8192], bytes(1, 3 * 8192)[..8192]);
        let below = read(&origin, 5 * 8192, 8192);
        if passdown {
            assert!(below.iter().all(|&b| b == 0));
        } else {
            assert_eq!(below, content[5 * 8192..6 * 8192]);
            assert_eq!(read(&snapshot, 5 * 8192, 8192), below, "without an exception nothing is done");
        }
        // A discard of the whole device, most of which was never written.
        snapshot.discard(0, SIZE).unwrap();
        assert_eq!(snapshot.stats().exceptions, 3, "a discard makes no exception");
    }
}

#[test]
fn changes_report_chunks_of_the_snapshot() {
    let (origin, _) = origin(Kind::Model, SIZE);
    let snapshot = origin.snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
    origin.write_at(4096 + 512, &[1; 512], NONE).unwrap();
    snapshot.write_at(64 * 4096, &[2; 8192], NONE).unwrap();
    let mut own = Vec::new();
    let (mut at, changes) = (0, snapshot.changes().unwrap());
    while at < SIZE {
        at += changes
            .changes(at, SIZE - at, &mut |row| {
                if row.own {
                    own.extend((row.offset..row.offset + row.len).step_by(512));
                }
                true
            })
            .unwrap();
    }
    let expected: Vec<u64> = (4096..8192).chain(64 * 4096..66 * 4096).step_by(512).collect();
    assert_eq!(own, expected);
    assert_eq!(changes.changes(SIZE, 512, &mut |_| true), Err(Error::OutOfRange));
    assert!(origin.changes().is_none());
}

#[test]
fn grown_origin_is_copied_up_to_snapshot_size() {
    let device = Arc::new(Model::new(SIZE as usize + 512, 512));
    device.write_at(0, &bytes(1, SIZE + 512), NONE).unwrap();
    let origin = Origin::new(device.clone());
    let snapshot = origin.snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
    device.grow(SIZE as usize * 2);
    assert_eq!((snapshot.geometry().size, origin.geometry().size), (SIZE + 512, 2 * SIZE));
    origin.write_at(0, &bytes(2, 2 * SIZE), NONE).unwrap();
    assert!(read_all(&snapshot) == bytes(1, SIZE + 512));
    assert_eq!(snapshot.stats().copied_chunks, SIZE / 4096 + 1, "what lies beyond is not copied");
    assert_eq!(snapshot.read_at(SIZE + 512, &mut [0; 512]), Err(Error::OutOfRange));
}

#[test]
fn impossible_snapshots_are_refused() {
    let plain = config(StoreKind::Persistent, 4096);
    let device = Kind::Model.make(SIZE);
    let origin = Origin::new(Arc::clone(&device));
    let refused =
        |cow: Arc<dyn Device>, config: &Config| origin.snapshot(cow, config).map(|_| ()).unwrap_err();
    assert!(matches!(refused(device.clone(), &plain), SetupError::SameDevice));
    let unforced = Config { force: false, ..plain };
    let error = refused(Kind::Model.make(COW_SIZE), &unforced);
    assert!(matches!(error, SetupError::Volatile("origin")), "{error}");
    assert!(error.to_string().contains('N'), "{error}");
    let passdown = Config { discard_passdown_origin: true, ..plain };
    assert!(matches!(refused(Kind::Model.make(COW_SIZE), &passdown), SetupError::Passdown));
    let odd = Origin::new(Kind::Model.make(SIZE + 512));
    let error = odd.snapshot(Arc::new(Model::new(COW_SIZE as usize, 4096)), &plain).unwrap_err();
    assert!(matches!(error, SetupError::OddSize { .. }), "{error}");
    let cow = Kind::Model.make(COW_SIZE);
    let _snapshot = origin.snapshot(Arc::clone(&cow), &plain).unwrap();
    assert!(matches!(refused(cow, &plain), SetupError::InUse));
    let cow = Kind::Model.make(COW_SIZE);
    let pending = origin.prepare_snapshot(Arc::clone(&cow), &plain).unwrap();
    assert!(matches!(refused(Arc::clone(&cow), &plain), SetupError::InUse));
    drop(pending);
    origin.snapshot(cow, &plain).unwrap();
    // A transient snapshot of a volatile origin needs no force, and neither does a persistent
    // snapshot of a file.
    let transient = Config { kind: StoreKind::Transient, ..unforced };
    origin.snapshot(Kind::Model.make(COW_SIZE), &transient).unwrap();
    let file = Origin::new(Kind::File.make(SIZE));
    file.snapshot(Kind::File.make(COW_SIZE), &unforced).unwrap();
}

/// The devices are released with the last handle: neither a reference cycle of origin and snapshots
/// nor a stopped merge keeps them.
#[test]
fn dropped_handles_release_devices() {
    for kind in [Kind::Model, Kind::Deferred, Kind::File] {
        for origin_first in [false, true] {
            let (device, cow) = (kind.make(SIZE), kind.make(COW_SIZE));
            let origin = Origin::new(Arc::clone(&device));
            let snapshot = origin.snapshot(Arc::clone(&cow), &config(StoreKind::Persistent, 4096)).unwrap();
            let pending =
                origin.prepare_snapshot(kind.make(COW_SIZE), &config(StoreKind::Transient, 4096)).unwrap();
            origin.write_at(0, &bytes(1, 65536), NONE).unwrap();
            drop(pending);
            if origin_first {
                drop(origin);
                drop(snapshot);
            } else {
                snapshot.merge().unwrap();
                snapshot.stop_merge();
                drop(snapshot);
                drop(origin);
            }
            let start = Instant::now();
            while Arc::strong_count(&device) + Arc::strong_count(&cow) > 2 {
                assert!(start.elapsed() < Duration::from_secs(10), "{kind:?}: the devices are still held");
                std::thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[test]
fn flush_of_snapshot_flushes_cow_device_only() {
    let (below, cow) =
        (Arc::new(FaultyDisk::new(SIZE as usize, 512)), Arc::new(FaultyDisk::new(COW_SIZE as usize, 512)));
    let origin = Origin::new(below.clone());
    let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Transient, 4096)).unwrap();
    let flushes = || (below.counts().flushes, cow.counts().flushes);
    let (origins, cows) = flushes();
    snapshot.flush().unwrap();
    assert_eq!(flushes(), (origins, cows + 1));
    origin.flush().unwrap();
    assert_eq!(flushes(), (origins + 1, cows + 1));
}
