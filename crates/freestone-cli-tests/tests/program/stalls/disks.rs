//! Disks that hang, under a file device or as a COW device.

use std::thread::sleep;

use crate::harness::prelude::*;
use crate::stalls::Control;

/// A file on a disk that can hang. nbdfuse provides the file from an export of another server,
/// whose fault rules hang the requests.
pub(super) struct Disk {
    // Fields are dropped in this order: when the server is gone, nbdfuse returns errors, which ends
    // hanging requests.
    server: Serve,
    fuse: Fuse,
    _dir: tempfile::TempDir,
}

impl Disk {
    fn new() -> Self {
        Self::of("8M")
    }

    pub fn of(size: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = Serve::start(&[format!("d=ram,disksize={size},faults=none")]);
        let fuse = Fuse::start(root_tool, &server, "d", dir.path().join("fuse"));
        Self { server, fuse, _dir: dir }
    }

    pub fn path(&self) -> PathBuf {
        self.fuse.file()
    }

    pub fn hang(&self, rules: &str) {
        self.server.text(&["set", "d", &format!("faults={rules}")]);
    }

    fn until_hanging(&self) {
        Control::of(&self.server).until("nothing hangs", "d", |stat| stat["faults"]["hanging"] != 0);
    }

    pub fn heal(&self) {
        self.server.text(&["set", "d", "faults=none"]);
        self.server.text(&["release", "d"]);
    }
}

#[test]
#[ignore = "slow lane"]
fn snapshot_of_hung_disk_fails_without_delaying_verbs() {
    let disk = Disk::new();
    let serve = Serve::start(&[
        &format!("f=file,path={}", text(&disk.path())),
        "r=ram,disksize=1M",
        "p=null,size=1M,memory_backed=1,power_cut=yes",
    ]);
    let control = Control::of(&serve);
    let mut client = Raw::connect(&serve, "f");
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    disk.hang("write hang");
    let hung = client.send_write(0, &[2; 4096]);
    disk.until_hanging();
    let snapshot = |origin: &str, name: &str| {
        control.ask("snapshot", &json!({ "snapshots": [{ "origin": origin, "name": name }] }))
    };
    thread::scope(|scope| {
        // The snapshot includes a second origin `r`, which could be frozen. The failed snapshot
        // must leave `r` unchanged.
        let late = scope.spawn(|| {
            let each =
                [("r", "with"), ("f", "s")].map(|(origin, name)| json!({ "origin": origin, "name": name }));
            control.ask("snapshot", &json!({ "snapshots": each }))
        });
        let same = scope.spawn(|| snapshot("f", "s2"));
        let mut rounds = 0;
        while !late.is_finished() {
            control.check_responsive();
            control.ok("stat", &json!({ "name": "f" }));
            control.ok("get", &json!({ "name": "f" }));
            control.ok("create", &json!({ "device": "n=null,size=1M" }));
            control.ok("remove", &json!({ "name": "n" }));
            control.ok("power-cut", &json!({ "name": "p" }));
            rounds += 1;
            sleep(Duration::from_millis(50));
        }
        assert!(rounds > 1, "everything waited for the snapshot");
        let why = "could not be frozen: writes in flight did not complete within 10 s; nothing was changed";
        let late = late.join().unwrap().unwrap_err();
        assert_eq!(late["message"], format!("s: origin=f: {why}"), "{late}");
        assert_eq!(late["data"]["errno"], "ETIMEDOUT");
        assert_eq!(same.join().unwrap().unwrap_err()["message"], format!("s2: origin=f: {why}"));
    });
    let names: Vec<_> = control.ok("list", &json!({}))["devices"].as_array().unwrap().clone();
    assert_eq!(names.iter().map(|row| row["name"].as_str().unwrap()).collect::<Vec<_>>(), ["f", "r", "p"]);
    disk.heal();
    assert_eq!(client.reply().unwrap(), (hung, 0));
    // Writes that were held while the origin was frozen continue.
    assert_eq!(client.write(0, 4096, &[3; 4096]), 0);
    snapshot("f", "s").unwrap();
    drop(client);
    control.ok("remove", &json!({ "name": "s" }));
    control.ok("remove", &json!({ "name": "f" }));
}

#[test]
#[ignore = "slow lane"]
fn merge_into_hung_disk_delays_no_other_verb() {
    let disk = Disk::new();
    let dir = tempfile::tempdir().unwrap();
    let serve = Serve::start(&[&format!("f=file,path={}", text(&disk.path())), "r=ram,disksize=1M"]);
    let control = Control::of(&serve);
    let cow = dir.path().join("cow");
    let store = json!({ "origin": "f", "name": "s", "cow": text(&cow), "cow_size": "16M", "store": "P", "readonly": false });
    control.ok("snapshot", &json!({ "snapshots": [store] }));
    let mut client = Raw::connect(&serve, "f");
    // The first write copies the chunk to the exception store, so the second write waits only for
    // the disk.
    assert_eq!(client.write(0, 0, &[1; 4096]), 0);
    disk.hang("write hang");
    let hung = client.send_write(0, &[2; 4096]);
    disk.until_hanging();
    thread::scope(|scope| {
        let merge = scope.spawn(|| {
            control
                .ask("merge", &json!({ "name": "s", "into_origin": true, "force": true, "background": true }))
        });
        let mut rounds = 0;
        while !merge.is_finished() {
            control.check_responsive();
            control.ok("create", &json!({ "device": "n=null,size=1M" }));
            control.ok("remove", &json!({ "name": "n" }));
            control.ok("snapshot", &json!({ "snapshots": [{ "origin": "r", "name": "other" }] }));
            control.ok("remove", &json!({ "name": "other" }));
            rounds += 1;
            sleep(Duration::from_millis(50));
        }
        assert!(rounds > 1, "everything waited for the merge");
        let late = merge.join().unwrap().unwrap_err();
        assert_eq!(late["data"]["errno"], "ETIMEDOUT", "{late}");
    });
    disk.heal();
    assert_eq!(client.reply().unwrap(), (hung, 0));
    control.ok("merge", &json!({ "name": "s", "into_origin": true, "force": true }));
}

#[test]
fn hung_cow_device_delays_only_its_own_verb() {
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::write(&image, vec![7; 1 << 20]).unwrap();
    let serve = Serve::start(&[
        &format!("f=file,path={}", text(&image)),
        "h=ram,disksize=8M,publish=no,faults=all hang",
        "r=ram,disksize=1M",
    ]);
    let control = Control::of(&serve);
    thread::scope(|scope| {
        let stuck = scope.spawn(|| {
            let store = json!({ "origin": "f", "name": "s", "cow": "h", "store": "P", "force": true });
            control.ask("snapshot", &json!({ "snapshots": [store] }))
        });
        control.until("the store is made", "h", |stat| stat["faults"]["hanging"] != 0);
        control.check_responsive();
        control.ok("create", &json!({ "device": "n=null,size=1M,publish=yes" }));
        control.ok("snapshot", &json!({ "snapshots": [{ "origin": "r", "name": "x" }] }));
        control.ok("fork", &json!({ "base": "x", "name": "y" }));
        assert!(!stuck.is_finished());
        // Every request that initialises the new exception store hangs, so each is released in
        // turn.
        while !stuck.is_finished() {
            control.ok("release", &json!({ "name": "h" }));
            sleep(Duration::from_millis(1));
        }
        stuck.join().unwrap().unwrap();
    });
}

/// Sends SIGTERM to a server while a verb waits for a hanging disk. Calls `finish` after the server
/// has flushed the other device.
fn shut_down_beside_a_hung_verb(finish: impl FnOnce(&Disk, Serve)) {
    let disk = Disk::new();
    let dir = tempfile::tempdir().unwrap();
    let image = dir.path().join("image");
    fs::write(&image, vec![0; 1 << 20]).unwrap();
    let hangs = format!("f=file,path={}", text(&disk.path()));
    let serve = Serve::start(&[&hangs, &format!("p=file,path={},power_cut=yes", text(&image))]);
    let mut other = Raw::connect(&serve, "p");
    assert_eq!(other.write(0, 0, &[3; 4096]), 0);
    assert_eq!(fs::read(&image).unwrap()[..4096], [0; 4096], "nothing is kept apart");
    disk.hang("write hang");
    let mut client = Raw::connect(&serve, "f");
    client.send_write(0, &[2; 4096]);
    disk.until_hanging();
    // The verb `snapshot` waits up to 10 s for the write in flight.
    let mut verb = serve.control();
    let params = json!({ "snapshots": [{ "origin": "f", "name": "s" }] });
    let request = json!({ "jsonrpc": "2.0", "id": 1, "method": "snapshot", "params": params });
    verb.write_all(format!("{request}\n").as_bytes()).unwrap();
    sleep(Duration::from_millis(500));
    serve.signal(Signal::TERM);
    wait_until("a write that was answered is lost", || fs::read(&image).unwrap()[..4096] == [3; 4096]);
    finish(&disk, serve);
}

#[test]
#[ignore = "slow lane"]
fn shutdown_beside_a_hung_verb_flushes_the_rest() {
    shut_down_beside_a_hung_verb(|disk, serve| {
        disk.heal();
        assert_eq!(serve.wait().0, Some(0));
    });
}

#[test]
fn second_signal_does_not_wait_for_a_hung_disk() {
    shut_down_beside_a_hung_verb(|disk, serve| {
        let control = serve.dir.path().join("control");
        assert!(control.exists(), "it has ended already");
        serve.signal(Signal::INT);
        let start = Instant::now();
        while control.exists() {
            assert!(start.elapsed() < Duration::from_secs(20), "the second signal is not heeded");
            sleep(Duration::from_millis(20));
        }
        // The process cannot exit before its hanging write in the kernel completes, which needs the
        // disk.
        disk.heal();
        assert_eq!(serve.wait().0, Some(128 + 2));
    });
}
