//! NBD client with an arbitrary server.
//!
//! The server sends its side of the handshake, receives the client's requests, sends its replies, and
//! disconnects. `script.rs` generates these bytes from an input. Properties:
//! * The handshake has the result that the reference parser of the server's bytes finds. The client sends the
//!   expected options, and the device has the reported size and flags.
//! * A request has the outcome that the reference parser of the replies finds, with exactly the data sent for it,
//!   up to the first violation of the protocol or the end of the replies.
//! * Extents report as zero only what the server reported as zero.
//! * Requests without a reply are sent again to a sound server, which completes them, or they fail when the device
//!   is dropped.
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

/// Maximum wait. Nothing should take that long.
const WAIT: Duration = Duration::from_secs(60);

/// Directory for the sockets of servers, for any number of consecutive checks.
pub struct NbdClient {
    directory: TempDir,
    next: AtomicU64,
}

impl NbdClient {
    /// Creates the directory.
    ///
    /// # Panics
    /// Panics if the directory cannot be created.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self { directory: directory.expect("a directory for sockets"), next: AtomicU64::new(0) }
    }

    /// Returns the path of a new socket.
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
        // No check waits for this timeout.
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

/// Submits the requests of the script and checks their outcomes.
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
    // A server without a successor ends when the client has received everything. Other servers end with the device.
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
    // The threads with block status requests have dropped their clones.
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

/// Returns the content of a sound server at an offset.
fn sound_byte(offset: u64) -> u8 {
    (offset / 512 * 7 + offset % 251) as u8
}

/// Returns the data that a request writes, at offset `at` of the request.
fn written_byte(request: &SentRequest, at: usize) -> u8 {
    (request.offset / 4096 * 31 + at as u64 % 253) as u8
}
