//! Snapshots of devices in use, merges, and deltas of forks and snapshots as qcow2 overlays.

use crate::harness::prelude::*;

#[track_caller]
fn check_read_fails(uri: &str, command: &str) {
    let mut qemu_io = tool("qemu-io");
    qemu_io.args(["-r", "-f", "raw", "-c", command, uri]);
    fails(&mut qemu_io);
}

/// Starts a server with the device `disk`, a file of 8 MiB of noise, and a copy of the file for
/// comparison.
fn with_disk(more: &[&str]) -> Serve {
    let dir = tempfile::tempdir().unwrap();
    for name in ["disk.img", "before.img"] {
        fs::write(dir.path().join(name), noise(3, 8 * MIB)).unwrap();
    }
    let mut args = vec!["disk=file,path=disk.img"];
    args.extend(more);
    args.extend(["--nbd", "unix:nbd", "--control", "control"]);
    Serve::start_in(dir, &args, false)
}

#[test]
fn snapshots_of_a_test_database() {
    // The data and the log of a database are two devices. A single `snapshot` verb takes both
    // snapshots at the same moment.
    let serve = Serve::start(&[
        "data=ram,disksize=64M",
        "log=ram,disksize=16M",
        "other=null,size=1M,zoned=1,zone_size=64K",
    ]);
    let (data, log) = (uri(&serve, "data"), uri(&serve, "log"));
    qemu_io(&data, &["write -P 1 0 8M"]);
    qemu_io(&log, &["write -P 2 0 1M"]);
    let made = serve.json(&["snapshot", "data,log", "data-1,log-1"]);
    assert_eq!(made["snapshots"][1], json!({"name": "log-1", "origin": "log", "disksize": 16 * MIB}));
    qemu_io(&data, &["write -P 3 4M 8M", "discard 0 1M"]);
    qemu_io(&log, &["write -P 4 512k 1M"]);

    let (data_1, log_1) = (publish(&serve, "data-1"), publish(&serve, "log-1"));
    qemu_io(&data_1, &["read -P 1 0 8M", "read -P 0 8M 8M"]);
    qemu_io(&log_1, &["read -P 2 0 1M", "read -P 0 1M 1M"]);
    check_read_fails(&data_1, "write -P 9 0 4k");
    // A write to a RAM disk moves the old page to the snapshot instead of copying it.
    let stat = serve.json(&["stat", "data"]);
    assert_eq!(stat["over_stat"]["handed_over"], 5 * MIB / 4096);
    assert_eq!(stat["over_stat"]["snapshots"], 1);
    assert_eq!(serve.json(&["stat", "data-1"])["over_stat"]["own_bytes"], 5 * MIB);

    // Forks of the first snapshot are used for trials. After this snapshot is removed, the later
    // one keeps its content.
    serve.text(&["fork", "data-1", "trial"]);
    let trial = publish(&serve, "trial");
    qemu_io(&trial, &["read -P 1 0 8M", "write -P 5 0 2M"]);
    serve.text(&["snapshot", "data", "data-2"]);
    qemu_io(&data, &["write -P 6 0 64M"]);
    serve.text(&["snapshot", "trial", "trial-1"]);
    assert_eq!(
        serve.refused(1, &["remove", "data-1"]),
        "data-1: cannot be removed: trial, trial-1 stand on it"
    );
    serve.text(&["rewind", "trial"]);
    qemu_io(&trial, &["read -P 1 0 8M"]);
    qemu_io(&publish(&serve, "trial-1"), &["read -P 5 0 2M", "read -P 1 2M 6M"]);
    for name in ["trial", "trial-1", "data-1"] {
        serve.text(&["remove", name]);
    }
    let data_2 = publish(&serve, "data-2");
    qemu_io(&data_2, &["read -P 0 0 1M", "read -P 1 1M 3M", "read -P 3 4M 8M"]);
    // A snapshot keeps its content after its origin is removed.
    serve.text(&["remove", "data"]);
    qemu_io(&data_2, &["read -P 0 0 1M", "read -P 1 1M 3M", "read -P 3 4M 8M"]);
    assert_eq!(
        serve.refused(1, &["reset", "data-2"]),
        "data-2: is a snapshot, which does not change; fork it"
    );

    // If one of several snapshots cannot be taken, none is taken.
    assert_eq!(
        serve.refused(1, &["snapshot", "log,other", "a,b"]),
        "b: origin=other: has no snapshots: it is zoned, and the state of its zones would be missing"
    );
    assert_eq!(serve.refused(2, &["snapshot", "log,log", "a,a"]), "a: two snapshots of that name");
    assert_eq!(serve.json(&["list", "a"])["devices"], json!([]));
    assert_eq!(serve.json(&["snapshot", "log,log", "a,b"])["snapshots"].as_array().unwrap().len(), 2);
}

#[test]
fn snapshots_of_a_file_in_memory() {
    let serve = with_disk(&["d1=snapshot,origin=disk,publish=no"]);
    let (disk, before) = (uri(&serve, "disk"), serve.path("before.img"));
    qemu_io(&disk, &["write -P 1 1M 2M", "discard 4M 1M", "write -P 2 8191k 512"]);
    assert_same(&publish(&serve, "d1"), &before);
    let stat = serve.json(&["stat", "d1"]);
    assert!(stat["cow_stat"]["copied_chunks"].as_u64().unwrap() >= 3 * MIB / (4 << 10), "{stat}");
    let status = stat["status"].as_str().unwrap();
    assert!(status.contains('/') && status.ends_with(" 0"), "{status}");
    assert_eq!(serve.json(&["list", "d1"])["devices"][0]["status"], status);
    let get = serve.json(&["get", "d1"]);
    assert_eq!((&get["store"], &get["chunk_size"], &get["cow"]), (&json!("N"), &json!(4096), &json!("none")));
    check_read_fails(&uri(&serve, "d1"), "write -P 9 0 4k");

    // The snapshot is a base for forks while clients write to its origin.
    serve.text(&["fork", "d1", "trial", "--nbd", &format!("unix:{}", serve.path("nbd").display())]);
    let trial = uri(&serve, "trial");
    assert_same(&trial, &before);
    qemu_io(&trial, &["write -P 7 0 1M"]);
    qemu_io(&disk, &["write -P 8 0 8M"]);
    qemu_io(&trial, &["read -P 7 0 1M"]);
    assert_same(&uri(&serve, "d1"), &before);
    serve.text(&["rewind", "trial"]);
    assert_same(&trial, &before);
    assert_eq!(serve.refused(1, &["remove", "disk", "--force"]), "disk: cannot be removed: d1 stands on it");
    serve.text(&["remove", "trial"]);
    assert_eq!(
        serve.refused(1, &["merge", "d1", "--into-origin"]),
        "d1: merge: a transient snapshot (N) cannot be merged"
    );
    serve.text(&["remove", "d1"]);
    qemu_io(&disk, &["write -P 9 0 8M", "read -P 9 0 8M"]);
    serve.text(&["remove", "disk"]);
}

#[test]
fn snapshots_of_a_file_with_exception_store() {
    let serve = with_disk(&["c=ram,disksize=16M,publish=no"]);
    let (disk, before) = (uri(&serve, "disk"), serve.path("before.img"));
    let keys = ["cow=./disk.cow", "cow_size=16M", "store=PO", "chunk_size=64K"];
    serve.text(&[&["snapshot", "disk", "d1"], &keys[..]].concat());
    let volatile = "d2: cow=c: the COW device ends with the process, so a persistent store is pointless; use a transient one \
                    (N), or force it";
    assert_eq!(serve.refused(1, &["snapshot", "disk", "d2", "cow=c"]), volatile);
    serve.text(&["snapshot", "disk", "d2", "cow=c", "store=N", "chunk_size=4K"]);
    let get = serve.json(&["get", "d1"]);
    assert_eq!(
        (&get["store"], &get["chunk_size"], &get["status"]),
        (&json!("PO"), &json!(65536), &json!("256/32768 256"))
    );
    assert_eq!(
        serve.refused(1, &["publish", "c", "--nbd", "unix:c"]),
        "c: holds the copies of d2, so it cannot be published"
    );
    assert_eq!(serve.refused(1, &["reset", "c"]), "c: cannot be reset: d2 stands on it");
    assert_eq!(
        serve.refused(1, &["snapshot", "disk", "d3", "cow=c", "store=N"]),
        "d3: cow=c: is in use by d2"
    );

    qemu_io(&disk, &["write -P 1 1M 2M"]);
    let d1 = publish(&serve, "d1");
    assert_same(&d1, &before);
    assert_same(&publish(&serve, "d2"), &before);
    // The snapshot is writable, like those of device mapper, so it cannot be a base.
    qemu_io(&d1, &["write -P 2 5M 64k"]);
    let why = "f: base=d1: is a snapshot that its users write (readonly=no); take one with readonly=yes";
    assert_eq!(serve.refused(1, &["fork", "d1", "f"]), why);
    let map = json(tool("nbdinfo").args(["--json", "--map=freestone:changed", &d1]));
    assert!(map.as_array().unwrap().iter().any(|row| row["type"] == 1 && row["offset"] == MIB), "{map}");

    // Another server opens the exception store again. The origin did not change while no server had
    // it open.
    let dir = serve.end();
    let args = [
        "disk=file,path=disk.img",
        "d1=snapshot,origin=disk,cow=./disk.cow,store=PO",
        "--nbd",
        "unix:nbd",
        "--control",
        "control",
    ];
    let serve = Serve::start_in(dir, &args, false);
    let d1 = uri(&serve, "d1");
    qemu_io(&d1, &["read -P 2 5M 64k"]);
    assert_eq!(serve.json(&["get", "d1", "chunk_size"])["chunk_size"], 65536);

    // The merge writes the changes of the snapshot into the file of the origin.
    let merged = serve.json(&["merge", "d1", "--into-origin"]);
    assert_eq!((&merged["merge"], &merged["origin"]), (&json!("finished"), &json!("disk")));
    let stat = serve.json(&["stat", "d1"]);
    assert_eq!(stat["merge"], "finished");
    let status = stat["status"].as_str().unwrap().to_owned();
    let (allocated, rest) = status.split_once('/').unwrap();
    assert_eq!(rest.split_once(' ').unwrap().1, allocated, "{status}");
    serve.text(&["remove", "d1"]);
    qemu_io(&disk, &["read -P 2 5M 64k"]);
    serve.text(&["remove", "disk"]);
    let mut wanted = fs::read(serve.path("before.img")).unwrap();
    wanted[5 << 20..(5 << 20) + (64 << 10)].fill(2);
    assert!(fs::read(serve.path("disk.img")).unwrap() == wanted);

    // A snapshot with forks cannot be merged, and a merged snapshot cannot be a base.
    let keys = ["cow=./frozen.cow", "cow_size=16M", "readonly=yes"];
    serve.text(&["create", "disk=file,path=disk.img"]);
    serve.text(&[&["snapshot", "disk", "d5"], &keys[..]].concat());
    serve.text(&["fork", "d5", "f"]);
    let stands = "d5: cannot be merged: f stands on it";
    assert_eq!(serve.refused(1, &["merge", "d5", "--into-origin"]), stands);
    serve.text(&["remove", "f"]);
    let output = serve.text(&["merge", "d5", "--into-origin"]);
    assert_eq!(output, "d5: is merged into disk; `freestone remove d5` forgets it\n");
    let merged = "f: base=d5: is merged into its origin; take another snapshot";
    assert_eq!(serve.refused(1, &["fork", "d5", "f"]), merged);
    serve.text(&["remove", "d5"]);
    serve.text(&["remove", "disk"]);

    // A COW file that is not an exception store is refused and left unchanged.
    fs::write(serve.path("foreign"), noise(5, MIB)).unwrap();
    serve.text(&["create", "disk=file,path=disk.img"]);
    let foreign = serve.refused(1, &["snapshot", "disk", "d4", "cow=./foreign"]);
    assert!(
        foreign.contains("/foreign: the COW device holds something that is not an exception store"),
        "{foreign}"
    );
    assert!(fs::read(serve.path("foreign")).unwrap() == noise(5, MIB));
    let missing = serve.refused(1, &["snapshot", "disk", "d4", "cow=./missing"]);
    assert!(missing.starts_with("d4: cow: ") && missing.contains("cannot open: No such file"), "{missing}");
}

#[test]
fn delta_is_a_qcow2_overlay() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(1, 8 * MIB)).unwrap();
    let args = ["golden=file,path=golden.img,readonly=yes", "--nbd", "unix:nbd", "--control", "control"];
    let serve = Serve::start_in(dir, &args, false);
    serve.text(&["fork", "golden", "job", "--nbd", &format!("unix:{}", serve.path("nbd").display())]);
    let job = uri(&serve, "job");
    qemu_io(&job, &["write -P 1 1M 64k", "discard 2M 128k", "write -P 2 12k 4k"]);
    let shown = serve.json(&["delta", "show", "job"]);
    assert_eq!((&shown["bytes"], &shown["zero_bytes"]), (&json!(196 << 10), &json!(128 << 10)), "{shown}");
    assert_eq!(shown["rows"][0], json!({"offset": 12 << 10, "length": 4096, "zero": false}));

    let saved = serve.json(&["delta", "save", "job", "job.qcow2"]);
    assert_eq!((&saved["data_clusters"], &saved["zero_clusters"]), (&json!(2), &json!(2)), "{saved}");
    let overlay = serve.path("job.qcow2");
    ok(tool("qemu-img").arg("check").arg(&overlay));
    let info = json(tool("qemu-img").args(["info", "--output=json"]).arg(&overlay));
    assert_eq!(
        (&info["backing-filename"], &info["backing-filename-format"]),
        (&json!("golden.img"), &json!("raw"))
    );
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "qcow2", &job]).arg(&overlay));

    // The delta is applied to another fork of the same base.
    serve.text(&["fork", "golden", "copy", "--nbd", &format!("unix:{}", serve.path("nbd").display())]);
    let applied = serve.json(&["delta", "apply", "copy", "job.qcow2"]);
    assert_eq!((&applied["data_bytes"], &applied["zero_bytes"]), (&json!(128 << 10), &json!(128 << 10)));
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &job, &uri(&serve, "copy")]));
    let twice = "copy: delta apply: it has changes of its own; `freestone rewind copy` first, or --force writes over them";
    assert_eq!(serve.refused(1, &["delta", "apply", "copy", "job.qcow2"]), twice);

    // The saved delta is a qcow2 image, so it can be a base itself. Deltas of forks of this base
    // name the image as their backing file.
    serve.text(&["create", "image=qcow2,path=job.qcow2"]);
    serve.text(&["fork", "image", "next", "--nbd", &format!("unix:{}", serve.path("nbd").display())]);
    let next = uri(&serve, "next");
    ok(tool("qemu-img").args(["compare", "-f", "raw", "-F", "raw", &job, &next]));
    qemu_io(&next, &["write -P 3 4M 1M"]);
    serve.text(&["snapshot", "next", "next-1"]);
    qemu_io(&next, &["write -P 4 4M 1M"]);
    serve.text(&["delta", "save", "next-1", "next.qcow2"]);
    ok(tool("qemu-img").arg("check").arg(serve.path("next.qcow2")));
    let chain = json(
        tool("qemu-img").args(["info", "--output=json", "--backing-chain"]).arg(serve.path("next.qcow2")),
    );
    assert_eq!(chain.as_array().unwrap().len(), 3);
    ok(tool("qemu-io").args(["-r", "-f", "qcow2", "-c", "read -P 3 4M 1M"]).arg(serve.path("next.qcow2")));
    serve.text(&["rewind", "next"]);
    let late = "next-1: delta save: the fork that it is a snapshot of was removed or rewound; save such a delta before that";
    assert_eq!(serve.refused(1, &["delta", "save", "next-1", "late.qcow2"]), late);
    assert!(!serve.path("late.qcow2").exists());
    // The base of the fork is a snapshot in memory, which has no file that a delta could name as
    // backing file.
    serve.text(&["fork", "next-1", "deep"]);
    let why =
        "deep: delta save: only a fork of a file or qcow2 image, or a snapshot of one, has a file for a base";
    assert_eq!(serve.refused(1, &["delta", "save", "deep", "x"]), why);
    let foreign = serve.refused(1, &["delta", "apply", "deep", "job.qcow2"]);
    assert!(foreign.starts_with("deep: delta apply: only a fork"), "{foreign}");
    let other = serve.refused(1, &["delta", "apply", "next", "job.qcow2", "--force"]);
    assert!(other.contains("is not a delta for this device"), "{other}");
    let raw = serve.refused(1, &["create", "q=qcow2,path=golden.img"]);
    assert!(raw.ends_with("golden.img: is not a qcow2 image; a raw image is of kind file"), "{raw}");
}

/// A delta includes pages beyond the end of the base. A snapshot's delta ignores later writes to
/// the origin; a fork's delta shows the fork as it was when the save began.
#[test]
fn delta_has_pages_beyond_the_end_of_the_base() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(4, MIB)).unwrap();
    let args = [
        "golden=file,path=golden.img,readonly=yes,publish=no",
        "job=fork,base=golden,size=2M",
        "--nbd",
        "unix:nbd",
        "--control",
        "control",
    ];
    let serve = Serve::start_in(dir, &args, false);
    let job = uri(&serve, "job");
    qemu_io(&job, &["write -P 7 1536k 64k", "write -P 8 1792k 4k", "discard 1792k 4k", "write -P 9 512k 4k"]);
    ok(tool("qemu-img").args(["convert", "-O", "raw", "-f", "raw", &job]).arg(serve.path("then.img")));
    serve.text(&["snapshot", "job", "then"]);
    qemu_io(&job, &["discard 1536k 64k", "discard 512k 4k", "write -P 3 1920k 4k"]);
    // The snapshot and its delta do not contain the later writes to the fork.
    let saved = serve.json(&["delta", "save", "then", "then.qcow2"]);
    assert_eq!(saved["bytes"], 68 << 10, "{saved}");
    let shown = serve.json(&["delta", "show", "then"]);
    assert_eq!(shown["rows"][1], json!({"offset": 1536 << 10, "length": 64 << 10, "zero": false}), "{shown}");
    let compare = |raw: &str, overlay: &str| {
        let mut compare = tool("qemu-img");
        compare.args(["compare", "-f", "raw", "-F", "qcow2"]).arg(serve.path(raw)).arg(serve.path(overlay));
        ok(&mut compare);
    };
    compare("then.img", "then.qcow2");
    serve.text(&["delta", "save", "job", "job.qcow2"]);
    ok(tool("qemu-img").args(["convert", "-O", "raw", "-f", "raw", &job]).arg(serve.path("job.img")));
    compare("job.img", "job.qcow2");
    // The delta of the snapshot is applied to another fork.
    let nbd = format!("unix:{}", serve.path("nbd").display());
    serve.text(&["fork", "golden", "copy", "size=2M", "--nbd", &nbd]);
    serve.text(&["delta", "apply", "copy", "then.qcow2"]);
    ok(tool("qemu-img")
        .args(["compare", "-f", "raw", "-F", "raw", &uri(&serve, "copy")])
        .arg(serve.path("then.img")));
}
