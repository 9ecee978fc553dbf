//! The file's structures. All integers are little-endian; the map with all offsets is in
//! `docs/save-format.md`.
//!
//! ```text
//! header | bases, nodes, names | block | block | ... | end block
//! ```
//!
//! Every checksum is an XXH3 of 64 bits over what follows it; those behind the header are seeded
//! with the file's salt, so that what an older file left in the same place on the disk is no block
//! of this one.

use std::mem::offset_of;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};
use zerocopy::byteorder::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::codec::{Algorithm, DICTIONARY_BYTES_MAX};

/// The first bytes of every file.
pub const MAGIC: [u8; 16] = *b"\x89Freestone save\n";
/// The newest format that this program reads.
pub const VERSION: u32 = VERSION_LOST;
/// The format of files of kept devices that have lost pages. Other files of kept devices are written
/// in the format before, which older programs read.
pub const VERSION_LOST: u32 = 4;
/// The format of files of kept devices.
pub const VERSION_KEPT: u32 = 3;
/// The format in which a device can end within a page, which it writes where one does.
pub const VERSION_PARTS: u32 = 2;
/// The format in which devices have whole pages, which it writes where they have, so that older
/// programs read it.
pub const VERSION_WHOLE_PAGES: u32 = 1;
/// What sizes of devices are multiples of since version 2, in bytes.
pub const SIZE_UNIT_BYTES: u64 = 512;
/// The first bytes of every block, behind its checksum.
pub const BLOCK_MAGIC: [u8; 4] = *b"FSbk";

/// A block is written when it has so many bytes of pages.
pub const BLOCK_TARGET_BYTES: usize = 1 << 20;
/// Largest payload of a block that is read.
pub const PAYLOAD_BYTES_MAX: usize = 2 << 20;
const _: () = assert!(BLOCK_TARGET_BYTES + 2 * freestone_core::PAGE_BYTES < PAYLOAD_BYTES_MAX);
const _: () = assert!(size_of::<AlgorithmRecord>() + (DICTIONARY_BYTES_MAX as usize) < PAYLOAD_BYTES_MAX);
/// Most algorithms in a file.
pub const ALGORITHMS_MAX: usize = 64;
/// Most pages of one pattern in one record.
pub const RUN_PAGES_MAX: u64 = u16::MAX as u64;

/// At byte 0.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    pub magic: [u8; 16],
    pub version: U32,
    pub reserved: U32,
    /// Another number in every file.
    pub salt: U64,
    /// Bytes of bases, nodes and names.
    pub contents_bytes: U32,
    pub bases: U32,
    pub nodes: U32,
    pub reserved2: U32,
    /// Of the contents.
    pub contents_checksum: U64,
    /// Of all fields before it; not seeded.
    pub checksum: U64,
}

impl Header {
    /// What the checksum should be.
    pub fn sum(&self) -> u64 {
        xxh3_64_with_seed(&self.as_bytes()[..offset_of!(Self, checksum)], 0)
    }
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BaseRecord {
    pub size: U64,
    /// 1: sampled, 2: whole.
    pub check: u8,
    pub reserved: [u8; 7],
    pub hash: [u8; 16],
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NodeRecord {
    pub size: U64,
    /// Number of the base or node that it lies over or comes after.
    pub below: U32,
    /// 0: nothing, 1: a base, 2: a node; 3: it comes after a node.
    pub over: u8,
    /// 0: live, 1: a snapshot.
    pub snapshot: u8,
    /// 0: it has no name.
    pub name_bytes: U16,
    /// Of new pages; as in [`AlgorithmRecord`].
    pub algorithm: u8,
    pub reserved: [u8; 3],
    pub level: I32,
    pub reserved2: U64,
}

/// First of the contents since version 3: the file's place among those of kept devices.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct KeptRecord {
    /// Counts up with each whole file.
    pub generation: U64,
    /// 0: whole. Else the number of the increment.
    pub number: U32,
    pub reserved: U32,
    /// The salt of the file that an increment continues.
    pub continues: U64,
    /// When the devices had this content, since 1970.
    pub seconds: U64,
    pub nanos: U32,
    pub reserved2: [u8; 12],
}

/// What a node lies over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Over {
    Nothing,
    Base(u32),
    Node(u32),
    /// It is what became of a snapshot's origin later: over the same, and with pages that differ
    /// since then only.
    After(u32),
}

impl Over {
    /// As a [`NodeRecord`] has it: `over` and `below`.
    pub fn fields(self) -> (u8, u32) {
        match self {
            Self::Nothing => (0, 0),
            Self::Base(base) => (1, base),
            Self::Node(below) => (2, below),
            Self::After(before) => (3, before),
        }
    }
}

/// Before every payload.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BlockHeader {
    /// Of the rest of the header and of the payload.
    pub checksum: U64,
    pub magic: [u8; 4],
    /// 1: an algorithm, 2: pages, 3: the end.
    pub kind: U32,
    /// Counts up from 0.
    pub number: U64,
    /// Whose pages; number of the algorithm.
    pub node: U32,
    /// How many records.
    pub records: U32,
    pub payload_bytes: U32,
    /// Since version 3, of pages: of the header from the magic to here and of the records.
    pub head_checksum: U32,
}

pub mod kind {
    pub const ALGORITHM: u32 = 1;
    pub const PAGES: u32 = 2;
    pub const END: u32 = 3;
}

/// An algorithm that pages refer to; behind it the dictionary.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AlgorithmRecord {
    /// 1: lz4, 2: lz4hc, 3: zstd, 4: store, 5: lzo.
    pub algorithm: u8,
    /// 1: the automatic mode learned it.
    pub trained: u8,
    pub reserved: [u8; 2],
    pub level: I32,
}

/// One page, or a run of pages of one 32-bit pattern or of none. All records of a block come first,
/// then their bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PageRecord {
    pub page: U64,
    /// 1: same, 2: pattern, 3: compressed, 4: huge, 5: below, 6: lost.
    pub form: u8,
    /// Number of the algorithm: that made the object, or failed on the page.
    pub algorithm: u8,
    /// Bytes behind the records; of forms 1, 5 and 6: pages.
    pub len: U16,
    /// Of form 1: the bytes that repeat.
    pub pattern: [u8; 4],
}

pub mod form {
    pub const SAME: u8 = 1;
    pub const PATTERN: u8 = 2;
    pub const COMPRESSED: u8 = 3;
    pub const HUGE: u8 = 4;
    /// As what the device lies over, after a node in which it is not.
    pub const BELOW: u8 = 5;
    /// The page could not be read when it was saved, and cannot be read since. From version 4 on.
    pub const LOST: u8 = 6;

    /// Whether a record stands for a run of pages, and has no bytes.
    pub fn is_run(form: u8) -> bool {
        matches!(form, SAME | BELOW | LOST)
    }
}

/// The end block's payload: with it the file is complete.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EndRecord {
    /// Blocks before this one.
    pub blocks: U64,
    pub pages: U64,
    /// Bytes of the whole file.
    pub file_bytes: U64,
    /// XXH3 over the checksums of all blocks before this one, seeded with the salt.
    pub digest: U64,
}

const _: () = assert!(size_of::<Header>() == 64 && size_of::<BaseRecord>() == 32);
const _: () = assert!(size_of::<KeptRecord>() == 48);
const _: () = assert!(size_of::<NodeRecord>() == 32 && size_of::<BlockHeader>() == 40);
const _: () = assert!(size_of::<AlgorithmRecord>() == 8 && size_of::<PageRecord>() == 16);
const _: () = assert!(size_of::<EndRecord>() == 32);

/// The checksum of a block: of its header and payload, without the first field.
pub fn block_sum(block: &[u8], salt: u64) -> u64 {
    xxh3_64_with_seed(&block[size_of::<U64>()..], salt)
}

/// The checksum by which a block's records are known to be right without its data.
pub fn head_sum(header: &BlockHeader, records: &[u8], salt: u64) -> u32 {
    let mut sum = Xxh3::with_seed(salt);
    sum.update(&header.as_bytes()[offset_of!(BlockHeader, magic)..offset_of!(BlockHeader, head_checksum)]);
    sum.update(records);
    sum.digest() as u32
}

const ALGORITHMS: [(u8, Algorithm); 5] = [
    (1, Algorithm::Lz4),
    (2, Algorithm::Lz4hc),
    (3, Algorithm::Zstd),
    (4, Algorithm::Store),
    (5, Algorithm::Lzo),
];

/// An algorithm's number in the file.
pub fn algorithm_id(algorithm: Algorithm) -> u8 {
    ALGORITHMS.iter().find(|(_, other)| *other == algorithm).map_or(0, |(id, _)| *id)
}

pub fn algorithm_of(id: u8) -> Option<Algorithm> {
    ALGORITHMS.iter().find(|(other, _)| *other == id).map(|(_, algorithm)| *algorithm)
}
