//! The order of states: rounds, each of which covers the whole log and doubles the number of states.
//!
//! A small budget therefore tries points and windows of the whole run, and a larger one adds those
//! between them and further choices of lost writes. Each round is one walk over the log.

use crate::BLOCK_BYTES;
use crate::candidates::Loss;
use crate::timeline::Timeline;

/// Number of points, and of windows, that the first round covers.
const FIRST_ROUND: u64 = 64;
/// Number of rounds after the last window was reached once, at most. The last of them tries 2^39
/// choices at one window, which no exploration reaches.
const ROUNDS_MAX: u32 = 40;

/// A rule for which writes a power loss may lose.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Model {
    /// All writes after a point: the disk persists writes in order.
    Prefix,
    /// Any of the writes since the last flush, each block of 4096 bytes by itself: the disk reorders
    /// writes between flushes.
    Subset,
    /// As `Subset`, but each unit inside a block by itself: the disk tears blocks.
    Torn,
}

/// The order of states.
pub struct Schedule {
    points: Option<Spread>,
    windows: Spread,
    losses: Vec<(Loss, u64)>,
}

/// Assigns the elements of a list to rounds.
struct Spread {
    /// Number of rounds until every element was tried once, minus 1.
    rounds: u32,
    len: u64,
}

impl Spread {
    fn new(len: u64) -> Self {
        Self { rounds: len.div_ceil(FIRST_ROUND).max(1).next_power_of_two().ilog2(), len }
    }

    /// Returns the round that tries an element for the first time.
    fn round(&self, index: u64) -> u32 {
        self.rounds - self.rounds.min(index.trailing_zeros())
    }
}

impl Schedule {
    pub fn new(timeline: &Timeline, models: &[Model], unit: u64) -> Self {
        let has = |model| models.contains(&model);
        let mut losses = Vec::new();
        if has(Model::Subset) {
            losses.push((Loss::Writes, BLOCK_BYTES));
        }
        if has(Model::Torn) {
            losses.push((Loss::Parts, unit));
        }
        Self {
            points: has(Model::Prefix).then(|| Spread::new(timeline.entries() + 1)),
            windows: Spread::new(timeline.windows().len() as u64),
            losses,
        }
    }

    /// Returns the ways in which writes are lost, each with its unit in bytes.
    pub fn losses(&self) -> &[(Loss, u64)] {
        &self.losses
    }

    /// Returns true if a round tries the state after `point` entries with nothing lost.
    pub fn has_prefix(&self, round: u32, point: u64) -> bool {
        self.points.as_ref().is_some_and(|points| point < points.len && points.round(point) == round)
    }

    /// Returns the indices of the candidates that a round tries at the window with this index.
    pub fn candidates(&self, round: u32, window: u64) -> std::ops::Range<u64> {
        match round.checked_sub(self.windows.round(window)) {
            _ if self.losses.is_empty() => 0..0,
            None => 0..0,
            Some(0) => 0..1,
            Some(age) => 1 << (age - 1)..1 << age,
        }
    }

    /// Returns the number of rounds.
    pub fn rounds(&self) -> u32 {
        let points = self.points.as_ref().map_or(0, |points| points.rounds);
        if self.losses.is_empty() { points + 1 } else { points.max(self.windows.rounds) + ROUNDS_MAX }
    }

    /// Returns true if later rounds may try nothing new: every point and window was tried.
    pub fn is_covered(&self, round: u32) -> bool {
        round >= self.points.as_ref().map_or(0, |points| points.rounds).max(self.windows.rounds)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_cover_each_candidate_once_and_spread() {
        for len in [0, 1, 5, 64, 65, 1000] {
            let windows = Spread::new(len);
            let schedule =
                Schedule { points: Some(Spread::new(len)), windows, losses: vec![(Loss::Writes, 4096)] };
            let mut seen = vec![0; len as usize];
            for round in 0..=schedule.windows.rounds + 3 {
                for window in 0..len {
                    let range = schedule.candidates(round, window);
                    assert!(range.is_empty() || range.start == seen[window as usize]);
                    seen[window as usize] += range.end - range.start;
                }
            }
            assert!(seen.iter().all(|count| *count >= 8), "{seen:?}");
            let first: Vec<_> = (0..len).filter(|point| schedule.has_prefix(0, *point)).collect();
            assert!(
                first.len() as u64 >= len.min(FIRST_ROUND / 2) && first.len() as u64 <= FIRST_ROUND.min(len)
            );
            assert!(first.last().is_none_or(|last| len - last <= len.div_ceil(FIRST_ROUND / 2)));
        }
    }
}
