//! Tests of handshake options, one by one.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::prelude::*;
use freestone_nbd::{Address, ExportOptions, Limits, MAX_OPTION_BYTES, MAX_SKIPPED_OPTION_BYTES};

const MIB: u64 = 1 << 20;
/// Transmission flags of a default device: `HAS_FLAGS`, flush, FUA, trim, write zeroes, multi-conn, cache and
/// fast zero.
const USUAL_FLAGS: u16 = 1 | 4 | 8 | 32 | 64 | 256 | 1024 | 2048;

fn fixture() -> Fixture {
    Fixture::serving(&MemDevice::new(MIB))
}

#[test]
fn go_returns_size_flags_and_block_sizes() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.greet(3);
    let replies = client.option(GO, &info_data("disk", &[1, 2, 3, 99]));
    assert_eq!(export_info(&replies).unwrap(), (MIB, USUAL_FLAGS));
    let has = |data: &[u8]| replies.iter().any(|reply| reply.kind == INFO && reply.data == data);
    assert!(has(b"\x00\x01disk"));
    assert!(has(b"\x00\x02this is disk"));
    assert!(has(b"\x00\x03\x00\x00\x00\x01\x00\x00\x10\x00\x04\x00\x00\x00"));
    assert_eq!(replies.last().unwrap().kind, ACK);
    assert_eq!(client.read(0, 512), Ok(vec![0; 512]));
    assert_eq!(fixture.server.connections("disk"), 1);
    assert_eq!(fixture.server.exports()[0].connections, 1);
    client.disconnect();
    fixture.assert_sound();
}

/// The server replies to the options before a protocol violation, even if options and violation arrive
/// together.
#[test]
fn options_before_violation_get_replies() {
    let long_name = option(EXPORT_NAME, &[b'x'; 5000]);
    for violation in [b"GET / HTTP/1.1\r\n\r\n", &option(EXPORT_NAME, b"nothing")[..], &long_name] {
        let fixture = fixture();
        let mut client = fixture.connect();
        client.greet(3);
        client.send(&[&option(LIST, &[]), violation].concat());
        let kinds: Vec<_> = client.option_replies(LIST).iter().map(|reply| reply.kind).collect();
        assert_eq!(kinds, [SERVER, ACK]);
        client.assert_closed();
        fixture.assert_sound();
    }
}

#[test]
fn transmission_flags_follow_device_and_options() {
    let fixture = fixture();
    let plain = MemDevice::with(MIB, |geometry| geometry.discard_granularity = 0);
    fixture.publish("no-trim", &plain);
    let read_only = MemDevice::with(MIB, |geometry| geometry.read_only = true);
    fixture.publish("ro-device", &read_only);
    let options = ExportOptions { read_only: true, ..ExportOptions::default() };
    fixture.server.publish(&fixture.address, "ro-option", plain, options).unwrap();
    let flags = |name: &str, structured: bool| {
        let mut client = fixture.connect();
        client.greet(3);
        if structured {
            client.agree(Headers::Structured);
        }
        client.go(name).1
    };
    assert_eq!(flags("no-trim", false), USUAL_FLAGS & !32);
    assert_eq!(flags("disk", true), USUAL_FLAGS | 128);
    let read_only = 1 | 2 | 4 | 8 | 256 | 1024;
    assert_eq!(flags("ro-device", false), read_only);
    assert_eq!(flags("ro-option", false), read_only);
    fixture.publish("turns", &MemDevice::with(MIB, |geometry| geometry.rotational = true));
    assert_eq!(flags("turns", false), USUAL_FLAGS | 16);
    let options = ExportOptions { without_fua: true, ..ExportOptions::default() };
    fixture.server.publish(&fixture.address, "flushed", MemDevice::new(MIB), options).unwrap();
    assert_eq!(flags("flushed", false), USUAL_FLAGS & !8);
}

#[test]
fn fua_not_offered_is_refused() {
    const FUA: u16 = 1;
    let fixture = Fixture::new();
    let options = ExportOptions { without_fua: true, ..ExportOptions::default() };
    fixture.server.publish(&fixture.address, "flushed", MemDevice::new(MIB), options).unwrap();
    let mut client = fixture.connect();
    client.greet(3);
    client.go("flushed");
    assert_eq!(client.write(FUA, 0, &[1; 512]), 22);
    assert_eq!(client.write(0, 0, &[1; 512]), 0);
    client.disconnect();
}

#[test]
fn info_block_sizes_follow_device() {
    let fixture = fixture();
    let device = MemDevice::with(MIB, |geometry| {
        geometry.logical_block = 4096;
        geometry.physical_block = 16384;
        geometry.io_min = 65536;
    });
    fixture.publish("big", &device);
    let mut client = fixture.connect();
    client.greet(3);
    let replies = client.option(OPT_INFO, &info_data("big", &[3]));
    let sizes = replies.iter().find(|reply| reply.data.starts_with(&[0, 3])).unwrap();
    assert_eq!(sizes.data, b"\x00\x03\x00\x00\x00\x01\x00\x01\x00\x00\x04\x00\x00\x00");

    // Writes to zoned devices consist of whole blocks (minimum 512 bytes) and are not split (maximum 32 MiB).
    fixture.publish("zones", &MemDevice::zoned(64 * MIB));
    let replies = client.option(OPT_INFO, &info_data("zones", &[3]));
    let sizes = replies.iter().find(|reply| reply.data.starts_with(&[0, 3])).unwrap();
    assert_eq!(sizes.data, b"\x00\x03\x00\x00\x02\x00\x00\x00\x10\x00\x02\x00\x00\x00");

    // The maximum request size of a device need not be a power of two. The preferred block size must be a
    // power of two, and at most the maximum.
    let device = MemDevice::with(MIB, |geometry| {
        geometry.io_min = 1 << 20;
        geometry.max_request = 96 << 10;
    });
    fixture.publish("small", &device);
    let replies = client.option(OPT_INFO, &info_data("small", &[3]));
    let sizes = replies.iter().find(|reply| reply.data.starts_with(&[0, 3])).unwrap();
    assert_eq!(sizes.data, b"\x00\x03\x00\x00\x00\x01\x00\x01\x00\x00\x00\x01\x80\x00");
}

#[test]
fn info_does_not_choose_export() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.greet(3);
    let first = client.option(OPT_INFO, &info_data("disk", &[3]));
    assert_eq!(fixture.server.connections("disk"), 0);
    assert_eq!(client.outcome(OPT_INFO, &info_data("nothing", &[])), ERR_UNKNOWN);
    assert_eq!(client.outcome(GO, &info_data("nothing", &[])), ERR_UNKNOWN);
    let again = client.option(GO, &info_data("disk", &[3]));
    assert_eq!(first, again);
}

#[test]
fn empty_name_selects_default_export() {
    let fixture = Fixture::new();
    fixture.publish("other", &MemDevice::new(2 * MIB));
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.outcome(GO, &info_data("", &[])), ERR_UNKNOWN);
    fixture.publish("disk", &MemDevice::new(MIB));
    let replies = client.option(GO, &info_data("", &[1]));
    assert_eq!(export_info(&replies).unwrap().0, MIB);
    assert!(replies.iter().any(|reply| reply.data == b"\x00\x01disk"));
}

#[test]
fn export_name_reply_padding_follows_client_flags() {
    let fixture = fixture();
    for (flags, padding) in [(1, 124), (3, 0), (0, 124)] {
        let mut client = fixture.connect();
        client.greet(flags);
        client.send(&option(EXPORT_NAME, b"disk"));
        let reply = client.bytes(10 + padding);
        assert_eq!(reply[..8], MIB.to_be_bytes());
        assert_eq!(reply[8..10], USUAL_FLAGS.to_be_bytes());
        assert!(reply[10..].iter().all(|byte| *byte == 0));
        assert_eq!(client.read(512, 512), Ok(vec![0; 512]));
        client.disconnect();
    }
    for name in [&b"nothing"[..], &[0xff, 0xfe], &[b'x'; 4097]] {
        let mut client = fixture.connect();
        client.greet(3);
        client.send(&option(EXPORT_NAME, name));
        client.assert_closed();
    }
    fixture.assert_sound();
}

#[test]
fn client_sees_only_exports_of_its_address() {
    let fixture = fixture();
    let second = fixture.server.listen(&Address::Unix(fixture.directory.path().join("2.sock"))).unwrap();
    let other = MemDevice::new(MIB);
    fixture.server.publish(&second, "theirs", other.clone(), ExportOptions::default()).unwrap();
    fixture.server.publish(&second, "disk", other, ExportOptions::default()).unwrap();
    let list = |address: &Address| -> Vec<Vec<u8>> {
        let mut client = connect(address);
        client.greet(3);
        let replies = client.option(LIST, &[]);
        let (ack, servers) = replies.split_last().unwrap();
        assert_eq!(ack.kind, ACK);
        assert!(servers.iter().all(|reply| reply.kind == SERVER));
        servers.iter().map(|reply| reply.data.clone()).collect()
    };
    assert_eq!(list(&fixture.address), [b"\x00\x00\x00\x04diskthis is disk"]);
    assert_eq!(list(&second), [&b"\x00\x00\x00\x06theirs"[..], b"\x00\x00\x00\x04disk"]);
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.outcome(GO, &info_data("theirs", &[])), ERR_UNKNOWN);
    assert_eq!(client.outcome(LIST, b"x"), ERR_INVALID);
    assert_eq!(fixture.server.unpublish("disk", false), Ok(2));
    assert_eq!(list(&second).len(), 1);
    assert_eq!(list(&fixture.address).len(), 0);
}

#[test]
fn abort_is_acknowledged_and_ends_connection() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.outcome(ABORT, b"data is ignored"), ACK);
    client.assert_closed();
    fixture.assert_sound();
}

#[test]
fn unknown_options_are_refused() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.greet(3);
    // The server supports neither OPT_PEEK_EXPORT (4) nor unassigned option numbers.
    for kind in [0, 4, 12, 0xffff, u32::MAX] {
        for data in [&[][..], &[7; 100]] {
            assert_eq!(client.outcome(kind, data), ERR_UNSUP, "option {kind}");
        }
    }
    client.go("disk");
}

#[test]
fn malformed_options_are_refused() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.outcome(STRUCTURED_REPLY, b"x"), ERR_INVALID);
    let good = info_data("disk", &[1, 3]);
    for kind in [OPT_INFO, GO] {
        for cut in 0..good.len() {
            assert_eq!(client.outcome(kind, &good[..cut]), ERR_INVALID, "{cut}");
        }
        let mut long = good.clone();
        long.push(0);
        assert_eq!(client.outcome(kind, &long), ERR_INVALID);
        assert_eq!(client.outcome(kind, b"\xff\xff\xff\xffdisk\x00\x00"), ERR_INVALID);
        assert_eq!(client.outcome(kind, b"\x00\x00\x00\x01\xff\x00\x00"), ERR_INVALID);
        assert_eq!(client.outcome(kind, &info_data(&"x".repeat(4097), &[])), ERR_INVALID);
    }
    client.agree(Headers::Structured);
    let good = context_data("disk", &["base:allocation", "x-y:z"]);
    for kind in [LIST_META_CONTEXT, SET_META_CONTEXT] {
        for cut in 0..good.len() {
            assert_eq!(client.outcome(kind, &good[..cut]), ERR_INVALID, "{cut}");
        }
        // The query count exceeds the number of queries in the data.
        let mut bytes = context_data("disk", &[]);
        let at = bytes.len() - 4;
        bytes[at..].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(client.outcome(kind, &bytes), ERR_INVALID);
        // A query is longer than the data, or a string is longer than the protocol allows (4096 bytes).
        let mut bytes = context_data("disk", &["x"]);
        let at = bytes.len() - 5;
        bytes[at..at + 4].copy_from_slice(&u32::MAX.to_be_bytes());
        assert_eq!(client.outcome(kind, &bytes), ERR_INVALID);
        assert_eq!(client.outcome(kind, &context_data("disk", &[&"x".repeat(4097)])), ERR_INVALID);
        assert_eq!(client.outcome(kind, &context_data(&"x".repeat(4097), &[])), ERR_INVALID);
    }
    client.go("disk");
}

#[test]
fn oversized_option_is_skipped_or_ends_connection() {
    let fixture = fixture();
    let mut client = fixture.connect();
    client.greet(3);
    for kind in [LIST, OPT_INFO, GO, STRUCTURED_REPLY, LIST_META_CONTEXT, SET_META_CONTEXT, 77] {
        assert_eq!(client.outcome(kind, &vec![1; MAX_OPTION_BYTES + 1]), ERR_TOO_BIG);
        assert_ne!(client.outcome(kind, &vec![1; MAX_OPTION_BYTES]), ERR_TOO_BIG);
    }
    // The server skips the data of an oversized option completely, and parses the next option.
    assert_eq!(client.outcome(LIST, &vec![1; 3 << 20]), ERR_TOO_BIG);
    assert_eq!(client.outcome(LIST, &[]), ACK);
    let mut header = option(LIST, &[]);
    header[12..].copy_from_slice(&(MAX_SKIPPED_OPTION_BYTES as u32 + 1).to_be_bytes());
    client.send(&header);
    client.assert_closed();
    fixture.assert_sound();
}

#[test]
fn metadata_context_queries_are_matched() {
    let fixture = fixture();
    fixture.publish("other", &MemDevice::new(MIB));
    let mut client = fixture.connect();
    client.greet(3);
    // The server refuses metadata contexts before structured replies are negotiated.
    let ask = context_data("disk", &["base:allocation"]);
    assert_eq!(client.outcome(SET_META_CONTEXT, &ask), ERR_INVALID);
    assert_eq!(client.outcome(LIST_META_CONTEXT, &ask), ERR_INVALID);
    client.agree(Headers::Structured);
    assert_eq!(client.outcome(SET_META_CONTEXT, &context_data("nothing", &[])), ERR_UNKNOWN);
    let mut contexts = |kind: u32, queries: &[&str]| {
        let replies = client.option(kind, &context_data("disk", queries));
        let (ack, contexts) = replies.split_last().unwrap();
        assert_eq!(ack.kind, ACK);
        assert!(contexts.iter().all(|reply| reply.kind == META_CONTEXT));
        contexts.iter().map(|reply| reply.data.clone()).collect::<Vec<_>>()
    };
    let listed = [b"\x00\x00\x00\x00base:allocation"];
    assert_eq!(contexts(LIST_META_CONTEXT, &[]), listed);
    assert_eq!(contexts(LIST_META_CONTEXT, &["base:"]), listed);
    assert_eq!(contexts(LIST_META_CONTEXT, &["qemu:", "base:allocation", "base:"]), listed);
    assert!(contexts(LIST_META_CONTEXT, &["qemu:", "base:x", "nonsense", ""]).is_empty());
    assert!(contexts(SET_META_CONTEXT, &[]).is_empty());
    assert!(contexts(SET_META_CONTEXT, &["base:"]).is_empty());
    let set = [b"\x00\x00\x00\x01base:allocation"];
    assert_eq!(contexts(SET_META_CONTEXT, &["x-a:b", "base:allocation", "base:allocation"]), set);
}

#[test]
fn selected_contexts_apply_to_their_export_only() {
    let fixture = fixture();
    fixture.publish("other", &MemDevice::new(MIB));
    let good = context_data("disk", &["base:allocation"]);
    // Each case lists SET_META_CONTEXT requests, and states whether block status works afterwards.
    let other = context_data("other", &["base:allocation"]);
    let empty = context_data("disk", &[]);
    let unknown = context_data("nothing", &["base:allocation"]);
    let cases: [(&[&[u8]], bool); 6] = [
        (&[&good], true),
        (&[&other], false),
        (&[&other, &good], true),
        (&[&good, &empty], false),
        (&[&good, &unknown], false),
        (&[&good, b"malformed"], false),
    ];
    for (sets, works) in cases {
        let mut client = fixture.connect();
        client.greet(3);
        client.agree(Headers::Structured);
        for set in sets {
            client.option(SET_META_CONTEXT, set);
        }
        client.go("disk");
        assert_eq!(client.status(0, 0, 4096).is_ok(), works, "{sets:?}");
        if !works {
            assert_eq!(client.status(0, 0, 4096), Err(22));
        }
        client.disconnect();
    }
}

#[test]
fn invalid_client_flags_or_magic_end_connection() {
    let fixture = fixture();
    for flags in [4, 7, 0x1_0003, u32::MAX] {
        let mut client = fixture.connect();
        client.greet(flags);
        client.assert_closed();
    }
    let mut client = fixture.connect();
    client.greet(3);
    client.send(b"IHAVEOPS\x00\x00\x00\x03\x00\x00\x00\x00");
    client.assert_closed();
    // The client sends a request instead of an option.
    let mut client = fixture.connect();
    client.greet(3);
    client.send(&request(0, 0, 1, 0, 512));
    client.assert_closed();
    fixture.assert_sound();
}

#[test]
fn handshake_timeouts_end_silent_or_slow_client() {
    let limits = Limits {
        handshake_idle_timeout: Duration::from_millis(300),
        handshake_timeout: Duration::from_millis(900),
        ..Limits::default()
    };
    let fixture = Fixture::with(limits);
    let mut silent = fixture.connect();
    silent.greet(3);
    silent.assert_closed();
    // The client sends a long option, one byte at a time.
    let mut slow = fixture.connect();
    slow.greet(3);
    let mut bytes = option(77, &[]);
    bytes[12..].copy_from_slice(&1000_u32.to_be_bytes());
    slow.send(&bytes);
    eventually(|| {
        std::thread::sleep(Duration::from_millis(5));
        slow.stream.write_all(&[0]).is_err()
    });
    fixture.assert_no_connections();
    // Handshake timeouts do not apply to the transmission phase.
    fixture.publish("disk", &MemDevice::new(MIB));
    let mut client = fixture.enter(true);
    std::thread::sleep(Duration::from_millis(400));
    assert!(client.read(0, 512).is_ok());
}

#[test]
fn connection_above_limit_is_closed() {
    let fixture = Fixture::with(Limits { max_connections: 2, ..Limits::default() });
    let device: Arc<MemDevice> = MemDevice::new(MIB);
    fixture.publish("disk", &device);
    let first = fixture.enter(false);
    let _second = fixture.enter(false);
    fixture.connect().assert_closed();
    assert_eq!(fixture.server.stats().refused, 1);
    first.disconnect();
    eventually(|| fixture.server.connections("disk") == 1);
    fixture.enter(false).disconnect();
}

#[test]
fn connect_rate_delays_connections_after_burst() {
    let fixture = Fixture::with(Limits { max_connect_rate: 100, ..Limits::default() });
    let device: Arc<MemDevice> = MemDevice::new(MIB);
    fixture.publish("disk", &device);
    let mut here = fixture.enter(false);
    let begun = Instant::now();
    // The kernel accepts all connections at once, but the server greets them at the limited rate.
    let mut others: Vec<_> = (0..100).map(|_| fixture.connect()).collect();
    // Requests on existing connections are not delayed.
    assert_eq!(here.write(0, 0, &[1; 512]), 0);
    others[99].greet(3);
    let all = begun.elapsed();
    // The burst of 64 connections is not delayed; the other 36 wait 10 ms each.
    assert!(all >= Duration::from_millis(360), "{all:?}");
    assert_eq!(fixture.server.stats().refused, 0);
    drop(others);
    here.disconnect();
    fixture.assert_sound();
}

/// Replies to many small options fill the reply buffer almost completely before the `OPT_EXPORT_NAME` reply.
#[test]
fn export_name_reply_fits_full_reply_buffer() {
    let fixture = Fixture::new();
    let options = ExportOptions { description: "d".repeat(4000), ..ExportOptions::default() };
    fixture.server.publish(&fixture.address, "a", MemDevice::new(MIB), options).unwrap();
    let Address::Unix(path) = &fixture.address else { panic!("the fixture listens on a Unix socket") };
    // After 129 STRUCTURED_REPLY options, 5 bytes of the reply buffer are left.
    for structured in 120..135 {
        let mut bytes = 3_u32.to_be_bytes().to_vec();
        for (kind, count) in [(LIST, 131), (STRUCTURED_REPLY, structured)] {
            for _ in 0..count {
                bytes.extend(option(kind, b""));
            }
        }
        bytes.extend(option(EXPORT_NAME, b"a"));
        let mut stream = std::os::unix::net::UnixStream::connect(path).unwrap();
        std::io::Write::write_all(&mut stream, &bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut got = Vec::new();
        std::io::Read::read_to_end(&mut stream, &mut got).unwrap();
        assert_eq!(got[got.len() - 10..got.len() - 2], MIB.to_be_bytes(), "after {structured} options");
    }
    fixture.assert_no_connections();
    assert_eq!(fixture.server.stats().panics, 0);
}
