//! The server as a process: how it is started, killed and ended, and which resources it uses.
//!
//! Owns the process and the names of its files. The lowest room of this mode: all others may use it.

pub mod control;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::BufReader;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use freestone_testkit::process::{KillOnDrop, read_until_ready};
use rustix::process::{Pid, Signal, kill_process};

/// Names of the sockets and files of a server, in its directory.
pub const NBD: &str = "nbd";
pub const CONTROL: &str = "ctl";
pub const STATE: &str = "state";
pub const LOG: &str = "log";
const LOG_TAIL: usize = 40;
const POLL_INTERVAL: Duration = Duration::from_millis(5);

pub struct Server {
    process: Mutex<KillOnDrop>,
    pub pid: Pid,
    dir: PathBuf,
    pub control: PathBuf,
}

/// Numbers of the descriptors of a process, by kind, and of its threads, by name.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Resources {
    pub descriptors: BTreeMap<String, usize>,
    pub threads: BTreeMap<String, usize>,
    /// Number of `io_uring` descriptors among the descriptors.
    rings: usize,
}

impl Resources {
    /// Returns the number of descriptors without those of rings and their eventfds. These vary: the kernel may refuse a
    /// ring, and the file then uses threads.
    pub fn descriptors_without_rings(&self) -> usize {
        self.descriptors.values().sum::<usize>().saturating_sub(2 * self.rings)
    }

    /// Sets each number to the larger of the two.
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

    /// Returns the descriptors and threads of a process. Names of files below `dir` are relative to it.
    pub fn of(pid: Pid, dir: &Path) -> Self {
        let proc = PathBuf::from(format!("/proc/{}", pid.as_raw_nonzero()));
        let mut held = Self::default();
        for entry in fs::read_dir(proc.join("fd")).into_iter().flatten().flatten() {
            // A descriptor that was closed meanwhile has no target.
            if let Ok(target) = fs::read_link(entry.path()) {
                let name = target.to_string_lossy();
                held.rings += usize::from(name.ends_with("[io_uring]"));
                // The names of sockets and pipes end with a number, which is removed.
                let kind = name.split(":[").next().unwrap_or_default();
                let kind = kind.strip_prefix(&*dir.to_string_lossy()).unwrap_or(kind).to_owned();
                *held.descriptors.entry(kind).or_default() += 1;
            }
        }
        for entry in fs::read_dir(proc.join("task")).into_iter().flatten().flatten() {
            if let Ok(name) = fs::read_to_string(entry.path().join("comm")) {
                // Do not count worker threads: those started for large requests stay, at most one per CPU.
                if name.trim_end() != "worker" {
                    *held.threads.entry(name.trim_end().to_owned()).or_default() += 1;
                }
            }
        }
        held
    }
}

impl Server {
    /// Starts the server in `dir` and waits until it is ready. On failure, the error contains the output of the server.
    pub fn start(program: &Path, dir: &Path, devices: &[String], ublk: bool) -> Result<Self, String> {
        let mut command = command(program, dir, devices)?;
        if ublk {
            command.arg("--ublk");
        }
        let mut child = command.spawn().map_err(|e| format!("{}: {e}", program.display()))?;
        if let Err(output) = read_until_ready(BufReader::new(child.stdout.take().expect("it is a pipe"))) {
            let status = child.wait().map_err(|e| e.to_string())?;
            return Err(format!("the server did not start: {status}; output {output:?}"));
        }
        let pid = Pid::from_child(&child);
        let process = Mutex::new(KillOnDrop(child));
        Ok(Self { process, pid, dir: dir.to_owned(), control: dir.join(CONTROL) })
    }

    /// Sends a signal to the server. An error only means that the server has ended, which waiting for it shows.
    pub fn signal(&self, signal: Signal) {
        let _ = kill_process(self.pid, signal);
    }

    /// Returns the exit status, or `None` if the server has not ended.
    pub fn ended(&self) -> Option<ExitStatus> {
        self.process.lock().expect("nobody panics with it").0.try_wait().ok().flatten()
    }

    /// Waits for the end of the server for at most this time. Returns `None` if it has not ended.
    pub fn wait(&self, at_most: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            let ended = self.ended();
            if ended.is_some() || start.elapsed() > at_most {
                return ended;
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    fn proc(&self, what: &str) -> PathBuf {
        format!("/proc/{}/{what}", self.pid.as_raw_nonzero()).into()
    }

    pub fn resources(&self) -> Resources {
        Resources::of(self.pid, &self.dir)
    }

    /// Returns the anonymous and shared memory of the server, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let status = fs::read_to_string(self.proc("status")).unwrap_or_default();
        let of = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        ["RssAnon:", "RssShmem:"].iter().filter_map(|key| of(key)).sum::<u64>() << 10
    }

    /// Returns the stacks of all threads of the server, as text.
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

/// Returns the command that starts a server in `dir` with these device arguments.
pub fn command(program: &Path, dir: &Path, devices: &[String]) -> Result<Command, String> {
    let log = File::options().create(true).append(true).open(dir.join(LOG)).map_err(|e| e.to_string())?;
    let mut command = Command::new(program);
    command.arg("serve").args(devices);
    command.args(["--nbd", &format!("unix:{NBD}"), "--control", CONTROL]).current_dir(dir);
    command.env("XDG_RUNTIME_DIR", dir).env_remove("RUST_LOG");
    // Make the allocator return freed memory to the kernel at once: memory left at the end is then a leak.
    command.env("MALLOC_MMAP_THRESHOLD_", "65536").env("MALLOC_TRIM_THRESHOLD_", "65536");
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
    Ok(command)
}

/// Starts a server and kills it after a given time, even if it is not ready.
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

pub fn was_killed(status: ExitStatus) -> bool {
    status.signal() == Some(Signal::KILL.as_raw())
}

/// Returns the last lines of the log of the servers in `dir`.
pub fn log_tail(dir: &Path) -> String {
    let log = fs::read_to_string(dir.join(LOG)).unwrap_or_default();
    let lines: Vec<_> = log.lines().collect();
    lines[lines.len().saturating_sub(LOG_TAIL)..].join("\n")
}
