//! Runs the program on a pseudoterminal, which the tool `script` provides.

use std::io::{Read as _, Write as _};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::program::program;
use super::server::Serve;
use super::tools::tool;
use super::wait::ANSWER_MAX;

/// A client command on a terminal of 100 columns and 24 lines, where Ctrl-C sends SIGINT.
pub struct Terminal {
    script: Child,
    shown: String,
}

impl Terminal {
    /// Runs a client command with the arguments `args`.
    pub fn run(serve: &Serve, args: &str) -> Self {
        Self::shell(serve, &format!("exec {} {args} --control control", program()))
    }

    /// Runs a shell command line on the terminal.
    pub fn shell(serve: &Serve, line: &str) -> Self {
        let line = format!("stty cols 100 rows 24; {line}");
        let mut script = tool("env");
        script.args(["--default-signal=INT", "script", "-qec", &line, "/dev/null"]).current_dir(&serve.dir);
        script.env_remove("NO_COLOR").env("TERM", "xterm");
        let script = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Self { script, shown: String::new() }
    }

    /// Reads until the terminal has shown `shown` after the previous match. Returns the text before
    /// and including the match.
    #[track_caller]
    pub fn until(&mut self, shown: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(at) = self.shown.find(shown) {
                let rest = self.shown.split_off(at + shown.len());
                return std::mem::replace(&mut self.shown, rest);
            }
            let left = ANSWER_MAX.checked_sub(start.elapsed());
            let len = left.map_or(0, |left| self.more(left));
            assert!(len > 0, "no {shown:?} in {:?}", self.shown);
        }
    }

    /// Waits for output and reads it. Returns the number of bytes read, or 0 if no output arrives
    /// within the time.
    fn more(&mut self, within: Duration) -> usize {
        let stdout = self.script.stdout.as_mut().unwrap();
        let within = Timespec::try_from(within).unwrap();
        if poll(&mut [PollFd::new(stdout, PollFlags::IN)], Some(&within)).unwrap() == 0 {
            return 0;
        }
        let mut part = [0; 4096];
        let len = stdout.read(&mut part).unwrap();
        self.shown.push_str(&String::from_utf8_lossy(&part[..len]));
        len
    }

    /// Types keys on the terminal; `\x03` is Ctrl-C.
    pub fn keys(&mut self, keys: &str) {
        self.script.stdin.as_mut().unwrap().write_all(keys.as_bytes()).unwrap();
    }

    /// Reads the remaining output. Returns the exit status of the command and the output.
    pub fn end(mut self) -> (Option<i32>, String) {
        let mut rest = std::mem::take(&mut self.shown);
        self.script.stdout.as_mut().unwrap().read_to_string(&mut rest).unwrap();
        (self.script.wait().unwrap().code(), rest)
    }
}
