//! The choices of lost writes that are tried at a window, by their index.
//!
//! If the window has few choices, all of them follow one another. Otherwise the sequence mixes the
//! choices that most often find an error (all but one write kept, one write kept, the newest writes
//! lost) with random ones, and does not end. Writes far from one another come first.

use crate::digest::Random;
use crate::epoch::{Epoch, Lost};

/// Number of choices up to which all choices of a window are tried.
const EXHAUSTIVE_MAX: u64 = 256;
/// Number of choices in a group: one of each kind.
const KINDS: u64 = 4;
/// Number of ways in which a write is torn on purpose.
const TEARS: usize = 6;
/// Limits, in 256ths, of the probability that a random choice loses a write.
const LOSS_MIN: u64 = 16;
const LOSS_SPAN: u64 = 224;

/// How writes are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// Mostly whole writes.
    Writes,
    /// Parts of writes.
    Parts,
}

/// Sequence of choices at a window.
pub struct Candidates<'a> {
    epoch: &'a Epoch,
    loss: Loss,
    /// Number of choices, if they are few.
    all: Option<u64>,
    /// Writes that can be lost, in the order in which they are tried.
    order: Vec<usize>,
    /// Seed of the random choices.
    seed: [u64; 2],
}

impl<'a> Candidates<'a> {
    /// Returns the sequence at the window that ends at `point`.
    pub fn new(epoch: &'a Epoch, loss: Loss, point: u64, seed: u64) -> Self {
        let choices = epoch.choices(EXHAUSTIVE_MAX + 1);
        let writes = epoch.losable_writes();
        let all = (choices <= EXHAUSTIVE_MAX).then_some(choices);
        Self { epoch, loss, all, order: spread(&writes), seed: [seed, point] }
    }

    /// Returns true if the sequence consists of all choices of the window.
    pub const fn has_all_choices(&self) -> bool {
        self.all.is_some()
    }

    /// Returns the choice with this index, or `None` after the last one.
    pub fn get(&self, index: u64) -> Option<Lost> {
        if let Some(all) = self.all {
            return (index < all).then(|| self.mixed_radix(index));
        }
        let writes = self.order.len() as u32;
        if self.loss == Loss::Writes && writes < EXHAUSTIVE_MAX.ilog2() {
            // All subsets of the writes, then random subsets of their blocks.
            if index < 1 << writes {
                let bit = |write: usize| self.order.iter().position(|other| *other == write);
                return Some(self.epoch.lose(|write, _| bit(write).is_some_and(|bit| index >> bit & 1 == 1)));
            }
            return Some(self.random(index));
        }
        let Some(index) = index.checked_sub(1) else { return Some(self.epoch.lose(|_, _| true)) };
        let (group, kind) = ((index / KINDS) as usize, index % KINDS);
        Some(
            match self.loss {
                Loss::Writes => self.order.get(group).and_then(|&chosen| match kind {
                    0 => Some(self.epoch.lose(|write, _| write == chosen)),
                    1 => Some(self.epoch.lose(|write, _| write != chosen)),
                    2 => Some(self.epoch.lose(|write, _| write >= chosen)),
                    _ => None,
                }),
                Loss::Parts if kind == 3 => None,
                Loss::Parts => {
                    let at = group * 3 + kind as usize;
                    self.order.get(at / TEARS).map(|&chosen| self.tear(chosen, at % TEARS))
                }
            }
            .unwrap_or_else(|| self.random(index)),
        )
    }

    /// Returns the choice whose digits are the numbers of versions that each block loses.
    fn mixed_radix(&self, mut index: u64) -> Lost {
        let mut lost = Lost::new();
        for (&number, block) in &self.epoch.blocks {
            let choices = block.losable() as u64 + 1;
            let versions = (index % choices) as usize;
            index /= choices;
            if versions > 0 {
                lost.insert(number, block.versions.len() - versions);
            }
        }
        lost
    }

    /// Returns the choice in which the power fails during a write: later writes are lost, and a part
    /// of this one.
    fn tear(&self, chosen: usize, way: usize) -> Lost {
        let blocks = self.epoch.writes[chosen].blocks(self.epoch.unit);
        let (first, last, middle) = (blocks.start, blocks.end - 1, blocks.start.midpoint(blocks.end));
        let is_torn = |block: u64| match way {
            0 => block >= middle,
            1 => block < middle,
            2 => block == first,
            3 => block == last,
            4 => block != first,
            _ => block != last,
        };
        self.epoch.lose(|write, block| write > chosen || write == chosen && is_torn(block))
    }

    fn random(&self, index: u64) -> Lost {
        let mut random = Random::new(&[self.seed[0], self.seed[1], index]);
        let loss = LOSS_MIN + random.below(LOSS_SPAN);
        let by_block = self.loss == Loss::Parts || random.below(2) == 0;
        // Half of the choices lose all writes after a random one, as a power loss at that moment would.
        let writes = self.epoch.writes.len() as u64;
        let cut = if random.below(2) == 0 { writes } else { random.below(writes) };
        let seed = random.next();
        self.epoch.lose(|write, block| {
            let part = if by_block { block + 1 } else { 0 };
            write as u64 >= cut || Random::new(&[seed, write as u64, part]).below(256) < loss
        })
    }
}

/// Orders elements so that each prefix of the result is spread over the whole list.
fn spread(list: &[usize]) -> Vec<usize> {
    let bits = list.len().next_power_of_two().ilog2();
    let places = (0..1_usize << bits).map(|place| match bits {
        0 => 0,
        bits => place.reverse_bits() >> (usize::BITS - bits),
    });
    places.filter_map(|place| list.get(place).copied()).collect()
}

#[cfg(test)]
mod tests {
    use super::spread;

    #[test]
    fn spread_holds_each_element_once() {
        for len in 0..40 {
            let list: Vec<_> = (0..len).map(|index| index * 3).collect();
            let mut spread = spread(&list);
            assert!(len < 4 || spread[1] >= len, "the first two are neighbours: {spread:?}");
            spread.sort_unstable();
            assert_eq!(spread, list);
        }
    }
}
