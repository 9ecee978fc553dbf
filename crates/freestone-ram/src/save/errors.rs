//! Why devices could not be saved, or restored.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::format::VERSION;
use super::{BaseIdentity, DEPTH_MAX, DEVICES_MAX, NAME_BYTES_MAX};
use crate::ram::SetupError;
use freestone_core::device;
use freestone_core::file_size_limit::Explained;

/// Why devices could not be saved. The old file, if there was one, is as it was. Only if the last step failed,
/// which makes the new file's name durable, the new file may be in its place already, and a crash may bring
/// the old one back.
#[derive(Debug, Error)]
pub enum SaveError {
    /// It was asked to stop.
    #[error("it was cancelled")]
    Cancelled,
    /// No device.
    #[error("there is nothing to save")]
    Nothing,
    /// A name that no device can have.
    #[error("\"{0}\" is no name for a saved device; it must have 1 to {NAME_BYTES_MAX} bytes")]
    Name(String),
    /// One name for two.
    #[error("two devices are to be saved as {0}")]
    TwiceNamed(String),
    /// One device with two names.
    #[error("{0} and {1} are one device; save it once")]
    TwiceGiven(String, String),
    /// A file cannot hold so many.
    #[error("{0} devices and snapshots are to be saved; a file holds {DEVICES_MAX}")]
    TooMany(usize),
    /// Snapshots below snapshots.
    #[error("more than {DEPTH_MAX} snapshots lie one over the other below {0}")]
    TooDeep(String),
    /// The snapshot could not be taken.
    #[error("{device}: {error}")]
    Setup {
        /// Which device.
        device: String,
        /// Why.
        error: SetupError,
    },
    /// A base could not be read.
    #[error("the base of {device} cannot be read: {error}")]
    Base {
        /// The device.
        device: String,
        /// Why.
        error: device::Error,
    },
    /// A spilled page could not be read.
    #[error("page {page} of {device} cannot be read: {error}")]
    Page {
        /// The device.
        device: String,
        /// Which page of 4096 bytes.
        page: u64,
        /// Why.
        error: device::Error,
    },
    /// The file could not be written.
    #[error("cannot write {}: {}", path.display(), Explained(source))]
    Write {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Why nothing was restored.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// It was asked to stop. What was made is gone again.
    #[error("it was cancelled")]
    Cancelled,
    /// The file could not be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Another kind of file.
    #[error("{} was not saved by Freestone", .0.display())]
    Foreign(PathBuf),
    /// A format that is not known yet.
    #[error(
        "{} was saved by a newer Freestone, in version {version} of the format; this one reads up to {VERSION}",
        path.display()
    )]
    Newer {
        /// Which.
        path: PathBuf,
        /// The version of its format.
        version: u32,
    },
    /// Torn or cut.
    #[error("{} is not complete: it does not end with its commit record", .0.display())]
    Incomplete(PathBuf),
    /// It has only what changed since another file.
    #[error("{} is an increment of kept devices; give the directory to what kept them", .0.display())]
    Increment(PathBuf),
    /// A checksum, or what no save writes.
    #[error("{} is damaged at byte {at}: {what}", path.display())]
    Damaged {
        /// Which.
        path: PathBuf,
        /// Where, about.
        at: u64,
        /// What is wrong there.
        what: &'static str,
    },
    /// No base was given.
    #[error("{device} was made from {wanted}; give that base")]
    BaseMissing {
        /// The device.
        device: String,
        /// What it was made from.
        wanted: BaseIdentity,
    },
    /// None of the given bases is the right one.
    #[error("{device} was made from {wanted}; the given base is {given}")]
    BaseDiffers {
        /// The device.
        device: String,
        /// What it was made from.
        wanted: BaseIdentity,
        /// What was given, or the last of it.
        given: BaseIdentity,
    },
    /// A given base could not be read.
    #[error("the given base cannot be read: {0}")]
    Base(device::Error),
    /// A device could not be made.
    #[error("{device}: {error}")]
    Setup {
        /// Which.
        device: String,
        /// Why.
        error: SetupError,
    },
    /// A page could not be stored.
    #[error("page {page} of {device} cannot be stored: {error}")]
    Store {
        /// The device.
        device: String,
        /// Which page of 4096 bytes.
        page: u64,
        /// Why.
        error: device::Error,
    },
    /// Streams for an algorithm could not be made.
    #[error("out of memory")]
    NoMemory,
}
