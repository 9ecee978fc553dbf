//! Ages of pages: the time of the last access, in six bits per slot (the state word of a page).
//!
//! A slot stores the number of the *epoch* of its last access. The clock closes the current epoch
//! once a second, and every eviction round closes it too; each closed epoch records its end time.
//! There are 63 epoch numbers. When few numbers are free, a scan merges the neighbouring epochs
//! that are shortest relative to their age. So the length of epochs grows in proportion to their
//! age. The age of a page is counted from the end of its epoch: at most the real age, and less by
//! at most a third.
//!
//! Number 0 means "before all epochs".

use std::collections::VecDeque;

use freestone_core::slot::AGES;
use freestone_core::sync::{AtomicU32, Mutex, Ordering};

/// Free epoch numbers below which a merge of epochs is due.
const FEW_NUMBERS: usize = 8;
/// Maximum epoch numbers that one merge frees.
const FREED_BY_SCAN: usize = 12;

/// The epochs of one family (a base and its forks, which share memory).
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
    /// Time at which the epoch was closed, in milliseconds of [`now_ms`](freestone_core::clock::now_ms).
    to_ms: u64,
}

impl Epochs {
    /// Returns the pairs of neighbouring epochs to merge, each as the index of its earlier epoch.
    /// Selects the pairs with the least common length relative to their age.
    fn pairs(&self) -> Vec<usize> {
        let now_ms = self.past.back().map_or(0, |epoch| epoch.to_ms);
        let share = |at: usize| {
            let from_ms = if at == 0 { 0 } else { self.past[at - 1].to_ms };
            let to_ms = self.past[at + 1].to_ms;
            // An eviction round may close an epoch within the same millisecond, so its length may
            // be 0.
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

/// New epoch number for each epoch number, to be applied to all slots during a merge.
pub type Renumbering = [u8; AGES];

impl Default for Ages {
    fn default() -> Self {
        let epochs = Epochs { past: VecDeque::new(), free: (2..AGES as u8).rev().collect(), merging: false };
        Self { now: AtomicU32::new(1), epochs: Mutex::new(epochs) }
    }
}

impl Ages {
    /// Returns the number of the current epoch, which an access stores in the slot.
    #[inline]
    pub fn now(&self) -> u8 {
        // Relaxed: an access during a change of epochs may store the old or the new number.
        self.now.load(Ordering::Relaxed) as u8
    }

    /// Closes the current epoch at `now_ms` and opens the next; does nothing if no number is free.
    pub fn advance(&self, now_ms: u64) {
        let mut epochs = self.epochs.lock();
        let Some(next) = epochs.free.pop() else { return };
        // Threads read the clock before they take the lock, so `now_ms` may be earlier than the
        // last end.
        let to_ms = now_ms.max(epochs.past.back().map_or(0, |last| last.to_ms));
        epochs.past.push_back(Epoch { number: self.now(), to_ms });
        // Relaxed: stored only under the lock; an access may read either number, see `now`.
        self.now.store(u32::from(next), Ordering::Relaxed);
    }

    /// Returns the time in milliseconds at which the current epoch was opened; 0 for the first
    /// epoch.
    pub fn opened_ms(&self) -> u64 {
        self.epochs.lock().past.back().map_or(0, |epoch| epoch.to_ms)
    }

    /// Returns the new number of each epoch number if few numbers are free; `None` otherwise, or
    /// while another merge is pending. The caller must apply the result to every slot and then call
    /// [`finish_merge`](Self::finish_merge).
    pub fn begin_merge(&self) -> Option<Renumbering> {
        let mut epochs = self.epochs.lock();
        if epochs.free.len() >= FEW_NUMBERS || epochs.merging {
            return None;
        }
        epochs.merging = true;
        let mut renumbering: Renumbering = std::array::from_fn(|number| number as u8);
        for at in epochs.pairs() {
            // The later epoch absorbs the earlier one, so pages seem younger than they are, never
            // older.
            renumbering[usize::from(epochs.past[at].number)] = epochs.past[at + 1].number;
        }
        Some(renumbering)
    }

    /// Ends a merge and frees the replaced numbers. No slot may have a replaced number any more.
    pub fn finish_merge(&self, renumbering: &Renumbering) {
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

    /// Returns the end time of each epoch in milliseconds, by epoch number: `now_ms` for the
    /// current epoch, `None` for unused numbers.
    pub fn epoch_ends(&self, now_ms: u64) -> [Option<u64>; AGES] {
        let epochs = self.epochs.lock();
        let mut ends = [None; AGES];
        for epoch in &epochs.past {
            ends[usize::from(epoch.number)] = Some(epoch.to_ms);
        }
        ends[usize::from(self.now())] = Some(now_ms);
        ends
    }

    /// Returns, by epoch number, true if pages with this number were last accessed at or before
    /// `ms`.
    pub fn untouched_since(&self, ms: u64) -> [bool; AGES] {
        let epochs = self.epochs.lock();
        // A slow thread may store a number that a merge has freed: the age of such a page is
        // unknown.
        let mut old = [false; AGES];
        old[0] = true;
        for epoch in &epochs.past {
            old[usize::from(epoch.number)] = epoch.to_ms <= ms;
        }
        old
    }

    /// Returns, by epoch number, the rank of the epoch by age, 0 for the oldest.
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

    /// Pages stay old in the ages' report, however often epochs are merged.
    #[test]
    fn age_error_is_at_most_a_third() {
        let ages = Ages::default();
        let mut slots: Vec<(u64, u8)> = Vec::new();
        for second in 0..20_000 {
            slots.push((second, ages.now()));
            ages.advance((second + 1) * 1000);
            if let Some(renumbering) = ages.begin_merge() {
                for (_, number) in &mut slots {
                    *number = renumbering[usize::from(*number)];
                }
                ages.finish_merge(&renumbering);
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

    /// Threads read the clock before they take the lock, so an epoch may be closed with an earlier
    /// time than the previous epoch.
    #[test]
    fn epoch_close_in_past_keeps_order() {
        let ages = Ages::default();
        let mut last = 0;
        for second in 1..500 {
            ages.advance(second * 1000);
            // A delayed thread, which read the clock 30 ms earlier.
            ages.advance(second * 1000 - 30);
            assert!(ages.opened_ms() >= last && ages.opened_ms() >= second * 1000);
            last = ages.opened_ms();
            let old = ages.untouched_since(last - 1);
            assert!(!old[usize::from(ages.now())]);
            if let Some(renumbering) = ages.begin_merge() {
                ages.finish_merge(&renumbering);
            }
        }
        assert!(ages.epochs.lock().past.iter().is_sorted_by_key(|epoch| epoch.to_ms));
    }

    #[test]
    fn merge_frees_numbers_and_keeps_order() {
        let ages = Ages::default();
        // Pairs of the access time in seconds and the epoch number stored in a slot.
        let mut slots: Vec<(u64, u8)> = Vec::new();
        for second in 0..1000 {
            slots.push((second, ages.now()));
            ages.advance((second + 1) * 1000);
            if let Some(renumbering) = ages.begin_merge() {
                assert!(ages.begin_merge().is_none(), "one merge at a time");
                for (_, number) in &mut slots {
                    *number = renumbering[usize::from(*number)];
                }
                ages.finish_merge(&renumbering);
            }
            let ranks = ages.ranks();
            assert!(slots.windows(2).all(|w| ranks[usize::from(w[0].1)] <= ranks[usize::from(w[1].1)]));
        }
    }
}
