//! Tests of lost connections and restarted servers: flushed data survives, flushes report possible
//! losses, and no request waits forever.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone_core::device::{
    Blocking as _, Buffer, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult,
};
use freestone_core::plug::Plug;
use freestone_nbd::{ExportOptions, Server};
use freestone_nbd_client::{Config, Nbd};
use freestone_testkit::{Model, Rng};

use crate::fake::{DEFAULT_EXPORT, ExportSpec, Fake};
use crate::harness::{TestAddress, begin, eventually, wait_result};

const SIZE: usize = 1 << 20;
const BLOCK: usize = 512;

/// A disk with a volatile cache. `stable` contains the content that was flushed.
struct CachedDisk {
    cache: Model,
    stable: Mutex<Vec<u8>>,
}

impl CachedDisk {
    fn new(stable: Vec<u8>) -> Arc<Self> {
        let cache = Model::new(stable.len(), BLOCK as u32);
        cache.write_at(0, &stable, Flags::empty()).unwrap();
        Arc::new(Self { cache, stable: Mutex::new(stable) })
    }

    fn stable(&self) -> Vec<u8> {
        self.stable.lock().unwrap().clone()
    }

    fn settle(&self, offset: u64, len: u64) {
        let range = offset as usize..(offset + len) as usize;
        let mut stable = self.stable.lock().unwrap();
        self.cache.read_at(offset, &mut stable[range]).unwrap();
    }
}

impl Device for CachedDisk {
    fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.cache.geometry() }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let done = self.cache.try_io(request, buffer)?;
        assert_eq!(done, TryResult::Done);
        if request.op == Op::Flush {
            self.settle(0, self.geometry().size);
        } else if request.flags.contains(Flags::FUA) {
            self.settle(request.offset, request.len);
        }
        Ok(done)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.cache.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.cache.extents(offset, len, row)
    }
}

/// A server over a [`CachedDisk`] that can crash.
struct CrashServer {
    place: TestAddress,
    running: Option<(Server, Arc<CachedDisk>)>,
    stable: Vec<u8>,
}

impl CrashServer {
    fn new() -> Self {
        let mut machine = Self { place: TestAddress::new(), running: None, stable: vec![0; SIZE] };
        machine.start();
        machine
    }

    fn start(&mut self) {
        let disk = CachedDisk::new(std::mem::take(&mut self.stable));
        self.running = Some((self.place.serve(disk.clone()), disk));
    }

    /// Crashes the server: cuts all connections without replies, and discards the disk's cache.
    fn kill(&mut self) {
        let (server, disk) = self.running.take().unwrap();
        server.cut_connections_during("disk", || {});
        drop(server);
        // A client may reconnect after the cut, so the flushed content is read after the server has
        // ended.
        self.stable = disk.stable();
    }

    /// Cuts all connections; the disk keeps its cache.
    fn cut(&self) {
        self.running.as_ref().unwrap().0.cut_connections_during("disk", || {});
    }

    fn config(&self, timeout: Duration) -> Config {
        Config { timeout, ..self.place.config() }
    }

    fn open(&self, timeout: Duration) -> Nbd {
        Nbd::open(&self.config(timeout)).unwrap()
    }
}

const LONG: Duration = Duration::from_secs(20);

#[test]
fn flush_fails_once_after_unflushed_writes_are_lost() {
    let mut machine = CrashServer::new();
    let device = machine.open(LONG);
    let again = |machine: &mut CrashServer| {
        machine.kill();
        machine.start();
    };
    // Nothing was written before the crash, so the next flush succeeds.
    again(&mut machine);
    assert_eq!(device.flush(), Ok(()));
    // Data that was written and flushed survives the crash.
    device.write_at(0, &[1; BLOCK], Flags::empty()).unwrap();
    assert_eq!(device.flush(), Ok(()));
    again(&mut machine);
    assert_eq!(device.flush(), Ok(()));
    let mut data = [0; BLOCK];
    device.read_at(0, &mut data).unwrap();
    assert_eq!(data, [1; BLOCK]);
    // Data that was written with FUA survives the crash.
    device.write_at(0, &[2; BLOCK], Flags::FUA).unwrap();
    again(&mut machine);
    assert_eq!(device.flush(), Ok(()));
    device.read_at(0, &mut data).unwrap();
    assert_eq!(data, [2; BLOCK]);
    // Without a flush, completed writes are lost in the crash, and the next flush fails.
    for change in [
        |device: &Nbd| device.write_at(0, &[3; BLOCK], Flags::empty()),
        |device: &Nbd| device.write_zeroes(0, BLOCK as u64, Flags::empty()),
        |device: &Nbd| device.discard(0, BLOCK as u64),
    ] {
        change(&device).unwrap();
        again(&mut machine);
        assert_eq!(device.flush(), Err(Error::Media));
        assert_eq!(device.flush(), Ok(()));
        device.read_at(0, &mut data).unwrap();
        assert_eq!(data, [2; BLOCK]);
    }
    // A single flush reports two earlier losses together, even after a later write with FUA.
    device.write_at(0, &[4; BLOCK], Flags::empty()).unwrap();
    again(&mut machine);
    device.write_at(0, &[5; BLOCK], Flags::empty()).unwrap();
    again(&mut machine);
    device.write_at(0, &[6; BLOCK], Flags::FUA).unwrap();
    assert_eq!(device.flush(), Err(Error::Media));
    assert_eq!(device.flush(), Ok(()));
    assert!(device.reconnects() >= 8 && device.last_error().is_some());
}

#[test]
fn requests_without_reply_are_resent() {
    let mut machine = CrashServer::new();
    let device = machine.open(LONG);
    machine.kill();
    let (begun, data) = (Instant::now(), [7; BLOCK]);
    let write = begin(&device, Request::write(0, BLOCK as u64).with(Flags::FUA), &data);
    let read = begin(&device, Request::read(BLOCK as u64, BLOCK as u64), &[]);
    let flush = begin(&device, Request::flush(), &[]);
    // The second read waits for the write to the same block.
    let after = begin(&device, Request::read(0, BLOCK as u64), &[]);
    std::thread::sleep(Duration::from_millis(300));
    assert!(write.try_recv().is_err() && read.try_recv().is_err());
    machine.start();
    assert!(wait_result(&write).is_ok() && wait_result(&flush).is_ok());
    assert_eq!(wait_result(&read).unwrap()[..], [0; BLOCK]);
    assert_eq!(wait_result(&after).unwrap()[..], data);
    assert!(begun.elapsed() < Duration::from_secs(10));
    let mut rows = 0;
    assert_eq!(device.extents(0, SIZE as u64, &mut |_| (rows += 1, true).1), Ok(SIZE as u64));
    assert!(rows > 0);
}

/// Blocks under a plug, as the NBD server does with requests that arrive together.
#[test]
fn blocking_call_under_plug_completes() {
    let machine = CrashServer::new();
    let device = machine.open(LONG);
    // Waits until the threads of idle connections sleep.
    eventually("all are connected", || device.connections() == freestone_nbd_client::DEFAULT_CONNECTIONS);
    std::thread::sleep(Duration::from_millis(100));
    let (tell, told) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let plug = Plug::start();
        let read = begin(&device, Request::read(0, BLOCK as u64), &[]);
        let described = device.extents(0, SIZE as u64, &mut |_| true);
        let again = begin(&device, Request::read(0, BLOCK as u64), &[]);
        let flushed = device.flush();
        let answered = wait_result(&read).is_ok() && wait_result(&again).is_ok();
        drop(plug);
        let _ = tell.send((described, flushed, answered));
    });
    assert_eq!(told.recv_timeout(LONG), Ok((Ok(SIZE as u64), Ok(()), true)));
}

#[test]
fn requests_fail_after_timeout_until_reconnected() {
    let mut machine = CrashServer::new();
    let timeout = Duration::from_secs(2);
    let device = machine.open(timeout);
    machine.kill();
    eventually("the loss is seen", || device.connections() == 0);
    let begun = Instant::now();
    let flush = begin(&device, Request::flush(), &[]);
    let write = begin(&device, Request::write(0, BLOCK as u64), &[1; BLOCK]);
    let behind = begin(&device, Request::read(0, BLOCK as u64), &[]);
    for told in [&write, &behind, &flush] {
        assert!(matches!(wait_result(told), Err(Error::Media)));
    }
    assert!((timeout / 2..LONG).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    // After the timeout, requests fail at once until the client reconnects.
    let begun = Instant::now();
    assert_eq!(device.read_at(0, &mut [0; BLOCK]), Err(Error::Media));
    assert_eq!(device.extents(0, 4096, &mut |_| true), Err(Error::Media));
    assert!(begun.elapsed() < 2 * timeout);
    machine.start();
    eventually("it is connected again", || device.connections() > 0);
    assert_eq!(device.read_at(0, &mut [0; BLOCK]), Ok(()));
    assert_eq!(device.flush(), Ok(()));
    assert!(device.last_error().is_some());
}

#[test]
fn reconnect_refuses_changed_but_accepts_grown_export() {
    let place = TestAddress::new();
    let server = place.serve(Arc::new(Model::new(SIZE, 512)));
    let device = Nbd::open(&Config { timeout: Duration::from_secs(1), ..place.config() }).unwrap();
    drop(server);
    let read_only = ExportOptions { read_only: true, ..ExportOptions::default() };
    for (size, options, why) in [
        (SIZE / 2, ExportOptions::default(), "it has 524288 bytes, and had 1048576"),
        (SIZE, read_only, "it is read-only, and was writable"),
    ] {
        let server = place.serve_with(Arc::new(Model::new(size, 512)), options);
        eventually(why, || device.last_error().is_some_and(|error| error.contains(why)));
        assert_eq!(device.read_at(0, &mut [0; 512]), Err(Error::Media));
        drop(server);
    }
    assert_eq!(device.geometry().size, SIZE as u64);
    let _server = place.serve(Arc::new(Model::new(2 * SIZE, 512)));
    eventually("it is connected again", || device.connections() > 0);
    assert_eq!(device.geometry().size, 2 * SIZE as u64);
    device.write_at(2 * SIZE as u64 - 512, &[1; 512], Flags::empty()).unwrap();
}

#[test]
fn fua_is_emulated_with_flush() {
    // The server does not offer SEND_FUA, and cuts the connection once, between the write and its
    // flush.
    let told = ExportSpec { flags: DEFAULT_EXPORT.flags & !8, ..DEFAULT_EXPORT };
    let seen = Arc::new(Mutex::new(Vec::new()));
    let fake = Fake::new({
        let seen = Arc::clone(&seen);
        move |number, peer| {
            peer.welcome(told)?;
            loop {
                let request = peer.request()?;
                seen.lock().unwrap().push((number, request.command, request.flags.bits()));
                if number == 0 && request.command == 3 {
                    return Ok(());
                }
                peer.chunk(request.cookie, 0, true, &[])?;
            }
        }
    });
    let device = Nbd::open(&fake.config()).unwrap();
    device.write_at(0, &[1; 512], Flags::FUA).unwrap();
    // The server may have lost the write, so the client sends the write again.
    assert_eq!(*seen.lock().unwrap(), [(0, 1, 0), (0, 3, 0), (1, 1, 0), (1, 3, 0)]);
}

/// The connection is lost while a flush is in flight. The next server completes the flush, but may
/// not have the write that the flush covers.
#[test]
fn resent_flush_fails_if_writes_may_be_lost() {
    for writes in [1, 0] {
        let fake = Fake::new(move |number, peer| {
            peer.welcome(DEFAULT_EXPORT)?;
            loop {
                let request = peer.request()?;
                if number == 0 && request.command == 3 {
                    return Ok(());
                }
                peer.chunk(request.cookie, 0, true, &[])?;
            }
        });
        let device = Nbd::open(&fake.config()).unwrap();
        for _ in 0..writes {
            device.write_at(0, &[1; 512], Flags::empty()).unwrap();
        }
        let told = if writes > 0 { Err(Error::Media) } else { Ok(()) };
        assert_eq!(device.flush(), told);
        assert_eq!((device.flush(), fake.connections()), (Ok(()), 2));
    }
}

#[test]
fn dropped_device_completes_requests_in_flight() {
    // The first server never replies, and the second server is unreachable.
    let fake = Fake::new(|_, peer| {
        peer.welcome(DEFAULT_EXPORT)?;
        loop {
            peer.request()?;
        }
    });
    let before = fake.connections();
    for _ in 0..3 {
        let mut config = fake.config();
        config.timeout = LONG;
        let device = Nbd::open(&config).unwrap();
        let told: Vec<_> =
            (0..100).map(|n| begin(&device, Request::write(n % 7 * 512, 512), &[1; 512])).collect();
        let begun = Instant::now();
        drop(device);
        assert!(begun.elapsed() < LONG / 2);
        for told in told {
            assert!(matches!(wait_result(&told), Err(Error::Gone)));
        }
    }
    assert_eq!(fake.connections(), before + 3);
    drop(fake);
    let mut machine = CrashServer::new();
    let device = machine.open(LONG);
    machine.kill();
    let told = begin(&device, Request::read(0, 512), &[]);
    let begun = Instant::now();
    drop(device);
    assert!(begun.elapsed() < LONG / 2);
    assert!(matches!(wait_result(&told), Err(Error::Gone)));
}

/// Random writes and flushes while the server crashes, cuts connections and restarts. Each thread
/// uses its own blocks and knows their possible content. Only one flush reports a loss, so all
/// threads share the count of failed flushes.
#[test]
fn flushed_data_survives_crashes() {
    const THREADS: u64 = 4;
    let machine = Mutex::new(CrashServer::new());
    let device = machine.lock().unwrap().open(LONG);
    let end = AtomicBool::new(false);
    let failures = Mutex::new(0_u64);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = Rng::new(1);
            for round in 0..12 {
                std::thread::sleep(Duration::from_millis(50 + rng.below(200)));
                let mut machine = machine.lock().unwrap();
                if round % 3 == 0 {
                    machine.cut();
                } else {
                    let before = device.reconnects();
                    machine.kill();
                    std::thread::sleep(Duration::from_millis(rng.below(100)));
                    machine.start();
                    eventually("the device reconnects", || device.reconnects() > before);
                }
            }
            end.store(true, Ordering::SeqCst);
        });
        for thread in 0..THREADS {
            let (device, end, failures) = (&device, &end, &failures);
            scope.spawn(move || {
                let blocks = SIZE as u64 / BLOCK as u64 / THREADS;
                let base = thread * blocks;
                let mut rng = Rng::new(10 + thread);
                // For each block: the value if nothing was lost, and all possible values.
                let mut now = vec![0_u8; blocks as usize];
                let mut maybe: Vec<Vec<u8>> = vec![vec![0]; blocks as usize];
                let mut value = 0_u8;
                let (mut rounds, mut known) = (0_u64, 0);
                while !end.load(Ordering::SeqCst) || rounds < 200 {
                    rounds += 1;
                    let at = rng.below(blocks);
                    let offset = (base + at) * BLOCK as u64;
                    match rng.below(10) {
                        0 => {
                            let mut failures = failures.lock().unwrap();
                            let flushed = device.flush();
                            *failures += u64::from(flushed.is_err());
                            if *failures == known {
                                for (now, maybe) in now.iter().zip(&mut maybe) {
                                    *maybe = vec![*now];
                                }
                                continue;
                            }
                            assert!(matches!(flushed, Ok(()) | Err(Error::Media)));
                            // After a failed flush, the thread reads its blocks and continues with
                            // that content.
                            known = *failures;
                            drop(failures);
                            for (number, maybe) in maybe.iter_mut().enumerate() {
                                now[number] = found(device, (base + number as u64) * BLOCK as u64, maybe);
                                maybe.push(now[number]);
                            }
                        }
                        1 => {
                            value = value.wrapping_add(1);
                            device.write_at(offset, &[value; BLOCK], Flags::FUA).unwrap();
                            now[at as usize] = value;
                            maybe[at as usize] = vec![value];
                        }
                        2..6 => {
                            value = value.wrapping_add(1);
                            device.write_at(offset, &[value; BLOCK], Flags::empty()).unwrap();
                            now[at as usize] = value;
                            maybe[at as usize].push(value);
                        }
                        _ => {
                            found(device, offset, &maybe[at as usize]);
                        }
                    }
                }
            });
        }
    });
    println!("{} flushes failed", failures.lock().unwrap());
}

/// Returns the value of all bytes of a block, which must be one of `maybe`.
fn found(device: &Nbd, offset: u64, maybe: &[u8]) -> u8 {
    let mut data = [0; BLOCK];
    device.read_at(offset, &mut data).unwrap();
    assert!(data.iter().all(|byte| *byte == data[0]), "a block at {offset} is a mixture");
    assert!(maybe.contains(&data[0]), "byte {offset} is {}, and none of {maybe:?}", data[0]);
    data[0]
}

/// Checks that the device matches a model, whenever the server cuts connections.
mod model {
    use proptest::prelude::*;

    use super::*;

    #[derive(Debug, Clone)]
    enum Step {
        Write(u64, u64, u8, bool),
        Zeroes(u64, u64, bool),
        Read(u64, u64),
        Flush,
        Cut,
        CutSoon,
    }

    fn step() -> impl Strategy<Value = Step> {
        let range = || (0_u64..120, 1_u64..8);
        prop_oneof![
            4 => (range(), any::<u8>(), any::<bool>()).prop_map(|((at, len), byte, fua)| {
                Step::Write(at, len, byte, fua)
            }),
            1 => (range(), any::<bool>()).prop_map(|((at, len), free)| Step::Zeroes(at, len, free)),
            3 => range().prop_map(|(at, len)| Step::Read(at, len)),
            1 => Just(Step::Flush),
            1 => Just(Step::Cut),
            1 => Just(Step::CutSoon),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: if std::env::var_os("PROPTEST_CASES").is_some() { ProptestConfig::default().cases } else { 24 }, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn device_matches_model_across_cuts(steps in prop::collection::vec(step(), 1..40)) {
            let machine = CrashServer::new();
            let device = machine.open(LONG);
            let mut model = vec![0; 64 << 10];
            let mut dirty = false;
            let mut cut = false;
            std::thread::scope(|scope| {
                let mut cutters = Vec::new();
                for step in &steps {
                    match *step {
                        Step::Write(at, len, byte, fua) => {
                            let flags = if fua { Flags::FUA } else { Flags::empty() };
                            let range = (at * 512) as usize..((at + len) * 512) as usize;
                            model[range.clone()].fill(byte);
                            device.write_at(at * 512, &model[range], flags).unwrap();
                            dirty |= !fua;
                        }
                        Step::Zeroes(at, len, free) => {
                            let flags = if free { Flags::MAY_FREE } else { Flags::empty() };
                            model[(at * 512) as usize..((at + len) * 512) as usize].fill(0);
                            device.write_zeroes(at * 512, len * 512, flags).unwrap();
                            dirty = true;
                        }
                        Step::Read(at, len) => {
                            let mut data = vec![1; (len * 512) as usize];
                            device.read_at(at * 512, &mut data).unwrap();
                            assert!(data == model[(at * 512) as usize..((at + len) * 512) as usize]);
                        }
                        // A flush may fail only if a connection was cut, or is about to be.
                        Step::Flush => {
                            cutters.retain(|cutter: &std::thread::ScopedJoinHandle<'_, ()>| !cutter.is_finished());
                            match device.flush() {
                                Ok(()) => (dirty, cut) = (false, !cutters.is_empty()),
                                Err(error) => {
                                    assert!(error == Error::Media && dirty && cut);
                                    cut = !cutters.is_empty();
                                }
                            }
                        }
                        Step::Cut => {
                            machine.cut();
                            cut = true;
                        }
                        Step::CutSoon => {
                            cut = true;
                            let machine = &machine;
                            cutters.push(scope.spawn(move || {
                                std::thread::sleep(Duration::from_micros(300));
                                machine.cut();
                            }));
                        }
                    }
                }
            });
        }
    }
}
