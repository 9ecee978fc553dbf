//! ext4 on a RAM disk, as in the sources of experiments 1 and 2: an NBD server in this process,
//! nbdfuse and a loop device.
//!
//! The mounts are in nbdfuse's own mount namespace, so no other process sees them. When this
//! process ends in any way, nbdfuse ends too, and with it the mounts and the loop device.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use freestone::device::{Buffer, Completion, Device, Extent, Geometry, IoBuf, Op, Request, TryResult};
use freestone::ram::Ram;
use freestone_benches::export::export;
use freestone_benches::tool;
use freestone_core::variants::{self, Intent};
use freestone_nbd::Server;

/// Time limit for nbdfuse to mount, and to end.
const READY_MAX: Duration = Duration::from_secs(20);
const STEP: Duration = Duration::from_millis(10);
/// mke2fs options that minimise metadata: few inodes, no journal.
const MAKE: [&str; 10] = ["-q", "-F", "-t", "ext4", "-m", "0", "-N", "64", "-O", "^has_journal"];

/// Setup, for the description of a table.
pub const HOW: &str = "ext4 without a journal on the RAM disk, through our NBD server in this process, nbdfuse \
                       and a loop device with direct I/O; a file per thread, opened with O_DIRECT. A request \
                       passes ext4, the loop device, FUSE, nbdfuse and a socket.";
/// Reason why two threads show no gain with ext4.
pub const REASON: &str = "Here a request passes ext4, a loop device, FUSE and a socket, which take many times \
                          as long as the old lock is held, so the gain of a finer lock does not show. The \
                          table without a file system shows it.";

/// Returns the disk size for files of `files_bytes` bytes in total, with space for the file
/// system's metadata.
pub fn disk_bytes(files_bytes: u64) -> u64 {
    const MIB: u64 = 1 << 20;
    (files_bytes + files_bytes / 32).next_multiple_of(MIB) + 8 * MIB
}

/// A mounted ext4 file system. Drop unmounts it and ends nbdfuse.
pub struct Ext4 {
    /// Lock held for reading during each request. Locking it for writing waits for requests in
    /// progress.
    requests: Arc<RwLock<()>>,
    /// nbdfuse, which owns the mount namespace.
    fuse: Child,
    // Must outlive nbdfuse; drop ends nbdfuse first.
    _server: Server,
    dir: tempfile::TempDir,
}

/// The RAM disk behind the lock of requests: a file system sends requests at any time.
struct GuardedRam {
    ram: Ram,
    requests: Arc<RwLock<()>>,
}

impl GuardedRam {
    /// Runs `work` on the RAM disk; the engine's locks and streams do not change meanwhile.
    fn run_request<T>(&self, intent: Intent, work: impl FnOnce(&Ram) -> T) -> T {
        let _request = self.requests.read().unwrap_or_else(PoisonError::into_inner);
        variants::set_intent(intent);
        work(&self.ram)
    }
}

fn intent(request: &Request) -> Intent {
    if request.op == Op::Read { Intent::Read } else { Intent::Write }
}

impl Device for GuardedRam {
    fn geometry(&self) -> Geometry {
        self.ram.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> freestone::device::Result<TryResult> {
        self.run_request(intent(request), |ram| ram.try_io(request, buffer))
    }

    // A RAM disk without a backing device completes a request before this returns.
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.run_request(intent(&request), |ram| ram.submit(request, buffer, done));
    }

    fn extents(
        &self,
        offset: u64,
        len: u64,
        row: &mut dyn FnMut(Extent) -> bool,
    ) -> freestone::device::Result<u64> {
        self.run_request(Intent::Write, |ram| ram.extents(offset, len, row))
    }
}

impl Ext4 {
    /// Creates a file system on `ram` and mounts it.
    ///
    /// # Errors
    /// Fails if the process is not root or a program is missing; the error names its
    /// package.
    pub fn new(ram: Ram) -> Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "--ext4 mounts a file system: run it as root");
        let dir = tempfile::tempdir()?;
        for name in ["fuse", "mnt"] {
            std::fs::create_dir(dir.path().join(name))?;
        }
        let requests = Arc::new(RwLock::new(()));
        let guarded = GuardedRam { ram, requests: requests.clone() };
        let server = export(Arc::new(guarded), &dir.path().join("socket"))?;
        let mut nbdfuse = Command::new("unshare");
        nbdfuse.args(["--mount", "--propagation", "private", "nbdfuse"]);
        nbdfuse.arg("-P").arg(dir.path().join("pid")).arg(dir.path().join("fuse/disk"));
        nbdfuse.arg(format!("nbd+unix:///?socket={}", dir.path().join("socket").display()));
        let mut nbdfuse = tool::die_with_parent(&nbdfuse);
        let fuse = nbdfuse.stdin(Stdio::null()).stdout(Stdio::null()).spawn().context(tool::NO_SETPRIV)?;
        let mut ext4 = Self { requests, fuse, _server: server, dir };
        ext4.mount()?;
        Ok(ext4)
    }

    fn mount(&mut self) -> Result<()> {
        let started = Instant::now();
        while !self.dir.path().join("pid").exists() {
            if let Some(status) = self.fuse.try_wait()? {
                anyhow::bail!("nbdfuse ended with {status}; its packages are called nbdfuse and fuse3");
            }
            ensure!(started.elapsed() < READY_MAX, "nbdfuse does not mount");
            std::thread::sleep(STEP);
        }
        let disk = self.dir.path().join("fuse/disk");
        tool::run(Command::new("mke2fs").args(MAKE).arg(self.path_in_namespace("fuse/disk")), "e2fsprogs")?;
        self.run_in_namespace(
            "mount",
            ["-o", "loop,noatime"].map(OsStr::new),
            &[&disk, &self.dir.path().join("mnt")],
        )?;
        // Unmounting also detaches the loop device. The cache of a loop device would keep requests
        // from the disk, so direct I/O is enabled.
        let found = self.run_in_namespace(
            "findmnt",
            ["-n", "-o", "SOURCE"].map(OsStr::new),
            &[&self.dir.path().join("mnt")],
        )?;
        tool::run(Command::new("losetup").arg("--direct-io=on").arg(found.trim()), "mount")?;
        Ok(())
    }

    /// Runs a command in the mount namespace.
    fn run_in_namespace<const N: usize>(
        &self,
        program: &str,
        options: [&OsStr; N],
        paths: &[&Path],
    ) -> Result<String> {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.fuse.id())).arg(program);
        tool::run(command.args(options).args(paths), "util-linux and mount")
    }

    /// Returns the path of a file in the mount namespace.
    fn path_in_namespace(&self, path: &str) -> PathBuf {
        let dir = self.dir.path().strip_prefix("/").unwrap_or(self.dir.path());
        Path::new("/proc").join(self.fuse.id().to_string()).join("root").join(dir).join(path)
    }

    /// Creates `count` empty files and opens them with `O_DIRECT`.
    pub fn files(&self, count: usize) -> Result<Vec<File>> {
        let mut open = OpenOptions::new();
        open.read(true).write(true).create(true).truncate(true);
        open.custom_flags(rustix::fs::OFlags::DIRECT.bits() as i32);
        (0..count)
            .map(|number| {
                open.open(self.path_in_namespace(&format!("mnt/{number}")))
                    .context("a file in the mounted file system")
            })
            .collect()
    }

    /// Returns the lock of requests. Locking it for writing waits for requests in progress.
    pub fn requests(&self) -> Arc<RwLock<()>> {
        self.requests.clone()
    }
}

impl Drop for Ext4 {
    fn drop(&mut self) {
        // The unmount may fail, because the kernel unmounts anyway when nbdfuse ends.
        let _ = self.run_in_namespace("umount", [], &[&self.dir.path().join("mnt")]);
        let _ = self.run_in_namespace("umount", [], &[&self.dir.path().join("fuse")]);
        let started = Instant::now();
        while matches!(self.fuse.try_wait(), Ok(None)) && started.elapsed() < READY_MAX {
            std::thread::sleep(STEP);
        }
        let _ = self.fuse.kill();
        let _ = self.fuse.wait();
    }
}

#[cfg(test)]
mod tests {
    use freestone::PAGE_BYTES;

    use super::*;
    use crate::load::disk::Disk as _;
    use freestone_benches::setup::new_ram;

    #[test]
    fn files_are_on_disk_and_drop_removes_everything() {
        if !rustix::process::geteuid().is_root() {
            assert!(Ext4::new(new_ram(16 << 20).unwrap()).is_err());
            return;
        }
        let ext4 = Ext4::new(new_ram(16 << 20).unwrap()).unwrap();
        let files = ext4.files(2).unwrap();
        let mut page = IoBuf::zeroed(PAGE_BYTES).unwrap();
        page.fill(7);
        files[1].write(4096, &page).unwrap();
        page.fill(0);
        files[1].read(4096, &mut page).unwrap();
        assert!(page.iter().all(|byte| *byte == 7));
        files[1].empty(0, 8192).unwrap();
        assert!(files[1].read(4096, &mut page).is_err());
        let dir = ext4.dir.path().to_owned();
        drop(files);
        drop(ext4);
        assert!(!dir.exists());
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(dir.to_str().unwrap()));
    }
}
