//! How fast connections are accepted. Each costs the server a thread's wake and a handshake, which
//! those that are connected pay for with their time.

use std::time::{Duration, Instant};

/// Connections that are accepted at once, after a pause.
const BURST: u32 = 64;

/// Lets so many a second through, and [`BURST`] at once.
#[derive(Debug, Default)]
pub struct Pace {
    /// What was accepted so far is paid for then: at most [`BURST`] connections after now, unless more
    /// were accepted than asked for.
    paid: Option<Instant>,
}

impl Pace {
    /// When the next one may be accepted, where that is not now.
    pub fn due(&self, a_second: u32, now: Instant) -> Option<Instant> {
        let ahead = every(a_second) * (BURST - 1);
        self.paid?.checked_sub(ahead).filter(|due| *due > now)
    }

    /// One was accepted.
    pub fn accepted(&mut self, a_second: u32, now: Instant) {
        let paid = self.paid.map_or(now, |paid| paid.max(now));
        self.paid = Some(paid + every(a_second));
    }
}

fn every(a_second: u32) -> Duration {
    Duration::from_secs(1) / a_second.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_and_then_so_many_a_second() {
        let begun = Instant::now();
        let (mut pace, mut now, mut accepted) = (Pace::default(), begun, 0_u32);
        while now < begun + Duration::from_secs(10) {
            if let Some(due) = pace.due(500, now) {
                now = due;
                continue;
            }
            pace.accepted(500, now);
            accepted += 1;
            if accepted == BURST {
                assert_eq!(now, begun, "the first ones do not wait");
            }
        }
        assert_eq!(accepted, BURST + 5000 - 1);
        // After a pause there is a burst again, and no more than that.
        now += Duration::from_secs(60);
        for _ in 0..BURST {
            assert_eq!(pace.due(500, now), None);
            pace.accepted(500, now);
        }
        assert_eq!(pace.due(500, now), Some(now + Duration::from_millis(2)));
    }
}
