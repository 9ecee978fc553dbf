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

/// Names that most tests use: these tools, and the types and modules they work on.
pub mod prelude {
    pub use std::fs;
    pub use std::io::{Read as _, Write as _};
    pub use std::os::unix::net::UnixStream;
    pub use std::path::{Path, PathBuf};
    pub use std::process::{Command, Stdio};
    pub use std::thread;
    pub use std::time::{Duration, Instant};

    pub use rustix::process::Signal;
    pub use serde_json::{Value, json};
    pub use tempfile::{TempDir, tempdir};

    pub use super::fuse::{Fuse, Mounted};
    pub use super::nbd::{Ended, Raw, connect_nbd, nbd_request, try_connect_nbd};
    pub use super::program::{
        NOBODY, finish, freestone, hearing_hangups, program, refused, sentence, signal, unprivileged,
        wait_for_end,
    };
    pub use super::server::{Serve, answer, ask};
    pub use super::terminal::Terminal;
    pub use super::tools::{
        KIB, MIB, allocated, assert_same, content, copy_in, fails, find, is_zero, json, names_in, noise, ok,
        publish, qemu_io, root_tool, sha256, stat, text, tool, uri,
    };
    pub use super::wait::{ANSWER_MAX, wait_until};
    pub use freestone_testkit::nbd::wire::{EIO, FUA};
    pub use freestone_testkit::process::KillOnDrop;
}
