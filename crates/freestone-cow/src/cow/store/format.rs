//! On-disk format of dm-snapshot's persistent exception store. All integers are little-endian.
//!
//! ```text
//! chunk 0            header, then zeroes
//!   bytes  0-3       magic       0x70416e53, the bytes "SnAp"
//!   bytes  4-7       valid       1, or 0 when the snapshot is lost
//!   bytes  8-11      version     1
//!   bytes 12-15      chunk size  in sectors of 512 bytes
//!   bytes 16-47      Freestone: mark of a merge in progress, or zeroes
//!   bytes 48-71      Freestone: the origin's content at an orderly close, or zeroes
//! chunk 1            area 0: E entries of 16 bytes, E = chunk size / 16
//!   bytes  0-7       old chunk   of the origin
//!   bytes  8-15      new chunk   of the COW device; 0 ends the list
//! chunks 2 to E+1    copies
//! chunk E+2          area 1, and so on: area k is chunk 1 + k * (E + 1)
//! ```
//!
//! The kernel reads only bytes 0 to 15. The kernel writes chunk 0 only to create or invalidate a
//! store, and then zeroes all later bytes; a merge mark has no meaning then. The kernel leaves
//! Freestone's bytes unchanged during and after a merge.
//!
//! The format has no checksums and no sequence numbers, but relies on atomic writes of 512-byte
//! sectors.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::cow::config::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Damage, SetupError};
use crate::cow::notes::Stamp;
use crate::cow::status::SECTOR_BYTES;
use freestone_core::device::Geometry;

/// Default chunk size of a new store, in bytes: the kernel's 32 sectors.
pub const CHUNK_BYTES_DEFAULT: u64 = 16 << 10;

/// Unit of metadata I/O in bytes: a multiple of every device's logical block and of an entry.
pub const BLOCK_BYTES: usize = 4096;
pub const ENTRY_BYTES: usize = size_of::<Entry>();
pub const BLOCK_ENTRIES: u64 = (BLOCK_BYTES / ENTRY_BYTES) as u64;
pub const SECTOR_ENTRIES: u64 = SECTOR_BYTES / ENTRY_BYTES as u64;

const HEADER_CHUNKS: u64 = 1;
/// Number of the first chunk for copies in an empty store, after the header and area 0.
pub const FIRST_COPY: u64 = HEADER_CHUNKS + 1;
const MAGIC: u32 = 0x7041_6e53;
const VERSION: u32 = 1;

const MARK_MAGIC: [u8; 8] = *b"FsMerge1";
/// Byte range of the merge mark in the header.
const MARK: std::ops::Range<usize> = 16..48;
/// Magic bytes that identify a record of an orderly close.
const CLOSED_MAGIC: [u8; 8] = *b"FsClose1";
/// Byte range of the record of an orderly close.
const CLOSED: std::ops::Range<usize> = 48..72;

const _: () = assert!(size_of::<Header>() == MARK.start && ENTRY_BYTES == 16);
// The merge mark must be in the same sector as the header, so that both are written atomically.
const _: () = assert!(size_of::<MarkBytes>() == MARK.end - MARK.start && MARK.end as u64 <= SECTOR_BYTES);
const _: () =
    assert!(size_of::<ClosedBytes>() == CLOSED.end - CLOSED.start && CLOSED.end as u64 <= SECTOR_BYTES);
const _: () = assert!(CHUNK_BYTES_MIN as usize >= BLOCK_BYTES);

/// First bytes of chunk 0, as the kernel defines them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: U32,
    valid: U32,
    version: U32,
    chunk_sectors: U32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MarkBytes {
    magic: [u8; 8],
    id: U64,
    entries: U64,
    first: U64,
}

/// On-disk record of an orderly close of the store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ClosedBytes {
    magic: [u8; 8],
    session: U64,
    number: U64,
}

/// Mark of a merge in progress. The merge moves entries to the origin from the end of the list; the
/// origin may hold some of them already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Random number that identifies the merge; not 0.
    pub id: u64,
    /// Number of entries at the start of the merge. The entries that remain are the first entries
    /// of the list.
    pub entries: u64,
    /// Origin chunk of the first entry, which is merged last.
    pub first: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    old: U64,
    new: U64,
}

/// Parsed header of a COW device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeaderContent {
    /// The device starts with zeroes, so no exception store was ever created.
    New,
    /// The device contains an exception store.
    Store {
        /// False if the snapshot is lost and its data must not be used.
        valid: bool,
        /// Chunk size in bytes, a supported value.
        chunk: u64,
        /// Mark of a merge in progress, if any.
        mark: Option<Mark>,
        /// Version of the origin's content at the orderly close of the store; `None` if the store
        /// was not closed in order.
        closed: Option<Stamp>,
    },
}

/// Returns the first block of a new COW device, with a header and neither a merge mark nor a record
/// of a close.
pub fn header(chunk: u64, valid: bool) -> [u8; BLOCK_BYTES] {
    let header = Header {
        magic: U32::new(MAGIC),
        valid: U32::new(u32::from(valid)),
        version: U32::new(VERSION),
        chunk_sectors: U32::new((chunk / SECTOR_BYTES) as u32),
    };
    let mut block = [0; BLOCK_BYTES];
    block[..size_of::<Header>()].copy_from_slice(header.as_bytes());
    block
}

/// Parses the first block of a COW device.
pub fn parse_header(block: &[u8; BLOCK_BYTES]) -> Result<HeaderContent, SetupError> {
    // The block is longer than a header, so this always succeeds.
    let Ok((header, _)) = Header::read_from_prefix(block) else { return Ok(HeaderContent::New) };
    match header.magic.get() {
        0 => return Ok(HeaderContent::New),
        MAGIC => {}
        other => return Err(SetupError::Foreign(other)),
    }
    if header.version.get() != VERSION {
        return Err(SetupError::Version(header.version.get()));
    }
    let chunk = u64::from(header.chunk_sectors.get()) * SECTOR_BYTES;
    check_chunk(chunk).map_err(|_| SetupError::HeaderChunk(header.chunk_sectors.get()))?;
    match header.valid.get() {
        valid @ (0 | 1) => Ok(HeaderContent::Store {
            valid: valid == 1,
            chunk,
            mark: mark_of(block),
            closed: closed_of(block),
        }),
        other => Err(SetupError::HeaderValid(other)),
    }
}

fn mark_of(block: &[u8; BLOCK_BYTES]) -> Option<Mark> {
    let mark = MarkBytes::read_from_bytes(&block[MARK]).ok().filter(|mark| mark.magic == MARK_MAGIC)?;
    Some(Mark { id: mark.id.get(), entries: mark.entries.get(), first: mark.first.get() })
}

/// Sets or removes the merge mark in a copy of the store's first block.
pub fn set_mark(block: &mut [u8; BLOCK_BYTES], mark: Option<Mark>) {
    let bytes = mark.map(|Mark { id, entries, first }| MarkBytes {
        magic: MARK_MAGIC,
        id: U64::new(id),
        entries: U64::new(entries),
        first: U64::new(first),
    });
    match &bytes {
        Some(bytes) => block[MARK].copy_from_slice(bytes.as_bytes()),
        None => block[MARK].fill(0),
    }
}

fn closed_of(block: &[u8; BLOCK_BYTES]) -> Option<Stamp> {
    let closed = ClosedBytes::read_from_bytes(&block[CLOSED]).ok()?;
    let stamp = Stamp { session: closed.session.get(), number: closed.number.get() };
    (closed.magic == CLOSED_MAGIC).then_some(stamp)
}

/// Sets or removes the record of an orderly close in a copy of the store's first block.
pub fn set_closed(block: &mut [u8; BLOCK_BYTES], content: Option<Stamp>) {
    let Some(Stamp { session, number }) = content else { return block[CLOSED].fill(0) };
    let bytes = ClosedBytes { magic: CLOSED_MAGIC, session: U64::new(session), number: U64::new(number) };
    block[CLOSED].copy_from_slice(bytes.as_bytes());
}

fn check_chunk(chunk: u64) -> Result<(), SetupError> {
    let fits = chunk.is_power_of_two() && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk);
    if fits { Ok(()) } else { Err(SetupError::Chunk(chunk)) }
}

/// Locations of metadata areas and copies on a COW device, for one chunk size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    chunk: u64,
}

impl Layout {
    /// Checks a chunk size in bytes against its range and the logical block sizes of both devices.
    pub fn new(chunk: u64, cow: &Geometry, origin: &Geometry) -> Result<Self, SetupError> {
        check_chunk(chunk)?;
        for (block, whose) in [(origin.logical_block, "origin"), (cow.logical_block, "COW device")] {
            if !chunk.is_multiple_of(u64::from(block)) {
                return Err(SetupError::Block { chunk, block, whose });
            }
        }
        Ok(Self { chunk })
    }

    /// Returns the chunk size in bytes.
    pub const fn chunk(self) -> u64 {
        self.chunk
    }

    pub const fn entries(self) -> u64 {
        self.chunk / ENTRY_BYTES as u64
    }

    /// Returns the number of the COW device's chunk that holds area `area`.
    pub const fn area_chunk(self, area: u64) -> u64 {
        HEADER_CHUNKS + area * (self.entries() + 1)
    }

    /// Returns the offset in bytes at which area `area` starts on the COW device.
    pub const fn area_byte(self, area: u64) -> u64 {
        self.area_chunk(area) * self.chunk
    }

    /// Returns true if a chunk of the COW device holds the header or an area.
    pub const fn is_metadata(self, chunk: u64) -> bool {
        chunk < HEADER_CHUNKS || chunk % (self.entries() + 1) == HEADER_CHUNKS
    }

    /// Returns the first chunk of the COW device, at or after `chunk`, that can hold a copy.
    pub const fn skip_metadata(self, chunk: u64) -> u64 {
        if self.is_metadata(chunk) { chunk + 1 } else { chunk }
    }

    /// Returns the number of whole chunks on a device of `size` bytes.
    pub const fn chunks(self, size: u64) -> u64 {
        size / self.chunk
    }

    /// Checks that entry number `number` refers to chunks that exist on both devices, and not to
    /// metadata.
    pub fn check(self, number: u64, entry: Entry, origin_size: u64, cow_size: u64) -> Result<(), Damage> {
        let (old, new) = entry.get();
        let chunks = origin_size.div_ceil(self.chunk);
        if old >= chunks {
            return Err(Damage::Old { entry: number, old, chunks });
        }
        let chunks = self.chunks(cow_size);
        if new >= chunks {
            return Err(Damage::New { entry: number, new, chunks });
        }
        if self.is_metadata(new) {
            return Err(Damage::Metadata { entry: number, new });
        }
        Ok(())
    }
}

impl Entry {
    /// Creates the entry for the origin's chunk `old`, whose copy is in chunk `new` of the COW
    /// device.
    pub const fn new(old: u64, new: u64) -> Self {
        Self { old: U64::new(old), new: U64::new(new) }
    }

    /// Returns the numbers of the origin's chunk and of the COW device's chunk.
    pub const fn get(self) -> (u64, u64) {
        (self.old.get(), self.new.get())
    }

    /// Returns true if the entry terminates the list of exceptions.
    pub const fn is_end(self) -> bool {
        self.new.get() == 0
    }

    /// Returns true if the entry was never written.
    pub const fn is_zero(self) -> bool {
        self.new.get() == 0 && self.old.get() == 0
    }

    /// Iterates over the entries in `bytes`, whose length must be a multiple of [`ENTRY_BYTES`].
    pub fn all(bytes: &[u8]) -> impl ExactSizeIterator<Item = Self> {
        bytes.chunks_exact(ENTRY_BYTES).map(|bytes| {
            let (old, new) = bytes.split_at(size_of::<U64>());
            Self {
                old: U64::read_from_bytes(old).unwrap_or_default(),
                new: U64::read_from_bytes(new).unwrap_or_default(),
            }
        })
    }

    /// Writes the entry to `bytes`, an array of entries, at index `at`.
    pub fn put(self, bytes: &mut [u8], at: usize) {
        bytes[at * ENTRY_BYTES..(at + 1) * ENTRY_BYTES].copy_from_slice(self.as_bytes());
    }
}
