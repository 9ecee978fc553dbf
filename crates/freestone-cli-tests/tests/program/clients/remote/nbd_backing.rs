//! Exports of other NBD servers as backing devices and COW devices. The other servers restart, and
//! lose data that was not flushed.

use super::nbd::{Other, get};
use super::{assert_content, shut_down};
use crate::harness::prelude::*;

/// Starts qemu-nbd for a file of `mib` MiB. The file remains after qemu-nbd ends.
fn spill(dir: &TempDir, name: &str, mib: u64) -> Other {
    let path = dir.path().join(format!("{name}.img"));
    fs::File::options().create(true).append(true).open(path).unwrap().set_len(mib * MIB).unwrap();
    Other::qemu(dir, name, &format!("{name}.img"), &["-f", "raw"])
}

fn spilled_pages(serve: &Serve, name: &str) -> u64 {
    stat(serve, name, "backing", "spilled_pages")
}

fn write_back_all(serve: &Serve, name: &str) {
    serve.text(&["idle", name, "all"]);
    serve.text(&["writeback", name, "idle"]);
}

/// Another Freestone server. Power cuts of the device `drive` lose unflushed data.
struct Lossy(Serve);

impl Lossy {
    fn start() -> Self {
        Self(Serve::start(&["drive=null,size=64M,memory_backed=1,power_cut=yes"]))
    }

    fn device(&self, name: &str) -> String {
        format!("{name}=nbd,uri=nbd+unix:///drive?socket={}", self.0.path("nbd").display())
    }

    /// Cuts the power of the drive. Returns the number of blocks that were lost.
    fn cut(&self) -> u64 {
        self.0.json(&["power-cut", "drive", "--seed", "5"])["lost_blocks"].as_u64().unwrap()
    }
}

#[test]
fn pages_are_evicted_to_an_export_and_read_back() {
    let dir = tempdir().unwrap();
    let other = spill(&dir, "other", 64);
    let words = [other.device("n"), "r=ram,disksize=32M,mem_limit=8M,backing_dev=device:n".into()];
    let server = Serve::start(&words);
    let data = noise(1, 32 * MIB);
    copy_in(&server, "r", &data);
    assert!(spilled_pages(&server, "r") > 5000);
    assert_content(&server, "r", &data);
    // A device used as a backing device is not published by default.
    assert!(!server.startup_output.contains("n: "), "{}", server.startup_output);
    assert_eq!((get(&server, "r", "backing_dev"), get(&server, "r", "backing_size")), {
        ("device:n".into(), (64 * MIB).into())
    });
    assert_eq!(server.json(&["stat", "r"])["backing"]["path"], "device:n");
    assert!(stat(&server, "n", "io", "written_bytes") > 20 * MIB);
    let at = format!("unix:{}", server.path("nbd").display());
    for (verb, why) in [
        (&["publish", "n", "--nbd", &at][..], "n: holds pages of r, so it cannot be published"),
        (&["remove", "n"], "n: cannot be removed: r stands on it"),
        (&["snapshot", "n", "s"], "s: origin=n: holds pages of r"),
        (&["create", "x=ram,disksize=1M,backing_dev=device:n"], "x: backing_dev=device:n: is in use by r"),
        (&["create", "x=ram,disksize=1M,backing_dev=device:x"], {
            "x: backing_dev=device:x: there is no such device (yet)"
        }),
    ] {
        assert_eq!(server.refused(1, verb), why);
    }
    server.text(&["create", "seen=null,size=1M,memory_backed=1"]);
    server.text(&["publish", "seen", "--nbd", &at]);
    let why = server.refused(1, &["create", "x=ram,disksize=1M,backing_dev=device:seen"]);
    assert_eq!(why, "x: backing_dev=device:seen: is published; pages need it for themselves");
    server.text(&["remove", "r"]);
    server.text(&["publish", "n", "--nbd", &at]);
    server.text(&["remove", "n"]);
}

#[test]
fn forks_of_a_file_evict_to_an_export() {
    let dir = tempdir().unwrap();
    let other = spill(&dir, "other", 64);
    fs::write(dir.path().join("golden.img"), noise(2, MIB)).unwrap();
    let golden = format!("golden=file,path={}/golden.img,readonly=yes", dir.path().display());
    let server = Serve::start(&[other.device("n"), format!("{golden},mem_limit=4M,backing_dev=device:n")]);
    let at = format!("unix:{}", server.path("nbd").display());
    assert_eq!(server.refused(1, &["remove", "n"]), "n: cannot be removed: golden stands on it");
    server.text(&["fork", "golden", "f", "size=16M", "--nbd", &at]);
    let data = noise(3, 16 * MIB);
    copy_in(&server, "f", &data);
    assert!(spilled_pages(&server, "f") > 2000);
    assert_content(&server, "f", &data);
}

/// Evicted pages are removed from memory only after the other server flushed them.
#[test]
fn pages_survive_power_cut_of_the_backing_server() {
    for layout in ["yes", "no"] {
        let lossy = Lossy::start();
        let disk = format!("r=ram,disksize=16M,backing_dev=device:n,compressed_writeback={layout}");
        let server = Serve::start(&[lossy.device("n"), disk]);
        // The second round reuses blocks of the first. A stale block would be found by the
        // comparison, but not by its own checksum.
        for seed in [3, 4] {
            let data = noise(seed, 16 * MIB);
            copy_in(&server, "r", &data);
            write_back_all(&server, "r");
            assert_eq!(spilled_pages(&server, "r"), 4096);
            assert_eq!(lossy.cut(), 0, "blocks were written and not flushed");
            assert_content(&server, "r", &data);
        }
        assert_eq!(server.json(&["stat", "r"])["backing"]["failed_reads"], 0);
    }
}

#[test]
fn eviction_waits_for_a_server_that_restarts() {
    let dir = tempdir().unwrap();
    let other = spill(&dir, "other", 96);
    let words = [
        other.device("n") + ",timeout=20s",
        "r=ram,disksize=64M,mem_limit=8M,backing_dev=device:n,full=wait,full_timeout=60,bps=16M".into(),
    ];
    let server = Serve::start(&words);
    let data = noise(5, 64 * MIB);
    let again = std::thread::scope(|scope| {
        let writer = scope.spawn(|| copy_in(&server, "r", &data));
        wait_until("pages were spilled", || spilled_pages(&server, "r") > 1000);
        other.kill();
        wait_until("the loss is seen", || get(&server, "n", "connections") == 0);
        assert!(!writer.is_finished());
        // The rate limit kept the writer busy until the connection was lost. Without the limit the
        // test ends sooner.
        server.text(&["set", "r", "bps=0"]);
        spill(&dir, "other", 96)
    });
    assert_content(&server, "r", &data);
    assert_eq!(get(&server, "n", "reconnects"), 1);
    let stat = server.json(&["stat", "r"]);
    assert_eq!((&stat["backing"]["failed_reads"], &stat["backing"]["state"]), (&0.into(), &"ok".into()));
    drop(again);
}

#[test]
fn lost_backing_server_fails_only_evicted_pages() {
    let dir = tempdir().unwrap();
    let other = spill(&dir, "other", 64);
    let words = [
        other.device("n") + ",timeout=1s",
        "r=ram,disksize=16M,mem_limit=32M,backing_dev=device:n,compressed_writeback=no".into(),
    ];
    let server = Serve::start(&words);
    let data = noise(6, 16 * MIB);
    copy_in(&server, "r", &data);
    server.text(&["idle", "r", "all"]);
    // Reads clear the idle mark of the first half, so the first half stays in memory.
    qemu_io(&uri(&server, "r"), &["read 0 8M"]);
    server.text(&["writeback", "r", "idle"]);
    assert_eq!(spilled_pages(&server, "r"), 2048);
    other.kill();
    wait_until("the loss is seen", || get(&server, "n", "connections") == 0);
    let read = |range: &str| {
        let line = format!("read {range}");
        let mut client = tool("qemu-io");
        client.args(["-r", "-f", "raw", "-c", &line]).arg(uri(&server, "r"));
        client
    };
    ok(&mut read("0 8M"));
    let message = fails(&mut read("8M 64k"));
    assert!(message.contains("Input/output error"), "{message}");
    // The verb `writeback` reports the failed connection, and the pages stay in memory.
    server.text(&["idle", "r", "all"]);
    let why = server.refused(1, &["writeback", "r", "idle"]);
    assert!(why.starts_with("r: writeback: "), "{why}");
    let stat = server.json(&["stat", "r"]);
    assert_eq!(stat["backing"]["state"], "reads fail");
    assert_ne!(stat["backing"]["failed_writes"], 0);
    let again = spill(&dir, "other", 64);
    wait_until("it is connected again", || get(&server, "n", "connections") != 0);
    assert_content(&server, "r", &data);
    write_back_all(&server, "r");
    assert_content(&server, "r", &data);
    drop(again);
}

#[test]
fn kept_disk_has_its_export_after_restart() {
    let dir = tempdir().unwrap();
    let other = spill(&dir, "other", 64);
    let args = |devices: &[&str]| {
        [&["--state", "state"], devices].concat().iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>()
    };
    let disk = "r=ram,disksize=16M,keep=yes,mem_limit=8M,backing_dev=device:n";
    let server = Serve::start_in(tempdir().unwrap(), &args(&[&other.device("n"), disk]), true);
    let data = noise(7, 16 * MIB);
    copy_in(&server, "r", &data);
    server.text(&["create", "s=snapshot,origin=r,keep=yes"]);
    assert!(spilled_pages(&server, "r") > 1000);
    // The dump contains `backing_dev=device:n` as given, so a server started from the dump has the
    // same devices.
    let dumped = server.text(&["dump"]);
    assert!(dumped.contains("backing_dev = \"device:n\""), "{dumped}");
    let state = shut_down(server);
    let server = Serve::start_in(state, &args(&[]), true);
    assert_content(&server, "r", &data);
    assert_eq!(get(&server, "r", "backing_dev"), "device:n");
    wait_until("it is spilled again", || {
        copy_in(&server, "r", &data);
        spilled_pages(&server, "r") > 1000
    });
    assert_eq!(server.refused(1, &["remove", "n"]), "n: cannot be removed: r, s stand on it");
    assert_content(&server, "r", &data);
    let state = shut_down(server);
    // Without the other server the devices are reported as missing, but their content is kept.
    other.kill();
    let server = Serve::start_in(state, &args(&[]), true);
    let list = server.json(&["list"]);
    let missing: Vec<_> = list["missing"].as_array().unwrap().iter().map(|m| &m["name"]).collect();
    assert_eq!(missing, ["n", "r", "s"]);
    let state = shut_down(server);
    let other = spill(&dir, "other", 64);
    let server = Serve::start_in(state, &args(&[]), true);
    assert_content(&server, "r", &data);
    drop(shut_down(server));
    // The dump is valid as a configuration file.
    let place = tempdir().unwrap();
    let left_out = ["nbd ", "control ", "state ", "save", "keep "];
    let lines = dumped.lines().filter(|line| !left_out.iter().any(|key| line.starts_with(key)));
    fs::write(place.path().join("dumped.toml"), lines.collect::<Vec<_>>().join("\n")).unwrap();
    let server = Serve::start_in(place, &["--config", "dumped.toml"], true);
    assert_eq!(get(&server, "r", "backing_dev"), "device:n");
    drop(other);
}

#[test]
fn restored_disk_evicts_to_an_export() {
    let dir = tempdir().unwrap();
    let other = spill(&dir, "other", 64);
    let server = Serve::start(&["r=ram,disksize=16M"]);
    let data = noise(8, 16 * MIB);
    copy_in(&server, "r", &data);
    server.text(&["save", "r", "saved"]);
    server.text(&["create", &(other.device("n") + ",publish=no")]);
    server.text(&["restore", "saved", "r2", "mem_limit=8M", "backing_dev=device:n"]);
    assert_eq!(server.refused(1, &["remove", "n"]), "n: cannot be removed: r2 stands on it");
    let at = format!("unix:{}", server.path("nbd").display());
    let why = server.refused(1, &["publish", "n", "--nbd", &at]);
    assert_eq!(why, "n: holds pages of r2, so it cannot be published");
    server.text(&["publish", "r2", "--nbd", &at]);
    assert!(spilled_pages(&server, "r2") > 1000);
    assert_content(&server, "r2", &data);
    let why = server.refused(1, &["restore", "saved", "r3", "backing_dev=device:n"]);
    assert_eq!(why, "restore: backing_dev=device:n: is in use by r2");
}

/// After SIGKILL the server opens its snapshot again on the export of another server, which has
/// also lost unflushed data.
#[test]
fn snapshot_on_export_survives_both_servers() {
    let dir = tempdir().unwrap();
    let lossy = Lossy::start();
    let disk = dir.path().join("disk.img");
    let before = noise(9, 8 * MIB);
    fs::write(&disk, &before).unwrap();
    let words = [
        format!("disk=file,path={}", disk.display()),
        lossy.device("copies"),
        "monday=snapshot,origin=disk,cow=copies".into(),
    ];
    let server = Serve::start(&words);
    copy_in(&server, "disk", &noise(10, 4 * MIB));
    lossy.cut();
    wait_until("it is connected again", || get(&server, "copies", "reconnects") == 1);
    assert_content(&server, "monday", &before);
    copy_in(&server, "disk", &noise(11, 8 * MIB));
    assert_content(&server, "monday", &before);
    lossy.cut();
    let place = server.kill();
    let server = Serve::start_in(place, &words, true);
    assert_content(&server, "disk", &noise(11, 8 * MIB));
    assert_content(&server, "monday", &before);
    qemu_io(&uri(&server, "disk"), &["write -P 3 0 1M", "flush"]);
    assert_content(&server, "monday", &before);
    let status = get(&server, "monday", "status");
    assert!(status.as_str().unwrap().contains('/'), "{status}");
}

/// If unflushed copies are lost, the snapshot becomes invalid and never shows wrong data.
#[test]
fn snapshot_of_killed_server_is_complete_or_invalid() {
    let dir = tempdir().unwrap();
    let other = spill(&dir, "other", 64);
    let disk = dir.path().join("disk.img");
    let before = noise(12, 16 * MIB);
    fs::write(&disk, &before).unwrap();
    let words = [
        format!("disk=file,path={}", disk.display()),
        other.device("copies"),
        "monday=snapshot,origin=disk,cow=copies".into(),
    ];
    let server = Serve::start(&words);
    let after = noise(13, 16 * MIB);
    let copied = || stat(&server, "monday", "cow_stat", "copied_chunks");
    let other = std::thread::scope(|scope| {
        scope.spawn(|| copy_in(&server, "disk", &after));
        wait_until("chunks are copied", || copied() > 10);
        other.kill();
        std::thread::sleep(Duration::from_millis(300));
        spill(&dir, "other", 64)
    });
    assert_content(&server, "disk", &after);
    // Reads of an invalid snapshot fail. A valid snapshot must have its entire old content.
    if get(&server, "monday", "status") == "Invalid" {
        fails(tool("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 64k"]).arg(uri(&server, "monday")));
    } else {
        assert_content(&server, "monday", &before);
    }
    drop(other);
}
