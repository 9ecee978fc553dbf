//! Order of commits, full exception stores and failures, as the callers of a store see them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking, Device, Error, Op};
use freestone_cow::cow::StoreKind;
use freestone_cow::cow::store::{AllocateError, Invalid, MergeError, Store};
use freestone_testkit::{DeferPolicy, DeferringDevice, FaultEffect, FaultSchedule, FaultyDisk, Rng};

use super::disk::Disk;
use super::{CHUNK, SOON, commit, open, origin, preserve, preserve_all};

/// Long enough to show that a completion does not arrive without an event.
const A_WHILE: Duration = Duration::from_millis(30);

fn faulty(chunks: u64) -> Arc<FaultyDisk> {
    Arc::new(FaultyDisk::new((chunks * CHUNK) as usize, 512))
}

fn disk(chunks: u64) -> Arc<Disk> {
    Disk::new(vec![0; (chunks * CHUNK) as usize])
}

// ---- groups and order ---------------------------------------------------------------------------

#[test]
fn group_waits_for_pending_copies() {
    let disk = disk(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    disk.start();
    let [first, second, third] = [(); 3].map(|()| store.allocate().unwrap());
    let third = commit(&store, third, 30);
    let first = commit(&store, first, 10);
    thread::sleep(A_WHILE);
    assert_eq!((first.try_recv(), third.try_recv()), (Err(TryRecvError::Empty), Err(TryRecvError::Empty)));
    assert_eq!(disk.history(), [] as [&str; 0]);
    let second = commit(&store, second, 20);
    for completion in [first, second, third] {
        assert_eq!(completion.recv_timeout(SOON), Ok(Ok(())));
    }
    assert_eq!(disk.history(), ["flush", "4096+4096 fua"]);
    drop(store);
    assert_eq!(open(disk as Arc<dyn Device>).1, [(10, 2), (20, 3), (30, 4)]);
}

#[test]
fn full_area_commits_without_waiting() {
    let disk = disk(600);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    let mut places: Vec<_> = (0..260).map(|_| store.allocate().unwrap()).collect();
    let last = places.pop().unwrap();
    let completions: Vec<_> = (0..).zip(places).map(|(old, place)| commit(&store, place, old)).collect();
    for completion in &completions[..256] {
        assert_eq!(completion.recv_timeout(SOON), Ok(Ok(())));
    }
    assert_eq!(completions[256].recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
    // The group waits only for the last place, so dropping this place commits the group.
    drop(last);
    for completion in &completions[256..] {
        assert_eq!(completion.recv_timeout(SOON), Ok(Ok(())));
    }
    drop((store, completions));
    let (store, found) = open(disk as Arc<dyn Device>);
    assert_eq!(found.len(), 259);
    // The unused place was the last one that was allocated, so it can be allocated again.
    assert_eq!(store.allocate().unwrap().chunk(), 262);
}

#[test]
fn dropped_place_stays_unused() {
    let disk = disk(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    let dropped = store.allocate().unwrap();
    let kept = store.allocate().unwrap();
    let completion = commit(&store, kept, 7);
    assert_eq!(completion.recv_timeout(A_WHILE), Err(RecvTimeoutError::Timeout));
    drop(dropped);
    assert_eq!(completion.recv_timeout(SOON), Ok(Ok(())));
    assert_eq!(preserve(&store, 8), 4);
    drop(store);
    assert_eq!(open(disk as Arc<dyn Device>).1, [(7, 3), (8, 4)]);
}

#[test]
fn exceptions_during_a_commit_form_the_next_group() {
    let disk = faulty(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    disk.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::Hang);
    let first = commit(&store, store.allocate().unwrap(), 0);
    disk.wait_held(1);
    let others: Vec<_> = (1..20).map(|old| commit(&store, store.allocate().unwrap(), old)).collect();
    assert_eq!(first.try_recv(), Err(TryRecvError::Empty));
    disk.heal();
    for completion in others.iter().chain([&first]) {
        assert_eq!(completion.recv_timeout(SOON), Ok(Ok(())));
    }
    let stats = store.stats();
    assert_eq!((stats.exceptions, stats.groups, stats.largest_group), (20, 2, 19));
}

/// Many threads allocate and commit, and leave some places unused. The device completes requests
/// late and in any order.
#[test]
fn entries_are_in_allocation_order() {
    for seed in 0..3 {
        let disk = disk(1200);
        let cow = Arc::new(DeferringDevice::new(
            Arc::clone(&disk) as Arc<dyn Device>,
            DeferPolicy::Sometimes(50),
            seed,
        ));
        let (store, _) = open(cow as Arc<dyn Device>);
        let next = AtomicU64::new(0);
        let durable = Mutex::new(Vec::new());
        thread::scope(|scope| {
            for worker in 0..6 {
                let (store, next, durable) = (&store, &next, &durable);
                scope.spawn(move || {
                    let mut rng = Rng::new(seed * 100 + worker);
                    for _ in 0..40 {
                        let places: Vec<_> = (0..=rng.below(4)).map(|_| store.allocate().unwrap()).collect();
                        let mut completions = Vec::new();
                        for place in places.into_iter().rev().filter(|_| !rng.chance(10)) {
                            let old = next.fetch_add(1, Ordering::SeqCst);
                            let new = place.chunk();
                            completions.push((old, new, commit(store, place, old)));
                        }
                        for (old, new, completion) in completions {
                            assert_eq!(completion.recv_timeout(SOON), Ok(Ok(())));
                            durable.lock().unwrap().push((old, new));
                        }
                    }
                });
            }
        });
        drop(store);
        let mut durable = durable.into_inner().unwrap();
        let bytes = disk.bytes();
        let entry = |number: usize| {
            let at = (1 + number / 256 * 257) * CHUNK as usize + number % 256 * 16;
            let half = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
            (half(at), half(at + 8))
        };
        let entries: Vec<_> = (0..durable.len()).map(entry).collect();
        durable.sort_unstable_by_key(|&(_, new)| new);
        assert_eq!(entries, durable);
        durable.sort_unstable();
        assert_eq!(open(disk as Arc<dyn Device>).1, durable);
    }
}

// ---- callbacks ----------------------------------------------------------------------------------

/// A callback of `commit` may allocate and commit, or drop the last reference to the store. A panic
/// ends only the callback that caused it.
#[test]
fn callbacks_may_use_the_store() {
    fn chain(store: &Arc<Store>, left: u64, tx: mpsc::Sender<u64>) {
        let place = store.allocate().unwrap();
        let again = Arc::clone(store);
        store.commit(place, left, Ok(()), move |outcome| {
            assert_eq!(outcome, Ok(()));
            tx.send(left).unwrap();
            match left {
                0 => drop(again),
                5 => {
                    chain(&again, 4, tx);
                    panic!("a callback that panics, on purpose");
                }
                _ => chain(&again, left - 1, tx),
            }
        });
    }
    let disk = disk(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    let (tx, rx) = mpsc::channel();
    chain(&store, 10, tx);
    drop(store);
    assert_eq!(rx.iter().collect::<Vec<_>>(), (0..=10).rev().collect::<Vec<_>>());
    assert_eq!(open(disk as Arc<dyn Device>).1.len(), 11);
}

/// A hung disk delays only the callers that wait for its completions.
#[test]
fn hung_disk_delays_only_its_callers() {
    let disk = faulty(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    disk.fault(None, FaultSchedule::Always, FaultEffect::Hang);
    let hangs = commit(&store, store.allocate().unwrap(), 1);
    disk.wait_held(1);
    // None of these calls waits for the hung disk.
    let late = commit(&store, store.allocate().unwrap(), 2);
    assert_eq!(store.usage().allocated, 4 * 8);
    let (tx, given_up) = mpsc::channel();
    store.invalidate(move || tx.send(()).unwrap());
    assert!(!store.is_valid());
    assert!(store.allocate().is_err());
    // Another store on another disk still works.
    let (other, _) = open(self::disk(64) as Arc<dyn Device>);
    preserve(&other, 1);
    assert_eq!(given_up.try_recv(), Err(TryRecvError::Empty));
    disk.heal();
    assert_eq!(given_up.recv_timeout(SOON), Ok(()));
    assert_eq!((hangs.recv_timeout(SOON), late.recv_timeout(SOON)), (Ok(Err(Invalid)), Ok(Err(Invalid))));
    drop(store);
    assert!(!open(disk as Arc<dyn Device>).0.is_valid());
}

/// A removed COW device fails all requests.
#[test]
fn removed_disk_makes_snapshot_invalid() {
    let disk = faulty(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    disk.fault(None, FaultSchedule::Always, FaultEffect::Fail(Error::Gone));
    // All places are allocated before the commits, because the store allocates none after the first
    // failure.
    let places: Vec<_> = (0..5).map(|_| store.allocate().unwrap()).collect();
    let completions: Vec<_> = (0..).zip(places).map(|(old, place)| commit(&store, place, old)).collect();
    for completion in completions {
        assert_eq!(completion.recv_timeout(SOON), Ok(Err(Invalid)));
    }
    assert!(!store.is_valid());
}

// ---- full and invalid stores --------------------------------------------------------------------

#[test]
fn full_store_keeps_its_exceptions() {
    for chunks in [3, 4, 64] {
        let disk = disk(chunks);
        let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
        preserve_all(&store, 0..chunks - 2);
        assert_eq!(store.allocate().map(|place| place.chunk()), Err(AllocateError::Full));
        assert_eq!(store.usage().to_string(), format!("{0}/{0} 16", chunks * 8));
        assert!(store.is_valid());
        drop(store);
        assert_eq!(open(disk as Arc<dyn Device>).1.len() as u64, chunks - 2);
    }
    // Like the kernel, the store opens a device that has space only for the metadata.
    assert!(open(disk(2) as Arc<dyn Device>).0.allocate().is_err());
}

#[test]
fn partial_chunk_at_the_end_is_not_used() {
    let disk = Disk::new(vec![0; 4 * CHUNK as usize + 2048]);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve_all(&store, 0..2);
    assert!(store.allocate().is_err());
    assert_eq!(store.usage().to_string(), "32/36 16");
}

#[test]
fn failed_copy_writes_invalid_header_first() {
    let disk = faulty(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve(&store, 1);
    let [good, bad, pending] = [(); 3].map(|()| store.allocate().unwrap());
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    let good = commit(&store, good, 2);
    let (tx, failed) = mpsc::channel();
    store.commit(bad, 3, Err(Error::Media), move |outcome| tx.send(outcome).unwrap());
    disk.wait_held(1);
    // No caller may complete before the header is invalid on disk. The caller would then overwrite
    // the origin, and a crash would bring the snapshot back as valid.
    let early = failed.recv_timeout(A_WHILE);
    disk.heal();
    assert_eq!(early, Err(RecvTimeoutError::Timeout));
    for completion in [good, failed, commit(&store, pending, 4)] {
        assert_eq!(completion.recv_timeout(SOON), Ok(Err(Invalid)));
    }
    assert!(!store.is_valid());
    assert_eq!(store.last_run(), Err(MergeError::Invalid));
    drop(store);
    let (store, found) = open(disk as Arc<dyn Device>);
    assert!(!store.is_valid() && found.is_empty());
    assert_eq!(store.allocate().map(|place| place.chunk()), Err(AllocateError::Invalid));
}

#[test]
fn failed_commit_writes_invalid_header_first() {
    let disk = faulty(64);
    let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
    preserve(&store, 1);
    disk.fault(Some(Op::Flush), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
    disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Hang);
    let failed = commit(&store, store.allocate().unwrap(), 2);
    // The write of the invalid header hangs.
    disk.wait_held(1);
    let early = failed.recv_timeout(A_WHILE);
    disk.heal();
    assert_eq!(early, Err(RecvTimeoutError::Timeout));
    assert_eq!(failed.recv_timeout(SOON), Ok(Err(Invalid)));
    assert!(!store.is_valid());
    drop(store);
    assert!(!open(disk as Arc<dyn Device>).0.is_valid());
}

/// If a COW device fails temporarily, the store retries its invalid header. Otherwise the snapshot
/// would be valid when it is reopened.
#[test]
fn failed_invalid_header_is_retried() {
    for dropped in [false, true] {
        let disk = faulty(64);
        let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
        preserve(&store, 1);
        disk.fault(Some(Op::Write), FaultSchedule::Always, FaultEffect::Fail(Error::Media));
        let failed = commit(&store, store.allocate().unwrap(), 2);
        // The commit fails after a limited time, so that the origin does not wait forever.
        assert_eq!(failed.recv_timeout(SOON), Ok(Err(Invalid)));
        assert!(store.is_unmarked());
        disk.heal();
        let is_marked = || {
            let mut block = [0xFF; 4096];
            disk.read_at(0, &mut block).unwrap();
            block[4..8] == [0; 4]
        };
        if dropped {
            drop(store);
            assert!(is_marked(), "the device still says that the snapshot is good");
        } else {
            let start = Instant::now();
            while !is_marked() || store.is_unmarked() {
                assert!(start.elapsed() < SOON, "the device still says that the snapshot is good");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

/// Each operation of a run fails once. Afterwards, either every exception reported as durable
/// exists, or the snapshot is invalid.
#[test]
fn any_operation_may_fail() {
    for what in [FaultEffect::Fail(Error::Media), FaultEffect::Fail(Error::NoSpace), FaultEffect::Tear] {
        let mut hit = 0;
        for number in 0.. {
            let disk = faulty(300);
            let (store, _) = open(Arc::clone(&disk) as Arc<dyn Device>);
            preserve_all(&store, 0..250);
            let before = disk.counts().total();
            disk.fault(None, FaultSchedule::At(before + number), what);
            let mut outcomes = Vec::new();
            for old in 250..262 {
                let Ok(place) = store.allocate() else { break };
                let completion = commit(&store, place, old).recv_timeout(SOON).expect("it is answered");
                outcomes.push((old, completion.is_ok()));
            }
            let done = disk.counts().total() - before <= number;
            disk.heal();
            let valid = store.is_valid();
            drop(store);
            let (store, found) = open(Arc::clone(&disk) as Arc<dyn Device>);
            assert_eq!(store.is_valid(), valid, "operation {number}");
            assert_eq!(valid, outcomes.iter().all(|&(_, good)| good), "operation {number}");
            if valid {
                assert_eq!(found.len(), 262, "operation {number}");
            }
            hit += u64::from(!valid);
            assert_eq!(disk.violations(), [] as [&str; 0]);
            if done {
                break;
            }
        }
        // The snapshot becomes invalid if one of these fails: the flush or area write of any of the
        // 12 commits, or the zeroing of the next area.
        assert_eq!(hit, 2 * 12 + 1, "{what:?}");
    }
}

// ---- transient stores ---------------------------------------------------------------------------

#[test]
fn transient_store_has_no_metadata() {
    let mut bytes = vec![0x33; 10 * CHUNK as usize + 512];
    bytes[0] = 1;
    let disk = Disk::new(bytes);
    let (store, found) =
        Store::open(Arc::clone(&disk) as Arc<dyn Device>, StoreKind::Transient, Some(CHUNK), &origin())
            .unwrap();
    assert!(found.is_empty() && store.is_valid());
    assert_eq!(store.usage().to_string(), "0/81 0");
    for new in 0..10 {
        let place = store.allocate().unwrap();
        assert_eq!((place.chunk(), place.byte()), (new, new * CHUNK));
        // A transient store writes nothing, so the callback runs before `commit` returns.
        assert_eq!(commit(&store, place, new).try_recv(), Ok(Ok(())));
    }
    assert_eq!(store.usage().to_string(), "80/81 0");
    assert_eq!(store.allocate().map(|place| place.chunk()), Err(AllocateError::Full));
    assert_eq!(store.last_run(), Err(MergeError::Transient));
    assert!(store.is_valid());
    assert_eq!(disk.history(), [] as [&str; 0]);
}

#[test]
fn failed_copy_invalidates_transient_store() {
    let transient = || Store::open(disk(16), StoreKind::Transient, Some(CHUNK), &origin()).unwrap().0;
    let store = transient();
    let [first, second] = [(); 2].map(|()| store.allocate().unwrap());
    store.commit(first, 1, Err(Error::Media), |outcome| assert_eq!(outcome, Err(Invalid)));
    assert!(!store.is_valid());
    assert_eq!(commit(&store, second, 2).try_recv(), Ok(Err(Invalid)));
    assert_eq!(store.allocate().map(|place| place.chunk()), Err(AllocateError::Invalid));
    let store = transient();
    let (tx, rx) = mpsc::channel();
    store.invalidate(move || tx.send(()).unwrap());
    assert_eq!(rx.try_recv(), Ok(()));
    assert!(!store.is_valid());
}
