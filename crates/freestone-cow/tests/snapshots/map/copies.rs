//! Copies in flight: progress, bounds and shared commits, and reads beside them.

use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking, Completion, Device, IoBuf, Op, Request};
use freestone_cow::cow::{Origin, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Rng};

use super::{COW_SIZE, NONE, SIZE, origin};
use crate::support::{Kind, bytes, config, read_all};

/// A snapshot read that is in flight while the origin is overwritten returns the old content. The
/// read does not delay the write.
#[test]
fn slow_read_returns_old_content_without_delays() {
    let device = Arc::new(FaultyDisk::new(SIZE as usize, 512));
    let origin = Origin::new(device.clone());
    origin.write_at(0, &bytes(1, 32768), NONE).unwrap();
    let snapshot = origin.snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
    let reads = device.counts().reads;
    device.fault(Some(Op::Read), FaultSchedule::At(reads), FaultEffect::Hang);
    let (tx, rx) = mpsc::channel();
    snapshot.submit(
        Request::read(0, 32768),
        IoBuf::zeroed(32768).unwrap(),
        Completion::new(move |outcome, buffer| tx.send((outcome, buffer.to_vec())).unwrap()),
    );
    device.wait_held(1);
    origin.write_at(4096, &bytes(2, 8192), NONE).unwrap();
    assert!(rx.try_recv().is_err());
    // The disk completes the read that hung, with the new content.
    device.heal();
    let (outcome, buffer) = rx.recv_timeout(Duration::from_secs(10)).unwrap();
    assert_eq!(outcome, Ok(()));
    assert!(buffer == bytes(1, 32768), "the read shows what was written after the snapshot");
    assert!(snapshot.stats().rereads > 0);
}

/// With at most one copy in flight, many writes to the origin and its snapshots complete.
#[test]
fn single_copy_in_flight_makes_progress() {
    for kind in [Kind::Model, Kind::Deferred, Kind::Sometimes] {
        let (origin, content) = origin(kind, SIZE);
        let first = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
        let second = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 16384)).unwrap();
        for snapshot in [&first, &second] {
            snapshot.set_cow_threshold(1);
        }
        let (tx, rx) = mpsc::channel();
        let start = Instant::now();
        // Submits all writes before it waits, because that needs no thread for each write.
        let mut sent = 0;
        let mut rng = Rng::new(5);
        for round in 0..300 {
            let len = 512 << rng.below(6);
            let offset = rng.below((SIZE - len) / 512) * 512;
            let devices: [&dyn Device; 3] = [&origin, &first, &second];
            // The second snapshot is never written, so its expected content is known.
            let device = devices[(round % 2) as usize];
            let tx = tx.clone();
            let data = IoBuf::copy_of(&bytes(round, len)).unwrap();
            device.submit(
                Request::write(offset, len),
                data,
                Completion::new(move |outcome, _| tx.send(outcome).unwrap()),
            );
            sent += 1;
        }
        for _ in 0..sent {
            let left = Duration::from_secs(60).saturating_sub(start.elapsed());
            assert_eq!(rx.recv_timeout(left), Ok(Ok(())), "{kind:?}: a writer is stuck");
        }
        assert!(read_all(&second) == content, "{kind:?}");
    }
}

/// The limit of copies in flight holds, and can change while requests wait.
#[test]
fn copies_in_flight_are_bounded() {
    let device = Arc::new(FaultyDisk::new(SIZE as usize, 512));
    let origin = Origin::new(device.clone());
    let snapshot = origin.snapshot(Kind::Ram.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
    snapshot.set_cow_threshold(3);
    device.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Hang);
    let (tx, rx) = mpsc::channel();
    for chunk in 0..64 {
        let tx = tx.clone();
        let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
        origin.submit(Request::write(chunk * 4096, 512), IoBuf::copy_of(&[1; 512]).unwrap(), done);
    }
    device.wait_held(3);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(device.counts().held, 3);
    snapshot.set_cow_threshold(10);
    device.wait_held(10);
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(device.counts().held, 10);
    device.heal();
    for _ in 0..64 {
        assert_eq!(rx.recv_timeout(Duration::from_secs(20)), Ok(Ok(())));
    }
    assert_eq!(snapshot.stats().copied_chunks, 64);
}

/// Pending exceptions share commits of the exception store.
#[test]
fn large_write_shares_commits() {
    let origin = Origin::new(Kind::Deferred.make(SIZE));
    let snapshot =
        origin.snapshot(Kind::Deferred.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
    origin.write_at(0, &bytes(1, 128 * 4096), NONE).unwrap();
    let stats = snapshot.stats();
    assert_eq!((stats.copied_chunks, stats.exceptions), (128, 128));
    assert!(stats.commits < 16 && stats.largest_commit > 8, "{stats:?}");
}
