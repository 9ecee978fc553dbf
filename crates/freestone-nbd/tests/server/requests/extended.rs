//! Tests of extended headers: negotiation, payloads, 64-bit lengths, and contexts by identifier.

use std::sync::Arc;
use std::sync::atomic::Ordering::SeqCst;

use crate::common::device::PAGE;
use crate::common::prelude::*;
use freestone_nbd::{MAX_DESCRIPTORS, MAX_PAYLOAD_BYTES};

const MIB: u64 = 1 << 20;

/// Returns a client in the transmission phase of "disk" that has selected these contexts.
fn enter(fixture: &Fixture, contexts: &[&str]) -> Client {
    let mut client = fixture.connect();
    client.greet(3);
    client.agree(Headers::Extended);
    if !contexts.is_empty() {
        assert_eq!(client.set_contexts("disk", contexts).len(), contexts.len());
    }
    client.go("disk");
    client
}

fn fork(size: u64) -> Arc<MemDevice> {
    let device = MemDevice::new(size);
    device.forked.store(true, SeqCst);
    device
}

#[test]
fn extended_headers_negotiated_with_or_without_structured() {
    let fixture = Fixture::serving(&MemDevice::new(MIB));
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.outcome(EXTENDED_HEADERS, b"x"), ERR_INVALID);
    assert_eq!(client.outcome(STRUCTURED_REPLY, &[]), ACK);
    assert_eq!(client.outcome(EXTENDED_HEADERS, &[]), ACK);
    assert_eq!(client.outcome(STRUCTURED_REPLY, &[]), ERR_EXT_HEADER_REQD);
    assert_eq!(client.outcome(EXTENDED_HEADERS, &[]), ACK);
    // The transmission flags depend on the selected contexts, also in the reply to INFO.
    let flags = |client: &mut Client, name: &str| {
        let replies = client.option(OPT_INFO, &info_data(name, &[]));
        assert!(replies.iter().any(|reply| reply.kind == INFO));
        export_info(&replies).unwrap().1 & (SEND_DF | BLOCK_STATUS_PAYLOAD)
    };
    assert_eq!(flags(&mut client, "disk"), SEND_DF);
    client.set_context("disk");
    assert_eq!(flags(&mut client, "disk"), SEND_DF | BLOCK_STATUS_PAYLOAD);
    assert_eq!(flags(&mut client, ""), SEND_DF);
    client.set_contexts("disk", &[]);
    assert_eq!(flags(&mut client, "disk"), SEND_DF);
    client.set_context("disk");
    assert_eq!(client.go("disk").1 & BLOCK_STATUS_PAYLOAD, BLOCK_STATUS_PAYLOAD);
    client.headers = Headers::Extended;
    assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    client.disconnect();
    // Without extended headers, the server does not offer the flag for block status payloads.
    let mut compact = fixture.connect();
    compact.greet(3);
    compact.agree(Headers::Structured);
    compact.set_context("disk");
    assert_eq!(compact.go("disk").1 & BLOCK_STATUS_PAYLOAD, 0);
    compact.disconnect();
    // OPT_EXPORT_NAME is refused after extended headers, and has no error reply, so the connection ends.
    let mut client = fixture.connect();
    client.greet(3);
    client.agree(Headers::Extended);
    client.send(&option(EXPORT_NAME, b"disk"));
    client.assert_closed();
    fixture.assert_sound();
}

#[test]
fn request_with_wrong_header_layout_ends_connection() {
    let fixture = Fixture::serving(&MemDevice::new(MIB));
    for headers in Headers::ALL {
        let mut client = fixture.enter(headers);
        if headers == Headers::Extended {
            client.send(&[request(0, READ, 1, 0, 512), vec![0; 4]].concat());
        } else {
            client.send(&long_request(0, READ, 1, 0, 512));
        }
        client.assert_closed();
    }
    fixture.assert_sound();
}

#[test]
fn extended_replies_are_always_chunks() {
    let device = MemDevice::new(8 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(Headers::Extended);
    let data = pattern(5, 700 << 10);
    assert_eq!(client.write(0, 4096, &data), 0);
    assert!(client.read(4096, 700 << 10).unwrap() == data);
    for (command, len) in [(FLUSH, 0), (TRIM, 4096), (CACHE, 4096), (WRITE_ZEROES, 4096)] {
        let cookie = client.ask(0, command, 0, len);
        assert_eq!(client.chunk(), Chunk::None { cookie });
    }
    let cookie = client.ask(DF, READ, 4096, 4096);
    let data = data[..4096].to_vec();
    assert_eq!(client.chunk(), Chunk::Data { cookie, done: true, offset: 4096, data });
    let cookie = client.ask(0, READ, 8 * MIB, 512);
    let Chunk::Error { error, cookie: of, .. } = client.chunk() else { panic!("no error") };
    assert_eq!((error, of), (EINVAL, cookie));
    client.disconnect();
    fixture.assert_sound();
}

#[test]
fn length_beyond_device_64_bit_is_refused() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(Headers::Extended);
    for len in [MIB + 512, 1 << 32, (1 << 32) + 512, 1 << 63, u64::MAX - 511, u64::MAX] {
        for offset in [0, 512, u64::MAX - 511] {
            assert_eq!(client.run(0, READ, offset, len), EINVAL);
            assert_eq!(client.run(0, TRIM, offset, len), EINVAL);
            assert_eq!(client.run(0, CACHE, offset, len), EINVAL);
            assert_eq!(client.run(0, WRITE_ZEROES, offset, len), ENOSPC);
            assert_eq!(client.run(0, FLUSH, offset, len), EINVAL);
            assert_eq!(client.statuses(0, offset, len), Err(EINVAL));
            assert_eq!(client.status_of(offset, len, &[1]), Err(EINVAL));
        }
    }
    for command in [READ, TRIM, CACHE, WRITE_ZEROES] {
        assert_eq!(client.run(0, command, 0, 0), EINVAL);
    }
    assert_eq!(client.statuses(0, 0, 0), Err(EINVAL));
    assert_eq!(client.status_of(0, 0, &[1]), Err(EINVAL));
    assert!(device.log.lock().is_empty(), "a refused request reached the device");
    client.disconnect();
    fixture.assert_sound();
}

#[test]
fn extended_read_is_limited_to_max_payload() {
    let device = MemDevice::new(128 * MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(Headers::Extended);
    assert_eq!(client.run(0, READ, 0, u64::from(MAX_PAYLOAD_BYTES) + 512), EOVERFLOW);
    assert_eq!(client.run(DF, READ, 0, (32 << 20) + 512), EOVERFLOW);
    device.fill(0, &pattern(3, 64 << 20));
    assert!(client.read(0, MAX_PAYLOAD_BYTES).unwrap() == pattern(3, 64 << 20));
}

/// The server receives the payloads of writes, and skips the payloads of commands that use none.
#[test]
fn payload_follows_announced_length() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut client = fixture.enter(Headers::Extended);
    // With the payload flag, a payload of this length follows the header of any command.
    for command in [READ, FLUSH, TRIM, CACHE, WRITE_ZEROES, 8, 77, u16::MAX] {
        for len in [0, 1, 4096, 700 << 10] {
            let cookie = client.cookie();
            let mut bytes = client.header(PAYLOAD_LEN, command, cookie, 0, len);
            bytes.resize(bytes.len() + len as usize, 0x21);
            client.send(&bytes);
            assert_eq!(client.plain_reply(cookie), EINVAL, "command {command}, {len} bytes");
        }
    }
    // The payload of a refused write is discarded.
    assert_eq!(client.write(0, MIB - 512, &[1; 4096]), ENOSPC);
    assert_eq!(client.write(0, 0, &[]), EINVAL);
    assert_eq!(client.write(DF, 0, &[1; 4096]), EINVAL);
    assert!(device.log.lock().is_empty(), "a refused request reached the device");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    assert_eq!(client.read(0, 4096), Ok(vec![1; 4096]));
    // A write without the payload flag, which QEMU's client omits, still has a payload.
    for (len, outcome) in [(4096, 0), (700 << 10, 0), (2 << 20, ENOSPC)] {
        let cookie = client.cookie();
        let mut bytes = client.header(0, WRITE, cookie, 0, len);
        bytes.resize(bytes.len() + len as usize, 0x21);
        client.send(&bytes);
        assert_eq!(client.plain_reply(cookie), outcome);
    }
    assert_eq!(client.read(0, 4096), Ok(vec![0x21; 4096]));
    client.disconnect();
    // If the payload is too large, the server closes the connection without waiting for the payload.
    let more = u64::from(MAX_PAYLOAD_BYTES) + 1;
    for (flags, command, len) in [
        (PAYLOAD_LEN, WRITE, more),
        (0, WRITE, u64::MAX),
        (PAYLOAD_LEN, BLOCK_STATUS, 1 << 40),
        (PAYLOAD_LEN, READ, more),
    ] {
        let mut client = fixture.enter(Headers::Extended);
        client.ask(flags, command, 0, len);
        client.assert_closed();
    }
    fixture.assert_sound();
}

#[test]
fn block_status_payload_selects_contexts() {
    let device = fork(MIB);
    device.fill(4096, &[1; 4096]);
    let fixture = Fixture::serving(&device);
    let both = ["base:allocation", "freestone:changed"];
    let mut client = enter(&fixture, &both);
    let holes = (1, vec![(PAGE, 3), (PAGE, 0), (MIB - 2 * PAGE, 3)]);
    let own = (2, vec![(PAGE, 0), (PAGE, 1), (MIB - 2 * PAGE, 0)]);
    assert_eq!(client.statuses(0, 0, MIB), Ok(vec![holes.clone(), own.clone()]));
    assert_eq!(client.status_of(0, MIB, &[1]), Ok(vec![holes.clone()]));
    assert_eq!(client.status_of(0, MIB, &[2]), Ok(vec![own.clone()]));
    for ids in [[1, 2], [2, 1]] {
        assert_eq!(client.status_of(0, MIB, &ids), Ok(vec![holes.clone(), own.clone()]));
    }
    let one = [&PAGE.to_be_bytes()[..], &[0, 0, 0, 2]].concat();
    assert_eq!(client.status_with(REQ_ONE, 4096, &one), Ok(vec![(2, vec![(PAGE, 1)])]));
    // Unknown identifiers, duplicate identifiers, and a payload without identifiers are refused.
    for ids in [&[0][..], &[3], &[1, 3], &[1, 1], &[2, 1, 2], &[1; 100], &[u32::MAX], &[]] {
        assert_eq!(client.status_of(0, MIB, ids), Err(EINVAL), "{ids:?}");
    }
    // Payloads of an invalid length are refused.
    let good = [&MIB.to_be_bytes()[..], &[0, 0, 0, 1, 0, 0, 0, 2]].concat();
    for len in [0, 1, 7, 8, 9, 11, 13, 15] {
        assert_eq!(client.status_with(0, 0, &good[..len]), Err(EINVAL), "{len} bytes");
    }
    for len in [17, 20, 4096, 1 << 20] {
        let mut long = good.clone();
        long.resize(len, 0);
        assert_eq!(client.status_with(0, 0, &long), Err(EINVAL), "{len} bytes");
    }
    assert_eq!(client.status_with(DF, 0, &good), Err(EINVAL));
    // Sends the request one byte at a time.
    let cookie = client.cookie();
    let bytes = client.header(PAYLOAD_LEN, BLOCK_STATUS, cookie, 0, 12);
    for byte in [bytes, MIB.to_be_bytes().to_vec(), vec![0, 0, 0, 2]].concat() {
        client.send(&[byte]);
    }
    let (context, extents) = own;
    assert_eq!(client.chunk(), Chunk::Status { cookie, done: true, context, extents });
    client.disconnect();
    // A payload can name only contexts that the client selected.
    let mut one = enter(&fixture, &both[1..]);
    assert_eq!(one.status_of(0, MIB, &[1]), Err(EINVAL));
    assert_eq!(one.status_of(0, MIB, &[2]).unwrap().len(), 1);
    one.disconnect();
    let mut none = enter(&fixture, &[]);
    assert_eq!(none.status_of(0, MIB, &[1]), Err(EINVAL));
    assert_eq!(none.statuses(0, 0, MIB), Err(EINVAL));
    none.disconnect();
    fixture.assert_sound();
}

#[test]
fn extended_descriptors_are_limited() {
    let pages = 2 * MAX_DESCRIPTORS as u64 + 2;
    let device = fork(pages * PAGE);
    for page in (0..pages).step_by(2) {
        device.fill(page * PAGE, &[1; 4096]);
    }
    let fixture = Fixture::serving(&device);
    let mut client = enter(&fixture, &["base:allocation", "freestone:changed"]);
    // The client requests many replies at once, so that they reach the end of the reply buffer.
    let cookies: Vec<_> = (0..20).map(|_| client.ask(0, BLOCK_STATUS, 0, pages * PAGE)).collect();
    for wanted in cookies {
        for (id, flags) in [(1, [0, 3]), (2, [1, 0])] {
            let chunk = client.chunk();
            let Chunk::Status { cookie, context, extents, done } = chunk else { panic!("{chunk:?}") };
            assert_eq!((cookie, context, done), (wanted, id, id == 2));
            assert_eq!(extents.len(), MAX_DESCRIPTORS);
            assert!(extents.chunks(2).all(|pair| pair == [(PAGE, flags[0]), (PAGE, flags[1])]));
        }
    }
    client.disconnect();
}

#[test]
fn extended_requests_pipelined_or_cut_are_handled() {
    let device = MemDevice::new(MIB);
    let fixture = Fixture::serving(&device);
    let mut session = Vec::new();
    for i in 0..64_u64 {
        session.extend(long_request(PAYLOAD_LEN, WRITE, 2 * i, i * 4096, 4096));
        session.extend(pattern(i, 4096));
        session.extend(long_request(0, READ, 2 * i + 1, i * 4096, 4096));
    }
    let mut client = fixture.enter(Headers::Extended);
    client.send(&session);
    for i in 0..64_u64 {
        assert_eq!(client.chunk(), Chunk::None { cookie: 2 * i });
        let data = pattern(i, 4096);
        assert_eq!(client.chunk(), Chunk::Data { cookie: 2 * i + 1, done: true, offset: i * 4096, data });
    }
    for at in (0..200).chain(4090..4200) {
        let mut client = fixture.enter(Headers::Extended);
        client.send(&session[..at]);
    }
    client.disconnect();
    fixture.assert_sound();
}
