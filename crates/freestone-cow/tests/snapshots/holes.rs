//! Discards and write zeroes over ranges of the origin that already read as zeroes: the origin
//! copies nothing, and its snapshots keep their content.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;

use freestone_core::device::{Blocking, Device, Flags, Op};
use freestone_cow::cow::{MergeStatus, Origin, Snapshot, Status, StoreKind};
use freestone_testkit::{FaultyDisk, Model, TestDevice};

use crate::support::{CHUNK, KINDS, Kind, bytes, config, read, read_all};

const NONE: Flags = Flags::empty();
const CHUNKS: u64 = 64;
const SIZE: u64 = CHUNKS * CHUNK;
/// Size in bytes of a COW device with space for a dozen copied chunks and for the store's metadata.
const SMALL_STORE: u64 = 16 * CHUNK;
/// Chunks of the origin with data. None of them are adjacent, so each one has holes on both sides.
const DATA: [u64; 3] = [0, 17, 40];

/// Requests after which a range reads as zeroes.
const EMPTYING: [(Op, Flags); 3] =
    [(Op::Discard, NONE), (Op::WriteZeroes, Flags::MAY_FREE), (Op::WriteZeroes, NONE)];

fn snapshot(origin: &Origin) -> Snapshot {
    let cow = Arc::new(Model::new(SMALL_STORE as usize, 512));
    origin.snapshot(cow, &config(StoreKind::Persistent, CHUNK)).unwrap()
}

fn ask(device: &dyn Device, (op, flags): (Op, Flags), offset: u64, len: u64) {
    match op {
        Op::Discard => device.discard(offset, len),
        _ => device.write_zeroes(offset, len, flags),
    }
    .unwrap();
}

type Look = Arc<Mutex<Option<Box<dyn FnOnce() + Send>>>>;

/// Returns a device that runs the hook once after it has determined its extents, but before it
/// returns them.
fn hooked() -> (Arc<TestDevice>, Look) {
    let look = Look::default();
    let hook = Arc::clone(&look);
    let device = TestDevice::over(Arc::new(Model::new(SIZE as usize, 512))).on_extents(move || {
        if let Some(look) = hook.lock().unwrap().take() {
            look();
        }
    });
    (Arc::new(device), look)
}

#[test]
fn trim_of_holes_copies_only_data() {
    for kind in KINDS {
        for emptying in EMPTYING {
            let below = kind.make(SIZE);
            for chunk in DATA {
                below.write_at(chunk * CHUNK, &bytes(chunk, CHUNK), NONE).unwrap();
            }
            let before = read_all(&*below);
            let origin = Origin::new(below);
            let snapshot = snapshot(&origin);
            // The range starts and ends in the middle of a chunk.
            ask(&origin, emptying, 512, SIZE - 1024);
            let case = format!("{kind:?} {emptying:?}");
            assert!(matches!(snapshot.status(), Status::Usage(_)), "{case}: {}", snapshot.status());
            assert_eq!(snapshot.stats().copied_chunks, DATA.len() as u64, "{case}");
            ask(&origin, emptying, 0, SIZE);
            assert!(read_all(&snapshot) == before, "{case}: the snapshot has changed");
            assert!(read_all(&origin).iter().all(|byte| *byte == 0), "{case}: the origin has data");
        }
    }
}

#[test]
fn trim_copies_if_origin_has_no_extents() {
    let origin = Origin::new(Arc::new(FaultyDisk::new(SIZE as usize, 512)));
    let snapshot = snapshot(&origin);
    ask(&origin, EMPTYING[0], 0, 4 * CHUNK);
    assert_eq!(snapshot.stats().copied_chunks, 4);
}

#[test]
fn write_beside_trim_of_hole_keeps_snapshot() {
    for emptying in EMPTYING {
        let (below, look) = hooked();
        let origin = Origin::new(below);
        let snapshot = snapshot(&origin);
        let (writer, data) = (origin.clone(), bytes(3, CHUNK));
        // The hook completes a write before the caller gets the extents, which still report the
        // written chunk as a hole.
        *look.lock().unwrap() = Some(Box::new(move || {
            thread::spawn(move || writer.write_at(5 * CHUNK, &data, NONE).unwrap()).join().unwrap();
        }));
        ask(&origin, emptying, 0, SIZE);
        assert!(look.lock().unwrap().is_none(), "{emptying:?}: nobody has looked");
        assert_eq!(snapshot.stats().copied_chunks, 1, "{emptying:?}");
        assert!(read_all(&snapshot).iter().all(|byte| *byte == 0), "{emptying:?}");
        let shown = read(&origin, 5 * CHUNK, CHUNK);
        assert!(shown == bytes(3, CHUNK) || shown == vec![0; CHUNK as usize], "{emptying:?}: a torn chunk");
    }
}

#[test]
fn snapshot_beside_trim_of_hole_begins_after_it() {
    let (below, look) = hooked();
    let origin = Origin::new(below);
    let _first = snapshot(&origin);
    let begun = Arc::new(AtomicBool::new(false));
    let (taker, seen) = (origin.clone(), Arc::clone(&begun));
    let second = Arc::new(Mutex::new(None));
    let handle = Arc::clone(&second);
    *look.lock().unwrap() = Some(Box::new(move || {
        let ended = Arc::clone(&seen);
        *handle.lock().unwrap() = Some(thread::spawn(move || {
            let snapshot = snapshot(&taker);
            ended.store(true, Ordering::SeqCst);
            snapshot
        }));
        thread::sleep(std::time::Duration::from_millis(50));
        assert!(!seen.load(Ordering::SeqCst), "a snapshot has begun while a trim is under way");
    }));
    ask(&origin, EMPTYING[0], 0, SIZE);
    let second = second.lock().unwrap().take().unwrap().join().unwrap();
    assert!(begun.load(Ordering::SeqCst));
    assert!(read_all(&second).iter().all(|byte| *byte == 0));
}

#[test]
fn zeroes_over_holes_of_snapshot_take_no_room() {
    for kind in KINDS {
        let below = kind.make(SIZE);
        for chunk in DATA {
            below.write_at(chunk * CHUNK, &bytes(chunk, CHUNK), NONE).unwrap();
        }
        let origin = Origin::new(below);
        let snapshot = snapshot(&origin);
        snapshot.write_at(5 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
        snapshot.write_zeroes(512, SIZE - 1024, NONE).unwrap();
        snapshot.write_zeroes(0, SIZE, Flags::MAY_FREE).unwrap();
        assert_eq!(snapshot.stats().exceptions, DATA.len() as u64 + 1, "{kind:?}");
        origin.write_at(8 * CHUNK, &bytes(8, CHUNK), NONE).unwrap();
        assert!(read_all(&snapshot).iter().all(|byte| *byte == 0), "{kind:?}");
    }
}

#[test]
fn origin_write_beside_zeroes_of_snapshot_keeps_them() {
    let (below, look) = hooked();
    let origin = Origin::new(below);
    let snapshot = snapshot(&origin);
    let (writer, data) = (origin.clone(), bytes(3, CHUNK));
    *look.lock().unwrap() = Some(Box::new(move || {
        thread::spawn(move || writer.write_at(5 * CHUNK, &data, NONE).unwrap()).join().unwrap();
    }));
    snapshot.write_zeroes(0, SIZE, NONE).unwrap();
    assert!(look.lock().unwrap().is_none(), "nobody has looked");
    assert!(read_all(&snapshot).iter().all(|byte| *byte == 0));
    assert!(read(&origin, 5 * CHUNK, CHUNK) == bytes(3, CHUNK));
}

#[test]
fn merge_of_zeroes_over_holes_copies_nothing() {
    let origin = Origin::new(Kind::Model.make(SIZE));
    let merged = origin.snapshot(Kind::Model.make(2 * SIZE), &config(StoreKind::Persistent, CHUNK)).unwrap();
    let other = snapshot(&origin);
    merged.write_at(0, &vec![0; (SIZE / 2) as usize], NONE).unwrap();
    merged.write_at(SIZE / 2, &bytes(1, CHUNK), NONE).unwrap();
    merged.merge().unwrap();
    assert_eq!(merged.wait_merge(), MergeStatus::Finished);
    assert_eq!(other.stats().copied_chunks, 1);
    assert!(read_all(&other).iter().all(|byte| *byte == 0));
    assert!(read(&origin, SIZE / 2, CHUNK) == bytes(1, CHUNK));
    assert!(read(&origin, 0, SIZE / 2).iter().all(|byte| *byte == 0));
}
