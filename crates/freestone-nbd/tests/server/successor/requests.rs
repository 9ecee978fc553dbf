//! Requests of connections that are passed: each is answered exactly once, by the server or its successor.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;

use super::{LONG, SHORT, pass_during, succeed, write_request};
use crate::common::device::{sweep_steps, vast};
use crate::common::prelude::*;
use freestone_core::device::Op;
use freestone_nbd::MAX_IN_FLIGHT;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// Receives one reply to each of the writes.
fn expect_writes(client: &mut Client, mut wanted: HashSet<u64>) {
    while !wanted.is_empty() {
        let cookie = match client.chunk() {
            Chunk::Simple { cookie, error: 0 } | Chunk::None { cookie } => cookie,
            other => panic!("{other:?}"),
        };
        assert!(wanted.remove(&cookie), "a second reply to {cookie}");
    }
}

#[test]
fn requests_in_flight_complete_before_pass() {
    for headers in Headers::ALL {
        let device = MemDevice::new(4 * MIB as u64);
        let fixture = Fixture::serving(&device);
        let mut client = fixture.enter(headers);
        let old = pattern(1, 2 * MIB);
        device.fill(0, &old);
        device.set(Manner::Held);
        let (mut reads, mut writes) = (HashMap::new(), HashSet::new());
        for i in 0..8_u64 {
            let cookie = client.ask(0, READ, i * 4096, 4096);
            reads.insert(cookie, (i * 4096, 4096));
        }
        eventually(|| device.held().len() == 8);
        let passed = pass_during(&fixture.server, LONG, || {
            assert_eq!(device.held().len(), 8, "no request may be dropped");
            device.release_all_backwards();
        });
        assert_eq!(passed.connections.len(), 1);
        assert_eq!(passed.connections[0].state.unread, [0_u8; 0]);
        let mut got = client.read_replies(&mut reads.clone());
        for (cookie, (offset, len)) in reads {
            assert!(got.remove(&cookie).unwrap().unwrap() == old[offset as usize..][..len as usize]);
        }
        assert!(got.is_empty());

        // The connection goes on with the same cookies, headers and contexts.
        let second = succeed(passed, &fixture.address, &device);
        for i in 0..8_u64 {
            let (cookie, bytes) = write_request(&mut client, i * 4096, &pattern(i + 7, 4096));
            client.send(&bytes);
            writes.insert(cookie);
        }
        eventually(|| device.held().len() == 8);
        let passed = pass_during(&second, LONG, || device.release_all_backwards());
        device.set(Manner::Inline);
        let third = succeed(passed, &fixture.address, &device);
        expect_writes(&mut client, writes);
        assert_eq!(device.requests(Op::Write).len(), 8, "each write is executed once");
        for i in 0..8_u64 {
            assert!(client.read(i * 4096, 4096).unwrap() == pattern(i + 7, 4096));
        }
        if client.has_chunks() {
            assert_eq!(client.status(0, 0, 8192).unwrap(), [(8192, 0)]);
        }
        assert_eq!((third.connections("disk"), third.stats().connections), (1, 1));
        client.disconnect();
        eventually(|| third.stats().connections == 0);
    }
}

#[test]
fn unread_requests_are_executed_by_successor() {
    const BEYOND: usize = 44;
    for headers in Headers::ALL {
        // The device is asked for its geometry in each try, so the count shows the progress of the session.
        let tries = Arc::new(AtomicUsize::new(0));
        let device = {
            let tries = Arc::clone(&tries);
            MemDevice::with(MIB as u64, move |_| {
                tries.fetch_add(1, SeqCst);
            })
        };
        let fixture = Fixture::serving(&device);
        let mut client = fixture.enter(headers);
        let data = pattern(3, MIB);
        device.fill(0, &data);
        device.set(Manner::Held);
        // The last requests wait for those in flight, and only a part of the very last one is sent.
        let (mut bytes, mut wanted) = (Vec::new(), [HashMap::new(), HashMap::new()]);
        for i in 0..(MAX_IN_FLIGHT + BEYOND) as u64 {
            let cookie = client.cookie();
            bytes.extend(client.header(0, READ, cookie, i * 512, 512));
            wanted[usize::from(i as usize >= MAX_IN_FLIGHT)].insert(cookie, (i * 512, 512));
        }
        let cut = bytes.len() - 9;
        client.send(&bytes[..cut]);
        eventually(|| device.held().len() == MAX_IN_FLIGHT);
        let mut before = usize::MAX;
        eventually(|| {
            std::thread::sleep(SHORT / 3);
            std::mem::replace(&mut before, tries.load(SeqCst)) == tries.load(SeqCst)
        });
        let expect_reads = |client: &mut Client, which: usize| {
            for (cookie, read) in client.read_replies(&mut wanted[which].clone()) {
                let offset = wanted[which][&cookie].0 as usize;
                assert!(read.unwrap() == data[offset..offset + 512]);
            }
        };
        // The pass wakes the session, which tries the first waiting request again and then stops.
        let passed = pass_during(&fixture.server, LONG, || {
            eventually(|| tries.load(SeqCst) > before);
            device.release_all_backwards();
            expect_reads(&mut client, 0);
        });
        assert_eq!(passed.connections.len(), 1);
        let unread = passed.connections[0].state.unread.len();
        assert_eq!(unread, BEYOND * headers.request_bytes() - 9);
        assert_eq!(device.requests(Op::Read).len(), MAX_IN_FLIGHT);
        device.set(Manner::Inline);
        let second = succeed(passed, &fixture.address, &device);
        client.send(&bytes[cut..]);
        expect_reads(&mut client, 1);
        assert_eq!(device.requests(Op::Read).len(), MAX_IN_FLIGHT + BEYOND);
        client.disconnect();
        eventually(|| second.stats().connections == 0);
        assert_eq!(second.stats().requests, BEYOND as u64);
    }
}

#[test]
fn half_sent_write_is_completed_once() {
    for headers in Headers::ALL {
        // Writes in pieces, writes received as a whole, and writes that have not begun.
        for (zoned, len) in [(false, MIB), (true, MIB), (false, 64 * KIB), (true, 64 * KIB)] {
            let size = 4 * MIB as u64;
            let device = if zoned { MemDevice::zoned(size) } else { MemDevice::new(size) };
            let fixture = Fixture::serving(&device);
            let mut client = fixture.enter(headers);
            let data = pattern(len as u64, len);
            let (cookie, bytes) = write_request(&mut client, 4096, &data);
            // A read behind the write has not begun when the write is complete.
            let read = client.cookie();
            let behind = client.header(0, READ, read, 4096, len as u64);
            let half = bytes.len() / 2 + 3;
            client.send(&bytes[..half]);
            let rest = [&bytes[half..], &behind].concat();
            let begins = len > 256 * KIB;
            let has_begun = || fixture.server.stats().requests == 1;
            eventually(|| has_begun() == begins);
            let passed = pass_during(&fixture.server, LONG, || {
                if begins {
                    client.send(&rest);
                }
            });
            assert_eq!(passed.connections.len(), 1);
            if begins {
                assert_eq!(client.plain_reply(cookie), 0);
            }
            let second = succeed(passed, &fixture.address, &device);
            if !begins {
                client.send(&rest);
                assert_eq!(client.plain_reply(cookie), 0);
            }
            let mut wanted = HashMap::from([(read, (4096, len as u64))]);
            assert!(client.read_replies(&mut wanted).remove(&read).unwrap().unwrap() == data);
            let written: u64 = device.requests(Op::Write).iter().map(|write| write.len).sum();
            assert_eq!(written, len as u64, "no byte is written twice");
            client.disconnect();
            eventually(|| second.stats().connections == 0);
        }
    }
}

#[test]
fn refused_write_is_skipped_before_pass() {
    let device = MemDevice::new(MIB as u64);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    let (cookie, bytes) = write_request(&mut client, MIB as u64, &[7; 4096]);
    client.send(&bytes[..1000]);
    eventually(|| fixture.server.stats().requests == 1);
    let passed = pass_during(&fixture.server, LONG, || client.send(&bytes[1000..]));
    assert_eq!(client.plain_reply(cookie), ENOSPC);
    let _second = succeed(passed, &fixture.address, &device);
    assert_eq!(client.read(0, 512).unwrap(), [0; 512]);
}

#[test]
fn stalled_payload_is_cut_after_grace() {
    let device = MemDevice::new(4 * MIB as u64);
    let fixture = Fixture::serving(&device);
    let mut stalled = fixture.enter(true);
    let mut other = fixture.enter(false);
    let (_, bytes) = write_request(&mut stalled, 0, &pattern(1, MIB));
    stalled.send(&bytes[..MIB / 2]);
    eventually(|| fixture.server.stats().requests == 1);
    let passed = fixture.server.pass_on(Duration::from_secs(2));
    assert_eq!(passed.connections.len(), 1);
    stalled.assert_closed();
    let _second = succeed(passed, &fixture.address, &device);
    assert_eq!(other.read(0, 512).unwrap().len(), 512);
}

#[test]
fn blocked_reader_gets_all_replies() {
    for headers in Headers::ALL {
        let device = MemDevice::new(48 * MIB as u64);
        let data = pattern(9, 40 * MIB);
        device.fill(0, &data);
        let fixture = Fixture::serving(&device);
        let mut client = fixture.enter(headers);
        // With simple replies, the server reads such a request in windows.
        let cookie = client.ask(0, READ, 0, data.len() as u64);
        let mut wanted = HashMap::from([(cookie, (0, data.len() as u64))]);
        eventually(|| !device.requests(Op::Read).is_empty());
        let mut got = HashMap::new();
        let passed = pass_during(&fixture.server, LONG, || got = client.read_replies(&mut wanted));
        assert!(got.remove(&cookie).unwrap().unwrap() == data);
        let _second = succeed(passed, &fixture.address, &device);
        assert!(client.read(4096, 4096).unwrap() == data[4096..8192]);

        // A client that does not read at all is cut.
        let fixture = Fixture::serving(&device);
        let mut client = fixture.enter(headers);
        device.log.lock().clear();
        client.ask(0, READ, 0, data.len() as u64);
        eventually(|| !device.requests(Op::Read).is_empty());
        assert!(fixture.server.pass_on(SHORT).connections.is_empty());
    }
}

#[test]
fn pipelined_large_reads_stop_between_requests() {
    const READS: u64 = 64;
    let device = MemDevice::new(64 * MIB as u64);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(false);
    let data = pattern(5, 256 * KIB);
    device.fill(0, &data);
    let (mut bytes, mut wanted) = (Vec::new(), HashMap::new());
    for _ in 0..READS {
        let cookie = client.cookie();
        bytes.extend(client.header(0, READ, cookie, 0, data.len() as u64));
        wanted.insert(cookie, (0, data.len() as u64));
    }
    // The client does not read, so the server blocks in a send after some requests.
    client.send(&bytes);
    eventually(|| !device.requests(Op::Read).is_empty());
    let mut got = HashMap::new();
    let (mut left, mut second) = (0, None);
    std::thread::scope(|scope| {
        let successor = scope.spawn(|| {
            let passed = fixture.server.pass_on(LONG);
            (passed.connections[0].state.unread.len(), succeed(passed, &fixture.address, &device))
        });
        eventually(|| fixture.server.listen(&fixture.address).is_err());
        std::thread::sleep(SHORT);
        got = client.read_replies(&mut wanted);
        let (unread, server) = successor.join().unwrap();
        (left, second) = (unread, Some(server));
    });
    assert!(left > 0, "the server must not execute all received requests");
    assert_eq!(got.len(), READS as usize);
    assert!(got.values().all(|read| read.as_ref() == Ok(&data)));
    client.disconnect();
    eventually(|| second.as_ref().is_some_and(|server| server.stats().connections == 0));
}

#[test]
fn sweeps_complete_before_pass() {
    const LEN: u64 = 1 << 30;
    let device = vast(8 << 30, 0);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    let cookie = client.ask(0, TRIM, 0, LEN);
    eventually(|| device.held().len() == 1);
    let passed = pass_during(&fixture.server, LONG, || {
        for _ in 0..4 {
            eventually(|| device.held().len() == 1);
            device.release(0);
        }
    });
    assert_eq!(client.plain_reply(cookie), 0);
    assert_eq!(sweep_steps(&device).iter().map(|step| step.len).sum::<u64>(), LEN);
    let _second = succeed(passed, &fixture.address, &device);
    assert_eq!(client.read(0, 512).unwrap().len(), 512);
}

#[test]
fn idle_connections_are_passed() {
    let device = MemDevice::new(MIB as u64);
    let fixture = Fixture::serving(&device);
    let mut clients: Vec<_> = (0..20).map(|_| fixture.enter(true)).collect();
    // The first half polls, the other half blocks in a receive call.
    std::thread::sleep(Duration::from_millis(1200));
    for client in &mut clients[10..] {
        client.read(0, 512).unwrap();
    }
    let passed = fixture.server.pass_on(LONG);
    assert_eq!(passed.connections.len(), 20);
    assert_eq!(fixture.server.stats().connections, 0);
    let second = succeed(passed, &fixture.address, &device);
    // The first server ends without any effect on the connections.
    drop(fixture.server);
    for client in &mut clients {
        assert_eq!(client.read(0, 512).unwrap().len(), 512);
    }
    assert_eq!(second.connections("disk"), 20);
}

/// Clients verify their own regions while the server is replaced several times.
#[test]
fn busy_clients_survive_many_successors() {
    const CLIENTS: u64 = 4;
    const REGION: u64 = MIB as u64;
    let device = MemDevice::new(CLIENTS * REGION);
    device.set(Manner::Inline);
    let fixture = Fixture::serving(&device);
    let mut clients: Vec<_> = (0..CLIENTS).map(|i| fixture.enter(Headers::ALL[i as usize % 3])).collect();
    let Fixture { mut server, address, directory: _directory } = fixture;
    let ends = Arc::new(AtomicBool::new(false));
    std::thread::scope(|scope| {
        let threads: Vec<_> = clients
            .drain(..)
            .enumerate()
            .map(|(number, mut client)| {
                let ends = Arc::clone(&ends);
                scope.spawn(move || {
                    let at = number as u64 * REGION;
                    let mut rounds = 0_u64;
                    while !ends.load(SeqCst) || rounds < 10 {
                        // Several writes of various lengths in flight, sent at once.
                        let (mut bytes, mut writes) = (Vec::new(), HashSet::new());
                        for (i, len) in [512, 4096, 32 << 10, 300 << 10].into_iter().enumerate() {
                            let offset = at + (i as u64) * (4 << 10) * 9;
                            let data = pattern(rounds * 16 + i as u64, len);
                            let (cookie, request) = write_request(&mut client, offset, &data);
                            bytes.extend(request);
                            writes.insert(cookie);
                        }
                        client.send(&bytes);
                        expect_writes(&mut client, writes);
                        let mut wanted = HashMap::new();
                        for (i, len) in [512_u64, 4096, 32 << 10, 300 << 10].into_iter().enumerate() {
                            let offset = at + (i as u64) * (4 << 10) * 9;
                            wanted.insert(client.ask(0, READ, offset, len), (offset, len));
                        }
                        let asked = wanted.clone();
                        for (cookie, read) in client.read_replies(&mut wanted) {
                            let (offset, len) = asked[&cookie];
                            let i = (offset - at) / ((4 << 10) * 9);
                            assert!(read.unwrap() == pattern(rounds * 16 + i, len as usize));
                        }
                        rounds += 1;
                    }
                    client.disconnect();
                })
            })
            .collect();
        for manner in [Manner::Thread, Manner::Mixed(4096), Manner::Partly(4096), Manner::Inline] {
            std::thread::sleep(SHORT / 3);
            let passed = server.pass_on(LONG);
            assert_eq!(passed.connections.len(), CLIENTS as usize);
            device.set(manner);
            server = succeed(passed, &address, &device);
            if manner == Manner::Mixed(4096) {
                // The test completes what the device holds.
                for _ in 0..200 {
                    device.release_by(|_| (0, false));
                    std::thread::sleep(Duration::from_millis(1));
                }
                device.set(Manner::Thread);
                device.release_all_backwards();
            }
        }
        ends.store(true, SeqCst);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(server.stats().panics, 0);
    });
}
