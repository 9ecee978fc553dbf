//! Behaviour that scripts rely on: errors as JSON, name patterns, `wait`, and paths that are not UTF-8.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::net::UnixListener;

use freestone_testkit::effort;

use crate::harness::prelude::*;

impl Serve {
    /// Runs a verb with `--json` that must exit with `status`. Returns stdout, and the JSON error objects of stderr.
    fn failed(&self, status: i32, args: &[&str]) -> (String, Vec<Value>) {
        let mut command = freestone(self.dir.path());
        command.args(args).args(["--json", "--control"]).arg(self.path("control"));
        let (code, out, err) = finish(&mut command);
        assert_eq!(code, status, "{args:?}: {err}");
        (out, err.lines().map(|line| serde_json::from_str(line).unwrap()).collect())
    }

    fn names(&self) -> String {
        let list = self.json(&["list"]);
        let names = list["devices"].as_array().unwrap().iter().map(|row| row["name"].as_str().unwrap());
        names.collect::<Vec<_>>().join(" ")
    }
}

#[test]
fn json_errors_have_control_socket_codes() {
    let serve = Serve::start(&["r=ram,disksize=1M"]);
    for (status, args, code, errno, sentence) in [
        (1, &["stat", "x"][..], -32000, "ENODEV", "x: no such device"),
        (1, &["rewind", "r"], -32000, "EOPNOTSUPP", "r: a ram device has no base"),
        (2, &["set", "r", "mem_limit=1"], -32602, "EINVAL", "r: mem_limit=1: give a unit"),
        (2, &["create", "r"], -32602, "EINVAL", "\"r\": a device is NAME=KIND"),
        // Errors that the command line parser clap reports.
        (2, &["remove", "r", "--what"], -32602, "EINVAL", "unexpected argument '--what' found"),
        (
            2,
            &["remove"],
            -32602,
            "EINVAL",
            "the following required arguments were not provided: <NAME|PATTERN>...",
        ),
    ] {
        let (out, errors) = serve.failed(status, args);
        let [error] = errors.as_slice() else { panic!("{args:?}: {errors:?}") };
        let error = &error["error"];
        assert_eq!(
            (out.as_str(), &error["code"], &error["data"]["errno"]),
            ("", &json!(code), &json!(errno))
        );
        assert!(error["message"].as_str().unwrap().starts_with(sentence), "{args:?}: {error}");
    }
    // `--json` prints the error object of the control socket unchanged, under the key `error`.
    let reply = ask(&serve.control(), br#"{"jsonrpc":"2.0","id":1,"method":"stat","params":{"name":"x"}}"#);
    assert_eq!(serve.failed(1, &["stat", "x"]).1, [json!({ "error": reply["error"] })]);
    let dir = tempdir().unwrap();
    let (code, out, err) = finish(freestone(dir.path()).args(["list", "--json"]));
    let error: Value = serde_json::from_str(&err).unwrap();
    assert_eq!((code, out.as_str(), &error["error"]["data"]["errno"]), (1, "", &json!("ECONNREFUSED")));
    // After `--` the word `--json` is a device name, not an option, so the error is plain text.
    let (_, _, err) = finish(freestone(dir.path()).args(["list", "--", "--json"]));
    assert!(err.starts_with("freestone: no server at "), "{err}");
}

#[test]
fn verbs_take_several_names_and_patterns() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), vec![7; 1 << 20]).unwrap();
    let devices = [
        "golden=file,path=golden.img,readonly=yes",
        "a1=fork,base=golden",
        "a2=snapshot,origin=a1",
        "a3=fork,base=a2",
        "b=ram,disksize=1M",
        "ci=template,base=golden",
    ];
    let serve = Serve::start_in(dir, &devices, true);

    let stat = serve.json(&["stat", "a*", "b"]);
    let shown: Vec<_> =
        stat["devices"].as_array().unwrap().iter().map(|d| d["name"].as_str().unwrap()).collect();
    assert_eq!((shown.join(" ").as_str(), stat.get("server")), ("a1 a2 a3 b", None));
    assert!(serve.text(&["stat", "b", "a1"]).starts_with("b: ram 1M lz4\n"));
    let (out, errors) = serve.failed(1, &["stat", "b", "x", "y*"]);
    let out: Value = serde_json::from_str(&out).unwrap();
    assert_eq!((&out["devices"][0]["name"], &out["missing"]), (&json!("b"), &json!(["x", "y*"])));
    assert_eq!(errors[1]["error"]["message"], "y*: no device matches");
    let many = json!({"jsonrpc": "2.0", "id": 1, "method": "stat", "params": {"names": vec!["*"; 65]}});
    let refused = ask(&serve.control(), many.to_string().as_bytes());
    assert_eq!(refused["error"]["message"], "stat: names: at most 64 patterns");

    // An error for one device does not stop the verb for the other devices.
    let (out, errors) = serve.failed(1, &["rewind", "b", "a?", "nobody*"]);
    assert_eq!(
        serde_json::from_str::<Value>(&out).unwrap(),
        json!({"devices": [{"name": "a1"}, {"name": "a3"}]})
    );
    let errnos: Vec<_> = errors.iter().map(|e| e["error"]["data"]["errno"].as_str().unwrap()).collect();
    // The errors are for the pattern `nobody*` without a match, a RAM disk, and a snapshot.
    assert_eq!(errnos, ["ENODEV", "EOPNOTSUPP", "EOPNOTSUPP"], "{errors:?}");
    assert_eq!(serve.json(&["reset", "b", "a3"])["devices"].as_array().unwrap().len(), 2);
    // A name without wildcards gives a single result instead of a list.
    assert_eq!(serve.json(&["rewind", "a3"]), json!({"name": "a3"}));

    // Patterns do not match the fork `ci@1`, which belongs to a connection and is removed when the connection ends.
    let mut client = std::os::unix::net::UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut client, "ci");
    assert!(serve.names().ends_with(" ci ci@1"), "{}", serve.names());
    // `remove` removes forks before their bases, in any order of the arguments.
    assert_eq!(serve.text(&["remove", "golden", "*", "--force"]), "");
    assert_eq!(serve.names(), "");
    assert_eq!(serve.refused(1, &["remove", "*"]), "*: no device matches");
}

#[test]
fn wait_returns_when_the_server_is_ready() {
    let dir = tempdir().unwrap();
    let control = dir.path().join("ctl");
    let wait = |time: &str, verb: &str| {
        let mut command = freestone(dir.path());
        command.args([verb]).env("FREESTONE_CONTROL", &control);
        if verb == "wait" {
            command.args(["--timeout", time]);
        }
        command
    };
    let begin = Instant::now();
    let (code, _, err) = finish(wait("200ms", "wait").arg("--json"));
    let error: Value = serde_json::from_str(&err).unwrap();
    assert_eq!((code, &error["error"]["data"]["errno"]), (1, &json!("ETIMEDOUT")), "{err}");
    assert!(begin.elapsed() >= Duration::from_millis(200));
    // `wait` fails at once if the path exists and is not a socket.
    fs::write(&control, "").unwrap();
    let (code, _, err) = finish(&mut wait("1h", "wait"));
    assert!(code == 1 && err.contains("is not a socket"), "{err}");
    fs::remove_file(&control).unwrap();
    assert_eq!(finish(wait("1", "wait").arg("--json")).0, 2);

    // A stale socket, as a crashed server leaves it.
    drop(UnixListener::bind(&control).unwrap());
    let waiting = wait("60s", "wait").stdout(Stdio::piped()).spawn().unwrap();
    // The server reads its configuration from this named pipe, so it becomes ready only when the test writes to the
    // pipe.
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    let config = format!(
        "nbd = 'unix:{}'\n[[device]]\nname='r'\nkind='ram'\ndisksize='1M'\n",
        dir.path().join("n").display()
    );
    let mut serve = freestone(dir.path())
        .args(["serve", "--config", "fifo"])
        .env("FREESTONE_CONTROL", &control)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    fs::write(&fifo, config).unwrap();
    assert!(waiting.wait_with_output().unwrap().status.success());
    // `wait` returns only after the devices are published.
    let list: Value = serde_json::from_str(&finish(wait("", "list").arg("--json")).1).unwrap();
    assert!(list["devices"][0]["exports"][0]["uri"].as_str().unwrap().starts_with("nbd+unix:///r?socket="));
    // `--control` overrides the environment variable FREESTONE_CONTROL.
    let other = dir.path().join("other");
    let (code, _, err) = finish(wait("", "list").arg("--control").arg(&other));
    assert!(code == 1 && err.contains("other"), "{err}");
    signal(&serve, Signal::TERM);
    assert!(serve.wait().unwrap().success());
}

#[test]
fn nbd_address_exists_before_control_socket() {
    let dir = tempdir().unwrap();
    let control = dir.path().join("control");
    // A client that connects as soon as the control socket accepts connections finds every device.
    for _ in 0..10 {
        let mut serve = freestone(dir.path())
            .args([
                "serve",
                "a=ram,disksize=1M",
                "b=null,size=1M",
                "--nbd",
                "unix:nbd",
                "--control",
                "control",
            ])
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        // At first the stale socket of the server in the previous round may still exist.
        while std::os::unix::net::UnixStream::connect(&control).is_err() {
            std::thread::yield_now();
        }
        let mut client = std::os::unix::net::UnixStream::connect(dir.path().join("nbd")).unwrap();
        assert_eq!(connect_nbd(&mut client, "b"), 1 << 20);
        // A server killed by SIGKILL does not remove its sockets.
        serve.kill().unwrap();
        serve.wait().unwrap();
    }
}

#[test]
fn run_sets_control_socket_of_its_command() {
    let dir = tempdir().unwrap();
    let command = format!("{} list", program());
    let mut serve = freestone(dir.path());
    serve.args(["serve", "n=null,size=1M", "--run", &command]).env("FREESTONE_CONTROL", "/nowhere/control");
    let (code, out, err) = finish(&mut serve);
    assert!(code == 0 && out.contains("\nn    null"), "{out}{err}");
}

#[test]
fn config_without_devices_serves_none() {
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("none.toml"), "nbd = 'unix:nbd'\ncontrol = 'control'\n").unwrap();
    let serve = Serve::start_in(dir, &["--config", "none.toml"], false);
    assert_eq!(serve.startup_output.lines().count(), 1, "{}", serve.startup_output);
    assert_eq!(serve.names(), "");
    serve.text(&["create", "r=ram,disksize=1M,publish=yes"]);
    assert_eq!(serve.names(), "r");
}

/// Runs a shell command on a pseudoterminal and returns the output.
fn at_terminal(dir: &std::path::Path, command: &str, no_color: Option<&str>) -> String {
    let mut script = Command::new("script");
    script.args(["-qec", command, "/dev/null"]).current_dir(dir).stdin(Stdio::null()).stdout(Stdio::piped());
    script.env("XDG_RUNTIME_DIR", dir).env_remove("NO_COLOR").env_remove("RUST_LOG").env("TERM", "xterm");
    if let Some(value) = no_color {
        script.env("NO_COLOR", value);
    }
    let mut output = String::new();
    let mut child = script.spawn().unwrap();
    child.stdout.take().unwrap().read_to_string(&mut output).unwrap();
    child.wait().unwrap();
    output
}

#[test]
fn log_has_no_colors_with_no_color_set() {
    let dir = tempdir().unwrap();
    let command = format!("{} -v serve n=null,size=1M --run true", program());
    for (no_color, colored) in [(None, true), (Some(""), true), (Some("1"), false)] {
        let message = at_terminal(dir.path(), &command, no_color);
        assert!(message.contains("listening"), "{message}");
        assert_eq!(message.contains('\u{1b}'), colored, "{no_color:?}: {message:?}");
    }
}

#[test]
fn paths_may_have_any_bytes() {
    let dir = tempdir().unwrap();
    let odd = dir.path().join(OsStr::from_bytes(b"odd\xff\xfe"));
    fs::create_dir(&odd).unwrap();
    // The path of the image is relative, so only the working directory of the client contains bytes that are not UTF-8.
    let mut words = OsString::from("d=file,size=1M,path=disk");
    words.push(OsString::from_vec(vec![0xe9]));
    let mut serve = freestone(&odd);
    serve.args(["serve", "r=ram,disksize=1M", "--control"]).arg(dir.path().join("control")).arg(&words);
    let mut serve = serve.args(["--nbd", "unix:n"]).stdout(Stdio::null()).spawn().unwrap();
    let run = |args: &[&OsStr]| {
        let mut command = freestone(&odd);
        let (code, out, err) =
            finish(command.args(args).arg("--json").arg("--control").arg(dir.path().join("control")));
        assert_eq!((code, err.as_str()), (0, ""), "{args:?}");
        out
    };
    let os = OsStr::new;
    run(&[os("wait")]);
    assert_eq!(fs::metadata(odd.join(OsStr::from_bytes(b"disk\xe9"))).unwrap().len(), 1 << 20);
    let path: Value = serde_json::from_str(&run(&[os("get"), os("d"), os("path")])).unwrap();
    assert!(path["path"].as_str().unwrap().ends_with("odd\u{efff}\u{effe}/disk\u{efe9}"), "{path}");
    fs::write(odd.join(OsStr::from_bytes(b"dict\xff")), "words of pages").unwrap();
    let mut packed =
        OsString::from("z=ram,disksize=1M,comp_algorithm=zstd,algorithm_params=level=5 dict=dict");
    packed.push(OsStr::from_bytes(b"\xff"));
    run(&[os("create"), &packed]);
    let get: Value = serde_json::from_str(&run(&[os("get"), os("z"), os("algorithm_params")])).unwrap();
    let words = get["algorithm_params"].as_str().unwrap();
    assert!(
        words.starts_with("level=5 dict=/") && words.ends_with("odd\u{efff}\u{effe}/dict\u{efff}"),
        "{get}"
    );
    let packed = format!("y=ram,disksize=1M,comp_algorithm=zstd,algorithm_params={words}");
    run(&[os("save"), os("r"), OsStr::from_bytes(b"saved\xff")]);
    assert!(odd.join(OsStr::from_bytes(b"saved\xff")).exists());
    run(&[os("restore"), OsStr::from_bytes(b"saved\xff"), os("again")]);
    run(&[os("publish"), os("again"), os("--nbd"), OsStr::from_bytes(b"unix:more\xff")]);
    assert!(odd.join(OsStr::from_bytes(b"more\xff")).exists());
    // The path in the reply, in which bytes that are not UTF-8 are escaped, is valid in a JSON request.
    let word = format!("other=file,path={},readonly=yes", path["path"].as_str().unwrap());
    run(&[os("remove"), os("d")]);
    let control = std::os::unix::net::UnixStream::connect(dir.path().join("control")).unwrap();
    for word in [word, packed] {
        let create = json!({"jsonrpc": "2.0", "id": 1, "method": "create", "params": {"device": word}});
        let made = ask(&control, create.to_string().as_bytes());
        assert_eq!(made["result"]["disksize"], 1 << 20, "{made}");
    }
    signal(&serve, Signal::TERM);
    assert!(serve.wait().unwrap().success());
}

/// In a release build on an idle machine, `list` takes 0.2 s for 2,000 forks and 1 s for 20,000.
#[test]
fn list_of_many_forks_is_fast() {
    let forks = effort(2_000, 20_000);
    let dir = tempdir().unwrap();
    fs::write(dir.path().join("golden.img"), vec![7; 1 << 20]).unwrap();
    let serve = Serve::start_in(dir, &["golden=file,path=golden.img,readonly=yes,publish=no"], true);
    serve.text(&["fork", "golden", "job", "--count", &forks.to_string()]);
    let begin = Instant::now();
    assert_eq!(serve.text(&["list"]).lines().count(), forks + 2);
    assert!(begin.elapsed() < Duration::from_secs(20), "{:?}", begin.elapsed());
    let begin = Instant::now();
    let stat = serve.json(&["stat"]);
    assert!(begin.elapsed() < Duration::from_secs(40), "{:?}", begin.elapsed());
    assert_eq!(stat["devices"][forks]["name"], format!("job-{}", forks - 1));
    assert_eq!(serve.text(&["remove", "job-*"]), "");
    assert_eq!(serve.names(), "golden");
}
