//! Output of the server that is not read: the log, the startup message, messages to the service
//! manager.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixDatagram;
use std::process::Child;

use super::{END_MAX, end};
use crate::harness::prelude::*;

/// Number of verbs that are run. Their log lines exceed the buffer of a pipe several times.
const VERBS: usize = 3000;

/// Ends a server by SIGTERM and checks that it exits with status 0. For servers whose startup
/// message is not read.
#[track_caller]
fn end_child(mut server: Child) {
    signal(&server, Signal::TERM);
    assert_eq!(wait_for_end(&mut server, END_MAX).code(), Some(0));
}

#[test]
fn unread_log_delays_neither_clients_nor_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let start = |dir: tempfile::TempDir, level: &str| {
        let mut command = freestone(dir.path());
        command.args(["serve", "r=ram,disksize=1M,keep=yes", "--state", "state"]);
        command.args(["--nbd", "unix:nbd", "--control", "control"]);
        command.env("RUST_LOG", level).stderr(Stdio::piped());
        Serve::ready(dir, command)
    };
    let serve = start(dir, "debug");
    let control = serve.control();
    control.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let mut answers = BufReader::new(&control);
    for _ in 0..VERBS {
        (&control).write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"get\"}\n").unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).expect("a verb is answered although nobody reads the log");
    }
    drop(control);
    assert_eq!(Raw::connect(&serve, "r").write(0, 0, &[7; 4096]), 0);
    let serve = start(end(serve), "warn");
    assert_eq!(Raw::connect(&serve, "r").read(0, 4096), Ok(vec![7; 4096]));
}

#[test]
fn unread_startup_output_does_not_block_sigterm() {
    let dir = tempfile::tempdir().unwrap();
    let devices: Vec<_> = (0..1500).map(|n| format!("n{n}=null,size=1M")).collect();
    let mut command = freestone(dir.path());
    command.arg("serve").args(&devices).args(["--nbd", "unix:nbd", "--control", "control"]);
    let server = command.stdout(Stdio::piped()).spawn().unwrap();
    let wait = ["wait", "--control", "control", "--timeout", "60s"];
    let (code, _, err) = finish(freestone(dir.path()).args(wait));
    assert_eq!(code, 0, "{err}");
    end_child(server);
}

#[test]
fn unread_notify_socket_does_not_delay_shutdown() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("notify");
    let _manager = UnixDatagram::bind(&path).unwrap();
    let sender = UnixDatagram::unbound().unwrap();
    sender.set_nonblocking(true).unwrap();
    while sender.send_to(b"X=1\n", &path).is_ok() {}
    let mut command = freestone(dir.path());
    command.args(["serve", "n=null,size=1M", "--control", "control"]).env("NOTIFY_SOCKET", &path);
    let server = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let wait = ["wait", "--control", "control", "--timeout", "60s"];
    let (code, _, err) = finish(freestone(dir.path()).args(wait));
    assert_eq!(code, 0, "{err}");
    end_child(server);
}
