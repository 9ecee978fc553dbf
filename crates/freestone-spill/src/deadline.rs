//! Time-outs of requests to a backing device.
//!
//! A time-out must detect a device without progress, not a busy device. The duration of a single
//! request says little if hundreds are queued before it. Therefore:
//!
//! * Any completion, successful or not, extends the deadline of all requests in flight. They time
//!   out if *nothing at all* completes for a whole `timeout`. A hung device is detected after that
//!   time, and an idle device has the whole time for its first request.
//! * A single request that a working device loses times out [`LOST_TIMES`] timeouts after its
//!   submission, regardless of other completions. The requests in flight are bounded (256 reads and
//!   4 writes). So with the default of 30 s this only affects a device with fewer than about two
//!   completions a second.
//! * A queued read is not in flight. It times out if no read completes for a whole timeout.

use std::time::Duration;

use freestone_core::clock::{millis, now_ms};
use freestone_core::sync::{AtomicU64, Ordering};

/// Default time-out of requests to a backing device.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// Number of timeouts after which a single request counts as lost.
const LOST_TIMES: u64 = 4;

/// The deadline of a backing device's requests. Times are in milliseconds of [`now_ms`].
pub(super) struct Deadline {
    timeout_ms: AtomicU64,
    answered_ms: AtomicU64,
}

impl Default for Deadline {
    fn default() -> Self {
        Self { timeout_ms: AtomicU64::new(millis(TIMEOUT)), answered_ms: AtomicU64::new(0) }
    }
}

impl Deadline {
    pub fn timeout_ms(&self) -> u64 {
        // Relaxed: an independent setting, which orders no other memory access.
        self.timeout_ms.load(Ordering::Relaxed)
    }

    pub fn set_timeout(&self, timeout: Duration) {
        // Relaxed: an independent setting, which orders no other memory access.
        self.timeout_ms.store(millis(timeout).max(1), Ordering::Relaxed);
    }

    pub fn record_completion(&self) {
        // Relaxed: the time orders no other memory access.
        self.answered_ms.fetch_max(now_ms(), Ordering::Relaxed);
    }

    /// Returns the current deadline in milliseconds of a request submitted at `submitted_ms`.
    pub fn due_ms(&self, submitted_ms: u64) -> u64 {
        let timeout = self.timeout_ms();
        // Relaxed: the time orders no other memory access.
        let silent_since = submitted_ms.max(self.answered_ms.load(Ordering::Relaxed));
        silent_since
            .saturating_add(timeout)
            .min(submitted_ms.saturating_add(timeout.saturating_mul(LOST_TIMES)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn deadline_completions_extend_it_up_to_limit() {
        let deadline = Deadline::default();
        deadline.set_timeout(Duration::from_millis(100));
        let due = |answered: u64, given: u64| {
            deadline.answered_ms.store(answered, Ordering::SeqCst);
            deadline.due_ms(given)
        };
        // The device is idle, or hangs since before the submission: the request has the whole
        // time-out.
        assert_eq!((due(0, 1000), due(999, 1000)), (1100, 1100));
        // Other requests complete after the submission, which extends the deadline.
        assert_eq!((due(1050, 1000), due(1299, 1000)), (1150, 1399));
        // Other requests complete, but this one is lost: its deadline is limited.
        assert_eq!((due(1300, 1000), due(9000, 1000)), (1400, 1400));
        deadline.set_timeout(Duration::MAX);
        assert_eq!(deadline.due_ms(5), u64::MAX);
        deadline.set_timeout(Duration::ZERO);
        assert_eq!(deadline.timeout_ms(), 1);
    }

    #[test]
    fn deadline_completion_counts_from_now() {
        let deadline = Deadline::default();
        let before = now_ms();
        deadline.record_completion();
        let due = deadline.due_ms(0);
        assert!(due >= before.saturating_add(deadline.timeout_ms()).min(LOST_TIMES * deadline.timeout_ms()));
    }
}
