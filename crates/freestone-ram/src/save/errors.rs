//! Errors of saving and restoring devices.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::format::VERSION;
use super::{BaseIdentity, DEPTH_MAX, DEVICES_MAX, NAME_BYTES_MAX};
use crate::ram::SetupError;
use freestone_core::device;
use freestone_core::file_size_limit::Explained;

/// Errors of saving devices. The old file, if any, is unchanged. Only if the last step fails (which
/// makes the new file's name durable), the new file may be in place already, and a crash may bring
/// back the old one.
#[derive(Debug, Error)]
pub enum SaveError {
    /// The caller cancelled the save.
    #[error("the operation was cancelled")]
    Cancelled,
    /// No devices were given.
    #[error("there is nothing to save")]
    Nothing,
    /// The name is invalid.
    #[error("\"{0}\" is not a valid name for a saved device; a name must have 1 to {NAME_BYTES_MAX} bytes")]
    Name(String),
    /// Two devices have the same name.
    #[error("two devices have the name {0}")]
    TwiceNamed(String),
    /// A device has two names.
    #[error("{0} and {1} are the same device; save it once")]
    TwiceGiven(String, String),
    /// There are more devices than a file can hold.
    #[error("{0} devices and snapshots are too many; a file can hold {DEVICES_MAX}")]
    TooMany(usize),
    /// The chain of snapshots is too deep.
    #[error("the chain of snapshots below {0} is deeper than {DEPTH_MAX}")]
    TooDeep(String),
    /// The snapshot cannot be taken.
    #[error("{device}: {error}")]
    Setup {
        /// The device.
        device: String,
        /// The reason.
        error: SetupError,
    },
    /// A base cannot be read.
    #[error("the base of {device} cannot be read: {error}")]
    Base {
        /// The device.
        device: String,
        /// The reason.
        error: device::Error,
    },
    /// A page cannot be read.
    #[error("page {page} of {device} cannot be read: {error}")]
    Page {
        /// The device.
        device: String,
        /// Number of the page, of 4096 bytes.
        page: u64,
        /// The reason.
        error: device::Error,
    },
    /// The file cannot be written.
    #[error("cannot write {}: {}", path.display(), Explained(source))]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Errors of restoring devices.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The caller cancelled the restore. Devices already created are removed.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file is of another kind.
    #[error("{} was not saved by Freestone", .0.display())]
    Foreign(PathBuf),
    /// The format version is newer than this program.
    #[error(
        "{} was saved by a newer Freestone, in version {version} of the format; this one reads up to {VERSION}",
        path.display()
    )]
    Newer {
        /// The file.
        path: PathBuf,
        /// Format version of the file.
        version: u32,
    },
    /// The file is torn or truncated.
    #[error("{} is incomplete: the commit record at its end is missing", .0.display())]
    Incomplete(PathBuf),
    /// The file is an increment, which needs the files before it.
    #[error("{} is an increment of kept devices and cannot be restored alone; use its directory", .0.display())]
    Increment(PathBuf),
    /// A checksum is wrong, or a value is invalid.
    #[error("{} is damaged at byte {at}: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Approximate position in bytes.
        at: u64,
        /// Description of the damage.
        what: &'static str,
    },
    /// No base was given.
    #[error("{device} was made from {wanted}; give that base")]
    BaseMissing {
        /// The device.
        device: String,
        /// Identity of the base it was made from.
        wanted: BaseIdentity,
    },
    /// None of the given bases has the right identity.
    #[error("{device} was made from {wanted}; the given base is {given}")]
    BaseDiffers {
        /// The device.
        device: String,
        /// Identity of the base it was made from.
        wanted: BaseIdentity,
        /// Identity of the given (or the last given) base.
        given: BaseIdentity,
    },
    /// A given base cannot be read.
    #[error("the given base cannot be read: {0}")]
    Base(device::Error),
    /// A device cannot be created.
    #[error("{device}: {error}")]
    Setup {
        /// The device.
        device: String,
        /// The reason.
        error: SetupError,
    },
    /// A page cannot be stored.
    #[error("page {page} of {device} cannot be stored: {error}")]
    Store {
        /// The device.
        device: String,
        /// Number of the page, of 4096 bytes.
        page: u64,
        /// The reason.
        error: device::Error,
    },
    /// Memory for an algorithm's streams is short.
    #[error("out of memory")]
    NoMemory,
}
