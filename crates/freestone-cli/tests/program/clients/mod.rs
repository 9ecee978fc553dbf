//! Freestone as its users meet it: the built program, and the clients that Debian ships.
//!
//! A client that is missing is a failure, never a skipped test. `cargo xtask test` installs what is
//! needed.

mod allowed;
mod cancelling;
mod copy;
mod ending;
mod fio;
mod forks;
mod full;
mod info;
mod keeping;
mod lengths;
mod limited;
mod limits;
mod locks;
mod merging;
mod mount;
pub mod mounted;
mod nbd;
mod nbd_backing;
mod newcomers;
mod older;
mod qemu_img;
mod qemu_io;
#[cfg(feature = "rbd")]
mod rbd;
mod saved;
mod snapshots;
mod tls;
pub mod tools;
pub mod tree;
mod ublk;
mod vhost_user;
mod writeback;
