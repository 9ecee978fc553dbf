//! External programs that tests run, and the Debian packages that contain them.

use std::env;
use std::fs::File;
use std::io::{Write as _, stderr};
use std::panic::{self, AssertUnwindSafe};
use std::path::PathBuf;
use std::process::{Command, Stdio};

/// Table of programs and their Debian packages, one pair per line. `cargo xtask` also reads it.
const TABLE: &str = include_str!("tools.txt");
/// Directories that are searched besides those in PATH, which may lack system administration tools.
const SYSTEM_DIRS: [&str; 3] = ["/usr/bin", "/usr/sbin", "/sbin"];

/// The FUSE device, which some systems restrict to root, and the programs that need it.
const FUSE: &str = "/dev/fuse";
const FUSE_TOOLS: [&str; 2] = ["nbdfuse", "fusermount3"];

/// Payload of the panic with which a test that cannot run on this machine is skipped.
struct SkippedTest;

/// Runs a test. If a program that it needs is missing, the test passes, except in continuous integration.
pub fn skip_if_tool_missing(test: impl FnOnce()) {
    if let Err(payload) = panic::catch_unwind(AssertUnwindSafe(test))
        && !payload.is::<SkippedTest>()
    {
        panic::resume_unwind(payload);
    }
}

/// Returns the path of a program. If the program is missing, prints the reason and skips the test by unwinding to
/// [`skip_if_tool_missing`]. `cargo xtask test` recognises the printed line and lists the test as skipped.
///
/// # Panics
/// Panics if the program is missing in continuous integration.
pub fn find(tool: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs = env::split_paths(&path).chain(SYSTEM_DIRS.iter().map(PathBuf::from));
    let found = dirs.find_map(|dir| Some(dir.join(tool)).filter(|file| file.is_file()));
    if FUSE_TOOLS.contains(&tool) && !may_use_fuse() {
        skip_test(&format!("{tool} needs access to {FUSE}"));
    }
    found.unwrap_or_else(|| {
        let package = package_of(tool);
        skip_test(&format!("{tool} is missing: apt-get install --no-install-recommends {package}"))
    })
}

/// Returns true if this user may mount file systems with FUSE.
pub fn may_use_fuse() -> bool {
    File::options().read(true).write(true).open(FUSE).is_ok()
}

/// Skips the test like [`find`] unless sudo works without a password. For tests that run as an unprivileged user.
pub fn require_sudo() {
    let tried = Command::new("sudo").args(["-n", "true"]).stdin(Stdio::null()).output();
    if !tried.is_ok_and(|output| output.status.success()) {
        skip_test("needs root, or a sudo that asks for no password");
    }
}

/// Skips a test that cannot run on this machine.
///
/// # Panics
/// Always panics. In continuous integration the test fails, otherwise the panic is caught and the test passes.
pub fn skip_test(why: &str) -> ! {
    assert!(!is_ci(), "{why}");
    // Write to stderr directly: the test harness hides the captured output of tests that pass.
    let _ = writeln!(stderr(), "left out: {why}");
    panic::resume_unwind(Box::new(SkippedTest))
}

/// Returns true in continuous integration. `cargo xtask` uses the same condition (see CONTRIBUTING.md).
fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty())
}

/// Returns the Debian package of a program. Programs that are not in the table belong to coreutils.
fn package_of(tool: &str) -> &'static str {
    let mut rows = TABLE.lines().filter_map(|line| line.split_once(' '));
    rows.find(|(name, _)| *name == tool).map_or("coreutils", |(_, package)| package)
}

/// Returns true if a process listens at a Unix socket. The existence of the socket file does not show that, and
/// connecting would use up the only connection that some servers accept.
pub fn is_listening(socket: &std::path::Path) -> bool {
    /// The kernel's flag `__SO_ACCEPTCON`, which listening sockets have.
    const LISTENING: &str = "00010000";
    let sockets = std::fs::read_to_string("/proc/net/unix").unwrap_or_default();
    sockets.lines().any(|line| {
        let mut fields = line.split_whitespace();
        fields.nth(3) == Some(LISTENING) && fields.nth(3) == socket.to_str()
    })
}
