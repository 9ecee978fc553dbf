//! A thread does not call a device or wait while it is pinned (inside a lock-free section). A
//! device under another one may wait for a change that itself waits for all pins.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use freestone::consistency_group::GroupMember;
use freestone::cow::{Config as CowConfig, Origin, StoreKind};
use freestone::device::{
    Blocking, Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, TryResult,
};
use freestone::power::{Config as PowerConfig, Power};
use freestone::ram::{Config, Family, ForkConfig, Ram};
use freestone_testkit::{Model, Rng, TestDevice};

const NONE: Flags = Flags::empty();
const MIB: u64 = 1 << 20;
const PAGE: usize = 4096;
/// Deadline far above any expected duration, so that only a hang reaches it.
const LONG: Duration = Duration::from_secs(300);
/// Maximum duration of a race between threads.
const WHILE: Duration = Duration::from_secs(10);

fn ram(disksize: u64) -> Ram {
    Ram::new(Config { disksize, ..Config::default() }).unwrap()
}

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut data = vec![0; len];
    Rng::new(seed).fill(&mut data);
    data
}

// ---- callers of devices are not pinned ----------------------------------------------------------

/// Calls of a device under the tested one. Each call waits until another thread has taken a snapshot of
/// another disk. The snapshot waits for all pins of the process, including the caller's.
struct Below {
    other: Ram,
    calls: AtomicU32,
    was_pinned: AtomicBool,
}

impl Below {
    /// Returns the device, and its calls.
    fn new(size: u64, read_only: bool) -> (Arc<TestDevice>, Arc<Self>) {
        let (calls, was_pinned) = (AtomicU32::new(0), AtomicBool::new(false));
        let below = Arc::new(Self { other: ram(MIB), calls, was_pinned });
        let (request, extents) = (Arc::clone(&below), Arc::clone(&below));
        let device = TestDevice::over(Arc::new(Model::new(size as usize, 512)))
            .shaped(move |geometry| geometry.read_only = read_only)
            .on_request(move |_| request.called())
            .on_extents(move || extents.called());
        (Arc::new(device), below)
    }

    fn called(&self) {
        self.calls.fetch_add(1, Ordering::SeqCst);
        if self.was_pinned.load(Ordering::SeqCst) {
            return;
        }
        let (tx, rx) = mpsc::channel();
        let other = self.other.clone();
        thread::spawn(move || {
            other.snapshot().unwrap();
            let _ = tx.send(());
        });
        if rx.recv_timeout(Duration::from_secs(20)).is_err() {
            self.was_pinned.store(true, Ordering::SeqCst);
        }
    }

    /// Returns the number of calls since the previous query. Panics if a caller was pinned.
    fn calls(&self, what: &str) -> u32 {
        assert!(!self.was_pinned.load(Ordering::SeqCst), "{what}: the device below was called under a pin");
        self.calls.swap(0, Ordering::SeqCst)
    }
}

/// Sends every kind of request, tried inline and submitted, to whole pages and to parts of pages.
fn exercise(device: &dyn Device, below: &Below, what: &str) {
    let mut page = [0; 2 * PAGE];
    let mut calls = 0;
    for round in 0..2 {
        for (offset, len) in [(0, PAGE), (3 * 512, 512), (8 * PAGE as u64 + 512, 2 * PAGE)] {
            let step = |name| format!("{what}, {name} of {len} bytes at {offset}, round {round}");
            device.read_at(offset, &mut page[..len]).unwrap();
            calls += below.calls(&step("read"));
            if !device.geometry().read_only {
                device.write_at(offset, &noise(offset + round, len), NONE).unwrap();
                calls += below.calls(&step("write"));
                device.write_zeroes(offset, len as u64, NONE).unwrap();
                calls += below.calls(&step("write zeroes"));
                device.write_at(offset, &noise(offset, len), Flags::FUA).unwrap();
                calls += below.calls(&step("write with FUA"));
                let completion = submit(device, Request::write(offset, len as u64), &noise(round, len));
                completion.recv_timeout(LONG).unwrap().unwrap();
                calls += below.calls(&step("submitted write"));
                device.discard(offset, len as u64).unwrap();
                calls += below.calls(&step("discard"));
            }
        }
        device.flush().unwrap();
        device.extents(0, 16 * PAGE as u64, &mut |_| true).unwrap();
        calls += below.calls(&format!("{what}, flush and extents"));
    }
    assert!(calls > 0, "{what}: the device below was never called");
}

fn cow() -> CowConfig {
    CowConfig { kind: StoreKind::Transient, chunk_bytes: Some(4096), ..CowConfig::default() }
}

#[test]
fn origin_calls_its_device_unpinned() {
    let (device, below) = Below::new(MIB, false);
    let origin = Origin::new(device);
    exercise(&origin, &below, "an origin without snapshots");
    let snapshot = || origin.snapshot(Arc::new(Model::new(4 * MIB as usize, 512)), &cow()).unwrap();
    let first = snapshot();
    exercise(&origin, &below, "an origin with a snapshot");
    drop(first);
    exercise(&snapshot(), &below, "a snapshot, whose origin is asked");
}

#[test]
fn snapshot_calls_its_cow_device_unpinned() {
    let (device, store) = Below::new(4 * MIB, false);
    let origin = Origin::new(Arc::new(Model::new(MIB as usize, 512)));
    let snapshot = || origin.snapshot(Arc::clone(&device) as _, &cow()).unwrap();
    exercise(&snapshot(), &store, "a snapshot");
    let second = snapshot();
    exercise(&origin, &store, "the origin of a snapshot");
    drop(second);
}

#[test]
fn merging_snapshot_calls_its_devices_unpinned() {
    let ((device, below), (cow_device, store)) = (Below::new(MIB, false), Below::new(4 * MIB, false));
    let origin = Origin::new(device);
    let config = CowConfig { kind: StoreKind::Persistent, force: true, ..cow() };
    let snapshot = origin.snapshot(cow_device, &config).unwrap();
    for page in 0..8 {
        snapshot.write_at(page * PAGE as u64, &noise(page, PAGE), NONE).unwrap();
    }
    snapshot.merge().unwrap();
    for page in 0..8 {
        origin.write_at(page * PAGE as u64, &noise(page, 512), NONE).unwrap();
    }
    snapshot.wait_merge();
    assert!(below.calls("the origin of a merge") > 0 && store.calls("the store of a merge") > 0);
}

#[test]
fn power_layer_calls_its_device_unpinned() {
    let (device, below) = Below::new(MIB, false);
    // The cache is so small that a write must evict other blocks to the device below.
    let power = Power::new(device, PowerConfig { capacity: 8192, ..PowerConfig::default() });
    let power = power.unwrap();
    exercise(&power, &below, "a power device");
    power.write_at(0, &noise(1, PAGE), NONE).unwrap();
    power.keep(0, PAGE as u64).unwrap();
    below.calls("keep");
    power.cut(7).unwrap();
    below.calls("a cut");
}

#[test]
fn fork_calls_its_base_unpinned() {
    let (device, base) = Below::new(MIB, true);
    let family = Family::new(Config::default()).unwrap();
    let fork = family.fork(device, &ForkConfig { size: Some(2 * MIB), ..Default::default() });
    let fork = fork.unwrap();
    exercise(&fork, &base, "a fork");
    fork.rewind().unwrap();
    let snapshot = fork.snapshot().unwrap();
    exercise(&snapshot, &base, "a snapshot of a fork");
    let second = snapshot.fork(&ForkConfig::default()).unwrap();
    exercise(&second, &base, "a fork of a snapshot of a fork");
    // The write crosses the end of the base.
    let across = MIB - 512;
    second.write_at(across, &noise(1, 1024), NONE).unwrap();
    let mut back = vec![0; 2048];
    second.read_at(across - 512, &mut back).unwrap();
    assert!(back[..512] == [0; 512] && back[512..1536] == noise(1, 1024) && back[1536..] == [0; 512]);
    assert!(base.calls("a write across the end of the base") > 0);
}

// ---- changes of one device during requests of another -------------------------------------------

/// Runs `work` on its own thread. Panics if `work` does not end.
fn check_ends(what: &str, work: impl FnOnce() + Send + 'static) {
    let (tx, rx) = mpsc::channel();
    thread::spawn(move || {
        work();
        let _ = tx.send(());
    });
    match rx.recv_timeout(LONG) {
        Ok(()) => {}
        Err(mpsc::RecvTimeoutError::Timeout) => panic!("{what}: it hangs"),
        Err(mpsc::RecvTimeoutError::Disconnected) => panic!("{what}: it failed"),
    }
}

#[test]
fn snapshots_of_a_cow_device_during_writes_above_it() {
    check_ends("snapshots of a RAM disk that is a COW device", || {
        let store = ram(16 * MIB);
        let origin = Origin::new(Arc::new(Model::new(4 * MIB as usize, 512)));
        let snapshot = origin.snapshot(Arc::new(store.clone()), &cow()).unwrap();
        // All chunks have exceptions, so later writes go directly to the COW device.
        snapshot.write_at(0, &noise(1, 4 * MIB as usize), NONE).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|scope| {
            for writer in 0..2 {
                let (snapshot, stop) = (&snapshot, &stop);
                scope.spawn(move || {
                    let mut rng = Rng::new(writer);
                    while !stop.load(Ordering::SeqCst) {
                        let offset = rng.below(1024) * 4096;
                        snapshot.write_at(offset, &noise(offset, PAGE), NONE).unwrap();
                    }
                });
            }
            // On a busy machine with a sanitizer, 3000 snapshots would take a minute.
            let begun = Instant::now();
            for _ in (0..3000).take_while(|_| begun.elapsed() < WHILE) {
                drop(store.snapshot().unwrap());
            }
            stop.store(true, Ordering::SeqCst);
        });
    });
}

#[test]
fn power_layer_over_full_family_dropping_a_snapshot() {
    check_ends("a family at its limit under a power device", || {
        let disk = Ram::new(Config { disksize: 64 * MIB, mem_limit: 4 * MIB, ..Config::default() }).unwrap();
        let power =
            Power::new(Arc::new(disk.clone()), PowerConfig { capacity: 64 << 10, ..Default::default() });
        let power = power.unwrap();
        for round in 0..20_u64 {
            // Each call writes the same pages, which fill half of the memory. A snapshot between
            // two calls keeps the pages of the first call.
            let write = |seed: u64| -> Result<()> {
                for page in 0..480 {
                    power.write_at(page * PAGE as u64, &noise(seed << 32 | page, PAGE), NONE)?;
                }
                power.flush()
            };
            write(2 * round).unwrap_or_else(|error| panic!("round {round}: {error}"));
            let snapshot = disk.snapshot().unwrap();
            write(2 * round + 1).unwrap_or_else(|error| panic!("round {round}, with a snapshot: {error}"));
            drop(snapshot);
        }
    });
}

// ---- snapshots that are being taken -------------------------------------------------------------

/// Submits a request. Returns the receiver of its result.
fn submit(device: &dyn Device, request: Request, data: &[u8]) -> mpsc::Receiver<Result<()>> {
    let (tx, rx) = mpsc::channel();
    let done = Completion::new(move |outcome, _| {
        // The receiver may have been dropped after a timeout, which is not an error here.
        let _ = tx.send(outcome);
    });
    device.submit(request, IoBuf::copy_of(data).unwrap(), done);
    rx
}

#[test]
fn writes_during_snapshot_are_held_without_blocking() {
    check_ends("a write while a snapshot begins", || {
        let disk = ram(MIB);
        let old = noise(1, PAGE);
        disk.write_at(0, &old, NONE).unwrap();
        let mut pending = disk.prepare_snapshot().unwrap();
        pending.freeze(Instant::now() + LONG).unwrap();
        let new = noise(2, PAGE);
        let write = Request::write(0, PAGE as u64);
        // The test thread also thaws the disk later, so a request that blocks the test thread would
        // wait forever.
        assert_eq!(disk.try_io(&write, Buffer::Write(&new)), Ok(TryResult::WouldBlock));
        let discard = Request::new(Op::Discard, PAGE as u64, PAGE as u64);
        assert_eq!(disk.try_io(&discard, Buffer::None), Ok(TryResult::WouldBlock));
        let held = [submit(&disk, write, &new), submit(&disk, discard, &[])];
        let mut back = vec![0; PAGE];
        disk.read_at(0, &mut back).unwrap();
        assert!(back == old, "a read is not held up");
        for held in &held {
            assert_eq!(
                held.try_recv(),
                Err(mpsc::TryRecvError::Empty),
                "it was answered while writers are held up"
            );
        }
        pending.attach();
        assert_eq!(disk.try_io(&write, Buffer::Write(&new)), Ok(TryResult::WouldBlock));
        pending.thaw();
        for held in held {
            assert_eq!(held.recv_timeout(LONG), Ok(Ok(())));
        }
        let snapshot = pending.into_snapshot();
        snapshot.read_at(0, &mut back).unwrap();
        assert!(back == old, "the snapshot has what was written after it began");
        disk.read_at(0, &mut back).unwrap();
        assert!(back == new);
    });
}

#[test]
fn held_writes_resume_after_rewind_or_thaw() {
    check_ends("a write that is held", || {
        let disk = ram(MIB);
        for give_up in [false, true] {
            let mut pending = disk.prepare_snapshot().unwrap();
            pending.freeze(Instant::now() + LONG).unwrap();
            let held = submit(&disk, Request::write(0, PAGE as u64), &noise(3, PAGE));
            if give_up {
                drop(pending);
                assert_eq!(held.recv_timeout(LONG), Ok(Ok(())));
            } else {
                // After the rewind, the disk has new layers, which are not frozen.
                disk.rewind().unwrap();
                assert_eq!(held.recv_timeout(LONG), Ok(Ok(())));
                pending.thaw();
            }
            assert_eq!(disk.write_at(0, &noise(4, PAGE), NONE), Ok(()));
        }
        assert_eq!(disk.read_at(MIB, &mut [0; PAGE]), Err(Error::OutOfRange));
    });
}
