//! ext4 on an export, mounted through nbdfuse and a loop device.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::harness::Serve;
use crate::tools::{MIB, ok, root_tool, stat, tool, uri};
use crate::tree::plant;

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

#[test]
fn a_file_system_is_used() {
    // Dropped in the reverse order: mounts, nbdfuse, server, files.
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(&["ram0=ram,disksize=256M"]);
    let (fuse_dir, mnt) = (dir.path().join("fuse"), dir.path().join("mnt"));
    fs::create_dir(&fuse_dir).unwrap();
    fs::create_dir(&mnt).unwrap();
    let (tree, archive) = (dir.path().join("tree"), dir.path().join("tree.tar"));
    plant(&tree, 64 * MIB);
    ok(tool("tar").arg("-C").arg(&tree).arg("--sparse").arg("-cf").arg(&archive).arg("."));

    let (disk, pid) = (fuse_dir.join("disk"), dir.path().join("nbdfuse.pid"));
    let mut nbdfuse = root_tool("nbdfuse");
    nbdfuse.arg("-P").arg(&pid).arg(&disk).arg(uri(&serve, "ram0"));
    let _fuse = Fuse(nbdfuse.spawn().unwrap());
    let mut undo = Undo::default();
    undo.later("umount", &["-l", text(&fuse_dir)]);
    wait_until("nbdfuse mounts", || pid.exists());

    let device = ok(root_tool("losetup").args(["--find", "--show"]).arg(&disk)).trim().to_owned();
    undo.later("losetup", &["-d", &device]);
    ok(root_tool("mke2fs").args(["-q", "-t", "ext4", "-F", &device]));
    ok(root_tool("mount").args([&device, text(&mnt)]));
    undo.later("umount", &["-l", text(&mnt)]);
    ok(root_tool("tar").arg("-C").arg(&mnt).arg("--sparse").arg("-xf").arg(&archive));
    ok(root_tool("sync").arg("-f").arg(&mnt));
    let used = stat(&serve, "ram0", "mm_stat", "orig_data_size");
    assert!(used > 32 * MIB, "{used}");

    // Off and on again: what comes back comes from the server.
    ok(root_tool("umount").arg(&mnt));
    ok(root_tool("e2fsck").args(["-fn", &device]));
    ok(root_tool("losetup").args(["-d", &device]));
    let device = ok(root_tool("losetup").args(["--find", "--show"]).arg(&disk)).trim().to_owned();
    undo.later("losetup", &["-d", &device]);
    ok(root_tool("mount").args([&device, text(&mnt)]));
    undo.later("umount", &["-l", text(&mnt)]);
    // lost+found is the file system's own.
    let diff = ["-r", "--no-dereference", "--exclude=lost+found"];
    ok(root_tool("diff").args(diff).arg(&tree).arg(&mnt));

    // What is deleted goes back to the machine.
    ok(root_tool("rm")
        .arg("-rf")
        .arg(mnt.join("0"))
        .arg(mnt.join("1"))
        .arg(mnt.join("2"))
        .arg(mnt.join("3")));
    ok(root_tool("sync").arg("-f").arg(&mnt));
    ok(root_tool("fstrim").arg(&mnt));
    let left = stat(&serve, "ram0", "mm_stat", "orig_data_size");
    assert!(left < used / 2, "{left} of {used}");
    ok(root_tool("umount").arg(&mnt));
    ok(root_tool("e2fsck").args(["-fn", &device]));
}
