//! Snapshots that become invalid: completions of requests meanwhile, and the state after a crash. A
//! crash is simulated by copying the bytes of both disks.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use freestone::cow::{Origin, Snapshot, Status, StoreKind};
use freestone::device::{Blocking, Device, Error, Flags, Op};
use freestone_testkit::{Faulty, Model, What, When};

use crate::cow::support::{CHUNK, bytes, config, read, read_all};

const SIZE: u64 = 64 << 10;
const COW_SIZE: u64 = 512 << 10;
const BLOCK: usize = 512;
const NONE: Flags = Flags::empty();
const FAILS: What = What::Fail(Error::Media);
/// Longer than any operation that does not wait.
const A_WHILE: Duration = Duration::from_millis(700);
/// Longer than the origin waits for the header.
const LONG: Duration = Duration::from_secs(30);

struct Pair {
    below: Arc<Faulty>,
    cow: Arc<Faulty>,
    origin: Origin,
    snapshot: Snapshot,
}

/// Returns an origin with content, and a snapshot with one chunk written.
fn pair(kind: StoreKind) -> Pair {
    let faulty = |size: u64| Arc::new(Faulty::new(size as usize, BLOCK as u32));
    let (below, cow) = (faulty(SIZE), faulty(COW_SIZE));
    below.write_at(0, &bytes(1, SIZE), NONE).unwrap();
    let origin = Origin::new(below.clone());
    let snapshot = origin.snapshot(cow.clone(), &config(kind, CHUNK)).unwrap();
    snapshot.write_at(CHUNK, &bytes(2, CHUNK), NONE).unwrap();
    Pair { below, cow, origin, snapshot }
}

fn copy_of(device: &Faulty) -> Arc<Model> {
    let model = Model::new(device.geometry().size as usize, BLOCK as u32);
    model.write_at(0, &read_all(device), NONE).unwrap();
    Arc::new(model)
}

impl Pair {
    /// Returns the snapshot after a crash.
    fn after_a_crash(&self) -> Snapshot {
        // Copied first, so that later writes to the origin are not included.
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

/// The origin does not change while a crash would bring the snapshot back as valid.
#[test]
fn origin_waits_until_invalid_header_is_on_disk() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), When::Always, FAILS);
    thread::scope(|scope| {
        // A write that needs a copy, a later one that needs another copy, and one whose chunk has a
        // copy.
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

/// A COW device that failed permanently does not block the origin.
#[test]
fn origin_stops_waiting_for_failed_cow_device() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), When::Always, FAILS);
    let start = Instant::now();
    pair.origin.write_at(3 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
    assert!(start.elapsed() >= A_WHILE, "the disk was not tried again");
    assert!(start.elapsed() < LONG && pair.snapshot.is_unmarked());
    // Only the first write waits.
    let start = Instant::now();
    pair.origin.write_at(4 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
    assert!(start.elapsed() < A_WHILE);
    pair.cow.heal();
    eventually("the disk still says that the snapshot is good", || !pair.snapshot.is_unmarked());
    assert_eq!(pair.after_a_crash().status(), Status::Invalid);
}

/// Writes do not wait for a removed snapshot either.
#[test]
fn origin_does_not_wait_for_removed_snapshot() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), When::Always, FAILS);
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

/// A snapshot becomes invalid soon after its store fails. Requests in between must not fail with
/// "no space".
#[test]
fn store_becoming_invalid_is_not_reported_full() {
    for kind in [StoreKind::Persistent, StoreKind::PersistentOverflow] {
        let pair = pair(kind);
        // The data of a chunk succeeds, its entry fails, and the header hangs.
        let next = pair.cow.counts().writes;
        pair.cow.fault(Some(Op::Write), When::At(next + 1), FAILS);
        pair.cow.fault(Some(Op::Write), When::From(next + 2), What::Hang);
        let (pair, data) = (&pair, &bytes(5, CHUNK));
        thread::scope(|scope| {
            let first = scope.spawn(|| pair.snapshot.write_at(3 * CHUNK, data, NONE));
            pair.cow.await_held(1);
            let second = pair.snapshot.write_at(4 * CHUNK, data, NONE);
            let status = pair.snapshot.status();
            pair.cow.heal();
            assert_eq!(second, Err(Error::Media), "{kind}");
            assert_eq!(status, Status::Invalid, "{kind}");
            assert_eq!(first.join().unwrap(), Err(Error::Media), "{kind}");
        });
    }
}
