//! Exception stores whose writes fail, or fail although they were done: what was answered well is there after a crash, and after any
//! later merge. A crash here is the bytes that both disks hold.

use std::sync::Arc;

use freestone::cow::{MergeStatus, Origin, Snapshot, StoreKind};
use freestone::device::{Blocking, Device, Error, Flags, Op};
use freestone_testkit::{Faulty, Model, Rng, What, When};

mod cow_map_support;
use cow_map_support::{CHUNK, bytes, config, read, read_all};

const SIZE: u64 = 64 << 10;
const COW_SIZE: u64 = 512 << 10;
const BLOCK: usize = 512;
const NONE: Flags = Flags::empty();
const FAILS: What = What::Fail(Error::Media);
const FAILS_DONE: What = What::FailDone(Error::Media);

fn faulty(size: u64) -> Arc<Faulty> {
    Arc::new(Faulty::new(size as usize, BLOCK as u32))
}

fn copy_of(device: &dyn Device) -> Arc<Model> {
    let model = Model::new(device.geometry().size as usize, BLOCK as u32);
    model.write_at(0, &read_all(device), NONE).unwrap();
    Arc::new(model)
}

fn open(origin: &Origin, cow: Arc<dyn Device>) -> Snapshot {
    origin.snapshot(cow, &config(StoreKind::Persistent, CHUNK)).unwrap()
}

/// What the snapshot shows after a crash, and the origin after the merge that follows.
fn after_a_crash(below: &Faulty, cow: &Faulty) -> Vec<u8> {
    let below = copy_of(below);
    let origin = Origin::new(below.clone());
    let snapshot = open(&origin, copy_of(cow));
    let shown = read_all(&snapshot);
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    assert!(read_all(&*below) == shown, "a merge changed what the snapshot showed");
    shown
}

fn is_failed(status: &MergeStatus) -> bool {
    matches!(status, MergeStatus::Failed(_))
}

#[test]
fn what_is_written_after_a_merge_step_that_failed_is_not_lost() {
    for through_snapshot in [false, true] {
        for for_good in [false, true] {
            let (below, cow) = (faulty(SIZE), faulty(COW_SIZE));
            let origin = Origin::new(below.clone());
            let snapshot = open(&origin, cow.clone());
            snapshot.write_at(0, &bytes(1, 3 * CHUNK), NONE).unwrap();
            // A merge writes nothing there but its record.
            let next = cow.counts().writes;
            cow.fault(Some(Op::Write), if for_good { When::From(next) } else { When::At(next) }, FAILS_DONE);
            snapshot.merge().unwrap();
            let status = snapshot.wait_merge();
            assert!(is_failed(&status), "{status:?}");
            let device: &dyn Device = if through_snapshot { &snapshot } else { &origin };
            let new = bytes(2, CHUNK);
            if for_good {
                // As long as nobody knows which of the two is the chunk's place, it is not written.
                assert_eq!(device.write_at(CHUNK, &new, NONE), Err(Error::Media));
                assert_eq!(
                    read(device, CHUNK, CHUNK),
                    bytes(1, 3 * CHUNK)[CHUNK as usize..][..CHUNK as usize]
                );
                // The rest of the origin does not suffer from it.
                device.write_at(8 * CHUNK, &new, NONE).unwrap();
                cow.heal();
            }
            device.write_at(CHUNK, &new, NONE).unwrap();
            device.flush().unwrap();
            let left = after_a_crash(&below, &cow);
            assert!(
                left[CHUNK as usize..][..CHUNK as usize] == new,
                "for good {for_good}: what was flushed is lost"
            );
            // And the merge goes on.
            snapshot.merge().unwrap();
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            assert!(read(&*below, CHUNK, CHUNK) == new);
        }
    }
}

/// Merges that fail at any step and are begun again, while the origin is written; both disks fail in every way.
#[test]
fn merges_that_fail_lose_nothing() {
    let mut failed = 0;
    for seed in 0..8 {
        let mut rng = Rng::new(seed);
        let (below, cow) = (faulty(SIZE), faulty(COW_SIZE));
        let origin = Origin::new(below.clone());
        let snapshot = open(&origin, cow.clone());
        // Of each block, what it may hold.
        let mut may: Vec<Vec<Vec<u8>>> = vec![vec![vec![0; BLOCK]]; SIZE as usize / BLOCK];
        let mut write = |device: &dyn Device, rng: &mut Rng, number: u64| {
            let len = BLOCK << rng.below(5);
            let at = rng.below((SIZE - len as u64) / BLOCK as u64 + 1) as usize;
            let data = bytes(number, len as u64);
            let outcome = device.write_at((at * BLOCK) as u64, &data, NONE);
            for (values, new) in may[at..].iter_mut().zip(data.chunks(BLOCK)) {
                if outcome.is_ok() {
                    values.clear();
                }
                values.push(new.to_vec());
            }
            may.clone()
        };
        for number in 0..20 {
            write(&snapshot, &mut rng, number);
        }
        for round in 0..40 {
            let op = [Op::Write, Op::Flush][rng.below(2) as usize];
            let what = [FAILS_DONE, FAILS, What::Tear][rng.below(3) as usize];
            for (disk, percent) in [(&cow, 70), (&below, 10)] {
                if rng.chance(percent) {
                    let next = if op == Op::Write { disk.counts().writes } else { disk.counts().flushes };
                    let when = if rng.chance(50) { When::At(next) } else { When::Always };
                    disk.fault(Some(op), when, what);
                }
            }
            snapshot.merge().unwrap();
            if rng.chance(50) {
                snapshot.stop_merge();
            }
            let status = snapshot.wait_merge();
            failed += u32::from(is_failed(&status));
            for step in 0..4 {
                if rng.chance(40) {
                    below.heal();
                    cow.heal();
                }
                let device: &dyn Device = if rng.chance(50) { &origin } else { &snapshot };
                let may = write(device, &mut rng, 1000 + round * 10 + step);
                below.heal();
                let left = after_a_crash(&below, &cow);
                for (at, (left, may)) in left.chunks(BLOCK).zip(&may).enumerate() {
                    let known = may.iter().any(|value| value == left);
                    assert!(known, "seed {seed}, round {round}, step {step}: block {at} is another one");
                }
            }
            below.heal();
            cow.heal();
            if status == MergeStatus::Finished {
                break;
            }
        }
    }
    assert!(failed > 20, "{failed} merges failed");
}
