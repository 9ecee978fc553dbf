//! Configuration of a snapshot, and the errors of opening one.

use std::fmt;
use std::io;
use std::str::FromStr;

use thiserror::Error;

use freestone_core::consistency_group::FreezeTimeout;
use freestone_core::device;

/// Smallest chunk size in bytes.
pub const CHUNK_BYTES_MIN: u64 = 4 << 10;
/// Largest chunk size in bytes: the largest power of two that fits into a signed 32-bit number.
pub const CHUNK_BYTES_MAX: u64 = 1 << 30;

/// Kind of exception store. [`FromStr`] and [`Display`](fmt::Display) use the letters of
/// dm-snapshot; parsing accepts either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StoreKind {
    /// `P`: exceptions are stored on the COW device. A write to the snapshot for which it has no
    /// space invalidates the snapshot.
    #[default]
    Persistent,
    /// `PO`: exceptions are stored on the COW device. A write to the snapshot for which it has no
    /// space fails, and so do later writes; reads stay correct.
    PersistentOverflow,
    /// `N`: the table of exceptions is in memory only.
    Transient,
}

impl StoreKind {
    /// Returns true if the snapshot outlives the process.
    pub const fn is_persistent(self) -> bool {
        matches!(self, Self::Persistent | Self::PersistentOverflow)
    }
}

impl fmt::Display for StoreKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Persistent => "P",
            Self::PersistentOverflow => "PO",
            Self::Transient => "N",
        })
    }
}

impl FromStr for StoreKind {
    type Err = SetupError;

    fn from_str(letters: &str) -> Result<Self, SetupError> {
        match letters.to_ascii_uppercase().as_str() {
            "P" => Ok(Self::Persistent),
            "PO" => Ok(Self::PersistentOverflow),
            "N" => Ok(Self::Transient),
            _ => Err(SetupError::Kind(letters.to_owned())),
        }
    }
}

/// Configuration of a snapshot: the arguments of device mapper's `snapshot` target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "switches, each with its name")]
pub struct Config {
    /// Kind of exception store.
    pub kind: StoreKind,
    /// Chunk size, the unit of copies, in bytes: a power of two from [`CHUNK_BYTES_MIN`] to
    /// [`CHUNK_BYTES_MAX`]. An existing exception store has its chunk size in the header. `None`
    /// uses that size, or [`CHUNK_BYTES_DEFAULT`](super::CHUNK_BYTES_DEFAULT) for a new store.
    pub chunk_bytes: Option<u64>,
    /// If true, a discard on the snapshot zeroes the exceptions of the chunks that the discard
    /// covers completely.
    pub discard_zeroes_cow: bool,
    /// If true, a discard on the snapshot is also passed to the origin; needs `discard_zeroes_cow`.
    pub discard_passdown_origin: bool,
    /// Opens the exception store even if it missed writes of the origin, or if the origin or COW
    /// device does not outlive the process.
    pub force: bool,
    /// Accepts a persistent store although the origin or COW device does not outlive the process,
    /// for stores that need to survive only other events.
    pub may_end: bool,
}

/// Errors from opening or creating a snapshot.
#[derive(Debug, Error)]
pub enum SetupError {
    /// Unknown kind of exception store. Contains the given text.
    #[error(
        "unknown exception store kind `{0}`: use P (persistent), PO (persistent, with overflow) or N (transient)"
    )]
    Kind(String),
    /// The chunk size is not a power of two in the supported range. Contains the size in bytes.
    #[error(
        "chunk size is {0} bytes; it must be a power of two from {CHUNK_BYTES_MIN} (4K) to {CHUNK_BYTES_MAX} (1G)"
    )]
    Chunk(u64),
    /// The chunk size is not a multiple of a device's logical block size.
    #[error(
        "chunk size is {chunk} bytes; it must be a multiple of {block}, the logical block of the {whose}"
    )]
    Block {
        /// Chunk size in bytes.
        chunk: u64,
        /// Logical block size in bytes.
        block: u32,
        /// The device: `origin` or `COW device`.
        whose: &'static str,
    },
    /// The COW device is read-only, so exceptions cannot be stored.
    #[error("the COW device is read-only")]
    ReadOnly,
    /// The origin or COW device is zoned. Contains The device: `origin` or `COW device`.
    #[error("the {0} has zones; a snapshot needs a device that is written in any order")]
    Zoned(&'static str),
    /// The COW device is too small for the metadata.
    #[error("the COW device has {size} bytes; with chunks of {chunk} bytes it must have {min} at least")]
    TooSmall {
        /// Size of the device in bytes.
        size: u64,
        /// Chunk size in bytes.
        chunk: u64,
        /// Smallest supported size in bytes.
        min: u64,
    },
    /// The COW device contains other data than an exception store. Contains its first four bytes.
    #[error(
        "the COW device holds something that is not an exception store (it begins with {0:#010x}); zero its first \
         {CHUNK_BYTES_MIN} bytes to use it"
    )]
    Foreign(u32),
    /// The exception store has an unsupported version.
    #[error("the exception store has version {0}; only version 1 is understood")]
    Version(u32),
    /// The header of the exception store contains an invalid chunk size, in sectors.
    #[error(
        "the exception store's header has the chunk size {0} sectors; it must be a power of two from 8 to 2097152"
    )]
    HeaderChunk(u32),
    /// The valid flag in the header of the exception store is neither 0 nor 1.
    #[error("the exception store's header has the valid flag {0}; it must be 0 or 1")]
    HeaderValid(u32),
    /// The metadata of the exception store is damaged.
    #[error("the exception store is damaged: {0}")]
    Damaged(Damage),
    /// The exception store has more exceptions than supported. Contains the maximum.
    #[error("the exception store has more than {0} exceptions")]
    TooMany(usize),
    /// The COW device and the origin are the same device.
    #[error("the COW device is the origin itself")]
    SameDevice,
    /// Another snapshot of this origin uses the COW device.
    #[error("the COW device is in use by another snapshot of this origin")]
    InUse,
    /// Another snapshot is being merged into the origin.
    #[error("a snapshot is being merged into the origin; take a new one when the merge has finished")]
    Merging,
    /// In-flight writes to the origin did not complete in time.
    #[error("{0}")]
    FreezeTimeout(FreezeTimeout),
    /// The merge mark in the header contradicts the list of exceptions.
    #[error(
        "the exception store is marked for a merge, but its exceptions changed since; to use it as a snapshot, zero its \
         bytes 16 to 47"
    )]
    Mark,
    /// The merge of this store is complete, but the note about the merge, beside the origin's data,
    /// cannot be removed.
    #[error(
        "the merge of this store is complete, but the note beside the origin's data cannot be removed; see the log"
    )]
    MergeNoteRemains,
    /// The note beside the origin's data names the merge of another store.
    #[error(
        "the exception store is marked for a merge, but the origin is half merged from another store; open that one first"
    )]
    OtherMerge,
    /// A merge into the origin was interrupted, and its snapshot is not open.
    #[error("the origin is half merged; the snapshot whose merge is under way must be opened first")]
    HalfMerged,
    /// The origin was written or used without the exception store since the store was closed.
    #[error(
        "the origin was written or used without this store since it was closed, so the snapshot would be a mixture of old \
         and new; force opens it anyway"
    )]
    OriginChanged,
    /// The device has more chunks than supported.
    #[error("the {whose} has {size} bytes; with chunks of {chunk} bytes at most {max} are supported")]
    TooLarge {
        /// The device: `origin` or `COW device`.
        whose: &'static str,
        /// Size of the device in bytes.
        size: u64,
        /// Chunk size in bytes.
        chunk: u64,
        /// Largest supported size in bytes.
        max: u64,
    },
    /// The origin's size is not a multiple of the COW device's logical block size.
    #[error("the origin has {size} bytes, not a multiple of {block}, the logical block of the COW device")]
    OddSize {
        /// Size of the origin in bytes.
        size: u64,
        /// Logical block size of the COW device in bytes.
        block: u32,
    },
    /// A persistent store was requested on a device that does not outlive the process. Contains The
    /// device: `origin` or `COW device`.
    #[error(
        "the {0} ends with the process, so a persistent store is pointless; use a transient one (N), or force it"
    )]
    Volatile(&'static str),
    /// `discard_passdown_origin` is set without `discard_zeroes_cow`.
    #[error("discard_passdown_origin needs discard_zeroes_cow")]
    Passdown,
    /// Creating the memory file (memfd) for the table of exceptions failed.
    #[error("cannot create a memory file: {0}")]
    MemoryFile(#[source] io::Error),
    /// The machine is out of memory.
    #[error("out of memory")]
    NoMemory,
    /// Reading or writing the metadata of the exception store failed.
    #[error("{what} the exception store failed: {source}")]
    Device {
        /// Operation that failed: `reading` or `writing`.
        what: &'static str,
        /// Error from the device.
        source: device::Error,
    },
    /// A thread could not be started.
    #[error("a thread for the snapshot could not be started: {0}")]
    Thread(#[source] io::Error),
}

/// Damage found in an exception store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Damage {
    /// An entry refers to a chunk beyond the origin's end.
    #[error("entry {entry} preserves chunk {old} of an origin of {chunks} chunks")]
    Old {
        /// Number of the entry, counted across all areas.
        entry: u64,
        /// Number of the origin's chunk.
        old: u64,
        /// Number of chunks of the origin.
        chunks: u64,
    },
    /// An entry refers to a chunk beyond the COW device's end.
    #[error("entry {entry} leads to chunk {new} of a COW device of {chunks} chunks")]
    New {
        /// Number of the entry, counted across all areas.
        entry: u64,
        /// Number of the COW device's chunk.
        new: u64,
        /// Number of whole chunks of the COW device.
        chunks: u64,
    },
    /// An entry refers to a chunk that holds metadata.
    #[error("entry {entry} leads to chunk {new} of the COW device, which holds metadata")]
    Metadata {
        /// Number of the entry, counted across all areas.
        entry: u64,
        /// Number of the COW device's chunk.
        new: u64,
    },
    /// Two entries refer to the same chunk of the origin.
    #[error("chunk {0} of the origin is preserved twice")]
    DuplicateOld(u64),
    /// Two entries refer to the same chunk of the COW device.
    #[error("chunk {0} of the COW device is used twice")]
    DuplicateNew(u64),
    /// An entry is missing before other entries in one sector. A torn write cannot cause this,
    /// because sectors are written atomically.
    #[error("entry {entry} is missing, but later ones in the same sector are there")]
    Gap {
        /// Number of the missing entry, counted across all areas.
        entry: u64,
    },
    /// All metadata areas are full up to the end of the COW device, so the list of exceptions has
    /// no end.
    #[error("the list of exceptions does not end on the COW device")]
    NoEnd,
}

#[cfg(test)]
mod tests {
    use super::StoreKind;

    #[test]
    fn store_kind_parses_dm_letters_in_either_case() {
        for (letters, kind) in
            [("P", StoreKind::Persistent), ("PO", StoreKind::PersistentOverflow), ("N", StoreKind::Transient)]
        {
            assert_eq!(letters.parse::<StoreKind>().unwrap(), kind);
            assert_eq!(letters.to_lowercase().parse::<StoreKind>().unwrap(), kind);
            assert_eq!(kind.to_string(), letters);
        }
        for letters in ["", "O", "NO", "PP", "P "] {
            let error = letters.parse::<StoreKind>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("unknown exception store kind `{letters}`")), "{error}");
        }
    }
}
