//! The start of TLS: options before it, attacks on it, and its limits.

use std::io::Write;
use std::time::{Duration, Instant};

use freestone_nbd::{Limits, MAX_HANDSHAKE_BYTES, TlsMode, Visibility};
use rustls::StreamOwned;
use rustls::version::{TLS12, TLS13};

use super::serving;
use crate::common::prelude::*;
use crate::common::secure::{Secure, assert_ends, connection};

#[test]
fn tls_required_refuses_options_without_tls() {
    let (secure, _device) = serving(TlsMode::Required);
    let mut client = secure.clear();
    for kind in [0, LIST, 4, OPT_INFO, GO, 8, 9, 10, 11, u32::MAX] {
        for data in
            [vec![], info_data("disk", &[]), context_data("disk", &["base:allocation"]), vec![7; 2000]]
        {
            let replies = client.option(kind, &data);
            assert_eq!(replies.len(), 1, "option {kind}");
            assert_eq!(replies[0].kind, ERR_TLS_REQD, "option {kind}");
            assert!(!String::from_utf8_lossy(&replies[0].data).contains("disk"));
        }
    }
    assert_eq!(client.outcome(ABORT, &[]), ACK);
    client.assert_closed();
    // OPT_EXPORT_NAME has no error reply, so the server closes the connection.
    let mut client = secure.clear();
    client.send(&option(EXPORT_NAME, b"disk"));
    client.assert_closed();
    let mut client = secure.clear();
    client.send(&option(EXPORT_NAME, b""));
    client.assert_closed();
    secure.assert_sound();
}

#[test]
fn starttls_resets_negotiated_state() {
    let (secure, _device) = serving(TlsMode::Optional);
    for headers in [Headers::Structured, Headers::Extended] {
        let socket = secure.socket();
        let mut clear = Client::over(socket.try_clone().unwrap());
        clear.greet(3);
        clear.agree(headers);
        clear.set_context("disk");
        assert_eq!(clear.outcome(STARTTLS, b"x"), ERR_INVALID);
        assert_eq!(clear.outcome(STARTTLS, &[]), ACK);
        let connection = connection(&secure.ours, &secure.ours, Some("alice"), rustls::ALL_VERSIONS);
        let mut client = Client::over(StreamOwned::new(connection, socket));
        // TLS can be started only once per connection.
        for data in [&[][..], b"x"] {
            assert_eq!(client.outcome(STARTTLS, data), ERR_INVALID);
        }
        // Metadata contexts require structured replies, which were not negotiated.
        assert_eq!(
            client.outcome(SET_META_CONTEXT, &context_data("disk", &["base:allocation"])),
            ERR_INVALID
        );
        let (_, flags) = client.go("disk");
        assert_eq!(flags & (1 << 7), 0, "DF is for replies with chunks");
        assert_eq!(client.read(0, 512).unwrap().len(), 512);
        assert_ne!(client.run(0, 7, 0, 512), 0, "block status without a context");
        client.disconnect();
    }
    // Clients without TLS still work.
    let mut client = secure.clear();
    client.agree(Headers::Structured);
    client.go("disk");
    client.read(0, 512).unwrap();
    client.disconnect();
}

#[test]
fn starttls_without_tls_is_refused() {
    let fixture = Fixture::serving(&MemDevice::new(1 << 20));
    let mut client = fixture.connect();
    client.greet(3);
    assert_eq!(client.outcome(STARTTLS, &[]), ERR_POLICY);
    assert_eq!(client.outcome(STARTTLS, b"x"), ERR_INVALID);
    client.go("disk");
    client.disconnect();
}

/// The server must not accept data injected before TLS as data of the client.
#[test]
fn injected_bytes_around_starttls_end_connection() {
    let (secure, device) = serving(TlsMode::Optional);
    let extras: [Vec<u8>; 4] =
        [option(GO, &info_data("disk", &[])), option(STRUCTURED_REPLY, &[]), vec![0], vec![22, 3, 1, 0, 5]];
    for extra in &extras {
        // The injected data follows the STARTTLS option directly.
        let mut socket = secure.socket();
        let mut client = Client::over(socket.try_clone().unwrap());
        client.greet(3);
        let mut bytes = option(STARTTLS, &[]);
        bytes.extend(extra);
        client.send(&bytes);
        assert_ends(&mut socket);
    }
    for extra in &extras[..2] {
        // The injected data follows the reply to STARTTLS, before the TLS handshake.
        let mut socket = secure.upgraded();
        socket.write_all(extra).unwrap();
        assert_ends(&mut socket);
        // The injected plaintext follows the TLS handshake.
        let mut stream = secure.stream(&secure.ours, Some("alice"), rustls::ALL_VERSIONS);
        stream.conn.complete_io(&mut stream.sock).unwrap();
        stream.sock.write_all(extra).unwrap();
        assert_ends(&mut stream);
    }
    assert!(device.log.lock().is_empty());
    secure.assert_sound();
}

#[test]
fn tampered_record_ends_connection_without_effect() {
    let (secure, device) = serving(TlsMode::Required);
    for versions in [&[&TLS12][..], &[&TLS13]] {
        for (at, change) in [(0, 1), (3, 0x40), (4, 1), (5, 1), (20, 1), (40, 0x80)] {
            let mut stream = secure.stream(&secure.ours, Some("alice"), versions);
            stream.write_all(&option(GO, &info_data("disk", &[]))).unwrap();
            let mut client = Client::over(stream.sock.try_clone().unwrap());
            stream.flush().unwrap();
            // Waits until the server's replies have arrived; the test ignores them.
            std::thread::sleep(Duration::from_millis(20));
            let mut sealed = Vec::new();
            stream.conn.writer().write_all(&request(0, WRITE, 1, 0, 512)).unwrap();
            stream.conn.writer().write_all(&[9; 512]).unwrap();
            while stream.conn.wants_write() {
                stream.conn.write_tls(&mut sealed).unwrap();
            }
            sealed[at] ^= change;
            // Appends enough data to complete a TLS record whose length was changed.
            sealed.extend(vec![0; 20_000]);
            client.stream.write_all(&sealed).unwrap();
            assert_ends(&mut stream.sock);
        }
    }
    eventually(|| secure.server.stats().connections == 0);
    assert!(device.log.lock().is_empty(), "{:?}", device.log.lock());
    secure.assert_sound();
}

#[test]
fn bytes_before_tls_are_limited() {
    assert_eq!(Limits::default().max_handshake_bytes, MAX_HANDSHAKE_BYTES);
    for most in [MAX_HANDSHAKE_BYTES, 8 << 10] {
        check_limit_before_tls(most);
    }
}

fn check_limit_before_tls(most: usize) {
    let handshake_idle_timeout = Duration::from_millis(300);
    let limits = Limits { handshake_idle_timeout, max_handshake_bytes: most, ..Limits::default() };
    let secure = Secure::with(TlsMode::Required, limits, true);
    secure.publish("disk", &MemDevice::new(1 << 20), Visibility::All);
    // The client sends options without end.
    let mut socket = secure.socket();
    let mut bytes = 3_u32.to_be_bytes().to_vec();
    while bytes.len() <= most + 1000 {
        bytes.extend(option(LIST, &[0; 1000]));
    }
    let _ = socket.write_all(&bytes);
    let mut greeting = [0; 18];
    std::io::Read::read_exact(&mut socket, &mut greeting).unwrap();
    let mut answers = Vec::new();
    let _ = std::io::Read::read_to_end(&mut socket, &mut answers);
    assert!(answers.len() < most / 8, "{}", answers.len());
    // The client announces one option above the limit.
    let mut client = secure.clear();
    client.send(&[&b"IHAVEOPT"[..], &LIST.to_be_bytes(), &(1_u32 << 20).to_be_bytes()].concat());
    client.assert_closed();
    let mut client = secure.clear();
    client.send(&[&b"IHAVEOPT"[..], &LIST.to_be_bytes(), &(most as u32 + 1).to_be_bytes()].concat());
    client.assert_closed();
    // The client sends TLS handshake messages without end.
    let mut socket = secure.upgraded();
    let record = [&[22, 3, 1, 0x40, 0][..], &[1, 0, 0xff, 0xff][..], &[0; 0x4000 - 4]].concat();
    let end = Instant::now() + Duration::from_secs(5);
    for _ in 0..=most / record.len() {
        let _ = socket.write_all(&record);
    }
    // Above the limit, the server discards data for a short time and then closes the connection.
    while socket.write_all(&record).is_ok() {
        assert!(Instant::now() < end, "the server reads without limit");
    }
    // The client becomes silent before the TLS handshake, or within its first message.
    let started = Instant::now();
    let mut socket = secure.upgraded();
    assert_ends(&mut socket);
    let mut socket = secure.upgraded();
    socket.write_all(&[22, 3, 1]).unwrap();
    assert_ends(&mut socket);
    assert!(started.elapsed() < Duration::from_secs(10));
    secure.assert_sound();
}

#[test]
fn oldest_pending_handshake_makes_room() {
    let limits = Limits { max_pending_handshakes: 4, ..Limits::default() };
    let secure = Secure::with(TlsMode::Required, limits, true);
    secure.publish("disk", &MemDevice::new(1 << 20), Visibility::All);
    // Connections with an export do not count as pending handshakes.
    let users: Vec<_> = (0..6)
        .map(|_| {
            let mut client = secure.client();
            client.go("disk");
            client
        })
        .collect();
    let idle: Vec<_> = (0..4).map(|_| secure.upgraded()).collect();
    let started = Instant::now();
    // The new client waits until the grace time of the oldest pending handshake is over.
    let mut client = secure.client();
    client.go("disk");
    let waited = started.elapsed();
    assert!(waited > Duration::from_millis(500) && waited < Duration::from_secs(20), "{waited:?}");
    assert_ends(&mut { &idle[0] });
    // When a pending handshake ends, another client can connect at once.
    let fresh: Vec<_> = (0..2).map(|_| secure.upgraded()).collect();
    drop(idle);
    drop(fresh);
    let started = Instant::now();
    let mut last = secure.client();
    last.go("disk");
    assert!(started.elapsed() < Duration::from_secs(2));
    for mut user in users {
        user.read(0, 512).unwrap();
        user.disconnect();
    }
    client.disconnect();
    last.disconnect();
    secure.assert_sound();
}
