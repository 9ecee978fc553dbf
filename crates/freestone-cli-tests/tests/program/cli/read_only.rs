//! The read-only control socket (`--control-read-only`).

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use crate::harness::prelude::*;

/// All verbs that change something, each with parameters that are valid at the read-write control
/// socket.
const CHANGES: [(&str, &str); 30] = [
    ("set", r#"{"name":"r","attrs":{"mem_limit":"1M"}}"#),
    ("create", r#"{"device":"x=null,size=1M"}"#),
    ("fork", r#"{"base":"r","name":"x"}"#),
    ("snapshot", r#"{"snapshots":[{"origin":"r","name":"x"}]}"#),
    ("rewind", r#"{"name":"r"}"#),
    ("merge", r#"{"name":"r","into_origin":true}"#),
    ("delta.show", r#"{"name":"r"}"#),
    ("delta.save", r#"{"name":"r","file":"/nowhere/x"}"#),
    ("delta.apply", r#"{"name":"r","file":"/nowhere/x"}"#),
    ("save", r#"{"names":["r"],"file":"/nowhere/x"}"#),
    ("restore", r#"{"file":"/nowhere/x"}"#),
    ("remove", r#"{"name":"r","force":true}"#),
    ("reset", r#"{"name":"r","force":true}"#),
    ("compact", r#"{"name":"r"}"#),
    ("idle", r#"{"name":"r","which":"all"}"#),
    ("writeback", r#"{"name":"r","type":"idle"}"#),
    ("recompress", r#"{"name":"r"}"#),
    ("publish", r#"{"name":"r","nbd":"tcp:127.0.0.1:0"}"#),
    ("push", r#"{"name":"r","url":"file:///nowhere"}"#),
    ("pull", r#"{"name":"r","url":"file:///nowhere:x"}"#),
    ("trace", r#"{"name":"r"}"#),
    ("unpublish", r#"{"name":"r","force":true}"#),
    ("zones", r#"{"name":"r","action":"reset"}"#),
    ("power-cut", r#"{"name":"r"}"#),
    ("mark", r#"{"name":"r","text":"x"}"#),
    ("release", r#"{"name":"r"}"#),
    ("cancel", r#"{"name":"r"}"#),
    ("apply", r#"{"file":"/nowhere/x"}"#),
    ("shutdown", "{}"),
    ("upgrade", "{}"),
];

fn request(method: &str, params: &str) -> Vec<u8> {
    format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"{method}\",\"params\":{params}}}").into_bytes()
}

#[test]
fn read_only_socket_refuses_changing_verbs() {
    let serve = Serve::start(&["r=ram,disksize=16M", "--control-read-only", "looks"]);
    let looks = serve.path("looks");
    assert_eq!(fs::metadata(&looks).unwrap().permissions().mode() & 0o777, 0o600);
    let expected = format!("read-only: freestone list --control '{}'\n", looks.display());
    assert!(serve.startup_output.contains(&expected), "{}", serve.startup_output);
    let stream = UnixStream::connect(&looks).unwrap();
    let before = serve.text(&["dump"]);
    for (method, params) in CHANGES {
        let error = ask(&stream, &request(method, params))["error"].clone();
        assert_eq!(
            (&error["code"], &error["data"]),
            (&json!(-32000), &json!({"errno": "EPERM"})),
            "{method}"
        );
        let why =
            "which is read-only: it answers list, stat, top, get, block-state, jobs, dump, upgrade.outcome";
        assert_eq!(error["message"], format!("{method}: not at {}, {why}", looks.display()));
    }
    let answers = [
        ("list", "{}"),
        ("stat", "{}"),
        ("top", "{}"),
        ("get", r#"{"name":"r"}"#),
        ("block-state", r#"{"name":"r"}"#),
        ("jobs", "{}"),
        ("dump", "{}"),
        ("upgrade.outcome", "{}"),
    ];
    for (method, params) in answers {
        let answer = ask(&stream, &request(method, params));
        assert!(answer["result"].is_object() && answer["error"].is_null(), "{method}: {answer}");
    }
    // `CHANGES` and `answers` together contain all verbs of the server.
    let known = ask(&stream, &request("no-such-verb", "{}"))["error"]["message"].clone();
    let known = known.as_str().unwrap().split_once("the methods are ").unwrap().1.to_owned();
    let mut known: Vec<_> = known.split(", ").collect();
    let mut ours: Vec<_> = CHANGES.iter().chain(&answers).map(|(method, _)| *method).collect();
    known.sort_unstable();
    ours.sort_unstable();
    assert_eq!(known, ours);
    assert_eq!(serve.text(&["dump"]), before);

    // Client subcommands accept the path of the read-only socket in `--control`.
    let by = |args: &[&str]| finish(freestone(serve.dir.path()).args(args).arg("--control").arg(&looks));
    let (code, out, err) = by(&["list"]);
    assert_eq!((code, err.as_str()), (0, ""));
    assert!(out.contains("ram"), "{out}");
    assert_eq!(by(&["wait"]).0, 0);
    let (code, out, err) = by(&["remove", "r"]);
    assert_eq!((code, out.as_str()), (1, ""));
    assert!(err.contains("remove: not at") && err.contains("which is read-only"), "{err}");
    let dir = serve.end();
    assert!(!dir.path().join("looks").exists());
}

#[test]
fn read_only_socket_has_its_own_mode_and_owner() {
    let is_root = rustix::process::geteuid().is_root();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let file = "nbd = 'unix:nbd'\ncontrol = 'control'\ncontrol_read_only = 'looks'\n\
                control_read_only_mode = '0666'\n[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n";
    fs::write(dir.path().join("f.toml"), file).unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml"], false);
    let mode = |name: &str| fs::metadata(serve.path(name)).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode("looks"), mode("control")), (0o666, 0o600));
    if is_root {
        let looks = serve.path("looks");
        let look =
            |verb: &[&str]| finish(unprivileged(serve.dir.path()).args(verb).arg("--control").arg(&looks));
        let (code, out, err) = look(&["list"]);
        assert_eq!((code, err.as_str()), (0, ""));
        assert!(out.contains("null"), "{out}");
        assert_eq!(look(&["remove", "n"]).0, 1);
    }
    let dumped = serve.text(&["dump"]);
    assert!(dumped.contains("control_read_only_mode = \"0666\"\n"), "{dumped}");
    let looks = format!("control_read_only = \"{}\"\n", serve.path("looks").display());
    assert!(dumped.contains(&looks), "{dumped}");
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    fs::write(serve.path("f.toml"), file.replace("'looks'", "'other'")).unwrap();
    let message = serve.refused(1, &["apply", "f.toml"]);
    assert!(message.contains("control_read_only: the server uses /"), "{message}");
    drop(serve);
    if is_root {
        let args = ["n=null,size=1M", "--control-read-only", "looks", "--control-read-only-user", "65534"];
        let serve = Serve::start(&args);
        assert_eq!(fs::metadata(serve.path("looks")).unwrap().uid(), 65534);
    }
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let same = ["serve", "--check", "--control", "c", "--control-read-only", "c"];
    let message = refused(at, 2, &same);
    assert!(message.ends_with("is already the path of the control socket"), "{message}");
    let message = refused(at, 2, &["serve", "--check", "--control-read-only-mode", "0660"]);
    assert_eq!(message, "--control-read-only-mode: needs --control-read-only");
    let message = refused(at, 2, &["serve", "--check", "--control-read-only-group", "no-such-group"]);
    assert_eq!(message, "--control-read-only-group=no-such-group: there is no such group");
}
