//! A fake of Ceph's librados and librbd, over files.
//!
//! The library is built from `fake.c`, whose first comment describes its files. It aborts a process
//! that misuses its API.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// C source of the library.
pub const SOURCE: &str = include_str!("fake.c");

/// Builds `librbd.so.1` and `librados.so.2` in an existing empty directory. If `old` is set,
/// functions added in Ceph 16 are missing.
///
/// # Panics
/// No C compiler is available (`cc`, or `$CC`).
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
