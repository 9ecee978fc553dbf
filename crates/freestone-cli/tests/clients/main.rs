//! Freestone as its users meet it: the built program, and the clients that Debian ships.
//!
//! A client that is missing is a failure, never a skipped test. `cargo xtask test` installs what is needed.

#[expect(dead_code, reason = "shared with the tests of the command line, which use more of it")]
#[path = "../harness/mod.rs"]
mod harness;

mod cancelling;
mod copy;
mod ending;
mod fio;
mod forks;
mod info;
mod keeping;
mod limits;
mod locks;
mod merging;
mod mount;
mod mounted;
mod older;
mod qemu_img;
mod qemu_io;
mod saved;
mod snapshots;
mod tools;
mod tree;
mod writeback;
