//! A server that is measured: a process that ends with this one, its CPU time and its memory.

use std::collections::HashSet;
use std::fs::File;
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Error, Result, anyhow};
use rustix::process::{Pid, Signal, kill_process};

use crate::{process, tool};

/// A server that does not listen by then never will.
const START_MAX: Duration = Duration::from_secs(20);
/// Of what a server complained of, so much is told.
const COMPLAINT_BYTES_MAX: usize = 400;
/// What `statfs` calls a file system in memory; a memfd lies in one.
const TMPFS_MAGIC: u64 = 0x0102_1994;
/// `st_blocks` counts these.
const BLOCK_BYTES: u64 = 512;

/// How long is waited, and how long between two looks.
#[derive(Debug, Clone, Copy)]
pub struct Patience {
    pub most: Duration,
    pub pause: Duration,
}

const START: Patience = Patience { most: START_MAX, pause: Duration::from_millis(5) };

/// A running server. Dropping it kills it; so does the end of this process, however it comes.
pub struct Server {
    child: Child,
    /// What it writes to stderr.
    complaints: File,
}

/// What a server occupies.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    /// Memory: the process's proportional set, and its files in memory where they hold more than it
    /// maps of them.
    pub bytes: u64,
    /// Blocks of other files that it has open for writing, removed ones too.
    pub disk_bytes: u64,
}

impl Server {
    /// Starts a program and returns when it greets at `socket`. An error tells what the program
    /// complained of.
    pub fn start(command: &Command, socket: &Path) -> Result<Self> {
        Self::start_until(command, &|| greet(socket).is_ok())
    }

    /// The same, and returns when it is ready.
    pub fn start_until(command: &Command, ready: &dyn Fn() -> bool) -> Result<Self> {
        let mut server = Self::spawn(command)?;
        server.wait_for(START, &mut || ready().then_some(()))?;
        Ok(server)
    }

    /// Starts a program, and does not wait for it.
    pub fn spawn(command: &Command) -> Result<Self> {
        let mut wrapped = tool::ends_with_us(command);
        let complaints = tempfile::tempfile()?;
        wrapped.stdin(Stdio::null()).stdout(Stdio::null()).stderr(complaints.try_clone()?);
        Ok(Self { child: wrapped.spawn().context(tool::NO_SETPRIV)?, complaints })
    }

    /// Looks for something until it is found. An error tells what the program complained of.
    pub fn wait_for<T>(&mut self, patience: Patience, look: &mut dyn FnMut() -> Option<T>) -> Result<T> {
        let begun = Instant::now();
        loop {
            if let Some(found) = look() {
                return Ok(found);
            }
            if let Some(status) = self.child.try_wait()? {
                return Err(self.with_complaints(anyhow!("the server ended: {status}")));
            }
            if begun.elapsed() > patience.most {
                return Err(self.with_complaints(anyhow!("the server does not listen, or is not done")));
            }
            std::thread::sleep(patience.pause);
        }
    }

    fn with_complaints(&mut self, error: Error) -> Error {
        match tail(&mut self.complaints) {
            Some(told) => error.context(told),
            None => error,
        }
    }

    /// Its process number.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has it end in order, and waits for that.
    pub fn end(mut self, most: Duration) -> Result<()> {
        kill_process(Pid::from_child(&self.child), Signal::TERM)?;
        let begun = Instant::now();
        loop {
            match self.child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(self.with_complaints(anyhow!("the server ended: {status}"))),
                None if begun.elapsed() > most => {
                    return Err(self.with_complaints(anyhow!("the server does not end")));
                }
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// CPU time until now, in ticks of the kernel, mostly 10 ms.
    pub fn cpu(&self) -> Result<Duration> {
        process::cpu_of(self.child.id())
    }

    /// What it occupies now.
    pub fn memory(&self) -> Result<Memory> {
        memory_of(self.child.id())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended; there is nobody to tell.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The end of what a server wrote to stderr.
fn tail(complaints: &mut File) -> Option<String> {
    let mut told = Vec::new();
    complaints.rewind().ok()?;
    complaints.read_to_end(&mut told).ok()?;
    let told = String::from_utf8_lossy(&told[told.len().saturating_sub(COMPLAINT_BYTES_MAX)..]);
    let line = told.split_whitespace().collect::<Vec<_>>().join(" ");
    (!line.is_empty()).then_some(line)
}

/// Reads a server's greeting and takes leave with `NBD_OPT_ABORT`, so that it has nothing to
/// complain of.
fn greet(socket: &Path) -> std::io::Result<()> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(START_MAX))?;
    // NBDMAGIC, IHAVEOPT, handshake flags.
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    // Client flags (fixed newstyle, no zeroes), then the option: IHAVEOPT, its number, no data.
    let mut leave = 3_u32.to_be_bytes().to_vec();
    leave.extend(b"IHAVEOPT");
    leave.extend([2_u32.to_be_bytes(), 0_u32.to_be_bytes()].concat());
    stream.write_all(&leave)?;
    // An acknowledgement, or the end.
    stream.read_to_end(&mut Vec::new()).map(drop)
}

fn memory_of(pid: u32) -> Result<Memory> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let rollup = std::fs::read_to_string(&path).with_context(|| path.clone())?;
    let (all, mapped) = proportional(&rollup).context(path)?;
    let (in_memory, disk_bytes) = files_of(pid)?;
    // What is mapped of a file in memory is one and the same memory.
    Ok(Memory { bytes: all - mapped + mapped.max(in_memory), disk_bytes })
}

/// Bytes of the proportional set, and those of them that are shared memory or files in memory.
fn proportional(rollup: &str) -> Option<(u64, u64)> {
    let bytes = |key: &str| {
        let line = rollup.lines().find_map(|line| line.strip_prefix(key))?;
        Some(line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()? << 10)
    };
    let (all, mapped) = (bytes("Pss:")?, bytes("Pss_Shmem:")?);
    (mapped <= all).then_some((all, mapped))
}

/// Bytes of the files that a process has open for writing: those in memory, and others.
fn files_of(pid: u32) -> Result<(u64, u64)> {
    let (mut in_memory, mut on_disk) = (0, 0);
    let mut seen = HashSet::new();
    let dir = format!("/proc/{pid}/fd");
    for entry in std::fs::read_dir(&dir).with_context(|| dir.clone())? {
        let entry = entry?;
        // One may be closed between the listing and the look at it.
        let Ok(file) = std::fs::metadata(entry.path()) else { continue };
        let name = entry.file_name();
        if !file.is_file()
            || !open_for_writing(pid, &name.to_string_lossy())
            || !seen.insert((file.dev(), file.ino()))
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
    fn the_set_and_its_shared_part_are_read() {
        let rollup =
            "1-2 ---p 0 00:00 0 [rollup]\nRss: 9 kB\nPss:     300 kB\nPss_Anon: 200 kB\nPss_Shmem:  100 kB\n";
        assert_eq!(proportional(rollup), Some((300 << 10, 100 << 10)));
        assert_eq!(proportional("Pss: 1 kB\n"), None);
        assert_eq!(proportional("Pss: 1 kB\nPss_Shmem: 2 kB\n"), None);
    }

    #[test]
    fn a_file_in_memory_is_memory_though_nothing_maps_it() {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("freestone-test", flags).unwrap());
        let before = memory_of(std::process::id()).unwrap();
        file.write_all_at(&vec![1; 64 << 20], 0).unwrap();
        let after = memory_of(std::process::id()).unwrap();
        // Other tests of this process come and go beside.
        assert!(after.bytes >= before.bytes + (32 << 20), "{before:?} {after:?}");
    }

    #[test]
    fn a_program_that_ends_is_told_with_its_complaint() {
        let dir = tempfile::tempdir().unwrap();
        let mut command = Command::new("sh");
        command.args(["-c", "echo this is why >&2; exit 7"]);
        let error = Server::start(&command, &dir.path().join("socket")).err().unwrap();
        let told = format!("{error:#}");
        assert!(told.contains("this is why") && told.contains('7'), "{told}");
        let absent = Command::new("no-such-server-anywhere");
        let error = Server::start(&absent, &dir.path().join("socket")).err().unwrap();
        assert!(format!("{error:#}").contains("no-such-server-anywhere"), "{error:#}");
    }
}
