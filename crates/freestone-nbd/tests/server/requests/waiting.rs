//! Tests of devices that would block: completions in any order, limits, and connections that end with
//! requests in flight.

use std::collections::HashMap;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::common::prelude::*;
use freestone_core::device::Op;
use freestone_nbd::{Address, ExportOptions, MAX_IN_FLIGHT, MAX_IN_FLIGHT_BYTES, PublishError};

pub const MIB: u64 = 1 << 20;
pub const LONG: Duration = Duration::from_secs(30);

#[test]
fn all_commands_work_with_submitted_requests() {
    let device = MemDevice::new(64 * MIB);
    let fixture = Fixture::serving(&device);
    device.set(Manner::Thread);
    for headers in Headers::ALL {
        let mut client = fixture.enter(headers);
        for len in [512, 4096, 16 << 10, 20 << 10, 256 << 10, 1 << 20, 32 << 20] {
            let data = pattern(len as u64, len);
            assert_eq!(client.write(0, 512, &data), 0);
            assert!(client.read(512, len as u32).unwrap() == data);
            if client.has_chunks() {
                let cookie = client.ask(DF, READ, 512, len as u64);
                let mut wanted = HashMap::from([(cookie, (512, len as u64))]);
                assert!(client.read_replies(&mut wanted).remove(&cookie).unwrap().unwrap() == data);
            }
        }
        assert_eq!(client.run(0, WRITE_ZEROES, 0, 1 << 20), 0);
        assert_eq!(client.run(0, TRIM, 1 << 20, 1 << 20), 0);
        assert_eq!(client.run(0, FLUSH, 0, 0), 0);
        assert!(client.read(0, 2 << 20).unwrap() == vec![0; 2 << 20]);
        client.disconnect();
    }
    fixture.assert_sound();
}

#[test]
fn replies_follow_completion_order() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let data = pattern(1, MIB as usize);
    device.fill(0, &data);
    device.set(Manner::Held);
    let mut client = fixture.enter(true);
    let mut bytes = Vec::new();
    for i in 0..32 {
        bytes.extend(request(0, READ, i, i * 4096, 4096));
    }
    client.send(&bytes);
    eventually(|| device.held().len() == 32);
    // The device received the requests in order of arrival.
    let offsets: Vec<_> = device.held().iter().map(|request| request.offset / 4096).collect();
    assert_eq!(offsets, (0..32).collect::<Vec<_>>());
    device.release_all_backwards();
    for i in (0..32).rev() {
        let at = i as usize * 4096;
        let wanted =
            Chunk::Data { cookie: i, done: true, offset: i * 4096, data: data[at..at + 4096].to_vec() };
        assert_eq!(client.chunk(), wanted);
    }
}

#[test]
fn writes_to_zones_start_in_order_of_arrival() {
    let device = MemDevice::zoned(16 * MIB);
    let fixture = Fixture::serving(&device);
    device.set(Manner::Held);
    let mut client = fixture.enter(true);
    // Small writes, writes that fill the receive buffer, and larger writes that the server gathers.
    let lengths = [512, 64 << 10, 1 << 20, 512, 300 << 10, 2 << 20, 4096, 255 << 10, 256 << 10, 512];
    let mut bytes = Vec::new();
    let (mut at, mut wanted) = (0, Vec::new());
    for (cookie, len) in lengths.into_iter().enumerate() {
        bytes.extend(request(0, WRITE, cookie as u64, at, len));
        bytes.extend(pattern(u64::from(len), len as usize));
        wanted.push((at, u64::from(len)));
        at += u64::from(len);
    }
    client.send(&bytes);
    eventually(|| device.held().len() == lengths.len());
    let started: Vec<_> = device.held().iter().map(|request| (request.offset, request.len)).collect();
    // The server submits each write to a zoned device as a whole.
    assert_eq!(started, wanted);
    device.release_all_backwards();
}

#[test]
fn restart_cuts_connections_and_holds_new_ones() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut idle = fixture.enter(true);
    let mut busy = fixture.enter(false);
    let other = MemDevice::new(MIB);
    fixture.publish("other", &other);
    let mut untouched = fixture.connect();
    untouched.greet(3);
    untouched.go("other");
    device.set(Manner::Held);
    busy.ask(0, READ, 0, 4096);
    eventually(|| device.held().len() == 1);

    let address = fixture.address.clone();
    let (ended, late) = fixture.server.cut_connections_during("disk", || {
        // The server neither waits for requests in flight nor replies to them.
        idle.assert_closed();
        busy.assert_closed();
        assert_eq!(device.held().len(), 1);
        let late = std::thread::spawn(move || {
            let mut late = crate::common::connect(&address);
            late.greet(3);
            // The empty name also selects "disk", the default export.
            late.go("");
            late
        });
        // Clients of other exports can connect while new clients of "disk" wait.
        let mut free = fixture.connect();
        free.greet(3);
        free.go("other");
        free.disconnect();
        std::thread::sleep(Duration::from_millis(200));
        assert!(!late.is_finished());
        device.drop_all();
        device.set(Manner::Inline);
        device.fill(0, &[7; 512]);
        late
    });
    assert_eq!(ended, 2);
    let mut late = late.join().unwrap();
    assert_eq!(late.read(0, 512), Ok(vec![7; 512]));
    assert_eq!(untouched.read(0, 512), Ok(vec![0; 512]));
    late.disconnect();
    untouched.disconnect();

    // No client is connected. A panic in the closure lets new clients connect again.
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        fixture.server.cut_connections_during("disk", || panic!("injected"))
    }));
    assert!(outcome.is_err());
    assert_eq!(fixture.server.cut_connections_during("disk", || 5), (0, 5));
    fixture.assert_sound();
}

#[test]
fn slow_request_does_not_delay_others() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    device.set(Manner::Held);
    let slow = client.ask(0, READ, 0, 4096);
    eventually(|| device.held().len() == 1);
    device.set(Manner::Inline);
    assert_eq!(client.read(4096, 4096), Ok(vec![0; 4096]));
    assert_eq!(client.write(0, 8192, &[1; 4096]), 0);
    assert_eq!(client.run(0, FLUSH, 0, 0), 0);
    device.release(0);
    let mut wanted = HashMap::from([(slow, (0, 4096))]);
    assert_eq!(client.read_replies(&mut wanted)[&slow], Ok(vec![0; 4096]));
}

#[test]
fn large_read_pieces_complete_in_any_order() {
    let device = MemDevice::new(4 * MIB);
    let fixture = Fixture::serving(&device);
    let data = pattern(2, 2 * MIB as usize);
    device.fill(512, &data);
    let mut client = fixture.enter(true);
    for fails in [false, true] {
        device.set(Manner::Held);
        let cookie = client.ask(0, READ, 512, 2 << 20);
        eventually(|| device.held().len() == 9);
        device.bad_byte.store(if fails { MIB } else { u64::MAX }, SeqCst);
        device.release(3);
        device.release_all_backwards();
        let mut wanted = HashMap::from([(cookie, (512, 2 << 20))]);
        let got = client.read_replies(&mut wanted).remove(&cookie).unwrap();
        assert!(got == if fails { Err(EIO) } else { Ok(data.clone()) });
    }
}

#[test]
fn large_write_gets_one_reply() {
    let device = MemDevice::new(4 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    let data = pattern(4, 2 * MIB as usize);
    for fails in [false, true] {
        device.set(Manner::Held);
        let cookie = client.cookie();
        client.send(&request(1, WRITE, cookie, 512, 2 << 20));
        client.send(&data);
        eventually(|| device.held().len() == 9);
        device.bad_byte.store(if fails { MIB } else { u64::MAX }, SeqCst);
        device.release_all_backwards();
        assert_eq!(client.plain_reply(cookie), if fails { EIO } else { 0 });
        if !fails {
            assert!(device.bytes(512, data.len()) == data);
        }
    }
    assert_eq!(client.run(0, FLUSH, 0, 0x200), 22);
}

#[test]
fn requests_in_flight_are_limited() {
    let device = MemDevice::new(64 * MIB);
    let fixture = Fixture::serving(&device);
    device.set(Manner::Held);
    // Both the number and the bytes of requests in flight are limited; write payloads count too.
    for (command, len, count, most) in [
        (READ, 4096_u32, 400_u64, MAX_IN_FLIGHT),
        (READ, 256 << 10, 300, MAX_IN_FLIGHT_BYTES / (256 << 10)),
        (WRITE, 128 << 10, 300, MAX_IN_FLIGHT),
        (WRITE, 256 << 10, 200, MAX_IN_FLIGHT_BYTES / (256 << 10)),
        (FLUSH, 0, 300, MAX_IN_FLIGHT),
    ] {
        let (mut reader, writer) = split(&fixture.address, command, len, count);
        eventually(|| device.held().len() == most);
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(device.held().len(), most, "command {command} of {len} bytes");
        device.set(Manner::Inline);
        device.release_all_backwards();
        for _ in 0..count {
            reader.chunk();
        }
        writer.join().unwrap();
        device.set(Manner::Held);
        drop(reader);
    }
    device.set(Manner::Inline);
    fixture.assert_sound();
}

#[test]
fn idle_connection_continues() {
    let device = MemDevice::new(4 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    for round in 0..2 {
        for len in [4096_usize, 128 << 10, 1 << 20] {
            let data = pattern(round + len as u64, len);
            assert_eq!(client.write(0, 512, &data), 0);
            assert!(client.read(512, len as u32).unwrap() == data, "round {round}, {len} bytes");
        }
        // The client pauses after half a header, longer than the idle time after which the server frees
        // buffers.
        let cookie = client.cookie();
        let bytes = request(0, FLUSH, cookie, 0, 0);
        client.send(&bytes[..9]);
        std::thread::sleep(Duration::from_millis(1300));
        client.send(&bytes[9..]);
        assert_eq!(client.plain_reply(cookie), 0);
        if round == 0 {
            std::thread::sleep(Duration::from_millis(1300));
        }
    }
    client.disconnect();
    fixture.assert_sound();
}

/// Connects a client to "disk". Returns the client and a second handle of its socket.
pub fn connect(address: &Address) -> (Client, UnixStream) {
    let Address::Unix(path) = address else { panic!("a Unix address") };
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(LONG)).unwrap();
    let mut client = Client::over(stream.try_clone().unwrap());
    client.greet(3);
    client.agree(Headers::Structured);
    client.go("disk");
    (client, stream)
}

/// Connects, and sends requests from a thread, as sending blocks when the server reaches its limits.
pub fn split(address: &Address, command: u16, len: u32, count: u64) -> (Client, JoinHandle<()>) {
    let (client, mut stream) = connect(address);
    let thread = std::thread::spawn(move || {
        let payload = vec![0; if command == WRITE { len as usize } else { 0 }];
        for i in 0..count {
            let mut bytes = request(0, command, i, 0, len);
            bytes.extend(&payload);
            std::io::Write::write_all(&mut stream, &bytes).unwrap();
        }
    });
    (client, thread)
}

#[test]
fn dropped_completions_get_error_replies() {
    let device = MemDevice::new(4 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(true);
    device.set(Manner::Held);
    for len in [4096, 1 << 20] {
        let cookie = client.ask(0, READ, 0, len);
        eventually(|| device.held().len() == (len as usize).div_ceil(256 << 10));
        device.drop_all();
        let mut wanted = HashMap::from([(cookie, (0, len))]);
        assert_eq!(client.read_replies(&mut wanted)[&cookie], Err(ESHUTDOWN));
    }
    let cookie = client.ask(0, FLUSH, 0, 0);
    eventually(|| device.held().len() == 1);
    device.drop_all();
    assert_eq!(client.plain_reply(cookie), ESHUTDOWN);
}

#[test]
fn flush_covers_completed_writes_of_all_connections() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let (mut first, mut second) = (fixture.enter(true), fixture.enter(true));
    for i in 0..20 {
        device.set(if i % 2 == 0 { Manner::Thread } else { Manner::Inline });
        device.log.lock().clear();
        assert_eq!(first.write(0, i * 4096, &[1; 4096]), 0);
        // A flush on another connection covers the write, because the server reports CAN_MULTI_CONN.
        assert_eq!(second.run(0, FLUSH, 0, 0), 0);
        let ops: Vec<_> = device.log.lock().iter().map(|request| request.op).collect();
        assert_eq!(ops, [Op::Write, Op::Flush]);
    }
    // The server replies to a flush only after the device has completed the flush.
    device.set(Manner::Held);
    let cookie = second.ask(0, FLUSH, 0, 0);
    eventually(|| device.held().len() == 1);
    device.set(Manner::Inline);
    assert!(second.read(0, 512).is_ok());
    device.release(0);
    assert_eq!(second.plain_reply(cookie), 0);
}

#[test]
fn writes_of_client_that_leaves_complete() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    device.set(Manner::Held);
    let mut client = fixture.enter(true);
    for offset in [0, 4096] {
        let mut bytes = request(0, WRITE, 1, offset, 4096);
        bytes.extend([5; 4096]);
        client.send(&bytes);
    }
    eventually(|| device.held().len() == 2);
    drop(client);
    // The connection stays open until the device returns the connection's buffers.
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(fixture.server.stats().connections, 1);
    device.release_all_backwards();
    fixture.assert_no_connections();
    assert_eq!(device.bytes(0, 8192), [5; 8192]);
    device.set(Manner::Inline);
    fixture.assert_sound();
}

#[test]
fn shutdown_completes_requests_in_flight() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let Address::Unix(path) = fixture.address.clone() else { panic!("a Unix address") };
    device.set(Manner::Held);
    let mut clients: Vec<_> = (0..3).map(|_| fixture.enter(true)).collect();
    let idle = fixture.enter(true);
    for client in &mut clients {
        client.send(&request(0, FLUSH, 7, 0, 0));
    }
    eventually(|| device.held().len() == 3);
    std::thread::scope(|scope| {
        let done = scope.spawn(|| fixture.server.shutdown(LONG));
        eventually(|| !path.exists() && fixture.server.stats().connections == 3);
        assert!(!done.is_finished());
        device.release_all_backwards();
    });
    for mut client in clients {
        assert_eq!(client.chunk(), Chunk::Simple { cookie: 7, error: 0 });
        client.assert_closed();
    }
    drop(idle);
    assert_eq!(fixture.server.stats().connections, 0);
    // A second shutdown does nothing, and the server cannot listen again.
    fixture.server.shutdown(LONG);
    assert!(fixture.server.listen(&fixture.address).is_err());
    assert!(fixture.server.addresses().is_empty());
}

#[test]
fn shutdown_replies_to_received_requests() {
    let device = MemDevice::new(MIB);
    for tcp in [false, true] {
        for _ in 0..10 {
            let fixture = Fixture::new();
            let mut address = fixture.address.clone();
            if tcp {
                let any = Address::Tcp { host: "127.0.0.1".to_owned(), port: 0 };
                address = fixture.server.listen(&any).unwrap();
            }
            let device: Arc<MemDevice> = device.clone();
            fixture.server.publish(&address, "disk", device, ExportOptions::default()).unwrap();
            let mut client = crate::common::connect(&address);
            client.greet(3);
            client.go("disk");
            let mut bytes = Vec::new();
            for i in 0..200 {
                bytes.extend(request(0, FLUSH, i, 0, 0));
            }
            // The last request is incomplete, so the server sends no reply to it.
            bytes.extend(&request(0, FLUSH, 999, 0, 0)[..20]);
            client.send(&bytes);
            fixture.server.shutdown(LONG);
            for i in 0..200 {
                assert_eq!(client.chunk(), Chunk::Simple { cookie: i, error: 0 });
            }
            client.assert_closed();
        }
    }
}

#[test]
fn client_that_does_not_read_delays_only_itself() {
    let device = MemDevice::new(64 * MIB);
    let fixture = Fixture::serving(&device);
    let mut deaf = fixture.enter(true);
    let mut bytes = Vec::new();
    for i in 0..4 {
        bytes.extend(request(0, READ, i, 0, 32 << 20));
    }
    deaf.send(&bytes);
    let mut other = fixture.enter(true);
    for _ in 0..100 {
        assert_eq!(other.read(0, 4096), Ok(vec![0; 4096]));
    }
    other.disconnect();
    let start = Instant::now();
    fixture.server.shutdown(Duration::from_millis(50));
    assert!(start.elapsed() < LONG);
    assert_eq!(fixture.server.stats().connections, 0);
}

#[test]
fn shutdown_with_hung_device_times_out() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    device.set(Manner::Held);
    let mut client = fixture.enter(true);
    client.ask(0, READ, 0, 4096);
    eventually(|| device.held().len() == 1);
    fixture.server.shutdown(Duration::from_millis(50));
    assert_eq!(fixture.server.stats().connections, 0);
    client.assert_closed();
    // A completion after the end of the connection is harmless.
    device.release(0);
}

#[test]
fn unpublish_in_use_needs_force() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    fixture.publish("other", &device);
    let mut other = fixture.connect();
    other.greet(3);
    other.go("other");
    device.set(Manner::Held);
    let mut client = fixture.enter(true);
    let cookie = client.ask(0, FLUSH, 0, 0);
    eventually(|| device.held().len() == 1);
    let busy = PublishError::Busy { name: "disk".to_owned(), connections: 1 };
    assert_eq!(fixture.server.unpublish("disk", false), Err(busy));
    std::thread::scope(|scope| {
        let done = scope.spawn(|| fixture.server.unpublish("disk", true));
        eventually(|| fixture.server.exports().len() == 1);
        device.release(0);
        assert_eq!(done.join().unwrap(), Ok(1));
    });
    assert_eq!(fixture.server.connections("disk"), 0);
    assert_eq!(client.plain_reply(cookie), 0);
    client.assert_closed();
    device.set(Manner::Inline);
    assert_eq!(other.run(0, FLUSH, 0, 0), 0);
    let unknown = PublishError::NotPublished("disk".to_owned());
    assert_eq!(fixture.server.unpublish("disk", true), Err(unknown));
    // The server releases the device when the last connection to it ends.
    assert_eq!(fixture.server.unpublish("other", true), Ok(1));
    eventually(|| Arc::strong_count(&device) == 1);
}
