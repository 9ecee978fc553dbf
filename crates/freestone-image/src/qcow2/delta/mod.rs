//! What a fork or snapshot holds itself: shown, saved as a qcow2 overlay on its base, applied to
//! another fork of that base.
//!
//! A delta is an ordinary qcow2 image of version 3 whose backing file is the base: `qemu-img
//! check`, `map`, `compare`, `rebase` and `convert` take it, and so does [`Image`](super::Image).
//! Its clusters have 64 KiB. A cluster of which a part was changed is saved whole, filled up from
//! the device; one that is all zeroes is a mark without data.
//!
//! These calls wait for disks and devices. They see the device as it is while they run: of a fork
//! that is in use save a snapshot, over its base (`Ram::over_base`), which is of one moment.

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

use runs::{Runs, each_extent};

/// Why a delta could not be shown, saved or applied.
#[derive(Debug, Error)]
pub enum DeltaError {
    /// It was asked to stop. What was there is still there.
    #[error("it was cancelled")]
    Cancelled,
    /// The device has no changes to show.
    #[error("the device is neither a fork nor a snapshot, so there is nothing that it holds over a base")]
    NoChanges,
    /// The device's size cannot be that of an overlay.
    #[error("the device has {size} bytes; a delta can have at most {most}")]
    DeviceSize {
        /// Its size.
        size: u64,
        /// The most.
        most: u64,
    },
    /// The device could not be read.
    #[error("the device cannot be read at byte {at}: {error}")]
    Read {
        /// Where.
        at: u64,
        /// What it answered.
        error: device::Error,
    },
    /// The base cannot be named as a backing file.
    #[error("{}: cannot be the base of a delta: {reason}", path.display())]
    Base {
        /// The base.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The delta cannot be put there. What was there is still there.
    #[error("{}: cannot be written: {}", path.display(), Explained(source))]
    Write {
        /// The delta.
        path: PathBuf,
        /// What the system said, or why it was not even tried.
        source: io::Error,
    },
    /// The delta cannot be opened.
    #[error(transparent)]
    Open(#[from] SetupError),
    /// The file is an image, but no delta for this device. Nothing was written.
    #[error("{}: is not a delta for this device: {reason}", path.display())]
    Foreign {
        /// The file.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// The delta is damaged. Nothing was written.
    #[error("{}: is damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What was found.
        reason: String,
    },
    /// The device cannot be written at all.
    #[error("the device {0}, so no delta can be applied to it")]
    NotWritable(&'static str),
    /// It failed half-way.
    #[error("byte {at} of the delta could not be applied: {error}; the device holds what came before it")]
    Apply {
        /// Where on the disk.
        at: u64,
        /// What the device or the delta's disk answered.
        error: device::Error,
    },
}

/// A run of bytes that a device holds itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Changed {
    /// First byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// It is known to read as zeroes.
    pub zero: bool,
}

/// All changes of a device.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Summary {
    /// Runs of changed bytes, each as long as possible.
    pub extents: u64,
    /// Changed bytes.
    pub bytes: u64,
    /// Those of them that are known to read as zeroes.
    pub zero_bytes: u64,
}

/// Calls `row` for what the device holds itself, in order, until it returns false; adds up what was
/// given.
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
        each_extent(device, run.start, run.end, &mut |extent| {
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
