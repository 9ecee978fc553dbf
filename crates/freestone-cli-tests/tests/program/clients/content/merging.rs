//! Merges interrupted by a killed server. The next server resumes the merge and never shows an
//! origin that is half old and half new.

use rustix::fs::{XattrFlags, removexattr, setxattr};

use crate::harness::prelude::*;

const CHUNK: usize = 4096;
/// Number of chunks that were written to the snapshot. Unwritten chunks lie between them, so each
/// chunk is merged separately.
const RUNS: usize = 40;
/// Time limit for any awaited event.
const LONG: Duration = Duration::from_secs(100);

const SERVE: [&str; 6] = [
    "disk=file,path=disk.img",
    // The fault rule delays each merged chunk, because the merge reads every chunk from this COW
    // device.
    "c=file,path=disk.cow,publish=no,faults=read delay=100ms",
    "d1=snapshot,origin=disk,cow=c,chunk_size=4K",
    "--nbd=unix:nbd",
    "--control",
    "control",
];

#[track_caller]
fn assert_content(uri: &str, content: &[u8], dir: &Path) {
    let file = dir.join("wanted.img");
    fs::write(&file, content).unwrap();
    assert_same(uri, &file);
}

/// Returns the state of the merge of `d1`, as `stat` shows it.
fn merge(serve: &Serve) -> serde_json::Value {
    serve.json(&["stat", "d1"])["merge"].clone()
}

/// Returns a directory with a merge that a killed server left half done, and the content of the
/// origin after the whole merge.
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
    let output = serve.text(&["merge", "d1", "--into-origin", "--background"]);
    assert!(output.starts_with("d1: is being merged into disk; status "), "{output}");
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
    let dir = serve.kill();
    let disk = fs::read(dir.path().join("disk.img")).unwrap();
    assert!(disk != wanted, "the merge was through before the server was killed");
    (dir, wanted)
}

#[test]
fn killed_server_resumes_its_merge() {
    let (dir, mut wanted) = half_merged();
    // The server starts with the same command line, twice before the merge is finished.
    let serve = Serve::start_in(dir, &SERVE, false);
    assert_content(&uri(&serve, "disk"), &wanted, serve.dir.path());
    assert_eq!(merge(&serve), json!("running"));
    assert_eq!(serve.json(&["list", "d1"])["devices"][0]["merge"], "running");
    let table = serve.text(&["list"]);
    let percent = table.split("snapshot merging ").nth(1).and_then(|rest| rest.split('%').next());
    assert!(percent.is_some_and(|n| n.parse::<u64>().is_ok_and(|n| n < 100)), "{table}");
    // The test writes to the chunks that are merged last and first, and to a chunk that is not
    // merged.
    let writes = [0, (RUNS - 1) * 2 * CHUNK, CHUNK].map(|at| format!("write -f -P 7 {at} 512"));
    qemu_io(&uri(&serve, "disk"), &writes);
    for at in [0, (RUNS - 1) * 2 * CHUNK, CHUNK] {
        wanted[at..at + 512].fill(7);
    }
    let serve = Serve::start_in(serve.kill(), &SERVE, false);
    assert_content(&uri(&serve, "disk"), &wanted, serve.dir.path());
    // The merge continues without the delay.
    serve.text(&["set", "c", "faults=none"]);
    assert_content(&uri(&serve, "d1"), &wanted, serve.dir.path());
    wait_until("the merge goes on", || merge(&serve) == json!("finished"));
    let dir = serve.kill();
    assert!(fs::read(dir.path().join("disk.img")).unwrap() == wanted);
    // After the merge the exception store belongs to a new, empty snapshot of the merged origin.
    let serve = Serve::start_in(dir, &SERVE, false);
    assert_eq!(merge(&serve), json!(null));
    assert_content(&uri(&serve, "disk"), &wanted, serve.dir.path());
    assert_content(&uri(&serve, "d1"), &wanted, serve.dir.path());
}

#[test]
fn merge_key_merges_at_start() {
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
    let serve = Serve::start_in(serve.kill(), &with(",merge=yes"), true);
    assert_content(&uri(&serve, "disk"), &wanted, serve.dir.path());
    wait_until("the merge goes on", || merge(&serve) == json!("finished"));
    // `merge=yes` may stay in the command line: a start without anything to merge is not an error.
    let serve = Serve::start_in(serve.kill(), &with(",merge=yes"), true);
    assert_eq!(merge(&serve), json!("finished"));
    assert_content(&uri(&serve, "disk"), &wanted, serve.dir.path());
    let transient = "d2: merge=yes: a transient snapshot (store=N) cannot be merged";
    assert_eq!(serve.refused(2, &["create", "d2=snapshot,origin=disk,cow=./x,store=N,merge=yes"]), transient);
    let memory = "d2: merge=yes: only with cow=PATH or cow=DEVICE";
    assert_eq!(serve.refused(2, &["create", "d2=snapshot,origin=disk,merge=yes"]), memory);
}

/// An extended attribute of the origin records the unfinished merge, for a server that does not
/// open the exception store.
#[test]
fn half_merged_origin_without_store_is_refused() {
    let (dir, wanted) = half_merged();
    let at = dir.path().to_owned();
    let (disk, ends) = (at.join("disk.img"), ["--nbd", "unix:nbd", "--control", "control"]);
    let probe = at.join("probe");
    fs::write(&probe, "").unwrap();
    if setxattr(&probe, "user.freestone.probe", b"1", XattrFlags::empty()).is_ok() {
        let serve = |devices: &[&str]| refused(&at, 1, &[&["serve"], devices, &ends].concat());
        let why = format!(
            "disk: {}: an unfinished merge left it half old, half new; serve it together with the snapshot that is \
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
        // The attribute is missing, as in a copy of the file. The exception store also records the
        // merge, so the merge resumes.
        removexattr(&disk, "user.freestone.merge").unwrap();
    }
    let merge = ["disk=file,path=disk.img", "d1=snapshot,origin=disk,cow=./disk.cow"];
    let serve = Serve::start_in(dir, &merge, true);
    assert_content(&uri(&serve, "disk"), &wanted, serve.dir.path());
}

#[test]
fn damaged_merge_record_refuses_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk.img");
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let long = "0 ".repeat(5000);
    for note in ["no number ./disk.cow", "0123", &long] {
        if setxattr(&disk, "user.freestone.merge", note.as_bytes(), XattrFlags::empty()).is_err() {
            continue;
        }
        for words in ["disk=file,path=disk.img", "disk=file,path=disk.img,readonly=yes"] {
            let message =
                refused(dir.path(), 1, &["serve", words, "--nbd", "unix:nbd", "--control", "control"]);
            let why = format!(
                "disk: {}: cannot read its attribute user.freestone.merge, which records an unfinished merge: ",
                disk.display()
            );
            assert!(message.starts_with(&why), "{message}");
        }
    }
}
