//! Exception stores that missed writes to their origin. Opening one is an error if store and origin
//! were closed cleanly, otherwise a warning.

use std::os::unix::fs::FileExt as _;

use rustix::fs::{XattrFlags, removexattr, setxattr};

use crate::harness::prelude::*;

const DISK: &str = "disk=file,path=disk.img";
const MONDAY: &str = "monday=snapshot,origin=disk,cow=./monday.cow,cow_size=8M";
const TUESDAY: &str = "tuesday=snapshot,origin=disk,cow=./tuesday.cow,cow_size=8M";
const ENDS: [&str; 4] = ["--nbd", "unix:nbd", "--control", "control"];
const MIXTURE: &str = "mixture of old and new";
const UNKNOWN: &str = "it is unknown whether the origin was written without this store since";
const OLDER: &str = "the origin was written or used without this store since it was closed, so the snapshot would be a mixture of \
     old and new; force opens it anyway (force=yes)";

/// Returns a directory with the image of a disk. The file system must support extended attributes,
/// in which the server records the state of exception stores.
fn with_disk() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, noise(3, 2 * MIB)).unwrap();
    setxattr(&disk, "user.freestone.probe", b"1", XattrFlags::empty()).unwrap();
    removexattr(&disk, "user.freestone.probe").unwrap();
    dir
}

fn serve(dir: TempDir, devices: &[&str]) -> Serve {
    Serve::logged_in(dir, &[devices, &ENDS].concat())
}

fn write(serve: &Serve, name: &str, at: usize) {
    let line = format!("write -f -P 7 {at} 4k");
    let output = ok(tool("qemu-io").args(["-f", "raw", "-c", &line]).arg(uri(serve, name)));
    assert!(!output.contains("failed"), "{output}");
}

#[track_caller]
fn check_missed_writes(serve: &Serve, name: &str, expected: &str) {
    assert_eq!(serve.json(&["stat", name])["missed_writes"], expected);
    assert_eq!(serve.json(&["get", name, "missed_writes"])["missed_writes"], json!(expected));
    let log = match expected {
        "unknown" => serve.log_with(UNKNOWN),
        "yes" => serve.log_with(MIXTURE),
        _ => fs::read_to_string(serve.path("log")).unwrap(),
    };
    assert_eq!(log.contains(UNKNOWN), expected == "unknown", "{log}");
    assert_eq!(log.contains(MIXTURE), expected == "yes", "{log}");
}

#[track_caller]
fn check_refused(dir: &Path, devices: &[&str]) {
    let message = refused(dir, 1, &[&["serve"], devices, &ENDS].concat());
    assert!(
        message.starts_with("monday: cow=") && message.ends_with(&format!("/monday.cow: {OLDER}")),
        "{message}"
    );
}

/// Returns a directory with a disk and the exception store of a snapshot, both closed cleanly.
fn closed_disk() -> TempDir {
    let first = serve(with_disk(), &[DISK, MONDAY]);
    check_missed_writes(&first, "monday", "no");
    write(&first, "disk", 0);
    first.end()
}

#[test]
fn store_closed_cleanly_opens_without_warning() {
    let mut dir = closed_disk();
    for at in [8192, 65536] {
        let again = serve(dir, &[DISK, MONDAY]);
        check_missed_writes(&again, "monday", "no");
        fs::write(again.path("wanted.img"), noise(3, 2 * MIB)).unwrap();
        ok(tool("qemu-img")
            .args(["compare", "-f", "raw", "-F", "raw", &uri(&again, "monday")])
            .arg(again.path("wanted.img")));
        write(&again, "disk", at);
        dir = again.end();
    }
    // A server without the snapshot that writes nothing to the disk does not make the store stale.
    dir = serve(dir, &[DISK]).end();
    let again = serve(dir, &[DISK, MONDAY]);
    check_missed_writes(&again, "monday", "no");
}

#[test]
fn store_that_missed_writes_is_refused() {
    // The store misses writes of a server that does not open it, or of another program.
    for by_us in [true, false] {
        let mut dir = closed_disk();
        if by_us {
            let alone = serve(dir, &[DISK]);
            write(&alone, "disk", 65536);
            dir = alone.end();
        } else {
            let disk = fs::File::options().write(true).open(dir.path().join("disk.img")).unwrap();
            disk.write_all_at(&[7; 4096], 65536).unwrap();
        }
        let store = fs::read(dir.path().join("monday.cow")).unwrap();
        // The failed start changes nothing, so the next start fails with the same error.
        for _ in 0..2 {
            check_refused(dir.path(), &[DISK, MONDAY]);
        }
        assert!(fs::read(dir.path().join("monday.cow")).unwrap() == store, "the store was touched");
        let forced = serve(dir, &[DISK, &format!("{MONDAY},force=yes")]);
        check_missed_writes(&forced, "monday", "yes");
        // `force=yes` accepts the store, so the next start reports no missed writes.
        let again = serve(forced.end(), &[DISK, MONDAY]);
        check_missed_writes(&again, "monday", "no");
    }
}

#[test]
fn restored_copy_of_store_is_refused() {
    let mut dir = closed_disk();
    fs::copy(dir.path().join("monday.cow"), dir.path().join("old.cow")).unwrap();
    let again = serve(dir, &[DISK, MONDAY]);
    write(&again, "disk", 65536);
    dir = again.end();
    fs::copy(dir.path().join("old.cow"), dir.path().join("monday.cow")).unwrap();
    check_refused(dir.path(), &[DISK, MONDAY]);
}

#[test]
fn missed_writes_are_unknown_after_a_crash() {
    let again = serve(closed_disk(), &[DISK, MONDAY]);
    check_missed_writes(&again, "monday", "no");
    let again = serve(again.kill(), &[DISK, MONDAY]);
    check_missed_writes(&again, "monday", "unknown");
    write(&again, "disk", 65536);
    let again = serve(again.end(), &[DISK, MONDAY]);
    check_missed_writes(&again, "monday", "no");
    // SIGKILL of a server without the snapshot: nothing shows whether the disk was written.
    let alone = serve(again.end(), &[DISK]);
    let again = serve(alone.kill(), &[DISK, MONDAY]);
    check_missed_writes(&again, "monday", "unknown");
    // A copy of the disk lacks the extended attribute.
    let dir = again.end();
    removexattr(dir.path().join("disk.img"), "user.freestone.snapshots").unwrap();
    let again = serve(dir, &[DISK, MONDAY]);
    check_missed_writes(&again, "monday", "unknown");
}

#[test]
fn snapshot_removed_during_writes_is_refused() {
    let both = serve(with_disk(), &[DISK, MONDAY, TUESDAY]);
    let monday = ["snapshot", "disk", "monday", "cow=./monday.cow"];
    write(&both, "disk", 0);
    both.text(&["remove", "monday"]);
    both.text(&monday);
    check_missed_writes(&both, "monday", "no");
    both.text(&["remove", "monday"]);
    write(&both, "disk", 65536);
    let message = both.refused(1, &monday);
    assert!(message.ends_with(OLDER), "{message}");
    // The next server also detects the missed writes.
    let dir = both.end();
    check_refused(dir.path(), &[DISK, TUESDAY, MONDAY]);
    let other = serve(dir, &[DISK, TUESDAY]);
    check_missed_writes(&other, "tuesday", "no");
}

#[test]
fn merge_closed_cleanly_resumes_without_warning() {
    let slow = [
        "c=file,path=monday.cow,publish=no,faults=read delay=100ms",
        "monday=snapshot,origin=disk,cow=c,chunk_size=4K",
    ];
    let dir = with_disk();
    fs::write(dir.path().join("monday.cow"), vec![0; 8 << 20]).unwrap();
    let first = serve(dir, &[DISK, slow[0], slow[1]]);
    for at in 0..40 {
        write(&first, "monday", at * 8192);
    }
    first.text(&["merge", "monday", "--into-origin", "--background"]);
    write(&first, "disk", 8192);
    let dir = first.end();
    let again = serve(dir, &[DISK, slow[0], slow[1]]);
    assert_eq!(again.json(&["stat", "monday"])["merge"], "running");
    check_missed_writes(&again, "monday", "no");
}

/// The invalid snapshot is logged once, although several writes fail for lack of space in the
/// store.
#[test]
fn lost_snapshot_is_logged_once() {
    let small = "monday=snapshot,origin=disk,cow=./monday.cow,cow_size=128K";
    let full = serve(with_disk(), &[DISK, small]);
    for chunk in 0..12 {
        write(&full, "disk", chunk * 16384);
    }
    assert_eq!(full.json(&["get", "monday", "status"])["status"], "Invalid");
    let dir = full.end();
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    let lost_lines: Vec<_> = log.lines().filter(|line| line.contains("the snapshot is lost")).collect();
    assert!(
        matches!(lost_lines[..], [line] if line.contains("monday.cow: ") && line.contains("no room")),
        "{log}"
    );
}
