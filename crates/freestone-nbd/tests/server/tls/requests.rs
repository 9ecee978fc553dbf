//! Requests over TLS, and the end of a connection with TLS.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use freestone_nbd::{TlsMode, Visibility};
use rustls::version::{TLS12, TLS13};
use rustls::{ClientConnection, StreamOwned};

use super::serving;
use crate::common::device::{Manner, sweep_steps, vast};
use crate::common::prelude::*;
use crate::common::secure::Secure;

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
    client.agree(Headers::Structured);
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
        client.agree(Headers::Structured);
        client.go("disk");
        let mut bytes = Vec::new();
        let mut wanted = HashMap::new();
        for n in 0..200_u64 {
            let len = if n % 5 == 0 { 200_000 } else { 4096 };
            bytes.extend(request(0, WRITE, n, n * 200_000, len));
            bytes.extend(pattern(n, len as usize));
            wanted.insert(1000 + n, (n * 200_000, len.into()));
        }
        client.send(&bytes);
        for _ in 0..200 {
            let cookie = client.chunk().cookie();
            assert!(cookie < 200);
        }
        let reads: Vec<u8> = wanted
            .iter()
            .flat_map(|(cookie, (at, len))| Headers::Simple.request(0, READ, *cookie, *at, *len))
            .collect();
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

/// Other requests are served during a sweep. The sweep ends if the client disconnects or sends the TLS close
/// alert.
#[test]
fn sweep_over_tls_ends_with_client() {
    const HUGE: u64 = 1 << 60;
    let secure = Secure::new(TlsMode::Required);
    let device = vast(HUGE, 1 << 20);
    secure.publish("disk", &device, Visibility::All);
    for goes in [true, false] {
        let stream = secure.stream(&secure.ours, Some("alice"), rustls::ALL_VERSIONS);
        let stream = Arc::new(Mutex::new(stream));
        let mut client = Client::over(Shared { stream: Arc::clone(&stream), changes_keys: false });
        client.agree(Headers::Extended);
        client.set_context("disk");
        client.go("disk");
        assert_eq!(client.statuses(0, 0, HUGE), Ok(vec![(1, vec![(HUGE, 3)])]));
        let sweep = client.ask(0, TRIM, 0, HUGE);
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
        let steps = sweep_steps(&device).len();
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(sweep_steps(&device).len(), steps);
    }
    secure.assert_sound();
}

#[test]
fn client_key_updates_are_followed() {
    let (secure, _device) = serving(TlsMode::Required);
    let mut stream = secure.stream(&secure.ours, Some("alice"), &[&TLS13]);
    stream.write_all(&option(GO, &info_data("disk", &[]))).unwrap();
    let socket = stream.sock.try_clone().unwrap();
    let stream = Arc::new(Mutex::new(stream));
    let mut client = Client::over(Shared { stream, changes_keys: true });
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
fn close_over_tls_replies_to_received_requests() {
    for round in 0..20 {
        let (secure, device) = serving(TlsMode::Required);
        device.set(if round % 2 == 0 { Manner::Inline } else { Manner::Thread });
        let mut client = secure.client();
        client.agree(Headers::Structured);
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
        let written = device.log.lock().len();
        assert!(answered <= 40 && written >= answered, "{answered} of {written}");
        eventually(|| secure.server.stats().connections == 0);
    }
}
