//! Attributes and files that protect a device, such as a zone state: if they cannot be read, the
//! device is refused. Also: files whose creation is interrupted.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use crate::harness::prelude::*;

const ENDS: [&str; 4] = ["--nbd", "unix:nbd", "--control", "control"];

#[test]
fn unreadable_zone_state_refuses_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    let (disk, state) = (at.join("disk"), at.join("disk.zones"));
    fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let why = format!(
        "disk: {}: cannot be read, and may contain the zone state of the file, which writes would not update: ",
        state.display()
    );
    for target in ["not-mounted/disk.zones", "disk.zones"] {
        symlink(target, &state).unwrap();
        let message = refused(at, 1, &[&["serve", "disk=file,path=disk"][..], &ENDS].concat());
        assert!(message.starts_with(&why), "{target}: {message}");
        fs::remove_file(&state).unwrap();
    }
    // The server has no right to read the zone state, which belongs to another user.
    fs::write(&state, b"freestone zones\n").unwrap();
    fs::set_permissions(&state, Permissions::from_mode(0o000)).unwrap();
    fs::set_permissions(&disk, Permissions::from_mode(0o666)).unwrap();
    let run = at.join("run");
    fs::create_dir(&run).unwrap();
    fs::set_permissions(&run, Permissions::from_mode(0o777)).unwrap();
    let mut server = unprivileged(at);
    server.arg("serve").arg(format!("disk=file,path={}", disk.display()));
    server.arg("--nbd").arg(format!("unix:{}", run.join("nbd").display()));
    server.arg("--control").arg(run.join("control"));
    let (code, _, err) = finish(&mut server);
    assert_eq!(code, 1);
    let message = sentence(&err);
    assert!(message.starts_with(&why) && message.contains("Permission denied"), "{message}");
    // A read-only device needs no zone state. An unrelated file with the name of a zone state is
    // ignored.
    let serve = Serve::start_in(dir, &["disk=file,path=disk,readonly=yes"], true);
    drop(serve);
    let dir = tempfile::tempdir().unwrap();
    let name = "d".repeat(250);
    fs::write(dir.path().join(&name), vec![0; 1 << 20]).unwrap();
    fs::write(dir.path().join("disk"), vec![0; 1 << 20]).unwrap();
    fs::write(dir.path().join("disk.zones"), "notes").unwrap();
    let long = format!("long=file,path={name}");
    Serve::start_in(dir, &["disk=file,path=disk", &long], true);
}

/// A new file of 1 GiB exceeds the file size limit. SIGXFSZ then ends the server, or the call that
/// sets the file size fails.
#[test]
fn interrupted_file_creation_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let program = freestone(dir.path());
    let mut limited = Command::new("sh");
    limited.args(["-c", "ulimit -c 0; ulimit -f 1024; exec \"$0\" \"$@\""]).arg(program.get_program());
    limited.args(["serve", "disk=file,path=new,size=1G"]).args(ENDS).current_dir(dir.path());
    limited.env("XDG_RUNTIME_DIR", dir.path());
    let (code, _, _) = finish(&mut limited);
    assert_ne!(code, 0);
    let left = |dir: &std::path::Path| -> Vec<_> {
        let names = fs::read_dir(dir).unwrap().map(|row| row.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains("new")).collect()
    };
    assert_eq!(left(dir.path()), [] as [String; 0]);
    let serve = Serve::start_in(dir, &["disk=file,path=new,size=1G"], true);
    assert_eq!(fs::metadata(serve.path("new")).unwrap().len(), 1 << 30);
    assert_eq!(left(serve.dir.path()), ["new"]);
}
