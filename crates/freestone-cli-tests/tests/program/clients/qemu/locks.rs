//! Locks on image files, compatible with qemu: one writer, or many readers.

use std::io::{BufRead as _, BufReader};
use std::process::Child;
use std::thread::sleep;

use crate::harness::prelude::*;

const LONG: Duration = Duration::from_secs(60);
const STEP: Duration = Duration::from_millis(20);

/// A qemu-io process that keeps an image file open.
struct Holder(Child);

impl Holder {
    fn new(file: &Path, args: &[&str]) -> Self {
        let mut child = tool("qemu-io")
            .args(args)
            .arg(file)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        // qemu-io prints the length only after the file is open and locked.
        child.stdin.as_mut().unwrap().write_all(b"length\n").unwrap();
        let mut output = String::new();
        let mut lines = BufReader::new(child.stdout.as_mut().unwrap());
        while !output.contains("MiB") {
            assert_ne!(lines.read_line(&mut output).unwrap(), 0, "qemu-io ended: {output}");
        }
        Self(child)
    }
}

impl Drop for Holder {
    fn drop(&mut self) {
        // qemu-io ends at the end of its input. SIGKILL would end only timeout(1) and leave qemu-io
        // running.
        drop(self.0.stdin.take());
        let _ = self.0.wait();
    }
}

fn io(file: &Path, args: &[&str]) -> std::process::Command {
    let mut command = tool("qemu-io");
    command.args(args).arg(file);
    command
}

const WRITE: [&str; 4] = ["-f", "raw", "-c", "write -P 1 0 512"];
const READ: [&str; 5] = ["-r", "-f", "raw", "-c", "read 0 512"];

#[test]
fn writable_image_is_locked_exclusively() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("disk.img"), noise(1, 2 * MIB)).unwrap();
    let serve = Serve::start_in(dir, &["disk=file,path=disk.img"], true);
    let image = serve.path("disk.img");
    for args in [&WRITE[..], &READ] {
        let message = fails(&mut io(&image, args));
        assert!(message.contains("lock"), "{message}");
    }
    fails(tool("qemu-img").args(["convert", "-f", "raw", "-O", "raw"]).arg(&image).arg(serve.path("copy")));
    // `-U` makes qemu-img ignore the lock.
    ok(tool("qemu-img").args(["info", "-U", "-f", "raw"]).arg(&image));
    let other = refused(
        serve.dir.path(),
        1,
        &["serve", "d=file,path=disk.img", "--nbd", "unix:other", "--control", "other.control"],
    );
    assert!(other.contains("is in use by another device or process"), "{other}");
    ok(tool("qemu-io").args(WRITE).arg(uri(&serve, "disk")));
    serve.text(&["remove", "disk"]);
    ok(&mut io(&image, &WRITE));
}

#[test]
fn image_in_use_by_qemu_is_refused_or_read_only() {
    let serve = Serve::start(&["n=null,size=1M"]);
    let (raw, qcow2) = (serve.path("disk.img"), serve.path("disk.qcow2"));
    fs::write(&raw, noise(2, 2 * MIB)).unwrap();
    ok(tool("qemu-img").args(["create", "-q", "-f", "qcow2"]).arg(&qcow2).arg("2M"));
    let devices = ["d=file,path=disk.img", "d=file,path=disk.img,readonly=yes", "d=qcow2,path=disk.qcow2"];
    let refused = |device: &str| {
        let message = serve.refused(1, &["create", device]);
        assert!(message.contains("is in use by another device or process"), "{device}: {message}");
    };
    {
        let _writers = (Holder::new(&raw, &["-f", "raw"]), Holder::new(&qcow2, &["-f", "qcow2"]));
        for device in devices {
            refused(device);
        }
    }
    {
        let _readers = (Holder::new(&raw, &["-r", "-f", "raw"]), Holder::new(&qcow2, &["-r", "-f", "qcow2"]));
        refused(devices[0]);
        for device in &devices[1..] {
            serve.text(&["create", device]);
            serve.text(&["remove", "d"]);
        }
    }
    for device in devices {
        serve.text(&["create", device]);
        serve.text(&["remove", "d"]);
    }
}

#[test]
fn read_only_bases_are_shared() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("lower.img"), noise(3, 2 * MIB)).unwrap();
    let image = |args: &[&str]| ok(tool("qemu-img").args(args).current_dir(dir.path()));
    image(&["create", "-q", "-f", "qcow2", "-b", "lower.img", "-F", "raw", "middle.qcow2"]);
    image(&["create", "-q", "-f", "qcow2", "-b", "middle.qcow2", "-F", "qcow2", "top.qcow2"]);
    let at = |name: &str| dir.path().join(name);
    let (lower, middle, top) = (at("lower.img"), at("middle.qcow2"), at("top.qcow2"));
    let bases = [
        format!("golden=file,path={},readonly=yes", lower.display()),
        format!("q=qcow2,path={}", top.display()),
    ];
    let first = Serve::start(&bases);
    let second = Serve::start(&bases);
    for serve in [&first, &second] {
        serve.text(&["fork", "golden", "f"]);
        serve.text(&["fork", "q", "g"]);
    }
    for (file, format) in [(&lower, "raw"), (&middle, "qcow2"), (&top, "qcow2")] {
        ok(tool("qemu-img").args(["info", "-f", format]).arg(file));
        ok(tool("qemu-img").args(["convert", "-f", format, "-O", "raw"]).arg(file).arg(at("copy")));
        assert_eq!(fs::read(at("copy")).unwrap(), fs::read(&lower).unwrap());
        let message = fails(&mut io(file, &["-f", format, "-c", "write -P 1 0 512"]));
        assert!(message.contains("lock"), "{message}");
    }
    // A new overlay is writable although its base is locked for reading.
    ok(tool("qemu-img").args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]).arg(&lower).arg(at("new")));
    ok(&mut io(&at("new"), &["-f", "qcow2", "-c", "write -P 1 0 512"]));
    drop(first);
    fails(&mut io(&top, &["-f", "qcow2", "-c", "write -P 1 0 512"]));
    drop(second);
    // The kernel closes the files of a killed server, and so releases their locks, some
    // milliseconds after the kill.
    let write = || io(&top, &["-f", "qcow2", "-c", "write -P 1 0 512"]).output().unwrap();
    wait_until("it is still locked", || write().status.success());
}

/// Waits until `stat` of the base reports the change `how`; `None` waits for no change. Returns the
/// reported change. Fails after a deadline.
fn eventually_changed(serve: &Serve, base: &str, how: Option<&str>) -> serde_json::Value {
    let start = Instant::now();
    loop {
        let output = serve.json(&["stat", base]);
        if output["changed"]["how"].as_str() == how {
            return output["changed"].clone();
        }
        assert!(start.elapsed() < LONG, "{output}");
        sleep(STEP);
    }
}

#[test]
fn changed_base_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), noise(3, 2 * MIB)).unwrap();
    fs::write(dir.path().join("lower.img"), noise(3, 2 * MIB)).unwrap();
    ok(tool("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-b", "lower.img", "-F", "raw", "top.qcow2"])
        .current_dir(dir.path()));
    let serve = Serve::start_in(
        dir,
        &["golden=file,path=golden.img,readonly=yes", "q=qcow2,path=top.qcow2", "f=fork,base=golden"],
        true,
    );
    let (golden, lower) = (serve.path("golden.img"), serve.path("lower.img"));
    assert!(serve.json(&["stat", "golden"]).get("changed").is_none());
    assert!(!serve.text(&["list"]).contains("changed"));

    // A program that ignores locks writes to the base. Timestamps have the resolution of a clock
    // tick, so the pause makes the modification time differ.
    sleep(STEP);
    let file = fs::OpenOptions::new().write(true).open(&golden).unwrap();
    (&file).write_all(b"new").unwrap();
    let changed = eventually_changed(&serve, "golden", Some("modified"));
    assert_eq!(changed["file"], golden.display().to_string());
    let list = serve.text(&["list"]);
    let is_shown = |line: &str| line.starts_with("golden ") && line.contains(" file changed ");
    assert!(list.lines().any(is_shown), "{list}");
    assert!(serve.text(&["stat", "golden"]).contains("modified"));
    assert!(serve.json(&["stat", "q"]).get("changed").is_none());

    fs::rename(&lower, serve.path("elsewhere")).unwrap();
    assert_eq!(eventually_changed(&serve, "q", Some("removed"))["file"], lower.display().to_string());
    fs::write(&lower, noise(4, 2 * MIB)).unwrap();
    eventually_changed(&serve, "q", Some("replaced"));
    fs::rename(serve.path("elsewhere"), &lower).unwrap();
    eventually_changed(&serve, "q", None);
}
