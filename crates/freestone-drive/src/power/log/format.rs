//! On-disk format of a dm-log-writes log, version 1, as written by the kernel's device-mapper
//! target and read by `replay-log`.
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

/// Magic number of the log's header: "jsfwshr" in ASCII.
pub const MAGIC: u64 = 0x006a_7366_7773_6872;
/// Supported version of the format.
pub const VERSION: u64 = 1;

/// Entry flag: a flush, which makes all earlier entries durable.
pub const FLUSH: u64 = 1;
/// Entry flag: a write with FUA, which is durable when it completes.
pub const FUA: u64 = 2;
/// Entry flag: a discard. No data follows the entry.
pub const DISCARD: u64 = 4;
/// Entry flag: a mark, a named point of the log. `data_len` bytes of text follow the entry in its
/// sector.
pub const MARK: u64 = 8;
/// Entry flag: a metadata write of a file system. Accepted by the reader, but never written by the
/// writer.
pub const METADATA: u64 = 16;

/// Smallest supported sector size in bytes.
pub const SECTOR_MIN_BYTES: u32 = 512;
/// Largest supported sector size in bytes.
pub const SECTOR_MAX_BYTES: u32 = 4096;

/// Header at the start of the log.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Super {
    /// Magic number: [`MAGIC`].
    pub magic: U64,
    /// Version of the format: [`VERSION`].
    pub version: U64,
    /// Number of complete entries in the log.
    pub nr_entries: U64,
    /// Size of a sector in bytes.
    pub sectorsize: U32,
}

/// Header of an entry of the log.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    /// First sector of the entry's range on the device.
    pub sector: U64,
    /// Number of sectors of the entry's range.
    pub nr_sectors: U64,
    /// Entry flags: a combination of [`FLUSH`], [`FUA`], [`DISCARD`], [`MARK`] and [`METADATA`].
    pub flags: U64,
    /// Length of a mark's text in bytes; unused by other entries.
    pub data_len: U64,
}

/// Size of an entry's header in bytes.
pub const ENTRY_BYTES: usize = size_of::<Entry>();
const _: () = assert!(size_of::<Super>() == 28 && ENTRY_BYTES == 32);

/// Returns the maximum length of a mark's text in bytes. The text must fit the entry's sector, and
/// `replay-log` needs a NUL after it.
pub const fn mark_max_bytes(sector_bytes: u32) -> usize {
    sector_bytes as usize - ENTRY_BYTES - 1
}
