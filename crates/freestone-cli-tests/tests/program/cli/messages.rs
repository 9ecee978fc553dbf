//! Error messages, warnings and exit statuses of the program.

use std::fs::Permissions;
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixListener;

use crate::cli::sockets_in;
use crate::harness::prelude::*;

#[test]
fn socket_paths_in_use_are_refused_and_kept() {
    let serve = Serve::start(&["n=null,size=1M"]);
    let dir = serve.dir.path();
    let at = |name: &str| serve.path(name).display().to_string();
    let control = refused(dir, 1, &["serve", "--nbd", "unix:other", "--control", "control"]);
    let pid = serve.pid().as_raw_nonzero();
    let why =
        format!("is in use by another server (pid {pid}); stop it, or name another path with --control");
    assert_eq!(control, format!("{}: {why}", at("control")));
    let nbd = refused(dir, 1, &["serve", "--nbd", "unix:nbd", "--control", "c2"]);
    assert!(nbd.contains(&at("nbd")), "{nbd}");

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let tcp = format!("tcp:{}", listener.local_addr().unwrap());
    let port = refused(dir, 1, &["serve", "--nbd", "unix:other", "--nbd", &tcp, "--control", "c2"]);
    assert!(port.contains(&tcp), "{port}");
    assert!(serve.refused(1, &["publish", "n", "--nbd", &tcp]).contains(&tcp));

    fs::write(serve.path("file"), "precious").unwrap();
    let file = refused(dir, 1, &["serve", "--nbd", "unix:other", "--control", "file"]);
    assert_eq!(file, format!("{}: exists and is not a socket", at("file")));
    let file = refused(dir, 1, &["serve", "--nbd", "unix:file", "--control", "c2"]);
    assert!(file.contains(&at("file")), "{file}");
    assert_eq!(fs::read(serve.path("file")).unwrap(), b"precious");

    // The servers that failed to start leave no sockets, and the running server still works.
    assert_eq!(sockets_in(dir), 2);
    assert_eq!(serve.text(&["list"]).lines().count(), 2);
}

#[test]
fn permission_errors_name_the_socket() {
    let serve = Serve::start(&["n=null,size=1M"]);
    let dir = serve.dir.path();
    let mut client = unprivileged(dir);
    if !rustix::process::geteuid().is_root() {
        fs::set_permissions(serve.path("control"), Permissions::from_mode(0o000)).unwrap();
    }
    let (code, _, err) = finish(client.arg("list").arg("--control").arg(serve.path("control")));
    let at = serve.path("control").display().to_string();
    assert_eq!(code, 1);
    assert_eq!(
        sentence(&err),
        format!("{at}: cannot connect to the control socket: Permission denied (os error 13)")
    );

    let closed = serve.path("closed");
    fs::create_dir(&closed).unwrap();
    fs::set_permissions(&closed, Permissions::from_mode(0o555)).unwrap();
    let mut server = unprivileged(dir);
    server.args(["serve", "n=null,size=1M", "--nbd", "tcp:127.0.0.1:0", "--control"]).arg(closed.join("c"));
    let (code, _, err) = finish(&mut server);
    assert_eq!(code, 1);
    let err = sentence(&err);
    assert!(err.contains("closed/c: cannot create the control socket: Permission denied"), "{err}");
}

#[test]
fn wrong_command_lines_end_with_status_2() {
    let dir = tempdir().unwrap();
    let dir = dir.path();
    for (args, expected) in [
        (
            &["serve", "ram0"][..],
            "\"ram0\": a device is NAME=KIND[,key=value]..., for example ram0=ram,disksize=4G",
        ),
        (&["serve", "a=null,size=1M", "a=null,size=1M"], "a: two devices of that name"),
        (
            &["serve", "a=ram,disksize=1024"],
            "a: disksize=1024: give a unit; 1024M? (K, M, G and T are known, 1024-based)",
        ),
        (&["serve", "a=ram,disksize=0"], "a: disksize=0: must be more than 0"),
        (&["serve", "--nbd", "unix:a", "--nbd", "unix:a"], "given twice"),
        (&["serve", "--nbd", "udp:a"], "--nbd: "),
        (&["create", "a=null"], "a: size is missing; a null device needs it, for example size=4G"),
        (&["serve", "a=ram,disksize=300T"], "a: disksize=300T: too large; a ram device has at most 256T"),
        (
            &["serve", "a=ram,disksize=1M,comp_algorithm=store,algorithm_params=level=1"],
            "a: algorithm_params=level=1: store takes no level",
        ),
        (
            &["serve", "a=ram,disksize=1M,comp_algorithm=zstd,algorithm_params=algo=lz4"],
            "a: algorithm_params: algo=lz4 does not match comp_algorithm=zstd",
        ),
        (&["serve", "a=ram,disksize=1M,algorithm_params=dict=none"], "lz4 takes no dictionary"),
        (
            &["serve", "a=null,size=8388608T"],
            "a: size=8388608T: too large; the size must be less than 8388608T",
        ),
        (&["serve", "a=null,size=1K"], "a: size=1K: must be a multiple of the blocksize, 4096 bytes"),
        (&["serve", "a=file,path=new.img,size=8388608T"], "a: size=8388608T: too large; "),
    ] {
        let sentence = refused(dir, 2, args);
        assert!(sentence.contains(expected), "{args:?}: {sentence}");
    }
    // Errors that depend on the state of the machine, not on the command line, have exit status 1.
    let missing = refused(dir, 1, &["serve", "a=file,path=new.img"]);
    assert!(missing.contains("new.img: cannot open: No such file"), "{missing}");
    assert!(!dir.join("new.img").exists());
    for most in ["0", "65537", "many"] {
        let (code, _, err) = finish(freestone(dir).args(["serve", "--max-connections", most]));
        assert!(code == 2 && err.contains("--max-connections"), "{err}");
    }
    let (code, _, err) = finish(freestone(dir).arg("lsit"));
    assert_eq!(code, 2);
    assert!(err.contains("'list'"), "{err}");
    let (code, out, _) = finish(freestone(dir).arg("--help"));
    assert!(code == 0 && out.contains("Examples:"));
    let (code, out, _) = finish(freestone(dir).args(["serve", "--help"]));
    let at = |option: &str| out.find(option).unwrap_or_else(|| panic!("{option}: {out}"));
    assert!(code == 0 && at("--verbose") < at("Addresses:") && at("TLS:") < at("Devices: NAME="), "{out}");
    let (code, out, _) = finish(freestone(dir).args(["list", "--help"]));
    assert!(code == 0 && out.contains("MEM-USED ") && out.contains("mem_used_max"), "{out}");
    let (code, out, _) = finish(freestone(dir).arg("--version"));
    // The version of a release build also contains the commit.
    let parser = freestone_cli::parser();
    let version = parser.get_version().unwrap();
    assert!(version.starts_with(env!("CARGO_PKG_VERSION")));
    assert_eq!((code, out), (0, format!("freestone {version}\n")));
    assert_eq!(sockets_in(dir), 0);
}

/// The help lists the keys of limits, which all device kinds have, and `tls_clients`, `keep` and
/// `on_lost`.
#[test]
fn help_of_makers_lists_common_keys() {
    let dir = tempdir().unwrap();
    let keys = freestone_spec::limits::KEYS.into_iter().chain(["tls_clients", "keep", "on_data_loss"]);
    let keys: Vec<_> = keys.map(|key| format!(" {key}=")).collect();
    for verb in ["serve", "fork", "create"] {
        let (code, out, _) = finish(freestone(dir.path()).args([verb, "--help"]));
        assert_eq!(code, 0);
        let missing: Vec<_> = keys.iter().filter(|key| !out.contains(*key)).collect();
        assert!(missing.is_empty(), "{verb}: {missing:?}: {out}");
    }
}

#[test]
fn help_of_kind_lists_its_keys() {
    let dir = tempdir().unwrap();
    let help = |args: &[&str]| {
        let (code, out, err) = finish(freestone(dir.path()).args(args));
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        out
    };
    let ram = help(&["help", "ram"]);
    assert!(ram.starts_with("NAME=ram,disksize=SIZE") && ram.contains(" keep=yes|no "), "{ram}");
    assert!(help(&["help", "fork"]).contains("\n  mem_min=SIZE "));
    assert!(help(&["help", "snapshot"]).contains("\n  chunk_size=SIZE "));
    assert!(help(&["help", "zoned"]).contains("\n  zone_capacity=SIZE "));
    let all = help(&["serve", "--help-devices"]);
    assert!(all.contains(ram.lines().next().unwrap()) && all.contains("NAME=rbd,"), "{all}");
    assert_eq!(finish(freestone(dir.path()).args(["help", "rma"])).0, 2);
}

#[test]
fn former_option_is_accepted_with_a_warning() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("f.toml"), "max_newcomers = 3\n").unwrap();
    let args = ["serve", "n=null,size=1M", "--config", "f.toml", "--newcomer-grace=1s", "--check"];
    let (code, out, err) = finish(freestone(dir.path()).args(args));
    assert_eq!((code, out.as_str()), (0, "1 device: the configuration is valid\n"));
    assert!(err.contains("--newcomer-grace=1s: is deprecated, use --handshake-grace=1s"), "{err}");
    assert!(err.contains("max_newcomers: is deprecated, use max_pending_handshakes"), "{err}");
}

#[test]
fn client_without_server_explains_how_to_start_one() {
    let dir = tempdir().unwrap();
    let path = dir.path().join("c").display().to_string();
    let start = format!("no server at {path}; start one with `freestone serve --control {path}`");
    assert_eq!(refused(dir.path(), 1, &["list", "--control", &path]), start);
    drop(UnixListener::bind(&path).unwrap());
    assert_eq!(refused(dir.path(), 1, &["list", "--control", &path]), start);
    let file = dir.path().join("file").display().to_string();
    fs::write(&file, "").unwrap();
    for none in [&file, "/etc"] {
        assert_eq!(
            refused(dir.path(), 1, &["list", "--control", none]),
            format!("{none}: is not a socket; --control takes the path of a server's control socket")
        );
    }
    let long = dir.path().join("x".repeat(120)).display().to_string();
    let too_long = format!("{long}: too long for a socket; at most 107 bytes");
    assert_eq!(refused(dir.path(), 1, &["list", "--control", &long]), too_long);
    assert_eq!(refused(dir.path(), 1, &["serve", "--control", &long]), too_long);
    let default = refused(dir.path(), 1, &["list"]);
    assert!(default.ends_with("freestone/control.sock; start one with `freestone serve`"), "{default}");
}

#[test]
fn closed_stdout_is_not_an_error() {
    let serve = Serve::start(&["n=null,size=1M"]);
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut list = freestone(serve.dir.path());
    list.args(["list", "--control", "control"]).stdout(writer.try_clone().unwrap()).stderr(Stdio::piped());
    let output = list.spawn().unwrap().wait_with_output().unwrap();
    assert_eq!((output.status.code(), output.stderr.as_slice()), (Some(0), &b""[..]));

    let mut other = freestone(serve.dir.path());
    other.args(["serve", "n=null,size=1M", "--nbd", "unix:n2", "--control", "c2"]).stdout(writer);
    let mut child = other.spawn().unwrap();
    let until = Instant::now() + Duration::from_secs(10);
    while UnixStream::connect(serve.path("c2")).is_err() {
        assert!(Instant::now() < until && child.try_wait().unwrap().is_none(), "the server did not start");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (code, out, _) = finish(freestone(serve.dir.path()).args(["list", "--control", "c2"]));
    assert_eq!((code, out.lines().count()), (0, 2));
    signal(&child, Signal::TERM);
    assert_eq!(child.wait().unwrap().code(), Some(0));
}

#[test]
fn full_stdout_is_an_error() {
    let serve = Serve::start(&["n=null,size=1M"]);
    for args in [&["list"][..], &["list", "--json"]] {
        let full = fs::File::options().write(true).open("/dev/full").unwrap();
        let mut list = freestone(serve.dir.path());
        list.args(args).args(["--control", "control"]).stdout(full).stderr(Stdio::piped());
        let output = list.spawn().unwrap().wait_with_output().unwrap();
        let err = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1));
        let why = "cannot write to stdout: No space left on device (os error 28)";
        if args.contains(&"--json") {
            let error: serde_json::Value = serde_json::from_str(&err).unwrap();
            let error = &error["error"];
            assert_eq!((&error["message"], &error["data"]["errno"]), (&why.into(), &"ENOSPC".into()));
        } else {
            assert_eq!(sentence(&err), why);
        }
    }
}

#[test]
fn server_that_closes_the_connection_is_an_error() {
    let dir = tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("c")).unwrap();
    // The request line is larger than the socket's buffer, so the client is still writing when the
    // server closes.
    let value = format!("={}", "x".repeat(100_000));
    let attrs: Vec<String> = (0..8).map(|n| format!("a{n}{value}")).collect();
    let mut set = freestone(dir.path());
    set.args(["set", "r", "--control", "c"]).args(attrs).stderr(Stdio::piped());
    let child = set.spawn().unwrap();
    drop(listener.accept().unwrap());
    let output = child.wait_with_output().unwrap();
    let err = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), sentence(&err).as_str()),
        (Some(1), "c: cannot ask the server: Broken pipe (os error 32)")
    );
}

#[test]
fn likely_mistakes_are_warned_of() {
    let dir = tempdir().unwrap();
    let warnings = |args: &[&str]| {
        let mut serve = freestone(dir.path());
        serve.args(["serve", "--control", "c", "--run", "true"]).args(args);
        let (code, _, err) = finish(&mut serve);
        assert_eq!(code, 0, "{err}");
        err
    };
    let plain = ["a=ram,disksize=1G", "b=ram,disksize=1G", "n=null,size=1T", "--nbd", "tcp:127.0.0.1:0"];
    assert_eq!(warnings(&plain), "");
    let sum = warnings(&["a=ram,disksize=1G", "b=ram,disksize=1G", "c=ram,disksize=1G", "d=ram,disksize=1G"]);
    assert!(
        sum.lines().count() == 1
            && sum.contains(" WARN ")
            && sum.contains(": c: the RAM disks, forks and copies may take "),
        "{sum}"
    );
    // Forks of one base share one memory limit; RAM disks and snapshots in memory each have their
    // own.
    std::fs::write(dir.path().join("img"), [0; 4096]).unwrap();
    let forks = ["img=file,path=img,readonly=yes", "f=fork,base=img", "g=fork,base=img", "h=fork,base=img"];
    assert_eq!(warnings(&forks), "");
    let copies = ["img=file,path=img", "a=ram,disksize=1G", "b=ram,disksize=1G", "s=snapshot,origin=img"];
    let sum = warnings(&copies);
    assert!(
        sum.lines().count() == 1 && sum.contains(": s: the RAM disks, forks and copies may take "),
        "{sum}"
    );
    let table = warnings(&["a=ram,disksize=256T,mem_limit=1M"]);
    assert!(table.lines().count() == 1 && table.contains(": a: disksize=256T: once it is fully"), "{table}");
    let open = warnings(&["n=null,size=1M", "--nbd", "tcp:0.0.0.0:0", "--allow-plaintext"]);
    assert!(
        open.lines().count() == 1 && open.contains(": tcp:0.0.0.0:") && open.contains(": not encrypted"),
        "{open}"
    );
}

#[test]
fn every_verb_help_has_examples() {
    let dir = tempdir().unwrap();
    for verb in [
        "serve",
        "wait",
        "stat",
        "get",
        "set",
        "create",
        "fork",
        "snapshot",
        "merge",
        "delta",
        "save",
        "restore",
        "rewind",
        "remove",
        "reset",
        "compact",
        "idle",
        "writeback",
        "recompress",
        "publish",
        "unpublish",
        "mount",
        "umount",
        "zones",
        "power-cut",
        "mark",
        "release",
    ] {
        let (code, out, _) = finish(freestone(dir.path()).args([verb, "--help"]));
        assert!(code == 0 && out.contains("Example") && out.contains(&format!("freestone {verb}")), "{out}");
    }
}
