//! Clients that leave, close one way or stop at any step of TLS, beside others that work: no thread,
//! descriptor or byte is left of them. A program of its own, as it counts those of the process.
#![allow(missing_docs, reason = "test code")]

#[path = "server/common/mod.rs"]
mod common;

use std::io::{Read as _, Write as _};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use common::client::{Client, READ, WRITE, info_data, option, request};
use common::device::{Manner, MemDevice};
use common::secure::{STARTTLS, Secure, connection};
use freestone_nbd::{Clients, Limits, TlsMode};

/// Clients, and how many at one time.
const ROUNDS: usize = 2400;
const THREADS: usize = 4;

/// Where a client stops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// In the greeting.
    Greeting,
    /// In front of, in, and behind `OPT_STARTTLS`.
    Option(usize),
    /// In the first or the last message of the handshake.
    Hello,
    Finished,
    /// Behind it, in an option, or in a request.
    Secure,
    InOption,
    InHeader,
    InPayload,
    /// It sends requests and reads no answer.
    Unread,
}

const STEPS: [Step; 11] = [
    Step::Greeting,
    Step::Option(0),
    Step::Option(7),
    Step::Option(16),
    Step::Hello,
    Step::Finished,
    Step::Secure,
    Step::InOption,
    Step::InHeader,
    Step::InPayload,
    Step::Unread,
];

/// How it ends there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    Leaves,
    HalfCloses,
    Stops,
}

const WAYS: [Way; 3] = [Way::Leaves, Way::HalfCloses, Way::Stops];

/// Takes a client to its step; the socket is all that is left of it.
fn client_at(secure: &Secure, step: Step, number: usize) -> UnixStream {
    let mut socket = secure.socket();
    let mut greeting = [0; 18];
    if step == Step::Greeting {
        socket.read_exact(&mut greeting[..number % 19]).unwrap();
        return socket;
    }
    socket.read_exact(&mut greeting).unwrap();
    socket.write_all(&3_u32.to_be_bytes()).unwrap();
    if let Step::Option(sent) = step {
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
    let mut stream = rustls::Stream::new(&mut tls, &mut socket);
    let go = option(7, &info_data("disk", &[]));
    match step {
        Step::Secure => return socket,
        Step::InOption => stream.write_all(&go[..number % go.len()]).unwrap(),
        _ => stream.write_all(&go).unwrap(),
    }
    match step {
        Step::InHeader => stream.write_all(&request(0, READ, 1, 0, 512)[..number % 28]).unwrap(),
        Step::InPayload => {
            stream.write_all(&request(0, WRITE, 1, 0, 300_000)).unwrap();
            stream.write_all(&vec![7; number * 97 % 300_000]).unwrap();
        }
        Step::Unread => {
            for cookie in 0..8 {
                stream.write_all(&request(0, READ, cookie, 0, 1 << 20)).unwrap();
            }
        }
        _ => {}
    }
    socket
}

fn counts() -> (usize, usize) {
    let of = |path: &str| std::fs::read_dir(path).unwrap().count();
    (of("/proc/self/task"), of("/proc/self/fd"))
}

/// Bytes of address space, which buffers of connections are.
fn mapped() -> usize {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    statm.split(' ').next().unwrap().parse::<usize>().unwrap() * 4096
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
                    let (step, way) = (STEPS[number % STEPS.len()], WAYS[number / STEPS.len() % WAYS.len()]);
                    let socket = client_at(secure, step, number);
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

#[test]
fn nothing_is_left_of_clients_that_leave_or_stop_anywhere() {
    let limits = Limits { handshake_silence: Duration::from_millis(500), ..Limits::default() };
    let secure = Secure::with(TlsMode::Require, limits, true);
    let device = MemDevice::new(8 << 20);
    device.set(Manner::Thread);
    secure.publish("disk", &device, Clients::Secure);
    let busy = Arc::new(AtomicBool::new(true));
    std::thread::scope(|scope| {
        let worker = {
            let (busy, secure) = (Arc::clone(&busy), &secure);
            scope.spawn(move || {
                let mut client: Client = secure.client();
                client.structured();
                client.go("disk");
                let mut done = 0;
                while busy.load(SeqCst) {
                    assert_eq!(client.write(0, 4096, &vec![done as u8; 20_000]), 0);
                    assert!(client.read(4096, 20_000).unwrap() == vec![done as u8; 20_000]);
                    done += 1;
                }
                client.disconnect();
                done
            })
        };
        // What the process keeps is there after the first ones.
        everybody(&secure, ROUNDS / 8);
        let settled = |before: Option<(usize, usize)>| {
            let end = Instant::now() + Duration::from_secs(30);
            // The one that works is there.
            while secure.server.stats().connections > 1 || before.is_some_and(|before| counts() != before) {
                assert!(Instant::now() < end, "{:?}, and {before:?} before", counts());
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        settled(None);
        std::thread::sleep(Duration::from_millis(100));
        let (before, mapped_before) = (counts(), mapped());
        everybody(&secure, ROUNDS);
        settled(Some(before));
        // The allocator's arenas are not told apart; of each connection 800 KiB are mapped.
        let grown = mapped().saturating_sub(mapped_before);
        assert!(grown < 256 << 20, "{grown} bytes are left of {ROUNDS} connections");
        busy.store(false, SeqCst);
        assert!(worker.join().unwrap() > 0);
    });
    assert_eq!(secure.server.stats().panics, 0);
    secure.assert_sound();
}
