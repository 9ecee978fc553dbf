//! Why an image is refused.

use std::io;
use std::path::PathBuf;

use thiserror::Error;

use freestone_core::device;

use crate::file;

/// Why an image could not be opened.
#[derive(Debug, Error)]
pub enum SetupError {
    /// The file itself, or one that the image names, cannot be opened.
    #[error(transparent)]
    File(#[from] file::SetupError),
    /// What is in the file is refused.
    #[error("{}: {fault}", path.display())]
    Image {
        /// The image, or one below it.
        path: PathBuf,
        /// What is wrong.
        fault: Fault,
    },
    /// The disk failed.
    #[error("{}: its {what} cannot be read: {error}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The part of it.
        what: &'static str,
        /// What the disk answered.
        error: device::Error,
    },
    /// The threads that carry on requests could not be started.
    #[error("cannot start the threads for qcow2 images: {0}")]
    Threads(io::Error),
}

/// What is wrong with an image.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum Fault {
    /// No magic number.
    #[error("is not a qcow2 image")]
    NotQcow2,
    /// A version that is not known.
    #[error("is of qcow2 version {0}; versions 2 and 3 are supported")]
    Version(u32),
    /// Content that would need a key.
    #[error("is encrypted ({0}), which is not supported; decrypt it with qemu-img convert")]
    Encrypted(&'static str),
    /// Features without which the image cannot be understood.
    #[error("needs features that are not supported: {0}")]
    Features(String),
    /// A compression that is not known.
    #[error("has compression type {0}; 0 (deflate) and 1 (zstd) are supported")]
    Compression(u8),
    /// Its metadata contradicts itself.
    #[error("is corrupt: {0}")]
    Corrupt(String),
    /// A disk without bytes.
    #[error("holds a disk of less than one sector")]
    Empty,
    /// Larger than a device can be.
    #[error("holds a disk of {0} bytes, which is more than is supported")]
    TooLarge(u64),
    /// A name that is not that of a local file.
    #[error(
        "names {name:?} as its {what}; only paths of local files are supported, and absolute ones in json:"
    )]
    Name {
        /// Backing file or data file.
        what: &'static str,
        /// The name, as far as it is text.
        name: String,
    },
    /// A backing format that is not read here.
    #[error("says that its backing file has the format {0:?}; raw and qcow2 are supported")]
    BackingFormat(String),
    /// More images in a chain than are opened.
    #[error(
        "is the end of a chain of more than {0} images; a backing file may name itself, or run qemu-img rebase"
    )]
    TooDeep(usize),
    /// Other files are named, and were not to be opened.
    #[error("names {name:?} as its {what}, and only an image that stands alone was asked for")]
    NotAlone {
        /// Backing file or data file.
        what: &'static str,
        /// The name.
        name: String,
    },
}

/// A part of an image that cannot be what its writer meant. Reads of that part fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub(super) enum Damage {
    #[error("L1 entry {index} is {entry:#x}, which is not the place of an L2 table")]
    L1Entry { index: u64, entry: u64 },
    #[error("the L2 table at byte {0} lies behind the end of the file")]
    TableBehindEnd(u64),
    #[error("L2 entry {0:#x} is not valid")]
    L2Entry(u64),
    #[error("L2 entry {entry:#x} with the subclusters {subclusters:#x} is not valid")]
    Subclusters { entry: u64, subclusters: u64 },
    #[error("the cluster at byte {0} lies in the header or behind the end of the file")]
    Place(u64),
    #[error("the compressed cluster cannot be unpacked")]
    Compressed,
}
