//! Servers with a state that end, in whatever way, and are started again.

mod fates;
mod kept;
mod random;
mod starts;

use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use crate::clients::tools::{ok, root_tool};
use crate::harness::{Serve, refused};

/// A server on the state in the directory.
fn serve(dir: TempDir, args: &[&str]) -> Serve {
    Serve::start_in(dir, &[&["--state", "state"], args].concat(), true)
}

/// Ends it as a crash would.
fn killed(serve: Serve) -> TempDir {
    serve.signal(Signal::KILL);
    serve.wait().1
}

fn ended(serve: Serve) -> TempDir {
    serve.signal(Signal::TERM);
    let (code, dir) = serve.wait();
    assert_eq!(code, Some(0));
    dir
}

fn image(size: usize) -> TempDir {
    image_in(tempfile::tempdir().unwrap(), size)
}

fn image_in(dir: TempDir, size: usize) -> TempDir {
    fs::write(dir.path().join("golden.img"), vec![7; size]).unwrap();
    dir
}

/// Of a device, by `stat`.
fn stat(serve: &Serve, name: &str, key: &str) -> Value {
    serve.json(&["stat", name])[key].clone()
}

/// Whether a client finds an export, as the oldest ones ask: else the connection ends.
fn is_served(socket: &Path, name: &str) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else { return false };
    let mut hello = b"\0\0\0\x03IHAVEOPT\0\0\0\x01".to_vec();
    hello.extend((name.len() as u32).to_be_bytes());
    hello.extend(name.as_bytes());
    let (mut greeting, mut answer) = ([0; 18], [0; 10]);
    stream.read_exact(&mut greeting).unwrap();
    stream.write_all(&hello).unwrap();
    stream.read_exact(&mut answer).is_ok()
}

/// A small file system in memory.
struct Mounted(PathBuf);

impl Mounted {
    fn of_bytes(at: PathBuf, size: &str) -> Self {
        fs::create_dir(&at).unwrap();
        let options = format!("size={size},mode=777");
        ok(root_tool("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&at));
        Self(at)
    }

    fn again(&self, options: &str) {
        ok(root_tool("mount").args(["-o", &format!("remount,{options}")]).arg(&self.0));
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = root_tool("umount").arg("--lazy").arg(&self.0).status();
    }
}

const DATA: &str = "data=file,path=data.img,size=1M";
const GOLDEN: &str = "golden=file,path=golden.img,readonly=yes";

#[test]
fn devices_and_exports_are_there_again_and_what_is_lost_is_withheld() {
    let server = serve(image(1 << 20), &[GOLDEN, DATA, "disk=ram,disksize=16M", "drive=null,size=1M"]);
    for verb in [
        &["fork", "golden", "job-%n", "--count", "2", "--nbd", "unix:job-%n.sock", "mem_limit=1M"][..],
        &["fork", "golden", "scratch", "on_lost=empty", "--nbd", "unix:scratch.sock"],
        &["publish", "golden", "each", "--template", "--nbd", "unix:each.sock", "size=2M"],
        &["create", "work=ram,disksize=8M,comp_algorithm=zstd"],
        &["snapshot", "work", "before"],
        &["create", "kept=snapshot,origin=data,cow=./kept.cow,cow_size=1M"],
        &["set", "disk", "disksize=32M", "mem_limit=20M"],
        &["publish", "disk", "--nbd", "tcp:127.0.0.1:0", "--read-only"],
        &["create", "gone=ram,disksize=1M"],
        &["remove", "gone"],
        &["unpublish", "drive"],
    ] {
        server.text(verb);
    }
    let dumped = server.text(&["dump"]);
    let uuid = |server: &Serve, name| stat(server, name, "uuid");
    let known: Vec<Value> = ["disk", "job-1", "before", "golden"].map(|name| uuid(&server, name)).into();
    let mut dir = killed(server);
    for generation in 2..5 {
        let server = serve(dir, &[]);
        assert_eq!(server.text(&["dump"]), dumped);
        let again: Vec<Value> = ["disk", "job-1", "before", "golden"].map(|name| uuid(&server, name)).into();
        assert_eq!(again, known);
        // What is in memory is another content now; an image is not.
        assert_eq!(stat(&server, "disk", "generation"), generation);
        assert_eq!(stat(&server, "golden", "generation"), 1);
        let list = server.json(&["list"]);
        let mut withheld: Vec<&str> = Vec::new();
        for device in list["devices"].as_array().unwrap() {
            if device["withheld"] == true {
                withheld.push(device["name"].as_str().unwrap());
                assert_eq!(device["exports"].as_array().unwrap().len(), 0);
            }
        }
        assert_eq!(withheld, ["disk", "job-0", "job-1", "work", "before"]);
        assert!(server.said.contains("job-0: has lost content, and is withheld;"), "{}", server.said);
        for (socket, name, there) in [
            ("nbd", "golden", true),
            ("nbd", "disk", false),
            ("nbd", "drive", false),
            ("scratch.sock", "scratch", true),
            ("each.sock", "each", true),
        ] {
            assert_eq!(is_served(&server.path(socket), name), there, "{name}");
        }
        assert!(!is_served(&server.path("job-0.sock"), "job-0"));
        // An operator says so.
        if generation == 3 {
            server.text(&["publish", "disk"]);
            server.text(&["publish", "job-0"]);
            assert!(is_served(&server.path("nbd"), "disk") && is_served(&server.path("job-0.sock"), "job-0"));
            let why = server.refused(2, &["publish", "disk"]);
            assert!(why.starts_with("disk: publish: say where: "), "{why}");
            assert_eq!(server.text(&["dump"]), dumped);
        }
        // However it ends.
        dir = if generation == 2 { ended(server) } else { killed(server) };
    }
}

#[test]
fn what_is_asked_otherwise_is_refused_or_brought_in() {
    let file = |text: &str| format!("[[device]]\nname = 'a'\nkind = 'ram'\ndisksize = '1M'\n{text}");
    let dir = tempfile::tempdir().unwrap();
    let write = |dir: &TempDir, text: &str| fs::write(dir.path().join("f.toml"), file(text)).unwrap();
    write(&dir, "export = { nbd = 'tcp:127.0.0.1:0' }\n[[device]]\nname = 'b'\nkind = 'null'\nsize = '1M'");
    let server = serve(dir, &["--config", "f.toml"]);
    server.text(&["create", "hand=null,size=1M"]);
    // The same file again.
    let server = serve(ended(server), &["--config", "f.toml"]);
    // A second server.
    let other =
        refused(server.dir.path(), 1, &["serve", "--state", "state", "--control", "c2", "--nbd", "unix:n2"]);
    assert!(other.ends_with("/state: is the state of another server that runs"), "{other}");
    let dir = ended(server);
    write(&dir, "mem_limit = '2M'\n[[device]]\nname = 'c'\nkind = 'null'\nsize = '1M'\npublish = false");
    let before = fs::read(dir.path().join("state/topology")).unwrap();
    let args = ["serve", "--state", "state", "--config", "f.toml", "--control", "control"];
    let why = refused(dir.path(), 1, &args);
    let at = dir.path().display();
    assert!(
        why.starts_with(&format!("{at}/state: is otherwise than what is asked for: remove b; ")),
        "{why}"
    );
    for part in [
        "a: a=ram,disksize=1M is to be a=ram,disksize=1M,mem_limit=2M; unpublish a from tcp:127.0.0.1:",
        "; create c=null,size=1M,publish=no; --apply does that;",
    ] {
        assert!(why.contains(part), "{why}");
    }
    let server = serve(dir, &["--config", "f.toml", "--apply"]);
    let names = |server: &Serve| -> Vec<String> {
        let list = server.json(&["list"]);
        list["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap().to_owned()).collect()
    };
    assert_eq!(names(&server), ["a", "hand", "c"]);
    assert_eq!(server.json(&["get", "a", "mem_limit"])["mem_limit"], 2 << 20);
    let dir = ended(server);
    assert_ne!(fs::read(dir.path().join("state/topology")).unwrap(), before);
    let server = serve(dir, &["--config", "f.toml"]);
    assert_eq!(names(&server), ["a", "hand", "c"]);
    // At run time.
    write(&server.dir, "");
    server.text(&["apply", "f.toml"]);
    let server = serve(killed(server), &[]);
    assert_eq!(names(&server), ["a", "hand"]);
}

#[test]
fn one_that_cannot_be_made_again_holds_up_no_other() {
    let server = serve(image(1 << 20), &[GOLDEN, "disk=null,size=1M"]);
    server.text(&["fork", "golden", "job", "on_lost=empty"]);
    let dir = ended(server);
    fs::rename(dir.path().join("golden.img"), dir.path().join("away.img")).unwrap();
    let mut dir = dir;
    // It is not forgotten.
    for _ in 0..2 {
        let server = serve(dir, &[]);
        let list = server.json(&["list"]);
        assert_eq!(list["devices"].as_array().unwrap().len(), 1);
        assert_eq!(list["missing"][1]["name"], "job");
        assert!(server.text(&["list"]).contains("\ngolden: is not there again, "));
        dir = killed(server);
    }
    fs::rename(dir.path().join("away.img"), dir.path().join("golden.img")).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(server.json(&["list"])["devices"].as_array().unwrap().len(), 3);
    let dir = ended(server);
    fs::remove_file(dir.path().join("golden.img")).unwrap();
    let server = serve(dir, &[]);
    server.text(&["remove", "job"]);
    server.text(&["create", "golden=null,size=1M"]);
    let server = serve(ended(server), &[]);
    let list = server.json(&["list"]);
    assert_eq!((list["devices"].as_array().unwrap().len(), &list["missing"]), (2, &Value::Null));
}

#[test]
fn a_snapshot_whose_copies_were_in_memory_is_lost_with_them() {
    let words = [DATA, "copies=ram,disksize=4M", "then=snapshot,origin=data,cow=copies,store=P,force=yes"];
    let mut dir = tempfile::tempdir().unwrap();
    // The same words say the same, though force is not kept.
    for (generation, words) in [(1, &words[..]), (2, &words), (3, &[])] {
        let server = serve(dir, words);
        assert_eq!(server.json(&["list"])["missing"], Value::Null);
        assert_eq!(stat(&server, "then", "generation"), generation);
        assert_eq!(stat(&server, "data", "generation"), 1);
        assert_eq!(is_served(&server.path("nbd"), "then"), generation == 1);
        if generation == 3 {
            server.text(&["publish", "then"]);
            assert!(is_served(&server.path("nbd"), "then"));
        }
        dir = killed(server);
    }
}

#[test]
fn a_fork_that_was_restored_over_an_image_of_any_length_is_there_again() {
    let server = serve(image((1 << 20) + 512), &[GOLDEN]);
    server.text(&["fork", "golden", "job"]);
    server.text(&["save", "job", "job.saved"]);
    server.text(&["restore", "job.saved", "back"]);
    let known = stat(&server, "back", "uuid");
    let server = serve(killed(server), &[]);
    assert_eq!(server.json(&["list"])["missing"], Value::Null);
    assert_eq!((stat(&server, "back", "uuid"), stat(&server, "back", "generation")), (known, 2.into()));
    assert_eq!(stat(&server, "back", "disksize"), (1 << 20) + 512);
}

#[test]
fn a_state_that_is_damaged_foreign_or_newer_is_refused_and_left_alone() {
    let server = serve(tempfile::tempdir().unwrap(), &["a=null,size=1M", "b=null,size=1M"]);
    server.text(&["create", "c=null,size=1M"]);
    let dir = ended(server);
    let file = dir.path().join("state/topology");
    let whole = fs::read_to_string(&file).unwrap();
    let args = ["serve", "--state", "state", "--control", "control", "--nbd", "unix:nbd"];
    for (content, said) in [
        (whole.replacen("\"name\":\"a\"", "\"name\":\"z\"", 1), "/state/topology: line 3 is damaged"),
        ("[Unit]\n".to_owned(), "/state/topology: is no state of a server"),
    ] {
        fs::write(&file, &content).unwrap();
        let why = refused(dir.path(), 1, &args);
        assert!(why.contains(said), "{why}");
        assert_eq!(fs::read_to_string(&file).unwrap(), content);
        assert!(!dir.path().join("control").exists());
    }
    fs::write(&file, &whole).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(server.json(&["list"])["devices"].as_array().unwrap().len(), 3);
}

/// A client that asks for the empty name gets the device that had it, or none.
#[test]
fn the_empty_name_stays_with_its_device() {
    let server = serve(image(1 << 20), &["lost=ram,disksize=1M", GOLDEN, "other=null,size=1M"]);
    for verb in [
        &["publish", "other", "--nbd", "unix:two"][..],
        &["publish", "golden", "--nbd", "unix:two"],
        &["publish", "golden", "--nbd", "unix:three"],
        &["publish", "other", "--nbd", "unix:three"],
    ] {
        server.text(verb);
    }
    let owner = |server: &Serve, socket: &str| {
        let list = server.json(&["list"]);
        let at = format!("unix:{}", server.path(socket).display());
        let is = |export: &Value| export["address"] == at && export["default"] == true;
        let has = |device: &&Value| device["exports"].as_array().unwrap().iter().any(is);
        let owner = list["devices"].as_array().unwrap().iter().find(has);
        owner.map_or("nobody".to_owned(), |device| device["name"].as_str().unwrap().to_owned())
    };
    let owners = |server: &Serve| ["nbd", "two", "three"].map(|socket| owner(server, socket));
    assert_eq!(owners(&server), ["lost", "other", "golden"]);
    let mut dir = killed(server);
    for _ in 0..2 {
        let server = serve(dir, &[]);
        assert_eq!(owners(&server), ["nobody", "other", "golden"]);
        assert!(!is_served(&server.path("nbd"), "") && is_served(&server.path("nbd"), "other"));
        // Not even for one that comes later.
        server.text(&["create", "new=null,size=1M,publish=yes"]);
        assert_eq!(owner(&server, "nbd"), "nobody");
        server.text(&["remove", "new"]);
        dir = ended(server);
    }
    // One that is missing keeps it, too.
    fs::rename(dir.path().join("golden.img"), dir.path().join("away.img")).unwrap();
    let server = serve(dir, &[]);
    server.text(&["publish", "lost"]);
    assert_eq!(owners(&server), ["lost", "other", "nobody"]);
    let dir = ended(server);
    fs::rename(dir.path().join("away.img"), dir.path().join("golden.img")).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(owners(&server), ["nobody", "other", "golden"]);
    server.text(&["remove", "lost"]);
    server.text(&["create", "new=null,size=1M,publish=yes"]);
    assert_eq!(owner(&server, "nbd"), "new");
}

#[test]
fn an_address_of_publish_may_be_one_of_the_next_server() {
    let server = serve(tempfile::tempdir().unwrap(), &["a=null,size=1M", "b=null,size=1M"]);
    server.text(&["publish", "b", "--nbd", "unix:other"]);
    let server = serve(ended(server), &["--nbd", "unix:other"]);
    for (socket, name) in [("nbd", "a"), ("nbd", "b"), ("other", "a"), ("other", "b")] {
        assert!(is_served(&server.path(socket), name), "{name} at {socket}");
    }
    let server = serve(ended(server), &[]);
    assert!(is_served(&server.path("nbd"), "b") && !is_served(&server.path("other"), "a"));
}

#[test]
fn words_of_the_next_start_need_a_state() {
    let dir = tempfile::tempdir().unwrap();
    let why = refused(dir.path(), 2, &["serve", "a=ram,disksize=1M,on_lost=empty", "--check"]);
    assert!(why.starts_with("a: on_lost: says what the next start does"), "{why}");
    let why = refused(dir.path(), 2, &["serve", "--state", "s", "a=null,size=1M,on_lost=empty", "--check"]);
    assert!(why.starts_with("a: on_lost=empty: it holds nothing that is lost"), "{why}");
    let server = Serve::start(&["a=ram,disksize=1M"]);
    let why = server.refused(2, &["create", "b=ram,disksize=1M,on_lost=empty"]);
    assert!(why.starts_with("b: on_lost: says"), "{why}");
}

#[test]
fn where_the_directory_is_full_or_read_only_a_verb_fails_and_does_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Mounted::of_bytes(dir.path().join("small"), "1M");
    let start = |dir| Serve::start_in(dir, &["--state", "small/state"], true);
    let server = start(dir);
    server.text(&["create", "disk=ram,disksize=1M"]);
    let full = mounted.0.join("full");
    // All that is left: what was promised to the state before stays its own.
    let _ = fs::write(&full, vec![1; 1 << 20]);
    let mut made = Vec::new();
    let why = loop {
        assert!(made.len() < 10_000);
        let name = format!("{}-{}", "n".repeat(240), made.len());
        let (code, _, said) = server.tried(&["create", &format!("{name}=null,size=1M")]);
        if code != 0 {
            break said;
        }
        made.push(name);
    };
    assert!(why.contains("the state is not kept: ") && why.contains("No space left"), "{why}");
    let names = |server: &Serve| {
        let list = server.json(&["list"]);
        let devices = list["devices"].as_array().unwrap();
        devices.iter().map(|device| device["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let mut expected = vec!["disk".to_owned()];
    expected.extend(made);
    assert_eq!(names(&server), expected);
    for verb in
        [&["remove", "disk"][..], &["set", "disk", "mem_limit=1M"], &["publish", "disk", "--nbd", "unix:x"]]
    {
        assert!(server.refused(1, verb).starts_with("the state is not kept: "));
    }
    assert_eq!((names(&server), server.path("x").exists()), (expected.clone(), false));
    fs::remove_file(full).unwrap();
    server.text(&["set", "disk", "mem_limit=1M"]);
    let server = start(killed(server));
    assert_eq!(names(&server), expected);
    let dir = ended(server);
    mounted.again("ro");
    let server = start(dir);
    assert_eq!(names(&server), expected);
    let why = server.refused(1, &["set", "disk", "mem_limit=2M"]);
    assert!(why.contains("the state is not kept: ") && why.contains("Read-only file system"), "{why}");
    mounted.again("rw");
    server.text(&["set", "disk", "mem_limit=2M"]);
    let server = start(ended(server));
    assert_eq!(names(&server), expected);
    assert_eq!(server.json(&["get", "disk", "mem_limit"])["mem_limit"], 2 << 20);
}
