//! Starts the program, talks to it, and ends it.

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

/// Longest time until a line that was logged is in its file.
#[allow(dead_code, reason = "the tests of the command line do not look at it")]
const LOG_MAX: Duration = Duration::from_secs(60);
#[allow(dead_code, reason = "the tests of the command line do not look at it")]
const LOG_PAUSE: Duration = Duration::from_millis(5);

/// The user without rights, where the tests run as root.
pub const NOBODY: u32 = 65534;

/// The program, with its default paths in `dir`.
pub fn freestone(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_freestone"));
    command
        .env("XDG_RUNTIME_DIR", dir)
        .env("XDG_CACHE_HOME", dir.join("cached"))
        .env_remove("FREESTONE_CACHE")
        .env_remove("CACHE_DIRECTORY")
        .env_remove("RUST_LOG")
        .env_remove("FREESTONE_CONTROL")
        .current_dir(dir)
        .stdin(Stdio::null());
    command
}

/// The program, which hears hangups also where the tests are run by somebody who does not (nohup).
#[allow(dead_code, reason = "not all tests that share this file send any")]
pub fn hearing_hangups(dir: &Path) -> Command {
    let program = freestone(dir);
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(program.get_program());
    for (key, value) in program.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    command.current_dir(dir).stdin(Stdio::null());
    command
}

/// The program run by somebody whom file modes apply to: root is not such a one.
pub fn unprivileged(dir: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return freestone(dir);
    }
    // Where the build directory lies, nobody may not be allowed to look.
    let copy = dir.join("freestone-copy");
    // By cp: a descriptor of ours, open for writing, could be inherited by what another test starts
    // just then, and the copy could not be run ("text file busy").
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_freestone")).arg(&copy).status().unwrap().success());
    fs::set_permissions(&copy, Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(copy);
    command.env("XDG_RUNTIME_DIR", "/nowhere").current_dir("/").stdin(Stdio::null()).uid(NOBODY).gid(NOBODY);
    command
}

/// Runs to the end. Returns exit status, stdout, stderr.
pub fn finish(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code().unwrap_or(-1), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Runs a command line that must fail with `status`; returns the one sentence on stderr.
pub fn refused(dir: &Path, status: i32, args: &[&str]) -> String {
    let (code, out, err) = finish(freestone(dir).args(args));
    assert_eq!((code, out.as_str()), (status, ""), "{args:?}: {err}");
    sentence(&err)
}

/// Checks that stderr is one line, and returns it without the program's name.
pub fn sentence(stderr: &str) -> String {
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr.trim_end().strip_prefix("freestone: ").unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

/// A running server in a directory of its own.
pub struct Serve {
    pub dir: TempDir,
    child: Child,
    /// What it said when it was ready.
    pub said: String,
}

impl Serve {
    /// Serves at `nbd` and `control` in a fresh directory.
    pub fn start<S: AsRef<OsStr>>(devices: &[S]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), devices, true)
    }

    /// The same in a given directory; without `named`, at the default paths.
    pub fn start_in<S: AsRef<OsStr>>(dir: TempDir, args: &[S], named: bool) -> Self {
        let mut command = freestone(dir.path());
        command.arg("serve").args(args);
        if named {
            command.args(["--nbd", "unix:nbd", "--control", "control"]);
        }
        Self::ready(dir, command)
    }

    /// As [`start_in`](Self::start_in), at the default paths; what the server logs is in the file
    /// `log`.
    #[allow(dead_code, reason = "the tests of the command line do not look at it")]
    pub fn logged_in<S: AsRef<OsStr>>(dir: TempDir, args: &[S]) -> Self {
        let mut command = freestone(dir.path());
        command.arg("serve").args(args).stderr(fs::File::create(dir.path().join("log")).unwrap());
        Self::ready(dir, command)
    }

    /// Waits until the file `log` contains a text, as the server's own thread writes it. Returns the file.
    #[allow(dead_code, reason = "the tests of the command line do not look at it")]
    #[track_caller]
    pub fn log_with(&self, text: &str) -> String {
        let end = Instant::now() + LOG_MAX;
        loop {
            let log = fs::read_to_string(self.path("log")).unwrap();
            if log.contains(text) {
                return log;
            }
            assert!(Instant::now() < end, "the log lacks {text:?}: {log}");
            thread::sleep(LOG_PAUSE);
        }
    }

    /// Waits until the server that the command starts is ready.
    pub fn ready(dir: TempDir, mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
        // The line about the control socket is the last one.
        while !said.contains("control: ") {
            assert_ne!(lines.read_line(&mut said).unwrap(), 0, "the server ended: {said}");
        }
        Self { dir, child, said }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = freestone(self.dir.path());
        command.args(args).arg("--control").arg(self.path("control"));
        command
    }

    /// A verb; its status, and what it says on stdout and stderr.
    #[allow(dead_code, reason = "not all tests that share this file need it")]
    pub fn tried(&self, args: &[&str]) -> (i32, String, String) {
        finish(&mut self.command(args))
    }

    /// A verb that succeeds; what it shows to people.
    pub fn text(&self, args: &[&str]) -> String {
        let (code, out, err) = finish(&mut self.command(args));
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        out
    }

    /// A verb that succeeds, with --json.
    pub fn json(&self, args: &[&str]) -> Value {
        let (code, out, err) = finish(self.command(args).arg("--json"));
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        serde_json::from_str(&out).unwrap()
    }

    /// A verb that fails with `status`; its sentence.
    pub fn refused(&self, status: i32, args: &[&str]) -> String {
        let (code, out, err) = finish(&mut self.command(args));
        assert_eq!((code, out.as_str()), (status, ""), "{args:?}: {err}");
        sentence(&err)
    }

    pub fn control(&self) -> UnixStream {
        UnixStream::connect(self.path("control")).unwrap()
    }

    pub fn pid(&self) -> Pid {
        Pid::from_raw(self.child.id().cast_signed()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Waits for the end; returns the exit status and the directory.
    pub fn wait(mut self) -> (Option<i32>, TempDir) {
        let code = self.child.wait().unwrap().code();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        (code, dir)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // A failed test must not leave a server behind; after `wait` it has ended and this does
        // nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a line to a control socket and reads the answer.
pub fn ask(stream: &UnixStream, line: &[u8]) -> Value {
    let mut stream = stream;
    stream.write_all(line).unwrap();
    stream.write_all(b"\n").unwrap();
    answer(stream)
}

/// Reads one line of a control socket.
pub fn answer(stream: &UnixStream) -> Value {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

/// Connects to an export as the oldest clients do. Returns its size.
pub fn connect_nbd<S: Read + Write>(stream: &mut S, name: &str) -> u64 {
    const OPT_EXPORT_NAME: u32 = 1;
    // Fixed newstyle, no padding.
    const CLIENT_FLAGS: u32 = 3;
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting).unwrap();
    assert_eq!(&greeting[..16], b"NBDMAGICIHAVEOPT");
    let mut hello = CLIENT_FLAGS.to_be_bytes().to_vec();
    hello.extend(b"IHAVEOPT");
    hello.extend(OPT_EXPORT_NAME.to_be_bytes());
    hello.extend(u32::try_from(name.len()).unwrap().to_be_bytes());
    hello.extend(name.as_bytes());
    stream.write_all(&hello).unwrap();
    let mut reply = [0; 10];
    stream.read_exact(&mut reply).unwrap();
    u64::from_be_bytes(reply[..8].try_into().unwrap())
}
