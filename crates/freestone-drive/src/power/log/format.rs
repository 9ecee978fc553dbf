//! The bytes of dm-log-writes' log, version 1, as the kernel's target writes and `replay-log` reads
//! them.
//!
//! | bytes | what |
//! |---|---|
//! | 0.. | [`Super`], padded to a sector |
//! | then, for each entry | [`Entry`], for a mark followed by its text, padded to a sector |
//! | | its data: `nr_sectors` sectors, none for a discard, a flush and a mark |
//!
//! A sector is the logical block of the recorded device; `sector` and `nr_sectors` count those. All
//! numbers are little-endian.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// "jsfwshr".
pub const MAGIC: u64 = 0x006a_7366_7773_6872;
/// The only version there is.
pub const VERSION: u64 = 1;

/// A flush: what stands before is durable.
pub const FLUSH: u64 = 1;
/// This write is durable.
pub const FUA: u64 = 2;
/// A discard: no data follows.
pub const DISCARD: u64 = 4;
/// A mark: `data_len` bytes of text follow the entry in its sector.
pub const MARK: u64 = 8;
/// A write of a file system's metadata. Read, never written here.
pub const METADATA: u64 = 16;

/// Sectors a log may have, in bytes.
pub const SECTOR_MIN_BYTES: u32 = 512;
/// As above.
pub const SECTOR_MAX_BYTES: u32 = 4096;

/// Head of the log.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Super {
    /// [`MAGIC`].
    pub magic: U64,
    /// [`VERSION`].
    pub version: U64,
    /// Entries that are whole.
    pub nr_entries: U64,
    /// Bytes of a sector.
    pub sectorsize: U32,
}

/// Head of an entry.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// First sector on the device.
    pub sector: U64,
    /// Sectors.
    pub nr_sectors: U64,
    /// [`FLUSH`] and so on.
    pub flags: U64,
    /// Bytes of a mark's text.
    pub data_len: U64,
}

/// Bytes of an entry's head.
pub const ENTRY_BYTES: usize = size_of::<Entry>();
const _: () = assert!(size_of::<Super>() == 28 && ENTRY_BYTES == 32);

/// The longest mark: it lies in the entry's sector, and `replay-log` wants a NUL behind it.
pub const fn mark_max_bytes(sector_bytes: u32) -> usize {
    sector_bytes as usize - ENTRY_BYTES - 1
}
