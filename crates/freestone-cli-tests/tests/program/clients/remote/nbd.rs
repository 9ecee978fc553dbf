//! Exports of other NBD servers as devices: qemu-nbd and nbdkit behind bases, origins and COW devices, server restarts,
//! and loops to the server itself.

use freestone_testkit::tools::is_listening;

use super::shut_down;
use crate::harness::prelude::*;

/// A qemu-nbd or nbdkit process, killed when dropped.
pub(super) struct Other {
    process: KillOnDrop,
    pub socket: PathBuf,
}

impl Other {
    fn start(program: &str, args: &[&str], socket: &Path) -> Self {
        let _ = fs::remove_file(socket);
        let mut command = Command::new(find(program));
        let process = KillOnDrop::start(command.args(args), || is_listening(socket));
        Self { process, socket: socket.to_owned() }
    }

    /// Starts qemu-nbd for an image file, at the socket `name`. The argument `-r` makes the export read-only.
    pub fn qemu(dir: &TempDir, name: &str, image: &str, args: &[&str]) -> Self {
        let (socket, image) = (dir.path().join(name), dir.path().join(image));
        let (at, image) = (socket.display().to_string(), image.display().to_string());
        let all = [&["--persistent", "--shared=0", "--socket", &at], args, &[&image]].concat();
        Self::start("qemu-nbd", &all, &socket)
    }

    /// Starts nbdkit with a plugin and its arguments, at the socket `name`.
    pub fn kit(dir: &TempDir, name: &str, args: &[&str]) -> Self {
        let socket = dir.path().join(name);
        let at = socket.display().to_string();
        Self::start("nbdkit", &[&["-f", "-U", &at], args].concat(), &socket)
    }

    pub fn device(&self, name: &str) -> String {
        format!("{name}=nbd,uri=nbd+unix:///?socket={}", self.socket.display())
    }

    pub fn kill(mut self) {
        self.process.0.kill().unwrap();
        self.process.0.wait().unwrap();
    }
}

fn image(dir: &TempDir, name: &str, format: &str) {
    let path = dir.path().join(name);
    ok(tool("qemu-img").args(["create", "-q", "-f", format]).arg(&path).arg("16M"));
    let mut command = tool("qemu-io");
    command.args(["-f", format, "-c", "write -P 7 0 1M", "-c", "write -P 8 9M 64k"]).arg(&path);
    ok(&mut command);
}

pub(super) fn get(serve: &Serve, name: &str, attr: &str) -> Value {
    serve.json(&["get", name, attr])[attr].clone()
}

#[test]
fn read_only_export_has_forks() {
    let dir = tempfile::tempdir().unwrap();
    image(&dir, "disk.qcow2", "qcow2");
    let other = Other::qemu(&dir, "other", "disk.qcow2", &["-f", "qcow2", "-r"]);
    // The base `said` is read-only by `readonly=yes`, the base `found` because the other server exports it read-only.
    let [stated, found] = ["said", "found"].map(|name| other.device(name));
    let server = Serve::start(&[&format!("{stated},readonly=yes,mem_limit=64M"), &found]);
    for base in ["said", "found"] {
        let fork = format!("fork-of-{base}");
        let at = format!("unix:{}", server.path("nbd").display());
        server.text(&["fork", base, &fork, "--nbd", &at]);
        qemu_io(&uri(&server, &fork), &["read -P 7 0 1M", "read -P 0 1M 8M", "read -P 8 9M 64k"]);
        qemu_io(&uri(&server, &fork), &["write -P 9 512k 1M", "read -P 9 512k 1M", "read -P 7 0 512k"]);
        qemu_io(&uri(&server, base), &["read -P 7 0 1M"]);
    }
    assert_eq!(get(&server, "said", "mem_limit"), 64 << 20);
    assert_eq!(
        (get(&server, "found", "readonly"), get(&server, "found", "size")),
        (true.into(), (16 * MIB).into())
    );
    // The export of the nbd device reports the holes of the image as holes.
    let map = ok(tool("nbdinfo").args(["--map", "--totals"]).arg(uri(&server, "found")));
    assert!(map.contains("hole"), "{map}");
    let why = server.refused(1, &["snapshot", "found", "s"]);
    assert!(why.contains("is read-only, so it does not change; fork it"), "{why}");
    drop(other);
}

#[test]
fn export_is_origin_and_cow_device() {
    let dir = tempfile::tempdir().unwrap();
    image(&dir, "disk.qcow2", "qcow2");
    let origin = Other::qemu(&dir, "origin", "disk.qcow2", &["-f", "qcow2"]);
    let copies = dir.path().join("copies.img");
    fs::File::create(&copies).unwrap().set_len(32 * MIB).unwrap();
    let copies = Other::kit(&dir, "copies", &["file", &copies.display().to_string()]);
    let words = [origin.device("data"), format!("{},publish=no", copies.device("cow"))];
    let server = Serve::start(&words);
    let why = server.refused(1, &["fork", "data", "f"]);
    assert!(why.contains("is live; take a snapshot and fork that"), "{why}");
    server.text(&["snapshot", "data", "before", "cow=cow"]);
    let at = format!("unix:{}", server.path("nbd").display());
    server.text(&["publish", "before", "--nbd", &at]);
    qemu_io(&uri(&server, "data"), &["write -P 1 0 2M", "flush"]);
    qemu_io(&uri(&server, "data"), &["read -P 1 0 2M"]);
    qemu_io(&uri(&server, "before"), &["read -P 7 0 1M", "read -P 0 1M 1M", "read -P 8 9M 64k"]);
    // The written data has reached the other server.
    let direct = format!("nbd+unix:///?socket={}", origin.socket.display());
    qemu_io(&direct, &["read -P 1 0 2M"]);
    assert!(get(&server, "data", "connections").as_u64().unwrap() > 0);
    // A merge of the snapshot into its origin restores the old content of the origin.
    server.text(&["unpublish", "data"]);
    server.text(&["merge", "before", "--into-origin"]);
    server.text(&["remove", "before"]);
    server.text(&["publish", "data", "--nbd", &at]);
    qemu_io(&uri(&server, "data"), &["read -P 7 0 1M", "read -P 0 1M 1M"]);
}

#[test]
fn requests_wait_for_a_server_that_restarts() {
    let dir = tempfile::tempdir().unwrap();
    image(&dir, "disk.img", "raw");
    let start = || Other::qemu(&dir, "other", "disk.img", &["-f", "raw"]);
    let other = start();
    let server = Serve::start(&[
        format!("{},timeout=20s", other.device("data")),
        other.device("once") + ",timeout=1s",
    ]);
    qemu_io(&uri(&server, "data"), &["write -P 3 0 64k", "flush"]);
    qemu_io(&uri(&server, "once"), &["read -P 3 0 64k"]);
    other.kill();
    for name in ["data", "once"] {
        wait_until("the loss is seen", || get(&server, name, "connections") == 0);
    }
    let message =
        fails(tool("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 64k"]).arg(uri(&server, "once")));
    assert!(message.contains("Input/output error"), "{message}");
    let other = std::thread::scope(|scope| {
        let reader = scope.spawn(|| qemu_io(&uri(&server, "data"), &["read -P 3 0 64k"]));
        std::thread::sleep(Duration::from_millis(500));
        assert!(!reader.is_finished());
        start()
    });
    wait_until("both are connected again", || get(&server, "once", "connections") != 0);
    qemu_io(&uri(&server, "once"), &["write -P 4 0 64k", "flush", "read -P 4 0 64k"]);
    assert_eq!(get(&server, "data", "reconnects"), 1);
    assert!(get(&server, "data", "last_error").is_string());
    drop(other);
}

#[test]
fn restart_restores_devices_if_their_server_runs() {
    let dir = tempfile::tempdir().unwrap();
    let data = dir.path().join("data.img");
    fs::write(&data, noise(1, 4 * MIB)).unwrap();
    let file = data.display().to_string();
    let other = Other::kit(&dir, "other", &["file", &file]);
    let device = other.device("data");
    let serve =
        |dir: TempDir, args: &[&str]| Serve::start_in(dir, &[&["--state", "state"], args].concat(), true);
    let state = tempfile::tempdir().unwrap();
    let server = serve(state, &[&device]);
    server.text(&["create", &format!("{},readonly=yes", other.device("base"))]);
    server.text(&["fork", "base", "f", "on_data_loss=empty"]);
    let state = shut_down(server);
    other.kill();
    let server = serve(state, &[]);
    let list = server.json(&["list"]);
    let mut missing: Vec<_> =
        list["missing"].as_array().unwrap().iter().map(|m| m["name"].as_str().unwrap()).collect();
    missing.sort_unstable();
    assert_eq!(missing, ["base", "data", "f"]);
    assert!(server.text(&["list"]).contains("cannot connect: "));
    let state = shut_down(server);
    let other = Other::kit(&dir, "other", &["file", &file]);
    let server = serve(state, &[]);
    assert_eq!(server.json(&["list"])["missing"], Value::Null);
    let copy = server.path("copy.img");
    ok(tool("nbdcopy").arg(uri(&server, "data")).arg(&copy));
    assert!(fs::read(&copy).unwrap() == noise(1, 4 * MIB));
    drop(other);
}

#[test]
fn device_that_leads_back_to_the_server_is_refused() {
    let server = Serve::start(&["r=ram,disksize=1M", "n=null,size=1M", "--allow-plaintext"]);
    let dir = server.dir.path();
    std::os::unix::fs::symlink(dir, dir.join("link")).unwrap();
    // Every path that leads to the server's own socket is detected.
    for socket in ["nbd", "./nbd", "link/nbd"] {
        let why = server.refused(1, &["create", &format!("loop=nbd,uri=nbd+unix:///r?socket={socket}")]);
        assert!(why.contains("is an address of this server, which would wait for itself"), "{why}");
    }
    let output = server.json(&["publish", "n", "--nbd", "tcp:0.0.0.0:0"]);
    let text = output.to_string();
    let port = text.split("0.0.0.0:").nth(1).unwrap();
    let port: String = port.chars().take_while(char::is_ascii_digit).collect();
    for host in ["127.0.0.1", "localhost", "0.0.0.0"] {
        let why = server.refused(1, &["create", &format!("loop=nbd,uri=nbd://{host}:{port}/n")]);
        assert!(why.contains("is an address of this server"), "{why}");
    }
    // In the other order, `publish` is refused if an existing device connects to the new address.
    let other = tempfile::tempdir().unwrap();
    let kit = Other::kit(&other, "other", &["memory", "1M"]);
    server.text(&["create", &kit.device("far")]);
    let at = kit.socket.display().to_string();
    kit.kill();
    let _ = fs::remove_file(&at);
    let why = server.refused(1, &["publish", "r", "--nbd", &format!("unix:{at}")]);
    assert!(why.contains("the device far leads there, and the server would wait for itself"), "{why}");
    assert!(!Path::new(&at).exists());
    server.text(&["remove", "far"]);
    server.text(&["publish", "r", "--nbd", &format!("unix:{at}")]);
    // The same check at server start.
    let args = ["serve", "--nbd", "unix:own", "--control", "c2", "loop=nbd,uri=nbd+unix:///x?socket=own"];
    let why = refused(other.path(), 1, &args);
    assert!(why.contains("own is an address of this server"), "{why}");
}

#[test]
fn password_in_uri_is_not_shown() {
    let server = Serve::start(&["r=ram,disksize=1M"]);
    let why = server.refused(2, &["create", "n=nbd,uri=nbd://me:secret@host/x"]);
    assert!(why.contains("uri=(not shown)") && !why.contains("secret"), "{why}");
}

#[test]
fn unpublish_at_one_address_leaves_the_others() {
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    for at in ["unix:a", "unix:b"] {
        serve.text(&["publish", "r", "--nbd", at]);
    }
    let at = |name: &str| format!("unix:{}", serve.path(name).display());
    let exports = || {
        let exports = serve.json(&["list", "r"])["devices"][0]["exports"].clone();
        let addresses =
            exports.as_array().unwrap().iter().map(|export| export["address"].as_str().unwrap().to_owned());
        addresses.collect::<Vec<_>>()
    };
    let client = std::os::unix::net::UnixStream::connect(serve.path("a")).unwrap();
    connect_nbd(&mut &client, "r");
    let why = serve.refused(1, &["unpublish", "r", "--at", &at("a")]);
    assert!(why.starts_with("r: cannot be unpublished"), "{why}");
    assert_eq!(serve.json(&["unpublish", "r", "--at", &at("a"), "--force"])["connections_ended"], 1);
    let mut left = exports();
    left.sort();
    assert_eq!(left, [at("b"), at("nbd")]);
    assert!(!serve.path("a").exists());
    // Neither address has an export of the device alone: `a` is closed, and the command line address `nbd` exports all
    // devices.
    for there in [at("a"), at("nbd")] {
        let why = serve.refused(1, &["unpublish", "r", "--at", &there]);
        assert!(why.starts_with(&format!("r: unpublish: {there}: not published there")), "{why}");
    }
    assert_eq!(exports().len(), 2);
}
