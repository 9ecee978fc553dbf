//! Checks that clients that disconnect, half-close or stop at any step leak no thread, descriptor or memory.
//! The clients connect with and without TLS, next to working clients. The test is a separate program, because
//! it counts the resources of the process.
#![allow(missing_docs, reason = "test code")]
#![expect(unsafe_code)]
// UNSAFETY: a global allocator that counts bytes and forwards to the system allocator.

#[path = "server/common/mod.rs"]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::prelude::*;
use common::secure::{Secure, connection};
use freestone_nbd::{Limits, TlsMode, Visibility};
use freestone_testkit::effort;

/// Number of stopping clients in a quick run and in the slow lane.
const ROUNDS: [usize; 2] = [800, 8000];
/// Number of stopping clients before the resources are first counted.
const FIRST_ROUNDS: usize = 400;
/// Number of threads that run stopping clients.
const THREADS: usize = 4;
/// Allowed growth of allocated memory in bytes. Measured: up to 27 000 bytes vary, after 800 clients as after
/// 32 000. A leak of a few bytes per client exceeds this.
const SLACK_BYTES: usize = 32 << 10;
const _: () = assert!(SLACK_BYTES / ROUNDS[0] <= 40 && SLACK_BYTES / ROUNDS[1] <= 4);

/// Device offset of incomplete writes. Working clients use other offsets, because a part of such a write may
/// be written.
const ELSEWHERE: u64 = 4 << 20;

/// Number of bytes that are allocated and not freed.
static BYTES: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: the system allocator does all the work; counting changes neither layout nor address.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), SeqCst);
        // SAFETY: the caller upholds the contract of the allocator.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), SeqCst);
        // SAFETY: the caller upholds the contract of the allocator.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), SeqCst);
        // SAFETY: the caller upholds the contract of the allocator.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// The step of a session at which a client stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// After reading a part of the server's greeting.
    Greeting,
    /// After sending a part of the client flags.
    Flags,
    /// Before, within or after `OPT_STARTTLS`. The value is the number of bytes sent.
    Starting(usize),
    /// Within the client's first message of the TLS handshake.
    Hello,
    Finished,
    /// Before the first option.
    Entered,
    InOption,
    InHeader,
    InPayload,
    /// After sending large reads whose replies the client does not receive.
    Unread,
    Unheard,
}

const PLAIN_STEPS: [Step; 8] = [
    Step::Greeting,
    Step::Flags,
    Step::Entered,
    Step::InOption,
    Step::InHeader,
    Step::InPayload,
    Step::Unread,
    Step::Unheard,
];

const TLS_STEPS: [Step; 11] = [
    Step::Starting(0),
    Step::Starting(7),
    Step::Starting(16),
    Step::Hello,
    Step::Finished,
    Step::Entered,
    Step::InOption,
    Step::InHeader,
    Step::InPayload,
    Step::Unread,
    Step::Unheard,
];

/// Behavior of a client after its last step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ending {
    Leaves,
    HalfCloses,
    Stops,
}

const ENDINGS: [Ending; 3] = [Ending::Leaves, Ending::HalfCloses, Ending::Stops];

/// Runs a client without TLS up to `step`, and returns the client's socket.
fn stop_without_tls(secure: &Secure, step: Step, number: usize) -> UnixStream {
    let mut socket = secure.socket();
    let mut greeting = [0; 18];
    if step == Step::Greeting {
        socket.read_exact(&mut greeting[..number % 19]).unwrap();
        return socket;
    }
    socket.read_exact(&mut greeting).unwrap();
    let flags = 3_u32.to_be_bytes();
    if step == Step::Flags {
        socket.write_all(&flags[..number % 4]).unwrap();
        return socket;
    }
    socket.write_all(&flags).unwrap();
    continue_from_options(Client::over(socket.try_clone().unwrap()), step, number);
    socket
}

/// Runs a client with TLS up to `step`, and returns the client's socket.
fn stop_with_tls(secure: &Secure, step: Step, number: usize) -> UnixStream {
    let mut socket = secure.socket();
    socket.read_exact(&mut [0; 18]).unwrap();
    socket.write_all(&3_u32.to_be_bytes()).unwrap();
    if let Step::Starting(sent) = step {
        socket.write_all(&option(STARTTLS, &[])[..sent]).unwrap();
        return socket;
    }
    socket.write_all(&option(STARTTLS, &[])).unwrap();
    socket.read_exact(&mut [0; 20]).unwrap();
    let versions =
        if number.is_multiple_of(2) { &[&rustls::version::TLS13] } else { &[&rustls::version::TLS12] };
    let mut tls = connection(&secure.ours, &secure.ours, Some("alice"), versions);
    let mut sealed = Vec::new();
    tls.write_tls(&mut sealed).unwrap();
    if step == Step::Hello {
        socket.write_all(&sealed[..number % sealed.len()]).unwrap();
        return socket;
    }
    socket.write_all(&sealed).unwrap();
    if step == Step::Finished {
        while tls.is_handshaking() && !tls.wants_write() {
            tls.read_tls(&mut socket).unwrap();
            tls.process_new_packets().unwrap();
        }
        let mut sealed = Vec::new();
        tls.write_tls(&mut sealed).unwrap();
        socket.write_all(&sealed[..number % sealed.len()]).unwrap();
        return socket;
    }
    tls.complete_io(&mut socket).unwrap();
    let stream = rustls::StreamOwned::new(tls, socket.try_clone().unwrap());
    continue_from_options(Client::over(stream), step, number);
    socket
}

/// Runs a client from its first option up to `step`.
fn continue_from_options(mut client: Client, step: Step, number: usize) {
    let headers = Headers::ALL[number % 3];
    match step {
        Step::Entered => return,
        Step::InOption => {
            let go = option(GO, &info_data("disk", &[]));
            return client.send(&go[..number % go.len()]);
        }
        _ => {}
    }
    client.agree(headers);
    if client.has_chunks() {
        client.set_context("disk");
    }
    client.go("disk");
    let header = |command, cookie, len: u32| {
        if headers == Headers::Extended {
            // The flag announces the payload of a write.
            let flags = if command == WRITE { 32 } else { 0 };
            long_request(flags, command, cookie, ELSEWHERE, len.into())
        } else {
            request(0, command, cookie, ELSEWHERE, len)
        }
    };
    match step {
        Step::InHeader => {
            let header = header(READ, 1, 512);
            client.send(&header[..number % header.len()]);
        }
        Step::InPayload => {
            client.send(&header(WRITE, 1, 300_000));
            client.send(&vec![7; number * 97 % 300_000]);
        }
        // Requests more replies than a socket buffers.
        Step::Unread => (0..8).for_each(|cookie| client.send(&header(READ, cookie, 1 << 20))),
        Step::Unheard => {
            let command = if client.has_chunks() { BLOCK_STATUS } else { READ };
            (0..40).for_each(|cookie| client.send(&header(command, cookie, 8192)));
        }
        _ => unreachable!("{step:?} was handled before"),
    }
}

/// Returns the numbers of threads and of open descriptors.
fn counts() -> (usize, usize) {
    (std::fs::read_dir("/proc/self/task").unwrap().count(), descriptors().len())
}

/// Returns the targets of the open descriptors except pipes. The server opens no pipe, and a sanitizer's symbolizer opens
/// two at its first report, even if the report is suppressed.
fn descriptors() -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir("/proc/self/fd").unwrap();
    let targets = entries.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    targets.filter(|target| !target.to_string_lossy().starts_with("pipe:")).collect()
}

fn run_stopping_clients(secure: &Secure, rounds: usize) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let mut stopped = Vec::new();
                loop {
                    let number = next.fetch_add(1, SeqCst);
                    if number >= rounds {
                        break;
                    }
                    let (kind, turn) = (number % 2, number / 2);
                    let steps: &[Step] = if kind == 0 { &PLAIN_STEPS } else { &TLS_STEPS };
                    let (step, way) =
                        (steps[turn % steps.len()], ENDINGS[turn / steps.len() % ENDINGS.len()]);
                    let socket = if kind == 0 {
                        stop_without_tls(secure, step, turn)
                    } else {
                        stop_with_tls(secure, step, turn)
                    };
                    match way {
                        Ending::Leaves => drop(socket),
                        Ending::HalfCloses => {
                            socket.shutdown(Shutdown::Write).unwrap();
                            stopped.push(socket);
                        }
                        Ending::Stops => stopped.push(socket),
                    }
                    // Keeps many stopped clients connected, and disconnects the oldest ones.
                    if stopped.len() > 40 {
                        stopped.drain(..20);
                    }
                }
            });
        }
    });
}

/// Runs two working clients, one of them with TLS, while other clients connect and stop.
fn run_beside_workload(secure: &Secure, rounds: usize) {
    let busy = AtomicBool::new(true);
    let work = |mut client: Client, from: u64| {
        client.agree(Headers::Structured);
        client.go("disk");
        let mut done = 0_u8;
        while busy.load(SeqCst) {
            assert_eq!(client.write(0, from, &vec![done; 20_000]), 0);
            assert!(client.read(from, 20_000).unwrap() == vec![done; 20_000]);
            done = done.wrapping_add(1);
        }
        client.disconnect();
    };
    std::thread::scope(|scope| {
        scope.spawn(|| work(secure.clear(), 4096));
        scope.spawn(|| work(secure.client(), 1 << 20));
        run_stopping_clients(secure, rounds);
        busy.store(false, SeqCst);
    });
}

#[test]
fn clients_stopping_at_any_step_leak_nothing() {
    let limits = Limits { handshake_idle_timeout: Duration::from_millis(500), ..Limits::default() };
    let secure = Secure::with(TlsMode::Optional, limits, true);
    let device: Arc<MemDevice> = MemDevice::new(8 << 20);
    device.set(Manner::Thread);
    secure.publish("disk", &device, Visibility::All);
    // Waits for idle connection threads, which end a short time after their connections.
    let settled = |before: Option<(usize, usize)>| {
        let end = Instant::now() + Duration::from_secs(30);
        while secure.server.stats().connections > 0 || before.is_some_and(|before| counts() != before) {
            assert!(Instant::now() < end, "{:?}, and {before:?} before: {:?}", counts(), descriptors());
            std::thread::sleep(Duration::from_millis(5));
        }
        // Clears the device's log, which would count as growth.
        *device.log.lock() = Vec::new();
    };
    // The first clients cause one-time allocations of the process.
    run_beside_workload(&secure, FIRST_ROUNDS);
    settled(None);
    std::thread::sleep(Duration::from_millis(1500));
    let (before, bytes_before) = (counts(), BYTES.load(SeqCst));
    let rounds = effort(ROUNDS[0], ROUNDS[1]);
    run_beside_workload(&secure, rounds);
    settled(Some(before));
    let grown = BYTES.load(SeqCst).saturating_sub(bytes_before);
    assert!(grown <= SLACK_BYTES, "{grown} bytes are left of {rounds} connections");
    assert_eq!(secure.server.stats().panics, 0);
    secure.assert_sound();
}
