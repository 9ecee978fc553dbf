//! Tests of sweeps: trims and write zeroes of very large ranges, which the server executes in steps.

use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use crate::common::device::{Vast, sweep_steps, vast};
use crate::common::prelude::*;
use freestone_core::device::{Op, Request};
use freestone_nbd::{Address, MAX_SWEEPS, SHUTDOWN_GRACE, SWEEP_STEP_BYTES};
use freestone_testkit::effort;

const GIB: u64 = 1 << 30;
const HUGE: u64 = 1 << 60;

fn serving(size: u64, per_try: u64) -> (Fixture, Arc<Vast>, Client) {
    let device = vast(size, per_try);
    let fixture = Fixture::serving(&device);
    let client = fixture.enter(Headers::Extended);
    (fixture, device, client)
}

/// Checks that the logged steps of a sweep cover the whole range, in order.
fn assert_covered(steps: &[Request], op: Op, offset: u64, len: u64) {
    let mut at = offset;
    for step in steps {
        assert_eq!((step.op, step.offset), (op, at));
        at += step.len;
    }
    assert_eq!(at, offset + len);
}

#[test]
fn sweep_of_whole_device_inline_takes_one_step() {
    let (fixture, device, mut client) = serving(HUGE, HUGE);
    assert_eq!(client.statuses(0, 0, HUGE), Ok(vec![(1, vec![(HUGE, 3)])]));
    assert_eq!(client.statuses(REQ_ONE, 1, HUGE - 1), Ok(vec![(1, vec![(HUGE - 1, 3)])]));
    for command in [TRIM, WRITE_ZEROES] {
        assert_eq!(client.run(0, command, 0, HUGE), 0);
        assert_eq!(client.run(NO_HOLE * (command - TRIM) / 2, command, 512, HUGE - 512), 0);
    }
    assert_eq!(sweep_steps(&device).len(), 4, "a device that does all of it inline gets it in one step");
    client.disconnect();
    fixture.assert_sound();
}

#[test]
fn requests_behind_sweep_are_served() {
    for headers in [Headers::Structured, Headers::Extended] {
        let device = vast(64 * GIB, 0);
        let fixture = Fixture::serving(&device);
        let mut client = fixture.enter(headers);
        let (offset, len) = (512, 3 * GIB + 1024);
        for (command, op) in [(TRIM, Op::Discard), (WRITE_ZEROES, Op::WriteZeroes)] {
            device.log.lock().clear();
            let sweep = client.ask(0, command, offset, len);
            for step in 0.. {
                eventually(|| device.held().len() == 1 || step == 13);
                assert_eq!(client.read(GIB, 512), Ok(vec![0; 512]));
                assert_eq!(client.run(0, FLUSH, 0, 0), 0);
                if step == 13 {
                    break;
                }
                assert!(device.held()[0].len <= SWEEP_STEP_BYTES);
                if step == 12 {
                    device.release(0);
                    assert_eq!(client.plain_reply(sweep), 0);
                } else {
                    device.release(0);
                }
            }
            assert_covered(&sweep_steps(&device), op, offset, len);
        }
        client.disconnect();
        fixture.assert_sound();
    }
}

#[test]
fn inline_sweep_steps_do_not_delay_requests() {
    // The steps are small: the test would not end if a request waited for the whole sweep.
    let (fixture, device, mut client) = serving(HUGE, 1 << 20);
    client.ask(0, WRITE_ZEROES, 0, HUGE);
    let mut bystander = fixture.enter(Headers::Structured);
    for round in 0..100 {
        assert_eq!(client.read(round * GIB, 512), Ok(vec![0; 512]));
        assert_eq!(client.run(0, TRIM, 0, 4096), 0);
        assert_eq!(bystander.read(round * GIB, 512), Ok(vec![0; 512]));
    }
    // The server ends the sweep when the client disconnects.
    drop(client);
    eventually(|| fixture.server.stats().connections == 1);
    let steps = sweep_steps(&device).len();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(sweep_steps(&device).len(), steps);
    bystander.disconnect();
    fixture.assert_sound();
}

#[test]
fn sweep_stops_when_client_leaves() {
    let (fixture, device, mut client) = serving(HUGE, 0);
    client.ask(0, TRIM, 0, HUGE);
    eventually(|| device.held().len() == 1);
    drop(client);
    // The connection stays open until the device completes the step in flight.
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(fixture.server.stats().connections, 1);
    device.release(0);
    fixture.assert_no_connections();
    assert_eq!(sweep_steps(&device).len(), 1);
}

/// The server notices the disconnect even while it receives nothing because the limit on sweeps is reached.
#[test]
fn client_leave_is_noticed_behind_many_sweeps() {
    for per_try in [0, 1 << 20] {
        let (fixture, device, mut client) = serving(HUGE, per_try);
        for _ in 0..3 * MAX_SWEEPS {
            client.ask(0, WRITE_ZEROES, 0, HUGE);
        }
        eventually(|| sweep_steps(&device).len() >= MAX_SWEEPS);
        drop(client);
        for _ in 0..if per_try == 0 { MAX_SWEEPS } else { 0 } {
            device.release(0);
        }
        fixture.assert_no_connections();
        assert!(device.held().is_empty());
    }
}

#[test]
fn half_closed_client_gets_sweep_error() {
    for per_try in [0, 1 << 20] {
        let device = vast(HUGE, per_try);
        let fixture = Fixture::serving(&device);
        let Address::Unix(path) = &fixture.address else { panic!("a Unix address") };
        let stream = UnixStream::connect(path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        let mut client = Client::over(stream.try_clone().unwrap());
        client.greet(3);
        client.agree(Headers::Extended);
        client.go("disk");
        let sweep = client.ask(0, WRITE_ZEROES, 0, HUGE);
        eventually(|| !sweep_steps(&device).is_empty());
        stream.shutdown(Shutdown::Write).unwrap();
        if per_try == 0 {
            std::thread::sleep(Duration::from_millis(20));
            device.release(0);
        }
        assert_eq!(client.plain_reply(sweep), ESHUTDOWN);
        client.assert_closed();
        fixture.assert_no_connections();
    }
}

#[test]
fn sweep_before_disconnect_is_completed() {
    let (fixture, device, mut client) = serving(64 * GIB, 1 << 20);
    let sweep = client.ask(0, TRIM, 0, 64 * GIB);
    client.ask(0, DISC, 0, 0);
    assert_eq!(client.plain_reply(sweep), 0);
    client.assert_closed();
    assert_covered(&sweep_steps(&device), Op::Discard, 0, 64 * GIB);
    fixture.assert_sound();
}

#[test]
fn device_error_ends_sweep() {
    for per_try in [0, 1 << 26] {
        let (fixture, device, mut client) = serving(HUGE, per_try);
        device.bad_byte.store(GIB, SeqCst);
        let sweep = client.ask(0, WRITE_ZEROES, 0, HUGE);
        for _ in 0..if per_try == 0 { 5 } else { 0 } {
            eventually(|| device.held().len() == 1);
            device.release(0);
        }
        assert_eq!(client.plain_reply(sweep), EIO);
        assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
        assert!(device.held().is_empty());
        client.disconnect();
        fixture.assert_sound();
    }
}

#[test]
fn sweeps_above_limit_wait() {
    let (fixture, device, mut client) = serving(HUGE, 0);
    let len = 2 * SWEEP_STEP_BYTES;
    let cookies: Vec<_> = (0..2 * MAX_SWEEPS as u64).map(|at| client.ask(0, TRIM, at * len, len)).collect();
    let flush = client.ask(0, FLUSH, 0, 0);
    eventually(|| device.held().len() == MAX_SWEEPS);
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(device.held().len(), MAX_SWEEPS);
    let mut answered = Vec::new();
    std::thread::scope(|scope| {
        let ended = scope.spawn(|| {
            for _ in 0..4 * MAX_SWEEPS {
                eventually(|| !device.held().is_empty());
                assert!(device.held().len() <= MAX_SWEEPS);
                device.release(0);
            }
        });
        for _ in 0..=2 * MAX_SWEEPS {
            let chunk = client.chunk();
            answered.push(chunk.cookie());
        }
        ended.join().unwrap();
    });
    assert!(answered.iter().position(|cookie| *cookie == flush) >= Some(MAX_SWEEPS));
    answered.retain(|cookie| *cookie != flush);
    answered.sort_unstable();
    assert_eq!(answered, cookies);
    client.disconnect();
    fixture.assert_sound();
}

#[test]
fn shutdown_cuts_sweep_after_grace() {
    let (fixture, device, mut client) = serving(HUGE, 1 << 20);
    client.ask(0, TRIM, 0, HUGE);
    eventually(|| !sweep_steps(&device).is_empty());
    assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    let began = Instant::now();
    // `shutdown` and `unpublish` end the connections after a grace time. The grace time of `unpublish` is
    // fixed and long, so only the slow lane tests `unpublish`.
    if effort(true, false) {
        fixture.server.shutdown(Duration::from_millis(200));
    } else {
        fixture.server.unpublish("disk", true).unwrap();
    }
    fixture.assert_no_connections();
    assert!(began.elapsed() < SHUTDOWN_GRACE * 4, "{:?}", began.elapsed());
    client.assert_closed();
}
