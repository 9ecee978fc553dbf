//! Stores that missed writes of their origin: told as certain where both were closed in order, else
//! a warning.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use rustix::fs::{XattrFlags, removexattr, setxattr};
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;

use crate::clients::tools::{MIB, noise, ok, tool, uri};
use crate::harness::{Serve, refused};

const DISK: &str = "disk=file,path=disk.img";
const MONDAY: &str = "monday=snapshot,origin=disk,cow=./monday.cow,cow_size=8M";
const TUESDAY: &str = "tuesday=snapshot,origin=disk,cow=./tuesday.cow,cow_size=8M";
const ENDS: [&str; 4] = ["--nbd", "unix:nbd", "--control", "control"];
const MIXTURE: &str = "mixture of old and new";
const UNKNOWN: &str = "it is unknown whether the origin was written without this store since";
const OLDER: &str = "its origin was written or used without it since it was closed, so the snapshot would be a mixture of old and \
     new; force opens it all the same (force=yes)";

/// A directory with a disk, on a file system with extended attributes: without them nothing could
/// be told here.
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

/// A server that ends in order.
#[track_caller]
fn end(serve: Serve) -> TempDir {
    serve.signal(Signal::TERM);
    let (code, dir) = serve.wait();
    assert_eq!(code, Some(0));
    dir
}

fn kill(serve: Serve) -> TempDir {
    serve.signal(Signal::KILL);
    serve.wait().1
}

fn write(serve: &Serve, name: &str, at: usize) {
    let line = format!("write -f -P 7 {at} 4k");
    let said = ok(tool("qemu-io").args(["-f", "raw", "-c", &line]).arg(uri(serve, name)));
    assert!(!said.contains("failed"), "{said}");
}

#[track_caller]
fn missed(serve: &Serve, name: &str, expected: &str) {
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
fn is_refused(dir: &Path, devices: &[&str]) {
    let said = refused(dir, 1, &[&["serve"], devices, &ENDS].concat());
    assert!(said.starts_with("monday: cow=") && said.ends_with(&format!("/monday.cow: {OLDER}")), "{said}");
}

/// A disk with a snapshot, both closed in order.
fn closed() -> TempDir {
    let first = serve(with_disk(), &[DISK, MONDAY]);
    missed(&first, "monday", "no");
    write(&first, "disk", 0);
    end(first)
}

#[test]
fn what_is_closed_in_order_is_opened_without_a_word() {
    let mut dir = closed();
    for at in [8192, 65536] {
        let again = serve(dir, &[DISK, MONDAY]);
        missed(&again, "monday", "no");
        fs::write(again.path("wanted.img"), noise(3, 2 * MIB)).unwrap();
        ok(tool("qemu-img")
            .args(["compare", "-f", "raw", "-F", "raw", &uri(&again, "monday")])
            .arg(again.path("wanted.img")));
        write(&again, "disk", at);
        dir = end(again);
    }
    // Served without the store, but not written.
    dir = end(serve(dir, &[DISK]));
    let again = serve(dir, &[DISK, MONDAY]);
    missed(&again, "monday", "no");
}

#[test]
fn a_store_whose_origin_was_written_without_it_is_refused() {
    // By a server that knows nothing of it, and by anybody.
    for by_us in [true, false] {
        let mut dir = closed();
        if by_us {
            let alone = serve(dir, &[DISK]);
            write(&alone, "disk", 65536);
            dir = end(alone);
        } else {
            let disk = fs::File::options().write(true).open(dir.path().join("disk.img")).unwrap();
            disk.write_all_at(&[7; 4096], 65536).unwrap();
        }
        let store = fs::read(dir.path().join("monday.cow")).unwrap();
        // It stays so.
        for _ in 0..2 {
            is_refused(dir.path(), &[DISK, MONDAY]);
        }
        assert!(fs::read(dir.path().join("monday.cow")).unwrap() == store, "the store was touched");
        let forced = serve(dir, &[DISK, &format!("{MONDAY},force=yes")]);
        missed(&forced, "monday", "yes");
        // Now they go together again.
        let again = serve(end(forced), &[DISK, MONDAY]);
        missed(&again, "monday", "no");
    }
}

#[test]
fn a_store_that_was_copied_away_and_back_is_refused() {
    let mut dir = closed();
    fs::copy(dir.path().join("monday.cow"), dir.path().join("old.cow")).unwrap();
    let again = serve(dir, &[DISK, MONDAY]);
    write(&again, "disk", 65536);
    dir = end(again);
    fs::copy(dir.path().join("old.cow"), dir.path().join("monday.cow")).unwrap();
    is_refused(dir.path(), &[DISK, MONDAY]);
}

#[test]
fn after_a_crash_it_is_unknown() {
    let again = serve(closed(), &[DISK, MONDAY]);
    missed(&again, "monday", "no");
    let again = serve(kill(again), &[DISK, MONDAY]);
    missed(&again, "monday", "unknown");
    write(&again, "disk", 65536);
    let again = serve(end(again), &[DISK, MONDAY]);
    missed(&again, "monday", "no");
    // A crash of who served it without the store.
    let alone = serve(end(again), &[DISK]);
    let again = serve(kill(alone), &[DISK, MONDAY]);
    missed(&again, "monday", "unknown");
    // A copy of the disk that does not say anything.
    let dir = end(again);
    removexattr(dir.path().join("disk.img"), "user.freestone.snapshots").unwrap();
    let again = serve(dir, &[DISK, MONDAY]);
    missed(&again, "monday", "unknown");
}

#[test]
fn a_snapshot_that_is_removed_and_opened_again_is_told_apart() {
    let both = serve(with_disk(), &[DISK, MONDAY, TUESDAY]);
    let monday = ["snapshot", "disk", "monday", "cow=./monday.cow"];
    write(&both, "disk", 0);
    both.text(&["remove", "monday"]);
    both.text(&monday);
    missed(&both, "monday", "no");
    both.text(&["remove", "monday"]);
    write(&both, "disk", 65536);
    let said = both.refused(1, &monday);
    assert!(said.ends_with(OLDER), "{said}");
    // The next server knows it as well.
    let dir = end(both);
    is_refused(dir.path(), &[DISK, TUESDAY, MONDAY]);
    let other = serve(dir, &[DISK, TUESDAY]);
    missed(&other, "tuesday", "no");
}

#[test]
fn a_merge_that_is_stopped_in_order_goes_on_without_a_word() {
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
    let dir = end(first);
    let again = serve(dir, &[DISK, slow[0], slow[1]]);
    assert_eq!(again.json(&["stat", "monday"])["merge"], "running");
    missed(&again, "monday", "no");
}

/// Once, however many writes find no room.
#[test]
fn the_log_tells_of_a_snapshot_that_is_lost() {
    let small = "monday=snapshot,origin=disk,cow=./monday.cow,cow_size=128K";
    let full = serve(with_disk(), &[DISK, small]);
    for chunk in 0..12 {
        write(&full, "disk", chunk * 16384);
    }
    assert_eq!(full.json(&["get", "monday", "status"])["status"], "Invalid");
    let dir = end(full);
    let log = fs::read_to_string(dir.path().join("log")).unwrap();
    let told: Vec<_> = log.lines().filter(|line| line.contains("the snapshot is lost")).collect();
    assert!(matches!(told[..], [line] if line.contains("monday.cow: ") && line.contains("no room")), "{log}");
}
