//! `serve --single`: serves one client over inherited file descriptors.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::process::Child;

use crate::harness::prelude::*;

const PATIENCE: Duration = Duration::from_secs(30);

/// Starts `serve --single` with a socket as stdin. Returns the server process and the client's end
/// of the socket.
fn start_with_socket(dir: &Path, args: &[&str]) -> (Child, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    ours.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut command = freestone(dir);
    command.args(["serve", "--single"]).args(args).stdin(OwnedFd::from(theirs));
    (command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap(), ours)
}

/// Waits until the server exits. Returns its exit status, stdout and stderr.
fn output_of(mut child: Child) -> (Option<i32>, String, String) {
    wait_for_end(&mut child, PATIENCE);
    let output = child.wait_with_output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    (output.status.code(), text(output.stdout), text(output.stderr))
}

/// Cookie of each request, and the reply to it.
const COOKIE: u64 = 7;
const DONE: [u8; 16] = [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 7];

fn write_and_leave<S: Read + Write>(client: &mut S) {
    client.write_all(&nbd_request(0, 1, COOKIE, 4096, 4096, &[9; 4096])).unwrap();
    let mut reply = [0; 16];
    client.read_exact(&mut reply).unwrap();
    assert_eq!(reply, DONE);
    client.write_all(&nbd_request(0, 2, COOKIE, 0, 0, &[])).unwrap();
}

fn check_image(path: &Path) {
    let image = fs::read(path).unwrap();
    assert!(image[..4096].iter().all(|byte| *byte == 0) && image[4096..8192].iter().all(|byte| *byte == 9));
}

#[test]
fn single_serves_one_client_and_ends_with_it() {
    let dir = tempfile::tempdir().unwrap();
    let (child, mut client) = start_with_socket(dir.path(), &["f=file,path=image,size=1M"]);
    assert_eq!(connect_nbd(&mut client, ""), 1 << 20);
    write_and_leave(&mut client);
    assert_eq!(output_of(child), (Some(0), String::new(), String::new()));
    assert_eq!(client.read(&mut [0]).unwrap(), 0);
    check_image(&dir.path().join("image"));
    // The server created no socket and no directory, so the directory contains only the image.
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

    // A client that closes the connection without an NBD disconnect request ends the server as
    // well.
    let (child, client) = start_with_socket(dir.path(), &["n=null,size=1M"]);
    client.shutdown(Shutdown::Both).unwrap();
    assert_eq!(output_of(child).0, Some(0));
}

#[test]
fn single_ends_cleanly_on_signal() {
    let dir = tempfile::tempdir().unwrap();
    let (child, mut client) =
        start_with_socket(dir.path(), &["f=file,path=image,size=1M", "--pidfile", "pid"]);
    assert_eq!(connect_nbd(&mut client, "f"), 1 << 20);
    client.write_all(&nbd_request(0, 1, COOKIE, 4096, 4096, &[9; 4096])).unwrap();
    client.read_exact(&mut [0; 16]).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("pid")).unwrap(), format!("{}\n", child.id()));
    signal(&child, Signal::TERM);
    assert_eq!(client.read(&mut [0]).unwrap(), 0, "the connection ends");
    assert_eq!(output_of(child), (Some(0), String::new(), String::new()));
    check_image(&dir.path().join("image"));
    assert!(!dir.path().join("pid").exists());
}

#[test]
fn single_has_control_socket_if_asked() {
    let dir = tempfile::tempdir().unwrap();
    let (child, mut client) = start_with_socket(dir.path(), &["r=ram,disksize=1M", "--control", "c"]);
    let (code, _, err) = finish(freestone(dir.path()).args(["wait", "--control", "c", "--timeout", "30s"]));
    assert_eq!(code, 0, "{err}");
    connect_nbd(&mut client, "r");
    let (_, out, _) = finish(freestone(dir.path()).args(["list", "--control", "c"]));
    assert!(out.lines().last().unwrap().ends_with(" 1 stdin"), "{out}");
    // The dump contains the control socket of the command line, and no NBD address.
    let (_, out, _) = finish(freestone(dir.path()).args(["dump", "--control", "c"]));
    assert!(out.starts_with("nbd = []\ncontrol = "), "{out}");
    drop(client);
    assert_eq!(output_of(child).0, Some(0));
    assert!(!dir.path().join("c").exists());
}

/// Log lines must not reach the client if stderr is the client's socket, as under inetd.
#[test]
fn single_logs_do_not_reach_the_client() {
    let dir = tempfile::tempdir().unwrap();
    for args in [&["-vvv", "serve", "--single", "f=null,size=1M"][..], &["serve", "--single", "f=wrong"]] {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(PATIENCE)).unwrap();
        let theirs = OwnedFd::from(theirs);
        let mut command = freestone(dir.path());
        command.args(args).stdin(theirs.try_clone().unwrap()).stdout(theirs.try_clone().unwrap());
        let child = command.stderr(theirs).spawn().unwrap();
        // `command` holds a copy of the client's socket, which would keep the connection open.
        drop(command);
        let fails = args.contains(&"f=wrong");
        if !fails {
            connect_nbd(&mut ours, "");
            ours.write_all(&nbd_request(0, 2, COOKIE, 0, 0, &[])).unwrap();
        }
        let mut rest = Vec::new();
        ours.read_to_end(&mut rest).unwrap();
        assert_eq!(String::from_utf8_lossy(&rest), "");
        assert_eq!(output_of(child).0, Some(if fails { 2 } else { 0 }));
    }
}

/// The client's ends of two pipes that are stdin and stdout of the server.
struct Pipes(std::process::ChildStdout, std::process::ChildStdin);

impl Read for Pipes {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }
}

impl Write for Pipes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.1.write(bytes)
    }
    fn flush(&mut self) -> io::Result<()> {
        self.1.flush()
    }
}

/// Starts `serve --single` with a pair of pipes as the client's connection.
fn start_with_pipes(dir: &Path) -> (Child, Pipes) {
    let mut command = freestone(dir);
    command.args(["serve", "--single", "f=file,path=image,size=1M"]);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let pipes = Pipes(child.stdout.take().unwrap(), child.stdin.take().unwrap());
    (child, pipes)
}

#[test]
fn single_accepts_a_pair_of_pipes() {
    let dir = tempfile::tempdir().unwrap();
    let (child, mut pipes) = start_with_pipes(dir.path());
    assert_eq!(connect_nbd(&mut pipes, ""), 1 << 20);
    write_and_leave(&mut pipes);
    assert_eq!(pipes.read(&mut [0]).unwrap(), 0);
    assert_eq!(output_of(child), (Some(0), String::new(), String::new()));
    check_image(&dir.path().join("image"));

    // Closing both pipes ends the server.
    let (child, mut pipes) = start_with_pipes(dir.path());
    connect_nbd(&mut pipes, "");
    drop(pipes);
    assert_eq!(output_of(child).0, Some(0));
}

/// The server waits for a client that reads nothing for two grace periods of 5 s.
#[test]
#[ignore = "slow lane"]
fn signal_ends_server_whose_client_reads_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (child, mut pipes) = start_with_pipes(dir.path());
    connect_nbd(&mut pipes, "");
    pipes.write_all(&nbd_request(0, 0, COOKIE, 0, 1 << 20, &[])).unwrap();
    thread::sleep(Duration::from_millis(100));
    signal(&child, Signal::TERM);
    assert_eq!(output_of(child).0, Some(0));
}

#[test]
fn single_refuses_stdin_that_is_not_a_connection() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |stdin: Stdio, args: &[&str]| {
        let mut command = freestone(dir.path());
        let (code, out, err) = finish(command.args(["serve", "--single"]).args(args).stdin(stdin));
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        err
    };
    let must = "must be a connected socket, or a pipe if standard output is a pipe as well";
    let message = sentence(&refused(Stdio::null(), &[]));
    assert_eq!(message, format!("--single: standard input is a terminal or another device: {must}"));
    fs::write(dir.path().join("x"), "").unwrap();
    let message = sentence(&refused(fs::File::open(dir.path().join("x")).unwrap().into(), &[]));
    assert_eq!(message, format!("--single: standard input is a file: {must}"));
    let listener = UnixListener::bind(dir.path().join("l")).unwrap();
    let message = sentence(&refused(OwnedFd::from(listener).into(), &[]));
    assert_eq!(message, "--single: standard input is a listening socket; serve it without --single");
    let (_, theirs) = std::os::unix::net::UnixDatagram::pair().unwrap();
    let message = sentence(&refused(OwnedFd::from(theirs).into(), &[]));
    assert_eq!(message, "--single: standard input is not a stream connection");
    assert!(refused(Stdio::null(), &["--nbd", "unix:x"]).contains("cannot be used with '--nbd <ADDR>'"));
    assert!(refused(Stdio::null(), &["--run", "true"]).contains("cannot be used with '--run <CMD>'"));
    fs::write(dir.path().join("f.toml"), "nbd = 'unix:x'\n").unwrap();
    let (_ours, theirs) = UnixStream::pair().unwrap();
    let message = sentence(&refused(OwnedFd::from(theirs).into(), &["--config", "f.toml"]));
    assert_eq!(message, "f.toml: nbd: cannot be used with --single");
    let check = finish(freestone(dir.path()).args(["serve", "--single", "--check"]));
    assert_eq!((check.0, check.1.as_str()), (0, "1 device: the configuration is valid\n"));
}

/// Waits until `starts` listens at `socket`, then connects a client twice. Each connection starts a
/// server of its own.
fn connect_twice(dir: &Path, mut starts: Command, socket: &Path) {
    let listens = KillOnDrop(starts.stdin(Stdio::null()).spawn().unwrap());
    wait_until("nobody listens", || freestone_testkit::tools::is_listening(socket));
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    for pattern in ["7", "8"] {
        let write = format!("write -P {pattern} 0 1M");
        let read = format!("read -P {pattern} 0 1M");
        let mut client = Command::new("timeout");
        client.args([
            "30",
            "qemu-io",
            "-f",
            "raw",
            "-c",
            "read -P 0 0 8M",
            "-c",
            &write,
            "-c",
            &read,
            "-c",
            "flush",
            &uri,
        ]);
        let (code, out, err) = finish(client.current_dir(dir));
        assert!(code == 0 && !out.contains("failed"), "{starts:?}: {out}{err}");
    }
    drop(listens);
}

#[test]
fn single_runs_under_systemd_and_socat() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("activated");
    // The two ways in which systemd passes a connection: as stdin like inetd, and by LISTEN_FDS.
    for inetd in [true, false] {
        let mut systemd = Command::new(freestone_testkit::tools::find("systemd-socket-activate"));
        systemd.arg("--accept").args(inetd.then_some("--inetd")).arg("--listen").arg(&socket);
        systemd
            .args([program(), "serve", "--single", "r=ram,disksize=8M"])
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        connect_twice(dir.path(), systemd, &socket);
        fs::remove_file(&socket).unwrap();
    }
    for pipes in ["", ",pipes"] {
        let exec = format!("EXEC:{} serve --single r=ram\\,disksize=8M{pipes}", program());
        let mut socat = Command::new(freestone_testkit::tools::find("socat"));
        socat.arg(format!("UNIX-LISTEN:{},fork,unlink-early", socket.display())).arg(exec);
        connect_twice(dir.path(), socat, &socket);
        let _ = fs::remove_file(&socket);
    }
}
