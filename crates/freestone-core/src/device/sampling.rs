//! Which requests are measured: to read the clock twice costs more than all other counting.
//!
//! Of the requests that a thread has answered at once, one in [`MEAN`] is measured, at distances
//! drawn at random, so that no pattern of the client's is met always or never. It stands for all
//! since the one before it. The first requests of a thread are measured more often: of few, all
//! that can be known is. What has to wait is always measured.

use std::cell::Cell;

use crate::sync::thread_local;

/// Requests from one that is measured to the next, in the long run.
const MEAN: u32 = 64;

thread_local! {
    /// How many requests it is to the next one that is measured, that one counted.
    static LEFT: Cell<u32> = const { Cell::new(1) };
    static DRAWN: Cell<Drawn> = const { Cell::new(Drawn { distance: 1, mean: 1, random: 0x9E37_79B9 }) };
}

#[derive(Clone, Copy)]
struct Drawn {
    /// To the next one, at the beginning.
    distance: u32,
    /// Of the distances that are drawn.
    mean: u32,
    random: u32,
}

/// Whether the request that begins on this thread is to be measured. Who hears so calls [`next`].
#[inline]
pub fn is_due() -> bool {
    LEFT.with(|left| {
        let now = left.get().wrapping_sub(1);
        left.set(now);
        now == 0
    })
}

/// How many requests the measured one stands for, and draws the distance to the next.
pub fn next() -> u64 {
    DRAWN.with(|drawn| {
        let Drawn { distance, mean, mut random } = drawn.get();
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        // From 1 on, and as far above the mean as below it.
        let next = 1 + random % (2 * mean - 1);
        drawn.set(Drawn { distance: next, mean: (2 * mean).min(MEAN), random });
        LEFT.with(|left| left.set(next));
        u64::from(distance)
    })
}

/// Has the next request of this thread measured, for as many as the last one would have stood.
pub fn again(stands_for: u64) {
    DRAWN.with(|drawn| drawn.set(Drawn { distance: stands_for as u32, ..drawn.get() }));
    LEFT.with(|left| left.set(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(requests: u64) -> Vec<(u64, u64)> {
        let due = (1..=requests).filter(|_| is_due());
        due.map(|number| (number, next())).collect()
    }

    #[test]
    fn the_measured_stand_for_all_up_to_them() {
        let measured = std::thread::spawn(|| measured(100_000)).join().unwrap();
        assert_eq!(measured[0], (1, 1));
        let mut stood = 0;
        for (number, stands_for) in &measured {
            stood += stands_for;
            assert_eq!(stood, *number);
        }
        assert!(measured.windows(2).all(|two| two[1].1 < u64::from(2 * MEAN)));
        let mean = 100_000 / measured.len() as u64;
        assert!((60..=68).contains(&mean), "one in {mean}");
    }

    #[test]
    fn no_rhythm_of_requests_is_met_always_or_never() {
        let measured = std::thread::spawn(|| measured(1_000_000)).join().unwrap();
        let each: Vec<u64> = (0..8)
            .map(|beat| measured.iter().filter(|(number, _)| number % 8 == beat).map(|(_, n)| n).sum())
            .collect();
        assert!(each.iter().all(|stood| (100_000..150_000).contains(stood)), "{each:?}");
    }

    #[test]
    fn what_was_not_over_is_measured_again() {
        let all = || {
            assert!(is_due());
            assert_eq!(next(), 1);
            again(7);
            assert!(is_due());
            assert_eq!(next(), 7);
        };
        std::thread::spawn(all).join().unwrap();
    }
}
