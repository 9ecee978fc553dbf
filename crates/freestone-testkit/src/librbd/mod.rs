//! A fake of Ceph's librados and librbd, over files.
//!
//! The fake is built from `fake.c`, whose first comment describes the files. The fake aborts a
//! process that misuses the API.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// C source of the fake libraries.
pub const SOURCE: &str = include_str!("fake.c");

/// Builds `librbd.so.1` and `librados.so.2` in an existing empty directory. If `old` is set, the
/// libraries lack the functions added in Ceph 16.
///
/// # Panics
/// Panics if no C compiler is available (`$CC`, or `cc`), or if the build fails.
pub fn build(directory: &Path, old: bool) {
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let status = Command::new(compiler)
        .args(["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-pthread"])
        .args(old.then_some("-DOLD"))
        .arg("-o")
        .arg(directory.join("librbd.so.1"))
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/src/librbd/fake.c"))
        .status()
        .unwrap();
    assert!(status.success(), "fake.c is not built");
    symlink("librbd.so.1", directory.join("librados.so.2")).unwrap();
}
