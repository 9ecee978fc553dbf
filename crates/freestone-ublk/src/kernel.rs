//! What is asked of the kernel, so that tests can answer in its place.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::abi::{CtrlCmd, IoDesc};

/// The driver, as a process sees it. Every call may come from any thread.
pub trait Kernel: Send + Sync {
    /// Whether the driver is there.
    fn check(&self) -> Result<(), Errno>;

    /// Whether it is root, or another with `CAP_SYS_ADMIN`, who asks.
    fn is_admin(&self) -> bool;

    /// A command to the control device, with `payload` at its address; returns when it is done, which
    /// may take as long as requests do that it waits for.
    fn command(&self, command: u32, header: CtrlCmd, payload: &mut [u8]) -> Result<(), Errno>;

    /// Where a character device has its node.
    fn char_path(&self, id: u32) -> PathBuf;

    /// The character device, once there is a node for it.
    fn open(&self, id: u32, until: Instant) -> io::Result<Arc<dyn CharDevice>>;

    /// The block device, once there is a node for it.
    fn block(&self, id: u32, until: Instant) -> io::Result<Arc<dyn BlockDevice>>;

    /// The ids of all devices there are.
    fn devices(&self) -> io::Result<Vec<u32>>;
}

/// `/dev/ublkcN`, open as long as this or a ring of it lives.
pub trait CharDevice: Send + Sync {
    /// The ring of a queue of so many tags, to be called by the thread that will use it. With
    /// `user_copy` data is moved by it. `wake` ends a wait.
    fn ring(&self, queue: u16, depth: u16, user_copy: bool, wake: &OwnedFd) -> io::Result<Box<dyn Ring>>;
}

/// `/dev/ublkbN`.
pub trait BlockDevice: Send + Sync {
    /// Where it is.
    fn path(&self) -> PathBuf;

    /// Whether somebody has it, or a part of it, for himself: a file system that is mounted does.
    fn is_claimed(&self) -> io::Result<bool>;
}

/// How long to wait for something that arrives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    /// Not at all.
    No,
    /// Until then, or until it was as long.
    AtMost(Duration),
    /// Until then.
    Forever,
}

/// What of a tag has come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Its command. 0: it has a request. Else a negative errno: none will come; but where it was a
    /// commit behind data that could not be sent, it is [`NOT_DONE`].
    Command,
    /// Data that was fetched: so many bytes, or a negative errno.
    Fetched,
    /// Data that was sent, the same.
    Sent,
}

/// What a commit behind data comes back with if that was not taken as a whole: its request is as
/// before (`ECANCELED`).
pub const NOT_DONE: i32 = -125;

/// Something of a tag has come back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Arrived {
    /// Which.
    pub tag: u16,
    /// What.
    pub event: Event,
    /// How it went.
    pub result: i32,
}

/// The ring of one queue. A tag is the kernel's from a fetch or commit until it arrives, and its
/// buffer is, too.
pub trait Ring {
    /// Asks for the first request of a tag. This, and all below, reaches the kernel with the next
    /// [`enter`](Self::enter).
    fn fetch(&mut self, tag: u16, buffer: u64);

    /// Tells the outcome of a request, and asks for the next one. What was read is in `buffer`; with
    /// user copy that is the sector that an append went to, or 0.
    fn commit(&mut self, tag: u16, result: i32, buffer: u64);

    /// Copies the data of a tag's request to `to`. It begins in the order of the calls.
    fn fetch_data(&mut self, tag: u16, to: u64, len: usize);

    /// Copies data into a tag's request. Followed by its commit, which is done only if all was copied.
    fn send_data(&mut self, tag: u16, from: u64, len: usize);

    /// Whether something waits for the next [`enter`](Self::enter).
    fn has_queued(&mut self) -> bool;

    /// Hands over what is queued, and waits. It may return early.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// Adds what has arrived.
    fn arrived(&mut self, into: &mut Vec<Arrived>);

    /// A copy of the descriptor of a tag that has arrived with a request.
    fn descriptor(&self, tag: u16) -> IoDesc;

    /// Whether the kernel writes to buffers inside of [`enter`](Self::enter) only.
    fn is_deferred(&self) -> bool;
}
