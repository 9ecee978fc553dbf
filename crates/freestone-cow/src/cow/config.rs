//! Configuration of a snapshot, and the errors of opening one.

use std::fmt;
use std::io;
use std::str::FromStr;

use thiserror::Error;

use freestone_core::consistency_group::NotInTime;
use freestone_core::device;

/// Smallest chunk in bytes.
pub const CHUNK_BYTES_MIN: u64 = 4 << 10;
/// Largest chunk in bytes: the largest power of two of sectors whose bytes fit a signed 32-bit
/// number.
pub const CHUNK_BYTES_MAX: u64 = 1 << 30;

/// Kind of exception store. [`FromStr`] and [`Display`](fmt::Display) use dm's letters; parsing
/// accepts either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StoreKind {
    /// `P`: on the COW device. A write to the snapshot without room invalidates the snapshot.
    #[default]
    Persistent,
    /// `PO`: on the COW device. A write to the snapshot without room fails, and so do later writes;
    /// reads stay correct.
    PersistentOverflow,
    /// `N`: in memory only.
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

/// Configuration of a snapshot: the arguments of dm's `snapshot` target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "switches, each with its name")]
pub struct Config {
    /// Kind of exception store.
    pub kind: StoreKind,
    /// Unit of copies in bytes: a power of two from [`CHUNK_BYTES_MIN`] to [`CHUNK_BYTES_MAX`]. An
    /// existing store keeps the chunk size in its header. `None` uses that size, or
    /// [`CHUNK_BYTES_DEFAULT`](super::CHUNK_BYTES_DEFAULT) for a new store.
    pub chunk_bytes: Option<u64>,
    /// Lets a discard of the snapshot zero the exceptions of the chunks that it covers completely.
    pub discard_zeroes_cow: bool,
    /// Passes such a discard to the origin, too; needs `discard_zeroes_cow`.
    pub discard_passdown_origin: bool,
    /// Opens the store even if it missed writes of the origin, or if the origin or COW device does
    /// not outlive the process.
    pub force: bool,
    /// Accepts a persistent store although the origin or COW device does not outlive the process:
    /// the store must survive other events than the end of the process.
    pub may_end: bool,
}

/// Errors from opening or creating a snapshot.
#[derive(Debug, Error)]
pub enum SetupError {
    /// Unknown kind of store.
    #[error(
        "unknown exception store kind `{0}`: use P (persistent), PO (persistent, with overflow) or N (transient)"
    )]
    Kind(String),
    /// The chunk size is not a power of two in the supported range.
    #[error(
        "chunk size is {0} bytes; it must be a power of two from {CHUNK_BYTES_MIN} (4K) to {CHUNK_BYTES_MAX} (1G)"
    )]
    Chunk(u64),
    /// The chunk is not a multiple of a device's logical block.
    #[error(
        "chunk size is {chunk} bytes; it must be a multiple of {block}, the logical block of the {whose}"
    )]
    Block {
        /// Chunk size in bytes.
        chunk: u64,
        /// Logical block in bytes.
        block: u32,
        /// `origin` or `COW device`.
        whose: &'static str,
    },
    /// The COW device is read-only.
    #[error("the COW device is read-only")]
    ReadOnly,
    /// The origin or COW device is zoned.
    #[error("the {0} has zones; a snapshot needs a device that is written in any order")]
    Zoned(&'static str),
    /// The COW device has no room for metadata.
    #[error("the COW device has {size} bytes; with chunks of {chunk} bytes it must have {min} at least")]
    TooSmall {
        /// Size of the device in bytes.
        size: u64,
        /// Chunk size in bytes.
        chunk: u64,
        /// Smallest supported size in bytes.
        min: u64,
    },
    /// The COW device holds other data.
    #[error(
        "the COW device holds something that is not an exception store (it begins with {0:#010x}); zero its first \
         {CHUNK_BYTES_MIN} bytes to use it"
    )]
    Foreign(u32),
    /// The store has an unsupported version.
    #[error("the exception store has version {0}; only version 1 is understood")]
    Version(u32),
    /// The header contains an invalid chunk size.
    #[error(
        "the exception store's header has the chunk size {0} sectors; it must be a power of two from 8 to 2097152"
    )]
    HeaderChunk(u32),
    /// The header's valid flag is neither 0 nor 1.
    #[error("the exception store's header has the valid flag {0}; it must be 0 or 1")]
    HeaderValid(u32),
    /// The metadata is damaged.
    #[error("the exception store is damaged: {0}")]
    Damaged(Damage),
    /// The store has more exceptions than supported.
    #[error("the exception store has more than {0} exceptions")]
    TooMany(usize),
    /// The COW device is the origin.
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
    NotInTime(NotInTime),
    /// The merge mark contradicts the exceptions.
    #[error(
        "the exception store is marked for a merge, but its exceptions changed since; to use it as a snapshot, zero its \
         bytes 16 to 47"
    )]
    Mark,
    /// The merge of this store is complete, but the note beside the origin's data cannot be
    /// removed.
    #[error(
        "the merge of this store is complete, but the note beside the origin's data cannot be removed; see the log"
    )]
    NoteStays,
    /// The note beside the origin's data names the merge of another store.
    #[error(
        "the exception store is marked for a merge, but the origin is half merged from another store; open that one first"
    )]
    OtherMerge,
    /// A merge into the origin was interrupted, and its snapshot is not open.
    #[error("the origin is half merged; the snapshot whose merge is under way must be opened first")]
    HalfMerged,
    /// The origin was written or used since the store was closed.
    #[error(
        "the origin was written or used without this store since it was closed, so the snapshot would be a mixture of old \
         and new; force opens it anyway"
    )]
    Older,
    /// The device has more chunks than supported.
    #[error("the {whose} has {size} bytes; with chunks of {chunk} bytes at most {max} are supported")]
    TooLarge {
        /// `origin` or `COW device`.
        whose: &'static str,
        /// Size of the device in bytes.
        size: u64,
        /// Chunk size in bytes.
        chunk: u64,
        /// Largest supported size in bytes.
        max: u64,
    },
    /// The origin's size is not a multiple of the COW device's block.
    #[error("the origin has {size} bytes, not a multiple of {block}, the logical block of the COW device")]
    OddSize {
        /// Size of the origin in bytes.
        size: u64,
        /// Logical block of the COW device in bytes.
        block: u32,
    },
    /// A persistent store was requested on a device that does not outlive the process.
    #[error(
        "the {0} ends with the process, so a persistent store is pointless; use a transient one (N), or force it"
    )]
    Volatile(&'static str),
    /// An option requires another one.
    #[error("discard_passdown_origin needs discard_zeroes_cow")]
    Passdown,
    /// Creating the memory file for the table of exceptions failed.
    #[error("cannot create a memory file: {0}")]
    MemoryFile(#[source] io::Error),
    /// The machine is out of memory.
    #[error("out of memory")]
    NoMemory,
    /// Reading or writing the store's metadata failed.
    #[error("{what} the exception store failed: {source}")]
    Device {
        /// Operation: `reading` or `writing`.
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
        /// Chunk of the origin.
        old: u64,
        /// Number of chunks of the origin.
        chunks: u64,
    },
    /// An entry refers to a chunk beyond the COW device's end.
    #[error("entry {entry} leads to chunk {new} of a COW device of {chunks} chunks")]
    New {
        /// Number of the entry.
        entry: u64,
        /// Chunk of the COW device.
        new: u64,
        /// Number of whole chunks of the COW device.
        chunks: u64,
    },
    /// An entry refers to a chunk that holds metadata.
    #[error("entry {entry} leads to chunk {new} of the COW device, which holds metadata")]
    Metadata {
        /// Number of the entry.
        entry: u64,
        /// Chunk of the COW device.
        new: u64,
    },
    /// Two entries have the same chunk of the origin.
    #[error("chunk {0} of the origin is preserved twice")]
    OldTwice(u64),
    /// Two entries have the same chunk of the COW device.
    #[error("chunk {0} of the COW device is used twice")]
    NewTwice(u64),
    /// An entry is missing before others in one sector, which a torn write cannot cause.
    #[error("entry {entry} is missing, but later ones in the same sector are there")]
    Gap {
        /// Number of the missing entry.
        entry: u64,
    },
    /// All areas are full up to the end of the device.
    #[error("the list of exceptions does not end on the COW device")]
    Endless,
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
