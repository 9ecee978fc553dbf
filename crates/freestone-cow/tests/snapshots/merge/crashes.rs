//! Crashes of merges, and of writes to an origin, at every step.
//!
//! Fault model of the crash tests: each block of 512 bytes of an unflushed write may or may not
//! survive a crash. Flushed data and FUA writes survive. A crash happens between any two requests
//! of either device.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use freestone_core::device::{Blocking, Flags, Op};
use freestone_cow::cow::{MergeStatus, Origin, StoreKind};
use freestone_testkit::{Model, Rng, TestDevice};

use super::{NONE, is_empty};
use crate::support::{bytes, config, read_all};

/// Writes and flushes of several devices in one order, each with the number of its device.
type Log = Arc<Mutex<Vec<(usize, Done)>>>;

#[derive(Clone)]
enum Done {
    Write { offset: u64, data: Vec<u8>, fua: bool },
    Flush,
}

type Hook = Box<dyn FnMut() + Send>;

/// A device with a volatile cache that adds each of its writes and flushes to a shared log on completion.
/// `at_flush` runs at each flush.
fn recorder_with(
    number: usize,
    size: usize,
    log: &Log,
    at_flush: Arc<Mutex<Option<Hook>>>,
) -> Arc<TestDevice> {
    let log = Arc::clone(log);
    let device = TestDevice::over(Arc::new(Model::new(size, 512)))
        .shaped(|geometry| geometry.volatile_cache = true)
        .on_done(move |request, data| {
            let data = match request.op {
                Op::Read => return,
                Op::Flush => {
                    if let Some(hook) = &mut *at_flush.lock().unwrap() {
                        hook();
                    }
                    return log.lock().unwrap().push((number, Done::Flush));
                }
                Op::Write => data.to_vec(),
                Op::Discard | Op::WriteZeroes => vec![0; request.len as usize],
            };
            let fua = request.flags.contains(Flags::FUA);
            log.lock().unwrap().push((number, Done::Write { offset: request.offset, data, fua }));
        });
    Arc::new(device)
}

fn recorder(number: usize, size: usize, log: &Log) -> Arc<TestDevice> {
    recorder_with(number, size, log, Arc::default())
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
    Arc::new(Model::filled(content.to_vec(), 512))
}

/// Crashes a merge after every request. The reopened snapshot must lose nothing, and the merge must
/// finish.
#[test]
fn crash_at_any_merge_step_loses_nothing() {
    let size = 128 << 10;
    let log = Log::default();
    let (below, cow) = (recorder(0, size, &log), recorder(1, 1 << 20, &log));
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
    let at_flush = Arc::<Mutex<Option<Hook>>>::default();
    let (below, cow) = (recorder_with(0, size, &log, Arc::clone(&at_flush)), recorder(1, 1 << 20, &log));
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
    *at_flush.lock().unwrap() = Some(Box::new(move || {
        if let Some(chunk) = writes.next() {
            let (offset, data) = (chunk * 4096 + 512, bytes(chunk + 100, 1024));
            user.write_at(offset, &data, Flags::FUA).unwrap();
            completions.lock().unwrap().push((2, Done::Write { offset, data, fua: true }));
        }
    }));
    snapshot.merge().unwrap();
    assert_eq!(snapshot.wait_merge(), MergeStatus::Finished);
    *at_flush.lock().unwrap() = None;
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
    let (below, cow) = (recorder(0, size, &log), recorder(1, 1 << 20, &log));
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
