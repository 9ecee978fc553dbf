//! Attempts to write the invalid header of a lost snapshot to its COW device. Without this header the
//! snapshot would look valid when opened again.

use std::time::Duration;

use freestone_core::device;
use freestone_core::sync::Instant;

/// Interval between attempts to write the invalid header of a lost snapshot to the COW device.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);
/// Time after the first failed attempt for which writes to the origin wait for the invalid header.
/// A dead COW device must not block the origin forever.
const WAIT_MAX: Duration = Duration::from_secs(2);
const _: () = assert!(RETRY_INTERVAL.as_millis() < WAIT_MAX.as_millis(), "a retry must fit into the wait");

/// State of the attempts to write the invalid header. Changed under the lock of the store's queue.
#[derive(Default)]
pub(super) struct HeaderRetry {
    /// Times of the first failure and of the next attempt; `None` before the first failure.
    failed: Option<(Instant, Instant)>,
    /// True after [`WAIT_MAX`].
    gave_up: bool,
}

impl HeaderRetry {
    /// Returns the time of the next attempt: `now` before the first failure.
    pub fn next_attempt(&self, now: Instant) -> Instant {
        self.failed.map_or(now, |(_, again)| again)
    }

    /// Returns true if no write waits for the header any more.
    pub fn has_given_up(&self) -> bool {
        self.gave_up
    }

    /// Records a failed attempt, and logs the first one and the `last` one.
    pub fn record_failure(&mut self, error: device::Error, last: bool) {
        let now = Instant::now();
        let first = self.failed.map_or(now, |(first, _)| first);
        if self.failed.is_none() || last {
            tracing::warn!(%error, "writing the invalid header of a lost snapshot failed");
        }
        self.failed = Some((first, now + RETRY_INTERVAL));
        if !self.gave_up && now.saturating_duration_since(first) >= WAIT_MAX {
            self.gave_up = true;
            tracing::error!(
                %error,
                "a lost snapshot could not be marked invalid on its COW device; the origin continues. Do not trust the \
                 snapshot if it is opened again after a crash"
            );
        }
    }
}
