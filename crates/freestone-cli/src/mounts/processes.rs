//! Processes of this machine: identity, search by a word of the command line, waiting, killing.

use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serde::{Deserialize, Serialize};

use crate::pidfd;

/// Identity of a process. The start time distinguishes it from a later process with the same process ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessId {
    /// Process ID.
    pub pid: i32,
    /// Start time, in clock ticks since boot.
    start: u64,
}

impl ProcessId {
    /// Returns the identity of the process that has this process ID now, or `None` if no process has it.
    pub fn of(pid: Pid) -> Option<Self> {
        let pid = pid.as_raw_nonzero().get();
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        Some(Self { pid, start: start_of(&stat)? })
    }

    /// Returns true if the process has not been reaped yet.
    pub fn exists(self) -> bool {
        Pid::from_raw(self.pid).and_then(Self::of) == Some(self)
    }
}

/// Returns the field `starttime` of a line of /proc/PID/stat. The name of the program, in parentheses, may contain
/// anything.
fn start_of(stat: &str) -> Option<u64> {
    const FIELDS_FROM_NAME_TO_START: usize = 19;
    let (_, after) = stat.rsplit_once(") ")?;
    after.split(' ').nth(FIELDS_FROM_NAME_TO_START)?.parse().ok()
}

/// Returns the process IDs of all processes.
pub fn all() -> impl Iterator<Item = Pid> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?))
}

/// A process with a pidfd, which cannot refer to a later process with the same process ID.
pub struct Process(OwnedFd);

impl Process {
    /// Returns the processes that have this word as an argument of their command line.
    pub fn with_word(word: &Path) -> Vec<Self> {
        let has_word = |pid: Pid| {
            let line = fs::read(format!("/proc/{}/cmdline", pid.as_raw_nonzero())).unwrap_or_default();
            line.split(|byte| *byte == 0).skip(1).any(|arg| arg == word.as_os_str().as_bytes())
        };
        let open = |pid: Pid| {
            let process = pidfd_open(pid, PidfdFlags::empty()).ok()?;
            // Checked again: before the pidfd existed, the process ID could have been reused.
            has_word(pid).then_some(Self(process))
        };
        all().filter(|pid| has_word(*pid)).filter_map(open).collect()
    }

    /// Waits for the end of the process, for at most `max`. Returns true if it ended.
    pub fn wait(&self, max: Duration) -> bool {
        pidfd::wait(&self.0, Some(max)).unwrap_or(false)
    }

    /// Kills the process, without waiting for its end.
    pub fn kill(&self) {
        // The signal cannot be sent if the process has ended.
        let _ = pidfd_send_signal(&self.0, Signal::KILL);
    }
}

#[cfg(test)]
mod tests {
    use super::{ProcessId, start_of};

    #[test]
    fn start_time_is_read_after_odd_program_name() {
        let stat = "12 (a) b (c)) S 1 12 12 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(start_of(stat), Some(4711));
    }

    #[test]
    fn process_id_of_this_process_is_stable() {
        let own = || ProcessId::of(rustix::process::getpid());
        assert!(own().is_some_and(|own| own.start > 0));
        assert_eq!(own(), own());
    }
}
