//! Page maps, which locate the pages of a segment in chunks.
//!
//! | byte | content |
//! |---|---|
//! | options | 1: correct number of chunks; 2: a delta, with 4 an unknown kind; 8: truncated; 16: surplus byte; 32: a chunk is too long; 64: hashes are missing |
//! | 0, 1 | number of chunks |
//! | then, for each run of consecutive bits | start, 3 bytes, with the highest bit in the second bitmap; length, 2 bytes |

use freestone::store::format::chunk::STORED_BYTES_MAX;
use freestone::store::format::map::{Hashes, Map, PageLocation};
use freestone::store::format::{SEGMENT_CHUNKS, SEGMENT_PAGES};

/// Page hashes are checked only for maps with at most this number of chunks.
const HASHED_MAX: usize = 8;

struct ReferenceMap {
    is_full: bool,
    /// A bit for each chunk of a full map, or for each page of a delta.
    held: Vec<bool>,
    zero: Vec<bool>,
    count: usize,
    stored_last: u32,
}

fn packed(bits: &[bool]) -> Vec<u8> {
    bits.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit))).collect()
}

impl ReferenceMap {
    fn new(options: u8, input: &[u8]) -> Option<Self> {
        let (&[low, high], runs) = input.split_first_chunk()?;
        let is_full = options & 6 == 0;
        let bits = if is_full { SEGMENT_CHUNKS } else { SEGMENT_PAGES };
        let (mut held, mut zero) = (vec![false; bits], vec![false; bits]);
        for &[a, b, c, len, more] in runs.as_chunks().0 {
            let start = usize::from(a & 0x7f) << 16 | usize::from(b) << 8 | usize::from(c);
            let len = usize::from(more) << 8 | usize::from(len);
            let start = start % bits;
            let bitmap = if a & 0x80 != 0 && !is_full { &mut zero } else { &mut held };
            bitmap[start..bits.min(start + len)].fill(true);
        }
        let stored_last = STORED_BYTES_MAX as u32 + u32::from(options & 32 != 0);
        let mut reference = Self { is_full, held, zero, count: 0, stored_last };
        reference.count =
            if options & 1 != 0 { reference.chunks() } else { usize::from(high) << 8 | usize::from(low) };
        Some(reference)
    }

    /// Returns the number of chunks of a full map, or of pages of a delta, with data other than zeroes.
    fn data(&self) -> usize {
        self.held.iter().zip(&self.zero).filter(|(held, zero)| **held && !**zero).count()
    }

    fn chunks(&self) -> usize {
        if self.is_full { self.data() } else { self.data().div_ceil(128) }
    }

    fn chunk(&self, number: usize) -> ([u8; 32], u32) {
        let is_last = number + 1 == self.count;
        ([number as u8; 32], if is_last { self.stored_last } else { number as u32 })
    }

    fn bytes(&self, options: u8) -> Vec<u8> {
        let kind: u32 = match options & 6 {
            0 => 1,
            2 => 2,
            other => u32::from(other) << 6,
        };
        let mut bytes = [kind.to_le_bytes(), (self.count as u32).to_le_bytes()].concat();
        bytes.extend(packed(&self.held));
        if !self.is_full {
            bytes.extend(packed(&self.zero));
        }
        for (name, stored) in (0..self.count).map(|number| self.chunk(number)) {
            bytes.extend(name);
            bytes.extend(stored.to_le_bytes());
        }
        if options & 8 != 0 {
            bytes.truncate(bytes.len() - bytes.len() / 5 - 1);
        }
        if options & 16 != 0 {
            bytes.push(0);
        }
        bytes
    }

    fn is_valid(&self, options: u8) -> bool {
        options & 4 == 0
            && options & (8 | 16) == 0
            && self.count == self.chunks()
            && self.count <= SEGMENT_CHUNKS
            && (self.count == 0 || self.stored_last as usize <= STORED_BYTES_MAX)
            && self.zero.iter().zip(&self.held).all(|(zero, held)| *held || !*zero)
    }

    fn compare(&self, map: &Map) {
        let (mut data, mut before) = (0, None);
        for page in 0..SEGMENT_PAGES {
            let at = if self.is_full { page / 128 } else { page };
            let bits = (self.held[at], self.zero[at]);
            let place = match bits {
                (true, false) if self.is_full => PageLocation::In { chunk: data, page: page % 128 },
                (true, false) => PageLocation::In { chunk: data / 128, page: data % 128 },
                (true, true) => PageLocation::Zero,
                _ if self.is_full => PageLocation::Zero,
                _ => PageLocation::Below,
            };
            // Check the pages at which the bits change, and a sample of the other pages.
            if before != Some(bits) || page % 61 == 5 || page + 1 == SEGMENT_PAGES {
                assert_eq!(map.place(page), place, "page {page}");
            }
            before = Some(bits);
            data += usize::from(bits == (true, false) && (!self.is_full || page % 128 == 127));
        }
        let chunks: Vec<_> = map.chunks().iter().map(|chunk| (chunk.name.0, chunk.stored)).collect();
        assert_eq!(chunks, (0..self.count).map(|number| self.chunk(number)).collect::<Vec<_>>());
        match map.held() {
            None => assert!(self.is_full),
            Some(held) => assert!(!self.is_full && held.bytes() == packed(&self.held)),
        }
    }

    fn hashes(&self, map: &Map, missing: bool) {
        let count = if self.is_full { self.count * 128 } else { self.data() };
        let bytes: Vec<u8> = (0..count * 16).map(|at| (at / 16 % 251) as u8).collect();
        let cut = usize::from(missing && count > 0);
        let hashes = Hashes::parse(&bytes[cut..], map);
        assert_eq!(hashes.is_some(), cut == 0);
        if let Some(hashes) = hashes {
            assert!(hashes.bytes() == bytes);
            for number in 0..count {
                assert_eq!(hashes.at(number / 128, number % 128), [(number % 251) as u8; 16]);
            }
            assert_eq!(hashes.at(count / 128, count % 128), [0; 16]);
        }
    }
}

/// Checks a page map. Returns true if the map was accepted.
pub fn check(options: u8, input: &[u8]) -> bool {
    let Some(reference) = ReferenceMap::new(options, input) else { return false };
    let bytes = reference.bytes(options);
    let map = Map::parse(&bytes);
    assert_eq!(map.is_some(), reference.is_valid(options));
    let Some(map) = map else { return false };
    assert!(map.bytes() == bytes, "a map is written as it was read");
    reference.compare(&map);
    if reference.count <= HASHED_MAX {
        reference.hashes(&map, options & 64 != 0);
    }
    true
}
