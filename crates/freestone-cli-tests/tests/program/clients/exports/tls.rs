//! TLS: standard clients, a second server as a client, refused configurations, and reloading of
//! certificates.

use freestone_testkit::certificates::{Authority, Usage};

use crate::harness::prelude::*;

const TLS: [&str; 6] = [
    "--tls-cert",
    "tls/server-cert.pem",
    "--tls-key",
    "tls/server-key.pem",
    "--tls-client-ca",
    "tls/ca-cert.pem",
];

/// Returns a directory, and a certificate authority in it with certificates of a server and two
/// clients.
fn directory() -> (tempfile::TempDir, Authority) {
    let dir = tempfile::tempdir().unwrap();
    let ours = authority(dir.path(), "tls");
    (dir, ours)
}

fn authority(dir: &Path, name: &str) -> Authority {
    let ours = Authority::new(dir.join(name));
    ours.sign("server", "localhost", Usage::Server);
    // libnbd and qemu look for the certificate of a client under the name `client`.
    ours.sign("client", "client.example", Usage::Client);
    ours.sign("other", "other.example", Usage::Client);
    ours
}

fn args<'a>(mode: &'a str, others: &[&'a str]) -> Vec<&'a str> {
    [&["--tls", mode][..], &TLS, others].concat()
}

/// Returns a URI for libnbd with TLS at the Unix socket. The directory `tls` has the client's
/// certificates.
fn uri(serve: &Serve, export: &str, tls: &Path) -> String {
    let socket = serve.path("nbd");
    let (socket, tls) = (socket.display(), tls.display());
    format!("nbds+unix:///{export}?socket={socket}&tls-certificates={tls}&tls-hostname=localhost")
}

fn size(uri: &str) -> Result<u64, String> {
    let (code, out, err) = finish(tool("nbdinfo").args(["--size", uri]));
    if code == 0 { Ok(out.trim().parse().unwrap()) } else { Err(err) }
}

#[test]
fn standard_clients_connect_by_tls() {
    let (dir, ours) = directory();
    let strangers = authority(dir.path(), "strangers");
    let serve = Serve::start_in(dir, &args("require", &["r=ram,disksize=64M"]), true);
    let socket = serve.path("nbd").display().to_string();
    assert!(
        serve.startup_output.contains(&format!("r: nbdinfo 'nbds+unix:///r?socket={socket}'")),
        "{}",
        serve.startup_output
    );
    let at = uri(&serve, "r", ours.dir());
    assert_eq!(size(&at), Ok(64 * MIB));
    // The server refuses a client without TLS and a client that it does not trust. A client that
    // does not trust the server closes the connection.
    assert!(size(&format!("nbd+unix:///r?socket={socket}")).is_err());
    assert!(size(&uri(&serve, "r", strangers.dir())).is_err());
    let mixed = serve.path("mixed");
    fs::create_dir(&mixed).unwrap();
    fs::copy(ours.file("ca-cert.pem"), mixed.join("ca-cert.pem")).unwrap();
    assert!(size(&uri(&serve, "r", &mixed)).is_err(), "without a certificate");
    for file in ["client-cert.pem", "client-key.pem"] {
        fs::copy(strangers.file(file), mixed.join(file)).unwrap();
    }
    assert!(size(&uri(&serve, "r", &mixed)).is_err());

    let data = noise(3, 32 * MIB);
    fs::write(serve.path("data"), &data).unwrap();
    ok(tool("nbdcopy").arg(serve.path("data")).arg(&at));
    ok(tool("nbdcopy").arg(&at).arg(serve.path("copy")));
    assert!(fs::read(serve.path("copy")).unwrap()[..data.len()] == data);
    let object = |tls: &Path| format!("tls-creds-x509,id=t,dir={},endpoint=client", tls.display());
    let image = format!("driver=nbd,path={socket},export=r,tls-creds=t,tls-hostname=localhost");
    let qemu = |tls: &Path, commands: &[&str]| {
        let mut qemu = tool("qemu-io");
        qemu.args(["--object", &object(tls), "--image-opts", &image]);
        for command in commands {
            qemu.args(["-c", command]);
        }
        finish(&mut qemu)
    };
    let asked = ["write -P 7 1M 5M", "read -P 7 1M 5M", "read -P 0 40M 1M", "discard 1M 1M", "flush"];
    let (code, out, err) = qemu(ours.dir(), &asked);
    assert!(code == 0 && !out.contains("failed"), "{out}{err}");
    assert_ne!(qemu(&mixed, &asked[..1]).0, 0);
    let map = ok(tool("nbdinfo").args(["--map", &at]));
    assert!(map.contains("hole"), "{map}");

    // A second server opens the export through TLS as a base, and creates a fork of the base.
    let second = tempfile::tempdir().unwrap();
    let file = |name: &str| ours.file(name).display().to_string();
    let base = format!(
        "base=nbd,uri=nbds+unix:///r?socket={socket},readonly=yes,tls_ca={},tls_cert={},tls_key={}",
        file("ca-cert.pem"),
        file("client-cert.pem"),
        file("client-key.pem")
    );
    let second = Serve::start_in(second, &[&base[..], "f=fork,base=base"], true);
    let fork = format!("nbd+unix:///f?socket={}", second.path("nbd").display());
    ok(tool("nbdcopy").arg(&fork).arg(second.path("copy")));
    ok(tool("nbdcopy").arg(&at).arg(second.path("same")));
    assert!(fs::read(second.path("copy")).unwrap() == fs::read(second.path("same")).unwrap());
}

#[test]
fn tls_clients_restricts_a_device() {
    let (dir, ours) = directory();
    let devices = [
        "all=null,size=1M",
        "one=null,size=2M,tls_clients=client",
        "two=ram,disksize=3M,tls_clients=x+other.example",
    ];
    let serve = Serve::start_in(dir, &args("on", &devices), true);
    for (name, scheme) in [("all", "nbd"), ("one", "nbds"), ("two", "nbds")] {
        assert!(
            serve.startup_output.contains(&format!("{name}: nbdinfo '{scheme}+unix:///{name}?")),
            "{}",
            serve.startup_output
        );
    }
    let clear = |name: &str| size(&format!("nbd+unix:///{name}?socket={}", serve.path("nbd").display()));
    assert_eq!(clear("all"), Ok(MIB));
    assert!(clear("one").is_err() && clear("two").is_err());
    let secure = |name: &str| size(&uri(&serve, name, ours.dir()));
    assert_eq!((secure("all"), secure("one")), (Ok(MIB), Ok(2 * MIB)));
    assert!(secure("two").is_err());
    // The files of the client are replaced by those of the client `other`.
    for kind in ["cert", "key"] {
        fs::copy(ours.file(&format!("other-{kind}.pem")), ours.file(&format!("client-{kind}.pem"))).unwrap();
    }
    assert_eq!(secure("two"), Ok(3 * MIB));
    assert!(secure("one").is_err());
    // A snapshot or fork has a `tls_clients` of its own, which also applies to exports that are
    // published later.
    serve.text(&["snapshot", "two", "two-1", "tls_clients=any"]);
    let output = serve.text(&["fork", "two-1", "three", "tls_clients=client", "--nbd", "unix:nbd"]);
    assert!(output.contains("nbds+unix:///three?"), "{output}");
    assert!(secure("three").is_err());
    assert_eq!(
        serve.text(&["publish", "two-1", "--nbd", "unix:nbd"]),
        format!("nbds+unix:///two-1?socket={}\n", serve.path("nbd").display())
    );
    assert!(clear("two-1").is_err());
    assert_eq!(secure("two-1"), Ok(3 * MIB));
    let list = serve.json(&["list"]).to_string();
    assert!(list.contains("nbds+unix:///one?") && list.contains("\"nbd+unix:///all?"), "{list}");
}

/// Checks that `list` reports a device of the state as missing, because the server was started
/// without TLS.
fn check_missing(serve: &Serve, name: &str) {
    let listed = serve.text(&["list"]);
    let expected = format!("{name}: is not there again, tls_clients: this server has no TLS; ");
    assert!(listed.contains(&expected), "{listed}");
}

#[test]
fn tls_clients_is_kept_over_restarts() {
    let (dir, ours) = directory();
    let mut serve = Serve::start_in(
        dir,
        &args("on", &["one=ram,disksize=2M,keep=yes,tls_clients=client", "--state", "st"]),
        true,
    );
    let data: Vec<u8> = (0..2 * MIB as usize).map(|at| (at / 7) as u8).collect();
    fs::write(serve.path("data"), &data).unwrap();
    ok(tool("nbdcopy").arg(serve.path("data")).arg(uri(&serve, "one", ours.dir())));
    for _ in 0..2 {
        assert!(size(&format!("nbd+unix:///one?socket={}", serve.path("nbd").display())).is_err());
        ok(tool("nbdcopy").arg(uri(&serve, "one", ours.dir())).arg(serve.path("copy")));
        assert!(fs::read(serve.path("copy")).unwrap() == data);
        let dir = serve.end();
        // Without TLS the device with `tls_clients` is missing, but its content is kept.
        serve = Serve::start_in(dir, &["--state", "st"], true);
        check_missing(&serve, "one");
        serve = Serve::start_in(serve.end(), &args("on", &["--state", "st"]), true);
    }
}

#[test]
fn restore_sets_tls_clients() {
    let (dir, ours) = directory();
    let devices = ["one=ram,disksize=2M,tls_clients=client", "base=ram,disksize=1M", "--state", "st"];
    let serve = Serve::start_in(dir, &args("on", &devices), true);
    serve.text(&["snapshot", "base", "base-1"]);
    serve.text(&["fork", "base-1", "two"]);
    serve.text(&["save", "two", "forks"]);
    serve.text(&["save", "one", "disk"]);
    for name in ["one", "two"] {
        serve.text(&["remove", name]);
    }
    assert!(serve.refused(2, &["restore", "disk", "tls_clients=a++b"]).contains("tls_clients=a++b: must be"));
    let clear = |serve: &Serve, name: &str| {
        size(&format!("nbd+unix:///{name}?socket={}", serve.path("nbd").display()))
    };
    serve.text(&["restore", "disk", "tls_clients=other"]);
    serve.text(&["restore", "forks", "tls_clients=client"]);
    for name in ["one", "two"] {
        serve.text(&["publish", name, "--nbd", "unix:nbd"]);
    }
    assert!(clear(&serve, "one").is_err() && clear(&serve, "two").is_err());
    assert_eq!(size(&uri(&serve, "two", ours.dir())), Ok(MIB));
    assert!(size(&uri(&serve, "one", ours.dir())).is_err());
    let serve = Serve::start_in(serve.end(), &["--state", "st"], true);
    check_missing(&serve, "one");
    // The fork `two` cannot be created again, because its base is a snapshot restored from a file.
    let listed = serve.text(&["list"]);
    assert!(listed.contains("two: is not there again, it was restored from a file; restore "), "{listed}");
    let serve = Serve::start_in(serve.end(), &["n=null,size=1M"], true);
    let why = serve.refused(2, &["restore", "disk", "tls_clients=any"]);
    assert!(why.contains("tls_clients: this server has no TLS"), "{why}");
}

#[test]
fn tls_files_reload_without_an_outage() {
    let (dir, ours) = directory();
    let mut command = hearing_hangups(dir.path());
    let log = fs::File::create(dir.path().join("log")).unwrap();
    command.env("RUST_LOG", "info").stderr(log);
    command
        .args(["serve", "r=ram,disksize=8M", "--nbd", "unix:nbd", "--control", "control"])
        .args(args("require", &["--tls-client-crl", "tls/crl.pem"]));
    ours.revoke("crl.pem", &[], 2100);
    let serve = Serve::ready(dir, command);
    let wait_until = |is_so: &dyn Fn() -> bool| {
        let end = Instant::now() + Duration::from_secs(20);
        while !is_so() {
            assert!(Instant::now() < end, "{}", fs::read_to_string(serve.path("log")).unwrap());
            thread::sleep(Duration::from_millis(5));
        }
    };
    let wait_for = |text: &str| {
        wait_until(&|| fs::read_to_string(serve.path("log")).unwrap().contains(text));
    };
    // The client qemu-io stays connected while the certificates change.
    let object = format!("tls-creds-x509,id=t,dir={},endpoint=client", ours.dir().display());
    let image = format!(
        "driver=nbd,path={},export=r,tls-creds=t,tls-hostname=localhost",
        serve.path("nbd").display()
    );
    let mut client = Command::new(freestone_testkit::tools::find("qemu-io"));
    client.args(["--object", &object, "--image-opts", &image, "-c", "write -P 1 0 64k"]);
    client.args(["-c", "sleep 3000", "-c", "read -P 1 0 64k"]).stdout(std::process::Stdio::piped());
    let client = client.spawn().unwrap();
    wait_for("connected");
    let at = uri(&serve, "r", ours.dir());
    assert_eq!(size(&at), Ok(8 * MIB));
    // If the new files are invalid, the server keeps using the previous ones.
    fs::rename(ours.file("server-key.pem"), ours.file("server-key.old")).unwrap();
    serve.signal(Signal::HUP);
    wait_for("TLS keeps using the previous files");
    assert_eq!(size(&at), Ok(8 * MIB));
    fs::copy(ours.file("client-key.pem"), ours.file("server-key.pem")).unwrap();
    serve.signal(Signal::HUP);
    wait_for("with tls_key: ");
    assert_eq!(size(&at), Ok(8 * MIB));
    fs::rename(ours.file("server-key.old"), ours.file("server-key.pem")).unwrap();
    // A client whose certificate was revoked is refused after the reload.
    ours.revoke("crl.pem", &["client"], 2100);
    serve.signal(Signal::HUP);
    wait_for("TLS files reloaded");
    wait_until(&|| size(&at).is_err());
    ours.revoke("crl.pem", &["other"], 2100);
    serve.signal(Signal::HUP);
    wait_until(&|| size(&at).is_ok());
    // New certificates apply to clients that connect after the reload.
    let next = authority(serve.dir.path(), "next");
    next.revoke("crl.pem", &[], 2100);
    for file in ["ca-cert.pem", "server-cert.pem", "server-key.pem", "crl.pem"] {
        fs::copy(next.file(file), ours.file(file)).unwrap();
    }
    serve.signal(Signal::HUP);
    wait_until(&|| size(&uri(&serve, "r", next.dir())) == Ok(8 * MIB));
    // The certificate of the previous client is not signed by the new authority.
    assert!(size(&at).is_err());
    let out = client.wait_with_output().unwrap();
    let output = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success() && output.contains("read 65536/65536"), "{output}");
    serve.end();
}

#[test]
fn invalid_tls_options_are_refused() {
    let (dir, ours) = directory();
    let at = dir.path();
    let refusal = |status, more: &[&str]| {
        refused(
            at,
            status,
            &[&["serve", "n=null,size=1M", "--control", "c", "--nbd", "unix:n"][..], more].concat(),
        )
    };
    assert_eq!(refusal(2, &["--tls", "on"]), "tls=on: needs tls_cert and tls_key; tls_cert is missing");
    assert_eq!(
        refusal(2, &["--tls", "require", "--tls-cert", "x"]),
        "tls=require: needs tls_cert and tls_key; tls_key is missing"
    );
    assert_eq!(refusal(2, &["--tls-key", "x"]), "tls_key: needs tls=on or tls=require");
    assert_eq!(
        refusal(2, &["--tls", "on", "--tls-cert", "x", "--tls-key", "x", "--tls-client-crl", "x"]),
        "tls_client_crl: needs tls_client_ca"
    );
    let missing = refusal(2, &["--tls", "on", "--tls-cert", "x", "--tls-key", "x"]);
    assert!(missing.starts_with(&format!("tls_cert={}/x: ", at.display())), "{missing}");
    let no_key =
        refusal(2, &["--tls", "on", "--tls-cert", "tls/ca-cert.pem", "--tls-key", "tls/ca-cert.pem"]);
    assert!(no_key.starts_with("tls_key="), "{no_key}");
    let other = ours.file("client-key.pem").display().to_string();
    let mixed = refusal(2, &["--tls", "on", "--tls-cert", "tls/server-cert.pem", "--tls-key", &other]);
    assert!(mixed.contains("with tls_key: "), "{mixed}");
    let named = "m=null,size=1M,tls_clients=vm";
    assert_eq!(
        refusal(2, &[named]),
        "m: tls_clients: this server has no TLS; start it with --tls on or require"
    );
    assert_eq!(
        refusal(2, &[&["--tls", "on", named][..], &TLS[..4]].concat()),
        "m: tls_clients: this server does not request client certificates; start it with --tls-client-ca"
    );
    let word = refusal(2, &["m=null,size=1M,tls_clients=a++b"]);
    assert!(word.contains("m: tls_clients=a++b: must be any, or names"), "{word}");

    // TCP addresses that other machines can reach need TLS or --allow-plaintext.
    let open = "tcp:0.0.0.0:0: other machines can connect without TLS; start the server with --tls require, \
                or with --allow-plaintext if you trust the network";
    for more in [&[][..], &["--check"], &args("on", &[])] {
        assert_eq!(refusal(2, &[&["--nbd", "tcp:0.0.0.0:0"][..], more].concat()), open);
    }
    fs::write(
        at.join("f.toml"),
        "tls = 'require'\ntls_cert = 'tls/server-cert.pem'\ntls_key = 'tls/server-key.pem'\nallow_plaintext = false\n\
         handshake_bytes = '16K'\nnbd = ['unix:nbd', 'tcp:0.0.0.0:0']\ncontrol = 'control'\n\
         [[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\ntls_clients = 'any'\n",
    )
    .unwrap();
    assert_eq!(finish(freestone(at).args(["serve", "--config", "f.toml", "--check"])).0, 0);
    let serve = Serve::start_in(dir, &["--config", "f.toml"], false);
    assert!(serve.startup_output.contains("nbds://0.0.0.0:"), "{}", serve.startup_output);
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    let dumped = serve.text(&["dump"]);
    for line in [
        "tls = \"require\"",
        "allow_plaintext = false",
        "handshake_bytes = \"16K\"",
        "tls_clients = \"any\"",
        "/tls/server-key.pem\"",
    ] {
        assert!(dumped.contains(line), "{line}: {dumped}");
    }
    let file = fs::read_to_string(serve.path("f.toml")).unwrap();
    fs::write(serve.path("f.toml"), file.replace("'require'", "'on'")).unwrap();
    let why = serve.refused(1, &["apply", "f.toml"]);
    assert!(why.ends_with("tls: the server uses require; restart the server to change this"), "{why}");
    fs::write(serve.path("f.toml"), file.replace("tls_clients = 'any'", "")).unwrap();
    let why = serve.refused(1, &["apply", "f.toml"]);
    assert!(why.contains("tls_clients: is any and cannot be changed"), "{why}");
    let dir = serve.end();
    // The verbs `publish` and `create` have the same restrictions at run time.
    let serve = Serve::start_in(dir, &["n=null,size=1M"], true);
    assert_eq!(serve.refused(2, &["publish", "n", "--nbd", "tcp:0.0.0.0:0"]), format!("n: {open}"));
    let why = serve.refused(2, &["create", named]);
    assert!(why.contains("this server has no TLS"), "{why}");
}
