//! Tools of all tests: servers and their verbs, client programs, an NBD client in plain bytes, mounts, terminals, and
//! waiting.
//!
//! Modules of this room use no tests.

mod fuse;
mod nbd;
mod program;
mod server;
mod terminal;
mod tools;
pub mod tree;
mod wait;

pub use fuse::{Fuse, Mounted};
pub use nbd::{EIO, Ended, FUA, Raw, connect_nbd, nbd_request, try_connect_nbd};
pub use program::{
    KillOnDrop, NOBODY, finish, freestone, hearing_hangups, program, refused, sentence, signal, unprivileged,
    wait_for_end,
};
pub use server::{Serve, answer, ask};
pub use terminal::Terminal;
pub use tools::{
    KIB, MIB, allocated, assert_same, content, copy_in, fails, find, is_zero, json, names_in, noise, ok,
    publish, qemu_io, root_tool, sha256, stat, text, tool, uri,
};
pub use wait::{ANSWER_MAX, wait_until};
