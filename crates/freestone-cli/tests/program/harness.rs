//! Starts and stops the program under test, and runs its verbs.

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

/// Time limit for an expected line to appear in the log file.
#[allow(dead_code, reason = "the tests of the command line do not look at it")]
const LOG_MAX: Duration = Duration::from_secs(60);
#[allow(dead_code, reason = "the tests of the command line do not look at it")]
const LOG_PAUSE: Duration = Duration::from_millis(5);

/// Number of the user `nobody`, who has no rights, for tests that run as root.
pub const NOBODY: u32 = 65534;

/// Returns a command for the program under test, with its default paths in `dir`.
pub fn freestone(dir: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_freestone"));
    command
        .env("XDG_RUNTIME_DIR", dir)
        .env("XDG_CACHE_HOME", dir.join("cached"))
        .env("FREESTONE_MOUNTS", dir.join("mounts"))
        .env_remove("FREESTONE_CACHE")
        .env_remove("CACHE_DIRECTORY")
        .env_remove("RUST_LOG")
        .env_remove("FREESTONE_CONTROL")
        .current_dir(dir)
        .stdin(Stdio::null());
    command
}

/// Like [`freestone`], with SIGHUP at its default action even if the tests run under nohup, which ignores SIGHUP.
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

/// Returns a command for the program that runs as a user other than root, so that file modes apply.
pub fn unprivileged(dir: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return freestone(dir);
    }
    // The user `nobody` may lack access to the build directory, so the program is copied to `dir`.
    let copy = dir.join("freestone-copy");
    // cp copies the program. A child of another test, started meanwhile, could inherit a writable descriptor of the
    // copy. Exec of the copy would then fail ("text file busy").
    assert!(Command::new("cp").arg(env!("CARGO_BIN_EXE_freestone")).arg(&copy).status().unwrap().success());
    fs::set_permissions(&copy, Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(copy);
    command.env("XDG_RUNTIME_DIR", "/nowhere").current_dir("/").stdin(Stdio::null()).uid(NOBODY).gid(NOBODY);
    command
}

/// Runs a command until it exits. Returns exit status (-1 after a signal), stdout and stderr.
pub fn finish(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code().unwrap_or(-1), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Runs a command line that must exit with `status`. Returns the single message on stderr, without the program's name.
pub fn refused(dir: &Path, status: i32, args: &[&str]) -> String {
    let (code, out, err) = finish(freestone(dir).args(args));
    assert_eq!((code, out.as_str()), (status, ""), "{args:?}: {err}");
    sentence(&err)
}

/// Checks that stderr is one line. Returns the line without the name of the program.
pub fn sentence(stderr: &str) -> String {
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr.trim_end().strip_prefix("freestone: ").unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

/// A running server with a temporary directory of its own. Drop kills the server.
pub struct Serve {
    pub dir: TempDir,
    child: Child,
    /// Output of the server until the server was ready.
    pub startup_output: String,
}

impl Serve {
    /// Starts a server with the given devices and the sockets `nbd` and `control` in a new directory.
    pub fn start<S: AsRef<OsStr>>(devices: &[S]) -> Self {
        Self::start_in(tempfile::tempdir().unwrap(), devices, true)
    }

    /// Like [`start`](Self::start), in a given directory. If `named` is false, the server uses the default socket
    /// paths.
    pub fn start_in<S: AsRef<OsStr>>(dir: TempDir, args: &[S], named: bool) -> Self {
        let mut command = freestone(dir.path());
        command.arg("serve").args(args);
        if named {
            command.args(["--nbd", "unix:nbd", "--control", "control"]);
        }
        Self::ready(dir, command)
    }

    /// Like [`start_in`](Self::start_in) without named sockets. The server writes its log to the file `log`.
    #[allow(dead_code, reason = "the tests of the command line do not look at it")]
    pub fn logged_in<S: AsRef<OsStr>>(dir: TempDir, args: &[S]) -> Self {
        let mut command = freestone(dir.path());
        command.arg("serve").args(args).stderr(fs::File::create(dir.path().join("log")).unwrap());
        Self::ready(dir, command)
    }

    /// Waits until the file `log` contains `text`; a thread of the server writes the log. Returns the content of the
    /// file.
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

    /// Starts `command` and waits until the server is ready.
    pub fn ready(dir: TempDir, mut command: Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut output = String::new();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
        // The server prints the path of the control socket last, when all sockets accept connections.
        while !output.contains("control: ") {
            assert_ne!(lines.read_line(&mut output).unwrap(), 0, "the server ended: {output}");
        }
        Self { dir, child, startup_output: output }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = freestone(self.dir.path());
        command.args(args).arg("--control").arg(self.path("control"));
        command
    }

    /// Runs a verb at the control socket of the server. Returns exit status, stdout and stderr.
    #[allow(dead_code, reason = "not all tests that share this file need it")]
    pub fn run_verb(&self, args: &[&str]) -> (i32, String, String) {
        finish(&mut self.command(args))
    }

    /// Runs a verb that must succeed. Returns its stdout.
    pub fn text(&self, args: &[&str]) -> String {
        let (code, out, err) = finish(&mut self.command(args));
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        out
    }

    /// Runs a verb that must succeed, with `--json`. Returns the parsed stdout.
    pub fn json(&self, args: &[&str]) -> Value {
        let (code, out, err) = finish(self.command(args).arg("--json"));
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        serde_json::from_str(&out).unwrap()
    }

    /// Runs a verb that must exit with `status`. Returns its error message.
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

    /// Waits until the server exits. Returns its exit status (None after a signal) and its directory.
    pub fn wait(mut self) -> (Option<i32>, TempDir) {
        let code = self.child.wait().unwrap().code();
        let dir = std::mem::replace(&mut self.dir, tempfile::tempdir().unwrap());
        (code, dir)
    }
}

impl Drop for Serve {
    fn drop(&mut self) {
        // A failed test must not leave a server running. After `wait` the server has already exited, so errors are
        // ignored.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Sends a JSON request line to a control socket and returns the reply.
pub fn ask(stream: &UnixStream, line: &[u8]) -> Value {
    let mut stream = stream;
    stream.write_all(line).unwrap();
    stream.write_all(b"\n").unwrap();
    answer(stream)
}

/// Reads one reply line from a control socket.
pub fn answer(stream: &UnixStream) -> Value {
    let mut line = String::new();
    BufReader::new(stream).read_line(&mut line).unwrap();
    serde_json::from_str(&line).unwrap()
}

/// Connects to an export by `NBD_OPT_EXPORT_NAME`, as the oldest clients do. Returns the size of the export in bytes.
pub fn connect_nbd<S: Read + Write>(stream: &mut S, name: &str) -> u64 {
    const OPT_EXPORT_NAME: u32 = 1;
    // NBD_FLAG_C_FIXED_NEWSTYLE and NBD_FLAG_C_NO_ZEROES.
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
