//! Ages: when a page was last touched, in the six bits that its slot has for that.
//!
//! A slot notes the *epoch* of its last access. An epoch is opened and closed by whoever needs the
//! distinction (once a second by the clock, and by every round of spilling), and knows when it was
//! closed. There are 63 numbers; when they run short, a scan merges those neighbours that are short
//! for their age, so that epochs get longer the older they are, in proportion. A page is as old as
//! the end of its epoch: never older than the truth, and younger by a third at most.
//!
//! Number 0 is "before everything".

use std::collections::VecDeque;

use freestone_core::slot::AGES;
use freestone_core::sync::{AtomicU32, Mutex, Ordering};

/// Numbers below which a scan is due.
const FEW_NUMBERS: usize = 8;
/// Most numbers that a scan makes free.
const FREED_BY_SCAN: usize = 12;

/// The epochs of one disk.
pub struct Ages {
    now: AtomicU32,
    epochs: Mutex<Epochs>,
}

struct Epochs {
    /// Oldest first.
    past: VecDeque<Epoch>,
    free: Vec<u8>,
    merging: bool,
}

#[derive(Clone, Copy)]
struct Epoch {
    number: u8,
    /// When it was closed.
    to_ms: u64,
}

impl Epochs {
    /// Neighbours that are to be one, by the place of the earlier: those whose common length is
    /// least beside their age.
    fn pairs(&self) -> Vec<usize> {
        let now_ms = self.past.back().map_or(0, |epoch| epoch.to_ms);
        let share = |at: usize| {
            let from_ms = if at == 0 { 0 } else { self.past[at - 1].to_ms };
            let to_ms = self.past[at + 1].to_ms;
            // Rounds of spilling can close an epoch at once: it has no length.
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

/// For each number the one that takes its place, while epochs are merged.
pub type Renumbering = [u8; AGES];

impl Default for Ages {
    fn default() -> Self {
        let epochs = Epochs { past: VecDeque::new(), free: (2..AGES as u8).rev().collect(), merging: false };
        Self { now: AtomicU32::new(1), epochs: Mutex::new(epochs) }
    }
}

impl Ages {
    /// The number that an access notes.
    #[inline]
    pub fn now(&self) -> u8 {
        // Relaxed: a page that is touched at the turn may note either epoch.
        self.now.load(Ordering::Relaxed) as u8
    }

    /// Closes the present epoch at `now_ms` and opens the next, if there is a number for it.
    pub fn advance(&self, now_ms: u64) {
        let mut epochs = self.epochs.lock();
        let Some(next) = epochs.free.pop() else { return };
        // Threads take the time before they take the lock: no epoch ends before the one before it.
        let to_ms = now_ms.max(epochs.past.back().map_or(0, |last| last.to_ms));
        epochs.past.push_back(Epoch { number: self.now(), to_ms });
        // Relaxed: written under the lock only, read as above.
        self.now.store(u32::from(next), Ordering::Relaxed);
    }

    /// When the present epoch was opened: at the close of the one before.
    pub fn opened_ms(&self) -> u64 {
        self.epochs.lock().past.back().map_or(0, |epoch| epoch.to_ms)
    }

    /// Which numbers are to be replaced by which, where numbers run short. The caller applies that
    /// to every slot, then calls [`merged`](Self::merged); nobody else gets a renumbering
    /// meanwhile.
    pub fn merge(&self) -> Option<Renumbering> {
        let mut epochs = self.epochs.lock();
        if epochs.free.len() >= FEW_NUMBERS || epochs.merging {
            return None;
        }
        epochs.merging = true;
        let mut renumbering: Renumbering = std::array::from_fn(|number| number as u8);
        for at in epochs.pairs() {
            // The later of two takes the earlier one in: pages look younger, not older.
            renumbering[usize::from(epochs.past[at].number)] = epochs.past[at + 1].number;
        }
        Some(renumbering)
    }

    /// No slot has a replaced number any more.
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

    /// For each number the end of its epoch, `now_ms` for the present one; `None` where nobody
    /// knows.
    pub fn ends(&self, now_ms: u64) -> [Option<u64>; AGES] {
        let epochs = self.epochs.lock();
        let mut ends = [None; AGES];
        for epoch in &epochs.past {
            ends[usize::from(epoch.number)] = Some(epoch.to_ms);
        }
        ends[usize::from(self.now())] = Some(now_ms);
        ends
    }

    /// For each number, whether a page with it was last touched at or before `ms`.
    pub fn untouched_since(&self, ms: u64) -> [bool; AGES] {
        let epochs = self.epochs.lock();
        // A number that is in no epoch was noted by a thread that was long on its way, or before a
        // merge: who knows.
        let mut old = [false; AGES];
        old[0] = true;
        for epoch in &epochs.past {
            old[usize::from(epoch.number)] = epoch.to_ms <= ms;
        }
        old
    }

    /// For each number its place in the order of ages, 0 for the oldest.
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
    fn pages_grow_old_by_epochs() {
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

    /// What was touched long ago is known to be old, however often epochs were merged since.
    #[test]
    fn ages_are_known_in_proportion() {
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

    /// Threads take the time before they take the lock: an epoch may be closed at a moment that
    /// lies before the last one's end.
    #[test]
    fn time_does_not_go_back() {
        let ages = Ages::default();
        let mut last = 0;
        for second in 1..500 {
            ages.advance(second * 1000);
            // One that was held up since.
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
    fn numbers_never_run_out_and_order_is_kept() {
        let ages = Ages::default();
        // What a slot notes, beside the second in which it did.
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
