//! External programs that tests run, and the Debian packages that contain them.

use std::env;
use std::fs::File;
use std::io::{Write as _, stderr};
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Table of programs and packages; also read by `cargo xtask`.
const TABLE: &str = include_str!("tools.txt");
/// Directories of system administration tools, which may not be in PATH.
const SYSTEM_DIRS: [&str; 3] = ["/usr/bin", "/usr/sbin", "/sbin"];

/// FUSE device, which some systems restrict to root, and the tools that need it.
const FUSE: &str = "/dev/fuse";
const FUSE_TOOLS: [&str; 2] = ["nbdfuse", "fusermount3"];

/// Payload of the panic that skips a test which cannot run on this machine.
struct LeftOut;

/// Runs a test. Outside of continuous integration, a test whose program is missing passes.
pub fn leave_out_if_missing(test: impl FnOnce()) {
    if let Err(payload) = panic::catch_unwind(AssertUnwindSafe(test))
        && !payload.is::<LeftOut>()
    {
        panic::resume_unwind(payload);
    }
}

/// Returns the path of a program. If the program is missing, outside of continuous integration,
/// prints the reason and unwinds to [`leave_out_if_missing`]. `cargo xtask test` recognises the
/// line and lists the test.
///
/// # Panics
/// The program is missing in continuous integration.
pub fn find(tool: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs = env::split_paths(&path).chain(SYSTEM_DIRS.iter().map(PathBuf::from));
    let found = dirs.find_map(|dir| Some(dir.join(tool)).filter(|file| file.is_file()));
    if FUSE_TOOLS.contains(&tool) && !may_use_fuse() {
        leave_out(&format!("{tool} needs access to {FUSE}"));
    }
    found.unwrap_or_else(|| {
        let package = package_of(tool);
        leave_out(&format!("{tool} is missing: apt-get install --no-install-recommends {package}"))
    })
}

/// Returns true if this user may mount with FUSE.
pub fn may_use_fuse() -> bool {
    File::options().read(true).write(true).open(FUSE).is_ok()
}

/// Skips the test like [`find`] unless sudo works without a password. For tests that run as an
/// unprivileged user.
pub fn require_sudo() {
    let tried = Command::new("sudo").args(["-n", "true"]).stdin(Stdio::null()).output();
    if !tried.is_ok_and(|output| output.status.success()) {
        leave_out("needs root, or a sudo that asks for no password");
    }
}

/// Skips a test that cannot run on this machine.
///
/// # Panics
/// Always; in continuous integration as a failure.
pub fn leave_out(why: &str) -> ! {
    assert!(!is_ci(), "{why}");
    // Written directly to stderr: the test harness hides the captured output of tests that pass.
    let _ = writeln!(stderr(), "left out: {why}");
    panic::resume_unwind(Box::new(LeftOut))
}

/// Same condition as in `cargo xtask` (see CONTRIBUTING.md).
fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty())
}

/// Returns the package of a program; programs outside the table are in coreutils.
fn package_of(tool: &str) -> &'static str {
    let mut rows = TABLE.lines().filter_map(|line| line.split_once(' '));
    rows.find(|(name, _)| *name == tool).map_or("coreutils", |(_, package)| package)
}

/// Returns true if a process listens at a Unix socket. The file of a socket exists before that, and a connection would
/// be the only one of some servers.
pub fn is_listening(socket: &std::path::Path) -> bool {
    /// `__SO_ACCEPTCON` of the kernel, the flag of listening sockets.
    const LISTENING: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(LISTENING) && fields.nth(3) == socket.to_str()
    })
}
