//! Settings of RAM disks and forks, and the errors of creating or changing devices.

use std::fmt;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use thiserror::Error;

use crate::codec::{Algorithm, Params, ParamsError, StreamsError};
use crate::pool::redo::RedoError;
use crate::ram::geometry::{DISKSIZE_BYTES_MAX, LOGICAL_BLOCK_BYTES, PAGE};
use crate::ram::waiting::full_policy::FullPolicy;
use freestone_core::consistency_group::FreezeTimeout;
use freestone_core::device::{self, Device};

/// Settings of a RAM disk and its family (devices that share a memory pool).
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Size of the disk in bytes, rounded up to a page.
    pub disksize: u64,
    /// Algorithm for newly written pages.
    pub comp_algorithm: Algorithm,
    /// Parameters of `comp_algorithm`, such as the level.
    pub algorithm_params: Params,
    /// Memory limit of the pool in bytes, rounded up to a page; 0 means no limit.
    pub mem_limit: u64,
    /// Secondary algorithms for recompression, at priorities 1 to 3.
    pub recomp_algorithms: [Option<Secondary>; 3],
    /// Time without access after which pages are recompressed automatically, with zstd and a
    /// dictionary trained on the family's own pages; `None` disables this. Uses priority 3, which
    /// must be free.
    pub auto_recompress: Option<Duration>,
    /// Time without access after which neighbouring pages are compressed together, in groups of up
    /// to 8; `None` disables this.
    pub auto_group: Option<Duration>,
    /// Time without access after which pages with the same content share one object; `None`
    /// disables this. Users of devices of the family can then find out, by the time that reads and
    /// writes take, whether another device has the same content.
    pub auto_dedup: Option<Duration>,
    /// Device for pages evicted from memory; `None` keeps all pages in memory.
    pub backing: Option<Backing>,
    /// Policy for writes that find no space: wait or fail.
    pub full_policy: FullPolicy,
    /// True if another process can [adopt](crate::ram::FamilyMemory) the family after this one has
    /// ended or was killed. Objects that are overwritten in place are copied twice then. A backing device
    /// needs a [file](Backing::file).
    pub adoptable: bool,
}

impl Config {
    /// Checks that the backing device of an [adoptable](Self::adoptable) family has a file.
    ///
    /// # Errors
    /// [`SetupError::BackingWithoutFile`].
    pub fn check_adoptable(&self) -> Result<(), SetupError> {
        match &self.backing {
            Some(Backing { file: None, .. }) if self.adoptable => Err(SetupError::BackingWithoutFile),
            _ => Ok(()),
        }
    }

    /// Returns these settings with `device` as backing device.
    #[must_use]
    pub fn backed_by(self, device: Arc<dyn Device>, compressed_writeback: bool) -> Self {
        Self { backing: Some(Backing::new(device, compressed_writeback)), ..self }
    }
}

/// A secondary algorithm with its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secondary {
    /// Compression algorithm.
    pub algorithm: Algorithm,
    /// Parameters of the algorithm, such as the level.
    pub params: Params,
}

/// A backing device for pages evicted from memory. The family overwrites the device's previous
/// content. The new content is of use only to this family, and to a process that adopts it.
#[derive(Clone)]
pub struct Backing {
    /// The device: must be writable, not zoned, and at least one page large.
    pub device: Arc<dyn Device>,
    /// True: write compressed objects tightly packed, and move pages back to memory when they are
    /// read. False: use the kernel's layout, one uncompressed page per block, which stays on the
    /// device until the page is overwritten.
    pub compressed_writeback: bool,
    /// True: free a page's memory only when the page is durable on the device. Needed for a device
    /// that can lose completed but unflushed writes while this process runs, such as an export of a
    /// remote server.
    pub write_through: bool,
    /// Path of the device, for display only; `None` if it has no path.
    pub path: Option<PathBuf>,
    /// Descriptor of the device's file, with which a process that [adopts](crate::ram::FamilyMemory) the
    /// family opens the device. `None` in a family that no process can adopt.
    pub file: Option<Arc<OwnedFd>>,
}

impl Backing {
    /// Returns the settings of a device without a path, whose completed writes are not lost while this
    /// process runs.
    pub fn new(device: Arc<dyn Device>, compressed_writeback: bool) -> Self {
        Self { device, compressed_writeback, write_through: false, path: None, file: None }
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device: _, compressed_writeback, write_through, path, file: _ } = self;
        f.debug_struct("Backing")
            .field("compressed_writeback", compressed_writeback)
            .field("write_through", write_through)
            .field("path", path)
            .finish_non_exhaustive()
    }
}

/// Settings of a fork, a writable device over a read-only base.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ForkConfig {
    /// Size of the fork in bytes, rounded up to a multiple of 512; `None` means the base's size.
    /// Bytes beyond the base read as zeroes.
    pub size: Option<u64>,
    /// Memory limit of the fork's own objects in bytes; 0 means no limit.
    pub mem_limit: u64,
    /// Guaranteed memory: bytes of the family's `mem_limit` that other devices leave to the fork.
    pub mem_min: u64,
}

/// Errors of creating or changing a RAM disk.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The requested size is zero.
    #[error("disksize must be at least one byte")]
    Empty,
    /// The requested size in bytes is above the largest that a slot table can address.
    #[error("disksize={0} bytes is beyond the largest disk, 256 TiB")]
    TooLarge(u64),
    /// The requested size is below the current size: devices can only grow.
    #[error("disksize={wanted} bytes would shrink the disk, which has {present}; it can only grow")]
    Shrinks {
        /// Requested size in bytes.
        wanted: u64,
        /// Current size in bytes.
        present: u64,
    },
    /// The base is writable, so its content may change.
    #[error("is live; take a snapshot of it, and fork that")]
    WritableBase,
    /// The base is a zoned device.
    #[error("is zoned; a base must not have zones")]
    ZonedBase,
    /// The operation needs a live device, and this is a snapshot.
    #[error("is a snapshot, which does not change; fork it")]
    Snapshot,
    /// The chain of forks (fork of a snapshot of a fork ...) would be too deep.
    #[error("already has the maximum depth of a fork chain, 64 levels")]
    TooDeep,
    /// The device's own memory limit is too small.
    #[error("mem_limit={0} bytes is below 64 KiB")]
    CapTooSmall(u64),
    /// The requested size of a fork is smaller than its base.
    #[error("size={wanted} bytes is smaller than the base, which has {base} bytes")]
    SmallerThanBase {
        /// Requested size in bytes.
        wanted: u64,
        /// Size of the base in bytes.
        base: u64,
    },
    /// The guaranteed memory is above the device's own memory limit.
    #[error("mem_min={guarantee} bytes is above mem_limit={cap} bytes")]
    GuaranteeAboveCap {
        /// Requested guaranteed memory in bytes.
        guarantee: u64,
        /// Memory limit of the device in bytes.
        cap: u64,
    },
    /// The family's memory limit does not leave the guaranteed memory.
    #[error("mem_min={wanted} bytes: the family's mem_limit has {left} left for guarantees")]
    Guarantee {
        /// Requested guaranteed memory in bytes.
        wanted: u64,
        /// Bytes of the family's limit that are not guaranteed to devices yet; 0 if the family has
        /// no limit.
        left: u64,
    },
    /// Writes in flight did not finish before the freeze timeout of a snapshot.
    #[error("{0}")]
    NotInTime(FreezeTimeout),
    /// The algorithm's parameters are invalid.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// `auto_recompress` needs priority 3, which already has this secondary algorithm.
    #[error("auto_recompress uses priority 3, where recomp_algorithm has {0}; free one of them")]
    PriorityTaken(Algorithm),
    /// The device is unsuitable as backing device, for the reason in the message.
    #[error("backing_dev: {0}")]
    BackingKind(String),
    /// A background thread cannot be started, for this reason.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// The family is [adoptable](Config::adoptable), and its backing device has no file.
    #[error("a process that adopts the family cannot open a backing device without a file")]
    BackingWithoutFile,
    /// The memory file (memfd) of the pool or of the slot tables cannot be created.
    #[error("cannot create a memory file: {0}")]
    MemoryFile(Errno),
    /// The system has no memory for slot tables or compression streams.
    #[error("out of memory")]
    NoMemory,
}

impl From<device::Error> for SetupError {
    fn from(_: device::Error) -> Self {
        Self::NoMemory
    }
}

impl From<RedoError> for SetupError {
    fn from(error: RedoError) -> Self {
        match error {
            RedoError::File(errno) => Self::MemoryFile(errno),
            _ => Self::NoMemory,
        }
    }
}

impl From<StreamsError> for SetupError {
    fn from(error: StreamsError) -> Self {
        match error {
            StreamsError::Params(error) => Self::Params(error),
            StreamsError::Device(_) => Self::NoMemory,
        }
    }
}

/// Rounds a disk's size up to whole pages, as zram does.
pub(in crate::ram) fn round_size(bytes: u64) -> Result<u64, SetupError> {
    round(bytes, PAGE)
}

/// Rounds a fork's size up to whole logical blocks of 512 bytes.
pub(in crate::ram) fn round_fork_size(bytes: u64) -> Result<u64, SetupError> {
    round(bytes, LOGICAL_BLOCK_BYTES.into())
}

fn round(bytes: u64, unit: u64) -> Result<u64, SetupError> {
    match bytes.checked_next_multiple_of(unit) {
        _ if bytes == 0 => Err(SetupError::Empty),
        Some(rounded) if rounded <= DISKSIZE_BYTES_MAX => Ok(rounded),
        _ => Err(SetupError::TooLarge(bytes)),
    }
}
