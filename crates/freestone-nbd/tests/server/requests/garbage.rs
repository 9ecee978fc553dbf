//! Tests of clients that disconnect at any byte of a session, or send invalid data.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use crate::common::prelude::*;
use freestone_nbd::Address;
use proptest::prelude::*;

const SIZE: u64 = 1 << 20;

/// Returns the bytes that a client sends in a session with most options and all commands.
fn session() -> Vec<u8> {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    bytes.extend(option(99, b"what"));
    bytes.extend(option(STRUCTURED_REPLY, &[]));
    bytes.extend(option(LIST, &[]));
    bytes.extend(option(LIST_META_CONTEXT, &context_data("disk", &["base:"])));
    bytes.extend(option(SET_META_CONTEXT, &context_data("disk", &["base:allocation"])));
    bytes.extend(option(OPT_INFO, &info_data("disk", &[1, 2, 3])));
    bytes.extend(option(GO, &info_data("disk", &[3])));
    bytes.extend(request(0, READ, 1, 0, 4096));
    bytes.extend(request(DF, READ, 2, 0, 1024));
    bytes.extend(request(FUA, WRITE, 3, 0, 512));
    bytes.extend([7; 512]);
    bytes.extend(request(0, TRIM, 4, 0, 4096));
    bytes.extend(request(0, WRITE_ZEROES, 5, 0, 4096));
    bytes.extend(request(0, FLUSH, 6, 0, 0));
    bytes.extend(request(0, CACHE, 7, 0, 4096));
    bytes.extend(request(0, BLOCK_STATUS, 8, 0, 1 << 20));
    bytes.extend(request(0, 77, 9, 0, 0));
    bytes.extend(request(0, READ, 10, 4096, 4096));
    bytes.extend(request(0, DISC, 11, 0, 0));
    bytes
}

fn raw(fixture: &Fixture) -> UnixStream {
    let Address::Unix(path) = &fixture.address else { panic!("a Unix address") };
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream
}

/// Sends bytes and disconnects in one of three ways. Ignores errors, as the server may close the connection
/// first.
fn talk(fixture: &Fixture, bytes: &[u8], manner: usize) {
    let mut stream = raw(fixture);
    let _ = stream.write_all(bytes);
    match manner % 3 {
        // Closes without reading replies.
        0 => drop(stream),
        // Half-closes and reads to the end.
        1 => {
            let _ = stream.shutdown(Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
        // Closes the receiving side first.
        _ => {
            let _ = stream.shutdown(Shutdown::Read);
            drop(stream);
        }
    }
}

#[test]
fn disconnect_after_each_byte_leaves_server_sound() {
    let bytes = session();
    for manner in [Manner::Inline, Manner::Thread] {
        let device = MemDevice::new(SIZE);
        let fixture = Fixture::serving(&device);
        device.set(manner);
        for end in 0..=bytes.len() {
            talk(&fixture, &bytes[..end], end);
        }
        fixture.assert_sound();
        let stats = fixture.server.stats();
        assert_eq!((stats.panics, stats.refused), (0, 0));
        assert_eq!(stats.accepted, bytes.len() as u64 + 2);
    }
}

#[test]
fn session_sent_byte_by_byte_gets_same_replies() {
    let fixture = Fixture::serving(&MemDevice::new(SIZE));
    let bytes = session();
    let mut whole = Vec::new();
    let mut stream = raw(&fixture);
    stream.write_all(&bytes).unwrap();
    stream.read_to_end(&mut whole).unwrap();
    let mut drops = Vec::new();
    let mut stream = raw(&fixture);
    for byte in &bytes {
        stream.write_all(&[*byte]).unwrap();
    }
    stream.read_to_end(&mut drops).unwrap();
    assert!(whole == drops);
    fixture.assert_sound();
}

/// Creates a server. Each generated case uses its own server, so that a failure identifies the case.
fn fixture() -> (Fixture, Arc<MemDevice>) {
    let device = MemDevice::new(SIZE);
    (Fixture::serving(&device), device)
}

/// Checks that the server counted no panic, has no connection left, and serves a new client.
fn check(fixture: &Fixture) -> Result<(), TestCaseError> {
    fixture.assert_sound();
    prop_assert_eq!(fixture.server.stats().panics, 0);
    Ok(())
}

fn handshake(structured: bool) -> Vec<u8> {
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    if structured {
        bytes.extend(option(STRUCTURED_REPLY, &[]));
        bytes.extend(option(SET_META_CONTEXT, &context_data("disk", &["base:allocation"])));
    }
    bytes.extend(option(GO, &info_data("disk", &[])));
    bytes
}

/// Generates a request with valid, random and boundary values of flags, command, offset and length.
fn any_request() -> impl Strategy<Value = Vec<u8>> {
    let flags = prop_oneof![4 => Just(0_u16), 2 => 0_u16..32, 1 => any::<u16>()];
    let offset = prop_oneof![
        (0..SIZE / 512).prop_map(|block| block * 512),
        SIZE - 1024..SIZE + 1024,
        Just(u64::MAX),
        any::<u64>()
    ];
    let len = prop_oneof![
        Just(0),
        (0_u32..64).prop_map(|blocks| blocks * 512),
        0_u32..600_000,
        (1_u32 << 25) - 512..(1 << 25) + 512,
        Just(u32::MAX),
        any::<u32>()
    ];
    (flags, 0_u16..10, any::<u64>(), offset, len).prop_map(|(flags, command, cookie, offset, len)| {
        let mut bytes = request(flags, command, cookie, offset, len);
        if command == WRITE {
            bytes.resize(bytes.len() + (len as usize).min(600_000), 0x5a);
        }
        bytes
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: if std::env::var_os("PROPTEST_CASES").is_some() { ProptestConfig::default().cases } else { 96 }, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_handshake_bytes_leave_server_sound(
        bytes in proptest::collection::vec(any::<u8>(), 0..300),
        with_flags in any::<bool>(),
        manner in 0_usize..3,
    ) {
        let (fixture, _) = fixture();
        let mut all = if with_flags { 3_u32.to_be_bytes().to_vec() } else { Vec::new() };
        all.extend(bytes);
        talk(&fixture, &all, manner);
        check(&fixture)?;
    }

    #[test]
    fn random_options_leave_server_sound(
        options in proptest::collection::vec(
            (0_u32..13, proptest::collection::vec(prop_oneof![Just(0_u8), any::<u8>()], 0..60)), 0..20),
        manner in 0_usize..3,
    ) {
        let (fixture, _) = fixture();
        let mut all = 3_u32.to_be_bytes().to_vec();
        for (kind, data) in options {
            all.extend(option(kind, &data));
        }
        talk(&fixture, &all, manner);
        check(&fixture)?;
    }

    #[test]
    fn random_requests_leave_server_sound(
        requests in proptest::collection::vec(any_request(), 0..12),
        tail in proptest::collection::vec(any::<u8>(), 0..40),
        structured in any::<bool>(),
        thread in any::<bool>(),
        parts in any::<bool>(),
        manner in 0_usize..3,
    ) {
        let (fixture, device) = fixture();
        device.set(match parts {
            _ if thread => Manner::Thread,
            true => Manner::Partly(1536),
            false => Manner::Inline,
        });
        let mut all = handshake(structured);
        for request in requests {
            all.extend(request);
        }
        all.extend(tail);
        // Reads replies while a thread writes requests, as the replies may exceed the socket's buffer.
        let stream = raw(&fixture);
        let mut reader = stream.try_clone().unwrap();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut writer = &stream;
                let _ = writer.write_all(&all);
                let _ = stream.shutdown(if manner == 0 { Shutdown::Both } else { Shutdown::Write });
            });
            let _ = reader.read_to_end(&mut Vec::new());
        });
        check(&fixture)?;
    }
}
