//! Snapshots that become invalid: results of requests meanwhile, and the state after a crash. The
//! tests simulate a crash by copying the bytes of the origin's disk and of the COW device.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_cow::cow::{Origin, Snapshot, Status, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model};

use crate::support::{CHUNK, bytes, config, read, read_all};

const SIZE: u64 = 64 << 10;
const COW_SIZE: u64 = 512 << 10;
const BLOCK: usize = 512;
const NONE: Flags = Flags::empty();
const FAILS: FaultEffect = FaultEffect::Fail(Error::Media);
/// Longer than any operation takes if it does not wait for the COW device.
const A_WHILE: Duration = Duration::from_millis(700);
/// Longer than the origin waits for a failing COW device to store the invalid header.
const LONG: Duration = Duration::from_secs(30);

struct Pair {
    below: Arc<FaultyDisk>,
    cow: Arc<FaultyDisk>,
    origin: Origin,
    snapshot: Snapshot,
}

/// Returns an origin with content, and a snapshot with one written chunk.
fn pair(kind: StoreKind) -> Pair {
    let faulty = |size: u64| Arc::new(FaultyDisk::new(size as usize, BLOCK as u32));
    let (below, cow) = (faulty(SIZE), faulty(COW_SIZE));
    below.write_at(0, &bytes(1, SIZE), NONE).unwrap();
    let origin = Origin::new(below.clone());
    let snapshot = origin.snapshot(cow.clone(), &config(kind, CHUNK)).unwrap();
    snapshot.write_at(CHUNK, &bytes(2, CHUNK), NONE).unwrap();
    Pair { below, cow, origin, snapshot }
}

fn copy_of(device: &FaultyDisk) -> Arc<Model> {
    let model = Model::new(device.geometry().size as usize, BLOCK as u32);
    model.write_at(0, &read_all(device), NONE).unwrap();
    Arc::new(model)
}

impl Pair {
    /// Returns the snapshot as it opens after a crash.
    fn after_a_crash(&self) -> Snapshot {
        // The origin is copied first, so that the copy has no write that completed after the copy
        // of the COW device.
        let below = copy_of(&self.below);
        Origin::new(below).snapshot(copy_of(&self.cow), &config(StoreKind::Persistent, CHUNK)).unwrap()
    }

    fn initial_content() -> Vec<u8> {
        let mut shown = bytes(1, SIZE);
        shown[CHUNK as usize..2 * CHUNK as usize].copy_from_slice(&bytes(2, CHUNK));
        shown
    }
}

fn eventually(what: &str, is: impl Fn() -> bool) {
    let start = Instant::now();
    while !is() {
        assert!(start.elapsed() < LONG, "{what}");
        thread::sleep(Duration::from_millis(5));
    }
}

/// The origin does not change as long as the snapshot would open as valid after a crash.
#[test]
fn origin_waits_until_invalid_header_is_on_disk() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), FaultSchedule::Always, FAILS);
    thread::scope(|scope| {
        // Three writes: one that needs a copy, a later one that needs another copy, and one to a
        // chunk that was copied before.
        for (number, chunk) in [3, 4, 1].into_iter().enumerate() {
            let (origin, snapshot) = (&pair.origin, &pair.snapshot);
            scope.spawn(move || origin.write_at(chunk * CHUNK, &bytes(5, CHUNK), NONE).unwrap());
            if number == 0 {
                eventually("the snapshot is not given up", || snapshot.status() == Status::Invalid);
            }
        }
        thread::sleep(A_WHILE);
        let again = pair.after_a_crash();
        let shown = read_all(&again);
        let below = read_all(&*pair.below);
        pair.cow.heal();
        assert_ne!(again.status(), Status::Invalid);
        assert!(shown == Pair::initial_content(), "a snapshot that came back shows what is newer");
        assert!(below == bytes(1, SIZE), "the origin was written");
        assert!(!pair.snapshot.is_unmarked());
    });
    assert_eq!(pair.after_a_crash().status(), Status::Invalid);
    for chunk in [1, 3, 4] {
        assert!(read(&*pair.below, chunk * CHUNK, CHUNK) == bytes(5, CHUNK));
    }
}

/// A COW device that always fails does not block the origin forever.
#[test]
fn origin_stops_waiting_for_failed_cow_device() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), FaultSchedule::Always, FAILS);
    let start = Instant::now();
    pair.origin.write_at(3 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
    assert!(start.elapsed() >= A_WHILE, "the disk was not tried again");
    assert!(start.elapsed() < LONG && pair.snapshot.is_unmarked());
    // Only the first write waits; later writes do not.
    let start = Instant::now();
    pair.origin.write_at(4 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
    assert!(start.elapsed() < A_WHILE);
    pair.cow.heal();
    eventually("the disk still says that the snapshot is good", || !pair.snapshot.is_unmarked());
    assert_eq!(pair.after_a_crash().status(), Status::Invalid);
}

/// A write that waits for the invalid header completes soon after the snapshot is removed.
#[test]
fn origin_does_not_wait_for_removed_snapshot() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), FaultSchedule::Always, FAILS);
    thread::scope(|scope| {
        let writer = scope.spawn(|| {
            pair.origin.write_at(3 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
            Instant::now()
        });
        eventually("the snapshot is not given up", || pair.snapshot.status() == Status::Invalid);
        let removed = Instant::now();
        pair.snapshot.remove();
        let written = writer.join().unwrap();
        assert!(written.saturating_duration_since(removed) < A_WHILE);
    });
}

/// A snapshot becomes invalid soon after its exception store fails. Requests in between must not
/// fail with "no space".
#[test]
fn store_becoming_invalid_is_not_reported_full() {
    for kind in [StoreKind::Persistent, StoreKind::PersistentOverflow] {
        let pair = pair(kind);
        // The write of the chunk's data succeeds, the write of its entry fails, and the write of
        // the invalid header hangs.
        let next = pair.cow.counts().writes;
        pair.cow.fault(Some(Op::Write), FaultSchedule::At(next + 1), FAILS);
        pair.cow.fault(Some(Op::Write), FaultSchedule::From(next + 2), FaultEffect::Hang);
        let (pair, data) = (&pair, &bytes(5, CHUNK));
        thread::scope(|scope| {
            let first = scope.spawn(|| pair.snapshot.write_at(3 * CHUNK, data, NONE));
            pair.cow.wait_held(1);
            let second = pair.snapshot.write_at(4 * CHUNK, data, NONE);
            let status = pair.snapshot.status();
            pair.cow.heal();
            assert_eq!(second, Err(Error::Media), "{kind}");
            assert_eq!(status, Status::Invalid, "{kind}");
            assert_eq!(first.join().unwrap(), Err(Error::Media), "{kind}");
        });
    }
}
