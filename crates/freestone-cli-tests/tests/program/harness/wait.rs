//! Waiting for conditions.

use std::thread::sleep;
use std::time::{Duration, Instant};

/// Time limit for any reply or change, generous for a slow machine.
pub const ANSWER_MAX: Duration = Duration::from_secs(120);
const STEP: Duration = Duration::from_millis(5);

/// Waits until `done` returns true. Fails with the message `what` after [`ANSWER_MAX`].
#[track_caller]
pub fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < ANSWER_MAX, "{what} (after {ANSWER_MAX:?})");
        sleep(STEP);
    }
}
