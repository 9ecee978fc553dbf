//! Marks of a running merge, in the header of the exception store and in the notes of the origin:
//! when they are set and removed, and what they prevent.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use freestone_core::consistency_group;
use freestone_core::device::{Blocking, Device, Error, Flags, Op};
use freestone_cow::cow::{MergeSetupError, MergeStatus, Notes, Origin, SetupError, Snapshot, StoreKind};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model};

use crate::support::{bytes, config, read, read_all};

const SIZE: u64 = 256 << 10;
const COW_SIZE: u64 = 1 << 20;
const NONE: Flags = Flags::empty();
/// Range of the store's header, in bytes, that holds the merge mark.
const MARK: std::ops::Range<usize> = 16..48;

fn persistent() -> freestone_cow::cow::Config {
    config(StoreKind::Persistent, 4096)
}

fn is_marked(cow: &dyn Device) -> bool {
    read(cow, 0, 512)[MARK] != [0; 32]
}

fn content() -> Vec<u8> {
    let mut content = bytes(1, SIZE);
    for chunk in [3, 9, 4] {
        content[chunk * 4096..][..4096].copy_from_slice(&bytes(chunk as u64, 4096));
    }
    content
}

/// Returns an origin with a snapshot that has three exceptions.
fn with_snapshot(below: Arc<dyn Device>, cow: Arc<dyn Device>) -> (Origin, Snapshot) {
    let origin = Origin::new(below);
    origin.write_at(0, &bytes(1, SIZE), NONE).unwrap();
    let snapshot = origin.snapshot(cow, &persistent()).unwrap();
    for chunk in [3, 9, 4] {
        snapshot.write_at(chunk * 4096, &bytes(chunk, 4096), NONE).unwrap();
    }
    (origin, snapshot)
}

/// Returns the origin's device and the COW device of a failed merge that has finished one run of
/// chunks.
fn half_merged() -> (Arc<FaultyDisk>, Arc<FaultyDisk>) {
    let devices = [SIZE, COW_SIZE].map(|size| Arc::new(FaultyDisk::new(size as usize, 512)));
    let [below, cow] = devices.clone();
    let (_origin, snapshot) = with_snapshot(below.clone(), cow);
    below.fault(Some(Op::Flush), FaultSchedule::At(1), FaultEffect::Fail(Error::Media));
    snapshot.merge().unwrap();
    assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
    below.heal();
    let [below, cow] = devices;
    assert!(is_marked(&*cow) && read_all(&*below) != content() && read_all(&*below) != bytes(1, SIZE));
    (below, cow)
}

#[test]
fn mark_is_set_before_first_copy_and_removed_at_end() {
    let (below, cow) =
        (Arc::new(FaultyDisk::new(SIZE as usize, 512)), Arc::new(FaultyDisk::new(COW_SIZE as usize, 512)));
    let (origin, snapshot) = with_snapshot(below.clone(), cow.clone());
    assert!(!is_marked(&*cow));
    below.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    snapshot.merge().unwrap();
    assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
    assert!(is_marked(&*cow), "before anything was copied");
    below.heal();
    assert_eq!(read_all(&*below), bytes(1, SIZE));
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    assert!(!is_marked(&*cow));
    assert_eq!(read_all(&*below), content());
    assert_eq!(origin.snapshot_count(), 0);
}

#[test]
fn marked_store_resumes_its_merge_when_opened() {
    let (below, cow) = half_merged();
    let origin = Origin::new(below.clone());
    // While a merge is unfinished, existing exception stores can be opened, but new ones are
    // refused.
    let beside = Arc::new(Model::new(COW_SIZE as usize, 512));
    {
        let other = Origin::new(Arc::new(Model::new(SIZE as usize, 512)));
        drop(other.snapshot(beside.clone(), &persistent()).unwrap());
    }
    let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
    assert_eq!(snapshot.merge_status(), MergeStatus::Stopped);
    assert_eq!(read_all(&origin), content());
    let fresh = || Arc::new(Model::new(COW_SIZE as usize, 512));
    for kind in [StoreKind::Persistent, StoreKind::Transient] {
        let refused = origin.snapshot(fresh(), &config(kind, 4096));
        assert!(matches!(refused, Err(SetupError::Merging)), "{refused:?}");
    }
    let beside = origin.snapshot(beside, &persistent()).unwrap();
    let before = read_all(&beside);
    origin.write_at(9 * 4096, &[7; 512], Flags::FUA).unwrap();
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    let mut wanted = content();
    wanted[9 * 4096..][..512].fill(7);
    assert_eq!(read_all(&*below), wanted);
    assert_eq!(read_all(&beside), before, "the other snapshot changed");
    assert!(!is_marked(&*cow));
    origin.snapshot(fresh(), &persistent()).unwrap();
}

#[test]
fn dropped_pending_snapshot_keeps_marked_store() {
    let (below, cow) = half_merged();
    let origin = Origin::new(below);
    drop(origin.prepare_snapshot(cow.clone(), &persistent()).unwrap());
    assert_eq!(origin.snapshot_count(), 0);
    let snapshot = origin.snapshot(cow, &persistent()).unwrap();
    assert_eq!(read_all(&snapshot), content());
}

/// A transient snapshot is refused on a COW device with a merge mark, because it would overwrite
/// the exceptions.
#[test]
fn marked_store_is_not_overwritten() {
    let (below, cow) = half_merged();
    let before = read_all(&*cow);
    let refused = Origin::new(below).snapshot(cow.clone(), &config(StoreKind::Transient, 4096));
    assert!(matches!(refused, Err(SetupError::HalfMerged)), "{refused:?}");
    assert_eq!(read_all(&*cow), before);
}

/// Two causes leave a mark without exceptions. Either a crash happened before the mark was removed,
/// or the kernel, which does not know the mark, finished the merge.
#[test]
fn marked_store_without_exceptions_is_merged() {
    let (below, cow) = half_merged();
    let mark = read(&*cow, 0, 512);
    {
        let origin = Origin::new(below.clone());
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        snapshot.merge().unwrap();
        assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    }
    cow.write_at(0, &mark, NONE).unwrap();
    let origin = Origin::new(below);
    let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
    assert_eq!(snapshot.merge_status(), MergeStatus::None);
    assert!(!is_marked(&*cow));
    origin.write_at(0, &[9; 4096], NONE).unwrap();
    assert_eq!(read_all(&snapshot), content());
}

/// The kernel finished the merge, left the mark of this crate, and then stored other exceptions.
#[test]
fn mark_that_contradicts_exceptions_is_refused() {
    let (below, cow) = half_merged();
    let mark = read(&*cow, 0, 512)[MARK].to_vec();
    for (olds, fits) in [(vec![5], false), (vec![3, 9, 4, 8], false), (vec![3, 9], true)] {
        let cow = Arc::new(Model::new(COW_SIZE as usize, 512));
        {
            let origin = Origin::new(Arc::new(Model::new(SIZE as usize, 512)));
            let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
            for old in &olds {
                snapshot.write_at(old * 4096, &[1; 4096], NONE).unwrap();
            }
        }
        let mut header = read(&*cow, 0, 512);
        header[MARK].copy_from_slice(&mark);
        cow.write_at(0, &header, NONE).unwrap();
        let opened = Origin::new(below.clone()).snapshot(cow, &persistent());
        assert_eq!(opened.is_ok(), fits, "{olds:?}: {opened:?}");
        if let Err(error) = opened {
            assert!(matches!(error, SetupError::Mark), "{error}");
        }
    }
}

#[test]
fn failed_mark_starts_no_merge() {
    for lost in [false, true] {
        for what in [FaultEffect::Fail(Error::Media), FaultEffect::Tear] {
            let (below, cow) = (
                Arc::new(FaultyDisk::new(SIZE as usize, 512)),
                Arc::new(FaultyDisk::new(COW_SIZE as usize, 512)),
            );
            let (origin, snapshot) = with_snapshot(below.clone(), cow.clone());
            let when = if lost { FaultSchedule::Always } else { FaultSchedule::At(cow.counts().writes) };
            cow.fault(Some(Op::Write), when, what);
            let refused = snapshot.merge().unwrap_err();
            cow.heal();
            // The origin is writable without the merge, and a merge after a crash does not
            // overwrite flushed writes.
            assert_eq!(read_all(&origin), bytes(1, SIZE));
            origin.write_at(9 * 4096, &[7; 512], Flags::FUA).unwrap();
            assert_eq!(matches!(refused, MergeSetupError::Invalid), lost, "{refused}");
            assert_eq!(snapshot.status().to_string() == "Invalid", lost);
            if lost {
                continue;
            }
            assert!(matches!(refused, MergeSetupError::Mark(_)) && !is_marked(&*cow), "{refused}");
            snapshot.merge().unwrap();
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            assert_eq!(read_all(&*below), content());
        }
    }
}

// ---- notes of the origin ------------------------------------------------------------------------

/// Notes in memory that outlive their origin. If the second field is true, the note of a merge
/// cannot be removed.
#[derive(Clone, Default)]
struct MemoryNotes(Arc<Mutex<Option<(u64, String)>>>, Arc<AtomicBool>);

impl Notes for MemoryNotes {
    fn merge_id(&self) -> Option<u64> {
        self.0.lock().unwrap().as_ref().map(|(id, _)| *id)
    }
    fn record_merge(&self, id: u64, store: &str) {
        *self.0.lock().unwrap() = Some((id, store.to_owned()));
    }
    fn remove_merge(&self) -> bool {
        if self.1.load(Ordering::SeqCst) {
            return false;
        }
        *self.0.lock().unwrap() = None;
        true
    }
}

#[test]
fn half_merged_origin_has_a_note() {
    let devices = [SIZE, COW_SIZE].map(|size| Arc::new(FaultyDisk::new(size as usize, 512)));
    let [below, cow] = devices.clone();
    let beside = MemoryNotes::default();
    let noted = || Origin::with_notes(below.clone(), Some(Box::new(beside.clone())));
    {
        drop(with_snapshot(below.clone(), cow.clone()));
        let origin = noted();
        let mut pending =
            origin.prepare_snapshot(cow.clone(), &persistent()).unwrap().with_location("the store");
        consistency_group::take_snapshots(&mut [&mut pending]).unwrap();
        let snapshot = pending.into_snapshot();
        assert!(!origin.is_half_merged() && beside.merge_id().is_none());
        below.fault(Some(Op::Flush), FaultSchedule::At(1), FaultEffect::Fail(Error::Media));
        snapshot.merge().unwrap();
        assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
        below.heal();
        assert_eq!(beside.0.lock().unwrap().as_ref().unwrap().1, "the store");
        assert!(!origin.is_half_merged(), "it is shown through the snapshot");
    }
    let origin = noted();
    assert!(origin.is_half_merged());
    let fresh: Arc<dyn Device> = Arc::new(Model::new(COW_SIZE as usize, 512));
    for kind in [StoreKind::Persistent, StoreKind::Transient] {
        let refused = origin.snapshot(Arc::clone(&fresh), &config(kind, 4096));
        assert!(matches!(refused, Err(SetupError::HalfMerged)), "{refused:?}");
    }
    assert_eq!(read_all(&*fresh), vec![0; COW_SIZE as usize], "nothing was written");
    let refused = origin.snapshot(half_merged().1, &persistent());
    assert!(matches!(refused, Err(SetupError::OtherMerge)), "{refused:?}");
    let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
    assert!(!origin.is_half_merged());
    assert_eq!(read_all(&origin), content());
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    assert_eq!((beside.merge_id(), is_marked(&*cow)), (None, false));
    // A half-merged origin without a note (here a copy) gets the note when its merge starts again.
    let (below, cow) = half_merged();
    let origin = Origin::with_notes(below.clone(), Some(Box::new(beside.clone())));
    let snapshot = origin.snapshot(cow, &persistent()).unwrap();
    below.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    snapshot.merge().unwrap();
    assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
    assert!(beside.merge_id().is_some());
}

#[test]
fn note_that_cannot_be_removed_keeps_the_mark() {
    let devices = [SIZE, COW_SIZE].map(|size| Arc::new(FaultyDisk::new(size as usize, 512)));
    let [below, cow] = devices.clone();
    let beside = MemoryNotes::default();
    let noted = || Origin::with_notes(below.clone(), Some(Box::new(beside.clone())));
    drop(with_snapshot(below.clone(), cow.clone()));
    beside.1.store(true, Ordering::SeqCst);
    {
        let origin = noted();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        snapshot.merge().unwrap();
        assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
        assert_eq!(read_all(&*below), content());
    }
    assert!(is_marked(&*cow) && beside.merge_id().is_some());
    {
        // Opening the store retries the removal of the note. Until that succeeds, both the mark and
        // the note stay.
        let origin = noted();
        let refused = origin.snapshot(cow.clone(), &persistent());
        assert!(matches!(refused, Err(SetupError::MergeNoteRemains)), "{refused:?}");
        assert!(is_marked(&*cow) && origin.is_half_merged());
    }
    beside.1.store(false, Ordering::SeqCst);
    let origin = noted();
    let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
    assert!(!is_marked(&*cow) && beside.merge_id().is_none());
    assert_eq!((read_all(&origin), read_all(&snapshot)), (content(), content()));
}
