//! Tests of TLS: exports, client certificates, and attacks on the connection between client and server.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use freestone_nbd::{Credentials, Limits, MAX_HANDSHAKE_BYTES, TlsFiles, TlsMode, Visibility};
use freestone_testkit::certificates::{Authority, Usage};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConnection, StreamOwned};

use crate::common::client::{
    ACK, Client, ERR_INVALID, ERR_POLICY, ERR_UNKNOWN, READ, SERVER, TRIM, WRITE, context_data, info_data,
    option, request,
};
use crate::common::device::{Manner, MemDevice};
use crate::common::secure::{ERR_TLS_REQD, STARTTLS, Secure, assert_ends, connection, files};
use crate::common::vast::Vast;
use crate::common::{Fixture, Headers, eventually, pattern};

const ABORT: u32 = 2;
const LIST: u32 = 3;
const INFO: u32 = 6;
const GO: u32 = 7;

fn serving(mode: TlsMode) -> (Secure, Arc<MemDevice>) {
    let secure = Secure::new(mode);
    let device = MemDevice::new(64 << 20);
    secure.publish("disk", &device, Visibility::All);
    (secure, device)
}

/// A client's TLS stream that the test can access too.
struct Shared {
    stream: Arc<Mutex<StreamOwned<ClientConnection, UnixStream>>>,
    /// If true, each write updates the client's keys and requests a key update from the server.
    changes_keys: bool,
}

impl Read for Shared {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        self.stream.lock().unwrap().read(buf)
    }
}

impl Write for Shared {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        let mut stream = self.stream.lock().unwrap();
        if self.changes_keys {
            stream.conn.refresh_traffic_keys().unwrap();
        }
        stream.write(buf)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.stream.lock().unwrap().flush()
    }
}

fn listed(client: &mut Client) -> Vec<String> {
    let mut replies = client.option(LIST, &[]);
    assert_eq!(replies.pop().unwrap().kind, ACK);
    let name = |data: &[u8]| String::from_utf8(data[4..].to_vec()).unwrap();
    replies.iter().inspect(|reply| assert_eq!(reply.kind, SERVER)).map(|reply| name(&reply.data)).collect()
}

#[test]
fn requests_of_all_sizes_work_in_both_tls_versions() {
    let (secure, device) = serving(TlsMode::Required);
    let lens = [1, 512, 4096, 16_383, 16_384, 16_385, 100_000, 128 << 10, 256 << 10, 300_000, 5 << 20];
    for versions in [&[&TLS12][..], &[&TLS13]] {
        for manner in [Manner::Inline, Manner::Thread] {
            device.set(manner);
            for headers in Headers::ALL {
                let mut client = secure.client_as(Some("alice"), versions);
                client.agree(headers);
                client.go("disk");
                for (n, len) in lens.into_iter().enumerate() {
                    let data = pattern(n as u64 + headers as u64, len);
                    assert_eq!(client.write(0, 4096 * n as u64, &data), 0);
                    assert!(client.read(4096 * n as u64, len as u32).unwrap() == data, "{len}");
                }
                client.disconnect();
            }
        }
    }
    device.set(Manner::Inline);
    // Transfers 33 MiB in one piece and in windows. Writes to a zoned device, which receives each write as a
    // whole.
    let mut client = secure.client();
    client.structured();
    client.go("disk");
    let data = pattern(7, 33 << 20);
    assert_eq!(client.write(0, 4096, &data), 0);
    assert!(client.read(4096, 33 << 20).unwrap() == data);
    client.disconnect();
    let mut client = secure.client();
    client.go("disk");
    assert!(client.read(4096, 33 << 20).unwrap() == data);
    client.disconnect();
    let zoned = MemDevice::zoned(8 << 20);
    secure.publish("zoned", &zoned, Visibility::All);
    let mut client = secure.client();
    client.go("zoned");
    for len in [300 << 10, 2 << 20] {
        let data = pattern(3, len);
        assert_eq!(client.write(0, 0, &data), 0);
        assert!(client.read(0, len as u32).unwrap() == data);
    }
    client.disconnect();
    secure.assert_sound();
}

#[test]
fn pipelined_requests_over_tls_get_replies() {
    let (secure, device) = serving(TlsMode::Required);
    for manner in [Manner::Inline, Manner::Thread] {
        device.set(manner);
        let mut client = secure.client();
        client.structured();
        client.go("disk");
        let mut bytes = Vec::new();
        let mut wanted = HashMap::new();
        for n in 0..200_u64 {
            let len = if n % 5 == 0 { 200_000 } else { 4096 };
            bytes.extend(request(0, WRITE, n, n * 200_000, len));
            bytes.extend(pattern(n, len as usize));
            wanted.insert(1000 + n, (n * 200_000, len));
        }
        client.send(&bytes);
        for _ in 0..200 {
            let cookie = client.chunk().cookie();
            assert!(cookie < 200);
        }
        let reads: Vec<u8> =
            wanted.iter().flat_map(|(cookie, (at, len))| request(0, READ, *cookie, *at, *len)).collect();
        client.send(&reads);
        let all = wanted.clone();
        let got = client.read_replies(&mut wanted);
        for (cookie, (_, len)) in all {
            assert!(got[&cookie].as_ref().unwrap() == &pattern(cookie - 1000, len as usize), "{cookie}");
        }
        client.disconnect();
    }
    secure.assert_sound();
}

#[test]
fn tls_required_refuses_options_without_tls() {
    let (secure, _device) = serving(TlsMode::Required);
    let mut client = secure.clear();
    for kind in [0, LIST, 4, INFO, GO, 8, 9, 10, 11, u32::MAX] {
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
    client.send(&option(1, b"disk"));
    client.assert_closed();
    let mut client = secure.clear();
    client.send(&option(1, b""));
    client.assert_closed();
    secure.assert_sound();
}

#[test]
fn starttls_resets_negotiated_state() {
    let (secure, _device) = serving(TlsMode::Optional);
    for headers in [Headers::Structured, Headers::Extended] {
        let socket = secure.socket();
        let mut clear = Client::over(Box::new(socket.try_clone().unwrap()));
        clear.greet(3);
        clear.agree(headers);
        clear.set_context("disk");
        assert_eq!(clear.outcome(STARTTLS, b"x"), ERR_INVALID);
        assert_eq!(clear.outcome(STARTTLS, &[]), ACK);
        let connection = connection(&secure.ours, &secure.ours, Some("alice"), rustls::ALL_VERSIONS);
        let mut client = Client::over(Box::new(StreamOwned::new(connection, socket)));
        // TLS can be started only once per connection.
        for data in [&[][..], b"x"] {
            assert_eq!(client.outcome(STARTTLS, data), ERR_INVALID);
        }
        // Metadata contexts require structured replies, which were not negotiated.
        assert_eq!(client.outcome(10, &context_data("disk", &["base:allocation"])), ERR_INVALID);
        let (_, flags) = client.go("disk");
        assert_eq!(flags & (1 << 7), 0, "DF is for replies with chunks");
        assert_eq!(client.read(0, 512).unwrap().len(), 512);
        assert_ne!(client.run(0, 7, 0, 512), 0, "block status without a context");
        client.disconnect();
    }
    // Clients without TLS still work.
    let mut client = secure.clear();
    client.structured();
    client.go("disk");
    client.read(0, 512).unwrap();
    client.disconnect();
}

/// Other requests are served during a sweep. The sweep ends if the client disconnects or sends the TLS close
/// alert.
#[test]
fn sweep_over_tls_ends_with_client() {
    const HUGE: u64 = 1 << 60;
    const ESHUTDOWN: u32 = 108;
    let secure = Secure::new(TlsMode::Required);
    let device = Arc::new(Vast::new(HUGE, 1 << 20));
    secure.publish("disk", &device, Visibility::All);
    for goes in [true, false] {
        let stream = secure.stream(&secure.ours, Some("alice"), rustls::ALL_VERSIONS);
        let stream = Arc::new(Mutex::new(stream));
        let mut client = Client::over(Box::new(Shared { stream: Arc::clone(&stream), changes_keys: false }));
        client.agree(Headers::Extended);
        client.set_context("disk");
        client.go("disk");
        assert_eq!(client.long_statuses(0, 0, HUGE), Ok(vec![(1, vec![(HUGE, 3)])]));
        let sweep = client.ask_long(0, TRIM, 0, HUGE);
        for round in 0..20 {
            assert_eq!(client.read(round << 30, 4096), Ok(vec![0; 4096]));
        }
        if goes {
            drop((client, stream));
        } else {
            let mut stream = stream.lock().unwrap();
            stream.conn.send_close_notify();
            stream.flush().unwrap();
            drop(stream);
            assert_eq!(client.plain_reply(sweep), ESHUTDOWN);
            client.assert_closed();
        }
        eventually(|| secure.server.stats().connections == 0);
        let steps = device.steps.lock().unwrap().len();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(device.steps.lock().unwrap().len(), steps);
    }
    secure.assert_sound();
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
        [option(GO, &info_data("disk", &[])), option(8, &[]), vec![0], vec![22, 3, 1, 0, 5]];
    for extra in &extras {
        // The injected data follows the STARTTLS option directly.
        let mut socket = secure.socket();
        let mut client = Client::over(Box::new(socket.try_clone().unwrap()));
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
    assert!(device.log.lock().unwrap().is_empty());
    secure.assert_sound();
}

#[test]
fn tampered_record_ends_connection_without_effect() {
    let (secure, device) = serving(TlsMode::Required);
    for versions in [&[&TLS12][..], &[&TLS13]] {
        for (at, change) in [(0, 1), (3, 0x40), (4, 1), (5, 1), (20, 1), (40, 0x80)] {
            let mut stream = secure.stream(&secure.ours, Some("alice"), versions);
            stream.write_all(&option(GO, &info_data("disk", &[]))).unwrap();
            let mut client = Client::over(Box::new(stream.sock.try_clone().unwrap()));
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
    assert!(device.log.lock().unwrap().is_empty(), "{:?}", device.log.lock().unwrap());
    secure.assert_sound();
}

#[test]
fn client_key_updates_are_followed() {
    let (secure, _device) = serving(TlsMode::Required);
    let mut stream = secure.stream(&secure.ours, Some("alice"), &[&TLS13]);
    stream.write_all(&option(GO, &info_data("disk", &[]))).unwrap();
    let socket = stream.sock.try_clone().unwrap();
    let stream = Arc::new(Mutex::new(stream));
    let mut client = Client::over(Box::new(Shared { stream, changes_keys: true }));
    assert_eq!(client.option_replies(GO).last().unwrap().kind, ACK);
    for n in 0..300_u64 {
        let data = pattern(n, 1 + 517 * n as usize);
        assert_eq!(client.write(0, n * 1000, &data), 0);
        assert!(client.read(n * 1000, data.len() as u32).unwrap() == data);
    }
    client.disconnect();
    drop(socket);
    secure.assert_sound();
}

#[test]
fn export_access_follows_certificate_names() {
    let secure = Secure::new(TlsMode::Optional);
    let ours = &secure.ours;
    ours.sign("bob", "bob.example", Usage::Client);
    let device = MemDevice::new(1 << 20);
    let named =
        |names: &[&str]| Visibility::Certificates(names.iter().map(|name| (*name).to_owned()).collect());
    secure.publish("disk", &device, Visibility::All);
    secure.publish("for-tls", &device, Visibility::Tls);
    secure.publish("for-alice", &device, named(&["alice"]));
    secure.publish("for-bob", &device, named(&["nobody", "bob.example"]));
    let seen = |client: &mut Client, names: &[&str]| {
        assert_eq!(listed(client), names);
        for name in ["disk", "for-tls", "for-alice", "for-bob", "for-nobody"] {
            let is_there = client.outcome(INFO, &info_data(name, &[])) == ACK;
            assert_eq!(is_there, names.contains(&name), "{name}");
            let contexts = client.outcome(9, &context_data(name, &[]));
            assert_eq!(contexts == ACK, names.contains(&name), "{name}");
        }
        let others = ["for-alice", "for-bob"].into_iter().filter(|name| !names.contains(name));
        others.map(|name| client.outcome(GO, &info_data(name, &[]))).collect::<Vec<_>>()
    };
    let mut clear = secure.clear();
    clear.structured();
    assert_eq!(seen(&mut clear, &["disk"]), [ERR_TLS_REQD, ERR_TLS_REQD]);
    assert_eq!(clear.outcome(GO, &info_data("for-tls", &[])), ERR_TLS_REQD);
    clear.send(&option(1, b"for-tls"));
    clear.assert_closed();
    let mut alice = secure.client();
    alice.structured();
    assert_eq!(seen(&mut alice, &["disk", "for-tls", "for-alice"]), [ERR_UNKNOWN]);
    alice.go("for-alice");
    let mut bob = secure.client_as(Some("bob"), rustls::ALL_VERSIONS);
    bob.structured();
    assert_eq!(seen(&mut bob, &["disk", "for-tls", "for-bob"]), [ERR_UNKNOWN]);
    bob.send(&option(1, b"for-alice"));
    bob.assert_closed();
    alice.read(0, 512).unwrap();
    alice.disconnect();
    secure.assert_sound();
}

#[test]
fn untrusted_certificate_is_refused() {
    let (secure, _device) = serving(TlsMode::Required);
    let others = Authority::new(secure.directory.path().join("others"));
    others.sign("alice", "alice.example", Usage::Client);
    secure.ours.sign("past", "past.example", Usage::ExpiredClient);
    for versions in [&[&TLS12][..], &[&TLS13]] {
        for (of, who) in [
            (&others, Some("alice")),
            (&secure.ours, Some("past")),
            // A server certificate is not valid for clients.
            (&secure.ours, Some("server")),
            (&secure.ours, None),
        ] {
            let mut stream = secure.stream(of, who, versions);
            // With TLS 1.3 the client learns of the refusal only after its first data.
            let _ = stream.write_all(&option(GO, &info_data("disk", &[])));
            let error =
                std::io::Read::read(&mut stream, &mut [0; 1]).expect_err("the certificate must be refused");
            assert!(error.to_string().contains("received fatal alert"), "{who:?}: {error}");
        }
    }
    secure.assert_sound();
    // Without a client CA, clients need no certificate.
    let open = Secure::with(TlsMode::Required, Limits::default(), false);
    open.publish("disk", &MemDevice::new(1 << 20), Visibility::Tls);
    for who in [None, Some("alice")] {
        let mut client = open.client_as(who, rustls::ALL_VERSIONS);
        client.go("disk");
        client.disconnect();
    }
}

#[test]
fn revoked_certificate_is_refused() {
    let (secure, _device) = serving(TlsMode::Required);
    let ours = &secure.ours;
    ours.sign("bob", "bob.example", Usage::Client);
    let others = Authority::new(secure.directory.path().join("others"));
    others.revoke("crl.pem", &[], 2100);
    let comes = |who| {
        let mut stream = secure.stream(ours, Some(who), rustls::ALL_VERSIONS);
        let _ = stream.write_all(&option(GO, &info_data("disk", &[])));
        stream.read(&mut [0; 1]).is_ok()
    };
    let with = |list| {
        let files = TlsFiles { client_crl: Some(list), ..files(ours, true) };
        Credentials::load(&files).map(|credentials| secure.server.renew_credentials(credentials))
    };
    ours.revoke("crl.pem", &["bob", "nobody"], 2100);
    with(ours.file("crl.pem")).unwrap();
    assert!(comes("alice") && !comes("bob"));
    ours.revoke("crl.pem", &[], 2100);
    with(ours.file("crl.pem")).unwrap();
    assert!(comes("alice") && comes("bob"));
    // With an expired revocation list, or a list of another authority, no client certificate is trusted.
    ours.revoke("old.pem", &["bob"], 2002);
    for list in [ours.file("old.pem"), others.file("crl.pem")] {
        with(list.clone()).unwrap();
        assert!(!comes("alice") && !comes("bob"), "{}", list.display());
    }
    for (list, why) in [("ca-cert.pem", "contains no certificate revocation list"), ("none.pem", "")] {
        let error = with(ours.file(list)).unwrap_err().to_string();
        assert!(error.starts_with("tls_client_crl=") && error.contains(why), "{error}");
    }
    with(ours.file("crl.pem")).unwrap();
    secure.assert_sound();
}

#[test]
fn renewed_credentials_apply_to_new_connections() {
    let (secure, _device) = serving(TlsMode::Required);
    let mut before = secure.client();
    before.structured();
    before.go("disk");
    let next = Authority::new(secure.directory.path().join("next"));
    next.sign("server", "localhost", Usage::Server);
    next.sign("alice", "alice.example", Usage::Client);
    // Loading a certificate and a key that do not match fails, and the server keeps its credentials.
    let mut mixed = files(&next, true);
    mixed.key = secure.ours.file("server-key.pem");
    let error = Credentials::load(&mixed).unwrap_err().to_string();
    assert!(error.starts_with("tls_cert=") && error.contains("with tls_key"), "{error}");
    mixed.key = next.dir().join("none");
    assert!(Credentials::load(&mixed).unwrap_err().to_string().starts_with("tls_key="));
    secure.assert_serves();
    secure.server.renew_credentials(Credentials::load(&files(&next, true)).unwrap());
    before.read(0, 512).unwrap();
    let renewed = Secure { ours: next, ..secure };
    let mut after = renewed.client();
    after.go("disk");
    after.read(0, 512).unwrap();
    before.read(0, 512).unwrap();
    before.disconnect();
    after.disconnect();
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
fn close_over_tls_replies_to_received_requests() {
    for round in 0..20 {
        let (secure, device) = serving(TlsMode::Required);
        device.set(if round % 2 == 0 { Manner::Inline } else { Manner::Thread });
        let mut client = secure.client();
        client.structured();
        client.go("disk");
        let mut bytes = Vec::new();
        for n in 0..40_u64 {
            bytes.extend(request(0, WRITE, n, n * 65536, 65536));
            bytes.extend(pattern(n, 65536));
        }
        let writer = std::thread::spawn(move || {
            // Writes until the server stops reading.
            let _ = client.stream.write_all(&bytes);
            let mut answered = 0;
            while let Ok(()) = client.stream.read_exact(&mut [0; 16]) {
                answered += 1;
            }
            answered
        });
        std::thread::sleep(Duration::from_millis(round));
        secure.server.close(&secure.address);
        let answered = writer.join().unwrap();
        let written = device.log.lock().unwrap().len();
        assert!(answered <= 40 && written >= answered, "{answered} of {written}");
        eventually(|| secure.server.stats().connections == 0);
    }
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
