//! Hostile and broken clients of the HTTP server.

use super::{Watched, answer};
use crate::harness::prelude::*;

fn watched() -> Watched {
    Watched::start(&["r=ram,disksize=4M"])
}

#[test]
fn malformed_request_is_refused_with_a_status() {
    let watched = watched();
    let status = |text: &str| watched.ask(text.as_bytes()).0;
    let host = &watched.at;
    assert_eq!(status(&format!("GET /metrics HTTP/1.1\r\nHost: {host}\r\n\r\n")), 200);
    assert_eq!(status("GET /metrics HTTP/1.1\r\nHost: localhost:1\r\n\r\n"), 200);
    assert_eq!(status("GET /metrics HTTP/1.0\r\n\r\n"), 200);
    assert_eq!(status(&format!("GET /metrics?x=1 HTTP/1.1\r\nHost: {host}\r\n\r\n")), 200);
    assert_eq!(status(&format!("GET / HTTP/1.1\r\nHost: {host}\r\n\r\n")), 200);
    assert_eq!(status(&format!("GET /etc/passwd HTTP/1.1\r\nHost: {host}\r\n\r\n")), 404);
    assert_eq!(status(&format!("GET /metrics/ HTTP/1.1\r\nHost: {host}\r\n\r\n")), 404);
    assert_eq!(status("GET /metrics HTTP/1.1\r\nHost: rebound.example.org\r\n\r\n"), 421);
    assert_eq!(status("GET /metrics HTTP/1.1\r\n\r\n"), 400);
    assert_eq!(status("\u{16}\u{3}\u{1} a TLS hello\r\n\r\n"), 400);
    assert_eq!(status("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), 505);
    let (status, head, _) =
        watched.ask(b"POST /metrics HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello");
    assert_eq!(status, 405);
    assert!(head.iter().any(|line| line == "Allow: GET, HEAD"), "{head:?}");
    let (status, head, body) = watched.ask(b"HEAD /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n");
    assert_eq!((status, body.as_str()), (200, ""));
    let length = head.iter().find_map(|line| line.strip_prefix("Content-Length: ")).unwrap();
    assert!(length.parse::<usize>().unwrap() > 1000, "{head:?}");
}

#[test]
fn long_request_is_refused() {
    let watched = watched();
    let header = format!("GET /metrics HTTP/1.1\r\nHost: a\r\nX: {}\r\n\r\n", "y".repeat(9000));
    assert_eq!(watched.ask(header.as_bytes()).0, 431);
    let lines = format!("GET /metrics HTTP/1.1\r\nHost: a\r\n{}\r\n", "X: y\r\n".repeat(100));
    assert_eq!(watched.ask(lines.as_bytes()).0, 431);
    // The client sends a request that never ends. The server must close the connection.
    let mut stream = watched.connect();
    let piece = vec![b'a'; 65536];
    let mut sent = 0;
    while sent < 64 << 20 {
        match stream.write(&piece) {
            Ok(wrote) => sent += wrote,
            Err(_) => break,
        }
    }
    assert!(sent < 64 << 20, "somebody reads all of it");
    assert_eq!(watched.scrape().value("freestone_devices", &[("kind", "ram")]), Some(1.0));
}

#[test]
fn slow_or_silent_client_is_closed() {
    let watched = watched();
    let begun = Instant::now();
    // The clients are more than the connection slots of the HTTP server.
    let mut silent: Vec<_> = (0..15).map(|_| watched.connect()).collect();
    let mut dripping = watched.connect();
    dripping.write_all(b"GET /metrics HT").unwrap();
    let drip = thread::spawn(move || {
        // The deadline of a request does not depend on when single bytes arrive.
        while begun.elapsed() < Duration::from_secs(60) && dripping.write_all(b"T").is_ok() {
            thread::sleep(Duration::from_millis(200));
        }
        begun.elapsed()
    });
    // The silent clients soon occupy all connection slots.
    let status = loop {
        let (status, ..) = watched.ask(b"GET /metrics HTTP/1.0\r\n\r\n");
        if status != 200 || begun.elapsed() > Duration::from_secs(4) {
            break status;
        }
    };
    assert_eq!(status, 503);
    for stream in &mut silent {
        assert_eq!(answer(stream).0, 408);
    }
    assert!(drip.join().unwrap() < Duration::from_secs(50));
    assert_eq!(watched.ask(b"GET /metrics HTTP/1.0\r\n\r\n").0, 200);
}

#[test]
fn aborted_requests_free_their_slots() {
    let watched = watched();
    for bytes in [&b""[..], b"G", b"GET /metrics HTTP/1.1\r\n", b"GET /metrics HTTP/1.0\r\n\r\n"] {
        for _ in 0..20 {
            let mut stream = watched.connect();
            // The server may refuse the connection, because the slots of earlier clients are not
            // free yet.
            let _ = stream.write_all(bytes);
        }
    }
    let end = Instant::now() + Duration::from_secs(30);
    loop {
        let (status, ..) = watched.ask(b"GET /metrics HTTP/1.0\r\n\r\n");
        if status == 200 {
            break;
        }
        assert!(Instant::now() < end, "{status}");
        thread::sleep(Duration::from_millis(50));
    }
    // The server also shuts down while an HTTP client is connected.
    let mut open = watched.connect();
    let began = Instant::now();
    watched.serve.signal(rustix::process::Signal::TERM);
    let (status, _dir) = watched.serve.wait();
    assert_eq!(status, Some(0));
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert!(matches!(open.read(&mut [0]), Ok(0) | Err(_)));
}
