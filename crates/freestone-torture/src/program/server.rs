//! The server as a process: start, kill, end, and what it holds.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// Sockets and files that are the server's own, in its directory.
pub const NBD: &str = "nbd";
pub const CONTROL: &str = "ctl";
pub const STATE: &str = "state";
pub const LOG: &str = "log";
/// Lines of the log that are told with a failure.
const LOG_TAIL: usize = 40;
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// A running server.
pub struct Server {
    child: Mutex<Child>,
    pid: Pid,
    dir: PathBuf,
    pub control: PathBuf,
}

/// What a process holds: each kind of descriptor and each name of a thread, with how many there
/// are.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Held {
    pub descriptors: BTreeMap<String, usize>,
    pub threads: BTreeMap<String, usize>,
    /// Descriptors of rings among the others.
    rings: usize,
}

impl Held {
    /// Returns the number of descriptors but for those of rings and their wake-ups. The kernel may refuse a ring, and
    /// a file has threads then.
    pub fn descriptors_without_rings(&self) -> usize {
        self.descriptors.values().sum::<usize>().saturating_sub(2 * self.rings)
    }

    /// Takes the larger number of each kind.
    pub fn join(&mut self, other: Self) {
        for (mine, theirs) in [(&mut self.descriptors, other.descriptors), (&mut self.threads, other.threads)]
        {
            for (kind, count) in theirs {
                let most = mine.entry(kind).or_default();
                *most = count.max(*most);
            }
        }
        self.rings = self.rings.max(other.rings);
    }

    /// Returns the descriptors and threads of a process, with the names of files below `dir`.
    pub fn of(pid: Pid, dir: &Path) -> Self {
        let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let mut held = Self::default();
        for entry in fs::read_dir(proc.join("fd")).into_iter().flatten().flatten() {
            // One that was closed meanwhile has no target.
            if let Ok(target) = fs::read_link(entry.path()) {
                let name = target.to_string_lossy();
                held.rings += usize::from(name.ends_with("[io_uring]"));
                // Sockets and pipes have a number behind their kind.
                let kind = name.split(":[").next().unwrap_or_default();
                let kind = kind.strip_prefix(&*dir.to_string_lossy()).unwrap_or(kind).to_owned();
                *held.descriptors.entry(kind).or_default() += 1;
            }
        }
        for entry in fs::read_dir(proc.join("task")).into_iter().flatten().flatten() {
            if let Ok(name) = fs::read_to_string(entry.path().join("comm")) {
                // Those that were started for large requests stay, at most one a CPU.
                if name.trim_end() != "worker" {
                    *held.threads.entry(name.trim_end().to_owned()).or_default() += 1;
                }
            }
        }
        held
    }
}

impl Server {
    /// Starts it in `dir` and waits until it says that it is ready. The error is what it said.
    pub fn start(program: &Path, dir: &Path, devices: &[String], ublk: bool) -> Result<Self, String> {
        let mut command = command(program, dir, devices)?;
        if ublk {
            command.arg("--ublk");
        }
        let mut child = command.spawn().map_err(|e| format!("{}: {e}", program.display()))?;
        let mut said = String::new();
        let mut lines = BufReader::new(child.stdout.take().expect("it is a pipe"));
        // The line about the control socket is the last one.
        while !said.contains("control: ") {
            let before = said.len();
            if !matches!(lines.read_line(&mut said), Ok(n) if n > 0) {
                let status = child.wait().map_err(|e| e.to_string())?;
                return Err(format!("the server did not start: {status}; it said {:?}", &said[before..]));
            }
        }
        let pid = Pid::from_child(&child);
        Ok(Self { child: Mutex::new(child), pid, dir: dir.to_owned(), control: dir.join(CONTROL) })
    }

    /// A signal; that it has ended meanwhile shows when it is waited for.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid, signal);
    }

    /// Whether it ended, and how.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.child.lock().expect("nobody panics with it").try_wait().ok().flatten()
    }

    /// Waits for its end.
    pub fn wait(&self, at_most: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            let ended = self.ended();
            if ended.is_some() || start.elapsed() > at_most {
                return ended;
            }
            thread::sleep(LOOK_EVERY);
        }
    }

    fn proc(&self, what: &str) -> PathBuf {
        format!("/proc/{}/{what}", self.pid.as_raw_nonzero()).into()
    }

    /// Its descriptors and threads.
    pub fn held(&self) -> Held {
        Held::of(self.pid, &self.dir)
    }

    /// Memory of its own, in bytes: what is not of files.
    pub fn memory_bytes(&self) -> u64 {
        let status = fs::read_to_string(self.proc("status")).unwrap_or_default();
        let of = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        ["RssAnon:", "RssShmem:"].iter().filter_map(|key| of(key)).sum::<u64>() << 10
    }

    /// What all of its threads do.
    pub fn stacks(&self) -> String {
        let pid = self.pid.as_raw_nonzero().to_string();
        let mut gdb = Command::new("gdb");
        gdb.args(["-batch", "-p", &pid, "-ex", "thread apply all bt"])
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        if let Ok(output) = gdb.output()
            && output.status.success()
        {
            return String::from_utf8_lossy(&output.stdout).into_owned();
        }
        let mut text = String::new();
        for entry in fs::read_dir(self.proc("task")).into_iter().flatten().flatten() {
            let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
            let (comm, wchan, syscall) = (read("comm"), read("wchan"), read("syscall"));
            let _ = writeln!(text, "  {} {wchan} {}", comm.trim_end(), syscall.trim_end());
        }
        text
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let mut child = self.child.lock().expect("nobody panics with it");
        // After its end this does nothing.
        let _ = child.kill();
        let _ = child.wait();
    }
}

/// Returns the command that starts a server in `dir`.
pub fn command(program: &Path, dir: &Path, devices: &[String]) -> Result<Command, String> {
    let log = File::options().create(true).append(true).open(dir.join(LOG)).map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.arg("serve").args(devices);
    command.args(["--nbd", &format!("unix:{NBD}"), "--control", CONTROL]).current_dir(dir);
    command.env("XDG_RUNTIME_DIR", dir).env_remove("RUST_LOG");
    // What is freed goes back to the kernel, so that what is left at the end is what was not freed.
    command.env("MALLOC_MMAP_THRESHOLD_", "65536").env("MALLOC_TRIM_THRESHOLD_", "65536");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    Ok(command)
}

/// One that is killed so long after its start, ready or not.
pub fn killed_at_start(
    program: &Path,
    dir: &Path,
    devices: &[String],
    after: Duration,
) -> Result<(), String> {
    let mut child = command(program, dir, devices)?.spawn().map_err(|e| e.to_string())?;
    thread::sleep(after);
    let killed = child.kill().and_then(|()| child.wait());
    match killed.map_err(|e| e.to_string())? {
        status if was_killed(status) => Ok(()),
        status => Err(format!("the server did not start: {status}")),
    }
}

/// Whether it was killed.
pub fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::KILL.as_raw())
}

/// The last lines of what the servers in `dir` logged.
pub fn log_tail(dir: &Path) -> String {
    let log = fs::read_to_string(dir.join(LOG)).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n")
}
