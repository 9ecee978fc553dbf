//! Writes and appends: their order, their data, and the end of an export with a hung device.

use std::sync::Arc;
use std::time::Duration;

use freestone_core::budget::{Budget, DEFAULT_BYTES};
use freestone_core::device::zoned::Zoned;
use freestone_drive::zone::Config;
use rustix::io::Errno;

use super::{
    APPEND, EIO, READ, RESET, WRITE, ZONE, append, condition, config, data, export, options, slow_export,
    try_start, wait_until, zone, zones,
};
use crate::export::{MAX_REQUEST_BYTES, Options};
use crate::fake::{Driver, PATIENCE};
use crate::kernel::abi::op;

#[test]
fn small_requests_take_few_system_calls() {
    const REQUESTS: u64 = 9984;
    let driver = Driver::default();
    let device = Arc::new(zones(Config { zone_capacity: 0, ..config() }));
    let _export = try_start(&driver, device, Options { depth: 32, ..options() }).unwrap();
    let each = |op| {
        let before = driver.state().lanes[0].enters;
        let requests = (0..REQUESTS).map(|number| (op, 2 * ZONE + number * 8, 8));
        for ticket in driver.submit_all(0, requests) {
            assert_eq!(driver.wait(0, ticket).0, 4096);
        }
        (driver.state().lanes[0].enters - before) as f64 / REQUESTS as f64
    };
    // The writes are in zone order, so they cannot fail.
    let (writes, reads) = (each(WRITE), each(READ));
    assert!(writes <= 0.1 && reads <= 0.1, "{writes} calls a write, {reads} a read");
}

#[test]
fn zone_writes_begin_in_arrival_order() {
    let (driver, _export, _) = export();
    driver.state().holds_fetched = true;
    let write = |at: u8| driver.submit(0, WRITE, 2 * ZONE + u64::from(at) * 8, 8, &data(at, 8));
    let tickets: Vec<_> = (0..20).map(write).collect();
    wait_until(|| driver.state().lanes[0].fetched.len() == 20);
    driver.deliver_fetched(0, 5);
    // A read does not wait for the writes. When it is done, the five delivered fetches have been
    // processed.
    assert_eq!(driver.io(READ, 0, 8, &[]).0, 4096);
    assert!(tickets.iter().all(|ticket| !driver.is_done(0, *ticket)));
    driver.deliver_fetched(0, 20);
    for (at, ticket) in tickets.into_iter().enumerate() {
        assert_eq!(driver.wait(0, ticket).0, 4096, "{at}");
    }
    for at in 0..20 {
        assert_eq!(driver.io(READ, 2 * ZONE + u64::from(at) * 8, 8, &[]).1, data(at, 8));
    }
}

#[test]
fn failed_data_copy_fails_request() {
    let (driver, export, _) = export();
    let start = 3 * ZONE;
    for fault in [100, 0, -14, 4095] {
        driver.state().copies.push_back(fault);
        assert_eq!(driver.io(WRITE, start, 8, &data(1, 8)).0, EIO, "{fault}");
        driver.state().copies.push_back(fault);
        assert_eq!(append(&driver, 3, &data(1, 8)), Err(EIO), "{fault}");
    }
    assert_eq!(zone(&driver, 3), (condition::EMPTY, 0));
    assert_eq!(driver.io(WRITE, start, 8, &data(1, 8)).0, 4096);
    for fault in [100, 0, -14, 4095] {
        driver.state().copies.push_back(fault);
        assert_eq!(driver.io(READ, start, 8, &[]).0, EIO, "{fault}");
        if fault < 320 {
            driver.state().copies.push_back(fault);
            assert_eq!(driver.report(), Err(Errno::IO), "{fault}");
        }
    }
    assert_eq!(driver.io(READ, start, 8, &[]), (4096, data(1, 8)));
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn cut_during_data_fetch_writes_nothing() {
    let (driver, export, device) = export();
    driver.state().holds_fetched = true;
    let cut: Vec<_> = (0..3).map(|at| driver.submit(0, WRITE, 2 * ZONE + at * 8, 8, &data(1, 8))).collect();
    wait_until(|| driver.state().lanes[0].fetched.len() == 3);
    let held = export.hold();
    assert!(held.fail_requests());
    assert!(held.wait_idle(std::time::Instant::now() + PATIENCE), "the device has nothing");
    driver.deliver_fetched(0, 20);
    for ticket in cut {
        assert_eq!(driver.wait(0, ticket).0, EIO);
    }
    // A request that arrives while requests are held is neither fetched nor begun.
    let waits = driver.submit(0, WRITE, 2 * ZONE, 8, &data(2, 8));
    std::thread::sleep(Duration::from_millis(20));
    assert!(driver.state().lanes[0].fetched.is_empty() && !driver.is_done(0, waits));
    driver.state().holds_fetched = false;
    let mut first = None;
    device.report(2 * ZONE * 512, &mut |zone| first.replace(zone).is_some()).unwrap();
    assert_eq!(first.unwrap().write_pointer, 2 * ZONE * 512);
    drop(held);
    assert_eq!(driver.wait(0, waits).0, 4096);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn write_fetched_during_hold_begins_after_release() {
    let (driver, export, _) = export();
    driver.state().holds_fetched = true;
    let write = driver.submit(0, WRITE, 2 * ZONE, 8, &data(1, 8));
    wait_until(|| driver.state().lanes[0].fetched.len() == 1);
    let held = export.hold();
    driver.deliver_fetched(0, 20);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!driver.is_done(0, write));
    drop(held);
    assert_eq!(driver.wait(0, write).0, 4096);
}

#[test]
fn reset_runs_alongside_appends() {
    let (driver, export, slow) = slow_export();
    let all: Vec<_> = (0..12)
        .map(|at| {
            let is_append = at % 4 != 3;
            let data = if is_append { data(1, 8) } else { Vec::new() };
            let sectors = if is_append { 8 } else { ZONE as u32 };
            driver.submit(0, if is_append { APPEND } else { RESET }, 2 * ZONE, sectors, &data)
        })
        .collect();
    std::thread::sleep(Duration::from_millis(20));
    assert!(all.iter().all(|ticket| !driver.is_done(0, *ticket)));
    slow.open();
    let mut places = Vec::new();
    for (at, ticket) in all.into_iter().enumerate() {
        let (result, place) = driver.wait(0, ticket);
        if at % 4 == 3 {
            assert_eq!((result, place.len()), (0, 0));
        } else {
            assert_eq!(result, 4096);
            places.push(u64::from_ne_bytes(place.try_into().unwrap()));
        }
    }
    assert!(places.contains(&(2 * ZONE)) && places.iter().all(|place| (2 * ZONE..3 * ZONE).contains(place)));
    // The device kept the buffers of the appends; each tag must have a buffer again.
    for at in 0..200 {
        assert_eq!(append(&driver, 6, &data(at, 8)), Ok(6 * ZONE + u64::from(at) * 8));
        assert_eq!(driver.io(READ, 6 * ZONE + u64::from(at) * 8, 8, &[]), (4096, data(at, 8)));
    }
    assert_eq!(append(&driver, 15, &data(1, 8)), Err(-108), "the device forgets it");
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn end_fails_requests_of_hung_zones() {
    let (driver, export, slow) = slow_export();
    let reset = driver.submit(0, RESET, 2 * ZONE, ZONE as u32, &[]);
    let append = driver.submit(0, APPEND, 3 * ZONE, 8, &data(1, 8));
    let finish = driver.submit(0, op::ZONE_FINISH.into(), 4 * ZONE, ZONE as u32, &[]);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!export.shutdown(Duration::from_millis(50)));
    for ticket in [reset, append, finish] {
        assert_eq!(driver.wait(0, ticket).0, EIO);
    }
    driver.wait_for(|state| state.info.is_none().then_some(()));
    slow.open();
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn many_large_requests_keep_data() {
    let (driver, export, _) = export();
    for round in 0..3_u8 {
        let start = (2 + u64::from(round)) * ZONE;
        let sectors = MAX_REQUEST_BYTES / 512;
        let tickets: Vec<_> = (0..6_u8)
            .map(|at| {
                let place = start + u64::from(at) * u64::from(sectors);
                driver.submit(0, WRITE, place, sectors, &data(round ^ at, sectors))
            })
            .collect();
        for ticket in tickets {
            assert_eq!(driver.wait(0, ticket).0, MAX_REQUEST_BYTES as i32);
        }
        let requests = (0..6).map(|at| (READ, start + at * u64::from(sectors), sectors));
        for (at, ticket) in driver.submit_all(0, requests).into_iter().enumerate() {
            assert_eq!(driver.wait(0, ticket).1, data(round ^ at as u8, sectors));
        }
    }
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn data_fetches_are_charged_to_budget() {
    let (driver, budget) = (Driver::default(), Budget::new(DEFAULT_BYTES));
    driver.state().holds_fetched = true;
    let options = Options { queues: 1, ..Options::new(Arc::clone(&budget)) };
    let export = try_start(&driver, Arc::new(zones(config())), options).unwrap();
    let sectors = MAX_REQUEST_BYTES / 512;
    // Writes to conventional zones, with more data than a queue may have in flight.
    let requests = (0..100).map(|at| (WRITE, at % 16 * u64::from(sectors), sectors));
    let tickets = driver.submit_all(0, requests);
    wait_until(|| driver.state().lanes[0].fetched.len() == 64);
    let held = 64 * u64::from(MAX_REQUEST_BYTES);
    assert!(budget.bytes().1 >= held && budget.bytes().1 <= 2 * held, "{:?}", budget.bytes());
    for ticket in tickets {
        wait_until(|| {
            driver.deliver_fetched(0, 7);
            driver.is_done(0, ticket)
        });
        assert_eq!(driver.wait(0, ticket).0, MAX_REQUEST_BYTES as i32);
    }
    assert!(export.shutdown(PATIENCE));
    assert_eq!(budget.bytes().1, 0);
}
