//! Servers under a supervisor: `sd_notify`, the parent process, and passed sockets.

use std::os::unix::net::UnixDatagram;

use rustix::process::{Pid, kill_process};

use crate::harness::prelude::*;

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn notify_socket_receives_state_changes() {
    let dir = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let notification = || {
        let mut text = [0; 512];
        let len = manager.recv(&mut text).unwrap();
        String::from_utf8(text[..len].to_vec()).unwrap()
    };
    fs::write(dir.path().join("f.toml"), "[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n").unwrap();
    let mut server = hearing_hangups(dir.path())
        .args(["serve", "--config", "f.toml", "--pidfile", "pid"])
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(notification(), "READY=1\nSTATUS=1 device\n");
    // After the notification READY=1 the server accepts verbs.
    let (code, ..) = finish(freestone(dir.path()).arg("list"));
    assert_eq!(code, 0);
    let pid = Pid::from_child(&server);
    assert_eq!(fs::read_to_string(dir.path().join("pid")).unwrap(), format!("{}\n", server.id()));
    fs::write(dir.path().join("f.toml"), "[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\ncount = 2\n")
        .unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    assert!(notification().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(notification(), "READY=1\nSTATUS=2 devices\n");
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(notification(), "STOPPING=1\nSTATUS=waiting for requests\n");
    assert_eq!(notification(), "STOPPING=1\nSTATUS=flushing devices\n");
    assert_eq!(notification(), "STOPPING=1\nSTATUS=closing devices\n");
    assert_eq!(server.wait().unwrap().code(), Some(0));
    assert!(!dir.path().join("pid").exists());
}

#[test]
fn exit_with_parent_ends_the_server() {
    let dir = tempfile::tempdir().unwrap();
    let serve = format!(
        "{} serve n=null,size=1M --exit-with-parent --control c --nbd unix:n & {} wait --control c --timeout 30s; echo ready; read line",
        program(),
        program(),
    );
    let mut shell = std::process::Command::new("sh")
        .args(["-c", &serve])
        .current_dir(dir.path())
        .env_remove("FREESTONE_CONTROL")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    wait_until("the socket is not there", || dir.path().join("c").exists());
    thread::sleep(Duration::from_millis(100));
    assert!(dir.path().join("c").exists(), "as long as the shell runs");
    drop(shell.stdin.take());
    shell.wait().unwrap();
    wait_until("the socket is there", || !dir.path().join("c").exists());
}

/// The server serves sockets that are passed as file descriptors from 3 on, as systemd does.
#[test]
fn passed_sockets_are_served() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("activated");
    let listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    // The shell moves the socket to descriptor 3. `exec` keeps the process ID, so LISTEN_PID
    // matches the server.
    let serve = format!(
        "exec 3<&0 </dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec {} serve n=null,size=1M --control c",
        program()
    );
    let start = || {
        let child = std::process::Command::new("sh")
            .args(["-c", &serve])
            .current_dir(dir.path())
            .env("XDG_RUNTIME_DIR", dir.path())
            .env_remove("FREESTONE_CONTROL")
            .stdin(std::os::fd::OwnedFd::from(listener.try_clone().unwrap()))
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let (code, _, err) =
            finish(freestone(dir.path()).args(["wait", "--control", "c", "--timeout", "30s"]));
        assert_eq!(code, 0, "{err}");
        child
    };
    for _ in 0..2 {
        let mut server = start();
        let uri = format!("nbd+unix:///n?socket={}", path.display());
        let (code, out, err) = finish(
            std::process::Command::new(freestone_testkit::tools::find("nbdinfo")).args(["--size", &uri]),
        );
        assert_eq!((code, out.trim()), (0, "1048576"), "{err}");
        assert!(!dir.path().join("freestone").exists(), "no socket of its own");
        signal(&server, Signal::TERM);
        assert_eq!(server.wait().unwrap().code(), Some(0));
        assert!(path.exists(), "it is the manager's");
    }
}
