//! Errors of qcow2 images.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use freestone_core::device;

use crate::file;

/// Errors from opening an image with its backing chain.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The image, or a file that it refers to, cannot be opened.
    #[error(transparent)]
    File(#[from] file::SetupError),
    /// The image is invalid or not supported.
    #[error("{}: {fault}", path.display())]
    Image {
        /// Path of the image or backing file.
        path: PathBuf,
        /// Reason why the image is refused.
        fault: Fault,
    },
    /// A part of the file cannot be read.
    #[error("{}: cannot read the {what}: {error}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Part of the file, for example "header".
        what: &'static str,
        /// Error of the read.
        error: device::Error,
    },
    /// The threads that continue requests after disk reads could not be started.
    #[error("cannot start the threads for qcow2 images: {0}")]
    Threads(io::Error),
}

/// Reason why an image is refused.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// The magic number at the start of the file is missing.
    #[error("is not a qcow2 image")]
    NotQcow2,
    /// The qcow2 version of the image is not supported.
    #[error("has qcow2 version {0}; versions 2 and 3 are supported")]
    Version(u32),
    /// The image is encrypted, which is not supported.
    #[error("is encrypted ({0}), which is not supported; decrypt it with qemu-img convert")]
    Encrypted(&'static str),
    /// The image requires incompatible features that are not supported.
    #[error("needs features that are not supported: {0}")]
    Features(String),
    /// The compression type of the image is not supported.
    #[error("has compression type {0}; 0 (deflate) and 1 (zstd) are supported")]
    Compression(u8),
    /// The metadata of the image is inconsistent.
    #[error("is corrupt: {0}")]
    Corrupt(String),
    /// The disk in the image is smaller than a sector (512 bytes).
    #[error("has a disk size of less than one sector")]
    Empty,
    /// The disk in the image is larger than a device can be.
    #[error("has a disk size of {0} bytes, which is too large")]
    TooLarge(u64),
    /// The name of a backing file or data file does not denote a local file.
    #[error(
        "names {name:?} as its {what}; only paths of local files are supported, and absolute ones in json:"
    )]
    Name {
        /// Which file the name is for: backing file or data file.
        what: &'static str,
        /// The refused name; invalid UTF-8 is replaced.
        name: String,
    },
    /// The image declares a format of its backing file that is not supported.
    #[error("has a backing file of format {0:?}; raw and qcow2 are supported")]
    BackingFormat(String),
    /// The backing chain has too many images.
    #[error(
        "exceeds the limit of {0} images in a backing chain; check for a cycle, or shorten the chain with qemu-img rebase"
    )]
    TooDeep(usize),
    /// The image refers to another file although it was opened as standalone.
    #[error("names {name:?} as its {what}, but was opened as an image that stands alone")]
    NotStandalone {
        /// Which file the image refers to: backing file or data file.
        what: &'static str,
        /// The name of that file; invalid UTF-8 is replaced.
        name: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum Damage {
    #[error("L1 entry {index} is {entry:#x}, which is not the offset of an L2 table")]
    L1Entry { index: u64, entry: u64 },
    #[error("the L2 table at byte {0} lies beyond the end of the file")]
    TableBehindEnd(u64),
    #[error("L2 entry {0:#x} is not valid")]
    L2Entry(u64),
    #[error("L2 entry {entry:#x} with the subclusters {subclusters:#x} is not valid")]
    Subclusters { entry: u64, subclusters: u64 },
    #[error("the cluster at byte {0} lies in the header or beyond the end of the file")]
    Place(u64),
    #[error("the compressed cluster cannot be decompressed")]
    Compressed,
}
