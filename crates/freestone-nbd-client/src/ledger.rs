//! Tracks which completed writes are durable, and which of them a server crash may have lost.
//!
//! The ledger counts writes as they complete; a flush covers the writes that completed before its
//! submission. When all connections are lost, the server may have restarted without its cached
//! writes. The flushes in flight that cover such writes then fail; if there are none, the next
//! flush fails.

/// Write counters of a device.
#[derive(Debug, Default)]
pub struct Ledger {
    /// Number of completed writes.
    completed: u64,
    /// Number of the first writes that are durable or whose possible loss was reported.
    settled: u64,
    /// Number of the first writes that may be lost with the loss not fully reported; 0 if none.
    unreported: u64,
}

impl Ledger {
    /// Counts a completed write that is not durable.
    pub fn add_write(&mut self) {
        self.completed += 1;
    }

    /// Returns the number of writes that a flush submitted now makes durable.
    pub fn completed_writes(&self) -> u64 {
        self.completed
    }

    /// Records a successful flush. Returns false if writes that it covers may be lost, so the flush
    /// must fail.
    #[must_use]
    pub fn finish_flush(&mut self, covers: u64, must_fail: bool) -> bool {
        if must_fail {
            return false;
        }
        let must_report = self.settled < self.unreported && covers > self.settled;
        self.settled = self.settled.max(covers);
        if must_report && self.settled >= self.unreported {
            self.unreported = 0;
        }
        !must_report
    }

    /// Records that all connections are lost. `flushes` are the numbers of writes that flushes in
    /// flight cover. Returns the number of completed writes that may be lost, if any.
    pub fn record_loss(&mut self, flushes: impl Iterator<Item = u64>) -> Option<u64> {
        let first = self.settled;
        if self.completed == first {
            return None;
        }
        // Flushes in flight will fail and so report the writes that they cover.
        let reported = flushes.filter(|covers| *covers > first).max().unwrap_or(first);
        self.settled = reported;
        self.unreported = if self.completed > reported { self.completed } else { 0 };
        Some(self.completed - first)
    }

    /// Returns true if a flush in flight that covers `covers` writes must fail if all connections
    /// are lost now.
    pub fn is_at_risk(&self, covers: u64) -> bool {
        covers > self.settled
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(writes: u64) -> Ledger {
        let mut ledger = Ledger::default();
        (0..writes).for_each(|_| ledger.add_write());
        ledger
    }

    #[test]
    fn next_flush_fails_once_after_loss() {
        let mut ledger = of(3);
        assert_eq!(ledger.record_loss([].into_iter()), Some(3));
        assert!(!ledger.finish_flush(3, false));
        assert!(ledger.finish_flush(3, false));
        assert_eq!(ledger.record_loss([].into_iter()), None);
    }

    #[test]
    fn flushed_writes_are_not_lost() {
        let mut ledger = of(3);
        assert!(ledger.finish_flush(3, false));
        assert_eq!(ledger.record_loss([].into_iter()), None);
        ledger.add_write();
        assert_eq!(ledger.record_loss([].into_iter()), Some(1));
        // Another write completes before the next flush.
        ledger.add_write();
        assert!(!ledger.finish_flush(5, false));
        assert!(ledger.finish_flush(5, false));
    }

    #[test]
    fn flushes_in_flight_report_covered_losses() {
        let mut ledger = of(5);
        assert!(ledger.is_at_risk(4) && ledger.is_at_risk(5));
        assert!(ledger.record_loss([4, 5].into_iter()).is_some());
        assert!(!ledger.finish_flush(5, true) && !ledger.finish_flush(4, true));
        assert!(ledger.finish_flush(5, false), "all losses were reported");
        let mut ledger = of(5);
        assert!(ledger.record_loss([3].into_iter()).is_some());
        assert!(!ledger.finish_flush(3, true));
        assert!(!ledger.finish_flush(5, false), "two losses were not reported");
        assert!(ledger.finish_flush(5, false));
    }

    #[test]
    fn two_losses_are_reported_together() {
        let mut ledger = of(2);
        assert!(ledger.record_loss([].into_iter()).is_some());
        ledger.add_write();
        assert!(ledger.record_loss([].into_iter()).is_some());
        assert!(!ledger.finish_flush(3, false));
        assert!(ledger.finish_flush(3, false));
    }
}
