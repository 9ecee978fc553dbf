//! Marks of a running merge, on the store and in the notes of the origin: when they are set and
//! removed, and what they refuse.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use freestone::consistency_group;
use freestone::cow::{MergeSetupError, MergeStatus, Notes, Origin, SetupError, Snapshot, StoreKind};
use freestone::device::{Blocking, Device, Error, Flags, Op};
use freestone_testkit::{Faulty, Model, What, When};

use crate::cow::support::{bytes, config, read, read_all};

const SIZE: u64 = 256 << 10;
const COW_SIZE: u64 = 1 << 20;
const NONE: Flags = Flags::empty();
/// Header bytes that hold the mark.
const MARK: std::ops::Range<usize> = 16..48;

fn persistent() -> freestone::cow::Config {
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

/// Returns the devices of a merge of which one run of chunks is finished.
fn half_merged() -> (Arc<Faulty>, Arc<Faulty>) {
    let devices = [SIZE, COW_SIZE].map(|size| Arc::new(Faulty::new(size as usize, 512)));
    let [below, cow] = devices.clone();
    let (_origin, snapshot) = with_snapshot(below.clone(), cow);
    below.fault(Some(Op::Flush), When::At(1), What::Fail(Error::Media));
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
        (Arc::new(Faulty::new(SIZE as usize, 512)), Arc::new(Faulty::new(COW_SIZE as usize, 512)));
    let (origin, snapshot) = with_snapshot(below.clone(), cow.clone());
    assert!(!is_marked(&*cow));
    below.fault(Some(Op::Write), When::Always, What::Fail(Error::Media));
    snapshot.merge().unwrap();
    assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
    assert!(is_marked(&*cow), "before anything was copied");
    below.heal();
    assert_eq!(read_all(&*below), bytes(1, SIZE));
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    assert!(!is_marked(&*cow));
    assert_eq!(read_all(&*below), content());
    assert_eq!(origin.snapshots(), 0);
}

#[test]
fn marked_store_resumes_its_merge_when_opened() {
    let (below, cow) = half_merged();
    let origin = Origin::new(below.clone());
    // Stores that existed before can be opened as well; new ones are refused.
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
    assert_eq!(origin.snapshots(), 0);
    let snapshot = origin.snapshot(cow, &persistent()).unwrap();
    assert_eq!(read_all(&snapshot), content());
}

/// A transient store would overwrite it.
#[test]
fn marked_store_is_not_overwritten() {
    let (below, cow) = half_merged();
    let before = read_all(&*cow);
    let refused = Origin::new(below).snapshot(cow.clone(), &config(StoreKind::Transient, 4096));
    assert!(matches!(refused, Err(SetupError::HalfMerged)), "{refused:?}");
    assert_eq!(read_all(&*cow), before);
}

/// The crash happened before the mark was removed. Or the kernel, which does not know the mark,
/// finished the merge.
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

/// The kernel finished the merge, left the mark, and then stored other exceptions.
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
        for what in [What::Fail(Error::Media), What::Tear] {
            let (below, cow) =
                (Arc::new(Faulty::new(SIZE as usize, 512)), Arc::new(Faulty::new(COW_SIZE as usize, 512)));
            let (origin, snapshot) = with_snapshot(below.clone(), cow.clone());
            let when = if lost { When::Always } else { When::At(cow.counts().writes) };
            cow.fault(Some(Op::Write), when, what);
            let refused = snapshot.merge().unwrap_err();
            cow.heal();
            // The origin works by itself, and flushed writes are not merged over after a crash.
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

/// Notes that outlive an origin. If the second field is true, they cannot be removed.
#[derive(Clone, Default)]
struct MemoryNotes(Arc<Mutex<Option<(u64, String)>>>, Arc<AtomicBool>);

impl Notes for MemoryNotes {
    fn merge(&self) -> Option<u64> {
        self.0.lock().unwrap().as_ref().map(|(id, _)| *id)
    }
    fn merge_begins(&self, id: u64, store: &str) {
        *self.0.lock().unwrap() = Some((id, store.to_owned()));
    }
    fn merge_ended(&self) -> bool {
        if self.1.load(Ordering::SeqCst) {
            return false;
        }
        *self.0.lock().unwrap() = None;
        true
    }
}

#[test]
fn half_merged_origin_has_a_note() {
    let devices = [SIZE, COW_SIZE].map(|size| Arc::new(Faulty::new(size as usize, 512)));
    let [below, cow] = devices.clone();
    let beside = MemoryNotes::default();
    let noted = || Origin::noted(below.clone(), Some(Box::new(beside.clone())));
    {
        drop(with_snapshot(below.clone(), cow.clone()));
        let origin = noted();
        let mut pending = origin.prepare_snapshot(cow.clone(), &persistent()).unwrap().at("the store");
        consistency_group::take(&mut [&mut pending]).unwrap();
        let snapshot = pending.into_snapshot();
        assert!(!origin.is_half_merged() && beside.merge().is_none());
        below.fault(Some(Op::Flush), When::At(1), What::Fail(Error::Media));
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
    assert_eq!((beside.merge(), is_marked(&*cow)), (None, false));
    // A copy of the origin without the note gets it again.
    let (below, cow) = half_merged();
    let origin = Origin::noted(below.clone(), Some(Box::new(beside.clone())));
    let snapshot = origin.snapshot(cow, &persistent()).unwrap();
    below.fault(Some(Op::Write), When::Always, What::Fail(Error::Media));
    snapshot.merge().unwrap();
    assert!(matches!(snapshot.wait_merge(), MergeStatus::Failed(_)));
    assert!(beside.merge().is_some());
}

#[test]
fn note_that_cannot_be_removed_keeps_the_mark() {
    let devices = [SIZE, COW_SIZE].map(|size| Arc::new(Faulty::new(size as usize, 512)));
    let [below, cow] = devices.clone();
    let beside = MemoryNotes::default();
    let noted = || Origin::noted(below.clone(), Some(Box::new(beside.clone())));
    drop(with_snapshot(below.clone(), cow.clone()));
    beside.1.store(true, Ordering::SeqCst);
    {
        let origin = noted();
        let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
        snapshot.merge().unwrap();
        assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
        assert_eq!(read_all(&*below), content());
    }
    assert!(is_marked(&*cow) && beside.merge().is_some());
    {
        // Opening the store retries the removal. Until it succeeds, mark and note stay.
        let origin = noted();
        let refused = origin.snapshot(cow.clone(), &persistent());
        assert!(matches!(refused, Err(SetupError::NoteStays)), "{refused:?}");
        assert!(is_marked(&*cow) && origin.is_half_merged());
    }
    beside.1.store(false, Ordering::SeqCst);
    let origin = noted();
    let snapshot = origin.snapshot(cow.clone(), &persistent()).unwrap();
    assert!(!is_marked(&*cow) && beside.merge().is_none());
    assert_eq!((read_all(&origin), read_all(&snapshot)), (content(), content()));
}
