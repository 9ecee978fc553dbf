//! Images in object storage: pushed by one server, and used as bases by others.

mod killed_pushes;
mod network;
mod retention;
mod saved_pushes;

use freestone_testkit::Rng;

use crate::harness::prelude::*;

/// A directory that serves as an image store and outlives the servers.
struct Bucket(TempDir);

impl Bucket {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("bucket")
    }

    fn url(&self) -> String {
        format!("file://{}", self.path().display())
    }

    fn tag(&self, tag: &str) -> String {
        format!("{}:{tag}", self.url())
    }

    fn image(&self, name: &str, tag: &str) -> String {
        format!("{name}=image,url={}", self.tag(tag))
    }

    /// Returns the files below a directory of the image store, and their sizes in bytes.
    fn files(&self, under: &str) -> Vec<(PathBuf, u64)> {
        let mut files = Vec::new();
        let mut dirs = vec![self.path().join(under)];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(dir).into_iter().flatten() {
                let entry = entry.unwrap();
                let meta = entry.metadata().unwrap();
                if meta.is_dir() {
                    dirs.push(entry.path());
                } else {
                    files.push((entry.path(), meta.len()));
                }
            }
        }
        files
    }
}

/// Returns the content of a disk of `mib` MiB. In turn, each MiB is compressible, noise, or zeroes.
fn disk(mib: usize) -> Vec<u8> {
    let mut disk = vec![0; mib << 20];
    for (number, mib) in disk.chunks_mut(1 << 20).enumerate() {
        match number % 3 {
            0 => mib.chunks_mut(61).enumerate().for_each(|(run, bytes)| bytes.fill((run + number) as u8)),
            1 => Rng::new(number as u64).fill(mib),
            _ => {}
        }
    }
    disk
}

fn with_disk(mib: usize) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("disk.img"), disk(mib)).unwrap();
    dir
}

fn push(dir: &Path, words: &str, url: &str) -> Value {
    let (code, out, err) = finish(freestone(dir).args(["push", words, url, "--json"]));
    assert_eq!((code, err.as_str()), (0, ""));
    serde_json::from_str(&out).unwrap()
}

#[test]
fn pushed_image_is_forked_and_pushed_by_others() {
    let bucket = Bucket::new();
    let dir = with_disk(9);
    let pushed = push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("golden"));
    assert_eq!(
        (&pushed["generation"], &pushed["changed"], &pushed["sent_chunks"]),
        (&1.into(), &true.into(), &12.into())
    );
    let first = Serve::start(&[&bucket.image("golden", "golden"), "vm=fork,base=golden"]);
    assert!(content(&first, "golden") == disk(9));
    qemu_io(&uri(&first, "vm"), &["write -P 9 1M 8k", "write -P 3 5M 4k", "write -z 3M 64k"]);
    let text = first.text(&["push", "vm", &bucket.tag("vm")]);
    assert!(text.starts_with(&format!("vm: pushed to {}@", bucket.tag("vm"))), "{text}");
    let fork = content(&first, "vm");
    // A server on a second host: its only data is the image store.
    let second = Serve::start(&[&bucket.image("vm", "vm"), "own=fork,base=vm"]);
    assert!(content(&second, "vm") == fork);
    let stat = second.json(&["stat", "vm"])["store_stat"].clone();
    assert_eq!((&stat["chunks_fetched"], &stat["failures"]), (&13.into(), &0.into()), "{stat}");
    // Later changes are pushed to the same tag, as a delta.
    qemu_io(&uri(&second, "own"), &["write -P 77 0 4k"]);
    let again = second.json(&["push", "own", &bucket.tag("vm")]);
    assert_eq!((&again["generation"], &again["changed_bytes"]), (&2.into(), &4096.into()));
    let again = second.json(&["push", "own", &bucket.tag("vm")]);
    assert_eq!((&again["changed"], &again["sent_bytes"]), (&false.into(), &0.into()));
    assert!(second.text(&["push", "own", &bucket.tag("vm")]).ends_with("is the same already\n"));
    // A fork of a snapshot of a fork of the image is also pushed as changes to this image.
    second.text(&["snapshot", "own", "moment"]);
    second.text(&["fork", "moment", "third", "--nbd", &format!("unix:{}", second.path("nbd").display())]);
    qemu_io(&uri(&second, "third"), &["write -P 55 64k 8k"]);
    let third = second.json(&["push", "third", &bucket.tag("third")]);
    assert_eq!((&third["changed_bytes"], &third["sent_chunks"]), (&(12 << 10).into(), &1.into()));
    second.text(&["create", &bucket.image("back", "third")]);
    publish(&second, "back");
    assert!(content(&second, "back") == content(&second, "third"));
    // The first server still reads the image that it opened.
    assert!(content(&first, "golden") == disk(9));
    let listed: Value = {
        let (code, out, err) = finish(freestone(dir.path()).args(["images", &bucket.url(), "--json"]));
        assert_eq!((code, err.as_str()), (0, ""));
        serde_json::from_str(&out).unwrap()
    };
    let of = |row: usize, key: &str| listed[row][key].clone();
    assert_eq!((of(0, "tag"), of(0, "depth"), of(0, "size")), ("golden".into(), 1.into(), (9 << 20).into()));
    assert_eq!((of(2, "tag"), of(2, "depth"), of(2, "generation")), ("vm".into(), 3.into(), 2.into()));
}

#[test]
fn fork_larger_than_its_base_is_pushed() {
    let bucket = Bucket::new();
    let dir = with_disk(3);
    push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("golden"));
    let serve = Serve::start(&[&bucket.image("golden", "golden"), "low=fork,base=golden"]);
    qemu_io(&uri(&serve, "low"), &["write -P 9 1M 8k"]);
    serve.text(&["snapshot", "low", "moment"]);
    let nbd = format!("unix:{}", serve.path("nbd").display());
    serve.text(&["fork", "moment", "high", "size=5M", "--nbd", &nbd]);
    qemu_io(&uri(&serve, "high"), &["write -P 3 2M 4k", "write -P 4 4M 4k"]);
    serve.text(&["set", "high", "disksize=7M"]);
    qemu_io(&uri(&serve, "high"), &["write -P 5 6M 4k"]);
    let pushed = serve.json(&["push", "high", &bucket.tag("high")]);
    assert_eq!(pushed["changed_bytes"], (2 + 3) * 4096);
    serve.text(&["create", &bucket.image("back", "high")]);
    serve.text(&["publish", "back", "--nbd", &nbd]);
    let back = content(&serve, "back");
    assert_eq!(back.len(), 7 << 20);
    assert!(back == content(&serve, "high"));
}

#[test]
fn raw_qcow2_and_saved_devices_are_pushed() {
    let bucket = Bucket::new();
    let dir = with_disk(3);
    ok(tool("qemu-img").current_dir(dir.path()).args([
        "convert",
        "-O",
        "qcow2",
        "-c",
        "disk.img",
        "disk.qcow2",
    ]));
    let raw = push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("raw"));
    let qcow2 = push(dir.path(), "d=qcow2,path=disk.qcow2", &bucket.tag("qcow2"));
    // Chunks with equal content are stored once.
    assert_eq!(
        (&raw["sent_chunks"], &qcow2["sent_chunks"], &qcow2["reused_chunks"]),
        (&4.into(), &0.into(), &4.into())
    );
    let serve = Serve::start_in(dir, &["r=ram,disksize=3M"], true);
    ok(tool("nbdcopy").arg(serve.path("disk.img")).arg(uri(&serve, "r")));
    let file = serve.path("r.saved");
    serve.text(&["save", "r", file.to_str().unwrap()]);
    serve.text(&["restore", file.to_str().unwrap(), "again"]);
    serve.text(&["push", "again", &bucket.tag("saved")]);
    serve.text(&["create", &bucket.image("back", "saved"), "--if-absent"]);
    publish(&serve, "back");
    assert!(content(&serve, "back") == disk(3));
    serve.text(&["snapshot", "r", "s"]);
    qemu_io(&uri(&serve, "r"), &["write -P 1 0 1M"]);
    let of_snapshot = serve.json(&["push", "s", &bucket.tag("snapshot")]);
    assert_eq!(of_snapshot["sent_chunks"], 0);
    // The write made two equal chunks. Depending on timing, one or both are sent.
    let of_live = serve.json(&["push", "r", &bucket.tag("live")]);
    assert!((1..=2).contains(&of_live["sent_chunks"].as_u64().unwrap()), "{of_live}");
}

/// A fork's snapshot is also included if it exists only in the fork's save file, and not as a
/// device on the server.
#[test]
fn restored_fork_push_includes_its_snapshot() {
    let bucket = Bucket::new();
    let dir = with_disk(3);
    push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("golden"));
    let serve = Serve::start(&[&bucket.image("golden", "golden"), "vm=fork,base=golden"]);
    qemu_io(&uri(&serve, "vm"), &["write -P 9 1M 8k"]);
    serve.text(&["snapshot", "vm", "s"]);
    serve.text(&["fork", "s", "deep", "--nbd", &format!("unix:{}", serve.path("nbd").display())]);
    qemu_io(&uri(&serve, "deep"), &["write -P 6 2M 4k"]);
    let pushed = serve.json(&["push", "deep", &bucket.tag("deep")]);
    assert_eq!(pushed["changed_bytes"], 12 << 10);
    for (names, without) in [("s,deep", &["deep", "s"][..]), ("deep", &["deep"])] {
        let file = serve.path("saved");
        serve.text(&["save", names, file.to_str().unwrap()]);
        serve.text(&[&["remove"], without].concat());
        serve.text(&["restore", file.to_str().unwrap()]);
        let again = serve.json(&["push", "deep", &bucket.tag("deep")]);
        assert_eq!((&again["changed"], &again["url"]), (&false.into(), &pushed["url"]), "{names}");
    }
}

#[test]
fn unsuitable_push_is_refused() {
    let bucket = Bucket::new();
    let dir = with_disk(1);
    let message = refused(dir.path(), 2, &["push", "d=file,path=disk.img", &bucket.tag("x")]);
    assert_eq!(message, "d: push: would be opened for writing; say readonly=yes");
    for (args, message) in [
        (&["push", "d", "nowhere"][..], "d: push: the URL must be a URL, for example"),
        (&["push", "d", "file:///x:a/b:-"], "d: push: the URL a tag has letters"),
        (&["push", "d", "s3://me:secret@bucket/x"], "d: push: the URL has no user or password"),
        (&["push", "d", "file:///x", "hedge=1s"], "d: hedge=1s: a directory is not reached over the network"),
        (&["push", "d", "file:///x", "encrypt=yes"], "d: encrypt=yes: only with key=FILE"),
        (&["push", "d", "file:///x", "grace=1s"], "grace=1s: must be 1h to"),
        (
            &["push", "d", "file:///x", "cachet=1"],
            "unknown key \"cachet\"; the keys of push are key, timeout",
        ),
        (
            &["push", "d=file,path=disk.img,readonly=yes", "file:///x", "--background"],
            "d: push: --background",
        ),
        (&["images", "file:///x", "key=none"], "images: key="),
        (&["serve", "i=image,url=file://x"], "i: url=file://x: must have an absolute path"),
        (&["serve", "i=image"], "i: url is missing; an image device needs it"),
        (&["serve", "i=image,url=file:///x,cache_size=1M"], "i: cache_size=1M: must be at least 64M"),
    ] {
        let (code, out, err) = finish(freestone(dir.path()).args(args));
        let found = sentence(&err);
        assert!(
            matches!(code, 1 | 2) && out.is_empty() && found.contains(message),
            "{args:?}: {code} {found}"
        );
        assert!(!found.contains("secret"));
    }
    let serve = Serve::start_in(
        dir,
        &["f=file,path=disk.img", "n=null,size=1M", "z=ram,disksize=4M,zoned=1,zone_size=1M"],
        true,
    );
    let to = bucket.tag("x");
    assert_eq!(
        serve.refused(1, &["push", "f", &to]),
        "f: push: changes while it is read; push a snapshot of it: freestone snapshot f NAME"
    );
    serve.text(&["snapshot", "f", "fs"]);
    assert_eq!(serve.json(&["push", "fs", &to])["sent_chunks"], 2);
    assert!(serve.refused(1, &["push", "z", &to]).starts_with("z: cannot be pushed: "));
    assert!(serve.refused(1, &["create", &bucket.image("i", "nope")]).starts_with("i: there is no tag nope"));
    let message = serve.refused(1, &["create", "i=image,url=file:///nowhere/at/all"]);
    assert_eq!(message, "i: file:///nowhere/at/all: there is no store of images; freestone push begins one");
}

#[test]
fn encrypted_store_needs_its_key() {
    let bucket = Bucket::new();
    let dir = with_disk(2);
    let at = |name: &str| dir.path().join(name);
    fs::write(at("key"), format!("{}\n", "3c".repeat(32))).unwrap();
    fs::write(at("other"), "4d".repeat(32)).unwrap();
    fs::write(at("none"), "what").unwrap();
    let source = "d=file,path=disk.img,readonly=yes";
    let to = bucket.tag("v1");
    let (code, _, err) = finish(freestone(dir.path()).args(["push", source, &to, "key=key", "encrypt=yes"]));
    assert_eq!((code, err.as_str()), (0, ""));
    for (words, message) in [
        ("", "its names are keyed: say key=FILE"),
        (",key=other", "the key file is not the one that it was made with"),
        (",key=none", "must hold 64 hexadecimal digits"),
        (",key=nowhere", "No such file"),
    ] {
        let device = format!("{}{words}", bucket.image("i", "v1"));
        let (code, _, err) = finish(freestone(dir.path()).args(["serve", &device]));
        assert!(code == 1 && err.contains(message), "{words}: {err}");
    }
    let serve =
        Serve::start_in(dir, &[&format!("{},key=key", bucket.image("i", "v1")), "vm=fork,base=i"], true);
    assert!(content(&serve, "i") == disk(2));
    qemu_io(&uri(&serve, "vm"), &["write -P 5 0 4k"]);
    // A push of a fork uses the image store and the key of its base image.
    assert_eq!(serve.json(&["push", "vm", &bucket.tag("vm")])["changed_bytes"], 4096);
    for (path, _) in bucket.files("chunks") {
        let bytes = fs::read(path).unwrap();
        assert!(!bytes.windows(8).any(|part| part == [5; 8]));
    }
}

#[test]
fn restarted_server_has_the_same_image() {
    let bucket = Bucket::new();
    let dir = with_disk(3);
    let source = "d=file,path=disk.img,readonly=yes";
    push(dir.path(), source, &bucket.tag("golden"));
    let devices = [bucket.image("golden", "golden"), "vm=fork,base=golden,keep=yes".into()];
    let args = |with: bool| -> Vec<&str> {
        let devices: Vec<&str> = devices.iter().filter(|_| with).map(String::as_str).collect();
        [&["--state", "state"][..], &devices].concat()
    };
    let serve = Serve::start_in(dir, &args(true), true);
    qemu_io(&uri(&serve, "vm"), &["write -P 9 64k 8k"]);
    let before = content(&serve, "vm");
    // Another image is pushed to the same tag.
    let other = with_disk(6);
    push(other.path(), source, &bucket.tag("golden"));
    let dir = serve.end();
    // The fork has the image that it was created with, whether or not the devices are given as
    // arguments again.
    let serve = Serve::start_in(dir, &args(true), true);
    assert!(content(&serve, "vm") == before);
    let dir = serve.end();
    // If the image store is unavailable, the cache provides the image.
    fs::rename(bucket.path(), bucket.path().with_extension("away")).unwrap();
    let serve = Serve::start_in(dir, &args(false), true);
    assert!(content(&serve, "vm") == before);
    let dir = serve.end();
    // Without the cache the device is missing until the image store is available again.
    fs::remove_dir_all(dir.path().join("cached")).unwrap();
    let serve = Serve::start_in(dir, &args(false), true);
    let listed = serve.text(&["list"]);
    assert!(listed.contains("golden: is not there again, "), "{listed}");
    let dir = serve.end();
    fs::rename(bucket.path().with_extension("away"), bucket.path()).unwrap();
    let serve = Serve::start_in(dir, &args(false), true);
    assert!(content(&serve, "vm") == before);
}

#[test]
fn prune_deletes_untagged_objects_after_the_grace() {
    let bucket = Bucket::new();
    let dir = with_disk(3);
    let source = "d=file,path=disk.img,readonly=yes";
    push(dir.path(), source, &bucket.tag("a"));
    let (code, out, err) =
        finish(freestone(dir.path()).args(["images", &bucket.url(), "--untag", "a", "--json"]));
    assert_eq!((code, err.as_str()), (0, ""), "{out}");
    assert_eq!(serde_json::from_str::<Value>(&out).unwrap(), json!({ "removed": "a" }));
    assert!(
        refused(dir.path(), 1, &["images", &bucket.url(), "--untag", "a"])
            .ends_with("there is no tag a in it")
    );
    let prune = |more: &[&str]| -> Value {
        let (code, out, err) =
            finish(freestone(dir.path()).args(["prune", &bucket.url(), "--json"]).args(more));
        assert_eq!((code, err.as_str()), (0, ""));
        serde_json::from_str(&out).unwrap()
    };
    let no_tag = "there is no tag, so nothing was deleted. If tags/ is missing, restore it.";
    assert!(refused(dir.path(), 1, &["prune", &bucket.url()]).contains(no_tag));
    let other = tempfile::tempdir().unwrap();
    // The image shares no chunk with the first one.
    fs::write(other.path().join("disk.img"), vec![0xb5; 1 << 20]).unwrap();
    push(other.path(), source, &bucket.tag("b"));
    assert_eq!(prune(&[])["deleted"], 0);
    // All files are made two days old, which is beyond the grace period.
    let old = std::time::SystemTime::now() - std::time::Duration::from_secs(2 * 86_400);
    for (path, _) in bucket.files("") {
        fs::File::options().write(true).open(path).unwrap().set_modified(old).unwrap();
    }
    let would = prune(&["--dry-run"]);
    assert_eq!((&would["deleted"], &would["dry_run"]), (&7.into(), &true.into()), "{would}");
    assert_eq!(prune(&[])["deleted"], 7);
    assert_eq!(bucket.files("manifests").len(), 1);
    let listed = finish(freestone(dir.path()).args(["images", &bucket.url()])).1;
    assert!(listed.contains("\nb "), "{listed}");
}

#[test]
fn pulled_image_needs_no_store() {
    let bucket = Bucket::new();
    let dir = with_disk(6);
    push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("v1"));
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    let pulled = serve.json(&["pull", &bucket.tag("v1"), "golden"]);
    assert_eq!((&pulled["created"], &pulled["fetched_chunks"]), (&true.into(), &8.into()));
    let again = serve.json(&["pull", &bucket.tag("v1"), "golden"]);
    assert_eq!((&again["created"], &again["fetched_chunks"]), (&false.into(), &0.into()));
    assert!(serve.refused(1, &["pull", &bucket.tag("v1"), "r"]).contains("exists"));
    fs::remove_dir_all(bucket.path()).unwrap();
    serve.text(&["fork", "golden", "vm", "--nbd", &format!("unix:{}", serve.path("nbd").display())]);
    assert!(content(&serve, "vm") == disk(6));
}

#[test]
fn missing_object_fails_with_the_reason() {
    let bucket = Bucket::new();
    let dir = with_disk(3);
    push(dir.path(), "d=file,path=disk.img,readonly=yes", &bucket.tag("v1"));
    let serve = Serve::logged_in(
        dir,
        &[&bucket.image("golden", "v1"), "vm=fork,base=golden", "--nbd", "unix:nbd", "--control", "control"],
    );
    qemu_io(&uri(&serve, "vm"), &["read 0 4k"]);
    for (path, _) in bucket.files("chunks") {
        fs::remove_file(path).unwrap();
    }
    let output =
        tool("qemu-io").args(["-f", "raw", "-c", "read 1M 4k", &uri(&serve, "vm")]).output().unwrap();
    let printed = String::from_utf8(output.stdout).unwrap();
    assert!(printed.contains("Input/output error"), "{printed}");
    qemu_io(&uri(&serve, "vm"), &["read 0 64k"]);
    let stat = serve.json(&["stat", "golden"])["store_stat"].clone();
    assert!(stat["last_error"].as_str().unwrap().ends_with("there is no such object"), "{stat}");
    serve.log_with("there is no such object");
}
