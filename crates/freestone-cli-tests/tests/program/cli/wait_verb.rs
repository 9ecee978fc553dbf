//! The verb `freestone wait`, and servers that die while the verb waits.

use std::io::{BufRead as _, BufReader};
use std::os::unix::net::UnixListener;
use std::process::{Child, Output};

use crate::harness::prelude::*;

/// Timeout of a `wait` that must end long before it.
const LONG: &str = "1h";
/// Deadline for a `wait` to end after its server died, generous for slow machines.
const AT_ONCE: Duration = Duration::from_secs(30);
/// Time for a started `wait` process to reach its polling loop.
const SETTLED: Duration = Duration::from_millis(300);

fn wait(dir: &Path, args: &[&str]) -> Command {
    let mut command = freestone(dir);
    command.args(["wait", "--control", "c", "--timeout", LONG]).args(args);
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Starts a server that reads its configuration from the named pipe `fifo`, so it becomes ready
/// when the test writes to the pipe.
fn start_server_on_fifo(dir: &Path) -> Child {
    assert!(Command::new("mkfifo").arg(dir.join("fifo")).status().unwrap().success());
    let mut command = freestone(dir);
    command.args(["serve", "--config", "fifo", "--control", "c"]);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

/// Returns the error message of a `wait` process, which must fail at once.
fn failed(waiting: Child) -> String {
    let begin = Instant::now();
    let Output { status, stdout, stderr } = waiting.wait_with_output().unwrap();
    let stderr = String::from_utf8(stderr).unwrap();
    assert_eq!((status.code(), stdout.as_slice()), (Some(1), &[][..]), "{stderr}");
    assert!(begin.elapsed() < AT_ONCE, "{stderr}");
    sentence(&stderr)
}

/// Returns a directory with a stale socket `c`, on which no server listens.
fn with_stale_socket() -> TempDir {
    let dir = tempdir().unwrap();
    drop(UnixListener::bind(dir.path().join("c")).unwrap());
    dir
}

#[test]
fn wait_pid_of_failed_start_fails_at_once() {
    let dir = tempdir().unwrap();
    let serve = ["serve", "r=ram,disksize=wrong", "--control", "c"];
    let mut server = freestone(dir.path()).args(serve).stderr(Stdio::null()).spawn().unwrap();
    let pid = server.id().to_string();
    // The server is a zombie until `server.wait()`, so no other process has its process ID.
    let why = format!("no server at c: process {pid} has ended");
    assert_eq!(failed(wait(dir.path(), &["--pid", &pid]).spawn().unwrap()), why);
    server.wait().unwrap();
    assert_eq!(failed(wait(dir.path(), &["--pid", &pid]).spawn().unwrap()), why);
}

#[test]
fn wait_pid_of_server_killed_while_starting_fails() {
    let dir = with_stale_socket();
    let mut server = start_server_on_fifo(dir.path());
    let pid = server.id().to_string();
    let mut waiting = wait(dir.path(), &["--pid", &pid]).spawn().unwrap();
    thread::sleep(SETTLED);
    assert!(waiting.try_wait().unwrap().is_none(), "the server is still starting");
    server.kill().unwrap();
    assert_eq!(failed(waiting), format!("no server at c: process {pid} has ended"));
    server.wait().unwrap();
}

#[test]
fn wait_pid_of_ready_server_succeeds() {
    let dir = with_stale_socket();
    let mut server = start_server_on_fifo(dir.path());
    let waiting = wait(dir.path(), &["--pid", &server.id().to_string()]).spawn().unwrap();
    fs::write(dir.path().join("fifo"), "nbd = 'unix:n'\n[[device]]\nname='r'\nkind='ram'\ndisksize='1M'\n")
        .unwrap();
    let output = waiting.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    signal(&server, Signal::TERM);
    assert!(server.wait().unwrap().success());
}

#[test]
fn wait_pid_must_be_positive_and_without_job() {
    let dir = tempdir().unwrap();
    for args in [&["--pid", "0"][..], &["--pid", "-1"], &["--pid", "1", "--job", "1"]] {
        assert_eq!(finish(&mut wait(dir.path(), args)).0, 2, "{args:?}");
    }
}

#[test]
fn wait_fails_when_its_server_dies() {
    // A server that shuts down removes its control socket; a killed server leaves the socket.
    for removes in [true, false] {
        let dir = tempdir().unwrap();
        let listener = UnixListener::bind(dir.path().join("c")).unwrap();
        let waiting = wait(dir.path(), &[]).spawn().unwrap();
        let connection = listener.accept().unwrap();
        if removes {
            fs::remove_file(dir.path().join("c")).unwrap();
        }
        drop((listener, connection));
        assert_eq!(failed(waiting), "no server at c: the server has died or is shutting down");
    }
}

#[test]
fn wait_fails_at_new_socket_of_dead_server() {
    // In the second directory the socket of an earlier server exists.
    for dir in [tempdir().unwrap(), with_stale_socket()] {
        let waiting = wait(dir.path(), &[]).spawn().unwrap();
        thread::sleep(SETTLED);
        drop(UnixListener::bind(dir.path().join("new")).unwrap());
        fs::rename(dir.path().join("new"), dir.path().join("c")).unwrap();
        assert_eq!(failed(waiting), "no server at c: the server has died or is shutting down");
    }
}

#[test]
fn wait_after_lost_connection_takes_next_server() {
    let dir = tempdir().unwrap();
    let listener = UnixListener::bind(dir.path().join("c")).unwrap();
    let waiting = wait(dir.path(), &[]).spawn().unwrap();
    drop(listener.accept().unwrap());
    let (mut connection, _) = listener.accept().unwrap();
    BufReader::new(connection.try_clone().unwrap()).read_line(&mut String::new()).unwrap();
    connection.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":{\"devices\":[]}}\n").unwrap();
    let output = waiting.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn wait_names_stale_socket_after_timeout() {
    let dir = with_stale_socket();
    let (code, _, err) = finish(freestone(dir.path()).args(["wait", "--control", "c", "--timeout", "200ms"]));
    let why = "no server at c: a server that has died left the socket; waited 200ms for another";
    assert_eq!((code, sentence(&err).as_str()), (1, why));
}
