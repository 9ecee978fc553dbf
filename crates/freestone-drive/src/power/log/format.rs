//! On-disk format of dm-log-writes' log, version 1, as written by the kernel's target and read by
//! `replay-log`.
//!
//! | bytes | content |
//! |---|---|
//! | 0.. | [`Super`], padded to a sector |
//! | then, for each entry | [`Entry`], followed by the text of a mark, padded to a sector |
//! | | its data: `nr_sectors` sectors; none for a discard, a flush or a mark |
//!
//! A sector is the logical block of the recorded device, and the unit of `sector` and `nr_sectors`.
//! All numbers are little-endian.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Magic number: "jsfwshr".
pub const MAGIC: u64 = 0x006a_7366_7773_6872;
/// Supported version.
pub const VERSION: u64 = 1;

/// Flag of a flush: everything before it is durable.
pub const FLUSH: u64 = 1;
/// Flag of a durable write.
pub const FUA: u64 = 2;
/// Flag of a discard: no data follows.
pub const DISCARD: u64 = 4;
/// Flag of a mark: `data_len` bytes of text follow the entry in its sector.
pub const MARK: u64 = 8;
/// Flag of a file system's metadata write. Accepted, but never written here.
pub const METADATA: u64 = 16;

/// Smallest sector in bytes.
pub const SECTOR_MIN_BYTES: u32 = 512;
/// Largest sector in bytes.
pub const SECTOR_MAX_BYTES: u32 = 4096;

/// Header of the log.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Super {
    /// [`MAGIC`].
    pub magic: U64,
    /// [`VERSION`].
    pub version: U64,
    /// Number of complete entries.
    pub nr_entries: U64,
    /// Size of a sector in bytes.
    pub sectorsize: U32,
}

/// Header of an entry.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// First sector on the device.
    pub sector: U64,
    /// Number of sectors.
    pub nr_sectors: U64,
    /// Flags such as [`FLUSH`].
    pub flags: U64,
    /// Length of a mark's text in bytes.
    pub data_len: U64,
}

/// Size of an entry's header in bytes.
pub const ENTRY_BYTES: usize = size_of::<Entry>();
const _: () = assert!(size_of::<Super>() == 28 && ENTRY_BYTES == 32);

/// Returns the length of the longest mark. The mark lies in the entry's sector, and `replay-log`
/// needs a NUL after it.
pub const fn mark_max_bytes(sector_bytes: u32) -> usize {
    sector_bytes as usize - ENTRY_BYTES - 1
}
