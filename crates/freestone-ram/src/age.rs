//! Ages of pages: the time of the last access, in six bits per slot.
//!
//! A slot stores the *epoch* of its last access. Epochs are closed by the clock (once a second) and
//! by every eviction round, and each knows the time at which it was closed. There are 63 numbers.
//! When few are free, a scan merges the neighbouring epochs that are shortest relative to their
//! age, so the length of epochs grows in proportion to their age. A page counts as old as the end
//! of its epoch: never older than it is, and younger by at most a third.
//!
//! Number 0 means "before all epochs".

use std::collections::VecDeque;

use freestone_core::slot::AGES;
use freestone_core::sync::{AtomicU32, Mutex, Ordering};

/// A merge is due if fewer numbers are free.
const FEW_NUMBERS: usize = 8;
/// Maximum numbers that a merge frees.
const FREED_BY_SCAN: usize = 12;

/// The epochs of one family.
pub struct Ages {
    now: AtomicU32,
    epochs: Mutex<Epochs>,
}

struct Epochs {
    /// Closed epochs, oldest first.
    past: VecDeque<Epoch>,
    free: Vec<u8>,
    merging: bool,
}

#[derive(Clone, Copy)]
struct Epoch {
    number: u8,
    /// Time at which the epoch was closed.
    to_ms: u64,
}

impl Epochs {
    /// Returns the neighbours to merge, as the index of the earlier epoch: those with the least
    /// common length relative to their age.
    fn pairs(&self) -> Vec<usize> {
        let now_ms = self.past.back().map_or(0, |epoch| epoch.to_ms);
        let share = |at: usize| {
            let from_ms = if at == 0 { 0 } else { self.past[at - 1].to_ms };
            let to_ms = self.past[at + 1].to_ms;
            // An eviction round can close an epoch at once, so its length may be 0.
            (to_ms - from_ms) as f64 / (now_ms - to_ms + 1000) as f64
        };
        let mut all: Vec<usize> = (0..self.past.len().saturating_sub(1)).collect();
        all.sort_by(|&a, &b| share(a).total_cmp(&share(b)));
        let mut pairs: Vec<usize> = Vec::with_capacity(FREED_BY_SCAN);
        for at in all {
            if pairs.len() < FREED_BY_SCAN && !pairs.iter().any(|&pair| pair.abs_diff(at) < 2) {
                pairs.push(at);
            }
        }
        pairs
    }
}

/// Replacement of each number during a merge.
pub type Renumbering = [u8; AGES];

impl Default for Ages {
    fn default() -> Self {
        let epochs = Epochs { past: VecDeque::new(), free: (2..AGES as u8).rev().collect(), merging: false };
        Self { now: AtomicU32::new(1), epochs: Mutex::new(epochs) }
    }
}

impl Ages {
    /// Returns the number that an access stores.
    #[inline]
    pub fn now(&self) -> u8 {
        // Relaxed: an access at the change of epochs may store either number.
        self.now.load(Ordering::Relaxed) as u8
    }

    /// Closes the current epoch at `now_ms` and opens the next, if a number is free.
    pub fn advance(&self, now_ms: u64) {
        let mut epochs = self.epochs.lock();
        let Some(next) = epochs.free.pop() else { return };
        // Threads read the clock before they lock: keep the ends of epochs in order.
        let to_ms = now_ms.max(epochs.past.back().map_or(0, |last| last.to_ms));
        epochs.past.push_back(Epoch { number: self.now(), to_ms });
        // Relaxed: written under the lock only; see `now`.
        self.now.store(u32::from(next), Ordering::Relaxed);
    }

    /// Returns the time at which the current epoch was opened.
    pub fn opened_ms(&self) -> u64 {
        self.epochs.lock().past.back().map_or(0, |epoch| epoch.to_ms)
    }

    /// Returns the replacement of numbers if few are free. The caller must apply it to every slot
    /// and then call [`merged`](Self::merged); other calls return `None` until then.
    pub fn merge(&self) -> Option<Renumbering> {
        let mut epochs = self.epochs.lock();
        if epochs.free.len() >= FEW_NUMBERS || epochs.merging {
            return None;
        }
        epochs.merging = true;
        let mut renumbering: Renumbering = std::array::from_fn(|number| number as u8);
        for at in epochs.pairs() {
            // The later epoch absorbs the earlier: pages look younger, never older.
            renumbering[usize::from(epochs.past[at].number)] = epochs.past[at + 1].number;
        }
        Some(renumbering)
    }

    /// Ends a merge: no slot has a replaced number any more.
    pub fn merged(&self, renumbering: &Renumbering) {
        let mut epochs = self.epochs.lock();
        let Epochs { past, free, merging } = &mut *epochs;
        past.retain(|epoch| {
            let stays = renumbering[usize::from(epoch.number)] == epoch.number;
            if !stays {
                free.push(epoch.number);
            }
            stays
        });
        *merging = false;
    }

    /// Returns the end of each number's epoch, `now_ms` for the current one; `None` if unknown.
    pub fn ends(&self, now_ms: u64) -> [Option<u64>; AGES] {
        let epochs = self.epochs.lock();
        let mut ends = [None; AGES];
        for epoch in &epochs.past {
            ends[usize::from(epoch.number)] = Some(epoch.to_ms);
        }
        ends[usize::from(self.now())] = Some(now_ms);
        ends
    }

    /// Returns for each number whether its pages were last accessed at or before `ms`.
    pub fn untouched_since(&self, ms: u64) -> [bool; AGES] {
        let epochs = self.epochs.lock();
        // A number without an epoch was read by a slow thread before a merge: its age is unknown.
        let mut old = [false; AGES];
        old[0] = true;
        for epoch in &epochs.past {
            old[usize::from(epoch.number)] = epoch.to_ms <= ms;
        }
        old
    }

    /// Returns the rank of each number by age, 0 for the oldest.
    pub fn ranks(&self) -> [u8; AGES] {
        let epochs = self.epochs.lock();
        let mut ranks = [AGES as u8 - 1; AGES];
        ranks[0] = 0;
        for (place, epoch) in epochs.past.iter().enumerate() {
            ranks[usize::from(epoch.number)] = place as u8 + 1;
        }
        ranks
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn ages_follow_epochs() {
        let ages = Ages::default();
        let first = ages.now();
        ages.advance(1000);
        let second = ages.now();
        ages.advance(2000);
        let (old, ranks) = (ages.untouched_since(1000), ages.ranks());
        let of = |table: [bool; AGES], n: u8| table[usize::from(n)];
        assert!(of(old, 0) && of(old, first) && !of(old, second) && !of(old, ages.now()));
        assert!(!of(ages.untouched_since(999), first));
        let rank = |n: u8| ranks[usize::from(n)];
        assert!(rank(0) < rank(first) && rank(first) < rank(second) && rank(second) < rank(ages.now()));
        assert_eq!(ages.opened_ms(), 2000);
    }

    /// Old pages remain known as old, however often epochs are merged.
    #[test]
    fn age_error_is_at_most_a_third() {
        let ages = Ages::default();
        let mut slots: Vec<(u64, u8)> = Vec::new();
        for second in 0..20_000 {
            slots.push((second, ages.now()));
            ages.advance((second + 1) * 1000);
            if let Some(renumbering) = ages.merge() {
                for (_, number) in &mut slots {
                    *number = renumbering[usize::from(*number)];
                }
                ages.merged(&renumbering);
            }
            if second % 97 != 0 {
                continue;
            }
            for ago in [1, 10, 60, 300, 3600, 10_000] {
                let old = ages.untouched_since((second + 1).saturating_sub(ago) * 1000);
                for &(touched, number) in &slots {
                    let age = second - touched;
                    let said = old[usize::from(number)];
                    assert!(!said || age >= ago, "{age} s: said to be {ago} s old");
                    assert!(said || age <= ago * 3 / 2, "{age} s: not said to be {ago} s old");
                }
            }
        }
    }

    /// Threads read the clock before they lock, so a close may have an earlier time than the one
    /// before.
    #[test]
    fn epoch_close_in_past_keeps_order() {
        let ages = Ages::default();
        let mut last = 0;
        for second in 1..500 {
            ages.advance(second * 1000);
            // A delayed thread.
            ages.advance(second * 1000 - 30);
            assert!(ages.opened_ms() >= last && ages.opened_ms() >= second * 1000);
            last = ages.opened_ms();
            let old = ages.untouched_since(last - 1);
            assert!(!old[usize::from(ages.now())]);
            if let Some(renumbering) = ages.merge() {
                ages.merged(&renumbering);
            }
        }
        assert!(ages.epochs.lock().past.iter().is_sorted_by_key(|epoch| epoch.to_ms));
    }

    #[test]
    fn merge_frees_numbers_and_keeps_order() {
        let ages = Ages::default();
        // Pairs of access time in seconds and number stored in a slot.
        let mut slots: Vec<(u64, u8)> = Vec::new();
        for second in 0..1000 {
            slots.push((second, ages.now()));
            ages.advance((second + 1) * 1000);
            if let Some(renumbering) = ages.merge() {
                assert!(ages.merge().is_none(), "one merge at a time");
                for (_, number) in &mut slots {
                    *number = renumbering[usize::from(*number)];
                }
                ages.merged(&renumbering);
            }
            let ranks = ages.ranks();
            assert!(slots.windows(2).all(|w| ranks[usize::from(w[0].1)] <= ranks[usize::from(w[1].1)]));
        }
    }
}
