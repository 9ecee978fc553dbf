//! Sampling of inline requests for latency measurement, because reading the clock twice costs more than all
//! other counting.
//!
//! Of the requests that a thread completes inline, one in [`MEAN`] is measured, at random distances, so that
//! no client pattern is always or never measured. The weight of a sample is the number of requests since the
//! sample before. The first requests of a thread are sampled more often, which keeps small counts accurate.
//! Requests that wait are always measured.

use std::cell::Cell;

use crate::sync::thread_local;

/// Mean distance between samples, in requests.
const MEAN: u32 = 64;

thread_local! {
    /// Number of requests until the next sample, including the sampled request.
    static UNTIL_SAMPLE: Cell<u32> = const { Cell::new(1) };
    static SAMPLE: Cell<SampleState> = const { Cell::new(SampleState { distance: 1, mean: 1, random: 0x9E37_79B9 }) };
}

#[derive(Clone, Copy)]
struct SampleState {
    /// Distance drawn for the next sample, in requests.
    distance: u32,
    /// Mean of the distance to be drawn next. Doubles from 1 up to [`MEAN`].
    mean: u32,
    random: u32,
}

/// Returns true if the request that begins on this thread must be measured. The caller then calls [`take_sample`].
#[inline]
pub fn is_due() -> bool {
    UNTIL_SAMPLE.with(|left| {
        let now = left.get().wrapping_sub(1);
        left.set(now);
        now == 0
    })
}

/// Draws the distance to the next sample. Returns the weight of the present sample, in requests.
pub fn take_sample() -> u64 {
    SAMPLE.with(|state| {
        let SampleState { distance, mean, mut random } = state.get();
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        // Uniformly distributed from 1 to 2 * mean - 1.
        let next = 1 + random % (2 * mean - 1);
        state.set(SampleState { distance: next, mean: (2 * mean).min(MEAN), random });
        UNTIL_SAMPLE.with(|left| left.set(next));
        u64::from(distance)
    })
}

/// Makes the next request of this thread the sample, with the given weight.
pub fn resample_next(weight: u64) {
    SAMPLE.with(|state| state.set(SampleState { distance: weight as u32, ..state.get() }));
    UNTIL_SAMPLE.with(|left| left.set(1));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(requests: u64) -> Vec<(u64, u64)> {
        let due = (1..=requests).filter(|_| is_due());
        due.map(|number| (number, take_sample())).collect()
    }

    #[test]
    fn samples_represent_all_requests() {
        let measured = std::thread::spawn(|| measured(100_000)).join().unwrap();
        assert_eq!(measured[0], (1, 1));
        let mut stood = 0;
        for (number, weight) in &measured {
            stood += weight;
            assert_eq!(stood, *number);
        }
        assert!(measured.windows(2).all(|two| two[1].1 < u64::from(2 * MEAN)));
        let mean = 100_000 / measured.len() as u64;
        assert!((60..=68).contains(&mean), "one in {mean}");
    }

    #[test]
    fn periodic_requests_are_sampled_evenly() {
        let measured = std::thread::spawn(|| measured(1_000_000)).join().unwrap();
        let each: Vec<u64> = (0..8)
            .map(|beat| measured.iter().filter(|(number, _)| number % 8 == beat).map(|(_, n)| n).sum())
            .collect();
        assert!(each.iter().all(|stood| (100_000..150_000).contains(stood)), "{each:?}");
    }

    #[test]
    fn resample_next_samples_next_request() {
        let all = || {
            assert!(is_due());
            assert_eq!(take_sample(), 1);
            resample_next(7);
            assert!(is_due());
            assert_eq!(take_sample(), 7);
        };
        std::thread::spawn(all).join().unwrap();
    }
}
