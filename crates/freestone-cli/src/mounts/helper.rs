//! Runs programs for mounts, such as mount(8), each for a limited time.

use std::env;
use std::fs::File;
use std::io::{Read as _, Seek as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rustix::io::{FdFlags, fcntl_setfd};

/// Directories of administrators' tools, for users whose PATH lacks them.
const SYSTEM_DIRS: [&str; 4] = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"];
/// Timeout of a program whose step does not wait for a disk of the server.
pub const STEP_MAX: Duration = Duration::from_secs(30);
/// Longest wait for the end of a killed program, which can take longer if the program waits for a disk.
const KILLED_MAX: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_millis(1);
/// Longest part of a program's message that an error quotes, in bytes.
const MESSAGE_BYTES_MAX: u64 = 2000;

/// Returns the path of a program, or None if it is not installed.
pub fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let dirs = env::split_paths(&path).chain(SYSTEM_DIRS.iter().map(PathBuf::from));
    dirs.map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Returns a command for a program, with messages in English. Fails if the program is not installed.
pub fn command(program: &str) -> Result<Command> {
    let Some(path) = find(program) else { bail!("{program} is not installed") };
    let mut command = Command::new(path);
    command.env("LC_ALL", "C").current_dir("/").stdin(Stdio::null());
    Ok(command)
}

/// Outcome of running a program.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Exited with status 0.
    Done,
    /// Failed, with the program's message in one line.
    Failed(String),
    /// Did not end in time.
    TimedOut,
}

impl Outcome {
    /// Fails with an error that names the step, unless the program succeeded.
    pub fn require(self, step: &str) -> Result<()> {
        match self {
            Self::Done => Ok(()),
            Self::Failed(message) => bail!("{step}: {message}"),
            Self::TimedOut => bail!("{step}: it does not end"),
        }
    }
}

/// A running program, whose messages are collected in a temporary file.
pub struct Running {
    child: Child,
    messages: File,
}

impl Running {
    /// Starts a program. The program inherits `lock`, so that the lock is held until the program ends, even if this
    /// process is killed.
    pub fn start(command: &mut Command, lock: Option<&File>) -> Result<Self> {
        let name = command.get_program().to_string_lossy().into_owned();
        let messages = tempfile::tempfile().context("cannot create a temporary file")?;
        let both = || messages.try_clone().with_context(|| format!("cannot start {name}"));
        command.stdout(both()?).stderr(both()?);
        if let Some(lock) = lock {
            fcntl_setfd(lock, FdFlags::empty()).context("cannot pass the lock on")?;
        }
        let child = command.spawn().with_context(|| format!("cannot start {name}"));
        if let Some(lock) = lock {
            fcntl_setfd(lock, FdFlags::CLOEXEC).context("cannot keep the lock")?;
        }
        Ok(Self { child: child?, messages })
    }

    /// Waits until the program has ended, for at most `max`.
    pub fn wait(&mut self, max: Duration) -> Result<Outcome> {
        let end = Instant::now() + max;
        loop {
            match self.child.try_wait().context("cannot wait for a program")? {
                Some(status) if status.success() => return Ok(Outcome::Done),
                Some(status) => {
                    let message = self.message();
                    return Ok(Outcome::Failed(if message.is_empty() {
                        status.to_string()
                    } else {
                        message
                    }));
                }
                None if Instant::now() >= end => return Ok(Outcome::TimedOut),
                None => sleep(PAUSE),
            }
        }
    }

    /// Kills the program, and waits for up to [`KILLED_MAX`] until it has ended.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.wait(KILLED_MAX);
    }

    fn message(&mut self) -> String {
        let mut text = Vec::new();
        // If the message cannot be read, it is empty, and the status is reported instead.
        let read = self
            .messages
            .rewind()
            .and_then(|()| self.messages.by_ref().take(MESSAGE_BYTES_MAX).read_to_end(&mut text));
        drop(read);
        one_line(&String::from_utf8_lossy(&text))
    }
}

/// Returns a program's message as one line.
pub fn one_line(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    lines.join("; ")
}

/// Runs a program to its end, or kills it after [`STEP_MAX`].
pub fn run(command: &mut Command, lock: Option<&File>) -> Result<Outcome> {
    let mut running = Running::start(command, lock)?;
    let outcome = running.wait(STEP_MAX)?;
    if outcome == Outcome::TimedOut {
        running.kill();
    }
    Ok(outcome)
}

/// Waits until `done` returns true, for at most `max`. Returns false after a timeout.
pub fn wait_until(max: Duration, mut done: impl FnMut() -> bool) -> bool {
    let end = Instant::now() + max;
    while !done() {
        if Instant::now() >= end {
            return false;
        }
        sleep(PAUSE);
    }
    true
}

/// Returns the content of a small file without its last newline, or `None` if it cannot be read.
pub fn line_of(path: &Path) -> Option<String> {
    std::fs::read_to_string(path).ok().map(|text| text.trim_end_matches('\n').to_owned())
}
