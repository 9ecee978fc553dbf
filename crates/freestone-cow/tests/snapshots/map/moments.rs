//! Snapshots of several origins, and several snapshots of one origin, at one moment.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use freestone_core::consistency_group;
use freestone_core::device::{Blocking, Buffer, Completion, Device, IoBuf, Op, Request, TryResult};
use freestone_cow::cow::{Origin, Snapshot, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

use super::{COW_SIZE, NONE, SIZE, origin};
use crate::support::{Kind, Stop, bytes, config, read, read_all};

#[test]
fn snapshots_of_two_origins_are_of_one_moment() {
    for kind in [Kind::Model, Kind::Sometimes, Kind::Deferred] {
        let (one, other) = (Origin::new(kind.make(SIZE)), Origin::new(kind.make(SIZE)));
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let _stop = Stop(&stop);
            // Each writer writes an increasing number to the first device and then to the second,
            // so the second number is never ahead.
            for writer in 0..2 {
                let (one, other, stop) = (&one, &other, &stop);
                scope.spawn(move || {
                    let mut number = 0_u64;
                    while !stop.load(Ordering::SeqCst) {
                        number += 1;
                        let mut data = vec![0; 8192];
                        data.chunks_mut(8).for_each(|word| word.copy_from_slice(&number.to_le_bytes()));
                        one.write_at(writer * 65536 + 512, &data, NONE).unwrap();
                        other.write_at(writer * 65536 + 512, &data, NONE).unwrap();
                    }
                });
            }
            for _ in 0..30 {
                let prepare = |origin: &Origin| {
                    origin
                        .prepare_snapshot(kind.make(COW_SIZE), &config(StoreKind::Persistent, 4096))
                        .unwrap()
                };
                let (mut first, mut second) = (prepare(&one), prepare(&other));
                consistency_group::take_snapshots(&mut [&mut first, &mut second]).unwrap();
                let (first, second) = (first.into_snapshot(), second.into_snapshot());
                std::thread::sleep(Duration::from_millis(2));
                for writer in 0..2 {
                    let numbers = |snapshot: &Snapshot| -> Vec<u64> {
                        let data = read(snapshot, writer * 65536 + 512, 8192);
                        data.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect()
                    };
                    let (first, second) = (numbers(&first), numbers(&second));
                    // A device that completes requests in part splits them, so the reader may see
                    // parts of a write.
                    let whole = !matches!(kind, Kind::Sometimes);
                    for numbers in [&first, &second].into_iter().filter(|_| whole) {
                        assert!(numbers.iter().all(|number| number == &numbers[0]), "{kind:?}: a torn write");
                    }
                    let ahead = first[0] - second[0];
                    assert!(ahead <= 1, "{kind:?}: {} and {} at one moment", first[0], second[0]);
                }
            }
        });
    }
}

#[test]
fn two_snapshots_of_one_origin_are_of_one_moment() {
    let (origin, content) = origin(Kind::Sometimes, SIZE);
    let prepare =
        || origin.prepare_snapshot(Kind::Model.make(COW_SIZE), &config(StoreKind::Transient, 4096)).unwrap();
    let (mut one, mut two, never) = (prepare(), prepare(), prepare());
    consistency_group::take_snapshots(&mut [&mut one, &mut two]).unwrap();
    drop(never);
    let (one, two) = (one.into_snapshot(), two.into_snapshot());
    assert_eq!(origin.snapshot_count(), 2);
    origin.write_at(0, &bytes(1, SIZE), NONE).unwrap();
    assert!(read_all(&one) == content && read_all(&two) == content);
}

/// Writes in flight delay only snapshot sets that include their origin. After a timeout, all
/// origins of the set are as before.
#[test]
#[ignore = "slow lane"]
fn freeze_timeout_leaves_origins_unchanged() {
    let disk = Arc::new(FaultyDisk::new(SIZE as usize, 512));
    let origin = || Origin::new(Kind::Model.make(SIZE));
    let (hung, well, other) = (Origin::new(disk.clone()), origin(), origin());
    let transient = config(StoreKind::Transient, 4096);
    let prepare = |origin: &Origin| origin.prepare_snapshot(Kind::Model.make(COW_SIZE), &transient).unwrap();
    let (completion, completions) = mpsc::channel();
    let submit = |at| {
        let completion = completion.clone();
        let done = Completion::new(move |outcome, _| completion.send(outcome).unwrap());
        hung.submit(Request::new(Op::Write, at, 4096), IoBuf::copy_of(&[1; 4096]).unwrap(), done);
    };
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    submit(0);
    disk.wait_held(1);
    std::thread::scope(|scope| {
        let late = scope.spawn(|| {
            let (mut first, mut second) = (prepare(&well), prepare(&hung));
            consistency_group::take_snapshots(&mut [&mut first, &mut second])
        });
        // Waits until the set has frozen the first origin and waits for the writes of the second.
        let write = Request::new(Op::Write, 0, 4096);
        while well.try_io(&write, Buffer::Write(&[2; 4096])) == Ok(TryResult::Done) {
            std::thread::yield_now();
        }
        other.snapshot(Kind::Model.make(COW_SIZE), &transient).unwrap();
        assert!(!late.is_finished(), "the set did not wait");
        assert_eq!(late.join().unwrap(), Err(consistency_group::GroupFreezeTimeout { index: 1 }));
    });
    assert_eq!((well.snapshot_count(), hung.snapshot_count()), (0, 0));
    well.write_at(0, &[3; 4096], NONE).unwrap();
    // The origin is no longer frozen, so this write reaches the disk too.
    submit(4096);
    disk.wait_held(2);
    disk.heal();
    assert_eq!((completions.recv().unwrap(), completions.recv().unwrap()), (Ok(()), Ok(())));
    let snapshot = hung.snapshot(Kind::Model.make(COW_SIZE), &transient).unwrap();
    hung.write_at(0, &[4; 4096], NONE).unwrap();
    assert_eq!(read_all(&snapshot)[..8192], [1; 8192]);
}
