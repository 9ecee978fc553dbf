//! What this process is to the kernel: what it uses of memory, how many files it may open, and that
//! disks are served by it.

use std::fs;
use std::io;
use std::process::{Child, Command};
use std::sync::Arc;

use anyhow::{Context as _, Result};
use freestone_spec::machine::kib_line;
use rustix::process::{Resource, Rlimit, configure_io_flusher_behavior};
use serde::{Deserialize, Serialize};
use signal_hook::consts::SIGXFSZ;
use signal_hook::flag;

/// Raises the soft limit of open files to the hard one: a thousand sockets with their clients take
/// more than the usual
/// 1024. Returns the former soft limit, where it was changed.
pub fn raise_open_files() -> Option<u64> {
    let Rlimit { current, maximum } = rustix::process::getrlimit(Resource::Nofile);
    let former = current?;
    if maximum.is_some_and(|most| former >= most) {
        return None;
    }
    // If that is refused, the limit is what it was.
    rustix::process::setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }).ok()?;
    Some(former)
}

/// Has a write beyond `RLIMIT_FSIZE` fail with EFBIG and not end the process. A handler takes SIGXFSZ, not
/// `SIG_IGN`, so that programs that this one starts have the default action again.
///
/// # Errors
/// The signal cannot be taken over.
pub fn survive_file_size_limit() -> io::Result<()> {
    flag::register(SIGXFSZ, Arc::default()).map(drop)
}

/// Makes this thread, and all that are started after it, I/O flushers: the kernel finds memory for
/// them without writing to any disk, which may be one of ours, and slows their writes down by the
/// state of the disk they write to alone. It takes `CAP_SYS_RESOURCE`; without, nothing changes.
///
/// It is called while there is no other thread, because each thread has its own mark, which no other
/// one can set. So it is not left until the first block device is shown: who mounts an NBD export on
/// this machine needs it as well.
pub fn become_io_flusher() {
    let _ = configure_io_flusher_behavior(true);
}

/// Starts a program that is a user of disks, not a server: it does not inherit that mark.
pub fn spawn(command: &mut Command) -> io::Result<Child> {
    let _ = configure_io_flusher_behavior(false);
    let child = command.spawn();
    become_io_flusher();
    child
}

/// Memory of this process as the kernel counts it, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessMemory {
    /// Resident set.
    pub rss_bytes: u64,
    /// The same with every shared page divided by the number of its users.
    pub pss_bytes: u64,
}

/// Reads `/proc/self/smaps_rollup`.
pub fn process_memory() -> Result<ProcessMemory> {
    let text =
        fs::read_to_string("/proc/self/smaps_rollup").context("cannot read /proc/self/smaps_rollup")?;
    let line = |key| kib_line(&text, key).with_context(|| format!("/proc/self/smaps_rollup has no {key}"));
    Ok(ProcessMemory { rss_bytes: line("Rss:")?, pss_bytes: line("Pss:")? })
}

#[cfg(test)]
mod tests {
    use super::process_memory;

    #[test]
    fn this_process_answers() {
        let process = process_memory().unwrap();
        assert!(process.pss_bytes > 0 && process.rss_bytes >= process.pss_bytes);
    }
}
