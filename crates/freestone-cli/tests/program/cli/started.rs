//! What a server tells who has started it.

use std::fs;
use std::os::unix::net::UnixDatagram;
use std::process::Stdio;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::harness::{finish, freestone};

const PATIENCE: Duration = Duration::from_secs(30);

#[test]
fn a_service_manager_hears_how_far_it_is() {
    let dir = tempfile::tempdir().unwrap();
    let manager = UnixDatagram::bind(dir.path().join("notify")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let said = || {
        let mut text = [0; 512];
        let len = manager.recv(&mut text).unwrap();
        String::from_utf8(text[..len].to_vec()).unwrap()
    };
    fs::write(dir.path().join("f.toml"), "[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n").unwrap();
    let mut server = freestone(dir.path())
        .args(["serve", "--config", "f.toml", "--pidfile", "pid"])
        .env("NOTIFY_SOCKET", dir.path().join("notify"))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(said(), "READY=1\nSTATUS=1 device\n");
    // What it says is true.
    let (code, ..) = finish(freestone(dir.path()).arg("list"));
    assert_eq!(code, 0);
    let pid = Pid::from_raw(server.id().cast_signed()).unwrap();
    assert_eq!(fs::read_to_string(dir.path().join("pid")).unwrap(), format!("{}\n", server.id()));
    fs::write(dir.path().join("f.toml"), "[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\ncount = 2\n")
        .unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    assert!(said().starts_with("RELOADING=1\nMONOTONIC_USEC="));
    assert_eq!(said(), "READY=1\nSTATUS=2 devices\n");
    kill_process(pid, Signal::TERM).unwrap();
    assert_eq!(said(), "STOPPING=1\nSTATUS=devices are flushed\n");
    assert_eq!(said(), "STOPPING=1\nSTATUS=devices are closed\n");
    assert_eq!(server.wait().unwrap().code(), Some(0));
    assert!(!dir.path().join("pid").exists());
}

#[test]
fn it_ends_with_its_parent() {
    let dir = tempfile::tempdir().unwrap();
    let serve = format!(
        "{} serve n=null,size=1M --exit-with-parent --control c --nbd unix:n & {} wait --control c --timeout 30s; echo ready; read line",
        env!("CARGO_BIN_EXE_freestone"),
        env!("CARGO_BIN_EXE_freestone"),
    );
    let mut shell = std::process::Command::new("sh")
        .args(["-c", &serve])
        .current_dir(dir.path())
        .env_remove("FREESTONE_CONTROL")
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let began = Instant::now();
    let wait_for = |there: bool| {
        while dir.path().join("c").exists() != there {
            assert!(began.elapsed() < PATIENCE, "the socket is {}there", if there { "not " } else { "" });
            thread::sleep(Duration::from_millis(10));
        }
    };
    wait_for(true);
    thread::sleep(Duration::from_millis(100));
    assert!(dir.path().join("c").exists(), "as long as the shell runs");
    drop(shell.stdin.take());
    shell.wait().unwrap();
    wait_for(false);
}
