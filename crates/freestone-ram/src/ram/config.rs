//! What a RAM disk is made of, and why it could not be.

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

/// What a RAM disk is made of.
#[derive(Debug, Clone, Default)]
pub struct Config {
    /// Bytes, rounded up to a page.
    pub disksize: u64,
    /// The algorithm that new pages are compressed with.
    pub comp_algorithm: Algorithm,
    /// Its parameters.
    pub algorithm_params: Params,
    /// Most bytes the pool may hold, rounded up to a page; 0 is no limit.
    pub mem_limit: u64,
    /// Secondary algorithms for recompression, at the priorities 1 to 3.
    pub recomp_algorithms: [Option<Secondary>; 3],
    /// Recompress by itself what nobody touched for so long, with zstd and a dictionary trained on
    /// the disk's own pages. It uses priority 3, which must be free.
    pub auto_recompress: Option<Duration>,
    /// Where pages go that memory has no room for.
    pub backing: Option<Backing>,
    /// What is done where there is no room for a write.
    pub when_full: WhenFull,
}

impl Config {
    /// The same, with pages that memory has no room for on this device.
    #[must_use]
    pub fn backed_by(self, device: Arc<dyn Device>, compressed_writeback: bool) -> Self {
        Self {
            backing: Some(Backing { device, compressed_writeback, write_through: false, path: None }),
            ..self
        }
    }
}

/// A secondary algorithm.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Secondary {
    /// The algorithm.
    pub algorithm: Algorithm,
    /// Its parameters.
    pub params: Params,
}

/// A device that takes pages out of memory. Its former content is lost; what it holds means nothing
/// to anybody else.
#[derive(Clone)]
pub struct Backing {
    /// Writable, without zones, at least a page.
    pub device: Arc<dyn Device>,
    /// Objects go out as they are, packed tightly, and pages that are read come back to memory.
    /// Without it the layout is the kernel's: one uncompressed page a block, which stays there
    /// until the page is overwritten.
    pub compressed_writeback: bool,
    /// Pages leave memory when they are durable on the device. For one that can lose what it has
    /// answered and not flushed while this process lives, as the server of an export can.
    pub write_through: bool,
    /// Where the device is, for people.
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

/// What a fork is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ForkConfig {
    /// Bytes, rounded up to a block of 512; the base's size where nothing is said. What lies beyond
    /// the base reads as zeroes.
    pub size: Option<u64>,
    /// Most bytes that its own objects may take; 0 is no cap.
    pub mem_limit: u64,
    /// Bytes of the family's `mem_limit` that others leave to it.
    pub mem_min: u64,
}

/// Why a RAM disk could not be made or changed.
#[derive(Debug, Error)]
pub enum SetupError {
    /// Zero.
    #[error("disksize must be at least one byte")]
    Empty,
    /// Beyond what a table of slots can address.
    #[error("disksize={0} bytes is beyond the largest disk, 256 TiB")]
    TooLarge(u64),
    /// Growth to less than there is.
    #[error("disksize={wanted} bytes would shrink the disk, which has {present}; it can only grow")]
    Shrinks {
        /// What was asked for.
        wanted: u64,
        /// What there is.
        present: u64,
    },
    /// A base that can be written.
    #[error("is live; take a snapshot of it, and fork that")]
    Live,
    /// A base with zones.
    #[error("has zones; a base has none")]
    ZonedBase,
    /// What only a live device can be asked for.
    #[error("is a snapshot, which does not change; fork it")]
    Snapshot,
    /// A fork of a snapshot of a fork, and so on.
    #[error("is the snapshot of a fork of a snapshot, and so on, 64 times over; that is as deep as it goes")]
    TooDeep,
    /// A cap that no page may fit under.
    #[error("mem_limit={0} bytes is below 64 KiB")]
    CapTooSmall(u64),
    /// A fork that would not show all of its base.
    #[error("size={wanted} bytes is less than the base has, {base}")]
    SmallerThanBase {
        /// What was asked for.
        wanted: u64,
        /// What the base has.
        base: u64,
    },
    /// A guarantee that the device could not use.
    #[error("mem_min={guarantee} bytes is above mem_limit={cap} bytes")]
    GuaranteeAboveCap {
        /// What was to be guaranteed.
        guarantee: u64,
        /// The most that the device may have.
        cap: u64,
    },
    /// A guarantee that the family cannot give.
    #[error("mem_min={wanted} bytes: the family's mem_limit has {left} left for guarantees")]
    Guarantee {
        /// What was to be guaranteed.
        wanted: u64,
        /// What can be; 0 also where the family has no limit.
        left: u64,
    },
    /// Writes do not end.
    #[error("{0}")]
    NotInTime(NotInTime),
    /// The algorithm's parameters.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// Both want priority 3.
    #[error("auto_recompress uses priority 3, where recomp_algorithm has {0}; free one of them")]
    PriorityTaken(Algorithm),
    /// The backing device is not of the kind that can be used.
    #[error("backing_dev: {0}")]
    BackingKind(String),
    /// A thread for background work could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
    /// The file that holds the memory could not be created.
    #[error("cannot create a memory file: {0}")]
    MemoryFile(Errno),
    /// No memory for tables or streams.
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

/// A disk's size in whole pages, as in zram, if there can be such a disk.
pub(super) fn round_size(bytes: u64) -> Result<u64, SetupError> {
    round(bytes, PAGE)
}

/// A fork's size, which is its base's to the block.
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
