//! Tests with standard clients, as Debian ships them.
//!
//! A missing client is a failure, never a skipped test. `cargo xtask test` installs the clients.

mod allow_lists;
mod cancelling;
mod copy;
mod fio;
mod forks;
mod full;
mod handshake_limits;
mod info;
mod limited;
mod locks;
mod memory_limit;
mod merging;
mod mount;
pub mod mounted;
mod mounting;
mod nbd;
mod nbd_backing;
mod overwriting;
mod qemu_img;
mod qemu_io;
#[cfg(feature = "rbd")]
mod rbd;
mod saved;
mod shutdown;
mod snapshots;
mod stale_stores;
mod tls;
pub mod tools;
pub mod tree;
mod ublk;
mod unaligned_requests;
mod vhost_user;
mod writeback;
