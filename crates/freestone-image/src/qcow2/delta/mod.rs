//! Deltas: the changes of a fork or snapshot, listed, saved as a qcow2 overlay on its base, or
//! applied to another fork of that base.
//!
//! A delta is an ordinary qcow2 version 3 image whose backing file is the base. `qemu-img check`,
//! `map`, `compare`, `rebase` and `convert` accept it, and so does [`Image`](super::Image).
//! Clusters have 64 KiB. A partly changed cluster is saved whole, with the rest read from the
//! device. A cluster of zeroes is a zero cluster without data.
//!
//! All calls block. They see the device's current content. To save a fork that is in use, save a
//! snapshot of it over its base (`Ram::over_base`), which is consistent.

mod apply;
mod runs;
mod save;
mod writer;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use freestone_core::device::{self, Device, ExtentKind};
use freestone_core::file_size_limit::Explained;

use super::error::SetupError;

pub use apply::{Applied, apply, apply_unless};
pub use save::{Options, Saved, save, save_with};

use runs::{Runs, for_each_extent};

/// Errors from listing, saving or applying a delta.
#[derive(Debug, Error)]
pub enum DeltaError {
    /// The operation was cancelled. A file that existed before is unchanged.
    #[error("it was cancelled")]
    Cancelled,
    /// The device has no changes to show.
    #[error("the device is neither a fork nor a snapshot, so it has no changes over a base")]
    NoChanges,
    /// The device is larger than an overlay can be.
    #[error("the device has {size} bytes; a delta can have at most {most}")]
    DeviceSize {
        /// Size in bytes.
        size: u64,
        /// Largest size in bytes.
        most: u64,
    },
    /// The device could not be read.
    #[error("the device cannot be read at byte {at}: {error}")]
    Read {
        /// Byte of the device.
        at: u64,
        /// Device error.
        error: device::Error,
    },
    /// The base cannot be named as a backing file.
    #[error("{}: cannot be the base of a delta: {reason}", path.display())]
    Base {
        /// The base.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// The delta cannot be written. A file that existed before is unchanged.
    #[error("{}: cannot be written: {}", path.display(), Explained(source))]
    Write {
        /// The delta.
        path: PathBuf,
        /// System error, or the reason why nothing was tried.
        source: io::Error,
    },
    /// The delta cannot be opened.
    #[error(transparent)]
    Open(#[from] SetupError),
    /// The file is an image, but not a delta for this device. Nothing was written.
    #[error("{}: is not a delta for this device: {reason}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// The delta is damaged. Nothing was written.
    #[error("{}: is damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Damage.
        reason: String,
    },
    /// The device cannot be written.
    #[error("the device {0}, so no delta can be applied to it")]
    NotWritable(&'static str),
    /// Applying failed half-way.
    #[error("byte {at} of the delta could not be applied: {error}; the bytes before it are applied")]
    Apply {
        /// Byte of the disk.
        at: u64,
        /// Error of the device or of the delta's file.
        error: device::Error,
    },
}

/// A run of bytes that a device has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// The bytes are known to read as zeroes.
    pub zero: bool,
}

/// Totals of a device's changes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Number of runs of changed bytes, each as long as possible.
    pub extents: u64,
    /// Changed bytes.
    pub bytes: u64,
    /// Changed bytes that are known to read as zeroes.
    pub zero_bytes: u64,
}

/// Calls `row` for each changed run of a device, in order, until it returns false. Returns the
/// totals of the rows passed to it.
///
/// # Errors
/// [`DeltaError::NoChanges`], [`DeltaError::Read`].
pub fn show(
    device: &dyn Device,
    row: &mut dyn FnMut(Changed) -> bool,
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
            more = row(Changed { offset: extent.offset, len: extent.len, zero });
            more
        })?;
        if !more {
            break;
        }
    }
    Ok(summary)
}
