//! Limits of pending NBD handshakes: connections that have not selected an export yet.

use crate::harness::prelude::*;

/// Deadline far above the configured limits of the tests and far below the default limits.
const LONG: Duration = Duration::from_secs(8);

fn connect_and_read_greeting(serve: &Serve) -> UnixStream {
    let mut stream = UnixStream::connect(serve.path("nbd")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream
}

fn assert_closed(stream: &mut UnixStream) {
    // If the server closes the connection with unread data, the client's read fails with a reset.
    assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
}

#[test]
fn handshake_idle_timeout_closes_silent_clients() {
    let serve = Serve::start(&["n=null,size=1M", "--handshake-idle-timeout", "200ms"]);
    let started = Instant::now();
    assert_closed(&mut connect_and_read_greeting(&serve));
    assert!(started.elapsed() > Duration::from_millis(150) && started.elapsed() < LONG);
}

#[test]
fn handshake_timeout_closes_slow_clients() {
    let serve = Serve::start(&["n=null,size=1M", "--handshake-timeout", "500ms"]);
    let started = Instant::now();
    let mut slow = connect_and_read_greeting(&serve);
    // The client sends an NBD option with a long payload byte by byte.
    slow.write_all(&[&3_u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 77, 0, 1, 0, 0]].concat()).unwrap();
    while slow.write_all(&[0]).is_ok() {
        assert!(started.elapsed() < LONG, "it goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(started.elapsed() > Duration::from_millis(400));
}

#[test]
fn pending_handshakes_are_limited() {
    let args = ["n=null,size=1M", "--max-pending-handshakes", "2", "--handshake-grace", "1s"];
    let serve = Serve::start(&args);
    let mut silent = [connect_and_read_greeting(&serve), connect_and_read_greeting(&serve)];
    let started = Instant::now();
    let mut third = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut third, "n");
    assert!(started.elapsed() > Duration::from_millis(500) && started.elapsed() < LONG);
    assert_closed(&mut silent[0]);
    // A connection that has selected an export is not a pending handshake.
    let mut fourth = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut fourth, "n");
}

#[test]
fn max_connect_rate_delays_connections() {
    let serve = Serve::start(&["n=null,size=1M", "--max-connect-rate", "20"]);
    let started = Instant::now();
    for _ in 0..84 {
        drop(connect_and_read_greeting(&serve));
    }
    // The default connect rate: a burst of 64 connections, then 20 per second.
    assert!(started.elapsed() > Duration::from_millis(800) && started.elapsed() < 2 * LONG);
}

#[test]
fn handshake_limits_of_file_are_dumped() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "max_pending_handshakes = 3\nhandshake_grace = \"2s\"\nmax_connect_rate = 50\nhandshake_idle_timeout = \"1m\"\n\
                handshake_timeout = \"2m\"\n";
    let rest = "nbd = 'unix:nbd'\ncontrol = 'control'\n[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n";
    std::fs::write(dir.path().join("f.toml"), format!("{keys}{rest}")).unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml", "--max-pending-handshakes", "4"], false);
    let dumped = serve.text(&["dump"]);
    assert!(dumped.contains(&keys.replace("= 3", "= 4")), "{dumped}");
    let message = serve.refused(1, &["apply", "f.toml"]);
    assert!(
        message.ends_with("max_pending_handshakes: the server uses 4; restart the server to change this"),
        "{message}"
    );
    for (key, value, message) in [
        ("handshake-idle-timeout", "5", "give a unit; 5s?"),
        ("handshake-timeout", "2h", "must be 100ms to 1h"),
        ("handshake-grace", "0s", "must be 100ms to 1h"),
        ("handshake-bytes", "1M", "must be 4K to 64K"),
        ("max-pending-handshakes", "0", "0 is not in 1..=65536"),
    ] {
        let at = serve.dir.path();
        let args = ["serve", "--check", &format!("--{key}={value}")];
        let (code, out, err) = finish(freestone(at).args(args));
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.contains(message), "{err}");
    }
    let message = refused(serve.dir.path(), 2, &["serve", "--check", "--handshake-bytes", "8K"]);
    assert_eq!(message, "--handshake-bytes: needs --tls");
    std::fs::write(serve.path("g.toml"), "handshake_timeout = '5ms'").unwrap();
    let message = refused(serve.dir.path(), 2, &["serve", "--check", "--config", "g.toml"]);
    assert_eq!(message, "g.toml: line 1: handshake_timeout=5ms: must be 100ms to 1h");
}
