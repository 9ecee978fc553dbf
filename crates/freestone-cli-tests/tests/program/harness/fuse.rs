//! Exports as files, through nbdfuse, and file systems on them, through a loop device.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::server::Serve;
use super::tools::{ok, root_tool, uri};
use super::wait::wait_until;

/// Time in which nbdfuse ends after its unmount.
const END_MAX: Duration = Duration::from_secs(20);

/// Cleanup commands that run in reverse order on drop, so also after a failed test. A command whose effect is undone
/// is removed: another test may use the same loop device by then.
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
            // Errors are ignored: a failed test may have left nothing to undo.
            let _ = command.status();
        }
    }
}

/// An nbdfuse process in the foreground, which provides an export as a file. Drop unmounts the file and ends nbdfuse.
pub struct Fuse {
    child: Child,
    dir: PathBuf,
    tool: fn(&str) -> Command,
}

impl Fuse {
    /// Mounts an export at the new directory `dir`. `tool` is the function that runs nbdfuse with the necessary rights.
    pub fn start(tool: fn(&str) -> Command, serve: &Serve, export: &str, dir: PathBuf) -> Self {
        fs::create_dir(&dir).unwrap();
        let ready = dir.with_extension("pid");
        let mut nbdfuse = tool("nbdfuse");
        nbdfuse.arg("-P").arg(&ready).arg(&dir).arg(uri(serve, export));
        let fuse = Self { child: nbdfuse.stdout(Stdio::null()).spawn().unwrap(), dir, tool };
        wait_until("nbdfuse mounts", || ready.exists());
        fuse
    }

    /// Returns the path of the file.
    pub fn file(&self) -> PathBuf {
        self.dir.join("nbd")
    }
}

impl Drop for Fuse {
    fn drop(&mut self) {
        // The unmount is lazy, because the file may still be open.
        let mut unmount = (self.tool)("fusermount3");
        let _ = unmount.args(["-u", "-z"]).arg(&self.dir).stderr(Stdio::null()).status();
        // nbdfuse ends when it is unmounted, or at the latest when timeout(1) kills it.
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < END_MAX {
            sleep(Duration::from_millis(20));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An export that can be mounted. Drop unmounts the file system and ends nbdfuse.
pub struct Mounted {
    // Fields are dropped in this order: cleanup of mounts and loop devices first, then nbdfuse.
    undo: Undo,
    fuse: Fuse,
    mnt: PathBuf,
    /// Path of the loop device while the file system is mounted.
    device: Option<String>,
}

impl Mounted {
    /// Makes the export available as a file below `dir`, by nbdfuse. The file system is not mounted
    /// yet.
    pub fn new(serve: &Serve, export: &str, dir: &Path) -> Self {
        let mnt = dir.join("mnt");
        fs::create_dir(&mnt).unwrap();
        let fuse = Fuse::start(root_tool, serve, export, dir.join("fuse"));
        Self { undo: Undo::default(), fuse, mnt, device: None }
    }

    /// Returns the mount point.
    pub fn path(&self) -> &Path {
        &self.mnt
    }

    /// Attaches a loop device to the file of the export. Returns the path of the loop device.
    fn attach(&mut self) -> String {
        let device =
            ok(root_tool("losetup").args(["--find", "--show"]).arg(self.fuse.file())).trim().to_owned();
        self.undo.add("losetup", &["-d", &device]);
        device
    }

    /// Detaches a loop device, which is the last that is attached.
    fn detach(&mut self, device: &str) {
        ok(root_tool("losetup").args(["-d", device]));
        self.undo.0.pop();
    }

    /// Creates an ext4 file system on the export.
    pub fn make_ext4(&mut self) {
        let device = self.attach();
        ok(root_tool("mke2fs").args(["-q", "-t", "ext4", "-F", &device]));
        self.detach(&device);
    }

    /// Mounts the file system on a new loop device, whose page cache is empty.
    pub fn mount(&mut self) {
        let device = self.attach();
        ok(root_tool("mount").args([&device, self.mnt.to_str().unwrap()]));
        self.undo.add("umount", &["-l", self.mnt.to_str().unwrap()]);
        self.device = Some(device);
    }

    /// Unmounts the file system and detaches the loop device. Afterwards the server has all written
    /// data.
    pub fn unmount(&mut self) {
        ok(root_tool("umount").arg(&self.mnt));
        self.undo.0.pop();
        if let Some(device) = self.device.take() {
            self.detach(&device);
        }
    }

    /// Checks the unmounted file system with e2fsck, which must find no error.
    pub fn check(&mut self) {
        let device = self.attach();
        ok(root_tool("e2fsck").args(["-fn", &device]));
        self.detach(&device);
    }
}
