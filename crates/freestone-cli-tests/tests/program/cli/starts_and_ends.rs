//! Starts and ends of a server: its sockets, signals, limits, and `--run`.

use std::os::unix::fs::PermissionsExt as _;

use super::sockets_in;
use crate::harness::prelude::*;

#[test]
fn open_files_limit_is_raised_for_the_server_only() {
    let dir = tempdir().unwrap();
    let run = |limit: &str| {
        let command = format!(
            "{limit}; exec {} serve n=null,size=1M --run 'ulimit -S -n; grep open.files /proc/$PPID/limits'",
            program()
        );
        let mut shell = std::process::Command::new("sh");
        let (code, out, err) =
            finish(shell.arg("-c").arg(command).current_dir(dir.path()).env("XDG_RUNTIME_DIR", dir.path()));
        assert_eq!((code, err.as_str()), (0, ""), "{out}");
        out.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
    };
    let message = run("ulimit -S -n 300; ulimit -H -n 700");
    // The first word is the soft limit of the `--run` command. Words 4 and 5 are the soft and hard
    // limits of the server.
    assert_eq!([&message[0], &message[4], &message[5]], ["300", "700", "700"], "{message:?}");
}

#[test]
fn signal_ends_server_and_removes_sockets() {
    for signal in [Signal::TERM, Signal::INT] {
        let serve = Serve::start(&["r=ram,disksize=64M", "--nbd", "tcp:127.0.0.1:0"]);
        serve.text(&["publish", "r", "--nbd", "unix:own"]);
        let mut client = UnixStream::connect(serve.path("nbd")).unwrap();
        connect_nbd(&mut client, "r");
        let _idle = serve.control();
        assert_eq!(sockets_in(serve.dir.path()), 3);
        let begun = Instant::now();
        serve.signal(signal);
        let (code, dir) = serve.wait();
        assert_eq!(code, Some(0));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
        assert!(begun.elapsed() < Duration::from_secs(4), "idle clients are not waited for");
    }
}

#[test]
fn second_signal_ends_server_at_once() {
    let serve = Serve::start(&["r=ram,disksize=64M"]);
    let mut client = UnixStream::connect(serve.path("nbd")).unwrap();
    connect_nbd(&mut client, "r");
    // The client does not read the replies, so a shutdown would wait some seconds for the client.
    for cookie in 0..16_u8 {
        let mut read = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, cookie];
        read.extend([0; 8]);
        read.extend((1_u32 << 20).to_be_bytes());
        client.write_all(&read).unwrap();
    }
    client.read_exact(&mut [0; 16]).unwrap();
    serve.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(300));
    serve.signal(Signal::TERM);
    let (code, dir) = serve.wait();
    // The second signal ends the shutdown at once, with exit status 128 plus the signal number.
    assert_eq!((code, sockets_in(dir.path())), (Some(128 + 15), 0));
}

#[test]
fn sockets_of_a_killed_server_are_replaced() {
    let serve = Serve::start(&["n=null,size=1M"]);
    serve.signal(Signal::KILL);
    let (code, dir) = serve.wait();
    assert_eq!((code, sockets_in(dir.path())), (None, 2));
    let serve = Serve::start_in(dir, &["n=null,size=1M"], true);
    assert_eq!(serve.text(&["list"]).lines().count(), 2);
}

#[test]
fn default_paths_need_no_options() {
    let serve = Serve::start_in::<&str>(tempdir().unwrap(), &[], false);
    let private = serve.path("freestone");
    assert_eq!(fs::metadata(&private).unwrap().permissions().mode() & 0o777, 0o700);
    assert_eq!(fs::metadata(private.join("control.sock")).unwrap().permissions().mode() & 0o777, 0o600);
    let (code, out, _) = finish(freestone(serve.dir.path()).args(["get", "ram0", "disksize"]));
    assert_eq!((code, out.as_str()), (0, "1073741824\n"));
    assert_eq!(connect_nbd(&mut UnixStream::connect(private.join("nbd.sock")).unwrap(), ""), 1 << 30);
}

#[test]
fn run_returns_the_status_of_its_command() {
    let dir = tempdir().unwrap();
    let run = |command: &str, args: &[&str]| {
        let mut serve = freestone(dir.path());
        serve.env("TMPDIR", dir.path()).env("freestone", program());
        finish(serve.args(["serve", "r=ram,disksize=64M", "--run", command]).args(args))
    };
    assert_eq!(run("exit 7", &[]), (7, String::new(), String::new()));
    assert_eq!(run("kill -9 $$", &[]).0, 128 + 9);
    let (code, out, _) = run(
        r#"echo "$uri|$nbd|$unixsocket|$control"; "$freestone" get r disksize --control "$control""#,
        &[],
    );
    assert_eq!(code, 0);
    let lines: Vec<&str> = out.lines().collect();
    let words: Vec<&str> = lines[0].split('|').collect();
    assert_eq!(words[0], format!("nbd+unix:///r?socket={}", words[2]));
    assert_eq!((words[1], lines[1]), (words[0], "67108864"));
    // `--run` created the sockets in a temporary directory, and removed the directory at the end.
    assert!(!Path::new(words[2]).exists() && !Path::new(words[3]).exists());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);

    let (_, out, _) = run(r#"echo "$uri|$unixsocket|""#, &["--nbd", "tcp:127.0.0.1:0", "--control", "c"]);
    assert!(out.starts_with("nbd://127.0.0.1:") && out.ends_with("/r||\n"), "{out}");
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn run_forwards_signals_to_its_command() {
    let dir = tempdir().unwrap();
    for (command, signals, status) in [
        ("trap 'exit 5' TERM; echo ready; while :; do sleep 0.05; done", 1, 5),
        ("trap '' TERM; echo ready; while :; do sleep 0.05; done", 2, 128 + 9),
    ] {
        let mut serve = freestone(dir.path());
        serve.env("TMPDIR", dir.path()).args(["serve", "--run", command]).stdout(Stdio::piped());
        let mut child = serve.spawn().unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 6]).unwrap();
        for _ in 0..signals {
            signal(&child, Signal::TERM);
            // The kernel would merge two pending signals of the same number, so the second one is
            // sent later.
            std::thread::sleep(Duration::from_millis(100));
        }
        assert_eq!(child.wait().unwrap().code(), Some(status));
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
