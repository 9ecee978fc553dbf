//! NBD client that connects to a server with arbitrary replies.
//!
//! The server sends its side of the handshake, receives the client's requests, sends its replies, and
//! disconnects. `script.rs` generates these bytes from an input. Properties:
//! * The handshake has the result that the reference parser of the server's bytes finds. The client sends the
//!   expected options, and the device has the reported size and flags.
//! * A request has the outcome that the reference parser of the replies finds, with exactly the data sent for it,
//!   up to the first violation of the protocol or the end of the replies.
//! * Extents report only those bytes as zero that the server reported as zero.
//! * Requests without a reply are sent again to a sound server (a second server with valid replies), which
//!   completes them. Without a sound server, they fail when the device is dropped.
//! * Everything completes in time.

mod facts;
mod replies;
mod requests;
mod script;
mod server;

use std::fs;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use freestone::device::Device as _;
use freestone_nbd_client::{Config, Nbd, Uri};
use tempfile::TempDir;

use requests::{Answer, SentRequest};
use script::Script;

/// Timeout after which a check fails, far above the time that any check needs.
const WAIT: Duration = Duration::from_secs(60);

/// Directory for the sockets of servers, for any number of consecutive checks.
pub struct NbdClient {
    directory: TempDir,
    next: AtomicU64,
}

impl NbdClient {
    /// Creates the directory for the sockets.
    ///
    /// # Panics
    /// Panics if the directory cannot be created.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self { directory: directory.expect("a directory for sockets"), next: AtomicU64::new(0) }
    }

    /// Returns the path for a new socket in the directory.
    fn socket(&self) -> PathBuf {
        self.directory.path().join(self.next.fetch_add(1, Ordering::SeqCst).to_string())
    }

    /// Checks one input. Returns true if a request succeeded.
    ///
    /// # Panics
    /// Panics if a property does not hold.
    pub fn check(&self, input: &[u8]) -> bool {
        let Some(script) = Script::new(input) else { return false };
        let path = self.socket();
        let listener = UnixListener::bind(&path).expect("a socket");
        let uri: Uri = format!("nbd+unix:///x?socket={}", path.display()).parse().expect("a URI");
        // The timeout is longer than `WAIT`, so no check waits until this timeout.
        let config = Config { timeout: 2 * WAIT, connections: 1, name: "fuzz".into(), ..Config::new(uri) };
        let (script, (sender, received)) = (&script, mpsc::channel());
        let answered = thread::scope(|scope| {
            let server_thread = scope.spawn(move || server::serve(listener, script, &sender));
            let device = Nbd::open(&config);
            assert_eq!(device.is_ok(), script.facts.is_some(), "{script:?}: {device:?}");
            let Ok(device) = device else {
                server_thread.join().expect("the server ends");
                return false;
            };
            script.assert_geometry(&device.geometry());
            run_requests(scope, device, script, &received, server_thread)
        });
        let _ = fs::remove_file(path);
        answered
    }
}

/// Submits the requests of the script and checks their outcomes. Returns true if at least one request
/// succeeded.
fn run_requests<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    device: Nbd,
    script: &'scope Script,
    received: &mpsc::Receiver<Vec<Answer>>,
    server_thread: thread::ScopedJoinHandle<'scope, ()>,
) -> bool {
    let device = Arc::new(device);
    let waits: Vec<_> = script.requests.iter().map(|request| request.begin(scope, &device)).collect();
    let mut expected = Vec::new();
    if !script.requests.is_empty() {
        expected = received.recv_timeout(WAIT).expect("the server has received all requests");
    }
    let recovers = script.recovers(&expected);
    // If the script has requests and no sound server follows, the server ends when the client has received
    // everything. Otherwise the server ends when the device is dropped.
    let (join_before, join_after) = if expected.is_empty() || recovers {
        (None, Some(server_thread))
    } else {
        (Some(server_thread), None)
    };
    let join =
        |server_thread: thread::ScopedJoinHandle<'_, ()>| server_thread.join().expect("the server ends");
    join_before.map(join);
    let mut has_success = false;
    for (request, (wait, expected)) in script.requests.iter().zip(waits.iter().zip(&expected)) {
        if *expected != Answer::None || recovers {
            let outcome = wait.recv_timeout(WAIT).expect("the request completes");
            has_success |= outcome.is_ok();
            request.check(expected, outcome);
        }
    }
    // The threads with block status requests have dropped their clones of the device.
    drop(Arc::into_inner(device).expect("the only clone"));
    join_after.map(join);
    for (wait, expected) in waits.iter().zip(&expected) {
        if *expected == Answer::None && !recovers {
            let outcome = wait.recv_timeout(WAIT).expect("the request fails with the device");
            assert_eq!(outcome.err(), Some(freestone::device::Error::Gone));
        }
        assert!(wait.recv_timeout(WAIT).is_err(), "a request completes once");
    }
    has_success
}

/// Returns the byte at an offset of the sound server's disk.
fn sound_byte(offset: u64) -> u8 {
    (offset / 512 * 7 + offset % 251) as u8
}

/// Returns the byte that a write request writes at the offset `at` from its start.
fn written_byte(request: &SentRequest, at: usize) -> u8 {
    (request.offset / 4096 * 31 + at as u64 % 253) as u8
}
