//! What an NBD server says to the client, whoever that server is.
//!
//! The server says its side of the handshake, hears the client's requests, and says its replies; then it is gone.
//! `script.rs` says how an input becomes that.
//! * The handshake ends as a plain reading of the server's bytes does, the client asks for what that reading has it
//!   ask for, and the device is what was told.
//! * A request is answered exactly as a plain reading of the replies says, with the bytes that came for it and no
//!   others, up to where the replies break the protocol or end.
//! * Block status calls zeroes only what the server called so.
//! * What was not answered is asked again of a server that is sound, and answered by that, or ends with the device.
//! * All of that comes in time.

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

use requests::{Answer, Asked};
use script::Script;

/// Long enough for anything that comes at all.
const WAIT: Duration = Duration::from_secs(60);

/// A place for servers, for any number of checks one after the other.
pub struct NbdClient {
    directory: TempDir,
    next: AtomicU64,
}

impl NbdClient {
    /// No server is there yet.
    ///
    /// # Panics
    /// There is no place for sockets.
    #[allow(clippy::new_without_default, reason = "it makes a directory")]
    pub fn new() -> Self {
        let directory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
        Self { directory: directory.expect("a directory for sockets"), next: AtomicU64::new(0) }
    }

    /// A socket that nobody knows yet.
    fn socket(&self) -> PathBuf {
        self.directory.path().join(self.next.fetch_add(1, Ordering::SeqCst).to_string())
    }

    /// Checks one input; true: a request was answered with success.
    ///
    /// # Panics
    /// Something does not hold.
    pub fn check(&self, input: &[u8]) -> bool {
        let Some(script) = Script::new(input) else { return false };
        let path = self.socket();
        let listener = UnixListener::bind(&path).expect("a socket");
        let uri: Uri = format!("nbd+unix:///x?socket={}", path.display()).parse().expect("a URI");
        // Nothing here waits until a time is up.
        let config = Config { timeout: 2 * WAIT, connections: 1, name: "fuzz".into(), ..Config::new(uri) };
        let (script, (tell, told)) = (&script, mpsc::channel());
        let answered = thread::scope(|scope| {
            let serves = scope.spawn(move || server::serve(listener, script, &tell));
            let device = Nbd::open(&config);
            assert_eq!(device.is_ok(), script.facts.is_some(), "{script:?}: {device:?}");
            let Ok(device) = device else {
                serves.join().expect("the server ends");
                return false;
            };
            script.assert_geometry(&device.geometry());
            talk(scope, device, script, &told, serves)
        });
        let _ = fs::remove_file(path);
        answered
    }
}

/// What the script asks, and what comes of that.
fn talk<'scope>(
    scope: &'scope thread::Scope<'scope, '_>,
    device: Nbd,
    script: &'scope Script,
    told: &mpsc::Receiver<Vec<Answer>>,
    serves: thread::ScopedJoinHandle<'scope, ()>,
) -> bool {
    let device = Arc::new(device);
    let waits: Vec<_> = script.asked.iter().map(|asked| asked.begin(scope, &device)).collect();
    let mut expected = Vec::new();
    if !script.asked.is_empty() {
        expected = told.recv_timeout(WAIT).expect("the server has heard all requests");
    }
    let recovers = script.recovers(&expected);
    // A server that has said all it had to say ends when the client has seen that; others with the device.
    let (ends_before, ends_after) =
        if expected.is_empty() || recovers { (None, Some(serves)) } else { (Some(serves), None) };
    let join = |serves: thread::ScopedJoinHandle<'_, ()>| serves.join().expect("the server ends");
    ends_before.map(join);
    let mut is_answered = false;
    for (asked, (wait, expected)) in script.asked.iter().zip(waits.iter().zip(&expected)) {
        if *expected != Answer::None || recovers {
            let outcome = wait.recv_timeout(WAIT).expect("it is answered");
            is_answered |= outcome.is_ok();
            asked.judge(expected, outcome);
        }
    }
    // The threads that asked for block status are done with it.
    drop(Arc::into_inner(device).expect("nobody else has it"));
    ends_after.map(join);
    for (wait, expected) in waits.iter().zip(&expected) {
        if *expected == Answer::None && !recovers {
            let outcome = wait.recv_timeout(WAIT).expect("the device ends it");
            assert_eq!(outcome.err(), Some(freestone::device::Error::Gone));
        }
        assert!(wait.recv_timeout(WAIT).is_err(), "it is answered once");
    }
    is_answered
}

/// What a server that is sound has at an offset.
fn sound(offset: u64) -> u8 {
    (offset / 512 * 7 + offset % 251) as u8
}

/// What a request writes at an offset.
fn written(asked: &Asked, at: usize) -> u8 {
    (asked.offset / 4096 * 31 + at as u64 % 253) as u8
}
