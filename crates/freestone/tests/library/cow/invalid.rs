//! Snapshots that are given up: what their users and the origin's are answered meanwhile, and what
//! is there after a crash. A crash here is the bytes that both disks hold.

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
/// Longer than anything takes that does not wait.
const A_WHILE: Duration = Duration::from_millis(700);
/// Longer than the origin waits.
const LONG: Duration = Duration::from_secs(30);

struct Pair {
    below: Arc<Faulty>,
    cow: Arc<Faulty>,
    origin: Origin,
    snapshot: Snapshot,
}

/// An origin with content, and a snapshot of it in which one chunk was written.
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
    /// The snapshot after a crash.
    fn after_a_crash(&self) -> Snapshot {
        // First: what the origin is overwritten with later is not in it.
        let below = copy_of(&self.below);
        Origin::new(below).snapshot(copy_of(&self.cow), &config(StoreKind::Persistent, CHUNK)).unwrap()
    }

    fn shown_at_first() -> Vec<u8> {
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

/// As long as a crash would bring the snapshot back as a good one, the origin is what it was.
#[test]
fn an_origin_waits_until_the_disk_says_that_its_snapshot_is_lost() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), When::Always, FAILS);
    thread::scope(|scope| {
        // One that needs a copy, one that comes later and needs another, and one that has its copy.
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
        assert!(shown == Pair::shown_at_first(), "a snapshot that came back shows what is newer");
        assert!(below == bytes(1, SIZE), "the origin was written");
        assert!(!pair.snapshot.is_unmarked());
    });
    assert_eq!(pair.after_a_crash().status(), Status::Invalid);
    for chunk in [1, 3, 4] {
        assert!(read(&*pair.below, chunk * CHUNK, CHUNK) == bytes(5, CHUNK));
    }
}

/// A COW device that is dead for good does not take the origin with it.
#[test]
fn an_origin_does_not_wait_for_a_dead_disk_for_ever() {
    let pair = pair(StoreKind::Persistent);
    pair.cow.fault(Some(Op::Write), When::Always, FAILS);
    let start = Instant::now();
    pair.origin.write_at(3 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
    assert!(start.elapsed() >= A_WHILE, "the disk was not tried again");
    assert!(start.elapsed() < LONG && pair.snapshot.is_unmarked());
    // Only once.
    let start = Instant::now();
    pair.origin.write_at(4 * CHUNK, &bytes(5, CHUNK), NONE).unwrap();
    assert!(start.elapsed() < A_WHILE);
    pair.cow.heal();
    eventually("the disk still says that the snapshot is good", || !pair.snapshot.is_unmarked());
    assert_eq!(pair.after_a_crash().status(), Status::Invalid);
}

/// Nor does anybody wait for a snapshot that was removed.
#[test]
fn an_origin_does_not_wait_for_a_snapshot_that_is_removed() {
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

/// A moment after its store is lost a snapshot is too; nobody is told in between that there is no
/// room.
#[test]
fn a_store_that_is_being_given_up_is_not_full() {
    for kind in [StoreKind::Persistent, StoreKind::PersistentOverflow] {
        let pair = pair(kind);
        // The data of a chunk; its entry, which fails; the header, which does not come to an end.
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
