//! Errors of saving and restoring devices.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use super::format::VERSION;
use super::{BaseIdentity, DEPTH_MAX, DEVICES_MAX, NAME_BYTES_MAX};
use freestone_core::device;
use freestone_core::file_size_limit::WriteErrorText;
use freestone_ram::ram::SetupError;

/// Errors of saving devices. The old file, if any, is unchanged, except if the last step fails,
/// which makes the new file's name durable. Then the new file may already be in place, and a crash
/// may bring back the old one.
#[derive(Debug, Error)]
pub enum SaveError {
    /// The caller cancelled the save.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The list of devices to save is empty.
    #[error("there is nothing to save")]
    NoDevices,
    /// The name is empty or too long.
    #[error("\"{0}\" is not a valid name for a saved device; a name must have 1 to {NAME_BYTES_MAX} bytes")]
    Name(String),
    /// Two devices to save have the same name.
    #[error("two devices have the name {0}")]
    DuplicateName(String),
    /// The same device is given twice, under two names.
    #[error("{0} and {1} are the same device; save it once")]
    DuplicateDevice(String, String),
    /// There are more devices and snapshots than a file can hold.
    #[error("{0} devices and snapshots are too many; a file can hold {DEVICES_MAX}")]
    TooMany(usize),
    /// The chain of snapshots below the device is too deep.
    #[error("the chain of snapshots below {0} is deeper than {DEPTH_MAX}")]
    TooDeep(String),
    /// A snapshot of the device cannot be taken.
    #[error("{device}: {error}")]
    Setup {
        /// Name of the device.
        device: String,
        /// Reason of the failure.
        error: SetupError,
    },
    /// The base of a device cannot be read.
    #[error("the base of {device} cannot be read: {error}")]
    Base {
        /// Name of the device.
        device: String,
        /// Error of the read.
        error: device::Error,
    },
    /// A page of a device cannot be read.
    #[error("page {page} of {device} cannot be read: {error}")]
    Page {
        /// Name of the device.
        device: String,
        /// Number of the page (4096 bytes each).
        page: u64,
        /// Error of the read.
        error: device::Error,
    },
    /// The file cannot be written.
    #[error("cannot write {}: {}", path.display(), WriteErrorText(source))]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
}

/// Errors from restoring devices from a file.
#[derive(Debug, Error)]
pub enum RestoreError {
    /// The caller cancelled the restore. Devices already created are removed.
    #[error("the operation was cancelled")]
    Cancelled,
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the system call.
        source: io::Error,
    },
    /// The file was not saved by Freestone.
    #[error("{} was not saved by Freestone", .0.display())]
    Foreign(PathBuf),
    /// The format version of the file is newer than this program supports.
    #[error(
        "{} was saved by a newer Freestone, in version {version} of the format; this one reads up to {VERSION}",
        path.display()
    )]
    Newer {
        /// Path of the file.
        path: PathBuf,
        /// Format version of the file.
        version: u32,
    },
    /// The file is torn or truncated: the commit record at its end is missing.
    #[error("{} is incomplete: the commit record at its end is missing", .0.display())]
    Incomplete(PathBuf),
    /// The file is an increment of kept devices, which cannot be restored without the files before
    /// it.
    #[error("{} is an increment of kept devices and cannot be restored alone; use its directory", .0.display())]
    Increment(PathBuf),
    /// A checksum of the file is wrong, or a value in it is invalid.
    #[error("{} is damaged at byte {at}: {what}", path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Approximate position of the damage in bytes.
        at: u64,
        /// Description of the damage, for example a wrong checksum.
        what: &'static str,
    },
    /// A device needs a base, but none was given.
    #[error("{device} was made from {wanted}; give that base")]
    BaseMissing {
        /// Name of the device.
        device: String,
        /// Identity of the base from which the device was made.
        wanted: BaseIdentity,
    },
    /// None of the given bases is the one from which the device was made.
    #[error("{device} was made from {wanted}; the given base is {given}")]
    BaseMismatch {
        /// Name of the device.
        device: String,
        /// Identity of the base from which the device was made.
        wanted: BaseIdentity,
        /// Identity of the last given base that was checked.
        given: BaseIdentity,
    },
    /// A given base cannot be read.
    #[error("the given base cannot be read: {0}")]
    Base(device::Error),
    /// A device cannot be created.
    #[error("{device}: {error}")]
    Setup {
        /// Name of the device.
        device: String,
        /// Reason of the failure.
        error: SetupError,
    },
    /// A page of a device cannot be stored.
    #[error("page {page} of {device} cannot be stored: {error}")]
    Store {
        /// Name of the device.
        device: String,
        /// Number of the page (4096 bytes each).
        page: u64,
        /// Error of the write.
        error: device::Error,
    },
    /// Memory for the streams of a compression algorithm is short.
    #[error("out of memory")]
    NoMemory,
}
