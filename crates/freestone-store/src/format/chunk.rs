//! Chunks: up to 128 pages in one stored object, in units of 16 pages that are compressed separately.
//!
//! ```text
//!  0  8  "FSTCHUNK"
//!  8  4  uncompressed size of the pages in bytes; all numbers are little endian
//! 12  4  1 if encrypted, else 0
//! 16 12  nonce if encrypted, else zeroes
//! 28  4  zeroes
//! 32     for each unit: 4 bytes, its stored size; 32 bytes, its hash
//!        the units: zstd frames, or raw pages if a frame is not shorter
//! ```
//!
//! The name of a chunk is the hash of the size of its pages and of the hashes of its units. So a unit can be
//! read and verified without the others.
//!
//! Chunks of 512 KiB keep the number of requests low. An image without a cache can read single units of 64
//! KiB.

use freestone_core::mutants::{self, Mutant};
use zerocopy::byteorder::little_endian::U32;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::domain::Domain;
use super::name::{Kind, Name};
pub use super::part::PartError;
use super::part::{HEADER_BYTES, Header, Packing};
use super::seal::TAG_BYTES;
use super::{CHUNK_BYTES, CHUNK_PAGES, PAGE, UNIT_PAGES};

const MAGIC: [u8; 8] = *b"FSTCHUNK";
/// Uncompressed size of a full unit in bytes.
pub const UNIT_BYTES: usize = UNIT_PAGES * PAGE;
/// Maximum number of units in a chunk.
const UNITS: usize = CHUNK_PAGES / UNIT_PAGES;

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned, Clone, Copy, Debug)]
#[repr(C)]
struct Unit {
    stored: U32,
    hash: [u8; 32],
}

const UNIT_ENTRY_BYTES: usize = size_of::<Unit>();
const _: () = assert!(UNIT_ENTRY_BYTES == 36);
/// Maximum size of the header and the unit entries of a stored chunk, in bytes.
pub const HEAD_BYTES_MAX: usize = HEADER_BYTES + UNITS * UNIT_ENTRY_BYTES;
/// Maximum size of a stored chunk in bytes.
pub const STORED_BYTES_MAX: usize = HEAD_BYTES_MAX + CHUNK_BYTES + UNITS * TAG_BYTES;

/// Uncompressed pages of a chunk to store, with the name of the chunk.
pub struct Plain<'a> {
    pages: &'a [u8],
    hashes: Vec<[u8; 32]>,
    name: Name,
}

impl<'a> Plain<'a> {
    /// Computes the name of the chunk with these pages. `pages` must consist of 1 to 128 whole pages.
    pub fn new(domain: &Domain, pages: &'a [u8]) -> Self {
        debug_assert!(pages.len().is_multiple_of(PAGE) && (PAGE..=CHUNK_BYTES).contains(&pages.len()));
        let units = pages.chunks(UNIT_BYTES);
        let hashes: Vec<_> = units.map(|unit| domain.naming.name(Kind::Unit, &[unit]).0).collect();
        let name = name_of(domain, pages.len() as u32, &hashes);
        Self { pages, hashes, name }
    }

    /// Returns the name of the chunk.
    pub fn name(&self) -> Name {
        self.name
    }

    /// Returns the content of the stored object, or `None` if encryption fails, for example for lack of
    /// random numbers.
    pub fn stored(&self, domain: &Domain) -> Option<Vec<u8>> {
        let packing = Packing::new(domain, &self.name)?;
        let header = packing.header(MAGIC, self.pages.len());
        let mut entries = Vec::with_capacity(self.hashes.len());
        let mut units = Vec::with_capacity(self.pages.len() / 2);
        for (number, (unit, hash)) in (0..).zip(self.pages.chunks(UNIT_BYTES).zip(&self.hashes)) {
            let stored = packing.pack(number, unit)?;
            entries.push(Unit { stored: U32::new(stored.len() as u32), hash: *hash });
            units.extend_from_slice(&stored);
        }
        Some([header.as_bytes(), entries.as_bytes(), &units].concat())
    }
}

fn name_of(domain: &Domain, pages_bytes: u32, hashes: &[[u8; 32]]) -> Name {
    domain.naming.name(Kind::Chunk, &[&pages_bytes.to_le_bytes(), hashes.as_flattened()])
}

/// Verified header and unit entries of a stored chunk, which locate its units.
pub struct Head {
    pages_bytes: usize,
    packing: Packing,
    units: Vec<Unit>,
}

impl Head {
    /// Parses and verifies the head of a stored chunk. `bytes` are the first [`HEAD_BYTES_MAX`] bytes of the
    /// object, or the whole object if it is shorter.
    pub fn parse(domain: &Domain, name: &Name, bytes: &[u8]) -> Result<Self, PartError> {
        let (header, rest) = Header::read(bytes, MAGIC)?;
        let pages_bytes = header.bytes();
        if !pages_bytes.is_multiple_of(PAGE) || !(PAGE..=CHUNK_BYTES).contains(&pages_bytes) {
            return Err(PartError::Shape);
        }
        let count = pages_bytes.div_ceil(UNIT_BYTES);
        let (units, _) = <[Unit]>::ref_from_prefix_with_elems(rest, count).map_err(|_| PartError::Shape)?;
        let hashes: Vec<_> = units.iter().map(|unit| unit.hash).collect();
        if name_of(domain, pages_bytes as u32, &hashes) != *name {
            return Err(PartError::Content);
        }
        let packing = Packing::of(domain, name, &header)?;
        let tag_bytes = packing.tag_bytes();
        // A unit of length 0 would cause a read of an empty range, which `Objects::get` does not allow.
        let can_be = 1..=UNIT_BYTES + tag_bytes;
        if units.iter().any(|unit| !can_be.contains(&(unit.stored.get() as usize))) {
            return Err(PartError::Shape);
        }
        Ok(Self { pages_bytes, packing, units: units.to_vec() })
    }

    /// Returns the uncompressed size of the pages in bytes.
    pub fn pages_bytes(&self) -> usize {
        self.pages_bytes
    }

    /// Returns the byte range of a unit in the stored object, or `None` if the chunk has no such unit. The
    /// hash does not cover the stored lengths, but [`parse`](Self::parse) limits them.
    pub fn place(&self, unit: usize) -> Option<std::ops::Range<u64>> {
        let stored = |unit: &Unit| u64::from(unit.stored.get());
        let head = (HEADER_BYTES + self.units.len() * UNIT_ENTRY_BYTES) as u64;
        let start = head + self.units.get(..unit)?.iter().map(stored).sum::<u64>();
        Some(start..start + stored(self.units.get(unit)?))
    }

    /// Returns the size of the stored object in bytes, computed from the unit entries.
    fn object_bytes(&self) -> u64 {
        self.units.len().checked_sub(1).and_then(|last| self.place(last)).map_or(0, |place| place.end)
    }

    /// Unpacks and verifies a unit from the bytes at its [place](Self::place).
    pub fn unit(&self, domain: &Domain, number: usize, stored: &[u8]) -> Result<Vec<u8>, PartError> {
        let mut pages = vec![0; UNIT_BYTES.min(self.pages_bytes.saturating_sub(number * UNIT_BYTES))];
        self.unit_into(domain, number, stored, &mut pages)?;
        Ok(pages)
    }

    fn unit_into(
        &self,
        domain: &Domain,
        number: usize,
        stored: &[u8],
        pages: &mut [u8],
    ) -> Result<(), PartError> {
        let unit = self.units.get(number).ok_or(PartError::Shape)?;
        if stored.len() != unit.stored.get() as usize {
            return Err(PartError::Shape);
        }
        self.packing.unpack(number as u32, stored, pages)?;
        if domain.naming.name(Kind::Unit, &[pages]).0 != unit.hash && !mutants::on(Mutant::StoreIsBelieved) {
            return Err(PartError::Content);
        }
        Ok(())
    }
}

/// Unpacks and verifies all pages of a chunk from its stored object.
pub fn pages(domain: &Domain, name: &Name, object: &[u8]) -> Result<Vec<u8>, PartError> {
    freestone_core::trail::step!();
    let head = Head::parse(domain, name, object)?;
    if head.object_bytes() != object.len() as u64 {
        return Err(PartError::Shape);
    }
    let mut pages = vec![0; head.pages_bytes];
    for (number, pages) in pages.chunks_mut(UNIT_BYTES).enumerate() {
        let place = head.place(number).ok_or(PartError::Shape)?;
        let stored = object.get(place.start as usize..place.end as usize).ok_or(PartError::Shape)?;
        head.unit_into(domain, number, stored, pages)?;
    }
    Ok(pages)
}

#[cfg(test)]
mod tests {
    use super::super::domain::{GRACE, Secret};
    use super::*;

    fn domains() -> [Domain; 2] {
        let secret = Secret::parse(&"5".repeat(64));
        [Domain::new(None, false, GRACE).0, Domain::new(secret.as_ref(), true, GRACE).0]
    }

    /// Returns pages of which every second unit is compressible and the others are noise.
    fn sample(pages: usize) -> Vec<u8> {
        let mut state = 1_u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as u8
        };
        (0..pages * PAGE)
            .map(|at| if (at / UNIT_BYTES).is_multiple_of(2) { (at / 97) as u8 } else { noise() })
            .collect()
    }

    #[test]
    fn chunk_round_trip_whole_and_by_unit() {
        for domain in domains() {
            for count in [1, 15, 16, 17, 100, 128] {
                let sample = sample(count);
                let plain = Plain::new(&domain, &sample);
                let object = plain.stored(&domain).unwrap();
                assert!(object.len() <= STORED_BYTES_MAX);
                assert_eq!(pages(&domain, &plain.name(), &object).unwrap(), sample);
                let head = &object[..HEAD_BYTES_MAX.min(object.len())];
                let head = Head::parse(&domain, &plain.name(), head).unwrap();
                for (number, unit) in sample.chunks(UNIT_BYTES).enumerate() {
                    let place = head.place(number).unwrap();
                    let stored = &object[place.start as usize..place.end as usize];
                    assert_eq!(head.unit(&domain, number, stored).unwrap(), unit);
                    assert!(stored.len() <= UNIT_BYTES + TAG_BYTES);
                }
                assert_eq!(head.place(count.div_ceil(UNIT_PAGES)), None);
            }
        }
        let [open, sealed] = domains();
        let zeroes = vec![0; CHUNK_BYTES];
        assert!(Plain::new(&open, &zeroes).stored(&open).unwrap().len() < 1024);
        let object = Plain::new(&open, &sample(2)).stored(&open).unwrap();
        assert_eq!(pages(&sealed, &Plain::new(&sealed, &sample(2)).name(), &object), Err(PartError::Content));
    }

    #[test]
    fn changed_chunk_is_detected() {
        for domain in domains() {
            let sample = sample(20);
            let plain = Plain::new(&domain, &sample);
            let object = plain.stored(&domain).unwrap();
            for cut in (0..object.len()).step_by(7) {
                assert!(pages(&domain, &plain.name(), &object[..cut]).is_err(), "{cut}");
            }
            let longer = [&object[..], &[0]].concat();
            assert_eq!(pages(&domain, &plain.name(), &longer), Err(PartError::Shape));
            for at in (0..object.len()).filter(|at| *at < 200 || at % 97 == 0) {
                for flip in [1, 0x80, 0xff] {
                    let mut wrong = object.clone();
                    wrong[at] ^= flip;
                    // Without encryption the nonce is unused, so a change of the nonce is not detected. Every
                    // other change is.
                    match pages(&domain, &plain.name(), &wrong) {
                        Ok(pages) => assert!(pages == sample && (16..28).contains(&at), "{at}"),
                        Err(_) => assert!(domain.sealing.is_some() || !(16..28).contains(&at), "{at}"),
                    }
                }
            }
            // No hash covers the stored length of a unit, so the head must refuse a length of 0.
            let mut empty = object.clone();
            empty[HEADER_BYTES + UNIT_ENTRY_BYTES..][..4].fill(0);
            let head = Head::parse(&domain, &plain.name(), &empty[..HEAD_BYTES_MAX.min(empty.len())]);
            assert_eq!(head.err(), Some(PartError::Shape));
            let other = Plain::new(&domain, &sample[PAGE..]).name();
            assert_eq!(pages(&domain, &other, &object), Err(PartError::Content));
        }
    }
}
