//! Removal of exceptions from the end of the store's list, as a merge does it.

use std::sync::Arc;

use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_cow::cow::StoreKind;
use freestone_cow::cow::store::{Damage, Invalid, MergeError, RUN_ENTRIES_MAX, Run, Store};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk};

use super::disk::Disk;
use super::{CHUNK, SOON, commit, open, origin, preserve, preserve_all};

fn disk(chunks: u64) -> Arc<Disk> {
    Disk::new(vec![0; (chunks * CHUNK) as usize])
}

fn run(old: u64, new: u64, count: u64) -> Run {
    Run { old, new, count }
}

#[test]
fn runs_go_backwards_on_both_devices() {
    let disk = disk(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    assert_eq!(store.last_run(), Ok(None));
    // The copies are in chunks 2 to 9 of the COW device, and in chunk 11 after an unused place.
    preserve_all(&store, [40, 41, 42, 50, 52, 51, 7, 8]);
    drop(store.allocate().unwrap());
    preserve(&store, 9);
    let expected = [run(9, 11, 1), run(7, 8, 2), run(51, 7, 1), run(52, 6, 1), run(50, 5, 1), run(40, 2, 3)];
    for (at, run) in expected.iter().enumerate() {
        assert_eq!(store.last_run(), Ok(Some(*run)), "run {at}");
        // A second call of `last_run` returns the same run.
        assert_eq!(store.last_run(), Ok(Some(*run)));
        disk.start();
        store.commit_merge(run, run.count).unwrap();
        let left: u64 = expected[at + 1..].iter().map(|run| run.count).sum();
        let zero = if left == 0 { " zero" } else { "" };
        assert_eq!(disk.history(), ["flush", &format!("4096+4096{zero} fua")]);
        assert_eq!(open(Disk::new(disk.bytes())).1.len() as u64, left);
    }
    assert_eq!(store.last_run(), Ok(None));
    assert_eq!(store.usage().to_string(), "16/512 16");
    // After the last removal, all places are free again.
    assert_eq!(preserve(&store, 3), 2);
    drop(store);
    assert_eq!(open(disk as Arc<dyn Device>).1, [(3, 2)]);
}

/// During a merge, usage is reported as in the kernel: as if places had been allocated in the order
/// of the entries.
#[test]
fn merge_reduces_usage() {
    let disk = disk(600);
    let (store, _) = open(disk as Arc<dyn Device>);
    preserve_all(&store, 0..300);
    assert_eq!(store.usage().to_string(), format!("{}/4800 24", (300 + 3) * 8));
    // The run ends at an area boundary, where the chunk numbers on the COW device have a gap.
    assert_eq!(store.last_run(), Ok(Some(run(256, 259, 44))));
    store.commit_merge(&run(256, 259, 44), 4).unwrap();
    assert_eq!(store.usage().to_string(), format!("{}/4800 24", (296 + 3) * 8));
    assert_eq!(store.last_run(), Ok(Some(run(256, 259, 40))));
    store.commit_merge(&run(256, 259, 40), 40).unwrap();
    assert_eq!(store.usage().metadata, 24);
    assert_eq!(store.last_run(), Ok(Some(run(0, 2, 256))));
    store.commit_merge(&run(0, 2, 256), 1).unwrap();
    assert_eq!(store.usage().to_string(), format!("{}/4800 16", (255 + 2) * 8));
    // A new exception is placed after all places that were ever allocated.
    assert_eq!(preserve(&store, 1000), 303);
    assert_eq!(store.usage().to_string(), format!("{}/4800 24", 304 * 8));
    // The first area is full again, so the new entry is the first one of the second area.
    assert_eq!(store.last_run(), Ok(Some(run(1000, 303, 1))));
}

#[test]
fn only_last_exceptions_can_be_removed() {
    let (store, _) = open(disk(64) as Arc<dyn Device>);
    preserve_all(&store, 0..10);
    let last = run(0, 2, 10);
    // Without a call of `last_run` before it, a removal is refused.
    assert_eq!(store.commit_merge(&last, 1), Err(MergeError::NotLast));
    assert_eq!(store.last_run(), Ok(Some(last)));
    for (asked, count) in [(last, 0), (last, 11), (run(1, 3, 9), 1)] {
        assert_eq!(store.commit_merge(&asked, count), Err(MergeError::NotLast));
    }
    preserve(&store, 10);
    assert_eq!(store.commit_merge(&last, 10), Err(MergeError::NotLast));
    assert_eq!(store.last_run(), Ok(Some(run(0, 2, 11))));
    store.commit_merge(&run(0, 2, 11), 11).unwrap();
    assert_eq!(store.commit_merge(&run(0, 2, 11), 1), Err(MergeError::NotLast));
}

/// A run in an area of many blocks, longer than one merge step, is removed in parts of various
/// lengths.
#[test]
fn long_runs_are_merged_in_parts() {
    let chunk = 64 << 10;
    let disk = Disk::new(vec![0; 2400 * chunk]);
    let open = |disk: &Arc<Disk>| {
        let cow = Arc::clone(disk) as Arc<dyn Device>;
        Store::open(cow, StoreKind::Persistent, Some(chunk as u64), &origin()).unwrap()
    };
    let (store, _) = open(&disk);
    // The list begins with 100 single entries. A run of 2000 entries follows, and starts in the
    // middle of a block.
    preserve_all(&store, (5000..5100).rev());
    preserve_all(&store, 0..2000);
    let mut left = 2000;
    for count in [1, 255, 256, 257, 31, 200, 512, 400] {
        let found = store.last_run().unwrap().unwrap();
        let expected = left.min(RUN_ENTRIES_MAX);
        assert_eq!(found, run(left - expected, 102 + left - expected, expected));
        store.commit_merge(&found, count.min(found.count)).unwrap();
        left -= count.min(found.count);
        let (_, exceptions) = open(&Disk::new(disk.bytes()));
        let mut expected: Vec<_> = (0..left).map(|at| (at, at + 102)).collect();
        expected.extend((5000..5100).map(|old| (old, 5101 - old)));
        assert_eq!(exceptions, expected);
    }
}

/// A place that is allocated but not committed during a merge is not allocated again.
#[test]
fn pending_place_survives_the_end_of_a_merge() {
    let disk = disk(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..3);
    let place = store.allocate().unwrap();
    let last = store.last_run().unwrap().unwrap();
    store.commit_merge(&last, last.count).unwrap();
    assert_eq!(store.last_run(), Ok(None));
    let other = store.allocate().unwrap();
    assert_eq!((place.chunk(), other.chunk()), (5, 6));
    drop(other);
    assert_eq!(commit(&store, place, 9).recv_timeout(SOON), Ok(Ok(())));
    drop(store);
    assert_eq!(open(disk as Arc<dyn Device>).1, [(9, 5)]);
}

/// After a failed removal the entries on disk are unknown. The removal can be retried with another
/// length.
#[test]
fn failed_removal_can_be_retried() {
    for (op, what) in [
        (Op::Flush, FaultEffect::Fail(Error::Media)),
        (Op::Write, FaultEffect::Fail(Error::Media)),
        (Op::Write, FaultEffect::Tear),
    ] {
        let disk = Arc::new(FaultyDisk::new((64 * CHUNK) as usize, 512));
        let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
        preserve_all(&store, 0..40);
        let last = store.last_run().unwrap().unwrap();
        disk.fault(Some(op), FaultSchedule::Always, what);
        assert_eq!(store.commit_merge(&last, 30), Err(MergeError::Device(Error::Media)));
        assert!(store.is_valid());
        disk.heal();
        assert_eq!(store.last_run(), Ok(Some(last)));
        store.commit_merge(&last, 35).unwrap();
        preserve(&store, 99);
        drop(store);
        let (_, found) = open(disk as Arc<dyn Device>);
        assert_eq!(found, (0..5).map(|at| (at, at + 2)).chain([(99, 42)]).collect::<Vec<_>>());
    }
}

/// A failed long removal may have cleared entries in several blocks. A shorter removal restores
/// those that it does not remove.
#[test]
fn shorter_removal_repairs_failed_longer_one() {
    for put_back in [FaultEffect::Fail(Error::Media), FaultEffect::Tear, FaultEffect::FailDone(Error::Media)]
    {
        let chunk = 64 << 10;
        let disk = Arc::new(FaultyDisk::new(800 * chunk, 512));
        let open = || {
            let cow = Arc::clone(&disk) as Arc<dyn Device>;
            Store::open(cow, StoreKind::Persistent, Some(chunk as u64), &origin()).unwrap()
        };
        let (store, _) = open();
        preserve_all(&store, 0..700);
        let last = store.last_run().unwrap().unwrap();
        let next = disk.counts().writes;
        disk.fault(Some(Op::Write), FaultSchedule::At(next), FaultEffect::FailDone(Error::Media));
        disk.fault(Some(Op::Write), FaultSchedule::From(next + 1), put_back);
        assert_eq!(store.commit_merge(&last, 690), Err(MergeError::Device(Error::Media)));
        assert!(store.is_torn());
        disk.heal();
        store.commit_merge(&last, 1).unwrap();
        assert!(!store.is_torn());
        assert_eq!(store.last_run(), Ok(Some(run(0, 2, 699))));
        drop(store);
        assert_eq!(open().1, (0..699).map(|at| (at, at + 2)).collect::<Vec<_>>());
    }
}

#[test]
fn failed_removal_is_restored() {
    let disk = Arc::new(FaultyDisk::new((64 * CHUNK) as usize, 512));
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..40);
    let last = store.last_run().unwrap().unwrap();
    let put_back = || {
        let (tx, rx) = std::sync::mpsc::channel();
        store.restore_entries(move |outcome| tx.send(outcome).unwrap());
        rx.recv_timeout(SOON).unwrap()
    };
    assert_eq!(put_back(), Ok(()));
    let there = || {
        let bytes = Disk::new(vec![0; (64 * CHUNK) as usize]);
        let mut copy = vec![0; (64 * CHUNK) as usize];
        disk.read_at(0, &mut copy).unwrap();
        bytes.write_at(0, &copy, Flags::empty()).unwrap();
        open(bytes as Arc<dyn Device>).1.len()
    };
    let next = disk.counts().writes;
    disk.fault(Some(Op::Write), FaultSchedule::At(next), FaultEffect::FailDone(Error::Media));
    assert!(store.commit_merge(&last, 30).is_err());
    // The store restored the entries before `commit_merge` returned the error.
    assert!(!store.is_torn() && there() == 40);
    disk.fault(Some(Op::Write), FaultSchedule::At(next + 2), FaultEffect::FailDone(Error::Media));
    disk.fault(Some(Op::Write), FaultSchedule::From(next + 3), FaultEffect::Fail(Error::NoSpace));
    assert!(store.commit_merge(&last, 30).is_err());
    assert!(store.is_torn() && there() == 10);
    assert_eq!(put_back(), Err(Error::NoSpace));
    disk.heal();
    assert_eq!(put_back(), Ok(()));
    assert!(!store.is_torn() && there() == 40);
    preserve(&store, 99);
    assert_eq!(there(), 41);
}

/// If earlier entries may be cleared on disk, a new entry after them would not be found when the
/// store is reopened. So the commit fails.
#[test]
fn nothing_is_added_after_a_failed_removal() {
    let disk = Arc::new(FaultyDisk::new((64 * CHUNK) as usize, 512));
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..40);
    let last = store.last_run().unwrap().unwrap();
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Tear);
    assert!(store.commit_merge(&last, 30).is_err());
    disk.heal();
    assert_eq!(commit(&store, store.allocate().unwrap(), 99).recv_timeout(SOON), Ok(Err(Invalid)));
    drop(store);
    assert!(!open(disk as Arc<dyn Device>).0.is_valid());
}

#[test]
fn changed_list_during_merge_is_detected() {
    let disk = disk(600);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..256);
    // The full area is no longer in memory, so the store reads it again and detects the changed
    // entry.
    let mut block = disk.bytes()[CHUNK as usize..][..4096].to_vec();
    block[4088..].copy_from_slice(&258u64.to_le_bytes());
    disk.write_at(CHUNK, &block, Flags::empty()).unwrap();
    let damage = Damage::Metadata { entry: 255, new: 258 };
    assert_eq!(store.last_run(), Err(MergeError::Damaged(damage)));
    block[4088..].fill(0);
    disk.write_at(CHUNK, &block, Flags::empty()).unwrap();
    assert_eq!(store.last_run(), Err(MergeError::Damaged(Damage::Gap { entry: 255 })));
}
