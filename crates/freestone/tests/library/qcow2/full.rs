//! A delta that does not fit on its disk keeps the old delta and leaves no temporary files. A delta
//! that was just saved can be opened at once.
//!
//! The first test runs itself as a child process under a file size limit, which fails writes like a
//! full disk.

use std::env;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use freestone::device::{
    Buffer, Change, Changes, Completion, Device, Extent, Geometry, IoBuf, Request, Result, Tried,
};
use freestone::qcow2::Format;
use freestone::qcow2::delta::{DeltaError, save};
use freestone_testkit::Model;

use super::tools::Dir;

const SIZE: usize = 8 << 20;
/// In the child: the directory to work in.
const DIR: &str = "FREESTONE_TEST_DIR";

/// A device that reports all of its bytes as changed.
struct AllChanged(Model);

impl Device for AllChanged {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        self.0.try_io(request, buffer)
    }
    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.0.submit(request, buffer, done);
    }
    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.0.extents(offset, len, row)
    }
    fn changes(&self) -> Option<&dyn Changes> {
        Some(self)
    }
}

impl Changes for AllChanged {
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        row(Change { offset, len, own: true });
        Ok(len)
    }
}

fn child(dir: &Path) {
    let device = AllChanged(Model::read_only(vec![5; SIZE], 4096));
    let saved = save(&device, &dir.join("base"), Format::Raw, &dir.join("delta"), &mut |_, _| {});
    assert!(matches!(saved, Err(DeltaError::Write { .. })), "{saved:?}");
}

#[test]
fn full_disk_keeps_the_old_delta() {
    if let Some(dir) = env::var_os(DIR) {
        return child(Path::new(&dir));
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("base"), vec![1; SIZE]).unwrap();
    let device = AllChanged(Model::read_only(vec![9; SIZE], 4096));
    save(&device, &dir.path().join("base"), Format::Raw, &dir.path().join("delta"), &mut |_, _| {}).unwrap();
    let old = fs::read(dir.path().join("delta")).unwrap();
    // The shell's unit is 512 or 1024 bytes; the whole delta takes 8.5 MiB. The limits hit data,
    // tables, and almost the end.
    let whole = old.len() / 1024;
    for limit in [40, 1000, 4000, whole / 2 - 1] {
        let script = format!("trap '' XFSZ; ulimit -f {limit} && exec \"$0\" --exact \"$1\" --nocapture");
        let out = Command::new("sh")
            .args(["-c", &script])
            .arg(env::current_exe().unwrap())
            .arg("qcow2::full::full_disk_keeps_the_old_delta")
            .env(DIR, dir.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&out.stdout);
        assert!(
            out.status.success() && text.contains("1 passed"),
            "{text}{}",
            String::from_utf8_lossy(&out.stderr)
        );
        assert!(fs::read(dir.path().join("delta")).unwrap() == old, "{limit}");
        let mut names: Vec<_> =
            fs::read_dir(dir.path()).unwrap().map(|row| row.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["base", "delta"], "{limit}");
    }
}

/// A process that is being started holds all files of this process until exec, including their
/// locks.
#[test]
fn saved_delta_opens_while_processes_are_started() {
    let dir = Dir::new();
    fs::write(dir.path("base"), vec![1; 4096]).unwrap();
    let device = AllChanged(Model::read_only(vec![9; 4096], 4096));
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ended.load(Ordering::SeqCst) {
                    // With a user, the process is forked to start it, which takes longer.
                    let uid = rustix::process::geteuid().as_raw();
                    assert!(Command::new("true").uid(uid).status().unwrap().success());
                }
            });
        }
        let outcome = std::panic::catch_unwind(|| {
            for _ in 0..60 {
                save(&device, &dir.path("base"), Format::Raw, &dir.path("delta"), &mut |_, _| {}).unwrap();
                drop(dir.open("delta"));
            }
        });
        ended.store(true, Ordering::SeqCst);
        outcome.unwrap();
    });
}
