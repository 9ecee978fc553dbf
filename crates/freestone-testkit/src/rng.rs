//! Seeded random numbers: the same seed gives the same sequence.

/// A small random number generator (splitmix64), for tests only.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Returns a generator whose sequence is determined by this seed.
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the next 64 random bits.
    pub fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..bound`, or 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        if bound == 0 { 0 } else { self.word() % bound }
    }

    /// Returns true with a probability of `percent` percent.
    pub fn chance(&mut self, percent: u8) -> bool {
        self.below(100) < u64::from(percent)
    }

    /// Fills `out` with random bytes, which do not compress.
    pub fn fill(&mut self, out: &mut [u8]) {
        for chunk in out.chunks_mut(8) {
            let word = self.word().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
    }

    /// Fills `out` with content of a random kind: zeroes, a repeated byte, a repeated 64-bit word,
    /// compressible or incompressible data. Devices treat these kinds differently.
    pub fn content(&mut self, out: &mut [u8]) {
        match self.below(6) {
            0 => out.fill(0),
            1 => out.fill(self.word() as u8),
            2 => {
                let word = self.word().to_le_bytes();
                for chunk in out.chunks_mut(8) {
                    chunk.copy_from_slice(&word[..chunk.len()]);
                }
            }
            3 => {
                // Runs of one byte with some noise compress, but do not form a same-filled page.
                for chunk in out.chunks_mut(64) {
                    chunk.fill(self.word() as u8);
                    chunk[0] = self.word() as u8;
                }
            }
            _ => self.fill(out),
        }
    }
}
