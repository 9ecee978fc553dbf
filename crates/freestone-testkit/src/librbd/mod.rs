//! A library that stands for Ceph's librados and librbd, over files.
//!
//! It is built of `fake.c`, whose head says what it reads and writes in the directory of a cluster, and
//! ends the process that uses it otherwise than the real ones allow.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

/// The source of the library.
pub const SOURCE: &str = include_str!("fake.c");

/// Builds `librbd.so.1` and `librados.so.2` in a directory that is there and empty; an `old` one lacks
/// what came with Ceph 16.
///
/// # Panics
/// There is no C compiler (`cc`, or `$CC`).
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
