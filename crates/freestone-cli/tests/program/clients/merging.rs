//! Merges that a killed server leaves behind: the next one never shows an origin that is half old,
//! half new.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::{XattrFlags, removexattr, setxattr};
use rustix::process::Signal;
use serde_json::json;
use tempfile::TempDir;

use crate::clients::tools::{MIB, noise, ok, qemu_io, tool, uri};
use crate::harness::{Serve, refused};

const CHUNK: usize = 4096;
/// Chunks that the snapshot has written, each a run of its own.
const RUNS: usize = 40;
/// Longer than anything that comes at all takes.
const LONG: Duration = Duration::from_secs(100);

const SERVE: [&str; 6] = [
    "disk=file,path=disk.img",
    // Every chunk that is merged is read from here.
    "c=file,path=disk.cow,publish=no,faults=read delay=100ms",
    "d1=snapshot,origin=disk,cow=c,chunk_size=4K",
    "--nbd=unix:nbd",
    "--control",
    "control",
];

#[track_caller]
fn shows(uri: &str, content: &[u8], dir: &Path) {
    let file = dir.join("wanted.img");
    fs::write(&file, content).unwrap();
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", uri]).arg(file));
}

fn kill(serve: Serve) -> TempDir {
    serve.signal(Signal::KILL);
    serve.wait().1
}

/// How far the merge is.
fn merge(serve: &Serve) -> serde_json::Value {
    serve.json(&["stat", "d1"])["merge"].clone()
}

/// A snapshot with a merge of which a part was done when the server was killed, and what it shows.
fn half_merged() -> (TempDir, Vec<u8>) {
    let dir = tempfile::tempdir().unwrap();
    let mut wanted = noise(3, 2 * MIB);
    fs::write(dir.path().join("disk.img"), &wanted).unwrap();
    fs::write(dir.path().join("disk.cow"), vec![0; 8 << 20]).unwrap();
    let serve = Serve::start_in(dir, &SERVE, false);
    let chunks = || (0..RUNS).map(|run| run * 2 * CHUNK);
    let writes: Vec<_> = chunks().map(|at| format!("write -P 2 {at} {CHUNK}")).collect();
    qemu_io(&uri(&serve, "d1"), &writes);
    chunks().for_each(|at| wanted[at..at + CHUNK].fill(2));
    let said = serve.text(&["merge", "d1", "--into-origin", "--background"]);
    assert!(said.starts_with("d1: is being merged into disk; status "), "{said}");
    assert_eq!(merge(&serve), json!("running"));
    let merged = |serve: &Serve| {
        let disk = fs::read(serve.path("disk.img")).unwrap();
        chunks().filter(|&at| disk[at..at + CHUNK] == wanted[at..at + CHUNK]).count()
    };
    let end = Instant::now() + LONG;
    while merged(&serve) < 3 {
        assert!(Instant::now() < end, "nothing is merged");
        thread::sleep(Duration::from_millis(1));
    }
    let dir = kill(serve);
    let disk = fs::read(dir.path().join("disk.img")).unwrap();
    assert!(disk != wanted, "the merge was through before the server was killed");
    (dir, wanted)
}

#[test]
fn a_server_that_was_killed_goes_on_with_its_merge() {
    let (dir, mut wanted) = half_merged();
    // The same command line; once more before it is through.
    let serve = Serve::start_in(dir, &SERVE, false);
    shows(&uri(&serve, "disk"), &wanted, serve.dir.path());
    assert_eq!(merge(&serve), json!("running"));
    assert_eq!(serve.json(&["list", "d1"])["devices"][0]["merge"], "running");
    let table = serve.text(&["list"]);
    let percent = table.split("snapshot merging ").nth(1).and_then(|rest| rest.split('%').next());
    assert!(percent.is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n < 100)), "{table}");
    // Where it is merged last, where it was merged first, and where nothing is to be merged.
    let writes = [0, (RUNS - 1) * 2 * CHUNK, CHUNK].map(|at| format!("write -f -P 7 {at} 512"));
    qemu_io(&uri(&serve, "disk"), &writes);
    for at in [0, (RUNS - 1) * 2 * CHUNK, CHUNK] {
        wanted[at..at + 512].fill(7);
    }
    let serve = Serve::start_in(kill(serve), &SERVE, false);
    shows(&uri(&serve, "disk"), &wanted, serve.dir.path());
    // The rest needs no delay.
    serve.text(&["set", "c", "faults=none"]);
    shows(&uri(&serve, "d1"), &wanted, serve.dir.path());
    let end = Instant::now() + LONG;
    while merge(&serve) != json!("finished") {
        assert!(Instant::now() < end, "{}", merge(&serve));
        thread::sleep(Duration::from_millis(10));
    }
    let dir = kill(serve);
    assert!(fs::read(dir.path().join("disk.img")).unwrap() == wanted);
    // A new snapshot, of what the merge left.
    let serve = Serve::start_in(dir, &SERVE, false);
    assert_eq!(merge(&serve), json!(null));
    shows(&uri(&serve, "disk"), &wanted, serve.dir.path());
    shows(&uri(&serve, "d1"), &wanted, serve.dir.path());
}

#[test]
fn a_merge_can_be_asked_for_from_the_beginning_on() {
    let dir = tempfile::tempdir().unwrap();
    let mut wanted = noise(3, 2 * MIB);
    fs::write(dir.path().join("disk.img"), &wanted).unwrap();
    let with = |word: &str| {
        [
            "disk=file,path=disk.img".to_owned(),
            format!("d1=snapshot,origin=disk,cow=./disk.cow,cow_size=8M{word}"),
        ]
    };
    let serve = Serve::start_in(dir, &with(""), true);
    qemu_io(&uri(&serve, "d1"), &["write -P 2 64k 64k"]);
    wanted[64 << 10..128 << 10].fill(2);
    let serve = Serve::start_in(kill(serve), &with(",merge=yes"), true);
    shows(&uri(&serve, "disk"), &wanted, serve.dir.path());
    let end = Instant::now() + LONG;
    while merge(&serve) != json!("finished") {
        assert!(Instant::now() < end, "{}", merge(&serve));
        thread::sleep(Duration::from_millis(10));
    }
    // The word may stay: there is nothing to merge then.
    let serve = Serve::start_in(kill(serve), &with(",merge=yes"), true);
    assert_eq!(merge(&serve), json!("finished"));
    shows(&uri(&serve, "disk"), &wanted, serve.dir.path());
    let transient = "d2: merge=yes: a transient snapshot (store=N) cannot be merged";
    assert_eq!(serve.refused(2, &["create", "d2=snapshot,origin=disk,cow=./x,store=N,merge=yes"]), transient);
    let memory = "d2: merge=yes: only with cow=PATH or cow=DEVICE";
    assert_eq!(serve.refused(2, &["create", "d2=snapshot,origin=disk,merge=yes"]), memory);
}

/// What a server that is not told of the store can know: what the file itself says.
#[test]
fn half_of_a_merge_is_not_served_without_its_store() {
    let (dir, wanted) = half_merged();
    let at = dir.path().to_owned();
    let (disk, ends) = (at.join("disk.img"), ["--nbd", "unix:nbd", "--control", "control"]);
    let probe = at.join("probe");
    fs::write(&probe, "").unwrap();
    if setxattr(&probe, "user.freestone.probe", b"1", XattrFlags::empty()).is_ok() {
        let serve = |devices: &[&str]| refused(&at, 1, &[&["serve"], devices, &ends].concat());
        let why = format!(
            "disk: {}: a merge into it is under way, and it is half old, half new; serve it together with the snapshot that is \
             merged: NAME=snapshot,origin=disk,cow=c,merge=yes",
            disk.display()
        );
        assert_eq!(serve(&["disk=file,path=disk.img"]), why);
        assert_eq!(
            serve(&["disk=file,path=disk.img,readonly=yes"]),
            format!("{why}, and without readonly=yes")
        );
        let early =
            "d2: the origin is half merged; the snapshot whose merge is under way must be opened first";
        assert_eq!(serve(&["disk=file,path=disk.img", "d2=snapshot,origin=disk"]), early);
        let blank = serve(&[
            "disk=file,path=disk.img",
            "d1=snapshot,origin=disk,cow=./other.cow,cow_size=8M,merge=yes",
        ]);
        assert!(blank.ends_with("/other.cow: the origin is half merged; the snapshot whose merge is under way must be opened first"), "{blank}");
        let transient = serve(&["disk=file,path=disk.img", "d1=snapshot,origin=disk,cow=./disk.cow,store=N"]);
        assert!(transient.contains("half merged"), "{transient}");
        // A copy does not say it; the store does.
        removexattr(&disk, "user.freestone.merge").unwrap();
    }
    let merge = ["disk=file,path=disk.img", "d1=snapshot,origin=disk,cow=./disk.cow"];
    let serve = Serve::start_in(dir, &merge, true);
    shows(&uri(&serve, "disk"), &wanted, serve.dir.path());
}

#[test]
fn garbled_merge_note_refuses_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let long = "0 ".repeat(5000);
    for note in ["no number ./disk.cow", "0123", &long] {
        if setxattr(&disk, "user.freestone.merge", note.as_bytes(), XattrFlags::empty()).is_err() {
            continue;
        }
        for words in ["disk=file,path=disk.img", "disk=file,path=disk.img,readonly=yes"] {
            let said = refused(dir.path(), 1, &["serve", words, "--nbd", "unix:nbd", "--control", "control"]);
            let why = format!(
                "disk: {}: cannot read its attribute user.freestone.merge, which says whether a merge into it is under way: ",
                disk.display()
            );
            assert!(said.starts_with(&why), "{said}");
        }
    }
}
