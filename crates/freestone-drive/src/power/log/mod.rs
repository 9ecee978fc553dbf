//! Log of all writes in the on-disk format of dm-log-writes. The kernel's `replay-log` tool accepts
//! these logs, and logs recorded by the kernel can be replayed with this module.
//!
//! [`Reader`] iterates over the entries. [`replay`] brings a device to the state at an entry, and
//! [`replay_cut`] to a state after a power cut there. [`Reader::epochs`] splits the entries at
//! flushes.

pub mod format;
mod reader;
mod replay;
mod writer;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Text of the mark that a reset writes to the log. At this mark the device has the content from
/// the start of the recording again, so a replay to a later point starts there.
pub const RESET_MARK: &str = "freestone: back to the beginning";

pub use reader::{Entry, Epoch, Reader};
pub(in crate::power) use replay::{APART_MAX_BLOCKS, Plan};
pub use replay::{CUT_BLOCKS_MAX, CutPoint, replay, replay_cut};
pub use writer::Writer;

use freestone_core::device;

/// Errors from writing, reading or replaying a log.
#[derive(Debug, Error)]
pub enum Error {
    /// Opening, reading or writing the file failed.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// Path of the log file.
        path: PathBuf,
        /// Error from the operating system.
        error: io::Error,
    },
    /// A file already exists at the path of a new log.
    #[error("{path} already exists: a recording starts with the device's present content and cannot continue an old log", path = path.display())]
    Exists {
        /// Path of the log file.
        path: PathBuf,
    },
    /// The file is not a log in a supported format.
    #[error("{path} is not a dm-log-writes log: {why}", path = path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Problem found in the header.
        why: String,
    },
    /// An entry of the log is damaged.
    #[error("{path}: entry {number} {why}", path = path.display(), number = entry + 1)]
    Damaged {
        /// Path of the log file.
        path: PathBuf,
        /// Index of the entry, from 0. The message counts from 1.
        entry: u64,
        /// Problem found in the entry.
        why: &'static str,
    },
    /// The log has fewer entries than requested.
    #[error("the log has {entries} entries, but entry {asked} was requested")]
    NoEntry {
        /// Number of entries that were requested.
        asked: u64,
        /// Number of entries in the log.
        entries: u64,
    },
    /// The log has no mark with this text.
    #[error("the log has no mark {0:?}")]
    NoMark(String),
    /// More than [`CUT_BLOCKS_MAX`] blocks are unflushed at the point.
    #[error("more than {CUT_BLOCKS_MAX} blocks were written since the last flush")]
    TooManyUnflushed,
    /// A request to the device to which the log is replayed failed.
    #[error("replaying entry {number} failed: {error}", number = entry + 1)]
    Device {
        /// Index of the entry, from 0. The message counts from 1.
        entry: u64,
        /// Error from the device.
        error: device::Error,
    },
}
