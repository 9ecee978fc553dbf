//! dm-snapshot's persistent exception store on disk. All integers are little-endian.
//!
//! ```text
//! chunk 0            header, then zeroes
//!   bytes  0-3       magic       0x70416e53, the bytes "SnAp"
//!   bytes  4-7       valid       1, or 0 when the snapshot is lost
//!   bytes  8-11      version     1
//!   bytes 12-15      chunk size  in sectors of 512 bytes
//!   bytes 16-47      ours: the mark of a merge under way, or zeroes
//!   bytes 48-71      ours: what the origin held when the store was closed in order, or zeroes
//! chunk 1            area 0: E entries of 16 bytes, E = chunk size / 16
//!   bytes  0-7       old chunk   of the origin
//!   bytes  8-15      new chunk   of the COW device; 0 ends the list
//! chunks 2 to E+1    copies
//! chunk E+2          area 1, and so on: area k is chunk 1 + k * (E + 1)
//! ```
//!
//! The kernel reads nothing behind byte 15. It writes chunk 0 only where it makes a store or
//! invalidates one; then all behind is zeroed, and a mark means nothing any more. It leaves what is
//! ours alone while it merges, and afterwards.
//!
//! There are no checksums and no sequence numbers: what counts is that a sector of 512 bytes is
//! written whole or not at all.

use zerocopy::byteorder::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::config::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, Damage, SetupError};
use super::notes::Stamp;
use super::status::SECTOR_BYTES;
use freestone_core::device::Geometry;

/// Chunk of a new store where none is asked for, in bytes: the kernel's 32 sectors.
pub const CHUNK_BYTES_DEFAULT: u64 = 16 << 10;

/// Unit in which metadata is read and written, in bytes. A whole number of logical blocks of any
/// device, and of entries.
pub const BLOCK_BYTES: usize = 4096;
/// Bytes of an entry.
pub const ENTRY_BYTES: usize = size_of::<Entry>();
/// Entries of a block.
pub const BLOCK_ENTRIES: u64 = (BLOCK_BYTES / ENTRY_BYTES) as u64;
/// Entries of a sector.
pub const SECTOR_ENTRIES: u64 = SECTOR_BYTES / ENTRY_BYTES as u64;

/// Chunks of the header.
const HEADER_CHUNKS: u64 = 1;
/// The first chunk for copies in an empty store: behind the header and area 0.
pub const FIRST_COPY: u64 = HEADER_CHUNKS + 1;
const MAGIC: u32 = 0x7041_6e53;
const VERSION: u32 = 1;

/// What a mark begins with.
const MARK_MAGIC: [u8; 8] = *b"FsMerge1";
/// Bytes of the header that it takes.
const MARK: std::ops::Range<usize> = 16..48;
/// What the origin's content begins with.
const CLOSED_MAGIC: [u8; 8] = *b"FsClose1";
/// Bytes of the header that it takes.
const CLOSED: std::ops::Range<usize> = 48..72;

const _: () = assert!(size_of::<Header>() == MARK.start && ENTRY_BYTES == 16);
// It is written with the header or not at all.
const _: () = assert!(size_of::<MarkBytes>() == MARK.end - MARK.start && MARK.end as u64 <= SECTOR_BYTES);
const _: () =
    assert!(size_of::<ClosedBytes>() == CLOSED.end - CLOSED.start && CLOSED.end as u64 <= SECTOR_BYTES);
const _: () = assert!(CHUNK_BYTES_MIN as usize >= BLOCK_BYTES);

/// What chunk 0 begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Header {
    magic: U32,
    valid: U32,
    version: U32,
    chunk_sectors: U32,
}

/// A mark on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct MarkBytes {
    magic: [u8; 8],
    id: U64,
    entries: U64,
    first: U64,
}

/// The origin's content on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ClosedBytes {
    magic: [u8; 8],
    session: U64,
    number: U64,
}

/// A merge is under way: what the list holds is going to the origin, from its end, and some of it
/// may be there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    /// Tells this merge from others; not 0.
    pub id: u64,
    /// Entries when it began. What is left of them is the beginning of the list.
    pub entries: u64,
    /// The origin's chunk of the first entry, which goes last.
    pub first: u64,
}

/// One exception.
#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Entry {
    old: U64,
    new: U64,
}

/// What a header says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Found {
    /// Nothing was ever stored here.
    New,
    /// A store.
    Store {
        /// Whether its snapshot is good.
        valid: bool,
        /// Its chunk in bytes, checked.
        chunk: u64,
        /// A merge is under way.
        mark: Option<Mark>,
        /// What the origin held when the store was closed in order.
        closed: Option<Stamp>,
    },
}

/// The first block of the COW device.
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

/// Reads the first block of the COW device.
pub fn parse_header(block: &[u8; BLOCK_BYTES]) -> Result<Found, SetupError> {
    // The block is longer than a header.
    let Ok((header, _)) = Header::read_from_prefix(block) else { return Ok(Found::New) };
    match header.magic.get() {
        0 => return Ok(Found::New),
        MAGIC => {}
        other => return Err(SetupError::Foreign(other)),
    }
    if header.version.get() != VERSION {
        return Err(SetupError::Version(header.version.get()));
    }
    let chunk = u64::from(header.chunk_sectors.get()) * SECTOR_BYTES;
    check_chunk(chunk).map_err(|_| SetupError::HeaderChunk(header.chunk_sectors.get()))?;
    match header.valid.get() {
        valid @ (0 | 1) => {
            Ok(Found::Store { valid: valid == 1, chunk, mark: mark_of(block), closed: closed_of(block) })
        }
        other => Err(SetupError::HeaderValid(other)),
    }
}

fn mark_of(block: &[u8; BLOCK_BYTES]) -> Option<Mark> {
    let mark = MarkBytes::read_from_bytes(&block[MARK]).ok().filter(|mark| mark.magic == MARK_MAGIC)?;
    Some(Mark { id: mark.id.get(), entries: mark.entries.get(), first: mark.first.get() })
}

/// Puts a mark into the first block of a store, or takes it away; all else stays.
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

/// Puts into the first block of a store with what content of the origin it is closed, or takes that
/// away; all else stays.
pub fn set_closed(block: &mut [u8; BLOCK_BYTES], content: Option<Stamp>) {
    let Some(Stamp { session, number }) = content else { return block[CLOSED].fill(0) };
    let bytes = ClosedBytes { magic: CLOSED_MAGIC, session: U64::new(session), number: U64::new(number) };
    block[CLOSED].copy_from_slice(bytes.as_bytes());
}

fn check_chunk(chunk: u64) -> Result<(), SetupError> {
    let fits = chunk.is_power_of_two() && (CHUNK_BYTES_MIN..=CHUNK_BYTES_MAX).contains(&chunk);
    if fits { Ok(()) } else { Err(SetupError::Chunk(chunk)) }
}

/// Where everything is, for one size of chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    chunk: u64,
}

impl Layout {
    /// Checks the chunk against the rules and both devices.
    pub fn new(chunk: u64, cow: &Geometry, origin: &Geometry) -> Result<Self, SetupError> {
        check_chunk(chunk)?;
        for (block, whose) in [(origin.logical_block, "origin"), (cow.logical_block, "COW device")] {
            if !chunk.is_multiple_of(u64::from(block)) {
                return Err(SetupError::Block { chunk, block, whose });
            }
        }
        Ok(Self { chunk })
    }

    /// Bytes of a chunk.
    pub const fn chunk(self) -> u64 {
        self.chunk
    }

    /// Entries of an area.
    pub const fn entries(self) -> u64 {
        self.chunk / ENTRY_BYTES as u64
    }

    /// Chunk of area `area`.
    pub const fn area_chunk(self, area: u64) -> u64 {
        HEADER_CHUNKS + area * (self.entries() + 1)
    }

    /// Byte of the COW device at which area `area` begins.
    pub const fn area_byte(self, area: u64) -> u64 {
        self.area_chunk(area) * self.chunk
    }

    /// Whether a chunk is the header or an area.
    pub const fn is_metadata(self, chunk: u64) -> bool {
        chunk < HEADER_CHUNKS || chunk % (self.entries() + 1) == HEADER_CHUNKS
    }

    /// The first chunk from this one on that holds a copy.
    pub const fn skip_metadata(self, chunk: u64) -> u64 {
        if self.is_metadata(chunk) { chunk + 1 } else { chunk }
    }

    /// Whole chunks of a device of `size` bytes.
    pub const fn chunks(self, size: u64) -> u64 {
        size / self.chunk
    }

    /// What is wrong with the entry numbered `number`, if anything is.
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
    /// The exception of chunk `old` of the origin, at chunk `new` of the COW device.
    pub const fn new(old: u64, new: u64) -> Self {
        Self { old: U64::new(old), new: U64::new(new) }
    }

    /// Chunk of the origin and of the COW device.
    pub const fn get(self) -> (u64, u64) {
        (self.old.get(), self.new.get())
    }

    /// Whether the list ends before this one.
    pub const fn is_end(self) -> bool {
        self.new.get() == 0
    }

    /// Whether nothing was ever written here.
    pub const fn is_zero(self) -> bool {
        self.new.get() == 0 && self.old.get() == 0
    }

    /// The entries that `bytes` consist of, a multiple of 16 of them.
    pub fn all(bytes: &[u8]) -> impl ExactSizeIterator<Item = Self> {
        bytes.chunks_exact(ENTRY_BYTES).map(|bytes| {
            let (old, new) = bytes.split_at(size_of::<U64>());
            // Both halves have eight bytes.
            Self {
                old: U64::read_from_bytes(old).unwrap_or_default(),
                new: U64::read_from_bytes(new).unwrap_or_default(),
            }
        })
    }

    /// Writes it as entry `at` of `bytes`.
    pub fn put(self, bytes: &mut [u8], at: usize) {
        bytes[at * ENTRY_BYTES..(at + 1) * ENTRY_BYTES].copy_from_slice(self.as_bytes());
    }
}
