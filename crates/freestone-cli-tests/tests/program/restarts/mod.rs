//! Servers with a state directory that end cleanly or by a crash and are started again.

mod failed_starts;
mod former_keys;
mod kept;
mod lost_content;
mod machines;
mod random;
mod recovery;
mod unkept_devices;
mod upgrade;

use crate::harness::prelude::*;

/// Starts a server with the state directory `state` in `dir`.
fn serve(dir: TempDir, args: &[&str]) -> Serve {
    Serve::start_in(dir, &[&["--state", "state"], args].concat(), true)
}

fn image(size: usize) -> TempDir {
    image_in(tempfile::tempdir().unwrap(), size)
}

fn image_in(dir: TempDir, size: usize) -> TempDir {
    fs::write(dir.path().join("golden.img"), vec![7; size]).unwrap();
    dir
}

/// Returns the value of a key from the output of `stat` for a device.
fn stat(serve: &Serve, name: &str, key: &str) -> Value {
    serve.json(&["stat", name])[key].clone()
}

/// Returns true if the socket has an export of this name. The server closes the connection after
/// `NBD_OPT_EXPORT_NAME` with an unknown name.
fn is_served(socket: &Path, name: &str) -> bool {
    let Ok(mut stream) = UnixStream::connect(socket) else { return false };
    try_connect_nbd(&mut stream, name).is_ok()
}

/// Mount point of a small tmpfs, which is unmounted on drop.
struct Mounted(PathBuf);

impl Mounted {
    fn with_size(at: PathBuf, size: &str) -> Self {
        fs::create_dir(&at).unwrap();
        let options = format!("size={size},mode=777");
        ok(root_tool("mount").args(["-t", "tmpfs", "-o", &options, "none"]).arg(&at));
        Self(at)
    }

    fn remount(&self, options: &str) {
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
fn restart_restores_devices_and_withholds_lost_content() {
    let server = serve(image(1 << 20), &[GOLDEN, DATA, "disk=ram,disksize=16M", "drive=null,size=1M"]);
    for verb in [
        &["fork", "golden", "job-%n", "--count", "2", "--nbd", "unix:job-%n.sock", "mem_limit=1M"][..],
        &["fork", "golden", "scratch", "on_data_loss=empty", "--nbd", "unix:scratch.sock"],
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
    let mut dir = server.kill();
    for generation in 2..5 {
        let server = serve(dir, &[]);
        assert_eq!(server.text(&["dump"]), dumped);
        let again: Vec<Value> = ["disk", "job-1", "before", "golden"].map(|name| uuid(&server, name)).into();
        assert_eq!(again, known);
        // The content of `disk` was in memory and is lost, so the generation of the device grows.
        // The generation of an image file stays.
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
        assert!(
            server.startup_output.contains("job-0: has lost content, and is withheld;"),
            "{}",
            server.startup_output
        );
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
        // `publish` publishes withheld devices (devices that lost content) again.
        if generation == 3 {
            server.text(&["publish", "disk"]);
            server.text(&["publish", "job-0"]);
            assert!(is_served(&server.path("nbd"), "disk") && is_served(&server.path("job-0.sock"), "job-0"));
            let why = server.refused(2, &["publish", "disk"]);
            assert!(why.starts_with("disk: publish: say where: "), "{why}");
            assert_eq!(server.text(&["dump"]), dumped);
        }
        // The result is the same after a clean end and after SIGKILL.
        dir = if generation == 2 { server.end() } else { server.kill() };
    }
}

#[test]
fn changed_config_is_refused_or_applied_at_start() {
    let file = |text: &str| format!("[[device]]\nname = 'a'\nkind = 'ram'\ndisksize = '1M'\n{text}");
    let dir = tempfile::tempdir().unwrap();
    let write = |dir: &TempDir, text: &str| fs::write(dir.path().join("f.toml"), file(text)).unwrap();
    write(&dir, "export = { nbd = 'tcp:127.0.0.1:0' }\n[[device]]\nname = 'b'\nkind = 'null'\nsize = '1M'");
    let server = serve(dir, &["--config", "f.toml"]);
    server.text(&["create", "hand=null,size=1M"]);
    // A start with the same configuration file makes no changes.
    let server = serve(server.end(), &["--config", "f.toml"]);
    // A second server with the same state directory is refused.
    let other =
        refused(server.dir.path(), 1, &["serve", "--state", "state", "--control", "c2", "--nbd", "unix:n2"]);
    assert!(other.ends_with("/state is in use by another server"), "{other}");
    let dir = server.end();
    write(&dir, "mem_limit = '2M'\n[[device]]\nname = 'c'\nkind = 'null'\nsize = '1M'\npublish = false");
    let before = fs::read(dir.path().join("state/topology")).unwrap();
    let args = ["serve", "--state", "state", "--config", "f.toml", "--control", "control"];
    let why = refused(dir.path(), 1, &args);
    let at = dir.path().display();
    assert!(
        why.starts_with(&format!("{at}/state: the state differs from the command line and file: remove b; ")),
        "{why}"
    );
    for part in [
        "change a: a=ram,disksize=1M to a=ram,disksize=1M,mem_limit=2M; unpublish a from tcp:127.0.0.1:",
        "; create c=null,size=1M,publish=no; --apply makes these changes;",
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
    let dir = server.end();
    assert_ne!(fs::read(dir.path().join("state/topology")).unwrap(), before);
    let server = serve(dir, &["--config", "f.toml"]);
    assert_eq!(names(&server), ["a", "hand", "c"]);
    // `apply` at run time has the same effect as --apply at the start.
    write(&server.dir, "");
    server.text(&["apply", "f.toml"]);
    let server = serve(server.kill(), &[]);
    assert_eq!(names(&server), ["a", "hand"]);
}

#[test]
fn missing_device_does_not_affect_others() {
    let server = serve(image(1 << 20), &[GOLDEN, "disk=null,size=1M"]);
    server.text(&["fork", "golden", "job", "on_data_loss=empty"]);
    let dir = server.end();
    fs::rename(dir.path().join("golden.img"), dir.path().join("away.img")).unwrap();
    let mut dir = dir;
    // The missing device stays in the state over restarts.
    for _ in 0..2 {
        let server = serve(dir, &[]);
        let list = server.json(&["list"]);
        assert_eq!(list["devices"].as_array().unwrap().len(), 1);
        assert_eq!(list["missing"][1]["name"], "job");
        assert!(server.text(&["list"]).contains("\ngolden: is not there again, "));
        dir = server.kill();
    }
    fs::rename(dir.path().join("away.img"), dir.path().join("golden.img")).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(server.json(&["list"])["devices"].as_array().unwrap().len(), 3);
    let dir = server.end();
    fs::remove_file(dir.path().join("golden.img")).unwrap();
    let server = serve(dir, &[]);
    server.text(&["remove", "job"]);
    server.text(&["create", "golden=null,size=1M"]);
    let server = serve(server.end(), &[]);
    let list = server.json(&["list"]);
    assert_eq!((list["devices"].as_array().unwrap().len(), &list["missing"]), (2, &Value::Null));
}

#[test]
fn snapshot_with_copies_in_memory_is_lost() {
    let words = [DATA, "copies=ram,disksize=4M", "then=snapshot,origin=data,cow=copies,store=P,force=yes"];
    let mut dir = tempfile::tempdir().unwrap();
    // The devices of the command line match those of the state, although `force` is not stored in
    // the state.
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
        dir = server.kill();
    }
}

#[test]
fn restored_fork_of_unaligned_image_survives_restart() {
    let server = serve(image((1 << 20) + 512), &[GOLDEN]);
    server.text(&["fork", "golden", "job"]);
    server.text(&["save", "job", "job.saved"]);
    server.text(&["restore", "job.saved", "back"]);
    let known = stat(&server, "back", "uuid");
    let server = serve(server.kill(), &[]);
    assert_eq!(server.json(&["list"])["missing"], Value::Null);
    assert_eq!((stat(&server, "back", "uuid"), stat(&server, "back", "generation")), (known, 2.into()));
    assert_eq!(stat(&server, "back", "disksize"), (1 << 20) + 512);
}

#[test]
fn damaged_foreign_or_newer_state_is_refused() {
    let server = serve(tempfile::tempdir().unwrap(), &["a=null,size=1M", "b=null,size=1M"]);
    server.text(&["create", "c=null,size=1M"]);
    let dir = server.end();
    let file = dir.path().join("state/topology");
    let whole = fs::read_to_string(&file).unwrap();
    let args = ["serve", "--state", "state", "--control", "control", "--nbd", "unix:nbd"];
    for (content, message) in [
        (whole.replacen("\"name\":\"a\"", "\"name\":\"z\"", 1), "/state/topology: line 3 is damaged"),
        ("[Unit]\n".to_owned(), "/state/topology: not a state file of this program"),
    ] {
        fs::write(&file, &content).unwrap();
        let why = refused(dir.path(), 1, &args);
        assert!(why.contains(message), "{why}");
        assert_eq!(fs::read_to_string(&file).unwrap(), content);
        assert!(!dir.path().join("control").exists());
    }
    fs::write(&file, &whole).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(server.json(&["list"])["devices"].as_array().unwrap().len(), 3);
}

/// After a restart the empty export name selects the same device as before, or no device if that
/// one is withheld or missing.
#[test]
fn default_export_stays_with_its_device() {
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
    let mut dir = server.kill();
    for _ in 0..2 {
        let server = serve(dir, &[]);
        assert_eq!(owners(&server), ["nobody", "other", "golden"]);
        assert!(!is_served(&server.path("nbd"), "") && is_served(&server.path("nbd"), "other"));
        // A device that is created later does not become the default export.
        server.text(&["create", "new=null,size=1M,publish=yes"]);
        assert_eq!(owner(&server, "nbd"), "nobody");
        server.text(&["remove", "new"]);
        dir = server.end();
    }
    // A missing device also reserves the empty export name.
    fs::rename(dir.path().join("golden.img"), dir.path().join("away.img")).unwrap();
    let server = serve(dir, &[]);
    server.text(&["publish", "lost"]);
    assert_eq!(owners(&server), ["lost", "other", "nobody"]);
    let dir = server.end();
    fs::rename(dir.path().join("away.img"), dir.path().join("golden.img")).unwrap();
    let server = serve(dir, &[]);
    assert_eq!(owners(&server), ["nobody", "other", "golden"]);
    server.text(&["remove", "lost"]);
    server.text(&["create", "new=null,size=1M,publish=yes"]);
    assert_eq!(owner(&server, "nbd"), "new");
}

#[test]
fn published_address_may_be_default_of_next_server() {
    let server = serve(tempfile::tempdir().unwrap(), &["a=null,size=1M", "b=null,size=1M"]);
    server.text(&["publish", "b", "--nbd", "unix:other"]);
    let server = serve(server.end(), &["--nbd", "unix:other"]);
    for (socket, name) in [("nbd", "a"), ("nbd", "b"), ("other", "a"), ("other", "b")] {
        assert!(is_served(&server.path(socket), name), "{name} at {socket}");
    }
    let server = serve(server.end(), &[]);
    assert!(is_served(&server.path("nbd"), "b") && !is_served(&server.path("other"), "a"));
}

#[test]
fn on_data_loss_needs_a_state_directory() {
    let dir = tempfile::tempdir().unwrap();
    let why = refused(dir.path(), 2, &["serve", "a=ram,disksize=1M,on_data_loss=empty", "--check"]);
    assert!(why.starts_with("a: on_data_loss: needs a server with a state directory"), "{why}");
    let why =
        refused(dir.path(), 2, &["serve", "--state", "s", "a=null,size=1M,on_data_loss=empty", "--check"]);
    assert!(why.starts_with("a: on_data_loss=empty: its content does not end"), "{why}");
    let server = Serve::start(&["a=ram,disksize=1M"]);
    let why = server.refused(2, &["create", "b=ram,disksize=1M,on_data_loss=empty"]);
    assert!(why.starts_with("b: on_data_loss: needs"), "{why}");
}

#[test]
fn verb_fails_if_state_is_full_or_read_only() {
    let dir = tempfile::tempdir().unwrap();
    let mounted = Mounted::with_size(dir.path().join("small"), "1M");
    let start = |dir| Serve::start_in(dir, &["--state", "small/state"], true);
    let server = start(dir);
    server.text(&["create", "disk=ram,disksize=1M"]);
    let full = mounted.0.join("full");
    // The file fills the rest of the file system. The state can still use the blocks that were
    // preallocated for its file.
    let _ = fs::write(&full, vec![1; 1 << 20]);
    let mut made = Vec::new();
    let why = loop {
        assert!(made.len() < 10_000);
        let name = format!("{}-{}", "n".repeat(240), made.len());
        let (code, _, message) = server.run_verb(&["create", &format!("{name}=null,size=1M")]);
        if code != 0 {
            break message;
        }
        made.push(name);
    };
    assert!(why.contains("cannot update the state: ") && why.contains("No space left"), "{why}");
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
        assert!(server.refused(1, verb).starts_with("cannot update the state: "));
    }
    assert_eq!((names(&server), server.path("x").exists()), (expected.clone(), false));
    fs::remove_file(full).unwrap();
    server.text(&["set", "disk", "mem_limit=1M"]);
    let server = start(server.kill());
    assert_eq!(names(&server), expected);
    let dir = server.end();
    mounted.remount("ro");
    let server = start(dir);
    assert_eq!(names(&server), expected);
    let why = server.refused(1, &["set", "disk", "mem_limit=2M"]);
    assert!(why.contains("cannot update the state: ") && why.contains("Read-only file system"), "{why}");
    mounted.remount("rw");
    server.text(&["set", "disk", "mem_limit=2M"]);
    let server = start(server.end());
    assert_eq!(names(&server), expected);
    assert_eq!(server.json(&["get", "disk", "mem_limit"])["mem_limit"], 2 << 20);
}
