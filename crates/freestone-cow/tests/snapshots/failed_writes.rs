//! Exception stores whose writes fail, with or without effect. Completed writes must survive a
//! crash and any later merge. The tests simulate a crash by copying the bytes of the origin's disk
//! and of the COW device.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use freestone_core::device::{Blocking, Device, Error, Flags, Op, Request, TryResult};
use freestone_cow::cow::{MergeStatus, Origin, Snapshot, Status, StoreKind};
use freestone_drive::null::{self, Memory};
use freestone_drive::power::{self, Power};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng, TestDevice};

use crate::support::{CHUNK, bytes, config, read, read_all};

const SIZE: u64 = 64 << 10;
const COW_SIZE: u64 = 512 << 10;
const BLOCK: usize = 512;
const NONE: Flags = Flags::empty();
const FAILS: FaultEffect = FaultEffect::Fail(Error::Media);
const FAILS_DONE: FaultEffect = FaultEffect::FailDone(Error::Media);

fn faulty(size: u64) -> Arc<FaultyDisk> {
    Arc::new(FaultyDisk::new(size as usize, BLOCK as u32))
}

fn copy_of(device: &dyn Device) -> Arc<Model> {
    Arc::new(Model::filled(read_all(device), BLOCK as u32))
}

fn open(origin: &Origin, cow: Arc<dyn Device>) -> Snapshot {
    origin.snapshot(cow, &config(StoreKind::Persistent, CHUNK)).unwrap()
}

/// Returns the content of the snapshot after a crash. Also checks that the next merge writes this
/// content to the origin.
fn after_a_crash(below: &FaultyDisk, cow: &FaultyDisk) -> Vec<u8> {
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

/// Starts a merge, which marks the exception store, and makes the merge fail before it records a
/// first step.
fn begin(snapshot: &Snapshot, below: &FaultyDisk) {
    below.fault(Some(Op::Flush), FaultSchedule::Always, FAILS);
    snapshot.merge().unwrap();
    assert!(is_failed(&snapshot.wait_merge()));
    below.heal();
}

#[test]
fn write_after_failed_merge_step_is_not_lost() {
    for through_snapshot in [false, true] {
        for for_good in [false, true] {
            let (below, cow) = (faulty(SIZE), faulty(COW_SIZE));
            let origin = Origin::new(below.clone());
            let snapshot = open(&origin, cow.clone());
            snapshot.write_at(0, &bytes(1, 3 * CHUNK), NONE).unwrap();
            begin(&snapshot, &below);
            // From now on, the merge writes only its own record to the COW device.
            let next = cow.counts().writes;
            cow.fault(
                Some(Op::Write),
                if for_good { FaultSchedule::From(next) } else { FaultSchedule::At(next) },
                FAILS_DONE,
            );
            snapshot.merge().unwrap();
            let status = snapshot.wait_merge();
            assert!(is_failed(&status), "{status:?}");
            let device: &dyn Device = if through_snapshot { &snapshot } else { &origin };
            let new = bytes(2, CHUNK);
            if for_good {
                // As long as it is unknown whether the origin or the COW device has the valid copy
                // of the chunk, the chunk cannot be written.
                assert_eq!(device.write_at(CHUNK, &new, NONE), Err(Error::Media));
                assert_eq!(
                    read(device, CHUNK, CHUNK),
                    bytes(1, 3 * CHUNK)[CHUNK as usize..][..CHUNK as usize]
                );
                // Writes to other chunks of the origin still succeed.
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
            // The failed merge can be restarted.
            snapshot.merge().unwrap();
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            assert!(read(&*below, CHUNK, CHUNK) == new);
        }
    }
}

/// Merges fail at any step and are restarted, while the origin is written and both disks fail in
/// every way.
#[test]
fn failed_merges_lose_nothing() {
    let mut failed = 0;
    for seed in 0..12 {
        let mut rng = Rng::new(seed);
        let (below, cow) = (faulty(SIZE), faulty(COW_SIZE));
        let origin = Origin::new(below.clone());
        let snapshot = open(&origin, cow.clone());
        // The contents that each block may have.
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
        begin(&snapshot, &below);
        for round in 0..40 {
            let op = [Op::Write, Op::Flush][rng.below(2) as usize];
            let what = [FAILS_DONE, FAILS, FaultEffect::Tear][rng.below(3) as usize];
            for (disk, percent) in [(&cow, 70), (&below, 10)] {
                if rng.chance(percent) {
                    let next = if op == Op::Write { disk.counts().writes } else { disk.counts().flushes };
                    let when = if rng.chance(50) { FaultSchedule::At(next) } else { FaultSchedule::Always };
                    disk.fault(Some(op), when, what);
                }
            }
            snapshot.merge().unwrap();
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
    assert!(failed > 12, "{failed} merges failed");
}

// ---- unflushed state read after a restart -------------------------------------------------------

/// A disk with a volatile cache, and a switch. After `fails(true)` all FUA writes fail: the first one
/// still reaches the cache, and later ones have no effect.
struct Cached {
    disk: Arc<TestDevice<Power>>,
    next_arrives: Arc<AtomicBool>,
    fails: Arc<AtomicBool>,
}

impl Cached {
    fn new() -> Self {
        let memory = Arc::new(Memory::new(null::Config::plain(COW_SIZE, BLOCK as u32)).unwrap());
        let power = Arc::new(Power::new(memory, power::Config::default()).unwrap());
        let (next_arrives, fails) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let (next, failing) = (Arc::clone(&next_arrives), Arc::clone(&fails));
        let disk = Arc::new(TestDevice::over(power).on_try(move |power, request, buffer| {
            if !request.flags.contains(Flags::FUA) || !failing.load(Ordering::SeqCst) {
                return power.try_io(request, buffer);
            }
            if next.swap(false, Ordering::SeqCst) {
                let cached = Request { flags: request.flags - Flags::FUA, ..*request };
                assert_eq!(power.try_io(&cached, buffer), Ok(TryResult::Done));
            }
            Err(Error::Media)
        }));
        Self { disk, next_arrives, fails }
    }

    fn fails(&self, fails: bool) {
        self.next_arrives.store(fails, Ordering::SeqCst);
        self.fails.store(fails, Ordering::SeqCst);
    }
}

/// The program ends after a merge step has reached only the cache of the COW device. The next
/// program reads that step as done, and then the power is cut.
#[test]
fn merge_read_from_a_store_is_durable() {
    for seed in 0..10 {
        let (below, cow) = (faulty(SIZE), Cached::new());
        {
            let origin = Origin::new(below.clone());
            let snapshot = open(&origin, cow.disk.clone());
            snapshot.write_at(0, &bytes(1, 3 * CHUNK), NONE).unwrap();
            begin(&snapshot, &below);
            cow.fails(true);
            snapshot.merge().unwrap();
            assert!(is_failed(&snapshot.wait_merge()));
        }
        cow.fails(false);
        {
            let origin = Origin::new(below.clone());
            let snapshot = open(&origin, cow.disk.clone());
            snapshot.merge().unwrap();
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            origin.write_at(0, &bytes(2, 3 * CHUNK), NONE).unwrap();
            origin.flush().unwrap();
        }
        let _ = cow.disk.cut(seed).unwrap();
        let origin = Origin::new(below.clone());
        let snapshot = open(&origin, cow.disk.clone());
        snapshot.merge().unwrap();
        assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
        assert!(read(&*below, 0, 3 * CHUNK) == bytes(2, 3 * CHUNK), "seed {seed}: what was flushed is lost");
    }
}

/// The program ends after the invalid header has reached only the cache. The next program reads the
/// snapshot as invalid, and then the power is cut.
#[test]
fn snapshot_read_as_invalid_stays_invalid() {
    // Each seed waits until the attempts to write the header end, so the seeds run in parallel.
    std::thread::scope(|scope| {
        for seed in 0..10 {
            scope.spawn(move || check_found_invalid(seed));
        }
    });
}

fn check_found_invalid(seed: u64) {
    let (below, cow) = (faulty(SIZE), Cached::new());
    {
        let origin = Origin::new(below.clone());
        let snapshot = open(&origin, cow.disk.clone());

        // The copy of the chunk fails, so the first FUA write is the one of the invalid header.

        below.fault(Some(Op::Read), FaultSchedule::Always, FAILS);
        cow.fails(true);
        origin.write_at(0, &bytes(1, CHUNK), NONE).unwrap();
        below.heal();
        assert_eq!(snapshot.status(), Status::Invalid);
    }
    cow.fails(false);
    {
        let origin = Origin::new(below.clone());
        let snapshot = open(&origin, cow.disk.clone());
        assert_eq!(snapshot.status(), Status::Invalid);
        origin.write_at(CHUNK, &bytes(2, CHUNK), NONE).unwrap();
    }
    let _ = cow.disk.cut(seed).unwrap();
    let snapshot = open(&Origin::new(below.clone()), cow.disk.clone());
    assert_eq!(snapshot.status(), Status::Invalid, "seed {seed}: a lost snapshot is back");
}
