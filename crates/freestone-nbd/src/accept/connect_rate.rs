//! The rate limit for new connections. Each new connection wakes a thread and needs a handshake, which takes
//! CPU time from existing connections.

use std::time::{Duration, Instant};

/// Size of a burst: number of connections accepted without delay after a pause.
const BURST: u32 = 64;

/// A token bucket that limits the connections accepted per second, after bursts of [`BURST`].
#[derive(Debug, Default)]
pub struct ConnectRate {
    /// Time at which the bucket is full again, or None before the first connection. At most [`BURST`]
    /// intervals in the future, unless more connections were accepted than the limit allows.
    paid: Option<Instant>,
}

impl ConnectRate {
    /// Returns the time at which the next connection may be accepted, or None if it may be accepted now.
    pub fn next_accept(&self, per_second: u32, now: Instant) -> Option<Instant> {
        let ahead = interval(per_second) * (BURST - 1);
        self.paid?.checked_sub(ahead).filter(|due| *due > now)
    }

    pub fn record_accept(&mut self, per_second: u32, now: Instant) {
        let paid = self.paid.map_or(now, |paid| paid.max(now));
        self.paid = Some(paid + interval(per_second));
    }
}

fn interval(per_second: u32) -> Duration {
    Duration::from_secs(1) / per_second.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pace_allows_burst_then_steady_rate() {
        let begun = Instant::now();
        let (mut connect_rate, mut now, mut accepted) = (ConnectRate::default(), begun, 0_u32);
        while now < begun + Duration::from_secs(10) {
            if let Some(due) = connect_rate.next_accept(500, now) {
                now = due;
                continue;
            }
            connect_rate.record_accept(500, now);
            accepted += 1;
            if accepted == BURST {
                assert_eq!(now, begun, "the first ones do not wait");
            }
        }
        assert_eq!(accepted, BURST + 5000 - 1);
        // After a pause exactly one burst is accepted again.
        now += Duration::from_secs(60);
        for _ in 0..BURST {
            assert_eq!(connect_rate.next_accept(500, now), None);
            connect_rate.record_accept(500, now);
        }
        assert_eq!(connect_rate.next_accept(500, now), Some(now + Duration::from_millis(2)));
    }
}
