//! Child processes of tests, and the processes that hold the memory of servers.

use std::collections::BTreeSet;
use std::fs;
use std::io::BufRead;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use rustix::process::Pid;

const READY_MAX: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A child process that is killed when dropped.
pub struct KillOnDrop(pub Child);

impl KillOnDrop {
    /// Starts a program and waits until it is ready.
    #[track_caller]
    pub fn start(command: &mut Command, is_ready: impl Fn() -> bool) -> Self {
        let child = command.stdin(Stdio::null()).spawn().unwrap_or_else(|e| panic!("{command:?}: {e}"));
        let process = Self(child);
        let end = Instant::now() + READY_MAX;
        while !is_ready() {
            assert!(Instant::now() < end, "{command:?}: is not ready");
            sleep(POLL_INTERVAL);
        }
        process
    }
}

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        // The child may have ended already, so errors are ignored.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Reads the output of `freestone serve` until the server is ready. Returns the output, as an error if the server ended.
pub fn read_until_ready(mut output: impl BufRead) -> Result<String, String> {
    let mut text = String::new();
    // The server prints the path of the control socket last, when all sockets accept connections.
    while !text.contains("control: ") {
        if !matches!(output.read_line(&mut text), Ok(bytes) if bytes > 0) {
            return Err(text);
        }
    }
    Ok(text)
}

/// Waits until a child process ends, for at most this time. Returns None if it has not ended.
pub fn wait_for_exit(child: &mut Child, at_most: Duration) -> Option<ExitStatus> {
    let start = Instant::now();
    loop {
        let status = child.try_wait().unwrap();
        if status.is_some() || start.elapsed() > at_most {
            return status;
        }
        sleep(POLL_INTERVAL);
    }
}

/// Name of the file with the records of a family, in the list of descriptors of a process.
const FAMILY: &str = "freestone-family";

/// Returns the process that holds the memory of the recoverable servers with this state directory
/// (`freestone hold`), or `None` if there is none.
pub fn holder_of(state: &Path) -> Option<Pid> {
    let path = state.join("holder");
    let command = ["freestone".as_bytes(), b"hold", path.as_os_str().as_bytes(), b""];
    let found = fs::read_dir("/proc").ok()?.flatten().find(|process| {
        let line = fs::read(process.path().join("cmdline")).unwrap_or_default();
        line.split(|byte| *byte == 0).eq(command)
    });
    Pid::from_raw(found?.file_name().to_str()?.parse().ok()?)
}

/// Returns the inodes of the families whose memory a process has.
pub fn families_of(process: Pid) -> BTreeSet<u64> {
    let open = fs::read_dir(format!("/proc/{}/fd", process.as_raw_nonzero()));
    let is_family =
        |path: &Path| fs::read_link(path).is_ok_and(|target| target.to_string_lossy().contains(FAMILY));
    let files = open.into_iter().flatten().flatten().map(|file| file.path());
    files.filter(|path| is_family(path)).filter_map(|path| Some(fs::metadata(path).ok()?.ino())).collect()
}
