//! A delta that does not fit on its disk keeps the previous delta and leaves no temporary files. A
//! delta that was just saved can be opened at once.
//!
//! The first test runs itself as a child process under a file size limit, which makes writes fail
//! as on a full disk.

use std::env;
use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use freestone::qcow2::Format;
use freestone::qcow2::delta::{DeltaError, save};
use freestone_testkit::Model;

use super::tools::Dir;

const SIZE: usize = 8 << 20;
/// Environment variable with the working directory of the child. Not set in the parent.
const DIR: &str = "FREESTONE_TEST_DIR";

/// Returns a device that reports all of its bytes as changed, so that its delta is as large as the device.
fn all_changed(size: usize, byte: u8) -> Model {
    let fork = Model::fork(&[], size, 4096);
    fork.fill(0, &vec![byte; size]);
    fork
}

fn child(dir: &Path) {
    let device = all_changed(SIZE, 5);
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
    let device = all_changed(SIZE, 9);
    save(&device, &dir.path().join("base"), Format::Raw, &dir.path().join("delta"), &mut |_, _| {}).unwrap();
    let old = fs::read(dir.path().join("delta")).unwrap();
    // The unit of the shell's file size limit is 512 or 1024 bytes, and the whole delta has 8.5
    // MiB. The limits hit the data, the tables, and almost the end of the file.
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

/// A process that is being started keeps all open files of this process until its exec, including
/// their locks. Opening a saved delta must still succeed.
#[test]
fn saved_delta_opens_while_processes_are_started() {
    let dir = Dir::new();
    fs::write(dir.path("base"), vec![1; 4096]).unwrap();
    let device = all_changed(4096, 9);
    let ended = AtomicBool::new(false);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !ended.load(Ordering::SeqCst) {
                    // With a user ID, the standard library starts the process with a fork, which
                    // keeps the files open for longer.
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
