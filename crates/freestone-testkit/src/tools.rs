//! Programs that tests run, and the Debian packages that have them.

use std::env;
use std::path::PathBuf;

/// The table of programs and packages; `cargo xtask` reads it, too.
const TABLE: &str = include_str!("tools.txt");
/// Where Debian puts the tools of the administrator, which not every user has in PATH.
const SYSTEM_DIRS: [&str; 3] = ["/usr/bin", "/usr/sbin", "/sbin"];

/// Returns the path of a program.
///
/// # Panics
/// The program is missing. `cargo xtask test` recognises the message: outside of continuous integration, it
/// lists the test as left out.
pub fn find(tool: &str) -> PathBuf {
    let path = env::var_os("PATH").unwrap_or_default();
    let mut dirs = env::split_paths(&path).chain(SYSTEM_DIRS.iter().map(PathBuf::from));
    let found = dirs.find_map(|dir| Some(dir.join(tool)).filter(|file| file.is_file()));
    found.unwrap_or_else(|| {
        let package = package_of(tool);
        panic!("left out: {tool} is missing: apt-get install --no-install-recommends {package}")
    })
}

/// Returns the package of a program in the table. Programs that are not in it are essential ones.
fn package_of(tool: &str) -> &'static str {
    let mut rows = TABLE.lines().filter_map(|line| line.split_once(' '));
    rows.find(|(name, _)| *name == tool).map_or("coreutils", |(_, package)| package)
}
