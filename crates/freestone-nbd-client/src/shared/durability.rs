//! Tracks which completed writes are durable, and which of them a server crash may have lost.
//!
//! The tracker counts writes as they complete; a flush covers the writes that completed before its
//! submission. When all connections are lost, the server may have restarted without its cached
//! writes. The flushes in flight that cover such writes then fail; if there are none, the next
//! flush fails.

/// Write counters of a device.
#[derive(Debug, Default)]
pub struct DurabilityTracker {
    /// Number of completed writes.
    completed: u64,
    /// Number of writes, from the first on, that are durable or whose possible loss was reported.
    settled: u64,
    /// Number of writes, from the first to the last whose possible loss is not reported yet; 0 if
    /// none.
    unreported: u64,
}

impl DurabilityTracker {
    /// Counts a completed write that is not durable.
    pub fn add_write(&mut self) {
        self.completed += 1;
    }

    /// Returns the number of writes that a flush submitted now makes durable.
    pub fn completed_writes(&self) -> u64 {
        self.completed
    }

    /// Records a successful flush of the first `covers` writes. Returns false if the flush must
    /// fail: some of these writes may be lost, or `must_fail` is set.
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

    /// Records that all connections are lost. `flushes` contains, for each flush in flight, the
    /// number of writes that it covers. Returns the number of completed writes that may be lost, or
    /// None if there are none.
    pub fn record_loss(&mut self, flushes: impl Iterator<Item = u64>) -> Option<u64> {
        let first = self.settled;
        if self.completed == first {
            return None;
        }
        // The flushes in flight fail, and their errors report the loss of the writes that they cover. So
        // only later writes remain to be reported.
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

    fn of(writes: u64) -> DurabilityTracker {
        let mut durability = DurabilityTracker::default();
        (0..writes).for_each(|_| durability.add_write());
        durability
    }

    #[test]
    fn next_flush_fails_once_after_loss() {
        let mut durability = of(3);
        assert_eq!(durability.record_loss([].into_iter()), Some(3));
        assert!(!durability.finish_flush(3, false));
        assert!(durability.finish_flush(3, false));
        assert_eq!(durability.record_loss([].into_iter()), None);
    }

    #[test]
    fn flushed_writes_are_not_lost() {
        let mut durability = of(3);
        assert!(durability.finish_flush(3, false));
        assert_eq!(durability.record_loss([].into_iter()), None);
        durability.add_write();
        assert_eq!(durability.record_loss([].into_iter()), Some(1));
        // Another write completes before the next flush.
        durability.add_write();
        assert!(!durability.finish_flush(5, false));
        assert!(durability.finish_flush(5, false));
    }

    #[test]
    fn flushes_in_flight_report_covered_losses() {
        let mut durability = of(5);
        assert!(durability.is_at_risk(4) && durability.is_at_risk(5));
        assert!(durability.record_loss([4, 5].into_iter()).is_some());
        assert!(!durability.finish_flush(5, true) && !durability.finish_flush(4, true));
        assert!(durability.finish_flush(5, false), "all losses were reported");
        let mut durability = of(5);
        assert!(durability.record_loss([3].into_iter()).is_some());
        assert!(!durability.finish_flush(3, true));
        assert!(!durability.finish_flush(5, false), "two losses were not reported");
        assert!(durability.finish_flush(5, false));
    }

    #[test]
    fn two_losses_are_reported_together() {
        let mut durability = of(2);
        assert!(durability.record_loss([].into_iter()).is_some());
        durability.add_write();
        assert!(durability.record_loss([].into_iter()).is_some());
        assert!(!durability.finish_flush(3, false));
        assert!(durability.finish_flush(3, false));
    }
}
