//! Modes, owners and groups of the server's sockets.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;

use crate::harness::prelude::*;

/// Number of the user and group `nobody`, used as another user than the server's if the tests run
/// as root.
const NOBODY: u32 = 65534;

fn mode_of(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o7777
}

#[test]
fn sockets_get_configured_mode_and_owner() {
    let is_root = rustix::process::geteuid().is_root();
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), Permissions::from_mode(0o755)).unwrap();
    let group = fs::metadata(dir.path()).unwrap().gid().to_string();
    let mut args = vec!["n=null,size=1M", "--socket-mode", "660", "--control-mode", "0640"];
    if is_root {
        args.extend(["--socket-user", "nobody", "--control-group", "65534"]);
    } else {
        args.extend(["--control-group", &group]);
    }
    let serve = Serve::start_in(dir, &args, true);
    serve.text(&["publish", "n", "--nbd", "unix:more", "--vhost-user", "unix:machine"]);
    serve.text(&["create", "golden=file,path=image,size=1M,readonly=no"]);
    serve.text(&["snapshot", "golden", "golden-1"]);
    serve.text(&["fork", "golden-1", "job", "--nbd", "unix:fork"]);
    for socket in ["nbd", "more", "machine", "fork"] {
        assert_eq!(mode_of(&serve.path(socket)), 0o660, "{socket}");
        if is_root {
            assert_eq!(fs::metadata(serve.path(socket)).unwrap().uid(), NOBODY, "{socket}");
        }
    }
    let control = fs::metadata(serve.path("control")).unwrap();
    assert_eq!(mode_of(&serve.path("control")), 0o640);
    assert_eq!(control.gid().to_string(), if is_root { NOBODY.to_string() } else { group });

    if is_root {
        // The user who owns the sockets can connect.
        let connects = |socket: &str| {
            let uri = format!("nbd+unix:///?socket={}", serve.path(socket).display());
            finish(
                Command::new(freestone_testkit::tools::find("nbdinfo"))
                    .args(["--size", &uri])
                    .uid(NOBODY)
                    .gid(NOBODY),
            )
            .0 == 0
        };
        assert!(connects("nbd"));
        let dir = serve.end();
        let serve = Serve::start_in(dir, &["n=null,size=1M"], true);
        let uri = format!("nbd+unix:///?socket={}", serve.path("nbd").display());
        let (code, _, err) = finish(
            Command::new(freestone_testkit::tools::find("nbdinfo"))
                .args(["--size", &uri])
                .uid(NOBODY)
                .gid(NOBODY),
        );
        assert_eq!(code, 1, "by default the socket is its owner's");
        assert!(err.contains("Permission denied"), "{err}");
    }
}

#[test]
fn config_file_sets_socket_modes() {
    let dir = tempfile::tempdir().unwrap();
    let me = rustix::process::geteuid().as_raw();
    let file = format!(
        "nbd = 'unix:nbd'\ncontrol = 'control'\nsocket_mode = '0666'\nsocket_user = {me}\n\
         control_mode = '660'\n[[device]]\nname = 'n'\nkind = 'null'\nsize = '1M'\n"
    );
    fs::write(dir.path().join("f.toml"), &file).unwrap();
    let serve = Serve::start_in(dir, &["--config", "f.toml", "--control-mode", "0600"], false);
    assert_eq!((mode_of(&serve.path("nbd")), mode_of(&serve.path("control"))), (0o666, 0o600));
    let dumped = serve.text(&["dump"]);
    let keys = format!("socket_mode = \"0666\"\nsocket_user = \"{me}\"\ncontrol_mode = \"0600\"\n");
    assert!(dumped.contains(&keys), "{dumped}");
    // `apply` cannot change the mode of the control socket while the server runs.
    let message = serve.refused(1, &["apply", "f.toml"]);
    assert!(
        message.ends_with("control_mode: the server uses 0600; restart the server to change this"),
        "{message}"
    );
    fs::write(serve.path("f.toml"), file.replace("'660'", "'600'")).unwrap();
    assert_eq!(serve.text(&["apply", "f.toml"]), "nothing changes\n");
    fs::write(serve.path("f.toml"), format!("control_group = 'root'\n{}", file.replace("'660'", "'600'")))
        .unwrap();
    let message = serve.refused(1, &["apply", "f.toml"]);
    assert!(
        message.ends_with("control_group: the server uses none; restart the server to change this"),
        "{message}"
    );
    let dir = serve.end();
    fs::write(dir.path().join("d.toml"), &dumped).unwrap();
    let again = Serve::start_in(dir, &["--config", "d.toml"], false);
    assert_eq!(again.text(&["dump"]), dumped);
    assert_eq!((mode_of(&again.path("nbd")), mode_of(&again.path("control"))), (0o666, 0o600));
}

#[test]
fn invalid_socket_owner_or_mode_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path();
    for (option, value, message) in [
        ("--socket-user", "no-such-user", "there is no such user"),
        ("--control-group", "no-such-group", "there is no such group"),
        (
            "--socket-group",
            "4294967295",
            "must be a group of this machine: a name, or a number below 4294967295",
        ),
    ] {
        let option = format!("{option}={value}");
        assert_eq!(refused(at, 2, &["serve", "--check", &option]), format!("{option}: {message}"));
    }
    let (code, _, err) = finish(freestone(at).args(["serve", "--check", "--socket-mode", "0999"]));
    assert_eq!(code, 2);
    assert!(err.contains("must be an octal number of up to 0777, for example 0660"), "{err}");
    fs::write(at.join("f.toml"), "control_user = 'no-such-user'\n").unwrap();
    assert_eq!(
        refused(at, 2, &["serve", "--check", "--config", "f.toml"]),
        "f.toml: control_user=no-such-user: there is no such user"
    );

    // Without root rights the server cannot make root the owner of its sockets. The start fails and
    // leaves no socket.
    let open = at.join("open");
    fs::create_dir(&open).unwrap();
    fs::set_permissions(&open, Permissions::from_mode(0o777)).unwrap();
    let (nbd, control) = (format!("unix:{}", open.join("n").display()), open.join("c"));
    for (option, what) in [("--socket-user", "n: the socket"), ("--control-user", "c: cannot create")] {
        let mut command = unprivileged(at);
        command.args(["serve", "n=null,size=1M", "--nbd", &nbd, "--control"]).arg(&control);
        let (code, out, err) = finish(command.args([option, "root"]));
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        let message = sentence(&err);
        assert!(message.contains(what) && message.contains("mode 0600, user 0: "), "{message}");
        assert_eq!(fs::read_dir(&open).unwrap().count(), 0, "{option}");
    }
}

#[test]
fn socket_mode_in_private_directory_warns() {
    let serve = Serve::logged_in(tempfile::tempdir().unwrap(), &["n=null,size=1M", "--socket-mode", "0666"]);
    let dir = serve.path("freestone").display().to_string();
    serve.log_with(&format!(
        "socket_mode=0666: only the owner may enter {dir}; choose another path with --nbd"
    ));
}
