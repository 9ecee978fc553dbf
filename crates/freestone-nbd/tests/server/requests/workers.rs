//! Tests of worker threads: requests do not starve, a stalled device or client does not hold a worker, and
//! writes to zones keep their order.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};
use std::thread;
use std::time::Duration;

use crate::common::prelude::*;
use freestone_core::device::{Device as _, Op};

const MIB: u64 = 1 << 20;
const PIECE: u32 = 64 << 10;
/// CPU time of a request in microseconds, longer than the handover to a worker.
const COST_US: u64 = 120;
const DEPTH: u64 = 16;

fn ask(client: &mut Client, cookie: u64) {
    client.send(&request(0, READ, cookie, cookie % 64 * u64::from(PIECE), PIECE));
}

fn answered(client: &mut Client) -> u64 {
    answered_with(client, PIECE)
}

/// Receives a successful reply to a read of `len` bytes, and returns its cookie.
fn answered_with(client: &mut Client, len: u32) -> u64 {
    let mut reply = [0; 16];
    client.stream.read_exact(&mut reply).unwrap();
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    client.stream.read_exact(&mut vec![0; len as usize]).unwrap();
    u64::from_be_bytes(reply[8..].try_into().unwrap())
}

/// Keeps [`DEPTH`] reads in flight. Returns the largest number of later reads that completed before the same
/// earlier read.
fn overtakers(client: &mut Client, requests: u64) -> u64 {
    let (mut sent, mut most) = (0, 0);
    // For each read in flight, by cookie: the number of later reads that completed before it.
    let mut waiting = HashMap::new();
    for _ in 0..requests {
        while sent < requests && waiting.len() < DEPTH as usize {
            ask(client, sent);
            waiting.insert(sent, 0_u64);
            sent += 1;
        }
        let cookie = answered(client);
        most = most.max(waiting.remove(&cookie).expect("unexpected cookie"));
        for (_, overtaken) in waiting.iter_mut().filter(|(other, _)| **other < cookie) {
            *overtaken += 1;
        }
    }
    most
}

/// Returns the CPU time of the calling thread.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Makes each request of a device cost [`COST_US`] of CPU time. Also returns the number of requests from
/// worker threads.
fn slow(device: Arc<MemDevice>) -> (Arc<MemDevice>, Arc<AtomicU64>) {
    let by_workers = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&by_workers);
    let device = Arc::into_inner(device).unwrap().on_request(move |_| {
        count.fetch_add(u64::from(thread::current().name() == Some("worker")), SeqCst);
        let begun = cpu_time();
        while cpu_time().saturating_sub(begun) < Duration::from_micros(COST_US) {
            std::hint::spin_loop();
        }
    });
    (Arc::new(device), by_workers)
}

fn slow_device(size: u64) -> (Arc<MemDevice>, Arc<AtomicU64>) {
    slow(MemDevice::new(size))
}

#[test]
fn requests_are_not_starved_by_workers() {
    const REQUESTS: u64 = 4000;
    let (device, by_workers) = slow_device(4 * MIB);
    let fixture = Fixture::with_workers(4);
    fixture.publish("disk", &device);
    let most = overtakers(&mut fixture.enter(false), REQUESTS);
    assert!(by_workers.load(SeqCst) > REQUESTS / 20, "{by_workers:?} by workers");
    // A worker thread may get no CPU for some milliseconds, which delays the read that it executes.
    assert!(most < REQUESTS / 8, "{most} later requests completed before one");
}

#[test]
fn stalled_device_or_client_does_not_hold_worker() {
    let (stalled, stalled_by_workers) = slow_device(4 * MIB);
    let (disk, disk_by_workers) = slow_device(4 * MIB);
    // With 2 CPUs, the server has one worker thread.
    let fixture = Fixture::with_workers(2);
    fixture.publish("stalled", &stalled);
    fixture.publish("disk", &disk);
    let mut client = fixture.connect();
    client.greet(3);
    client.go("stalled");
    // Lets the server measure the cost of requests.
    overtakers(&mut client, 100);
    assert!(stalled_by_workers.load(SeqCst) > 0);
    stalled.set(Manner::Held);
    (0..DEPTH).for_each(|cookie| ask(&mut client, cookie));
    eventually(|| stalled.held().len() == DEPTH as usize);

    let mut deaf = fixture.enter(false);
    let requests: Vec<_> =
        (0..400).flat_map(|cookie| request(0, READ, cookie, cookie % 64 * u64::from(PIECE), PIECE)).collect();
    deaf.send(&requests);
    eventually(|| disk.requests(Op::Read).len() > 1);

    let before = disk_by_workers.load(SeqCst);
    overtakers(&mut fixture.enter(false), 1000);
    assert!(disk_by_workers.load(SeqCst) > before + 50, "the worker was blocked");

    stalled.release_all_backwards();
    let mut cookies: Vec<_> = (0..DEPTH).map(|_| answered(&mut client)).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..DEPTH).collect::<Vec<_>>());
    let mut cookies: Vec<_> = (0..400).map(|_| answered(&mut deaf)).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..400).collect::<Vec<_>>());
    drop((client, deaf));
    fixture.assert_sound();
}

#[test]
fn writes_to_zones_keep_order_beside_workers() {
    let (zones, _) = slow(MemDevice::zoned(16 * MIB));
    let (disk, by_workers) = slow_device(4 * MIB);
    let fixture = Fixture::with_workers(4);
    fixture.publish("zones", &zones);
    fixture.publish("disk", &disk);
    let mut client = fixture.connect();
    client.greet(3);
    client.go("zones");
    std::thread::scope(|scope| {
        scope.spawn(|| overtakers(&mut fixture.enter(false), 1000));
        // Every fourth write is followed by a read, which a worker may execute. The 10 replies of one round
        // fit into the socket's buffer.
        let writes = 16 * MIB / u64::from(PIECE);
        for first in (0..writes).step_by(8) {
            let mut bytes = Vec::new();
            for number in first..first + 8 {
                let at = number * u64::from(PIECE);
                bytes.extend(request(0, WRITE, number, at, PIECE));
                bytes.extend(pattern(number, PIECE as usize));
                if number % 4 == 0 {
                    bytes.extend(request(0, READ, 1000 + number, 0, PIECE));
                }
            }
            client.send(&bytes);
            for _ in 0..10 {
                let mut reply = [0; 16];
                client.stream.read_exact(&mut reply).unwrap();
                assert_eq!(reply[4..8], [0; 4]);
                if u64::from_be_bytes(reply[8..].try_into().unwrap()) >= 1000 {
                    client.stream.read_exact(&mut vec![0; PIECE as usize]).unwrap();
                }
            }
        }
    });
    let began: Vec<_> =
        zones.requests(Op::Write).iter().map(|write| write.offset / u64::from(PIECE)).collect();
    assert_eq!(began, (0..16 * MIB / u64::from(PIECE)).collect::<Vec<_>>());
    assert!(by_workers.load(SeqCst) > 0);
    for number in 0..16 * MIB / u64::from(PIECE) {
        let at = number * u64::from(PIECE);
        assert!(zones.bytes(at, PIECE as usize) == pattern(number, PIECE as usize), "{number}");
    }
}

/// While the thread of a connection waits for its client in a send, workers execute the next reads.
#[test]
fn client_that_reads_nothing_keeps_workers_busy() {
    const READS: u64 = 24;
    /// Length of a read. A single reply is due at once, and does not fit into the socket's buffer.
    const LEN: u32 = 256 << 10;
    /// Number of tasks that the single worker has at most, running or queued.
    const TASKS: u64 = 4;
    let (device, by_workers) = slow_device(4 * MIB);
    let (inline, until) = (Arc::new(AtomicU64::new(u64::MAX)), Arc::clone(&by_workers));
    let target = Arc::clone(&inline);
    let device = Arc::new(Arc::into_inner(device).unwrap().on_try(move |disk, request, buffer| {
        // A read on the connection's thread ends when the worker has begun its last task.
        if thread::current().name() != Some("worker") {
            let target = target.load(SeqCst);
            eventually(|| target == u64::MAX || until.load(SeqCst) >= target);
        }
        disk.try_io(request, buffer)
    }));
    let fixture = Fixture::with_workers(2);
    fixture.publish("disk", &device);
    let mut client = fixture.enter(false);
    // Lets the server measure the cost of requests.
    overtakers(&mut client, 100);
    let before = by_workers.load(SeqCst);
    inline.store(before + TASKS, SeqCst);
    let requests: Vec<_> =
        (0..READS).flat_map(|cookie| request(0, READ, cookie, cookie % 16 * u64::from(LEN), LEN)).collect();
    client.send(&requests);
    // TASKS reads are passed before the thread executes one itself, and as many as the worker has completed
    // since before it sends that reply.
    eventually(|| by_workers.load(SeqCst) >= before + 2 * TASKS - 1);
    inline.store(u64::MAX, SeqCst);
    let mut cookies: Vec<_> = (0..READS).map(|_| answered_with(&mut client, LEN)).collect();
    cookies.sort_unstable();
    assert_eq!(cookies, (0..READS).collect::<Vec<_>>());
    drop(client);
    fixture.assert_sound();
}
