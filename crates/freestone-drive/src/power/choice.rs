//! Random choice of the writes that a unit loses at a power cut. The choice is a hash of the seed
//! and the unit, so the same seed reproduces the same loss in any order of units.

/// Lower limit, in 256ths, of the probability that a unit loses all unflushed writes. The upper
/// limit is `LOSS_MIN + LOSS_SPAN`. The seed chooses the probability, so some cuts lose nearly
/// everything and some nearly nothing.
const LOSS_MIN: u64 = 16;
const LOSS_SPAN: u64 = 224;

#[derive(Debug, Clone, Copy)]
pub struct CutChoice {
    seed: u64,
    loss: u64,
}

impl CutChoice {
    pub const fn new(seed: u64) -> Self {
        Self { seed, loss: LOSS_MIN + mix(seed ^ 0x6c6f_7373) % LOSS_SPAN }
    }

    /// Chooses the content of a unit with `versions` unflushed writes (at least one). Returns the
    /// index of the last write that survives, 0 for the oldest, or `None` if all are lost.
    pub const fn of(&self, unit: u64, versions: u64) -> Option<u64> {
        let word = mix(mix(self.seed).wrapping_add(unit));
        if word % 256 < self.loss { None } else { Some((word >> 8) % versions) }
    }
}

/// Mixes a word with the finalizer of splitmix64: every input bit affects every output bit.
const fn mix(word: u64) -> u64 {
    let word = word.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_cover_all_outcomes_and_loss_varies_by_seed() {
        let mut losses = Vec::new();
        for seed in 0..200 {
            let choice = CutChoice::new(seed);
            let mut counts = [0_u64; 4];
            for block in 0..2000 {
                match choice.of(block, 3) {
                    None => counts[3] += 1,
                    Some(version) => counts[version as usize] += 1,
                }
            }
            assert!(counts.iter().all(|&count| count > 10), "seed {seed}: {counts:?}");
            losses.push(counts[3]);
        }
        losses.sort_unstable();
        assert!(losses[10] < 400 && losses[190] > 1500, "{losses:?}");
    }
}
