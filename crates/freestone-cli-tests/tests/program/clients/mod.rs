//! Tests with standard clients, as Debian ships them.
//!
//! A missing client is a failure, never a skipped test. `cargo xtask test` installs the clients.

mod content;
mod exports;
mod qemu;
mod remote;
