//! Servers whose devices in memory survive a kill (`serve --recoverable`).

use std::io::{IoSliceMut, Seek as _, SeekFrom};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};

use freestone_testkit::process::{families_of, holder_of};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, kill_process};

use super::kept::row;
use super::{GOLDEN, image, is_served, serve, stat};
use crate::harness::prelude::*;

/// Returns the process id of the holder of a server's state directory.
fn holder(dir: &Path) -> Option<Pid> {
    holder_of(&dir.join("state"))
}

/// Waits until the holder is another process than `former`. Returns it.
fn next_holder(dir: &Path, former: Pid) -> Pid {
    let next = || holder(dir).filter(|holder| *holder != former);
    wait_until("there is another holder", || next().is_some());
    next().unwrap()
}

#[test]
fn killed_server_leaves_devices_to_the_next() {
    let disks = ["disk=ram,disksize=16M,comp_algorithm=zstd", "other=ram,disksize=1M"];
    let server = serve(image(8 << 20), &[&["--recoverable", GOLDEN][..], &disks].concat());
    let home = format!("unix:{}", server.path("nbd").display());
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M", "write -P 2 8M 64k"]);
    for verb in [
        &["snapshot", "disk", "monday"][..],
        &["fork", "monday", "trial", "--nbd", &home],
        &["fork", "golden", "job", "size=12M", "mem_limit=4M", "--nbd", &home],
        &["fork", "golden", "gone", "--nbd", &home],
        &["publish", "monday", "--nbd", &home],
        &["create", "zones=ram,disksize=16M,zoned=1,zone_size=1M"],
        &["remove", "gone"],
    ] {
        server.text(verb);
    }
    qemu_io(&uri(&server, "disk"), &["write -P 3 1M 64k", "discard 8M 64k"]);
    qemu_io(&uri(&server, "trial"), &["write -P 4 64k 64k"]);
    qemu_io(&uri(&server, "job"), &["write -P 5 1M 64k", "write -z 2M 64k", "write -P 6 9M 64k"]);
    server.text(&["set", "job", "disksize=16M"]);
    server.text(&["set", "disk", "mem_limit=20M"]);
    let check = |server: &Serve| {
        let reads = ["read -P 1 0 1M", "read -P 3 1M 64k", "read -P 1 1088k 64k", "read -P 0 8M 64k"];
        qemu_io(&uri(server, "disk"), &reads);
        qemu_io(&uri(server, "monday"), &["read -P 1 0 4M", "read -P 2 8M 64k", "read -P 0 9M 1M"]);
        qemu_io(&uri(server, "trial"), &["read -P 1 0 64k", "read -P 4 64k 64k", "read -P 2 8M 64k"]);
        let reads = ["read -P 7 0 1M", "read -P 5 1M 64k", "read -P 0 2M 64k", "read -P 6 9M 64k"];
        qemu_io(&uri(server, "job"), &reads);
    };
    let used = stat(&server, "disk", "mm_stat")["compr_data_size"].clone();
    let mut dir = server.kill();
    for round in 0..3 {
        let server = serve(dir, &["--recoverable"]);
        check(&server);
        for name in ["disk", "monday", "trial", "job", "other"] {
            let row = row(&server, name);
            assert_eq!((&row["adopted"], &row["withheld"]), (&Value::Bool(true), &Value::Null), "{row}");
            assert_eq!(server.json(&["stat", name])["generation"], 1);
        }
        assert!(server.text(&["list"]).contains("ram adopted"));
        // The conditions of zones are not in memory that survives.
        assert_eq!(row(&server, "zones")["withheld"], true, "{round}");
        assert_eq!(stat(&server, "disk", "mm_stat")["compr_data_size"], used);
        assert_eq!(stat(&server, "disk", "mm_stat")["mem_limit"], 20 << 20);
        assert_eq!(stat(&server, "job", "over_stat")["mem_limit"], 4 << 20);
        // New devices join the adopted families.
        let name = format!("new-{round}");
        server.text(&["fork", "monday", &name, "--nbd", &home]);
        qemu_io(&uri(&server, &name), &["write -P 9 0 4k", "read -P 1 64k 64k"]);
        server.text(&["rewind", "trial"]);
        qemu_io(&uri(&server, "trial"), &["read -P 1 64k 64k", "write -P 4 64k 64k"]);
        server.text(&["remove", &name]);
        dir = server.kill();
    }
    // An orderly end frees the memory, and the holder ends.
    let server = serve(dir, &["--recoverable"]);
    check(&server);
    let dir = server.end();
    wait_until("the holder ends", || holder(dir.path()).is_none());
    let server = serve(dir, &["--recoverable"]);
    assert_eq!(row(&server, "disk")["withheld"], true);
    drop(server.end());
}

#[test]
fn rewind_to_snapshot_survives_kill() {
    let server = serve(tempfile::tempdir().unwrap(), &["--recoverable", "disk=ram,disksize=4M"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 1M"]);
    server.text(&["snapshot", "disk", "before"]);
    qemu_io(&uri(&server, "disk"), &["write -P 2 0 1M"]);
    server.text(&["rewind", "disk", "--to", "before"]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 1M", "write -P 3 512k 64k"]);
    let mut dir = server.kill();
    for _ in 0..2 {
        let server = serve(dir, &["--recoverable"]);
        qemu_io(&uri(&server, "disk"), &["read -P 1 0 512k", "read -P 3 512k 64k", "read -P 1 576k 448k"]);
        dir = server.kill();
    }
}

/// A transient exception store is lost, and so are all devices over it, whose memory is freed.
#[test]
fn fork_of_lost_snapshot_is_lost() {
    let disks = ["file=file,path=file.img,size=4M"];
    let server = serve(tempfile::tempdir().unwrap(), &[&["--recoverable"][..], &disks].concat());
    for verb in [
        &["create", "s=snapshot,origin=file,cow=./cow.img,cow_size=8M,store=N,readonly=yes"][..],
        &["fork", "s", "job"],
        &["fork", "s", "gone"],
        &["snapshot", "job", "monday"],
        &["snapshot", "gone", "orphan"],
        &["remove", "gone"],
    ] {
        server.text(verb);
    }
    let server = serve(server.kill(), &["--recoverable"]);
    for name in ["s", "job", "monday"] {
        assert_eq!(row(&server, name)["withheld"], true);
    }
    assert_eq!(server.json(&["list"])["missing"][0]["name"], "orphan");
    let dir = server.end();
    wait_until("the holder ends", || holder(dir.path()).is_none());
}

/// The records of a removed device are not in its saved content, but its snapshot still needs the base.
#[test]
fn kept_snapshot_of_removed_fork_survives_kill() {
    let server = serve(image(8 << 20), &["--recoverable", GOLDEN]);
    let home = format!("unix:{}", server.path("nbd").display());
    server.text(&["fork", "golden", "job", "keep=yes", "--nbd", &home]);
    qemu_io(&uri(&server, "job"), &["write -P 1 0 1M"]);
    server.text(&["create", "monday=snapshot,origin=job,keep=yes"]);
    server.text(&["publish", "monday", "--nbd", &home]);
    server.text(&["remove", "job"]);
    let server = serve(server.end(), &["--recoverable"]);
    wait_until("the content is in memory", || stat(&server, "monday", "keep")["loaded_percent"].is_null());
    let mut dir = server.kill();
    for _ in 0..2 {
        let server = serve(dir, &["--recoverable"]);
        qemu_io(&uri(&server, "monday"), &["read -P 1 0 1M", "read -P 7 1M 1M"]);
        assert!(server.refused(1, &["remove", "golden"]).contains("monday"), "its base");
        dir = server.kill();
    }
}

#[test]
fn holder_is_replaced_and_frees_removed_devices() {
    let dir = tempfile::tempdir().unwrap();
    let server = serve(dir, &["--recoverable", "disk=ram,disksize=16M", "second=ram,disksize=1M"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M"]);
    let first = holder(server.dir.path()).unwrap();
    assert_eq!(families_of(first).len(), 2);
    server.text(&["remove", "second"]);
    wait_until("the memory of the removed disk is free", || families_of(first).len() == 1);
    kill_process(first, Signal::KILL).unwrap();
    let second = next_holder(server.dir.path(), first);
    wait_until("the next holder has the family", || families_of(second).len() == 1);
    // A device that is created while there is no holder starts one.
    kill_process(second, Signal::KILL).unwrap();
    server.text(&["create", "third=ram,disksize=1M"]);
    let third = next_holder(server.dir.path(), second);
    wait_until("the next holder has both families", || families_of(third).len() == 2);
    let server = serve(server.kill(), &["--recoverable"]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 4M"]);
    assert_eq!(row(&server, "third")["adopted"], true);
    // The holder ends when its state directory has gone, even if nobody adopts the memory.
    let dir = server.kill();
    let path = dir.path().to_owned();
    drop(dir);
    wait_until("the holder ends", || holder(&path).is_none());
}

#[test]
fn failed_start_leaves_memory_to_the_next() {
    let server = serve(tempfile::tempdir().unwrap(), &["--recoverable", "disk=ram,disksize=16M"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M"]);
    let dir = server.kill();
    // Each start fails after the adoption, or before it.
    let taken = UnixListener::bind(dir.path().join("taken")).unwrap();
    fs::create_dir(dir.path().join("directory")).unwrap();
    for args in [
        &["--recoverable", "--control", "taken", "--nbd", "unix:nbd"][..],
        &["--recoverable", "--control", "control", "--nbd", "unix:directory"],
        &[
            "--recoverable",
            "--control",
            "control",
            "--nbd",
            "unix:nbd",
            "--metrics",
            "203.0.113.1:1",
            "--metrics-open",
        ],
        &["--recoverable", "--control", "control", "--nbd", "unix:nbd", "disk=ram,disksize=8M"],
    ] {
        let (status, _, error) = finish(freestone(dir.path()).args(["serve", "--state", "state"]).args(args));
        assert_ne!(status, 0, "{args:?}: {error}");
    }
    drop(taken);
    // A server without the option would lose the content.
    let pid = holder(dir.path()).unwrap().as_raw_nonzero();
    let command = ["serve", "--state", "state", "--control", "control", "--nbd", "unix:nbd"];
    let (status, _, error) = finish(freestone(dir.path()).args(command));
    let state = dir.path().join("state");
    let why = "; --recoverable adopts them, the end of that process frees them";
    let found =
        format!("{}: a killed server has left devices in memory, held by process {pid}", state.display());
    assert_eq!((status, sentence(&error)), (1, found + why));
    let server = serve(dir, &["--recoverable"]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 4M"]);
    drop(server.end());
}

#[test]
fn memory_of_another_layout_is_refused_and_stays() {
    let server = serve(tempfile::tempdir().unwrap(), &["--recoverable", "disk=ram,disksize=1M"]);
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 1M"]);
    let dir = server.kill();
    let files = format!("/proc/{}/fd", holder(dir.path()).unwrap().as_raw_nonzero());
    let is_family =
        |path: &PathBuf| fs::read_link(path).unwrap().to_string_lossy().contains("freestone-family");
    let path = fs::read_dir(files).unwrap().map(|file| file.unwrap().path()).find(is_family).unwrap();
    let mut family = fs::OpenOptions::new().write(true).open(path).unwrap();
    let mut set_layout = |layout: u64| {
        family.seek(SeekFrom::Start(8)).unwrap();
        family.write_all(&layout.to_le_bytes()).unwrap();
    };
    set_layout(99);
    let server = serve(dir, &["--recoverable"]);
    assert!(!is_served(&server.path("nbd"), "disk"));
    let missing = server.json(&["list"])["missing"][0]["why"].as_str().unwrap().to_owned();
    assert!(missing.contains("the memory has layout 99; this program knows layout 1"), "{missing}");
    let dir = server.end();
    set_layout(1);
    let server = serve(dir, &["--recoverable"]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 1M"]);
    drop(server.end());
}

/// Content that is kept (`keep=yes`) is adopted if all of it was in memory; else its last save is restored.
#[test]
fn kept_content_is_adopted_and_saved_again() {
    let disks = ["disk=ram,disksize=16M,keep=yes", "--save-every", "1h"];
    let server = serve(tempfile::tempdir().unwrap(), &[&["--recoverable"][..], &disks].concat());
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 4M"]);
    let server = serve(server.end(), &["--recoverable"]);
    wait_until("the content is in memory", || stat(&server, "disk", "keep")["loaded_percent"].is_null());
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 4M", "write -P 2 0 1M"]);
    let server = serve(server.kill(), &["--recoverable"]);
    assert_eq!(row(&server, "disk")["adopted"], true);
    qemu_io(&uri(&server, "disk"), &["read -P 2 0 1M", "read -P 1 1M 3M", "write -P 3 1M 1M"]);
    let server = serve(server.end(), &["--recoverable"]);
    assert_eq!(row(&server, "disk")["adopted"], Value::Null);
    qemu_io(&uri(&server, "disk"), &["read -P 2 0 1M", "read -P 3 1M 1M", "read -P 1 2M 2M"]);
    drop(server.end());
}

/// The file for writeback has no name, as the server has created it. The holder keeps it.
#[test]
fn pages_on_backing_device_survive_kill() {
    const BACKING: &str = "mem_limit=2M,backing_dev=spill,backing_size=32M";
    let disk = format!("disk=ram,disksize=16M,{BACKING},writeback_batch_size=8,compressed_writeback=no");
    let golden = format!("{GOLDEN},{BACKING}").replace("=spill", "=./other");
    let server = serve(image(8 << 20), &["--recoverable", &disk, &golden]);
    server.text(&["fork", "golden", "job", "--nbd", &format!("unix:{}", server.path("nbd").display())]);
    let mut written = [("disk", noise(1, 8 << 20)), ("job", noise(2, 8 << 20))];
    for (name, data) in &written {
        copy_in(&server, name, data);
    }
    let mut dir = server.kill();
    for round in 0..3 {
        assert!(!dir.path().join("spill").exists());
        let server = serve(dir, &["--recoverable"]);
        for (name, data) in &written {
            assert_eq!(row(&server, name)["adopted"], true);
            assert!(stat(&server, name, "backing")["spilled_pages"].as_u64().unwrap() > 1000);
            assert!(content(&server, name)[..data.len()] == data[..], "{name}");
        }
        assert_eq!(server.text(&["get", "disk", "writeback_batch_size"]).trim(), "8");
        // The space of all pages is known, so that new pages do not overwrite them.
        let half = 4 << 20;
        written[0].1[..half].copy_from_slice(&noise(3 + round, half as u64));
        copy_in(&server, "disk", &written[0].1[..half]);
        dir = server.kill();
    }
}

#[test]
fn settings_that_exclude_recovery_are_reported() {
    let dir = tempfile::tempdir().unwrap();
    let server = Serve::logged_in(
        dir,
        &[
            "--state",
            "state",
            "--recoverable",
            "s=file,path=s.img,size=4M,publish=no",
            "d=ram,disksize=1M,backing_dev=device:s",
        ],
    );
    server.log_with("d: its backing_dev is no file, so that it loses its content if the server is killed");
    let dir = tempfile::tempdir().unwrap();
    let (status, _, error) = finish(freestone(dir.path()).args(["serve", "--recoverable"]));
    assert_eq!((status, sentence(&error)), (2, "recoverable: needs a state: --state DIR".to_owned()));
    let server = serve(dir, &["--recoverable", "disk=ram,disksize=1M"]);
    assert!(server.text(&["dump"]).contains("recoverable = true"));
    drop(server.end());
}

/// A service manager that stores descriptors for a server, and passes them to the next one.
struct Manager {
    socket: UnixDatagram,
    stored: Vec<(String, OwnedFd)>,
}

impl Manager {
    fn at(path: &Path) -> Self {
        let socket = UnixDatagram::bind(path).unwrap();
        socket.set_read_timeout(Some(ANSWER_MAX)).unwrap();
        Self { socket, stored: Vec::new() }
    }

    /// Handles messages until one makes `is_last` true.
    fn handle_until(&mut self, is_last: impl Fn(&str) -> bool) {
        loop {
            let mut room = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut room);
            let mut text = [0; 4096];
            let into = &mut [IoSliceMut::new(&mut text)];
            // Without CLOEXEC, so that the next server inherits the descriptors.
            let received = recvmsg(&self.socket, into, &mut ancillary, RecvFlags::empty()).unwrap();
            let text = std::str::from_utf8(&text[..received.bytes]).unwrap();
            let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
            let files = ancillary.drain().flat_map(|message| match message {
                RecvAncillaryMessage::ScmRights(files) => files.collect(),
                _ => Vec::new(),
            });
            if text.contains("FDSTORE=1") {
                let name = name.unwrap();
                self.stored.extend(files.map(|file| (name.to_owned(), file)));
            } else if text.contains("FDSTOREREMOVE=1") {
                self.stored.retain(|(stored, _)| Some(stored.as_str()) != name);
            }
            if is_last(text) {
                return;
            }
        }
    }

    /// Starts a server with the stored descriptors.
    fn serve(&mut self, dir: TempDir, args: &[&str]) -> Serve {
        let names: Vec<_> = self.stored.iter().map(|(name, _)| name.as_str()).collect();
        // By way of high numbers, as the descriptors may have low ones.
        let apart =
            (100..).zip(&self.stored).map(|(to, (_, file))| format!("exec {to}<&{}; ", file.as_raw_fd()));
        let moves = (0..self.stored.len()).map(|n| format!("exec {}<&{}; ", n + 3, n + 100));
        let script = apart.chain(moves).collect::<String>() + r#"LISTEN_PID=$$ exec "$0" "$@""#;
        let mut command = Command::new("bash");
        command.current_dir(dir.path()).args(["-c", &script]).arg(program());
        command.args(["serve", "--state", "state", "--nbd", "unix:nbd", "--control", "control"]).args(args);
        command.env("NOTIFY_SOCKET", dir.path().join("notify")).env("FDSTORE", "16");
        command.env("LISTEN_FDS", names.len().to_string()).env("LISTEN_FDNAMES", names.join(":"));
        thread::scope(|scope| {
            scope.spawn(|| self.handle_until(|text| text.contains("READY=1")));
            Serve::ready(dir, command)
        })
    }
}

#[test]
fn service_manager_holds_devices_of_a_killed_server() {
    let dir = tempfile::tempdir().unwrap();
    let mut manager = Manager::at(&dir.path().join("notify"));
    let server = manager.serve(dir, &["--recoverable", "disk=ram,disksize=4M", "other=ram,disksize=1M"]);
    assert_eq!((manager.stored.len(), holder(server.dir.path())), (8, None));
    qemu_io(&uri(&server, "disk"), &["write -P 1 0 1M"]);
    server.text(&["remove", "other"]);
    (0..4).for_each(|_| manager.handle_until(|text| text.contains("FDSTOREREMOVE=1")));
    assert_eq!(manager.stored.len(), 4);
    let server = manager.serve(server.kill(), &["--recoverable"]);
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 1M"]);
    assert_eq!(row(&server, "disk")["adopted"], true);
    // The manager passes no descriptors to the next program, and stores those of new devices.
    thread::scope(|scope| {
        scope.spawn(|| manager.handle_until(|text| text.contains("READY=1")));
        server.text(&["upgrade"]);
    });
    qemu_io(&uri(&server, "disk"), &["read -P 1 0 1M", "write -P 2 0 1M"]);
    assert_eq!(manager.stored.len(), 4);
    let server = manager.serve(server.kill(), &["--recoverable"]);
    qemu_io(&uri(&server, "disk"), &["read -P 2 0 1M"]);
    // Without the option, the content would be lost.
    let dir = server.kill();
    let names: Vec<_> = manager.stored.iter().map(|(name, _)| name.clone()).collect();
    assert_eq!(names.len(), 4);
    let server = manager.serve(dir, &["--recoverable"]);
    server.signal(Signal::TERM);
    manager.handle_until(|text| text.contains("closing devices"));
    assert!(manager.stored.is_empty());
    assert_eq!(server.wait().0, Some(0));
}
