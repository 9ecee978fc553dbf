//! Deltas: the changes of a fork or snapshot. A delta can be listed, saved as a qcow2 overlay on
//! the base, or applied to another fork of that base.
//!
//! A saved delta is an ordinary qcow2 version 3 image whose backing file is the base. `qemu-img
//! check`, `map`, `compare`, `rebase` and `convert` accept it, and so does [`Image`](super::Image).
//! Clusters have 64 KiB. A partly changed cluster is saved whole, with the rest read from the
//! device. A cluster of zeroes is a zero cluster without data.
//!
//! All functions block, and read the current content of the device. To save a fork that is in use,
//! save a snapshot of the fork over its base (`Ram::over_base`), which is consistent.

mod apply;
mod runs;
mod save;
mod writer;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use freestone_core::device::{self, Device, ExtentKind};
use freestone_core::file_size_limit::WriteErrorText;

use super::error::SetupError;

pub use apply::{ApplyReport, apply, apply_cancellable};
pub use save::{Options, SaveReport, save, save_with};

use runs::{Runs, for_each_extent};

/// Errors from listing, saving or applying the changes of a device.
#[derive(Debug, Error)]
pub enum DeltaError {
    /// The operation was cancelled. An existing file is unchanged.
    #[error("it was cancelled")]
    Cancelled,
    /// The device does not have a base, so it has no changes to list or save.
    #[error("the device is neither a fork nor a snapshot, so it has no changes over a base")]
    NoChanges,
    /// The device is larger than the disk of an overlay can be.
    #[error("the device has {size} bytes; a delta can have at most {most}")]
    DeviceSize {
        /// Size of the device in bytes.
        size: u64,
        /// Largest possible size of the device in bytes.
        most: u64,
    },
    /// The device cannot be read.
    #[error("the device cannot be read at byte {at}: {error}")]
    Read {
        /// Byte of the device at which the read failed.
        at: u64,
        /// Error of the device.
        error: device::Error,
    },
    /// The overlay cannot refer to the base as its backing file.
    #[error("{}: cannot be the base of a delta: {reason}", path.display())]
    Base {
        /// Path of the base.
        path: PathBuf,
        /// Reason, for example that the name is too long.
        reason: String,
    },
    /// The overlay cannot be written. An existing file is unchanged.
    #[error("{}: cannot be written: {}", path.display(), WriteErrorText(source))]
    Write {
        /// Path of the overlay.
        path: PathBuf,
        /// Error of the system call, or the reason why no write was tried.
        source: io::Error,
    },
    /// The overlay, or the qcow2 base, cannot be opened.
    #[error(transparent)]
    Open(#[from] SetupError),
    /// The file is an image, but not an overlay for this device. The device is unchanged.
    #[error("{}: is not a delta for this device: {reason}", path.display())]
    Foreign {
        /// Path of the file.
        path: PathBuf,
        /// Reason, for example a different base.
        reason: String,
    },
    /// The overlay is damaged. The device is unchanged.
    #[error("{}: is damaged: {reason}", path.display())]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Description of the damage.
        reason: String,
    },
    /// The device cannot be written. Contains the reason.
    #[error("the device {0}, so no delta can be applied to it")]
    NotWritable(&'static str),
    /// Applying failed half-way: the device is partly changed.
    #[error("byte {at} of the delta could not be applied: {error}; the bytes before it are applied")]
    Apply {
        /// Byte of the disk at which applying failed.
        at: u64,
        /// Error of the device or of a read of the overlay.
        error: device::Error,
    },
}

/// A range of bytes that a device has changed compared with its base.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChangedRange {
    /// First byte of the range.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
    /// True if the bytes are known to read as zeroes.
    pub zero: bool,
}

/// Totals of a device's changes compared with its base.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of contiguous changed ranges, each as long as possible.
    pub extents: u64,
    /// Number of changed bytes.
    pub bytes: u64,
    /// Number of changed bytes that are known to read as zeroes.
    pub zero_bytes: u64,
}

/// Calls `row` for each changed range of a device, in ascending order, until `row` returns false.
/// Returns the totals of the ranges passed to `row`.
///
/// # Errors
/// [`DeltaError::NoChanges`] if the device does not have a base; [`DeltaError::Read`].
pub fn for_each_change(
    device: &dyn Device,
    row: &mut dyn FnMut(ChangedRange) -> bool,
) -> std::result::Result<Summary, DeltaError> {
    let mut summary = Summary::default();
    let mut more = true;
    let mut runs = Runs::of(device)?;
    while let Some(run) = runs.next()? {
        summary.extents += 1;
        for_each_extent(device, run.start, run.end, &mut |extent| {
            let zero = extent.kind != ExtentKind::Data;
            summary.bytes += extent.len;
            summary.zero_bytes += if zero { extent.len } else { 0 };
            more = row(ChangedRange { offset: extent.offset, len: extent.len, zero });
            more
        })?;
        if !more {
            break;
        }
    }
    Ok(summary)
}
