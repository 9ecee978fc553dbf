//! Tests of lost connections and restarted servers: flushed data survives, flushes report possible
//! losses, and no request waits forever.

mod crash_server;
mod model;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone_core::device::{Blocking as _, Device, Error, Flags, Request};
use freestone_core::plug::Plug;
use freestone_nbd::ExportOptions;
use freestone_nbd_client::{Config, Nbd};
use freestone_testkit::{Model, Rng};

use self::crash_server::CrashServer;
use crate::fake::{DEFAULT_EXPORT, ExportSpec, Fake};
use crate::harness::{TestAddress, begin, eventually, wait_result};

const SIZE: usize = 1 << 20;
const BLOCK: usize = 512;

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
