//! A running server, its verbs and its control socket.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::process::{KillOnDrop, read_until_ready};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tempfile::TempDir;

use super::program::{finish, freestone, sentence};

/// Time limit for an expected line to appear in the log file.
const LOG_MAX: Duration = Duration::from_secs(60);
const LOG_PAUSE: Duration = Duration::from_millis(5);

/// A running server with a temporary directory of its own.
pub struct Serve {
    // Drop kills the server, then deletes its directory.
    child: KillOnDrop,
    pub dir: TempDir,
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
    pub fn logged_in<S: AsRef<OsStr>>(dir: TempDir, args: &[S]) -> Self {
        let mut command = freestone(dir.path());
        command.arg("serve").args(args).stderr(fs::File::create(dir.path().join("log")).unwrap());
        Self::ready(dir, command)
    }

    /// Waits until the file `log` contains `text`; a thread of the server writes the log. Returns the content of the
    /// file.
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
        let mut child = KillOnDrop(command.stdout(Stdio::piped()).spawn().unwrap());
        let output = read_until_ready(BufReader::new(child.0.stdout.as_mut().unwrap()));
        let startup_output = output.unwrap_or_else(|output| panic!("the server ended: {output}"));
        Self { child, dir, startup_output }
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
        Pid::from_child(&self.child.0)
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Ends the server by SIGTERM, which must succeed. Returns its directory.
    #[track_caller]
    pub fn end(self) -> TempDir {
        self.signal(Signal::TERM);
        let (code, dir) = self.wait();
        assert_eq!(code, Some(0));
        dir
    }

    /// Kills the server by SIGKILL, which simulates a crash. Returns its directory.
    pub fn kill(self) -> TempDir {
        self.signal(Signal::KILL);
        self.wait().1
    }

    /// Waits until the server exits. Returns its exit status (None after a signal) and its directory.
    pub fn wait(mut self) -> (Option<i32>, TempDir) {
        (self.child.0.wait().unwrap().code(), self.dir)
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
