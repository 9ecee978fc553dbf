//! The log of everything that was written: dm-log-writes' own on-disk format, so that its
//! `replay-log` works on what is recorded here and what the kernel recorded can be replayed here.
//!
//! [`Reader`] gives the entries, [`replay`] brings a device to the state at any of them,
//! [`Reader::epochs`] gives the points between two flushes, and [`replay_cut`] cuts the power at
//! one.

pub mod format;
mod reader;
mod replay;
mod writer;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

/// The mark of a device that was set back to what it was when the recording began. A replay to a
/// later point starts there.
pub const BEGINNING: &str = "freestone: back to the beginning";

pub use reader::{Entry, Epoch, Reader};
pub(in crate::power) use replay::{APART_MAX_BLOCKS, Plan};
pub use replay::{CUT_BLOCKS_MAX, CutPoint, replay, replay_cut};
pub use writer::Writer;

use freestone_core::device;

/// Why a log cannot be written, read or replayed.
#[derive(Debug, Error)]
pub enum Error {
    /// The file.
    #[error("{path}: {error}", path = path.display())]
    File {
        /// Its path.
        path: PathBuf,
        /// What the system says.
        error: io::Error,
    },
    /// A new log was to be written there.
    #[error("{path} exists: a recording begins with what is on the device now and cannot go on with an old log", path = path.display())]
    Exists {
        /// Its path.
        path: PathBuf,
    },
    /// It is no log.
    #[error("{path} is no log of dm-log-writes: {why}", path = path.display())]
    Foreign {
        /// Its path.
        path: PathBuf,
        /// What is wrong with its head.
        why: String,
    },
    /// Its content contradicts itself.
    #[error("{path}: entry {entry} {why}", path = path.display())]
    Damaged {
        /// Its path.
        path: PathBuf,
        /// Number of the entry.
        entry: u64,
        /// What is wrong with it.
        why: &'static str,
    },
    /// There are not so many entries.
    #[error("the log has {entries} entries, {asked} are asked for")]
    NoEntry {
        /// What was asked for.
        asked: u64,
        /// How many there are.
        entries: u64,
    },
    /// There is no such mark.
    #[error("the log has no mark {0:?}")]
    NoMark(String),
    /// More blocks are unflushed at the point than [`CUT_BLOCKS_MAX`].
    #[error("more than {CUT_BLOCKS_MAX} blocks were written since the last flush")]
    TooManyUnflushed,
    /// The device that is replayed on.
    #[error("while entry {entry} was replayed: {error}")]
    Device {
        /// Number of the entry.
        entry: u64,
        /// What the device says.
        error: device::Error,
    },
}
