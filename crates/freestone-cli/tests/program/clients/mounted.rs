//! An export as a block device with a file system, through nbdfuse and a loop device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::clients::tools::{ok, root_tool, uri};
use crate::harness::Serve;

const STEP: Duration = Duration::from_millis(20);
const READY_MAX: Duration = Duration::from_secs(20);

/// What is undone, last first, when the test ends, however that is.
#[derive(Default)]
struct Undo(Vec<Command>);

impl Undo {
    fn later(&mut self, name: &str, args: &[&str]) {
        let mut command = root_tool(name);
        command.args(args).stdout(Stdio::null()).stderr(Stdio::null());
        self.0.push(command);
    }
}

impl Drop for Undo {
    fn drop(&mut self) {
        for mut command in self.0.drain(..).rev() {
            // Most is done already when the test went well.
            let _ = command.status();
        }
    }
}

/// nbdfuse in the foreground.
struct Fuse(Child);

impl Drop for Fuse {
    fn drop(&mut self) {
        // Unmounted, it ends by itself; timeout(1), which it runs under, ends it at the latest.
        let start = Instant::now();
        while matches!(self.0.try_wait(), Ok(None)) && start.elapsed() < READY_MAX {
            sleep(STEP);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Waits for something that another process makes.
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

/// An export that can be mounted. Everything is undone when it is dropped.
pub struct Mounted {
    // Dropped in this order: mounts and loop devices, nbdfuse.
    undo: Undo,
    _fuse: Fuse,
    disk: PathBuf,
    mnt: PathBuf,
    /// The loop device of the mount, while there is one.
    device: Option<String>,
}

impl Mounted {
    /// Makes the export a file below `dir`; nothing is mounted yet.
    pub fn new(serve: &Serve, export: &str, dir: &Path) -> Self {
        let (fuse_dir, mnt) = (dir.join("fuse"), dir.join("mnt"));
        fs::create_dir(&fuse_dir).unwrap();
        fs::create_dir(&mnt).unwrap();
        let (disk, pid) = (fuse_dir.join("disk"), dir.join("nbdfuse.pid"));
        let mut nbdfuse = root_tool("nbdfuse");
        nbdfuse.arg("-P").arg(&pid).arg(&disk).arg(uri(serve, export));
        let fuse = Fuse(nbdfuse.spawn().unwrap());
        let mut undo = Undo::default();
        undo.later("umount", &["-l", text(&fuse_dir)]);
        let mounted = Self { undo, _fuse: fuse, disk, mnt, device: None };
        wait_until("nbdfuse mounts", || pid.exists());
        mounted
    }

    /// Where the file system is seen.
    pub fn path(&self) -> &Path {
        &self.mnt
    }

    /// A loop device of the export.
    fn attach(&mut self) -> String {
        let device = ok(root_tool("losetup").args(["--find", "--show"]).arg(&self.disk)).trim().to_owned();
        self.undo.later("losetup", &["-d", &device]);
        device
    }

    /// Makes a file system on the export.
    pub fn make_ext4(&mut self) {
        let device = self.attach();
        ok(root_tool("mke2fs").args(["-q", "-t", "ext4", "-F", &device]));
        ok(root_tool("losetup").args(["-d", &device]));
    }

    /// Mounts it, on a loop device of its own: no cache knows it.
    pub fn mount(&mut self) {
        let device = self.attach();
        ok(root_tool("mount").args([&device, text(&self.mnt)]));
        self.undo.later("umount", &["-l", text(&self.mnt)]);
        self.device = Some(device);
    }

    /// Unmounts it. All that was written is at the server then.
    pub fn unmount(&mut self) {
        ok(root_tool("umount").arg(&self.mnt));
        if let Some(device) = self.device.take() {
            ok(root_tool("losetup").args(["-d", &device]));
        }
    }

    /// The file system, unmounted, is sound.
    pub fn check(&mut self) {
        let device = self.attach();
        ok(root_tool("e2fsck").args(["-fn", &device]));
        ok(root_tool("losetup").args(["-d", &device]));
    }
}
