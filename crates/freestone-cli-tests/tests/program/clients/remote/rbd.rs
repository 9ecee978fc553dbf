//! RBD images, with a substitute for Ceph's librbd whose pool is a directory. The kernel lab uses a real Ceph cluster.

use std::os::unix::fs::FileExt as _;

use freestone_testkit::librbd;

use super::assert_content;
use super::nbd::get;
use crate::harness::prelude::*;

/// Directory that simulates a Ceph cluster with one image, `rbd/vm`. The substitute librbd is in it too.
struct Cluster(TempDir);

impl Cluster {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        librbd::build(dir.path(), false);
        fs::write(dir.path().join("ceph.conf"), format!("root = {}\n", dir.path().display())).unwrap();
        let cluster = Self(dir);
        fs::File::create(cluster.file("rbd.vm")).unwrap().set_len(16 * MIB).unwrap();
        cluster
    }

    fn file(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn device(&self, name: &str, more: &str) -> String {
        format!("{name}=rbd,image=rbd/vm,conf={}{more}", self.file("ceph.conf").display())
    }

    /// Sets which calls of the substitute librbd hang or fail from now on.
    fn control(&self, lines: &str) {
        fs::write(self.file("control.new"), lines).unwrap();
        fs::rename(self.file("control.new"), self.file("control")).unwrap();
    }

    fn serve(&self, dir: TempDir, args: &[String]) -> Serve {
        let mut command = freestone(dir.path());
        command.env("LD_LIBRARY_PATH", self.0.path());
        command.arg("serve").args(args).args(["--nbd", "unix:nbd", "--control", "control"]);
        Serve::ready(dir, command)
    }
}

fn put(serve: &Serve, name: &str, data: &[u8]) {
    let file = serve.path("put");
    fs::write(&file, data).unwrap();
    ok(tool("nbdcopy").arg("--flush").arg(&file).arg(uri(serve, name)));
}

#[test]
fn image_survives_crash_and_restart() {
    let cluster = Cluster::new();
    let data = noise(1, 4 * MIB);
    let state = ["--state".to_owned(), "state".to_owned()];
    let server = cluster.serve(tempfile::tempdir().unwrap(), &state);
    server.text(&["create", &cluster.device("d", "")]);
    server.text(&["publish", "d", "--nbd", "unix:nbd"]);
    put(&server, "d", &data);
    assert_eq!(get(&server, "d", "image"), "rbd/vm");
    assert!(fs::read(cluster.file("rbd.vm")).unwrap()[..data.len()] == data[..]);
    server.signal(Signal::KILL);

    // The restarted server restores the rbd device from the state directory.
    let server = cluster.serve(server.wait().1, &state);
    assert_content(&server, "d", &data);
    server.text(&["snapshot", "d", "before", "cow=./before.cow", "cow_size=32M"]);
    server.text(&["publish", "before", "--nbd", "unix:nbd"]);
    qemu_io(&uri(&server, "d"), &["write -P 9 0 1M", "flush"]);
    assert_content(&server, "before", &data);
    let dir = server.end();

    let server = cluster.serve(dir, &state);
    assert_content(&server, "before", &data);
    qemu_io(&uri(&server, "d"), &["read -P 9 0 1M"]);
    server.text(&["remove", "before"]);
    server.text(&["remove", "d"]);
    let log = fs::read_to_string(cluster.file("log")).unwrap();
    assert_eq!(log.lines().last(), Some("shutdown"), "the image is not closed");
}

#[test]
fn forks_do_not_write_the_image() {
    let cluster = Cluster::new();
    let data = noise(2, 2 * MIB);
    for name in ["rbd.vm", "rbd.vm@monday"] {
        let file = fs::File::create(cluster.file(name)).unwrap();
        file.write_all_at(&data, 0).unwrap();
        file.set_len(8 * MIB).unwrap();
    }
    let devices = [cluster.device("d", ",readonly=yes"), cluster.device("m", ",snap=monday,mem_limit=64M")];
    let server = cluster.serve(tempfile::tempdir().unwrap(), &devices);
    for base in ["d", "m"] {
        let fork = format!("{base}-fork");
        server.text(&["fork", base, &fork, "--nbd", "unix:nbd"]);
        assert_content(&server, &fork, &data);
        qemu_io(&uri(&server, &fork), &["write -P 3 0 1M", "flush", "read -P 3 0 1M"]);
        assert_content(&server, base, &data);
    }
    assert_eq!(get(&server, "m", "snap"), "monday");
    fails(tool("qemu-io").args(["-f", "raw", "-c", "write 0 4k"]).arg(uri(&server, "d")));
    for name in ["rbd.vm", "rbd.vm@monday"] {
        assert!(fs::read(cluster.file(name)).unwrap()[..data.len()] == data[..]);
    }
}

#[test]
fn hanging_cluster_fails_requests_after_timeout() {
    let cluster = Cluster::new();
    let server = cluster.serve(tempfile::tempdir().unwrap(), &[cluster.device("d", ",timeout=1s")]);
    cluster.control("hang write\n");
    let message = fails(tool("qemu-io").args(["-f", "raw", "-c", "write 0 4k"]).arg(uri(&server, "d")));
    assert!(message.contains("Input/output error"), "{message}");
    assert_eq!(
        get(&server, "d", "last_error"),
        "a write of 4096 bytes at 0: the cluster did not answer in time"
    );
    // Only writes hang, so reads still complete. A timeout at open and a missing image have different errors.
    qemu_io(&uri(&server, "d"), &["read 0 4k"]);
    cluster.control("hang write\nhang open\n");
    let why = server.refused(1, &["create", &cluster.device("late", ",timeout=1s")]);
    assert_eq!(why, "late: rbd/vm: the cluster did not answer within 3s");
    cluster.control("hang write\n");
    let none = cluster.device("none", "").replace("rbd/vm", "rbd/none");
    assert_eq!(server.refused(1, &["create", &none]), "none: rbd/none: there is no such image");
}

/// Neither removing the device nor a shutdown waits for the write that hangs in the cluster.
#[test]
fn remove_does_not_wait_for_a_hanging_cluster() {
    let cluster = Cluster::new();
    let server = cluster.serve(tempfile::tempdir().unwrap(), &[cluster.device("d", ",timeout=60s")]);
    cluster.control("hang write\n");
    let mut client = Raw::connect(&server, "d");
    client.send_write(0, &[1; 4096]);
    wait_until("the write hangs", || stat(&server, "d", "io", "in_flight") > 0);
    let began = Instant::now();
    server.text(&["remove", "d", "--force"]);
    server.end();
    assert!(began.elapsed() < Duration::from_secs(30));
}

#[test]
fn image_grows_while_clients_are_connected() {
    let cluster = Cluster::new();
    let server = cluster.serve(tempfile::tempdir().unwrap(), &[cluster.device("d", "")]);
    fs::File::options().write(true).open(cluster.file("rbd.vm")).unwrap().set_len(32 * MIB).unwrap();
    wait_until("it is larger", || get(&server, "d", "size") == 32 * MIB);
    qemu_io(&uri(&server, "d"), &["write -P 5 31M 1M", "read -P 5 31M 1M"]);
}

#[test]
fn missing_library_error_names_its_package() {
    let cluster = Cluster::new();
    // A file that the dynamic loader finds first and that is not a shared library.
    let libraries = tempfile::tempdir().unwrap();
    fs::write(libraries.path().join("librados.so.2"), "none").unwrap();
    let mut command = freestone(cluster.0.path());
    command.env("LD_LIBRARY_PATH", libraries.path()).args(["serve", &cluster.device("d", "")]);
    let output = command.args(["--nbd", "unix:nbd", "--control", "control"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let why = sentence(&String::from_utf8(output.stderr).unwrap());
    let begin = "d: librados.so.2 cannot be loaded; Debian's package librbd1 has it (";
    assert!(why.starts_with(begin), "{why}");
}
