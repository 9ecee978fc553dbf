//! How far a verb is, on a terminal: `script` gives the program one.

use std::io::{Read as _, Write as _};
use std::process::{Child, Stdio};
use std::time::Instant;

use super::disks::Disk;
use super::long_verbs::{SLOW_READS, SLOW_WRITES, spilling};
use super::{ANSWER_MAX, Control};
use crate::clients::tools::{MIB, tool};
use crate::harness::{Serve, finish, freestone};

/// A client on a terminal of 100 columns, with Ctrl-C as there.
struct Terminal {
    script: Child,
    shown: String,
}

impl Terminal {
    fn run(serve: &Serve, args: &str) -> Self {
        let line =
            format!("stty cols 100; exec {} {args} --control control", env!("CARGO_BIN_EXE_freestone"));
        let mut script = tool("env");
        script.args(["--default-signal=INT", "script", "-qec", &line, "/dev/null"]).current_dir(&serve.dir);
        script.env_remove("NO_COLOR").env("TERM", "xterm");
        let script = script.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Self { script, shown: String::new() }
    }

    /// Reads until it shows this, after what was waited for before.
    #[track_caller]
    fn until(&mut self, shown: &str) -> String {
        let start = Instant::now();
        loop {
            if let Some(at) = self.shown.find(shown) {
                let rest = self.shown.split_off(at + shown.len());
                return std::mem::replace(&mut self.shown, rest);
            }
            let mut part = [0; 4096];
            let len = self.script.stdout.as_mut().unwrap().read(&mut part).unwrap();
            self.shown.push_str(&String::from_utf8_lossy(&part[..len]));
            assert!(len > 0 && start.elapsed() < ANSWER_MAX, "no {shown:?} in {:?}", self.shown);
        }
    }

    fn interrupt(&mut self) {
        self.script.stdin.as_mut().unwrap().write_all(b"\x03").unwrap();
    }

    /// Reads the rest; the status.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = std::mem::take(&mut self.shown);
        self.script.stdout.as_mut().unwrap().read_to_string(&mut rest).unwrap();
        (self.script.wait().unwrap().code(), rest)
    }
}

#[test]
fn a_bar_shows_part_rate_and_time_left_and_goes_again() {
    let disk = Disk::of("64M");
    let serve = spilling(&disk, 32 * MIB);
    serve.text(&["writeback", "r", "huge"]);
    disk.hang(SLOW_READS);
    let mut terminal = Terminal::run(&serve, "save r r.saved");
    terminal.until("r: save [");
    let shown = terminal.until(" left");
    let last = shown.rsplit("r: save [").next().unwrap();
    let (bar, rest) = last.split_once("] ").unwrap();
    assert!(bar.starts_with('#') && bar.ends_with('-'), "{last}");
    assert!(rest.contains(" of 32M, ") && rest.contains(" %, ") && rest.contains("/s, "), "{last}");
    terminal.interrupt();
    terminal.until("r: save, is told to end; Ctrl-C again does not wait for that");
    // The sentence about the end is all that is left.
    let (code, rest) = terminal.end();
    assert_eq!(code, Some(130), "{rest}");
    let line = rest.rsplit("\x1b[2K").next().unwrap();
    assert!(line.trim_start().starts_with("freestone: r: save: cancelled, "), "{rest:?}");
    // Where it is not known how much there is to do: one waits for another.
    disk.heal();
    serve.text(&["reset", "r"]);
    super::long_verbs::fill(&serve, "r", 32 * MIB);
    disk.hang(SLOW_WRITES);
    serve.text(&["writeback", "r", "huge", "--background"]);
    Control::of(&serve).until("it runs", "r", |stat| stat["progress"]["done_bytes"].as_u64() > Some(0));
    let mut terminal = Terminal::run(&serve, "writeback r huge");
    terminal.until("r: writeback, 1s");
    terminal.interrupt();
    assert_eq!(terminal.end().0, Some(130));
    let mut quiet = Terminal::run(&serve, "writeback r huge --progress none");
    Control::of(&serve).until("it waits", "r", |_| serve.text(&["jobs"]).matches("running").count() == 2);
    quiet.interrupt();
    let (_, rest) = quiet.end();
    assert!(!rest.contains("\x1b["), "{rest:?}");
}

#[test]
fn where_there_is_no_terminal_there_is_no_bar() {
    let disk = Disk::of("64M");
    let serve = spilling(&disk, 2 * MIB);
    serve.text(&["writeback", "r", "huge"]);
    // Long enough for several looks.
    disk.hang("read delay=300ms");
    let mut save = freestone(serve.dir.path());
    save.args(["save", "r", "r.saved", "--progress", "bar", "--control", "control"]);
    let start = Instant::now();
    let (code, _, said) = finish(&mut save);
    assert_eq!((code, said.as_str()), (0, ""));
    assert!(start.elapsed().as_millis() > 600, "nobody looked: {:?}", start.elapsed());
}
