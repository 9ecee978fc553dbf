//! Servers with exhausted resources: unread output, no threads, no descriptors, file size limits, and unused signals.

mod descriptors;
mod file_sizes;
mod log_lines;
mod signals;
mod threads;
mod unread;

use rustix::process::{Resource, Rlimit, prlimit};

use crate::harness::prelude::*;

/// Deadline for a clean shutdown: far above its usual time, for a slow machine.
const END_MAX: Duration = Duration::from_secs(60);

/// Sets the soft and the hard limit of a resource of a running server to `most`.
fn limit(serve: &Serve, resource: Resource, most: u64) {
    let limit = Rlimit { current: Some(most), maximum: Some(most) };
    prlimit(Some(serve.pid()), resource, limit).unwrap();
}

/// Ends a server by SIGTERM. Fails unless the server exits with status 0 before a deadline. Returns its directory.
#[track_caller]
fn end(serve: Serve) -> tempfile::TempDir {
    let stat = format!("/proc/{}/stat", serve.pid().as_raw_nonzero());
    let began = Instant::now();
    serve.signal(Signal::TERM);
    // The server is a child process, so after its end it stays a zombie until `wait` is called.
    let has_ended = || std::fs::read_to_string(&stat).unwrap().contains(") Z ");
    while !has_ended() {
        assert!(began.elapsed() < END_MAX, "the server does not end");
        std::thread::sleep(Duration::from_millis(10));
    }
    let (code, dir) = serve.wait();
    assert_eq!(code, Some(0));
    dir
}

/// Starts a server that writes its log to the file `log`.
fn start_logged(devices: &[&str]) -> Serve {
    let dir = tempfile::tempdir().unwrap();
    let mut command = freestone(dir.path());
    command.arg("serve").args(devices).args(["--nbd", "unix:nbd", "--control", "control"]);
    command.stderr(std::fs::File::create(dir.path().join("log")).unwrap());
    Serve::ready(dir, command)
}
