//! Which writes were answered and are not durable, and which of them a server may have lost.
//!
//! Writes are counted as they are answered; a flush covers those that were answered when it came.
//! Where all connections are gone the server may have been started again, and without what it had
//! in its cache: the flushes that would have covered that fail, or, where there are none, the next
//! one does.

/// The count.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Writes that were answered.
    answered: u64,
    /// The first so many of them are durable, or it was told that they may not be.
    settled: u64,
    /// The first so many of them may be lost, and nobody was told of the last of these.
    untold: u64,
}

impl Ledger {
    /// A write was answered that is not durable.
    pub fn answered(&mut self) {
        self.answered += 1;
    }

    /// What a flush that comes now makes durable.
    pub fn covers(&self) -> u64 {
        self.answered
    }

    /// A flush was answered; false: what it covers may be lost, and it fails.
    #[must_use]
    pub fn flushed(&mut self, covers: u64, doomed: bool) -> bool {
        if doomed {
            return false;
        }
        let told = self.settled < self.untold && covers > self.settled;
        self.settled = self.settled.max(covers);
        if told && self.settled >= self.untold {
            self.untold = 0;
        }
        !told
    }

    /// All connections are gone, and with them perhaps what the server had in its cache. `flushes` are
    /// what those on their way cover. Answers how many writes were answered and may be lost, if any.
    pub fn lost(&mut self, flushes: impl Iterator<Item = u64>) -> Option<u64> {
        let first = self.settled;
        if self.answered == first {
            return None;
        }
        // Those of them that fail tell of what they cover.
        let told = flushes.filter(|covers| *covers > first).max().unwrap_or(first);
        self.settled = told;
        self.untold = if self.answered > told { self.answered } else { 0 };
        Some(self.answered - first)
    }

    /// Whether a flush on its way that covers so many will have to fail if all is lost now.
    pub fn is_at_risk(&self, covers: u64) -> bool {
        covers > self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(answered: u64) -> Ledger {
        let mut ledger = Ledger::default();
        (0..answered).for_each(|_| ledger.answered());
        ledger
    }

    #[test]
    fn the_next_flush_fails_once_where_writes_may_be_lost() {
        let mut ledger = of(3);
        assert_eq!(ledger.lost([].into_iter()), Some(3));
        assert!(!ledger.flushed(3, false));
        assert!(ledger.flushed(3, false));
        assert_eq!(ledger.lost([].into_iter()), None);
    }

    #[test]
    fn nothing_is_lost_that_a_flush_has_covered() {
        let mut ledger = of(3);
        assert!(ledger.flushed(3, false));
        assert_eq!(ledger.lost([].into_iter()), None);
        ledger.answered();
        assert_eq!(ledger.lost([].into_iter()), Some(1));
        // More is written before the next flush.
        ledger.answered();
        assert!(!ledger.flushed(5, false));
        assert!(ledger.flushed(5, false));
    }

    #[test]
    fn flushes_on_their_way_fail_and_tell_of_what_they_cover() {
        let mut ledger = of(5);
        assert!(ledger.is_at_risk(4) && ledger.is_at_risk(5));
        assert!(ledger.lost([4, 5].into_iter()).is_some());
        assert!(!ledger.flushed(5, true) && !ledger.flushed(4, true));
        assert!(ledger.flushed(5, false), "all was told");
        let mut ledger = of(5);
        assert!(ledger.lost([3].into_iter()).is_some());
        assert!(!ledger.flushed(3, true));
        assert!(!ledger.flushed(5, false), "two were not told of");
        assert!(ledger.flushed(5, false));
    }

    #[test]
    fn two_losses_are_told_together() {
        let mut ledger = of(2);
        assert!(ledger.lost([].into_iter()).is_some());
        ledger.answered();
        assert!(ledger.lost([].into_iter()).is_some());
        assert!(!ledger.flushed(3, false));
        assert!(ledger.flushed(3, false));
    }
}
