//! Requests: all commands, batches, budgets, and devices that fail or answer wrong.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use freestone_core::budget::Budget;
use freestone_core::device::{Buffer, Completion, Device, Error, Failures, IoBuf, Op, Request, TryResult};
use freestone_core::plug::Plug;
use freestone_core::workers::Workers;
use freestone_testkit::Manner;

use super::{
    EIO, READ, SIZE, WRITE, deferred, delayed, export, options, pattern, ram, round_trip, silent, start,
    wait_until,
};
use crate::export::{MAX_REQUEST_BYTES, Options};
use crate::fake::{Driver, ID, PATIENCE};
use crate::kernel::abi::{attr, control, op, param};

#[test]
fn disk_serves_requests_until_end() {
    let (driver, export) = export(ram());
    assert_eq!((export.id(), export.name(), export.is_read_only()), (ID, "disk", false));
    assert_eq!(export.path().to_str(), Some("/dev/ublkb7"));
    {
        let state = driver.state();
        let params = state.params.unwrap();
        assert_eq!((params.basic.dev_sectors, params.types), (SIZE / 512, param::BASIC | param::DISCARD));
        let info = state.info.unwrap();
        assert_eq!((info.queue_depth, info.max_io_buf_bytes), (128, MAX_REQUEST_BYTES));
    }
    round_trip(&driver);
    assert!(export.shutdown(PATIENCE) && export.shutdown(Duration::ZERO));
    assert!(driver.state().info.is_none() && !export.is_connected());
    let log = driver.state().log.clone();
    assert!(log.ends_with(&[control::STOP_DEV, control::DEL_DEV_ASYNC]));
}

#[test]
fn delayed_completions_reach_the_client() {
    let (driver, export) = export(Arc::new(delayed()));
    let attrs = driver.state().params.unwrap().basic.attrs;
    assert_eq!(attrs, attr::VOLATILE_CACHE | attr::FUA);
    round_trip(&driver);
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn partial_request_is_completed() {
    // Tries complete the first page of requests at some offsets.
    let device = delayed().on_try(|ram, request, buffer| {
        if request.len <= 4096 || !request.offset.is_multiple_of(8192) {
            return Ok(TryResult::WouldBlock);
        }
        let part = Request { len: 4096, ..*request };
        let tried = match buffer {
            Buffer::Read(out) => ram.try_io(&part, Buffer::Read(&mut out[..4096]))?,
            Buffer::Write(data) => ram.try_io(&part, Buffer::Write(&data[..4096]))?,
            Buffer::None => ram.try_io(&part, Buffer::None)?,
        };
        assert_eq!(tried, TryResult::Done);
        Ok(TryResult::Partly(4096))
    });
    let (driver, _export) = export(Arc::new(device));
    let data = pattern(9, 64 << 10);
    assert_eq!(driver.io(WRITE, 0, 128, &data).0, 64 << 10);
    assert_eq!(driver.io(READ, 0, 128, &[]), (64 << 10, data));
}

#[test]
fn two_queues_serve_many_tags() {
    let driver = Driver::default();
    let export = start(&driver, Arc::new(delayed()), Options { queues: 9, ..options() });
    assert_eq!(driver.state().lanes.len(), 2, "as the driver grants");
    let mut wanted = Vec::new();
    for number in 0..600_u64 {
        let (lane, data) = ((number % 2) as usize, pattern(number as u8, 4096));
        wanted.push((lane, driver.submit(lane, WRITE, number * 8, 8, &data), data));
    }
    for (lane, ticket, _) in &wanted {
        assert_eq!(driver.wait(*lane, *ticket).0, 4096);
    }
    for (number, (_, _, data)) in wanted.into_iter().enumerate() {
        assert_eq!(driver.io(READ, number as u64 * 8, 8, &[]), (4096, data));
    }
    assert!(export.shutdown(PATIENCE));
}

#[test]
fn invalid_request_fails_and_tag_is_reused() {
    let failures = Arc::<Failures>::default();
    let driver = Driver::default();
    let options = Options { depth: 1, failures: Arc::clone(&failures), ..options() };
    let _export = start(&driver, ram(), options);
    let code = |op_flags, sector, sectors| driver.io(op_flags, sector, sectors, &[]).0;
    for op in [4, 10, 13, 18, 200] {
        assert_eq!(code(op, 0, 8), -95, "{op}");
    }
    assert_eq!(code(READ, 0, 0), -22);
    assert_eq!(code(READ, 0, MAX_REQUEST_BYTES / 512 + 1), -22);
    assert_eq!(code(READ, SIZE / 512, 8), -22);
    assert_eq!(code(op::DISCARD.into(), SIZE / 512 - 8, 9), -22);
    assert_eq!(code(WRITE, u64::MAX / 512, 8), -22);
    assert_eq!(code(op::WRITE_ZEROES.into(), u64::MAX - 1, 8), -22);
    assert_eq!(code(READ, SIZE / 512 - 8, 8), 4096);
    assert_eq!(failures.counts().map(|(_, count)| count).sum::<u64>(), 3);
}

#[test]
fn read_only_export_refuses_writes() {
    let driver = Driver::default();
    let export = start(&driver, ram(), Options { read_only: true, ..options() });
    assert!(export.is_read_only());
    let params = driver.state().params.unwrap();
    assert_eq!((params.basic.attrs, params.types), (attr::READ_ONLY, param::BASIC));
    assert_eq!(driver.io(WRITE, 0, 8, &[1; 4096]).0, -1);
    assert_eq!(driver.io(op::WRITE_ZEROES.into(), 0, 8, &[]).0, -1);
    assert_eq!(driver.io(READ, 0, 8, &[]), (4096, vec![0; 4096]));
}

#[test]
fn wrong_buffer_from_device_fails_read() {
    // Capacities of the returned buffer: half the length, the full length but too little for the
    // next request, and none.
    for capacity in [2048, 4096, 0] {
        let device = deferred(Manner::Submitted).on_submit(move |_, _, _, done| {
            done.complete(Ok(()), IoBuf::zeroed(capacity).unwrap());
        });
        let (driver, export) = export(Arc::new(device));
        assert_eq!(driver.io(READ, 0, 8, &[]).0, EIO, "{capacity}");
        assert_eq!(driver.io(WRITE, 0, 8, &[1; 4096]).0, 4096);
        // The tag must have a buffer for the largest request again.
        let largest = vec![7; MAX_REQUEST_BYTES as usize];
        assert_eq!(driver.io(WRITE, 0, MAX_REQUEST_BYTES / 512, &largest).0, largest.len() as i32);
        assert!(export.shutdown(PATIENCE));
    }
}

#[test]
fn dropped_completion_and_errors_fail_request() {
    let device = deferred(Manner::Submitted).on_submit(|_, request, buffer, done| match request.op {
        Op::Read => drop(done),
        Op::Write => done.complete(Err(Error::NoSpace), buffer),
        _ => done.complete(Err(Error::Media), buffer),
    });
    let (driver, _export) = export(Arc::new(device));
    assert_eq!(driver.io(READ, 0, 8, &[]).0, -108);
    assert_eq!(driver.io(WRITE, 0, 8, &[0; 4096]).0, -28);
    assert_eq!(driver.io(op::FLUSH.into(), 0, 0, &[]).0, EIO);
}

#[test]
fn small_requests_take_few_system_calls() {
    const DEPTH: usize = 32;
    const REQUESTS: u64 = 20_000;
    let driver = Driver::default();
    let export = start(&driver, ram(), Options { depth: DEPTH as u16, ..options() });
    let before = driver.state().lanes[0].enters;
    let requests = (0..REQUESTS).map(|number| (READ, number % 1000 * 8, 8));
    let tickets = driver.submit_all(0, requests);
    for ticket in tickets {
        assert_eq!(driver.wait(0, ticket).0, 4096);
    }
    let enters = driver.state().lanes[0].enters - before;
    let each = enters as f64 / REQUESTS as f64;
    assert!(each <= 0.1, "{each} calls a request");
    drop(export);
}

#[test]
fn batched_completions_take_few_system_calls() {
    const REQUESTS: u64 = 4000;
    // The device completes its requests on another thread once it has 32.
    let held_requests: Arc<Mutex<Vec<(Request, IoBuf, Completion)>>> = Arc::default();
    let device = deferred(Manner::Submitted).on_submit(move |ram, request, buffer, done| {
        let mut have = held_requests.lock().unwrap();
        have.push((request, buffer, done));
        if have.len() < 32 {
            return;
        }
        let (all, ram) = (std::mem::take(&mut *have), Arc::clone(ram));
        std::thread::spawn(move || {
            let _plug = Plug::start();
            for (request, buffer, done) in all {
                ram.submit(request, buffer, done);
            }
        });
    });
    let driver = Driver::default();
    let _export = start(&driver, Arc::new(device), Options { depth: 32, ..options() });
    let before = driver.state().lanes[0].enters;
    let tickets = driver.submit_all(0, (0..REQUESTS).map(|number| (READ, number % 1000 * 8, 8)));
    for ticket in tickets {
        assert_eq!(driver.wait(0, ticket).0, 4096);
    }
    let each = (driver.state().lanes[0].enters - before) as f64 / REQUESTS as f64;
    assert!(each <= 0.1, "{each} calls a request");
}

#[test]
fn requests_above_budget_wait() {
    // The smallest budget has 56 MiB for large requests; each queue may have 32 MiB in flight.
    let budget = Budget::new(0);
    let device = silent();
    let driver = Driver::default();
    let options = Options { depth: 128, queues: 2, ..Options::new(Arc::clone(&budget)) };
    let export = start(&driver, device.clone(), options);
    let sectors = MAX_REQUEST_BYTES / 512;
    let tickets: Vec<_> = (0..2)
        .flat_map(|lane| {
            let requests = (0..100).map(|at| (READ, at % 64 * u64::from(sectors), sectors));
            driver.submit_all(lane, requests).into_iter().map(move |ticket| (lane, ticket))
        })
        .collect();
    let mut most = 0;
    let mut answered = 0;
    while answered < tickets.len() {
        wait_until(|| !device.held().is_empty());
        most = most.max(budget.bytes().1);
        while device.release_by(|_| (0, false)) {
            answered += 1;
        }
    }
    for (lane, ticket) in tickets {
        assert_eq!(driver.wait(lane, ticket).0, MAX_REQUEST_BYTES as i32);
    }
    assert!(most > 0 && most <= 64 << 20, "{most}");
    assert!(export.shutdown(PATIENCE));
    assert_eq!(budget.bytes().1, 0);
}

#[test]
fn workers_run_large_requests() {
    let driver = Driver::default();
    let _export = start(&driver, ram(), Options { workers: Workers::new(4), ..options() });
    let len = MAX_REQUEST_BYTES as usize;
    for round in 0..4_u8 {
        let data: Vec<_> = (0..8_u8).map(|at| pattern(at ^ round, len)).collect();
        let sector = |at: usize| (at * len / 512) as u64;
        let sectors = (len / 512) as u32;
        let tickets: Vec<_> =
            (0..8).map(|at| driver.submit(0, WRITE, sector(at), sectors, &data[at])).collect();
        for ticket in tickets {
            assert_eq!(driver.wait(0, ticket).0, len as i32);
        }
        let tickets = driver.submit_all(0, (0..8).map(|at| (READ, sector(at), sectors)));
        for (at, ticket) in tickets.into_iter().enumerate() {
            assert_eq!(driver.wait(0, ticket).1, data[at]);
        }
    }
}

#[test]
fn idle_buffer_release_keeps_data() {
    let (driver, _export) = export(ram());
    let data = pattern(3, 256 << 10);
    assert_eq!(driver.io(WRITE, 0, 512, &data).0, data.len() as i32);
    std::thread::sleep(crate::queue::IDLE + Duration::from_millis(300));
    assert_eq!(driver.io(READ, 0, 512, &[]), (data.len() as i32, data));
    round_trip(&driver);
}
