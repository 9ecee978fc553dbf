//! Servers that cannot start threads because of `RLIMIT_NPROC`.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;

use super::end;
use crate::harness::prelude::*;

/// Starts a server with a kept RAM disk, as a user other than root. `RLIMIT_NPROC` has no effect on root.
fn start(dir: TempDir) -> Serve {
    let mut command = unprivileged(dir.path());
    fs::set_permissions(dir.path(), Permissions::from_mode(0o777)).unwrap();
    let path = |name: &str| text(&dir.path().join(name)).to_owned();
    command.args(["serve", "r=ram,disksize=16M,keep=yes", "--state", &path("state")]);
    command.args(["--nbd", &format!("unix:{}", path("nbd")), "--control", &path("control")]);
    Serve::ready(dir, command)
}

/// Sets `RLIMIT_NPROC` of the server to 0, so that it cannot start threads. The command runs as the server's own user,
/// because root may lack the right to change limits of others.
fn refuse_threads(serve: &Serve) {
    let mut command = Command::new(find("prlimit"));
    command.args(["--pid", &serve.pid().as_raw_nonzero().to_string(), "--nproc=0:0"]);
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    assert!(command.status().unwrap().success());
}

#[test]
fn shutdown_without_threads_saves_kept_content() {
    let serve = start(tempfile::tempdir().unwrap());
    let mut client = Raw::connect(&serve, "r");
    assert_eq!(client.write(0, 0, &[7; 4096]), 0);
    refuse_threads(&serve);
    let serve = start(end(serve));
    drop(client);
    assert_eq!(Raw::connect(&serve, "r").read(0, 4096), Ok(vec![7; 4096]));
}

#[test]
fn shutdown_verb_without_threads_works() {
    let serve = start(tempfile::tempdir().unwrap());
    refuse_threads(&serve);
    let control = serve.control();
    control.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
    let answer = ask(&control, br#"{"jsonrpc":"2.0","id":1,"method":"shutdown","params":{}}"#);
    assert!(answer["error"].is_null(), "{answer}");
    assert_eq!(serve.wait().0, Some(0));
}

#[test]
fn failed_start_saves_writes_of_early_clients() {
    let dir = tempfile::tempdir().unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let metrics = taken.local_addr().unwrap().to_string();
    // Clients can use the disk before the start fails, because the address of --metrics is in use.
    let args = ["serve", "r=ram,disksize=1M,keep=yes", "--state", "state", "--nbd", "unix:nbd"];
    let mut command = freestone(dir.path());
    let (code, _, err) = finish(command.args(args).args(["--metrics", &metrics]));
    assert_eq!((code, err.contains("--metrics")), (1, true), "{err}");
    let mut command = freestone(dir.path());
    command.args(args).args(["--control", "control"]);
    let serve = Serve::ready(dir, command);
    assert!(!serve.startup_output.contains("withheld"), "{}", serve.startup_output);
    assert_eq!(Raw::connect(&serve, "r").read(0, 512), Ok(vec![0; 512]));
}
