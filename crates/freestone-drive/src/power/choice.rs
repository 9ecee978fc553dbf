//! What a power cut leaves of a unit, which it does not tear: a hash of seed and unit decides, so the
//! same seed gives the same loss, whatever the order of the units.

/// The chance, in 256ths, that a unit loses all that is unflushed: at least [`LOSS_MIN`], below
/// `LOSS_MIN + LOSS_SPAN`. It differs from seed to seed, so that some cuts lose nearly all and some
/// nearly nothing.
const LOSS_MIN: u64 = 16;
const LOSS_SPAN: u64 = 224;

/// Decides for all units of one cut.
#[derive(Debug, Clone, Copy)]
pub struct Choice {
    seed: u64,
    loss: u64,
}

impl Choice {
    pub const fn new(seed: u64) -> Self {
        Self { seed, loss: LOSS_MIN + mix(seed ^ 0x6c6f_7373) % LOSS_SPAN }
    }

    /// What becomes of a unit to which `versions` unflushed writes came (at least one): `None` for
    /// its old content, else the last of them that happened, 0 for the oldest.
    pub const fn of(&self, unit: u64, versions: u64) -> Option<u64> {
        let word = mix(mix(self.seed).wrapping_add(unit));
        if word % 256 < self.loss { None } else { Some((word >> 8) % versions) }
    }
}

/// The finisher of splitmix64: every bit of the result depends on every bit of the input.
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
    fn every_outcome_happens_and_seeds_differ_in_how_much_they_lose() {
        let mut losses = Vec::new();
        for seed in 0..200 {
            let choice = Choice::new(seed);
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
