//! Clients that leave, close one way or stop at any step of the protocol, in clear and by TLS,
//! beside others that work: no thread, descriptor or byte is left of them. A program of its own, as
//! it counts those of the process.
#![allow(missing_docs, reason = "test code")]
#![expect(unsafe_code)]
// UNSAFETY: an allocator, which counts and passes on.

#[path = "server/common/mod.rs"]
mod common;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::Headers;
use common::client::{BLOCK_STATUS, Client, READ, WRITE, info_data, long_request, option, request};
use common::device::{Manner, MemDevice};
use common::secure::{STARTTLS, Secure, connection};
use freestone_nbd::{Clients, Limits, TlsMode};
use freestone_testkit::effort;

/// Clients of a quick run and of the slow lane.
const ROUNDS: [usize; 2] = [800, 8000];
/// Clients before the counts that the others are compared with.
const FIRST_ROUNDS: usize = 400;
/// Clients at one time.
const THREADS: usize = 4;
/// Bytes that tables of the process may have grown by: measured, up to 27 000 bytes come and go, after
/// 800 clients as after 32 000. Less than anything of each client.
const SLACK_BYTES: usize = 32 << 10;
const _: () = assert!(SLACK_BYTES / ROUNDS[0] <= 40 && SLACK_BYTES / ROUNDS[1] <= 4);

/// Of writes of which only a part arrives: a part may be written.
const ELSEWHERE: u64 = 4 << 20;

/// Bytes that were allocated and are not freed yet.
static BYTES: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static COUNTING: Counting = Counting;

// SAFETY: the system's allocator does all the work; the count changes no layout and no address.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        BYTES.fetch_add(layout.size(), SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        BYTES.fetch_sub(layout.size(), SeqCst);
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(memory, layout) }
    }
}

/// Where a client stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// In the greeting.
    Greeting,
    /// In its flags.
    Flags,
    /// In front of, in, and behind `OPT_STARTTLS`.
    Starting(usize),
    /// In the first or the last message of TLS's handshake.
    Hello,
    Finished,
    /// Behind it, or where options begin in clear.
    Entered,
    InOption,
    InHeader,
    InPayload,
    /// It sends requests and reads no answer.
    Unread,
    Unheard,
}

const IN_CLEAR: [Step; 8] = [
    Step::Greeting,
    Step::Flags,
    Step::Entered,
    Step::InOption,
    Step::InHeader,
    Step::InPayload,
    Step::Unread,
    Step::Unheard,
];

const BY_TLS: [Step; 11] = [
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

/// How it ends there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Leaves,
    HalfCloses,
    Stops,
}

const WAYS: [Way; 3] = [Way::Leaves, Way::HalfCloses, Way::Stops];

/// Takes a client in clear to its step; the socket is all that is left of it.
fn in_clear(secure: &Secure, step: Step, number: usize) -> UnixStream {
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
    go_on(Client::over(Box::new(socket.try_clone().unwrap())), step, number);
    socket
}

/// The same by TLS.
fn by_tls(secure: &Secure, step: Step, number: usize) -> UnixStream {
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
    go_on(Client::over(Box::new(stream)), step, number);
    socket
}

/// From where options begin.
fn go_on(mut client: Client, step: Step, number: usize) {
    let headers = Headers::ALL[number % 3];
    match step {
        Step::Entered => return,
        Step::InOption => {
            let go = option(7, &info_data("disk", &[]));
            return client.send(&go[..number % go.len()]);
        }
        _ => {}
    }
    client.agree(headers);
    if client.structured {
        client.set_context("disk");
    }
    client.go("disk");
    let header = |command, cookie, len: u32| {
        if headers == Headers::Extended {
            // Of a write it says that the payload is as long.
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
        // What a socket holds and more.
        Step::Unread => (0..8).for_each(|cookie| client.send(&header(READ, cookie, 1 << 20))),
        Step::Unheard => {
            let command = if client.structured { BLOCK_STATUS } else { READ };
            (0..40).for_each(|cookie| client.send(&header(command, cookie, 8192)));
        }
        _ => unreachable!("{step:?} is before that"),
    }
}

fn counts() -> (usize, usize) {
    let of = |path: &str| std::fs::read_dir(path).unwrap().count();
    (of("/proc/self/task"), of("/proc/self/fd"))
}

fn everybody(secure: &Secure, rounds: usize) {
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
                    let steps: &[Step] = if kind == 0 { &IN_CLEAR } else { &BY_TLS };
                    let (step, way) = (steps[turn % steps.len()], WAYS[turn / steps.len() % WAYS.len()]);
                    let socket =
                        if kind == 0 { in_clear(secure, step, turn) } else { by_tls(secure, step, turn) };
                    match way {
                        Way::Leaves => drop(socket),
                        Way::HalfCloses => {
                            socket.shutdown(Shutdown::Write).unwrap();
                            stopped.push(socket);
                        }
                        Way::Stops => stopped.push(socket),
                    }
                    // Those that stop are many at one time, and leave in the end.
                    if stopped.len() > 40 {
                        stopped.drain(..20);
                    }
                }
            });
        }
    });
}

/// Some that work for as long as the others come, one in clear and one by TLS.
fn beside_work(secure: &Secure, rounds: usize) {
    let busy = AtomicBool::new(true);
    let work = |mut client: Client, from: u64| {
        client.structured();
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
        everybody(secure, rounds);
        busy.store(false, SeqCst);
    });
}

#[test]
fn nothing_is_left_of_clients_that_leave_or_stop_anywhere() {
    let limits = Limits { handshake_silence: Duration::from_millis(500), ..Limits::default() };
    let secure = Secure::with(TlsMode::On, limits, true);
    let device: Arc<MemDevice> = MemDevice::new(8 << 20);
    device.set(Manner::Thread);
    secure.publish("disk", &device, Clients::All);
    // Threads wait a moment for the next connection.
    let settled = |before: Option<(usize, usize)>| {
        let end = Instant::now() + Duration::from_secs(30);
        while secure.server.stats().connections > 0 || before.is_some_and(|before| counts() != before) {
            assert!(Instant::now() < end, "{:?}, and {before:?} before", counts());
            std::thread::sleep(Duration::from_millis(5));
        }
        // Of the device, which notes what it was asked for.
        *device.log.lock().unwrap() = Vec::new();
    };
    // What the process keeps is there after the first ones.
    beside_work(&secure, FIRST_ROUNDS);
    settled(None);
    std::thread::sleep(Duration::from_millis(1500));
    let (before, bytes_before) = (counts(), BYTES.load(SeqCst));
    let rounds = effort(ROUNDS[0], ROUNDS[1]);
    beside_work(&secure, rounds);
    settled(Some(before));
    let grown = BYTES.load(SeqCst).saturating_sub(bytes_before);
    assert!(grown <= SLACK_BYTES, "{grown} bytes are left of {rounds} connections");
    assert_eq!(secure.server.stats().panics, 0);
    secure.assert_sound();
}
