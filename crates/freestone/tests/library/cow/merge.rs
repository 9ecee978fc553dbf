//! Merges of snapshots into their origin: during I/O, stopped and resumed, and with crashes at
//! every step.
//!
//! Fault model of the crash tests: each block of 512 bytes of an unflushed write may or may not
//! survive a crash. Flushed data and FUA writes survive. A crash happens between any two requests
//! of either device.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::Duration;

use freestone::consistency_group;
use freestone::cow::{MergeFailure, MergeSetupError, MergeStatus, Origin, Snapshot, Status, StoreKind};
use freestone::device::{
    Blocking, Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult,
};
use freestone_testkit::{FaultEffect, FaultSchedule, FaultyDisk, Model, Rng};

use crate::cow::support::{KINDS, Kind, Stop, bytes, config, read, read_all};

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

// ---- crashes ------------------------------------------------------------------------------------

/// Writes and flushes of several devices in one order, each with the number of its device.
type Log = Arc<Mutex<Vec<(usize, Done)>>>;

#[derive(Clone)]
enum Done {
    Write { offset: u64, data: Vec<u8>, fua: bool },
    Flush,
}

/// A device that adds each of its writes and flushes to a shared log on completion.
struct Recorder {
    number: usize,
    inner: Model,
    log: Log,
    /// A hook that runs at each flush.
    at_flush: Mutex<Option<Hook>>,
}

type Hook = Box<dyn FnMut() + Send>;

impl Recorder {
    fn new(number: usize, size: usize, log: &Log) -> Arc<Self> {
        let (inner, log) = (Model::new(size, 512), Arc::clone(log));
        Arc::new(Self { number, inner, log, at_flush: Mutex::default() })
    }

    fn note(&self, request: &Request, data: &[u8]) {
        let done = match request.op {
            Op::Read => return,
            Op::Flush => {
                if let Some(hook) = &mut *self.at_flush.lock().unwrap() {
                    hook();
                }
                Done::Flush
            }
            Op::Write => Done::Write {
                offset: request.offset,
                data: data.to_vec(),
                fua: request.flags.contains(Flags::FUA),
            },
            Op::Discard | Op::WriteZeroes => Done::Write {
                offset: request.offset,
                data: vec![0; request.len as usize],
                fua: request.flags.contains(Flags::FUA),
            },
        };
        self.log.lock().unwrap().push((self.number, done));
    }
}

impl Device for Recorder {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.inner.geometry() }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let data = if let Buffer::Write(data) = &buffer { data.to_vec() } else { Vec::new() };
        let tried = self.inner.try_io(request, buffer)?;
        self.note(request, &data);
        Ok(tried)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.note(&request, &buffer);
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }
}

/// Returns the contents of both devices after a crash. `rng` selects the unflushed writes that are
/// lost.
fn crashed(images: &[Vec<u8>; 2], log: &[(usize, Done)], rng: &mut Rng) -> [Vec<u8>; 2] {
    let mut stable = images.clone();
    // For each device, all versions of the blocks written since its last flush.
    let mut loose: [HashMap<u64, Vec<Vec<u8>>>; 2] = Default::default();
    for (number, done) in log {
        match done {
            Done::Flush => {
                for (block, versions) in loose[*number].drain() {
                    stable[*number][block as usize..][..512].copy_from_slice(versions.last().unwrap());
                }
            }
            Done::Write { offset, data, fua } => {
                for (at, block) in data.chunks(512).enumerate() {
                    let at = offset + at as u64 * 512;
                    if *fua {
                        loose[*number].remove(&at);
                        stable[*number][at as usize..][..512].copy_from_slice(block);
                    } else {
                        loose[*number].entry(at).or_default().push(block.to_vec());
                    }
                }
            }
        }
    }
    for number in 0..2 {
        let mut blocks: Vec<_> = loose[number].drain().collect();
        blocks.sort_unstable_by_key(|(block, _)| *block);
        for (block, versions) in blocks {
            let which = rng.below(versions.len() as u64 + 1) as usize;
            if which > 0 {
                stable[number][block as usize..][..512].copy_from_slice(&versions[which - 1]);
            }
        }
    }
    stable
}

fn model(content: &[u8]) -> Arc<Model> {
    let model = Model::new(content.len(), 512);
    model.write_at(0, content, NONE).unwrap();
    Arc::new(model)
}

/// Crashes a merge after every request. The reopened snapshot must lose nothing, and the merge must
/// finish.
#[test]
fn crash_at_any_merge_step_loses_nothing() {
    let size = 128 << 10;
    let log = Log::default();
    let recorder = |number, size| Recorder::new(number, size, &log);
    let (below, cow) = (recorder(0, size), recorder(1, 1 << 20));
    let origin = Origin::new(below.clone());
    origin.write_at(0, &bytes(1, size as u64), NONE).unwrap();
    let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
    let mut content = bytes(1, size as u64);
    // Runs of contiguous chunks, written upwards and downwards, and single chunks.
    for chunk in [3, 4, 5, 9, 8, 20, 21, 22, 23, 30, 12] {
        let data = bytes(chunk, 4096);
        snapshot.write_at(chunk * 4096, &data, NONE).unwrap();
        content[chunk as usize * 4096..][..4096].copy_from_slice(&data);
    }
    snapshot.flush().unwrap();
    origin.flush().unwrap();
    let images = [read_all(&*below), read_all(&*cow)];
    log.lock().unwrap().clear();
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    let log = log.lock().unwrap().clone();
    let flushes = log.iter().filter(|(number, done)| *number == 0 && matches!(done, Done::Flush)).count();
    assert!(log.len() > 12 && flushes >= 5, "{} requests, {flushes} flushes of the origin", log.len());
    for cut in 0..=log.len() {
        for seed in 0..4 {
            let [below, cow] = crashed(&images, &log[..cut], &mut Rng::new(seed * 1000 + cut as u64));
            let below = model(&below);
            let origin = Origin::new(below.clone());
            let snapshot = origin.snapshot(model(&cow), &config(StoreKind::Persistent, 4096)).unwrap();
            assert!(read_all(&snapshot) == content, "cut after {cut} of {}, seed {seed}", log.len());
            snapshot.merge().unwrap();
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            assert!(read_all(&*below) == content, "merged after a cut at {cut}, seed {seed}");
        }
    }
}

/// Writes the origin during a merge, and crashes after every request. The reopened origin never
/// shows a half-merged state. Durable writes survive, also after further writes and after the
/// merge.
#[test]
fn crash_during_merge_keeps_flushed_origin_writes() {
    let size = 128 << 10;
    let log = Log::default();
    let (below, cow) = (Recorder::new(0, size, &log), Recorder::new(1, 1 << 20, &log));
    let origin = Origin::new(below.clone());
    let base = bytes(1, size as u64);
    origin.write_at(0, &base, NONE).unwrap();
    let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
    let mut merged = base.clone();
    for chunk in [3, 4, 5, 9, 8, 20, 21, 22, 23, 30, 12] {
        let data = bytes(chunk, 4096);
        snapshot.write_at(chunk * 4096, &data, NONE).unwrap();
        merged[chunk as usize * 4096..][..4096].copy_from_slice(&data);
    }
    snapshot.flush().unwrap();
    origin.flush().unwrap();
    let images = [read_all(&*below), read_all(&*cow)];
    log.lock().unwrap().clear();
    // During the copy of a run, writes go to a chunk not yet merged, to a merged chunk, and to
    // chunks without an exception. The log records their completions under number 2.
    let mut writes = [3, 12, 6, 22, 4].into_iter();
    let (user, completions) = (origin.clone(), Arc::clone(&log));
    *below.at_flush.lock().unwrap() = Some(Box::new(move || {
        if let Some(chunk) = writes.next() {
            let (offset, data) = (chunk * 4096 + 512, bytes(chunk + 100, 1024));
            user.write_at(offset, &data, Flags::FUA).unwrap();
            completions.lock().unwrap().push((2, Done::Write { offset, data, fua: true }));
        }
    }));
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    *below.at_flush.lock().unwrap() = None;
    let log = log.lock().unwrap().clone();
    assert_eq!(log.iter().filter(|(number, _)| *number == 2).count(), 5);
    let mut resumed_merges = 0;
    for cut in 0..=log.len() {
        let (answered, devices): (Vec<_>, Vec<_>) =
            log[..cut].iter().cloned().partition(|(number, _)| *number == 2);
        // Completed writes survive. The write in flight may have reached the disk or not.
        let mut wanted = merged.clone();
        for (_, done) in &answered {
            let Done::Write { offset, data, .. } = done else { unreachable!() };
            wanted[*offset as usize..][..data.len()].copy_from_slice(data);
        }
        let open =
            [3, 12, 6, 22, 4].get(answered.len()).map(|chunk| (chunk * 4096 + 512, bytes(chunk + 100, 1024)));
        for seed in 0..4 {
            let at = format!("cut after {cut} of {}, seed {seed}", log.len());
            let [below, cow] = crashed(&images, &devices, &mut Rng::new(seed * 1000 + cut as u64));
            let (below, cow) = (model(&below), model(&cow));
            let mut wanted = wanted.clone();
            {
                let origin = Origin::new(below.clone());
                let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
                let shown = read_all(&origin);
                if shown == base {
                    assert!(answered.is_empty() && snapshot.merge_status() == MergeStatus::None, "{at}");
                    continue;
                }
                if let Some((offset, data)) = &open {
                    let range = *offset as usize..*offset as usize + data.len();
                    for (at, block) in data.chunks(512).enumerate() {
                        let range = range.start + at * 512..range.start + (at + 1) * 512;
                        if shown[range.clone()] == *block {
                            wanted[range].copy_from_slice(block);
                        }
                    }
                }
                assert!(shown == wanted, "{at}: the origin");
                assert!(read_all(&snapshot) == wanted, "{at}: the snapshot");
                if snapshot.merge_status() == MergeStatus::None {
                    // The merge has finished, so this is a new, empty snapshot.
                    assert!(is_empty(&snapshot) && read_all(&*below) == wanted, "{at}");
                    continue;
                }
                resumed_merges += u32::from(snapshot.merge_status() == MergeStatus::Stopped);
                for chunk in [5, 8, 11, 23] {
                    let data = bytes(chunk + 200, 512);
                    origin.write_at(chunk * 4096, &data, Flags::FUA).unwrap();
                    wanted[chunk as usize * 4096..][..512].copy_from_slice(&data);
                }
                // Drops origin and snapshot, so that they are opened a second time before the merge
                // continues.
            }
            let origin = Origin::new(below.clone());
            let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
            assert!(read_all(&origin) == wanted, "{at}: the origin, a second time");
            snapshot.merge().unwrap();
            assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
            assert!(read_all(&*below) == wanted, "{at}: what was merged");
            drop((snapshot, origin));
            let origin = Origin::new(below.clone());
            let snapshot = origin.snapshot(cow, &config(StoreKind::Persistent, 4096)).unwrap();
            assert_eq!((snapshot.merge_status(), is_empty(&snapshot)), (MergeStatus::None, true), "{at}");
            assert!(read_all(&origin) == wanted, "{at}: after the merge");
        }
    }
    assert!(resumed_merges > 50, "{resumed_merges} merges were taken up");
}

/// Crashes an origin with a snapshot after every request of its writes. The snapshot keeps its
/// content.
#[test]
fn crash_during_origin_writes_keeps_snapshots() {
    let size = 128 << 10;
    let log = Log::default();
    let recorder = |number, size| Recorder::new(number, size, &log);
    let (below, cow) = (recorder(0, size), recorder(1, 1 << 20));
    let origin = Origin::new(below.clone());
    origin.write_at(0, &bytes(1, size as u64), NONE).unwrap();
    origin.flush().unwrap();
    let snapshot = origin.snapshot(cow.clone(), &config(StoreKind::Persistent, 4096)).unwrap();
    let content = read_all(&snapshot);
    let images = [read_all(&*below), read_all(&*cow)];
    log.lock().unwrap().clear();
    let mut rng = Rng::new(4);
    for write in 0..24 {
        let len = 512 << rng.below(6);
        let offset = rng.below((size as u64 - len) / 512 + 1) * 512;
        origin.write_at(offset, &bytes(write, len), NONE).unwrap();
    }
    let log = log.lock().unwrap().clone();
    for cut in 0..=log.len() {
        for seed in 0..4 {
            let [below, cow] = crashed(&images, &log[..cut], &mut Rng::new(seed * 1000 + cut as u64));
            let origin = Origin::new(model(&below));
            let snapshot = origin.snapshot(model(&cow), &config(StoreKind::Persistent, 4096)).unwrap();
            assert!(read_all(&snapshot) == content, "cut after {cut} of {}, seed {seed}", log.len());
        }
    }
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
