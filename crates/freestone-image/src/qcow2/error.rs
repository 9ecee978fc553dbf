//! Errors for qcow2 images.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use freestone_core::device;

use crate::file;

/// Errors from opening an image.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The image, or a file that it names, cannot be opened.
    #[error(transparent)]
    File(#[from] file::SetupError),
    /// The content of the file is not acceptable.
    #[error("{}: {fault}", path.display())]
    Image {
        /// The image, or a backing file.
        path: PathBuf,
        /// Fault.
        fault: Fault,
    },
    /// Reading the file failed.
    #[error("{}: cannot read the {what}: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Part of the file.
        what: &'static str,
        /// Device error.
        error: device::Error,
    },
    /// The threads that continue requests could not be started.
    #[error("cannot start the threads for qcow2 images: {0}")]
    Threads(io::Error),
}

/// Fault of an image.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// The magic number is missing.
    #[error("is not a qcow2 image")]
    NotQcow2,
    /// The version is not supported.
    #[error("has qcow2 version {0}; versions 2 and 3 are supported")]
    Version(u32),
    /// The image is encrypted.
    #[error("is encrypted ({0}), which is not supported; decrypt it with qemu-img convert")]
    Encrypted(&'static str),
    /// The image needs unknown incompatible features.
    #[error("needs features that are not supported: {0}")]
    Features(String),
    /// The compression type is not supported.
    #[error("has compression type {0}; 0 (deflate) and 1 (zstd) are supported")]
    Compression(u8),
    /// The metadata is inconsistent.
    #[error("is corrupt: {0}")]
    Corrupt(String),
    /// The disk is smaller than a sector.
    #[error("has a disk size of less than one sector")]
    Empty,
    /// The disk is larger than a device can be.
    #[error("has a disk size of {0} bytes, which is too large")]
    TooLarge(u64),
    /// A name does not denote a local file.
    #[error(
        "names {name:?} as its {what}; only paths of local files are supported, and absolute ones in json:"
    )]
    Name {
        /// Backing file or data file.
        what: &'static str,
        /// The name; invalid UTF-8 is replaced.
        name: String,
    },
    /// The format of the backing file is not supported.
    #[error("has a backing file of format {0:?}; raw and qcow2 are supported")]
    BackingFormat(String),
    /// The backing chain has too many images.
    #[error(
        "exceeds the limit of {0} images in a backing chain; check for a cycle, or shorten the chain with qemu-img rebase"
    )]
    TooDeep(usize),
    /// The image names another file although it was opened as standalone.
    #[error("names {name:?} as its {what}, but was opened as an image that stands alone")]
    NotAlone {
        /// Backing file or data file.
        what: &'static str,
        /// The name.
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
