//! An export with a file system, mounted through nbdfuse and a loop device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::clients::tools::{ok, root_tool, uri};
use crate::harness::Serve;

const STEP: Duration = Duration::from_millis(20);
const READY_MAX: Duration = Duration::from_secs(20);

/// Cleanup commands that run in reverse order on drop, so also after a failed test.
#[derive(Default)]
struct Undo(Vec<Command>);

impl Undo {
    fn add(&mut self, name: &str, args: &[&str]) {
        let mut command = root_tool(name);
        command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
        self.0.push(command);
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        for mut command in self.0.drain(..).rev() {
            // Errors are ignored: after a successful test most commands have nothing left to undo.
            let _ = command.status();
        }
    }
}

/// An nbdfuse process in the foreground.
struct Fuse(Child);

impl Drop for Fuse {
    fn drop(&mut self) {
        // nbdfuse ends when its mount is unmounted, or at the latest when timeout(1) kills it.
        let start = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) && start.elapsed() < READY_MAX {
            sleep(STEP);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits until `done` returns true. Fails after a deadline.
#[track_caller]
fn wait_until(what: &str, done: impl Fn() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < READY_MAX, "{what}: not within {READY_MAX:?}");
        sleep(STEP);
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

/// An export that can be mounted. Drop unmounts the file system and ends nbdfuse.
pub struct Mounted {
    // Fields are dropped in this order: cleanup of mounts and loop devices first, then nbdfuse.
    undo: Undo,
    _fuse: Fuse,
    disk: PathBuf,
    mnt: PathBuf,
    /// Path of the loop device while the file system is mounted.
    device: Option<String>,
}

impl Mounted {
    /// Makes the export available as a file below `dir`, by nbdfuse. The file system is not mounted
    /// yet.
    pub fn new(serve: &Serve, export: &str, dir: &Path) -> Self {
        let (fuse_dir, mnt) = (dir.join("fuse"), dir.join("mnt"));
        fs::create_dir(&fuse_dir).unwrap();
        fs::create_dir(&mnt).unwrap();
        let (disk, pid) = (fuse_dir.join("disk"), dir.join("nbdfuse.pid"));
        let mut nbdfuse = root_tool("nbdfuse");
        nbdfuse.arg("-P").arg(&pid).arg(&disk).arg(uri(serve, export));
        let fuse = Fuse(nbdfuse.spawn().unwrap());
        let mut undo = Undo::default();
        undo.add("umount", &["-l", text(&fuse_dir)]);
        let mounted = Self { undo, _fuse: fuse, disk, mnt, device: None };
        wait_until("nbdfuse mounts", || pid.exists());
        mounted
    }

    /// Returns the mount point.
    pub fn path(&self) -> &Path {
        &self.mnt
    }

    /// Attaches a loop device to the file of the export. Returns the path of the loop device.
    fn attach(&mut self) -> String {
        let device = ok(root_tool("losetup").args(["--find", "--show"]).arg(&self.disk)).trim().to_owned();
        self.undo.add("losetup", &["-d", &device]);
        device
    }

    /// Creates an ext4 file system on the export.
    pub fn make_ext4(&mut self) {
        let device = self.attach();
        ok(root_tool("mke2fs").args(["-q", "-t", "ext4", "-F", &device]));
        ok(root_tool("losetup").args(["-d", &device]));
    }

    /// Mounts the file system on a new loop device, whose page cache is empty.
    pub fn mount(&mut self) {
        let device = self.attach();
        ok(root_tool("mount").args([&device, text(&self.mnt)]));
        self.undo.add("umount", &["-l", text(&self.mnt)]);
        self.device = Some(device);
    }

    /// Unmounts the file system and detaches the loop device. Afterwards the server has all written
    /// data.
    pub fn unmount(&mut self) {
        ok(root_tool("umount").arg(&self.mnt));
        if let Some(device) = self.device.take() {
            ok(root_tool("losetup").args(["-d", &device]));
        }
    }

    /// Checks the unmounted file system with e2fsck, which must find no error.
    pub fn check(&mut self) {
        let device = self.attach();
        ok(root_tool("e2fsck").args(["-fn", &device]));
        ok(root_tool("losetup").args(["-d", &device]));
    }
}
