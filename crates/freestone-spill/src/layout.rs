//! The packed layout: objects (stored pages and groups of pages) on the backing device, each after a
//! header, tightly packed.
//!
//! ```text
//! bytes  0-3   checksum   low half of the XXH3 (64 bits) of bytes 4 to 15 and of the object
//! byte   4     version    0xF5
//! byte   5     algorithm  number of the object's algorithm, as in the slot; 4 for a group of pages
//! bytes  6-7   length     bytes of the object, 1 to 28672; of a page at most 4096
//! bytes  8-15  owner      table and slot, as in the pool's back-references; of a group its header
//! bytes 16-    object, then zeroes up to a multiple of 16 bytes, where the next header begins
//! ```
//!
//! Integers are little-endian. A run of blocks begins with a header. Objects may cross blocks of
//! their run, but not the end of the run. Zeroes fill the last block. A walk over the objects ends
//! there, as zeroes are not a valid header (neither length nor version).
//!
//! Packing saves space and bandwidth on the device by the compression ratio; one block per object
//! would save neither. A header costs 16 bytes per page. The owner in the header allows reclaim to
//! find the slots that refer to a block without a map in memory.

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use super::blocks::UNIT_BYTES;
use super::blocks::{BLOCK_UNITS, MAX_UNITS, OBJECT_BYTES_MAX};
use super::space::{BLOCK_BYTES, Run};
use freestone_core::device::IoBuf;
use freestone_core::slot::Word;

const HEADER_BYTES: usize = size_of::<Header>();
const CHECKSUM_BYTES: usize = size_of::<U32>();
/// Version byte of a header, which also marks the header as valid.
const VERSION: u8 = 0xF5;
/// Algorithm in the header of a group of pages. The algorithms of pages are smaller.
pub const GROUP_ALGORITHM: u8 = 4;

const _: () = assert!(HEADER_BYTES == 16 && HEADER_BYTES == UNIT_BYTES);
const _: () = assert!(units(OBJECT_BYTES_MAX) == MAX_UNITS && OBJECT_BYTES_MAX <= u16::MAX as usize);

#[derive(Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub struct Header {
    checksum: U32,
    version: u8,
    algorithm: u8,
    len: U16,
    owner: U64,
}

impl Header {
    /// Returns the owner (table and slot) of the object at the time of the write.
    pub fn owner(&self) -> u64 {
        self.owner.get()
    }

    #[cfg(test)]
    fn algorithm(&self) -> u8 {
        self.algorithm
    }
}

/// An object on the backing device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Unit (of 16 bytes) of the device at which the object's header begins.
    pub unit: u64,
    /// Size of the object in bytes; of a group of pages, rounded up to whole units.
    pub stored: u32,
    /// Algorithm in the object's header.
    pub algorithm: u8,
}

impl Place {
    /// Returns the place of the object of a spilled page that is not in a group.
    pub fn of(word: Word) -> Self {
        debug_assert!(!word.is_spilled_in_group());
        let stored = word.spilled_bytes() as u32;
        Self { unit: word.location(), stored, algorithm: word.algorithm() as u8 }
    }
}

/// Returns the number of units of an object of `len` bytes, including its header.
#[inline]
pub const fn units(len: usize) -> u32 {
    (HEADER_BYTES + len).div_ceil(UNIT_BYTES) as u32
}

/// Returns the checksum of a header (except the checksum field) and the object after it.
#[inline]
fn checksum(header_and_object: &[u8]) -> u32 {
    xxh3_64(&header_and_object[CHECKSUM_BYTES..]) as u32
}

/// Packs objects into the buffer that is written to a run of blocks.
pub struct Packer {
    buf: IoBuf,
    run: Run,
    /// Number of bytes filled, a multiple of [`UNIT_BYTES`].
    at: usize,
    capacity: usize,
}

impl Packer {
    /// Creates a packer for as many blocks of the run as `buf` can hold. The content of `buf` is
    /// overwritten.
    pub fn new(buf: IoBuf, run: Run) -> Self {
        let capacity = (run.blocks as usize).min(buf.len() / BLOCK_BYTES) * BLOCK_BYTES;
        Self { buf, run, at: 0, capacity }
    }

    /// Adds an object of 1 to [`OBJECT_BYTES_MAX`] bytes. Returns the unit of its header on the device, or `None`
    /// if the run is full.
    #[inline]
    pub fn push(&mut self, owner: u64, algorithm: u8, object: &[u8]) -> Option<u64> {
        assert!(
            (1..=OBJECT_BYTES_MAX).contains(&object.len()),
            "an object of {} bytes is packed",
            object.len()
        );
        let end = self.at + units(object.len()) as usize * UNIT_BYTES;
        let place = self.buf[..self.capacity].get_mut(self.at..end)?;
        let mut header = Header {
            checksum: U32::ZERO,
            version: VERSION,
            algorithm,
            len: U16::new(object.len() as u16),
            owner: U64::new(owner),
        };
        let (filled, padding) = place.split_at_mut(HEADER_BYTES + object.len());
        filled[HEADER_BYTES..].copy_from_slice(object);
        padding.fill(0);
        filled[..HEADER_BYTES].copy_from_slice(header.as_bytes());
        header.checksum = U32::new(checksum(filled));
        filled[..CHECKSUM_BYTES].copy_from_slice(header.checksum.as_bytes());
        let unit = self.run.start * BLOCK_UNITS + (self.at / UNIT_BYTES) as u64;
        self.at = end;
        Some(unit)
    }

    /// Returns the buffer and the number of blocks to write at the start of the run. The rest of
    /// the run is unused.
    pub fn finish(mut self) -> (IoBuf, u32) {
        let blocks = self.at.div_ceil(BLOCK_BYTES);
        // Clear the rest of the last block, so that no content of earlier uses reaches the device.
        self.buf[self.at..blocks * BLOCK_BYTES].fill(0);
        (self.buf, blocks as u32)
    }
}

/// Parses the header and object at byte `at` of `buf`; `None` if they are incomplete or damaged.
#[inline]
fn parse(buf: &[u8], at: usize) -> Option<(Header, &[u8])> {
    let rest = buf.get(at..)?;
    let (header, _) = Header::read_from_prefix(rest).ok()?;
    let len = usize::from(header.len.get());
    if header.version != VERSION || !(1..=OBJECT_BYTES_MAX).contains(&len) {
        return None;
    }
    let whole = rest.get(..HEADER_BYTES + len)?;
    (checksum(whole) == header.checksum.get()).then(|| (header, &whole[HEADER_BYTES..]))
}

/// Returns the object whose header begins at byte `at` of `buf`; `None` if the object is
/// incomplete, damaged, or not the expected one. `len` is the size of the object in bytes, for a
/// group of pages rounded up to whole units.
#[inline]
pub fn object_at(buf: &[u8], at: usize, owner: u64, len: usize, algorithm: u8) -> Option<&[u8]> {
    let (header, object) = parse(buf, at)?;
    let has_size = object.len() == len || algorithm == GROUP_ALGORITHM && units(object.len()) == units(len);
    (header.owner() == owner && has_size && header.algorithm == algorithm).then_some(object)
}

/// Iterates over successive objects from the header at byte `from` of `buf`, with the positions of
/// their headers. Ends at the first object that is incomplete or damaged.
pub fn walk(buf: &[u8], from: usize) -> impl Iterator<Item = (usize, Header, &[u8])> {
    let mut next = from;
    std::iter::from_fn(move || {
        let (header, object) = parse(buf, next)?;
        let at = next;
        next += units(object.len()) as usize * UNIT_BYTES;
        Some((at, header, object))
    })
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::blocks::Blocks;
    use freestone_core::PAGE_BYTES;

    const STALE: u8 = 0xEE;

    /// Returns a buffer with content of an earlier use.
    fn stale(blocks: usize) -> IoBuf {
        IoBuf::copy_of(&vec![STALE; blocks * BLOCK_BYTES]).unwrap()
    }

    fn object(seed: u64, len: usize) -> Vec<u8> {
        (0..len).map(|i| (seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (i % 57)) as u8 ^ i as u8).collect()
    }

    fn any_lens() -> impl Strategy<Value = Vec<usize>> {
        let len = prop_oneof![
            5 => prop_oneof![1..64_usize, 1..=PAGE_BYTES, Just(PAGE_BYTES), Just(1), Just(16), Just(17)],
            1 => 1..=OBJECT_BYTES_MAX,
        ];
        proptest::collection::vec(len, 0..60)
    }

    proptest! {
        #[test]
        fn packed_objects_are_found(lens in any_lens(), start in 0..1_u64 << 28, blocks in 1..20_u32) {
            let run = Run { start, blocks };
            let mut packer = Packer::new(stale(blocks as usize), run);
            let mut packed = Vec::new();
            for (n, &len) in lens.iter().enumerate() {
                let bytes = object(n as u64, len);
                let room = packer.capacity - packer.at >= units(len) as usize * UNIT_BYTES;
                let unit = packer.push(n as u64 ^ u64::MAX, n as u8, &bytes);
                prop_assert_eq!(unit.is_some(), room, "the run is used up to its end and not beyond");
                packed.extend(unit.map(|unit| (unit, n as u64 ^ u64::MAX, n as u8, bytes)));
            }
            let (buf, used) = packer.finish();
            let data = &buf[..used as usize * BLOCK_BYTES];

            // The written blocks must contain only headers, objects and zeroes, and no block may be
            // unnecessary.
            let mut at = 0;
            for (unit, owner, algorithm, bytes) in &packed {
                prop_assert_eq!(*unit, start * BLOCK_UNITS + (at / UNIT_BYTES) as u64);
                prop_assert_eq!(object_at(data, at, *owner, bytes.len(), *algorithm), Some(&bytes[..]));
                prop_assert_eq!(object_at(data, at, owner ^ 1, bytes.len(), *algorithm), None);
                // Sizes of groups are rounded up to whole units.
                let more = if *algorithm == GROUP_ALGORITHM { UNIT_BYTES } else { 1 };
                prop_assert_eq!(object_at(data, at, *owner, bytes.len() + more, *algorithm), None);
                prop_assert_eq!(object_at(data, at, *owner, bytes.len(), algorithm ^ 1), None);
                let end = at + units(bytes.len()) as usize * UNIT_BYTES;
                prop_assert!(data[at + HEADER_BYTES + bytes.len()..end].iter().all(|&byte| byte == 0));
                at = end;
            }
            prop_assert!(data[at..].iter().all(|&byte| byte == 0), "stale bytes in the tail");
            prop_assert_eq!(used as usize, at.div_ceil(BLOCK_BYTES));
            prop_assert!(buf[data.len()..].iter().all(|&byte| byte == STALE), "unused blocks are not touched");

            // A walk from any object finds all later objects.
            for skip in 0..packed.len() {
                let from = (packed[skip].0 - start * BLOCK_UNITS) as usize * UNIT_BYTES;
                let mut found = walk(data, from);
                for (unit, owner, algorithm, bytes) in &packed[skip..] {
                    let (at, header, object) = found.next().expect("an object is missed");
                    prop_assert_eq!(start * BLOCK_UNITS + (at / UNIT_BYTES) as u64, *unit);
                    prop_assert_eq!((header.owner(), header.algorithm()), (*owner, *algorithm));
                    prop_assert_eq!(object, &bytes[..]);
                }
                prop_assert_eq!(found.next().map(|found| found.0), None);
            }
        }

        /// Objects that begin in a middle block of a run are found from the block's first header.
        #[test]
        fn walk_from_first_header_finds_objects(lens in any_lens()) {
            let run = Run { start: 3, blocks: 12 };
            let blocks = Blocks::new(16).unwrap();
            blocks.open(run);
            let mut packer = Packer::new(stale(12), run);
            let mut places = Vec::new();
            for &len in &lens {
                let Some(unit) = packer.push(len as u64, 0, &object(7, len)) else { break };
                blocks.place(unit, units(len));
                places.push(unit);
            }
            let (buf, used) = packer.finish();
            for block in run.start..run.start + u64::from(used) {
                let begins: Vec<_> = places.iter().copied().filter(|unit| unit / BLOCK_UNITS == block).collect();
                let first = blocks.first(block).map(|unit| u64::from(unit) + block * BLOCK_UNITS);
                prop_assert_eq!(first, begins.first().copied());
                let Some(first) = blocks.first(block) else { continue };
                let from = (block - run.start) as usize * BLOCK_BYTES + first as usize * UNIT_BYTES;
                let found: Vec<_> = walk(&buf[..used as usize * BLOCK_BYTES], from)
                    .map(|(at, ..)| run.start * BLOCK_UNITS + (at / UNIT_BYTES) as u64)
                    .filter(|unit| unit / BLOCK_UNITS == block)
                    .collect();
                prop_assert_eq!(found, begins);
            }
        }

        #[test]
        fn object_flipped_bit_is_detected(len in 1..=PAGE_BYTES, bit: usize) {
            let mut packer = Packer::new(stale(2), Run { start: 0, blocks: 2 });
            packer.push(42, 1, &object(3, len)).unwrap();
            let (mut buf, _) = packer.finish();
            prop_assert!(object_at(&buf, 0, 42, len, 1).is_some());
            let bit = bit % ((HEADER_BYTES + len) * 8);
            buf[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(object_at(&buf, 0, 42, len, 1), None);
            prop_assert_eq!(walk(&buf, 0).count(), 0);
        }

        #[test]
        fn object_truncation_is_detected(len in 1..=PAGE_BYTES, cut: usize) {
            let mut packer = Packer::new(stale(2), Run { start: 0, blocks: 2 });
            packer.push(42, 1, &object(3, len)).unwrap();
            let (buf, _) = packer.finish();
            let cut = cut % (HEADER_BYTES + len);
            prop_assert_eq!(object_at(&buf[..cut], 0, 42, len, 1), None);
            prop_assert_eq!(walk(&buf[..cut], 0).count(), 0);
        }

        #[test]
        fn walk_of_garbage_stays_in_bounds(
            mut bytes in proptest::collection::vec(any::<u8>(), 0..9000),
            from in prop_oneof![0..10_000_usize, any::<usize>()],
            versions in proptest::collection::vec(any::<usize>(), 0..20),
        ) {
            // Insert valid version bytes, so that the noise looks more like headers.
            for at in versions {
                if let Some(byte) = bytes.get_mut(at % 9000 / UNIT_BYTES * UNIT_BYTES + 4) {
                    *byte = VERSION;
                }
            }
            for (at, _, object) in walk(&bytes, from) {
                prop_assert!(at >= from && at + HEADER_BYTES + object.len() <= bytes.len());
            }
            prop_assert!(object_at(&bytes, from, 1, 100, 0).is_none());
        }

        /// Headers with a matching checksum but invalid lengths and versions are not accepted.
        #[test]
        fn walk_of_forged_headers_stays_in_bounds(
            version in prop_oneof![3 => Just(VERSION), 1 => any::<u8>()],
            len in prop_oneof![Just(0_u16), 1..=4096_u16, 28_600..28_700_u16, any::<u16>()],
            room in prop_oneof![0..9000_usize, 28_000..29_000_usize],
        ) {
            let mut bytes = vec![7; HEADER_BYTES + room];
            let header = Header { checksum: U32::ZERO, version, algorithm: 0, len: U16::new(len), owner: U64::new(1) };
            bytes[..HEADER_BYTES].copy_from_slice(header.as_bytes());
            let whole = HEADER_BYTES + usize::from(len);
            if let Some(whole) = bytes.get(..whole) {
                let sum = checksum(whole);
                bytes[..CHECKSUM_BYTES].copy_from_slice(&sum.to_le_bytes());
            }
            let sound = version == VERSION && (1..=28_672).contains(&len) && whole <= bytes.len();
            prop_assert_eq!(walk(&bytes, 0).count(), usize::from(sound));
        }
    }

    /// Compares the layout byte by byte with the module documentation.
    #[test]
    fn packed_layout_matches_documentation() {
        let mut packer = Packer::new(stale(1), Run { start: 5, blocks: 1 });
        assert_eq!(packer.push(0x1122_3344_5566_7788, 3, b"freestone spills"), Some(5 * 256));
        assert_eq!(packer.push(1, 0, b"x"), Some(5 * 256 + 2));
        let (buf, blocks) = packer.finish();
        assert_eq!(blocks, 1);
        assert_eq!(buf[4..16], [0xF5, 3, 16, 0, 0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(buf[..4], (xxh3_64(&buf[4..32]) as u32).to_le_bytes());
        assert_eq!(&buf[16..32], b"freestone spills");
        assert_eq!(buf[48..64], [b'x', 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn packer_fills_smaller_of_run_and_buffer() {
        for (buffer, run, pages) in [(4, 2, 1), (2, 4, 1), (3, 3, 2), (1, 1, 0), (0, 5, 0)] {
            let mut packer = Packer::new(stale(buffer), Run { start: 0, blocks: run });
            let mut pushed = 0;
            while packer.push(0, 0, &[9; PAGE_BYTES]).is_some() {
                pushed += 1;
            }
            assert_eq!(pushed, pages, "{buffer} blocks of buffer, a run of {run}");
            let (buf, used) = packer.finish();
            assert_eq!(
                (buf.len(), used as usize),
                (buffer * BLOCK_BYTES, if pages == 0 { 0 } else { pages + 1 })
            );
        }
        assert_eq!((units(1), units(16), units(17), units(4096)), (2, 2, 3, 257));
    }
}
