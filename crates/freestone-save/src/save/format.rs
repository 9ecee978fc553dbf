//! Structures of the format of saved files. All integers are little-endian.
//! `docs/reference/save-format.md` describes the format with all offsets.
//!
//! ```text
//! header | bases, nodes, names | block | block | ... | end block
//! ```
//!
//! Checksums are 64-bit XXH3. All except that of the header are seeded with the file's salt. So a
//! block of an older file at the same place of the disk is not valid in this file.

use std::mem::offset_of;

use xxhash_rust::xxh3::{Xxh3, xxh3_64_with_seed};
use zerocopy::byteorder::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use freestone_ram::codec::{Algorithm, DICTIONARY_BYTES_MAX, Dictionary};

/// First bytes of every saved file.
pub const MAGIC: [u8; 16] = *b"\x89Freestone save\n";
/// Newest format version that this program reads.
pub const VERSION: u32 = VERSION_LOST;
/// Version for files of kept devices that contain lost pages. Other files of kept devices use the
/// previous version, which older programs can read.
pub const VERSION_LOST: u32 = 4;
/// Version for files of kept devices without lost pages.
pub const VERSION_KEPT: u32 = 3;
/// Version for files with a device that ends within a page.
pub const VERSION_PARTS: u32 = 2;
/// Version for files in which all devices have whole pages. The writer uses this version if
/// possible, so that older programs can read the file.
pub const VERSION_WHOLE_PAGES: u32 = 1;
/// Unit of device sizes in bytes, since version 2.
pub const SIZE_UNIT_BYTES: u64 = 512;
/// First bytes of every block after its checksum.
pub const BLOCK_MAGIC: [u8; 4] = *b"FSbk";

/// Bytes of page data at which a block is complete and written.
pub const BLOCK_TARGET_BYTES: usize = 1 << 20;
/// Largest payload of a block that the reader accepts, in bytes.
pub const PAYLOAD_BYTES_MAX: usize = 2 << 20;
const _: () = assert!(BLOCK_TARGET_BYTES + 2 * freestone_core::PAGE_BYTES < PAYLOAD_BYTES_MAX);
const _: () = assert!(size_of::<AlgorithmRecord>() + (DICTIONARY_BYTES_MAX as usize) < PAYLOAD_BYTES_MAX);
/// Maximum number of algorithms in a file.
pub const ALGORITHMS_MAX: usize = 64;
/// Maximum number of pages in one run record: the largest value of [`PageRecord::len`].
pub const RUN_PAGES_MAX: u64 = u16::MAX as u64;

/// Header of a saved file, at byte 0.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    pub magic: [u8; 16],
    pub version: U32,
    pub reserved: U32,
    /// Random number of the file, which seeds the checksums.
    pub salt: U64,
    pub contents_bytes: U32,
    pub bases: U32,
    pub nodes: U32,
    pub reserved2: U32,
    pub contents_checksum: U64,
    /// Checksum of all header fields above; not seeded.
    pub checksum: U64,
}

impl Header {
    pub fn sum(&self) -> u64 {
        xxh3_64_with_seed(&self.as_bytes()[..offset_of!(Self, checksum)], 0)
    }
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BaseRecord {
    pub size: U64,
    /// Hashed part of the base: 1: samples, 2: the whole content.
    pub check: u8,
    pub reserved: [u8; 7],
    pub hash: [u8; 16],
}

#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct NodeRecord {
    pub size: U64,
    /// Number of the base or node that `over` refers to.
    pub below: U32,
    /// Kind of parent. 0: no parent, 1: a base, 2: a node, 3: follows a node in its chain.
    pub over: u8,
    /// 0: live device, 1: snapshot.
    pub snapshot: u8,
    /// Length of the name in bytes; 0: no name.
    pub name_bytes: U16,
    /// Algorithm for new pages, numbered as in [`AlgorithmRecord`].
    pub algorithm: u8,
    pub reserved: [u8; 3],
    pub level: I32,
    /// Memory limit of a fork's own pages in bytes; 0: no limit. Older programs write 0 and ignore
    /// the field.
    pub mem_limit: U64,
}

/// First record of the contents since version 3: the file's place among the files of kept devices.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct KeptRecord {
    /// Number of the generation: one more for each whole file.
    pub generation: U64,
    /// 0: whole file; otherwise the number of the increment.
    pub number: U32,
    pub reserved: U32,
    /// Salt of the file that an increment continues; 0 for a whole file.
    pub continues: U64,
    /// Time at which the devices had this content, in seconds since 1970.
    pub seconds: U64,
    pub nanos: U32,
    pub reserved2: [u8; 12],
}

/// Parent of a node (a device or snapshot in a file).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NodeParent {
    Nothing,
    Base(u32),
    Node(u32),
    /// Previous snapshot of the same origin. The node has the same parent as that snapshot, and
    /// contains only pages that changed since.
    After(u32),
}

impl NodeParent {
    /// Returns the fields of a [`NodeRecord`]: `over` and `below`.
    pub fn fields(self) -> (u8, u32) {
        match self {
            Self::Nothing => (0, 0),
            Self::Base(base) => (1, base),
            Self::Node(below) => (2, below),
            Self::After(before) => (3, before),
        }
    }
}

/// Header of every block of a saved file.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct BlockHeader {
    /// Checksum of the rest of the header and of the payload.
    pub checksum: U64,
    pub magic: [u8; 4],
    /// Kind of the payload. 1: an algorithm, 2: pages, 3: the end.
    pub kind: U32,
    /// Number of the block, counted from 0.
    pub number: U64,
    /// Node to which the pages belong, or number of the algorithm.
    pub node: U32,
    pub records: U32,
    pub payload_bytes: U32,
    /// For blocks of pages since version 3: checksum of the header (from `magic` to
    /// `payload_bytes`) and the records; otherwise 0.
    pub head_checksum: U32,
}

pub mod kind {
    pub const ALGORITHM: u32 = 1;
    pub const PAGES: u32 = 2;
    pub const END: u32 = 3;
}

/// An algorithm to which pages refer, followed by its dictionary.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct AlgorithmRecord {
    /// Compression algorithm. 1: lz4, 2: lz4hc, 3: zstd, 4: store, 5: lzo.
    pub algorithm: u8,
    /// 1 if the automatic mode trained the dictionary, otherwise 0.
    pub trained: u8,
    pub reserved: [u8; 2],
    pub level: I32,
}

/// An algorithm of a saved file, as in an [`AlgorithmRecord`].
#[derive(Clone, PartialEq, Eq)]
pub struct FileAlgorithm {
    pub algorithm: Algorithm,
    pub level: i32,
    pub trained: bool,
    pub dictionary: Option<Dictionary>,
}

/// A page, or a run of pages without data. All records of a block come before the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct PageRecord {
    pub page: U64,
    /// Stored form. 1: same-filled (4 bytes), 2: pattern of 8 bytes, 3: compressed, 4: huge
    /// (uncompressed), 5: below (reads from the parent), 6: lost.
    pub form: u8,
    /// Number of the algorithm that compressed the page, or that could not compress it (form 4).
    pub algorithm: u8,
    /// Length of the data in bytes; for forms 1, 5 and 6 the number of pages.
    pub len: U16,
    /// For form 1: the bytes that are repeated in the page.
    pub pattern: [u8; 4],
}

pub mod form {
    pub const SAME: u8 = 1;
    pub const PATTERN: u8 = 2;
    pub const COMPRESSED: u8 = 3;
    pub const HUGE: u8 = 4;
    /// The page reads from the parent, unlike in the previous node of the chain.
    pub const BELOW: u8 = 5;
    /// The page could not be read when it was saved, and reads of it still fail. Since version 4.
    pub const LOST: u8 = 6;

    /// Returns true if a record of this form describes a run of pages without data.
    pub fn is_run(form: u8) -> bool {
        matches!(form, SAME | BELOW | LOST)
    }
}

/// Payload of the end block, the commit record of the file.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct EndRecord {
    pub blocks: U64,
    pub pages: U64,
    /// Size of the whole file in bytes.
    pub file_bytes: U64,
    /// XXH3 of the checksums of all blocks before the end block, seeded with the salt.
    pub digest: U64,
}

const _: () = assert!(size_of::<Header>() == 64 && size_of::<BaseRecord>() == 32);
const _: () = assert!(size_of::<KeptRecord>() == 48);
const _: () = assert!(size_of::<NodeRecord>() == 32 && size_of::<BlockHeader>() == 40);
const _: () = assert!(size_of::<AlgorithmRecord>() == 8 && size_of::<PageRecord>() == 16);
const _: () = assert!(size_of::<EndRecord>() == 32);

/// Returns the checksum of a block: of header and payload without the checksum field.
pub fn block_sum(block: &[u8], salt: u64) -> u64 {
    xxh3_64_with_seed(&block[size_of::<U64>()..], salt)
}

/// Returns the checksum that verifies a block's header and records without its data.
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

/// Returns the number of an algorithm in saved files.
pub fn algorithm_id(algorithm: Algorithm) -> u8 {
    ALGORITHMS.iter().find(|(_, other)| *other == algorithm).map_or(0, |(id, _)| *id)
}

pub fn algorithm_of(id: u8) -> Option<Algorithm> {
    ALGORITHMS.iter().find(|(other, _)| *other == id).map(|(_, algorithm)| *algorithm)
}
