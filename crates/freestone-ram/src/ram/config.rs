//! Settings of RAM disks and forks, and errors of creating or changing them.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;
use thiserror::Error;

use super::full::WhenFull;
use super::{DISKSIZE_BYTES_MAX, LOGICAL_BLOCK_BYTES, PAGE};
use crate::codec::{Algorithm, Params, ParamsError, StreamsError};
use freestone_core::consistency_group::NotInTime;
use freestone_core::device::{self, Device};

/// Settings of a RAM disk.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Size in bytes, rounded up to a page.
    pub disksize: u64,
    /// Algorithm for newly written pages.
    pub comp_algorithm: Algorithm,
    /// Parameters of `comp_algorithm`.
    pub algorithm_params: Params,
    /// Limit of the pool in bytes, rounded up to a page; 0 means no limit.
    pub mem_limit: u64,
    /// Secondary algorithms for recompression, at priorities 1 to 3.
    pub recomp_algorithms: [Option<Secondary>; 3],
    /// Recompress pages automatically that were not accessed for this duration, with zstd and a
    /// dictionary trained on the disk's own pages. Uses priority 3, which must be free.
    pub auto_recompress: Option<Duration>,
    /// Device for pages evicted from memory.
    pub backing: Option<Backing>,
    /// Policy for writes that find no space.
    pub when_full: WhenFull,
}

impl Config {
    /// Returns these settings with `device` as backing device.
    #[must_use]
    pub fn backed_by(self, device: Arc<dyn Device>, compressed_writeback: bool) -> Self {
        Self {
            backing: Some(Backing { device, compressed_writeback, write_through: false, path: None }),
            ..self
        }
    }
}

/// A secondary algorithm with its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secondary {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Parameters of the algorithm.
    pub params: Params,
}

/// A backing device for pages evicted from memory. Its previous content is overwritten, and its
/// content is only meaningful to this family.
#[derive(Clone)]
pub struct Backing {
    /// Must be writable, not zoned, and at least one page large.
    pub device: Arc<dyn Device>,
    /// Write compressed objects tightly packed, and move pages back to memory when they are read.
    /// Otherwise use the kernel's layout: one uncompressed page per block, which stays there until
    /// the page is overwritten.
    pub compressed_writeback: bool,
    /// Free a page's memory only when it is durable on the device. Needed for a device that can
    /// lose completed, unflushed writes while this process lives, as the server of an export can.
    pub write_through: bool,
    /// Path of the device for display.
    pub path: Option<PathBuf>,
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { device: _, compressed_writeback, write_through, path } = self;
        f.debug_struct("Backing")
            .field("compressed_writeback", compressed_writeback)
            .field("write_through", write_through)
            .field("path", path)
            .finish_non_exhaustive()
    }
}

/// Settings of a fork.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ForkConfig {
    /// Size in bytes, rounded up to 512; by default the base's size. Bytes beyond the base read as
    /// zeroes.
    pub size: Option<u64>,
    /// Cap on the fork's own objects in bytes; 0 means no cap.
    pub mem_limit: u64,
    /// Guarantee: bytes of the family's `mem_limit` that other devices leave to the fork.
    pub mem_min: u64,
}

/// Errors of creating or changing a RAM disk.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The size is zero.
    #[error("disksize must be at least one byte")]
    Empty,
    /// The size is beyond what a slot table can address.
    #[error("disksize={0} bytes is beyond the largest disk, 256 TiB")]
    TooLarge(u64),
    /// A grow request is below the current size.
    #[error("disksize={wanted} bytes would shrink the disk, which has {present}; it can only grow")]
    Shrinks {
        /// Requested size.
        wanted: u64,
        /// Current size.
        present: u64,
    },
    /// The base is writable.
    #[error("is live; take a snapshot of it, and fork that")]
    Live,
    /// The base is zoned.
    #[error("is zoned; a base must not have zones")]
    ZonedBase,
    /// The operation needs a live device.
    #[error("is a snapshot, which does not change; fork it")]
    Snapshot,
    /// The fork chain is too deep.
    #[error("already has the maximum depth of a fork chain, 64 levels")]
    TooDeep,
    /// The cap is too small.
    #[error("mem_limit={0} bytes is below 64 KiB")]
    CapTooSmall(u64),
    /// The fork is smaller than its base.
    #[error("size={wanted} bytes is smaller than the base, which has {base} bytes")]
    SmallerThanBase {
        /// Requested size.
        wanted: u64,
        /// Size of the base.
        base: u64,
    },
    /// The guarantee is above the device's cap.
    #[error("mem_min={guarantee} bytes is above mem_limit={cap} bytes")]
    GuaranteeAboveCap {
        /// Requested guarantee in bytes.
        guarantee: u64,
        /// Cap of the device in bytes.
        cap: u64,
    },
    /// The family cannot give the guarantee.
    #[error("mem_min={wanted} bytes: the family's mem_limit has {left} left for guarantees")]
    Guarantee {
        /// Requested guarantee in bytes.
        wanted: u64,
        /// Bytes still available for guarantees; 0 if the family has no limit.
        left: u64,
    },
    /// Writes did not finish before the freeze timeout.
    #[error("{0}")]
    NotInTime(NotInTime),
    /// The algorithm's parameters are invalid.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// `auto_recompress` and `recomp_algorithm` both need priority 3.
    #[error("auto_recompress uses priority 3, where recomp_algorithm has {0}; free one of them")]
    PriorityTaken(Algorithm),
    /// The backing device is unsuitable.
    #[error("backing_dev: {0}")]
    BackingKind(String),
    /// A background thread cannot be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// The memory file of the pool cannot be created.
    #[error("cannot create a memory file: {0}")]
    MemoryFile(Errno),
    /// Memory for tables or streams is short.
    #[error("out of memory")]
    NoMemory,
}

impl From<device::Error> for SetupError {
    fn from(_: device::Error) -> Self {
        Self::NoMemory
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
pub(super) fn round_size(bytes: u64) -> Result<u64, SetupError> {
    round(bytes, PAGE)
}

/// Rounds a fork's size up to logical blocks.
pub(super) fn round_fork_size(bytes: u64) -> Result<u64, SetupError> {
    round(bytes, LOGICAL_BLOCK_BYTES.into())
}

fn round(bytes: u64, unit: u64) -> Result<u64, SetupError> {
    match bytes.checked_next_multiple_of(unit) {
        _ if bytes == 0 => Err(SetupError::Empty),
        Some(rounded) if rounded <= DISKSIZE_BYTES_MAX => Ok(rounded),
        _ => Err(SetupError::TooLarge(bytes)),
    }
}
