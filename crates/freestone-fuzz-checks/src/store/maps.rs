//! Maps: where pages lie.
//!
//! | byte | what |
//! |---|---|
//! | choices | 1: the number of chunks is right; 2: a delta, with 4 a map of no kind; 8: cut; 16: longer; 32: a chunk is too long; 64: hashes are missing |
//! | 0, 1 | the number of chunks |
//! | then, for each run of bits | where it begins, 3 bytes, the highest bit: of the second bitmap; how long it is, 2 bytes |

use freestone::store::format::chunk::STORED_BYTES_MAX;
use freestone::store::format::map::{Hashes, Map, Place};
use freestone::store::format::{SEGMENT_CHUNKS, SEGMENT_PAGES};

/// Most chunks of which the hashes are looked at.
const HASHED_MAX: usize = 8;

/// A map, written apart.
struct Plain {
    is_full: bool,
    /// Of a full map a bit for each chunk, else for each page.
    held: Vec<bool>,
    zero: Vec<bool>,
    count: usize,
    stored_last: u32,
}

fn packed(bits: &[bool]) -> Vec<u8> {
    bits.chunks(8).map(|bits| bits.iter().rev().fold(0, |byte, bit| byte << 1 | u8::from(*bit))).collect()
}

impl Plain {
    fn new(choices: u8, input: &[u8]) -> Option<Self> {
        let (&[low, high], runs) = input.split_first_chunk()?;
        let is_full = choices & 6 == 0;
        let bits = if is_full { SEGMENT_CHUNKS } else { SEGMENT_PAGES };
        let (mut held, mut zero) = (vec![false; bits], vec![false; bits]);
        for &[a, b, c, len, more] in runs.as_chunks().0 {
            let start = usize::from(a & 0x7f) << 16 | usize::from(b) << 8 | usize::from(c);
            let len = usize::from(more) << 8 | usize::from(len);
            let start = start % bits;
            let bitmap = if a & 0x80 != 0 && !is_full { &mut zero } else { &mut held };
            bitmap[start..bits.min(start + len)].fill(true);
        }
        let stored_last = STORED_BYTES_MAX as u32 + u32::from(choices & 32 != 0);
        let mut plain = Self { is_full, held, zero, count: 0, stored_last };
        plain.count =
            if choices & 1 != 0 { plain.chunks() } else { usize::from(high) << 8 | usize::from(low) };
        Some(plain)
    }

    /// Pages, or chunks, that have content.
    fn data(&self) -> usize {
        self.held.iter().zip(&self.zero).filter(|(held, zero)| **held && !**zero).count()
    }

    /// Chunks that hold these.
    fn chunks(&self) -> usize {
        if self.is_full { self.data() } else { self.data().div_ceil(128) }
    }

    fn chunk(&self, number: usize) -> ([u8; 32], u32) {
        let is_last = number + 1 == self.count;
        ([number as u8; 32], if is_last { self.stored_last } else { number as u32 })
    }

    fn bytes(&self, choices: u8) -> Vec<u8> {
        let kind: u32 = match choices & 6 {
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
        if choices & 8 != 0 {
            bytes.truncate(bytes.len() - bytes.len() / 5 - 1);
        }
        if choices & 16 != 0 {
            bytes.push(0);
        }
        bytes
    }

    fn is_sound(&self, choices: u8) -> bool {
        choices & 4 == 0
            && choices & (8 | 16) == 0
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
                (true, false) if self.is_full => Place::In { chunk: data, page: page % 128 },
                (true, false) => Place::In { chunk: data / 128, page: data % 128 },
                (true, true) => Place::Zero,
                _ if self.is_full => Place::Zero,
                _ => Place::Below,
            };
            // Where something changes, and now and then.
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

/// Checks a map.
pub fn check(choices: u8, input: &[u8]) -> bool {
    let Some(plain) = Plain::new(choices, input) else { return false };
    let bytes = plain.bytes(choices);
    let map = Map::parse(&bytes);
    assert_eq!(map.is_some(), plain.is_sound(choices));
    let Some(map) = map else { return false };
    assert!(map.bytes() == bytes, "it is written as it was read");
    plain.compare(&map);
    if plain.count <= HASHED_MAX {
        plain.hashes(&map, choices & 64 != 0);
    }
    true
}
