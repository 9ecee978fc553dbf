//! Runs a check: a shell command in a process group of its own, for a limited time, with bounded output.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::process::{Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

/// Most output of a check that is kept, in bytes: half from its start, half from its end.
const OUTPUT_MAX_BYTES: usize = 64 << 10;
/// Interval at which a running check looks for an interruption.
const SLICE: Duration = Duration::from_millis(100);
/// Longest time in which output is read after the end of the check.
const DRAIN_MAX: Duration = Duration::from_millis(200);

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandEnd {
    /// The command ended by itself.
    Exited(ExitStatus),
    /// The time was over, and the command was killed.
    TimedOut,
    /// The caller stopped the command.
    Stopped,
}

/// First and last bytes of an output.
#[derive(Debug, Default)]
struct Output {
    head: Vec<u8>,
    tail: Vec<u8>,
    /// Number of bytes dropped between the two.
    dropped: u64,
}

impl Output {
    fn push(&mut self, bytes: &[u8]) {
        let half = OUTPUT_MAX_BYTES / 2;
        let (first, rest) = bytes.split_at(bytes.len().min(half - self.head.len()));
        self.head.extend_from_slice(first);
        self.tail.extend_from_slice(rest);
        let excess = self.tail.len().saturating_sub(half);
        self.tail.drain(..excess);
        self.dropped += excess as u64;
    }

    /// Reads what is available. Returns true at the end of the output.
    fn read(&mut self, reader: &mut File) -> io::Result<bool> {
        let mut bytes = [0; 16 << 10];
        loop {
            match reader.read(&mut bytes) {
                Ok(0) => return Ok(true),
                Ok(count) => self.push(&bytes[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }

    fn into_text(mut self) -> String {
        if self.dropped > 0 {
            self.head.extend_from_slice(format!("\n[{} bytes are omitted]\n", self.dropped).as_bytes());
        }
        self.head.extend_from_slice(&self.tail);
        String::from_utf8_lossy(&self.head).into_owned()
    }
}

/// Runs the command until it ends, `timeout` is over, or `should_stop` returns true. Afterwards all processes of its
/// group are killed. Returns the end of the command, and its output.
///
/// # Errors
/// Fails if the command cannot be started or waited for.
pub fn run(
    command: &mut Command,
    timeout: Duration,
    should_stop: &dyn Fn() -> bool,
) -> Result<(CommandEnd, String)> {
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).context("cannot create a pipe")?;
    let mut reader = File::from(reader);
    rustix::io::ioctl_fionbio(&reader, true).context("cannot set up a pipe")?;
    let both = writer.try_clone().context("cannot duplicate a pipe")?;
    command.stdin(Stdio::null()).stdout(writer).stderr(both).process_group(0);
    let started = Instant::now();
    let mut child = command.spawn().context("cannot start sh")?;
    // Otherwise the pipe would stay open after the end of the command.
    command.stdout(Stdio::null()).stderr(Stdio::null());
    let group = Pid::from_child(&child);
    let pidfd = pidfd_open(group, PidfdFlags::empty());
    let mut output = Output::default();
    let watched = pidfd.map_err(io::Error::from).and_then(|pidfd| {
        loop {
            let left = timeout.saturating_sub(started.elapsed());
            if left.is_zero() {
                return Ok(Some(CommandEnd::TimedOut));
            }
            if should_stop() {
                return Ok(Some(CommandEnd::Stopped));
            }
            let is_closed = output.read(&mut reader)?;
            let mut fds = [PollFd::new(&pidfd, PollFlags::IN), PollFd::new(&reader, PollFlags::IN)];
            // A pipe that was closed is always ready, so only the end of the command is waited for.
            let fds = if is_closed { &mut fds[..1] } else { &mut fds[..] };
            let slice = Timespec::try_from(left.min(SLICE)).unwrap_or_default();
            match poll(fds, Some(&slice)) {
                Ok(_) if !fds[0].revents().is_empty() => return Ok(None),
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    });
    // The command leaves no process that could use the disk of the next state. The group exists until its leader is
    // reaped, so its number cannot belong to other processes.
    let _ = kill_process_group(group, Signal::KILL);
    let status = child.wait().context("cannot wait for a check")?;
    let end = watched.context("cannot watch a check")?.unwrap_or(CommandEnd::Exited(status));
    let until = Instant::now() + DRAIN_MAX;
    while !output.read(&mut reader)? && Instant::now() < until {
        let mut fds = [PollFd::new(&reader, PollFlags::IN)];
        let slice = Timespec::try_from(until.saturating_duration_since(Instant::now())).unwrap_or_default();
        // An interrupted wait is repeated until the time is over.
        let _ = poll(&mut fds, Some(&slice));
    }
    Ok((end, output.into_text()))
}

/// Describes an exit status.
pub fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("ended by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(text: &str, timeout: u64) -> (CommandEnd, String) {
        let mut command = Command::new("sh");
        run(command.arg("-c").arg(text), Duration::from_millis(timeout), &|| false).unwrap()
    }

    #[test]
    fn output_is_bounded_and_keeps_both_ends() {
        let (end, text) = sh("echo first; head -c 1000000 /dev/zero | tr '\\0' x; echo last >&2", 20_000);
        assert!(matches!(end, CommandEnd::Exited(status) if status.success()), "{end:?}");
        assert!(text.starts_with("first\nx") && text.ends_with("last\n"), "{} bytes", text.len());
        assert!(
            text.len() < OUTPUT_MAX_BYTES + 100 && text.contains("bytes are omitted"),
            "{} bytes",
            text.len()
        );
    }

    #[test]
    fn timeout_kills_the_whole_group() {
        let begun = Instant::now();
        let (end, text) = sh("echo out; sleep 60 & sleep 60", 300);
        assert_eq!((end, text.as_str()), (CommandEnd::TimedOut, "out\n"));
        // A background process does not hold up a check that has ended.
        let (end, _) = sh("sleep 60 & exit 3", 20_000);
        assert!(matches!(end, CommandEnd::Exited(status) if describe(status) == "exit status 3"), "{end:?}");
        assert!(begun.elapsed() < Duration::from_secs(15));
    }

    #[test]
    fn interruption_stops_the_command() {
        let mut command = Command::new("sleep");
        let (end, _) = run(command.arg("60"), Duration::from_secs(60), &|| true).unwrap();
        assert_eq!(end, CommandEnd::Stopped);
    }
}
