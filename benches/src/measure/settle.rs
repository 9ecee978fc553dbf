//! Waits for the end of background work that changes the use of memory.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// Background work has ended if memory did not change for this time (the second value with --quick).
const QUIET_TIME: [Duration; 2] = [Duration::from_secs(15), Duration::from_secs(4)];
/// Background work does nothing if memory did not change for this time from the start.
const START_MAX: Duration = Duration::from_secs(60);
/// Time limit for all of the work.
const TIME_MAX: Duration = Duration::from_secs(1800);
const POLL: Duration = Duration::from_millis(100);

/// Memory while background work was done.
pub struct Settled {
    /// Time since the start, and the bytes from then on. A size that does not change has one entry.
    pub timeline: Vec<(Duration, u64)>,
}

impl Settled {
    /// Returns the time of the last change.
    pub fn took(&self) -> Duration {
        self.timeline.last().map_or(Duration::ZERO, |(at, _)| *at)
    }
}

/// Waits until `bytes` differs from `before`, and then until it no longer changes. Returns an empty timeline if
/// it never differs. Memory grows before it falls: a new object is stored before its pages are freed.
pub fn wait_until_settled(before: u64, quick: bool, bytes: &mut dyn FnMut() -> u64) -> Result<Settled> {
    let started = Instant::now();
    let mut timeline = vec![(Duration::ZERO, bytes())];
    let quiet = QUIET_TIME[usize::from(quick)];
    loop {
        let elapsed = started.elapsed();
        let (changed, last) = timeline[timeline.len() - 1];
        let has_begun = timeline.len() > 1 || last != before;
        if has_begun && elapsed >= changed + quiet {
            return Ok(Settled { timeline });
        }
        if !has_begun && elapsed > START_MAX {
            return Ok(Settled { timeline: Vec::new() });
        }
        ensure!(elapsed < TIME_MAX, "the background work did not end in {TIME_MAX:?}");
        std::thread::sleep(POLL);
        let now = bytes();
        if now != last {
            timeline.push((started.elapsed(), now));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settled_after_quiet_time() {
        let mut sizes = [9, 9, 11, 11, 5].into_iter();
        let mut last = 5;
        let settled = wait_until_settled(9, true, &mut || {
            last = sizes.next().unwrap_or(last);
            last
        });
        let settled = settled.unwrap();
        assert!(settled.timeline.iter().map(|(_, bytes)| *bytes).eq([9, 11, 5]));
        assert!(settled.took() >= 4 * POLL);
    }
}
