//! Digest of a disk's content, kept incrementally: a sum over blocks of a hash of block number and
//! content, relative to the content at the start of the recording.
//!
//! A sum does not depend on the order of writes, and a block that returns to its old content cancels
//! itself. The hash is not cryptographic: a log is not expected to contain constructed collisions.

use xxhash_rust::xxh3::xxh3_128_with_seed;

/// Sum of hashes, or a difference of two sums.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Digest(u128);

impl Digest {
    /// Returns the digest of consecutive units of `unit` bytes that start at `offset`. The last
    /// unit may be shorter.
    pub fn of(offset: u64, unit: u64, content: &[u8]) -> Self {
        let first = offset / unit;
        let units = content.chunks(unit as usize).zip(first..);
        units.fold(Self::default(), |sum, (bytes, number)| sum.plus(Self(xxh3_128_with_seed(bytes, number))))
    }

    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.wrapping_add(other.0))
    }

    #[must_use]
    pub const fn minus(self, other: Self) -> Self {
        Self(self.0.wrapping_sub(other.0))
    }

    /// Returns the identity of a state: of its content together with the mark that its check sees.
    pub fn with_mark(self, mark: Option<&str>) -> u128 {
        // The seed distinguishes an absent mark from every other text.
        let mark = mark.map_or(1, |text| xxh3_128_with_seed(text.as_bytes(), u64::from(u32::MAX)));
        let mut bytes = [0; 32];
        bytes[..16].copy_from_slice(&self.0.to_le_bytes());
        bytes[16..].copy_from_slice(&mark.to_le_bytes());
        xxh3_128_with_seed(&bytes, 0)
    }
}

/// A small random sequence: splitmix64. The same seed and words give the same sequence.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(words: &[u64]) -> Self {
        Self(words.iter().fold(0, |state, word| mix(state ^ word)))
    }

    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// Returns a number below `end`, which must not be 0.
    pub const fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}

const fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}
