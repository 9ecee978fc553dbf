//! How a snapshot is set up, and why that can fail.

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

/// Where exceptions are remembered. [`FromStr`] and [`Display`](fmt::Display) speak dm's letters,
/// in either case.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum StoreKind {
    /// `P`: on the COW device. No room for a write to the snapshot invalidates it.
    #[default]
    Persistent,
    /// `PO`: on the COW device. No room for a write to the snapshot fails that write and later
    /// ones; reads stay correct.
    PersistentOverflow,
    /// `N`: in memory only.
    Transient,
}

impl StoreKind {
    /// Whether the snapshot outlives the process.
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

/// What a snapshot is asked to be: the arguments of dm's `snapshot` target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[expect(clippy::struct_excessive_bools, reason = "switches, each with its name")]
pub struct Config {
    /// The exception store.
    pub kind: StoreKind,
    /// Unit of copies in bytes: a power of two from [`CHUNK_BYTES_MIN`] to [`CHUNK_BYTES_MAX`].
    /// `None`: what the store's header says, or [`CHUNK_BYTES_DEFAULT`](super::CHUNK_BYTES_DEFAULT)
    /// for a new one. The header's always wins.
    pub chunk_bytes: Option<u64>,
    /// A discard of the snapshot zeroes the chunks that it covers whole and that have exceptions.
    pub discard_zeroes_cow: bool,
    /// Such a discard also goes to the origin; needs `discard_zeroes_cow`.
    pub discard_passdown_origin: bool,
    /// Do it although the origin or the COW device ends with the process, which makes a persistent
    /// store pointless, or although the origin was used without the store since.
    pub force: bool,
    /// Do it although the origin or the COW device ends with the process: the store is to outlive
    /// something else than that.
    pub may_end: bool,
}

/// Why a snapshot could not be made.
#[derive(Debug, Error)]
pub enum SetupError {
    /// No such store.
    #[error(
        "`{0}` is no exception store; it must be P (persistent), PO (persistent, with overflow) or N (transient)"
    )]
    Kind(String),
    /// The chunk that was asked for is impossible.
    #[error(
        "chunk size is {0} bytes; it must be a power of two from {CHUNK_BYTES_MIN} (4K) to {CHUNK_BYTES_MAX} (1G)"
    )]
    Chunk(u64),
    /// The chunk does not consist of whole blocks of both devices.
    #[error(
        "chunk size is {chunk} bytes; it must be a multiple of {block}, the logical block of the {whose}"
    )]
    Block {
        /// The chunk.
        chunk: u64,
        /// The logical block.
        block: u32,
        /// `origin` or `COW device`.
        whose: &'static str,
    },
    /// The COW device cannot be written.
    #[error("the COW device is read-only")]
    ReadOnly,
    /// A zoned device.
    #[error("the {0} has zones; a snapshot needs a device that is written in any order")]
    Zoned(&'static str),
    /// The COW device has no room for the metadata.
    #[error("the COW device has {size} bytes; with chunks of {chunk} bytes it must have {min} at least")]
    TooSmall {
        /// Its size.
        size: u64,
        /// The chunk.
        chunk: u64,
        /// Least size.
        min: u64,
    },
    /// Something else is on the COW device.
    #[error(
        "the COW device holds something that is no exception store (it begins with {0:#010x}); zero its first {CHUNK_BYTES_MIN} \
         bytes to use it"
    )]
    Foreign(u32),
    /// A newer store.
    #[error("the exception store has version {0}; only version 1 is understood")]
    Version(u32),
    /// The header makes no sense.
    #[error(
        "the exception store's header has the chunk size {0} sectors; it must be a power of two from 8 to 2097152"
    )]
    HeaderChunk(u32),
    /// The header is neither valid nor invalid.
    #[error("the exception store's header has the valid flag {0}; it must be 0 or 1")]
    HeaderValid(u32),
    /// The metadata makes no sense.
    #[error("the exception store is damaged: {0}")]
    Damaged(Damage),
    /// The metadata is larger than is supported.
    #[error("the exception store has more than {0} exceptions")]
    TooMany(usize),
    /// The COW device and the origin are one.
    #[error("the COW device is the origin itself")]
    SameDevice,
    /// Another snapshot of the origin uses the COW device.
    #[error("the COW device is in use by another snapshot of this origin")]
    InUse,
    /// Another snapshot is being merged into the origin.
    #[error("a snapshot is being merged into the origin; a new one can be taken when that is finished")]
    Merging,
    /// The origin's writes do not end.
    #[error("{0}")]
    NotInTime(NotInTime),
    /// The mark of a merge that does not fit the exceptions.
    #[error(
        "the exception store says that it is being merged, but it was used otherwise since; to use it as a snapshot, zero its \
         bytes 16 to 47"
    )]
    Mark,
    /// The note beside the origin's data that names a merge of this store, which is complete, cannot
    /// be removed.
    #[error("the merge of its store is complete, but the origin's note of it cannot be removed; see the log")]
    NoteStays,
    /// By the note beside the origin's data another store is being merged into it.
    #[error("is being merged, but what is under way in the origin is the merge of another store")]
    OtherMerge,
    /// A merge into the origin is under way, and the snapshot that is merged is not open.
    #[error("the origin is half merged; the snapshot whose merge is under way must be opened first")]
    HalfMerged,
    /// The origin was written or used since the store was closed.
    #[error(
        "its origin was written or used without it since it was closed, so the snapshot would be a mixture of old and new; force \
         opens it all the same"
    )]
    Older,
    /// More chunks than are supported.
    #[error("the {whose} has {size} bytes; with chunks of {chunk} bytes at most {max} are supported")]
    TooLarge {
        /// `origin` or `COW device`.
        whose: &'static str,
        /// Its size.
        size: u64,
        /// The chunk.
        chunk: u64,
        /// Largest size.
        max: u64,
    },
    /// The origin is not a whole number of the COW device's blocks.
    #[error("the origin has {size} bytes, not a multiple of {block}, the logical block of the COW device")]
    OddSize {
        /// Size of the origin.
        size: u64,
        /// The logical block.
        block: u32,
    },
    /// A persistent snapshot of what does not persist.
    #[error(
        "the {0} ends with the process, so a persistent store is pointless; use a transient one (N), or force it"
    )]
    Volatile(&'static str),
    /// An option that asks for another.
    #[error("discard_passdown_origin needs discard_zeroes_cow")]
    Passdown,
    /// The file that holds the tables could not be created.
    #[error("cannot create a memory file: {0}")]
    MemoryFile(#[source] io::Error),
    /// The machine has no memory left.
    #[error("out of memory")]
    NoMemory,
    /// Metadata could not be read or written.
    #[error("{what} the exception store failed: {source}")]
    Device {
        /// What was done.
        what: &'static str,
        /// The device's answer.
        source: device::Error,
    },
    /// A thread could not be started.
    #[error("a thread for the snapshot could not be started: {0}")]
    Thread(#[source] io::Error),
}

/// What is wrong with an exception store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Damage {
    /// An entry copies what the origin does not have.
    #[error("entry {entry} preserves chunk {old} of an origin of {chunks} chunks")]
    Old {
        /// Number of the entry, from 0 through all areas.
        entry: u64,
        /// Chunk of the origin.
        old: u64,
        /// Chunks of the origin.
        chunks: u64,
    },
    /// An entry leads beyond the COW device.
    #[error("entry {entry} leads to chunk {new} of a COW device of {chunks} chunks")]
    New {
        /// Number of the entry.
        entry: u64,
        /// Chunk of the COW device.
        new: u64,
        /// Whole chunks of the COW device.
        chunks: u64,
    },
    /// An entry leads into the metadata.
    #[error("entry {entry} leads to chunk {new} of the COW device, which holds metadata")]
    Metadata {
        /// Number of the entry.
        entry: u64,
        /// Chunk of the COW device.
        new: u64,
    },
    /// Two entries for one chunk of the origin.
    #[error("chunk {0} of the origin is preserved twice")]
    OldTwice(u64),
    /// Two entries share a place.
    #[error("chunk {0} of the COW device is used twice")]
    NewTwice(u64),
    /// An entry is missing where a torn write cannot have lost it.
    #[error("entry {entry} is missing, but later ones in the same sector are there")]
    Gap {
        /// Number of the missing entry.
        entry: u64,
    },
    /// All areas are full, and the device ends.
    #[error("the list of exceptions does not end on the COW device")]
    Endless,
}

#[cfg(test)]
mod tests {
    use super::StoreKind;

    #[test]
    fn kinds_are_dm_letters_in_either_case() {
        for (letters, kind) in
            [("P", StoreKind::Persistent), ("PO", StoreKind::PersistentOverflow), ("N", StoreKind::Transient)]
        {
            assert_eq!(letters.parse::<StoreKind>().unwrap(), kind);
            assert_eq!(letters.to_lowercase().parse::<StoreKind>().unwrap(), kind);
            assert_eq!(kind.to_string(), letters);
        }
        for letters in ["", "O", "NO", "PP", "P "] {
            let error = letters.parse::<StoreKind>().unwrap_err().to_string();
            assert!(error.starts_with(&format!("`{letters}` is no exception store")), "{error}");
        }
    }
}
