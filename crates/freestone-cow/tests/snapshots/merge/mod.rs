//! Merges of snapshots into their origin: during I/O, stopped and resumed, and with crashes at
//! every step.

mod crashes;
mod durable;
mod finished;
mod marks;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use freestone_core::consistency_group;
use freestone_core::device::{Blocking, Completion, Device, Error, Flags, IoBuf, Op, Request};
use freestone_cow::cow::{MergeFailure, MergeSetupError, MergeStatus, Origin, Snapshot, Status, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng, TestDevice};

use crate::support::{KINDS, Kind, Stop, bytes, config, read, read_all};

const SIZE: u64 = 512 << 10;
const COW_SIZE: u64 = 4 << 20;
const NONE: Flags = Flags::empty();

/// Writes random ranges to the device and updates the expected `content`.
fn write_random_ranges(device: &dyn Device, content: &mut [u8], seed: u64, writes: u32) {
    let mut rng = Rng::new(seed);
    for _ in 0..writes {
        let len = 512 << rng.below(6);
        let offset = rng.below((content.len() as u64 - len) / 512 + 1) * 512;
        let mut data = vec![0; len as usize];
        rng.content(&mut data);
        device.write_at(offset, &data, NONE).unwrap();
        content[offset as usize..][..data.len()].copy_from_slice(&data);
    }
}

fn is_empty(snapshot: &Snapshot) -> bool {
    matches!(snapshot.status(), Status::Usage(usage) if usage.allocated == usage.metadata)
}

#[test]
fn merge_writes_snapshot_content_to_origin() {
    for kind in KINDS {
        for chunk in [4096, 65536] {
            let device = kind.make(SIZE + 1024);
            device.write_at(0, &bytes(1, SIZE), NONE).unwrap();
            let origin = Origin::new(Arc::clone(&device));
            let snapshot =
                origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, chunk)).unwrap();
            let other = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Transient, 16384)).unwrap();
            let frozen = read_all(&other);
            let mut content = frozen.clone();
            write_random_ranges(&snapshot, &mut content, 2, 40);
            origin.write_at(0, &bytes(3, SIZE / 2), NONE).unwrap();
            assert_eq!(snapshot.merge_status(), MergeStatus::None);
            snapshot.merge().unwrap();
            // From the start of the merge, origin and snapshot show the snapshot's content.
            assert!(read_all(&origin) == content, "{kind:?}: the origin shows what is half merged");
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            assert!(read_all(&*device) == content, "{kind:?}: the device is not what was merged");
            assert!(read_all(&snapshot) == content && read_all(&origin) == content);
            assert!(read_all(&other) == frozen, "{kind:?}: another snapshot changed");
            assert!(is_empty(&snapshot), "{:?}", snapshot.status());
            assert_eq!(origin.snapshot_count(), 1);
            snapshot.merge().unwrap();
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            // After the merge, both handles work as the origin, and a new snapshot keeps its
            // content.
            let next = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
            snapshot.write_at(4096, &bytes(4, 8192), Flags::FUA).unwrap();
            assert_eq!(read(&origin, 4096, 8192), bytes(4, 8192));
            assert!(read_all(&next) == content, "{kind:?}");
        }
    }
}

#[test]
fn io_continues_during_merge() {
    for kind in [Kind::Model, Kind::Sometimes, Kind::Deferred, Kind::Ram] {
        let device = kind.make(SIZE);
        let origin = Origin::new(Arc::clone(&device));
        let snapshot = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
        let other = origin.snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 8192)).unwrap();
        let mut content = vec![0; SIZE as usize];
        write_random_ranges(&snapshot, &mut content, 5, 300);
        // From here on, origin and snapshot show the same content.
        snapshot.merge().unwrap();
        let stop = AtomicBool::new(false);
        // Each thread owns a part of the device, so it knows the content of that part.
        let part = SIZE as usize / 4;
        let mut parts: Vec<&mut [u8]> = content.chunks_mut(part).collect();
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            for (number, mine) in parts.iter_mut().enumerate() {
                let (origin, snapshot, stop) = (&origin, &snapshot, &stop);
                scope.spawn(move || {
                    let base = (number * part) as u64;
                    let mut rng = Rng::new(number as u64);
                    while !stop.load(Ordering::SeqCst) {
                        let device: &dyn Device = if rng.chance(50) { origin } else { snapshot };
                        let len = 512 << rng.below(6);
                        let at = (rng.below((part as u64 - len) / 512 + 1) * 512) as usize;
                        let range = at..at + len as usize;
                        match rng.below(10) {
                            0..5 => {
                                let back = read(device, base + at as u64, len);
                                assert!(back == mine[range], "{kind:?}: a read during the merge");
                            }
                            5 => {
                                device.write_zeroes(base + at as u64, len, Flags::MAY_FREE).unwrap();
                                mine[range].fill(0);
                            }
                            6 => device.flush().unwrap(),
                            _ => {
                                let mut data = vec![0; len as usize];
                                rng.content(&mut data);
                                device.write_at(base + at as u64, &data, NONE).unwrap();
                                mine[range].copy_from_slice(&data);
                            }
                        }
                    }
                });
            }
            for _ in 0..4 {
                snapshot.stop_merge();
                std::thread::sleep(std::time::Duration::from_millis(3));
                snapshot.merge().unwrap();
            }
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
        });
        assert!(read_all(&*device) == content, "{kind:?}");
        assert!(read_all(&other) == vec![0; SIZE as usize], "{kind:?}: another snapshot changed");
    }
}

#[test]
fn invalid_merge_is_refused() {
    let origin = Origin::new(Kind::Model.make(SIZE));
    let transient = origin.snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Transient, 4096)).unwrap();
    assert!(matches!(transient.merge(), Err(MergeSetupError::Transient)));
    let make = || origin.prepare_snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Persistent, 4096));
    let mut first = make().unwrap();
    consistency_group::take_snapshots(&mut [&mut first]).unwrap();
    let snapshot = first.into_snapshot();
    let mut pending = make().unwrap();
    assert!(matches!(snapshot.merge(), Err(MergeSetupError::Preparing)));
    consistency_group::take_snapshots(&mut [&mut pending]).unwrap();
    let second = pending.into_snapshot();
    // The merge cannot finish while the COW device hangs.
    let cow = Arc::new(FaultyDisk::new(COW_SIZE as usize, 512));
    let slow = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
    slow.write_at(0, &bytes(1, 4096), NONE).unwrap();
    cow.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Hang);
    slow.merge().unwrap();
    assert!(matches!(second.merge(), Err(MergeSetupError::OtherMerge)));
    let error = make().map(|_| ()).unwrap_err().to_string();
    assert!(error.contains("merged"), "{error}");
    cow.heal();
    assert_eq!(slow.wait_merge(), MergeStatus::Finished);
    second.merge().unwrap();
    assert_eq!(second.wait_merge(), MergeStatus::Finished);
    snapshot.remove();
    assert!(matches!(snapshot.merge(), Err(MergeSetupError::Invalid)));
}

#[test]
fn write_to_chunk_being_merged_waits() {
    let below = Arc::new(FaultyDisk::new(SIZE as usize, 512));
    let origin = Origin::new(below.clone());
    let snapshot = origin.snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
    snapshot.write_at(0, &bytes(1, 8192), NONE).unwrap();
    below.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::Hang);
    snapshot.merge().unwrap();
    below.wait_held(1);
    // The merge has copied the run of chunks, but not yet removed its exceptions from the store.
    let (tx, rx) = std::sync::mpsc::channel();
    let done = Completion::new(move |outcome, _| tx.send(outcome).unwrap());
    snapshot.submit(Request::write(4096, 512), IoBuf::copy_of(&[7; 512]).unwrap(), done);
    std::thread::sleep(std::time::Duration::from_millis(30));
    assert!(rx.try_recv().is_err(), "a write went to a chunk that is being merged");
    assert_eq!(read(&snapshot, 0, 8192), bytes(1, 8192), "reads go on");
    below.heal();
    rx.recv().unwrap().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    assert_eq!(read(&*below, 4096, 512), [7; 512]);
}

#[test]
fn failed_merge_loses_nothing_and_resumes() {
    for (of_cow, op) in [(true, Op::Read), (true, Op::Write), (false, Op::Write), (false, Op::Flush)] {
        let (below, cow) = (
            Arc::new(FaultyDisk::new(SIZE as usize, 512)),
            Arc::new(FaultyDisk::new(COW_SIZE as usize, 512)),
        );
        let origin = Origin::new(below.clone());
        let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
        let mut content = vec![0; SIZE as usize];
        write_random_ranges(&snapshot, &mut content, 6, 30);
        let device = if of_cow { &cow } else { &below };
        // The first write to the COW device, which marks the store, still succeeds.
        let writes = device.counts().writes;
        let when =
            if of_cow && op == Op::Write { FaultSchedule::From(writes + 1) } else { FaultSchedule::Always };
        device.fault(Some(op), when, FaultEffect::Fail(Error::Media));
        snapshot.merge().unwrap();
        let status = snapshot.wait_merge();
        assert!(
            matches!(status, MergeStatus::Failed(MergeFailure::Device { .. } | MergeFailure::Store(_))),
            "{status:?}"
        );
        assert_eq!(snapshot.status().to_string(), "Merge failed");
        device.heal();
        assert!(read_all(&snapshot) == content && read_all(&origin) == content, "after {op:?} failed");
        write_random_ranges(&snapshot, &mut content, 7, 30);
        snapshot.merge().unwrap();
        assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
        assert!(read_all(&*below) == content, "after {op:?} failed and was healed");
    }
}

/// After a merge was stopped in the middle, the origin still shows the snapshot's content, even
/// after the snapshot's handle is dropped.
#[test]
fn stopped_merge_shows_snapshot_content() {
    let device = Kind::Deferred.make(SIZE);
    let cow = Kind::Deferred.make(COW_SIZE);
    let origin = Origin::new(Arc::clone(&device));
    let snapshot = origin.snapshot(Arc::clone(&cow), &config(StoreKind::Persistent, 4096)).unwrap();
    let mut content = vec![0; SIZE as usize];
    write_random_ranges(&snapshot, &mut content, 8, 200);
    snapshot.merge().unwrap();
    snapshot.stop_merge();
    drop(snapshot);
    assert!(read_all(&origin) == content);
    origin.write_at(512, &bytes(9, 8192), NONE).unwrap();
    content[512..512 + 8192].copy_from_slice(&bytes(9, 8192));
    assert!(read_all(&origin) == content);
    drop(origin);
    // A new origin over the same devices resumes the merge.
    let origin = Origin::new(Arc::clone(&device));
    let snapshot = origin.snapshot(cow, &config(StoreKind::Persistent, 4096)).unwrap();
    assert!(read_all(&snapshot) == content);
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    assert!(read_all(&*device) == content);
}

/// A merge starts only when no origin write is in flight, so it does not start while one hangs.
#[test]
#[ignore = "slow lane"]
fn merge_does_not_start_while_origin_write_hangs() {
    let disk = Arc::new(FaultyDisk::new(SIZE as usize, 512));
    let origin = Origin::new(disk.clone());
    let snapshot = origin.snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Persistent, 4096)).unwrap();
    snapshot.write_at(0, &bytes(1, 4096), NONE).unwrap();
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    let (completion, completions) = std::sync::mpsc::channel();
    let done = Completion::new(move |outcome, _| completion.send(outcome).unwrap());
    origin.submit(Request::new(Op::Write, 8192, 4096), IoBuf::copy_of(&bytes(2, 4096)).unwrap(), done);
    disk.wait_held(1);
    assert!(matches!(snapshot.merge(), Err(MergeSetupError::FreezeTimeout(_))));
    assert_eq!(snapshot.merge_status(), MergeStatus::None);
    // The origin still shows its own content, not the snapshot's, and both accept writes.
    snapshot.write_at(4096, &bytes(3, 4096), NONE).unwrap();
    disk.heal();
    assert_eq!(completions.recv().unwrap(), Ok(()));
    origin.write_at(12288, &bytes(4, 4096), NONE).unwrap();
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    assert!(read(&*disk, 0, 8192) == [bytes(1, 4096), bytes(3, 4096)].concat());
}

/// A write to an origin that ignores data may have a buffer with any content. A merging snapshot, which would
/// keep the data, keeps zeroes.
#[test]
fn merging_snapshot_zeroes_ignored_data() {
    let below = TestDevice::with(SIZE, |geometry| geometry.ignores_data = true);
    let cow = Arc::new(FaultyDisk::new(COW_SIZE as usize, 512));
    let origin = Origin::new(below);
    let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
    assert!(origin.geometry().ignores_data && !snapshot.geometry().ignores_data);
    snapshot.write_at(0, &bytes(1, 8192), NONE).unwrap();
    cow.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    snapshot.merge().unwrap();
    assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
    cow.heal();
    origin.write_at(0, &bytes(2, 4096), NONE).unwrap();
    assert!(read(&origin, 0, 8192) == [vec![0; 4096], bytes(1, 8192)[4096..].to_vec()].concat());
}

/// If the origin has grown, a read beyond the snapshot's end reads the origin, even in the chunk of
/// the last exception.
#[test]
fn read_beyond_merging_snapshot_completes() {
    let device = Arc::new(Model::new(SIZE as usize + 1024, 512));
    let cow = Arc::new(FaultyDisk::new(COW_SIZE as usize, 512));
    let origin = Origin::new(device.clone());
    let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
    snapshot.write_at(SIZE, &bytes(1, 1024), NONE).unwrap();
    device.grow(2 * SIZE as usize);
    cow.fault(Some(Op::Read), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    snapshot.merge().unwrap();
    assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
    cow.heal();
    origin.write_at(SIZE + 1024, &bytes(2, 3072), NONE).unwrap();
    let (tx, rx) = mpsc::channel();
    let reader = origin.clone();
    thread::spawn(move || tx.send(read(&reader, SIZE, 4096)));
    let shown = rx.recv_timeout(Duration::from_secs(60)).expect("the read does not end");
    assert!(shown == [bytes(1, 1024), bytes(2, 3072)].concat());
}
