//! Pushes of saved devices (`push --restore`), which need no server.

use std::io::{BufRead as _, BufReader};

use freestone_testkit::s3::{Server, ServerFault};

use super::network::with_store;
use super::{Bucket, content, disk, push, with_disk};
use crate::harness::prelude::*;

/// Returns a directory with a RAM disk of `mib` MiB as a save file, and with its content as an image file.
fn with_save(mib: usize) -> TempDir {
    let dir = with_disk(mib);
    let serve = Serve::start_in(dir, &[&format!("r=ram,disksize={mib}M")], true);
    ok(tool("nbdcopy").arg(serve.path("disk.img")).arg(uri(&serve, "r")));
    serve.text(&["save", "r", serve.path("r.saved").to_str().unwrap()]);
    serve.end()
}

/// Pushes a device of a save file to the image store. Returns the JSON output of the push.
fn push_saved(dir: &Path, name: &str, file: &str, url: &str, more: &[&str]) -> Value {
    let mut command = freestone(dir);
    let (code, out, err) = finish(command.args(["push", name, url, "--restore", file, "--json"]).args(more));
    assert_eq!((code, err.as_str()), (0, ""), "{name}");
    serde_json::from_str(&out).unwrap()
}

/// Returns the content of the image with the tag `tag`.
fn image(bucket: &Bucket, tag: &str) -> Vec<u8> {
    let serve = Serve::start(&[bucket.image("i", tag)]);
    content(&serve, "i")
}

/// Returns the sorted paths of the files in a directory.
fn listed(dir: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn saved_family_is_pushed_without_a_server() {
    let bucket = Bucket::new();
    let dir = with_disk(9);
    push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("golden"));
    let golden = bucket.image("golden", "golden");
    let nbd = |serve: &Serve| format!("unix:{}", serve.path("nbd").display());
    let serve = Serve::start_in(dir, &[&golden, "vm=fork,base=golden"], true);
    qemu_io(&uri(&serve, "vm"), &["write -P 9 1M 8k", "write -z 3M 64k"]);
    let moment = content(&serve, "vm");
    serve.text(&["snapshot", "vm", "s"]);
    serve.text(&["fork", "s", "deep", "--nbd", &nbd(&serve)]);
    qemu_io(&uri(&serve, "vm"), &["write -P 5 5M 4k"]);
    qemu_io(&uri(&serve, "deep"), &["write -P 6 6M 4k"]);
    let [vm, deep] = ["vm", "deep"].map(|name| content(&serve, name));
    serve.text(&["save", "vm,s,deep", serve.path("all.saved").to_str().unwrap()]);
    serve.text(&["save", "vm", serve.path("vm.saved").to_str().unwrap()]);
    let dir = serve.end();
    let before = listed(dir.path());
    let base = ["--device", &golden];
    for (name, file, held) in [
        ("vm", "vm.saved", &vm),
        ("vm", "all.saved", &vm),
        ("s", "all.saved", &moment),
        ("deep", "all.saved", &deep),
    ] {
        let tag = format!("{name}-of-{}", file.trim_end_matches(".saved"));
        let pushed = push_saved(dir.path(), name, file, &bucket.tag(&tag), &base);
        assert!(image(&bucket, &tag) == *held, "{name} of {file}");
        // For a fork of an image in the same image store, only the fork's own pages are read and sent.
        if name == "vm" {
            assert_eq!(pushed["changed_bytes"], (8 << 10) + (64 << 10) + (4 << 10), "{pushed}");
        }
    }
    assert_eq!(listed(dir.path()), before);
}

#[test]
fn saved_disk_is_pushed_repeatedly_without_base() {
    let bucket = Bucket::new();
    let dir = with_save(4);
    let before = listed(dir.path());
    let first = push_saved(dir.path(), "r", "r.saved", &bucket.tag("r"), &[]);
    assert_eq!((&first["name"], &first["changed"]), (&"r".into(), &true.into()));
    assert!(image(&bucket, "r") == disk(4));
    // Pages beyond mem_limit are evicted to a backing file, which is removed after the push.
    let spilling = ["mem_limit=1M", "backing_dev=spill", "backing_size=16M"];
    let again = push_saved(dir.path(), "r", "r.saved", &bucket.tag("r"), &spilling);
    assert_eq!(again["changed"], false);
    // Pages beyond mem_limit are evicted to a backing device that `--device` opens for the push.
    let aside = tempfile::tempdir().unwrap();
    let spill = format!("s=file,path={},size=16M", aside.path().join("spill").display());
    let spilling = ["mem_limit=1M", "backing_dev=device:s", "--device", &spill];
    let again = push_saved(dir.path(), "r", "r.saved", &bucket.tag("r"), &spilling);
    assert_eq!(again["changed"], false);
    let message =
        refused(dir.path(), 1, &["push", "r", &bucket.tag("r"), "--restore", "r.saved", "mem_limit=1M"]);
    let room = "; use a larger mem_limit, or a backing_dev";
    assert!(message.starts_with("r: push: page ") && message.ends_with(room), "{message}");
    assert_eq!(listed(dir.path()), before);
}

#[test]
fn fork_its_save_and_its_delta_push_one_image() {
    let bucket = Bucket::new();
    let serve =
        Serve::start_in(with_disk(3), &["base=file,path=disk.img,readonly=yes", "vm=fork,base=base"], true);
    qemu_io(&uri(&serve, "vm"), &["write -P 9 64k 8k", "discard 1M 64k", "write -P 3 2M 4k"]);
    let vm = content(&serve, "vm");
    serve.text(&["save", "vm", serve.path("vm.saved").to_str().unwrap(), "--whole-base"]);
    serve.text(&["delta", "save", "vm", serve.path("vm.qcow2").to_str().unwrap()]);
    let dir = serve.end();
    let base = ["--device", "b=file,path=disk.img,readonly=yes"];
    let saved = push_saved(dir.path(), "vm", "vm.saved", &bucket.tag("vm"), &base);
    assert!(image(&bucket, "vm") == vm);
    let delta = push(dir.path(), "d=qcow2,path=vm.qcow2", &bucket.tag("vm"));
    assert_eq!((&delta["changed"], &delta["url"]), (&false.into(), &saved["url"]));
}

#[test]
fn push_of_absent_or_unsuitable_device_is_refused() {
    let bucket = Bucket::new();
    let serve = Serve::start_in(
        with_save(3),
        &["base=file,path=disk.img,readonly=yes", "a=fork,base=base", "b=fork,base=base", "c=fork,base=base"],
        true,
    );
    serve.text(&["snapshot", "a", "s"]);
    serve.text(&["save", "a,b,c,s", serve.path("all.saved").to_str().unwrap()]);
    let dir = serve.end();
    fs::write(dir.path().join("other.img"), vec![7; 3 << 20]).unwrap();
    let to = bucket.tag("x");
    for (status, args, message) in [
        (1, &["d", "--restore", "none"][..], "d: push: cannot read none: No such file"),
        (1, &["d", "--restore", "disk.img"], "d: push: disk.img was not saved by Freestone"),
        (1, &["d", "--restore", "r.saved"], "d: push: r.saved: no device of that name is in it; there is r"),
        (1, &["d", "--restore", "all.saved"], "no device of that name is in it; there is s, a, b and 1 more"),
        (
            1,
            &["a", "--restore", "all.saved"],
            "which no --device is; give it with --device NAME=KIND,KEY=VALUE...",
        ),
        (
            1,
            &["a", "--restore", "all.saved", "--device", "o=file,path=other.img,readonly=yes"],
            "which no --device is",
        ),
        (1, &["a", "--restore", "all.saved", "--device", "o=file,path=none,readonly=yes"], "o: "),
        (2, &["a", "--restore", "all.saved", "--device", "o=fil,path=x"], "o: unknown kind \"fil\"; file?"),
        (
            2,
            &["a", "--restore", "all.saved", "--device", "o=file,path=disk.img"],
            "o: push: would be opened for writing; say readonly=yes",
        ),
        (
            1,
            &["a", "--restore", "all.saved", "--device", "o=file,path=disk.img,readonly=yes", "mem_limit=1G"],
            "mem_limit: the forks in the file join the family of o; set it there",
        ),
        (2, &["r", "--restore", "r.saved", "mem_limit=1"], "r: mem_limit=1: give a unit"),
        (2, &["r", "mem_limit=1G"], "unknown key \"mem_limit\""),
        (2, &["r=ram,disksize=1M", "--restore", "r.saved"], "with --restore NAME is a device in the file"),
        (2, &["r", "--restore", "r.saved", "--background"], "r: push: --background is for a server"),
    ] {
        let (name, rest) = args.split_first().unwrap();
        let found = refused(dir.path(), status, &[&["push", name, &to], rest].concat());
        assert!(found.contains(message), "{args:?}: {found}");
    }
    let (code, _, err) = finish(freestone(dir.path()).args(["push", "r", &to, "--device", "o=null,size=1M"]));
    assert!(code == 2 && err.contains("--restore <FILE>"), "{err}");
    // The refused pushes did not create an image store.
    assert!(!bucket.path().exists());
}

#[test]
fn damaged_save_pushes_nothing() {
    let bucket = Bucket::new();
    let dir = with_save(2);
    let whole = fs::read(dir.path().join("r.saved")).unwrap();
    let at = |part: usize| part * (whole.len() - 1) / 16;
    let damaged = (0..=16).map(|part| {
        let mut bytes = whole.clone();
        bytes[at(part)] ^= 0x10;
        bytes
    });
    let files: Vec<_> = damaged.chain((0..16).map(|part| whole[..at(part)].to_vec())).collect();
    let before = push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("old"));
    let objects = bucket.files("");
    for bytes in files {
        fs::write(dir.path().join("bad.saved"), bytes).unwrap();
        for tag in ["old", "new"] {
            let message = refused(dir.path(), 1, &["push", "r", &bucket.tag(tag), "--restore", "bad.saved"]);
            assert!(message.starts_with("r: push: "), "{message}");
        }
        assert_eq!(bucket.files(""), objects);
    }
    let (code, out, _) = finish(freestone(dir.path()).args(["images", &bucket.url(), "--json"]));
    let images: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((code, images.as_array().unwrap().len(), &images[0]["tag"]), (0, 1, &"old".into()));
    assert!(before["url"].as_str().unwrap().ends_with(images[0]["image"].as_str().unwrap()));
    push_saved(dir.path(), "r", "r.saved", &bucket.tag("new"), &[]);
    assert!(image(&bucket, "new") == disk(2));
}

/// Starts a push, and interrupts it when its progress reaches `verb`. Returns the verb whose progress was reported
/// last.
fn interrupt_at(server: &Server, dir: &Path, verb: &str) -> String {
    let mut command = with_store(server, freestone(dir));
    command.args(["push", "r", "s3://images/x:v1", "--restore", "r.saved", "--progress", "json"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let (mut at, mut last) = (String::new(), String::new());
    for line in BufReader::new(child.stderr.take().unwrap()).lines().map(Result::unwrap) {
        let Ok(message) = serde_json::from_str::<Value>(&line) else {
            last = line;
            continue;
        };
        let now = message["progress"]["verb"].as_str().unwrap();
        if now == verb && at != verb {
            signal(&child, Signal::INT);
        }
        now.clone_into(&mut at);
    }
    assert_eq!((child.wait().unwrap().code(), last.as_str()), (Some(130), "freestone: r: push: cancelled"));
    at
}

#[test]
fn interrupted_restore_or_push_leaves_nothing() {
    let server = Server::start(&["images"]);
    let dir = with_save(48);
    let before = listed(dir.path());
    server.add_fault(|_| true, ServerFault::Stall(None));
    // The restore may finish before the interrupt arrives, so the test tries several times.
    let tries = (0..20).find(|_| interrupt_at(&server, dir.path(), "restore") == "restore");
    assert!(tries.is_some(), "it never ended while it restored");
    server.clear_faults();
    server.add_fault(|asked| asked.key.contains("chunks/"), ServerFault::Stall(None));
    assert_eq!(interrupt_at(&server, dir.path(), "push"), "push");
    assert!(!server.keys("images").iter().any(|key| key.contains("tags/")));
    assert_eq!(listed(dir.path()), before);
    server.clear_faults();
    let mut command = with_store(&server, freestone(dir.path()));
    let args = ["push", "r", "s3://images/x:v1", "--restore", "r.saved", "--progress", "json"];
    let (code, _, err) = finish(command.args(args));
    assert_eq!(code, 0, "{err}");
    // The progress of the restore and of the push was reported up to the end.
    let progress_lines: Vec<Value> = err.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    for verb in ["restore", "push"] {
        let of: Vec<_> = progress_lines.iter().filter(|line| line["progress"]["verb"] == verb).collect();
        let last = &of.last().unwrap()["progress"];
        assert!(of.len() > 1 && last["done_bytes"] == last["total_bytes"], "{verb}: {of:?}");
    }
}
