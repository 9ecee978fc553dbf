//! Server process under measurement. The process ends with this one, and its CPU time and memory
//! can be read.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow};
use freestone_testkit::nbd::handshake;
use freestone_testkit::nbd::wire::{ABORT, CLIENT_FLAGS, option};
use freestone_testkit::process::KillOnDrop;
use rustix::process::{Pid, Signal, kill_process};

use super::run_dir::ServerDir;
use super::tool;
use crate::measure::process;

/// Time limit until a server listens.
const START_MAX: Duration = Duration::from_secs(20);
/// Maximum bytes of a server's stderr in an error.
const STDERR_BYTES_MAX: usize = 400;
/// `f_type` of tmpfs, which memfds belong to.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// Unit of `st_blocks`, in bytes.
const BLOCK_BYTES: u64 = 512;

/// Time limit of a wait, and the interval of its checks.
#[derive(Debug, Clone, Copy)]
pub struct WaitLimits {
    pub timeout: Duration,
    pub pause: Duration,
}

const START: WaitLimits = WaitLimits { timeout: START_MAX, pause: Duration::from_millis(5) };

/// A running server. The process is killed on drop, and by the kernel when this process ends in any
/// way.
pub struct Server {
    child: KillOnDrop,
    /// File that receives the server's stderr.
    stderr: File,
}

/// A running server and its directory. Drop ends the server, then deletes the files.
pub struct Served {
    pub server: Server,
    pub dir: ServerDir,
}

/// Memory and disk space of a server.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Bytes of memory: the proportional set size of the process, plus the part of its files in
    /// tmpfs that the process does not map.
    pub bytes: u64,
    /// Bytes allocated on disk for other files that the process has open for writing, including
    /// deleted files.
    pub disk_bytes: u64,
}

impl Server {
    /// Starts a program and waits until an NBD server greets at `socket`. The error contains the
    /// program's stderr.
    pub fn start(command: &Command, socket: &Path) -> Result<Self> {
        Self::start_until(command, &|| probe(socket).is_ok())
    }

    /// Starts a program and waits until `ready` returns true.
    pub fn start_until(command: &Command, ready: &dyn Fn() -> bool) -> Result<Self> {
        let mut server = Self::spawn(command)?;
        server.wait_for(START, &mut || ready().then_some(()))?;
        Ok(server)
    }

    /// Starts a program without waiting for it.
    pub fn spawn(command: &Command) -> Result<Self> {
        let mut wrapped = tool::die_with_parent(command);
        let stderr = tempfile::tempfile()?;
        wrapped.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr.try_clone()?);
        Ok(Self { child: KillOnDrop(wrapped.spawn().context(tool::NO_SETPRIV)?), stderr })
    }

    /// Calls `look` until it returns a value, or fails after the time limit. The error contains the
    /// program's stderr.
    pub fn wait_for<T>(&mut self, limits: WaitLimits, look: &mut dyn FnMut() -> Option<T>) -> Result<T> {
        let started = Instant::now();
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            if let Some(status) = self.child.0.try_wait()? {
                return Err(self.with_stderr(anyhow!("the server ended: {status}")));
            }
            if started.elapsed() > limits.timeout {
                return Err(self.with_stderr(anyhow!("the server is not ready within the time limit")));
            }
            std::thread::sleep(limits.pause);
        }
    }

    fn with_stderr(&mut self, error: Error) -> Error {
        match tail(&mut self.stderr) {
            Some(error_text) => error.context(error_text),
            None => error,
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.0.id()
    }

    /// Sends SIGTERM and waits for the end of the process.
    pub fn end(mut self, timeout: Duration) -> Result<()> {
        kill_process(Pid::from_child(&self.child.0), Signal::TERM)?;
        let started = Instant::now();
        loop {
            match self.child.0.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.with_stderr(anyhow!("the server ended: {status}"))),
                None if started.elapsed() > timeout => {
                    return Err(self.with_stderr(anyhow!("the server does not end within the time limit")));
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Returns the CPU time of the server so far. The resolution is one tick of the kernel, usually
    /// 10 ms.
    pub fn cpu(&self) -> Result<Duration> {
        process::cpu_of(self.child.0.id())
    }

    pub fn memory(&self) -> Result<Memory> {
        memory_of(self.child.0.id())
    }
}

/// Returns the end of the server's stderr as one line, or None if the stderr is empty.
fn tail(stderr: &mut File) -> Option<String> {
    let mut bytes = Vec::new();
    stderr.rewind().ok()?;
    stderr.read_to_end(&mut bytes).ok()?;
    let text = String::from_utf8_lossy(&bytes[bytes.len().saturating_sub(STDERR_BYTES_MAX)..]);
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    (!line.is_empty()).then_some(line)
}

/// Reads a server's greeting and ends the handshake with `NBD_OPT_ABORT`, so that the server logs
/// no error.
fn probe(socket: &Path) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(START_MAX))?;
    handshake::greet(&mut stream, CLIENT_FLAGS)?;
    stream.write_all(&option(ABORT, &[]))?;
    // The server acknowledges the option or closes the connection.
    stream.read_to_end(&mut Vec::new()).map(drop)
}

fn memory_of(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let rollup = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let (all, mapped) = proportional(&rollup).context(path)?;
    let (in_memory, disk_bytes) = files_of(pid)?;
    // Mapped pages of a file in tmpfs are the same memory as the file's blocks.
    Ok(Memory { bytes: all - mapped + mapped.max(in_memory), disk_bytes })
}

/// Returns the proportional set size in bytes, and the part of it that is shared memory and files
/// in tmpfs.
fn proportional(rollup: &str) -> Option<(u64, u64)> {
    let bytes = |key: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(key))?;
        Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
    };
    let (all, mapped) = (bytes("Pss:")?, bytes("Pss_Shmem:")?);
    (mapped <= all).then_some((all, mapped))
}

/// Returns the bytes allocated for the files that a process has open for writing: in tmpfs, and
/// elsewhere.
fn files_of(pid: u32) -> Result<(u64, u64)> {
    let (mut in_memory, mut on_disk) = (0, 0);
    let mut counted_files = HashSet::new();
    let dir = format!("/proc/{pid}/fd");
    for entry in std::fs::read_dir(&dir).with_context(|| dir.clone())? {
        let entry = entry?;
        // The file may have been closed since the listing.
        let Ok(file) = std::fs::metadata(entry.path()) else { continue };
        let name = entry.file_name();
        if !file.is_file()
            || !open_for_writing(pid, &name.to_string_lossy())
            || !counted_files.insert((file.dev(), file.ino()))
        {
            continue;
        }
        let Ok(system) = rustix::fs::statfs(entry.path()) else { continue };
        let side = if system.f_type as u64 == TMPFS_MAGIC { &mut in_memory } else { &mut on_disk };
        *side += file.blocks() * BLOCK_BYTES;
    }
    Ok((in_memory, on_disk))
}

fn open_for_writing(pid: u32, descriptor: &str) -> bool {
    let info = std::fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & rustix::fs::OFlags::RWMODE.bits() != 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn pss_and_shared_part_are_parsed() {
        let rollup =
            "1-2 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss:     300 kB\nPss_Anon: 200 kB\nPss_Shmem:  100 kB\n";
        assert_eq!(proportional(rollup), Some((300 << 10, 100 << 10)));
        assert_eq!(proportional("Pss: 1 kB\n"), None);
        assert_eq!(proportional("Pss: 1 kB\nPss_Shmem: 2 kB\n"), None);
    }

    #[test]
    fn unmapped_memfd_counts_as_memory() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("freestone-test", flags).unwrap());
        let before = memory_of(std::process::id()).unwrap();
        file.write_all_at(&vec![1; 64 << 20], 0).unwrap();
        let after = memory_of(std::process::id()).unwrap();
        // Other tests of this process allocate and free memory at the same time.
        assert!(after.bytes >= before.bytes + (32 << 20), "{before:?} {after:?}");
    }

    #[test]
    fn start_error_contains_stderr() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo this is why >&2; exit 7"]);
        let error = Server::start(&command, &dir.path().join("socket")).err().unwrap();
        let error_text = format!("{error:#}");
        assert!(error_text.contains("this is why") && error_text.contains('7'), "{error_text}");
        let absent = Command::new("no-such-server-anywhere");
        let error = Server::start(&absent, &dir.path().join("socket")).err().unwrap();
        assert!(format!("{error:#}").contains("no-such-server-anywhere"), "{error:#}");
    }
}
