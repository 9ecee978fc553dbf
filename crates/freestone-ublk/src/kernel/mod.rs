//! The interface to the kernel, a set of traits that the tests implement with a fake driver.
//!
//! [`system`] implements the traits with the real driver, and [`control`] has one method for each command.
//! The rest of the crate reaches the driver only through this module.

pub mod abi;
pub mod control;
pub mod deadline;
mod device_claim;
pub mod system;
mod uring;

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use self::abi::{CtrlCmd, IoDesc};

/// The ublk driver and its device nodes, as a process uses them. Any thread may call any method.
pub trait Kernel: Send + Sync {
    /// Checks that the driver is loaded and accessible.
    fn check(&self) -> Result<(), Errno>;

    /// Returns true if the process has `CAP_SYS_ADMIN`.
    fn is_admin(&self) -> bool;

    /// Runs a control command with `payload` as its buffer. Blocks until the command is done, which
    /// may include a wait for requests.
    fn command(&self, command: u32, header: CtrlCmd, payload: &mut [u8]) -> Result<(), Errno>;

    fn char_path(&self, id: u32) -> PathBuf;

    /// Opens the character device. Waits for its node until `until`.
    fn open(&self, id: u32, until: Instant) -> io::Result<Arc<dyn CharDevice>>;

    /// Returns the block device. Waits for its node until `until`.
    fn block(&self, id: u32, until: Instant) -> io::Result<Arc<dyn BlockDevice>>;

    fn devices(&self) -> io::Result<Vec<u32>>;
}

/// `/dev/ublkcN`. The file stays open while this object or one of its rings lives.
pub trait CharDevice: Send + Sync {
    /// Creates the ring of a queue with `depth` tags. The thread that will use the ring must make
    /// the call. With `user_copy` the ring copies the data of requests. A write to `wake` ends a
    /// wait.
    fn ring(&self, queue: u16, depth: u16, user_copy: bool, wake: &OwnedFd) -> io::Result<Box<dyn Ring>>;
}

pub trait BlockDevice: Send + Sync {
    /// Returns the path of the node.
    fn path(&self) -> PathBuf;

    /// Opens the block device exclusively. Returns `None` if the device is gone, and `EBUSY` if
    /// another user, for example a mount, has claimed the device or a partition.
    fn claim(&self) -> io::Result<Option<Box<dyn NodeClaim>>>;

    /// Returns the mount point, or None if the device is not mounted in this process's mount
    /// namespace.
    fn mount_point(&self) -> Option<PathBuf>;
}

/// An exclusive claim on a block device, released on drop. Every method and the drop may wait for
/// requests.
pub trait NodeClaim: Send {
    /// Writes back the dirty pages of the block device's cache.
    fn sync(&self) -> io::Result<()>;

    fn drop_cache(&self) -> io::Result<()>;
}

/// How long [`Ring::enter`] waits for an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wait {
    No,
    /// Wait for an event, at most this long.
    AtMost(Duration),
    /// Wait for an event without a time limit.
    Forever,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RingEventKind {
    /// The tag's command completed. Result 0 means that a request arrived. A negative errno means
    /// that the tag receives no more requests, except [`COMMIT_CANCELLED`] after a failed
    /// [`Ring::send_data`].
    Command,
    /// A [`Ring::fetch_data`] completed, with the number of bytes or a negative errno.
    Fetched,
    /// A [`Ring::send_data`] completed, with the number of bytes or a negative errno.
    Sent,
}

/// Result (`-ECANCELED`) of a commit whose preceding [`Ring::send_data`] was incomplete. The
/// request is not completed yet.
pub const COMMIT_CANCELLED: i32 = -125;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RingEvent {
    pub tag: u16,
    pub kind: RingEventKind,
    /// Result of the command or copy, as [`RingEventKind`] describes.
    pub result: i32,
}

/// The ring of one queue. The kernel owns a tag and its buffer from a fetch or commit until the
/// tag's command completes.
pub trait Ring {
    /// Queues a fetch of the tag's first request. Entries reach the kernel with the next
    /// [`enter`](Self::enter).
    fn fetch(&mut self, tag: u16, buffer: u64);

    /// Queues the completion of a request and a fetch of the next one. `buffer` is the address of
    /// the buffer with read data. With user copy it is the sector to which an append wrote, or 0.
    fn commit(&mut self, tag: u16, result: i32, buffer: u64);

    /// Queues a copy of the request's data to the address `to`. Copies begin in the order of the
    /// calls.
    fn fetch_data(&mut self, tag: u16, to: u64, len: usize);

    /// Queues a copy from the address `from` to the tag's request. The commit must follow; the
    /// kernel runs the commit only if all bytes were copied.
    fn send_data(&mut self, tag: u16, from: u64, len: usize);

    /// Returns true if entries wait for the next [`enter`](Self::enter).
    fn has_queued(&mut self) -> bool;

    /// Submits the queued entries and waits for events. May return before an event arrives.
    fn enter(&mut self, wait: Wait) -> io::Result<()>;

    /// Appends the events that have arrived.
    fn take_events(&mut self, into: &mut Vec<RingEvent>);

    /// Returns a copy of the descriptor of a tag whose request has arrived.
    fn descriptor(&self, tag: u16) -> IoDesc;

    /// Returns true if the kernel writes to buffers only during [`enter`](Self::enter).
    fn is_deferred(&self) -> bool;
}
