//! When a device is given up.
//!
//! A deadline is for a device that makes no progress, not for one that has much to do: how long a
//! request takes says little where hundreds are before it. So:
//!
//! * Whatever the device answers, to whatever it was asked, well or with an error, puts off the
//!   deadline of all that it has been given: they are late when for a whole `timeout` *nothing at
//!   all* was answered. A hung device is found after that time, and one that was idle has the whole
//!   of it for its first request.
//! * One request that a working device has lost would be put off for ever. It is late
//!   [`LOST_TIMES`] timeouts after the device was given it, whatever is answered meanwhile. What a
//!   device is given at once is bounded (256 reads and 4 writes), so with the usual 30 s only one
//!   that does fewer than about two requests a second would be wronged.
//! * A request that waits for room was not given to the device, and its time there has not begun.
//!   It is late when for a whole timeout no request of its kind was answered, so that none of those
//!   before it got on.

use std::time::Duration;

use crate::clock::{millis, now_ms};
use freestone_core::sync::{AtomicU64, Ordering};

/// How long the device may answer nothing, unless said otherwise.
pub const TIMEOUT: Duration = Duration::from_secs(30);
/// After so many timeouts a request is lost, although others are answered.
const LOST_TIMES: u64 = 4;

/// When a device that makes no progress is given up. Times are those of [`now_ms`].
pub(super) struct Deadline {
    timeout_ms: AtomicU64,
    /// When the device last answered anything.
    answered_ms: AtomicU64,
}

impl Default for Deadline {
    fn default() -> Self {
        Self { timeout_ms: AtomicU64::new(millis(TIMEOUT)), answered_ms: AtomicU64::new(0) }
    }
}

impl Deadline {
    pub fn timeout_ms(&self) -> u64 {
        // Relaxed: a setting.
        self.timeout_ms.load(Ordering::Relaxed)
    }

    pub fn set_timeout(&self, timeout: Duration) {
        // Relaxed: a setting.
        self.timeout_ms.store(millis(timeout).max(1), Ordering::Relaxed);
    }

    /// The device has answered something.
    pub fn answered(&self) {
        // Relaxed: a time, which nothing else hangs on.
        self.answered_ms.fetch_max(now_ms(), Ordering::Relaxed);
    }

    /// When a request is late that the device was given at `given_ms`, as far as is known now.
    pub fn due_ms(&self, given_ms: u64) -> u64 {
        let timeout = self.timeout_ms();
        // Relaxed: as above.
        let silent_since = given_ms.max(self.answered_ms.load(Ordering::Relaxed));
        silent_since.saturating_add(timeout).min(given_ms.saturating_add(timeout.saturating_mul(LOST_TIMES)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_put_off_a_deadline_and_not_for_ever() {
        let deadline = Deadline::default();
        deadline.set_timeout(Duration::from_millis(100));
        let due = |answered: u64, given: u64| {
            deadline.answered_ms.store(answered, Ordering::SeqCst);
            deadline.due_ms(given)
        };
        // Idle, or silent, since before: the whole time.
        assert_eq!((due(0, 1000), due(999, 1000)), (1100, 1100));
        // It gets on.
        assert_eq!((due(1050, 1000), due(1299, 1000)), (1150, 1399));
        // It has been at everything else.
        assert_eq!((due(1300, 1000), due(9000, 1000)), (1400, 1400));
        deadline.set_timeout(Duration::MAX);
        assert_eq!(deadline.due_ms(5), u64::MAX);
        deadline.set_timeout(Duration::ZERO);
        assert_eq!(deadline.timeout_ms(), 1);
    }

    #[test]
    fn an_answer_counts_from_now_on() {
        let deadline = Deadline::default();
        let before = now_ms();
        deadline.answered();
        let due = deadline.due_ms(0);
        assert!(due >= before.saturating_add(deadline.timeout_ms()).min(LOST_TIMES * deadline.timeout_ms()));
    }
}
