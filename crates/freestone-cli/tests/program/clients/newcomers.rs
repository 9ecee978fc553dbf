//! Limits of who has no export yet.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use crate::harness::{Serve, connect_nbd, refused};

/// Far longer than any limit here, far shorter than what holds where nothing is said.
const LONG: Duration = Duration::from_secs(8);

fn greeted(serve: &Serve) -> UnixStream {
    let mut stream = UnixStream::connect(serve.path("nbd")).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    stream
}

fn assert_closed(stream: &mut UnixStream) {
    // Where something of it was not read the end is a reset.
    assert!(matches!(stream.read(&mut [0]), Ok(0) | Err(_)));
}

#[test]
fn silence_ends_when_it_is_said_to() {
    let serve = Serve::start(&["n=null,size=1M", "--handshake-silence", "200ms"]);
    let started = Instant::now();
    assert_closed(&mut greeted(&serve));
    assert!(started.elapsed() > Duration::from_millis(150) && started.elapsed() < LONG);
}

#[test]
fn so_does_the_handshake_as_a_whole() {
    let serve = Serve::start(&["n=null,size=1M", "--handshake-timeout", "500ms"]);
    let started = Instant::now();
    let mut slow = greeted(&serve);
    // An option of many bytes, one at a time.
    slow.write_all(&[&3_u32.to_be_bytes()[..], b"IHAVEOPT", &[0, 0, 0, 77, 0, 1, 0, 0]].concat()).unwrap();
    while slow.write_all(&[0]).is_ok() {
        assert!(started.elapsed() < LONG, "it goes on");
        std::thread::sleep(Duration::from_millis(10));
    }
    assert!(started.elapsed() > Duration::from_millis(400));
}

#[test]
fn places_of_newcomers_are_as_many_as_said_and_are_given_up_as_said() {
    let args = ["n=null,size=1M", "--max-newcomers", "2", "--newcomer-grace", "1s"];
    let serve = Serve::start(&args);
    let mut silent = [greeted(&serve), greeted(&serve)];
    let started = Instant::now();
    let mut third = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut third, "n");
    assert!(started.elapsed() > Duration::from_millis(500) && started.elapsed() < LONG);
    assert_closed(&mut silent[0]);
    // Who has an export is none.
    let mut fourth = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut fourth, "n");
}

#[test]
fn connections_come_at_the_pace_that_is_said() {
    let serve = Serve::start(&["n=null,size=1M", "--connects-per-second", "20"]);
    let started = Instant::now();
    for _ in 0..84 {
        drop(greeted(&serve));
    }
    // 64 of them at once, 20 in a second.
    assert!(started.elapsed() > Duration::from_millis(800) && started.elapsed() < 2 * LONG);
}

#[test]
fn a_file_says_so_too_and_dump_repeats_it() {
    let dir = tempfile::tempdir().unwrap();
    let keys = "max_newcomers = 3\nnewcomer_grace = \"2s\"\nconnects_per_second = 50\nhandshake_silence = \"1m\"\n\
                handshake_timeout = \"2m\"\n";
    let rest = "nbd = 'unix:nbd'\ncontrol = 'control'\n[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n";
    std::fs::write(dir.path().join("f.toml"), format!("{keys}{rest}")).unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml", "--max-newcomers", "4"], false);
    let dumped = serve.text(&["dump"]);
    assert!(dumped.contains(&keys.replace("= 3", "= 4")), "{dumped}");
    let said = serve.refused(1, &["apply", "f.toml"]);
    assert!(said.ends_with("max_newcomers: the server has 4; this changes with a restart only"), "{said}");
    for (key, value, said) in [
        ("handshake-silence", "5", "give a unit; 5s?"),
        ("handshake-timeout", "2h", "must be 100ms to 1h"),
        ("newcomer-grace", "0s", "must be 100ms to 1h"),
        ("handshake-bytes", "1M", "must be 4K to 64K"),
        ("max-newcomers", "0", "0 is not in 1..=65536"),
    ] {
        let at = serve.dir.path();
        let args = ["serve", "--check", &format!("--{key}={value}")];
        let (code, out, err) = crate::harness::finish(crate::harness::freestone(at).args(args));
        assert_eq!((code, out.as_str()), (2, ""));
        assert!(err.contains(said), "{err}");
    }
    let said = refused(serve.dir.path(), 2, &["serve", "--check", "--handshake-bytes", "8K"]);
    assert_eq!(said, "--handshake-bytes: without --tls no client comes by it");
    std::fs::write(serve.path("g.toml"), "handshake_timeout = '5ms'").unwrap();
    let said = refused(serve.dir.path(), 2, &["serve", "--check", "--config", "g.toml"]);
    assert_eq!(said, "g.toml: line 1: handshake_timeout=5ms: must be 100ms to 1h");
}
