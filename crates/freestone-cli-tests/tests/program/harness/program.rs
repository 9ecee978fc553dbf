//! Commands for the program under test.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::sync::LazyLock;
use std::time::Duration;

use freestone_testkit::process::wait_for_exit;
use rustix::process::{Pid, Signal, kill_process};

/// Number of the user `nobody`, who has no rights, for tests that run as root.
pub const NOBODY: u32 = 65534;

/// Returns the path of the program under test: a link with the program's usual name, which messages contain.
pub fn program() -> &'static str {
    static LINK: LazyLock<String> = LazyLock::new(|| {
        let built = Path::new(env!("CARGO_BIN_EXE_freestone-under-test"));
        let dir = built.with_extension("link");
        fs::create_dir_all(&dir).unwrap();
        let link = dir.join("freestone");
        // Each test process needs the same link, and the first one creates it.
        match symlink(Path::new("..").join(built.file_name().unwrap()), &link) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => panic!("{}: {error}", link.display()),
            _ => link.into_os_string().into_string().unwrap(),
        }
    });
    &LINK
}

/// Returns a command for the program under test, with its default paths in `dir`.
pub fn freestone(dir: &Path) -> Command {
    let mut command = Command::new(program());
    command
        .env("XDG_RUNTIME_DIR", dir)
        .env("XDG_CACHE_HOME", dir.join("cached"))
        .env("FREESTONE_MOUNTS", dir.join("mounts"))
        .env_remove("FREESTONE_CACHE")
        .env_remove("CACHE_DIRECTORY")
        .env_remove("RUST_LOG")
        .env_remove("FREESTONE_CONTROL")
        .current_dir(dir)
        .stdin(Stdio::null());
    command
}

/// Like [`freestone`], with SIGHUP at its default action even if the tests run under nohup, which ignores SIGHUP.
pub fn hearing_hangups(dir: &Path) -> Command {
    let program = freestone(dir);
    let mut command = Command::new("env");
    command.arg("--default-signal=HUP").arg(program.get_program());
    for (key, value) in program.get_envs() {
        match value {
            Some(value) => command.env(key, value),
            None => command.env_remove(key),
        };
    }
    command.current_dir(dir).stdin(Stdio::null());
    command
}

/// Returns a command for the program that runs as a user other than root, so that file modes apply.
pub fn unprivileged(dir: &Path) -> Command {
    if !rustix::process::geteuid().is_root() {
        return freestone(dir);
    }
    // The user `nobody` may lack access to the build directory, so the program is copied to `dir`.
    let copy = dir.join("freestone-copy");
    // cp copies the program. A child of another test, started meanwhile, could inherit a writable descriptor of the
    // copy. Exec of the copy would then fail ("text file busy").
    assert!(Command::new("cp").arg(program()).arg(&copy).status().unwrap().success());
    fs::set_permissions(&copy, Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(dir, Permissions::from_mode(0o755)).unwrap();
    let mut command = Command::new(copy);
    command.env("XDG_RUNTIME_DIR", "/nowhere").current_dir("/").stdin(Stdio::null()).uid(NOBODY).gid(NOBODY);
    command
}

/// Runs a command until it exits. Returns exit status (-1 after a signal), stdout and stderr.
pub fn finish(command: &mut Command) -> (i32, String, String) {
    let Output { status, stdout, stderr } = command.output().unwrap();
    (status.code().unwrap_or(-1), String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap())
}

/// Runs a command line that must exit with `status`. Returns the single message on stderr, without the program's name.
pub fn refused(dir: &Path, status: i32, args: &[&str]) -> String {
    let (code, out, err) = finish(freestone(dir).args(args));
    assert_eq!((code, out.as_str()), (status, ""), "{args:?}: {err}");
    sentence(&err)
}

/// Checks that stderr is one line. Returns the line without the name of the program.
pub fn sentence(stderr: &str) -> String {
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    stderr.trim_end().strip_prefix("freestone: ").unwrap_or_else(|| panic!("{stderr}")).to_owned()
}

/// Waits until a child process ends. Kills the child and fails after a time limit.
#[track_caller]
pub fn wait_for_end(child: &mut Child, within: Duration) -> ExitStatus {
    wait_for_exit(child, within).unwrap_or_else(|| {
        child.kill().unwrap();
        panic!("the process does not end within {within:?}");
    })
}

/// Sends a signal to a child process.
pub fn signal(child: &Child, signal: Signal) {
    kill_process(Pid::from_child(child), signal).unwrap();
}
