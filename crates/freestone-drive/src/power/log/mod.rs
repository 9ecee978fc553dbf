//! Log of all writes in dm-log-writes' on-disk format: `replay-log` accepts logs recorded here, and
//! logs recorded by the kernel can be replayed here.
//!
//! [`Reader`] iterates over the entries. [`replay`] brings a device to its state at an entry,
//! [`replay_cut`] with a power cut. [`Reader::epochs`] returns the entries between two flushes.

pub mod format;
mod reader;
mod replay;
mod writer;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// Text of the mark that a reset writes: the device has its content at the start of the recording
/// again. A replay to a later point starts there.
pub const BEGINNING: &str = "freestone: back to the beginning";

pub use reader::{Entry, Epoch, Reader};
pub(in crate::power) use replay::{APART_MAX_BLOCKS, Plan};
pub use replay::{CUT_BLOCKS_MAX, CutPoint, replay, replay_cut};
pub use writer::Writer;

use freestone_core::device;

/// Errors from writing, reading or replaying a log.
#[derive(Debug, Error)]
pub enum Error {
    /// The file failed.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// Path of the log.
        path: PathBuf,
        /// Error from the system.
        error: io::Error,
    },
    /// A new log was requested at an existing path.
    #[error("{path} already exists: a recording starts with the device's present content and cannot continue an old log", path = path.display())]
    Exists {
        /// Path of the log.
        path: PathBuf,
    },
    /// The file is not a log.
    #[error("{path} is not a dm-log-writes log: {why}", path = path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Problem in the header.
        why: String,
    },
    /// The log is damaged.
    #[error("{path}: entry {number} {why}", path = path.display(), number = entry + 1)]
    Damaged {
        /// Path of the log.
        path: PathBuf,
        /// Number of the entry, from 0. The message counts from 1, like points of a log.
        entry: u64,
        /// Problem in the entry.
        why: &'static str,
    },
    /// The log has fewer entries.
    #[error("the log has {entries} entries, but entry {asked} was requested")]
    NoEntry {
        /// Requested number of entries.
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
    /// The replayed device failed.
    #[error("replaying entry {number} failed: {error}", number = entry + 1)]
    Device {
        /// Number of the entry, from 0. The message counts from 1, like points of a log.
        entry: u64,
        /// Error from the device.
        error: device::Error,
    },
}
