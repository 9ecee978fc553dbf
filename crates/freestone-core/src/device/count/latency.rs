//! Latency histograms. Buckets are a quarter of a power of two wide.
//!
//! One histogram serves all CPUs: inline requests are sampled ([`sampling`](super::sampling)), and for
//! requests that wait one more shared cache line does not matter.

use std::time::Duration;

use crate::sync::{AtomicU64, Ordering};

/// Binary logarithm of 256 ns. Requests with a lower latency share the first bucket.
const SHORTEST_LOG2: u32 = 8;
/// Binary logarithm of 69 s in nanoseconds. Requests with this latency or more share the last bucket.
const LONGEST_LOG2: u32 = 36;
/// Binary logarithm of the number of buckets for each power of two.
const PARTS_LOG2: u32 = 2;
const PARTS: usize = 1 << PARTS_LOG2;
/// Number of buckets: those of all powers of two, and one at either end.
const BUCKETS: usize = ((LONGEST_LOG2 - SHORTEST_LOG2) as usize) * PARTS + 2;

/// Histogram of latencies: the number of requests in each bucket, and the sum of the latencies.
pub struct Histogram {
    buckets: [AtomicU64; BUCKETS],
    nanoseconds: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { buckets: std::array::from_fn(|_| AtomicU64::new(0)), nanoseconds: AtomicU64::new(0) }
    }
}

fn bucket(nanoseconds: u64) -> usize {
    if nanoseconds < 1 << SHORTEST_LOG2 {
        return 0;
    }
    let log2 = nanoseconds.ilog2();
    if log2 >= LONGEST_LOG2 {
        return BUCKETS - 1;
    }
    let part = (nanoseconds >> (log2 - PARTS_LOG2)) as usize & (PARTS - 1);
    1 + (log2 - SHORTEST_LOG2) as usize * PARTS + part
}

/// Returns the exclusive upper bound of a bucket in nanoseconds, or `None` for the last bucket.
fn upper_bound(bucket: usize) -> Option<u64> {
    let (log2, part) = (bucket / PARTS, bucket % PARTS);
    (bucket < BUCKETS - 1).then(|| {
        let power = 1_u64 << (SHORTEST_LOG2 as usize + log2);
        power + part as u64 * (power >> PARTS_LOG2)
    })
}

impl Histogram {
    /// Adds the latency of a request that counts `weight` times.
    pub fn add(&self, took: Duration, weight: u64) {
        let nanoseconds = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        // Relaxed: a statistic.
        self.buckets[bucket(nanoseconds)].fetch_add(weight, Ordering::Relaxed);
        let sum = nanoseconds.saturating_mul(weight);
        // Relaxed: a statistic. The sum wraps after five centuries of total latency.
        self.nanoseconds.fetch_add(sum, Ordering::Relaxed);
    }

    /// Returns a copy of the counts. The copy is exact if no thread adds latencies meanwhile.
    pub fn read(&self) -> Latency {
        // Relaxed: statistics.
        let buckets = self.buckets.each_ref().map(|count| count.load(Ordering::Relaxed));
        // Relaxed: a statistic.
        let nanoseconds = self.nanoseconds.load(Ordering::Relaxed);
        Latency { buckets: Some(Box::new(buckets)), nanoseconds }
    }
}

/// Copy of the counts of one histogram, or sum of several.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Latency {
    /// Number of requests in each bucket; `None` if all are zero.
    buckets: Option<Box<[u64; BUCKETS]>>,
    nanoseconds: u64,
}

impl Latency {
    /// Returns the number of requests counted.
    pub fn requests(&self) -> u64 {
        self.counts().iter().sum()
    }

    /// Returns the sum of the latencies of all requests.
    pub const fn total(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds)
    }

    /// Returns the latency within which `thousandths` (1 to 1000) of the requests completed, rounded up to
    /// the bound of a bucket, that is by at most a quarter. Returns `None` without requests, and 69 s for
    /// longer latencies.
    pub fn quantile(&self, thousandths: u64) -> Option<Duration> {
        let all = u128::from(self.requests());
        let wanted = (all * u128::from(thousandths)).div_ceil(1000).max(1);
        let mut counted = 0;
        let slowest = self.counts().iter().position(|count| {
            counted += u128::from(*count);
            counted >= wanted
        })?;
        Some(Duration::from_nanos(upper_bound(slowest).unwrap_or(1 << LONGEST_LOG2)))
    }

    /// Returns each power of four of nanoseconds from 256 ns to 69 s, with the number of requests below that
    /// latency.
    pub fn below_powers_of_four(&self) -> impl Iterator<Item = (Duration, u64)> {
        let mut counted = 0;
        let powers = self.counts().iter().enumerate().filter_map(move |(bucket, count)| {
            counted += count;
            Some((upper_bound(bucket)?, counted))
        });
        let wanted =
            |(end, _): &(u64, u64)| end.is_power_of_two() && (end.ilog2() - SHORTEST_LOG2).is_multiple_of(2);
        powers.filter(wanted).map(|(end, counted)| (Duration::from_nanos(end), counted))
    }

    /// Returns the non-empty buckets in ascending order: the exclusive upper bound (`None` for the last
    /// bucket), and the number of requests.
    pub fn buckets(&self) -> impl Iterator<Item = (Option<Duration>, u64)> {
        let counted = self.counts().iter().enumerate().filter(|(_, count)| **count > 0);
        counted.map(|(bucket, count)| (upper_bound(bucket).map(Duration::from_nanos), *count))
    }

    /// Adds the counts of `other`.
    pub fn add(&mut self, other: &Self) {
        let Some(theirs) = &other.buckets else { return };
        let own = self.buckets.get_or_insert_with(|| Box::new([0; BUCKETS]));
        for (own_count, other_count) in own.iter_mut().zip(theirs.iter()) {
            *own_count += other_count;
        }
        self.nanoseconds = self.nanoseconds.wrapping_add(other.nanoseconds);
    }

    /// Returns the counts added since the state `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let mut since = self.clone();
        if let (Some(own), Some(theirs)) = (&mut since.buckets, &earlier.buckets) {
            for (own_count, other_count) in own.iter_mut().zip(theirs.iter()) {
                *own_count = own_count.saturating_sub(*other_count);
            }
            since.nanoseconds = since.nanoseconds.saturating_sub(earlier.nanoseconds);
        }
        since
    }

    fn counts(&self) -> &[u64; BUCKETS] {
        self.buckets.as_deref().unwrap_or(&[0; BUCKETS])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_contiguous_and_a_quarter_wide() {
        assert_eq!((bucket(0), bucket(255), bucket(256)), (0, 0, 1));
        assert_eq!(
            (bucket((1 << 36) - 1), bucket(1 << 36), bucket(u64::MAX)),
            (BUCKETS - 2, BUCKETS - 1, BUCKETS - 1)
        );
        assert_eq!(upper_bound(BUCKETS - 1), None);
        for number in 0..BUCKETS - 1 {
            let end = upper_bound(number).unwrap();
            assert_eq!((bucket(end - 1), bucket(end)), (number, number + 1), "{end} ns");
        }
        for number in 1..BUCKETS - 1 {
            let (begin, end) = (upper_bound(number - 1).unwrap(), upper_bound(number).unwrap());
            assert!((end - begin) * 4 <= begin, "{begin} to {end} ns");
        }
    }

    #[test]
    fn quantiles_are_rounded_up() {
        let counts = Histogram::default();
        for _ in 0..98 {
            counts.add(Duration::from_micros(10), 1);
        }
        counts.add(Duration::from_millis(3), 2);
        let read = counts.read();
        assert_eq!((read.requests(), read.total()), (100, Duration::from_micros(980 + 6000)));
        let within = |thousandths| read.quantile(thousandths).unwrap().as_nanos();
        assert_eq!((within(1), within(500), within(980)), (10240, 10240, 10240));
        assert_eq!((within(981), within(1000)), (3_145_728, 3_145_728));
        assert_eq!(Latency::default().quantile(500), None);
        let buckets: Vec<_> = read.buckets().map(|(end, count)| (end.unwrap().as_nanos(), count)).collect();
        assert_eq!(buckets, [(10240, 98), (3_145_728, 2)]);
        counts.add(Duration::from_secs(100), 1);
        assert_eq!(counts.read().buckets().last(), Some((None, 1)));
        let mut twice = Latency::default();
        twice.add(&read);
        twice.add(&read);
        twice.add(&Latency::default());
        assert_eq!((twice.requests(), twice.total()), (200, read.total() * 2));
        assert_eq!(twice.quantile(981), read.quantile(981));
        assert_eq!(twice.since(&read), read);
        assert_eq!(read.since(&Latency::default()), read);
        assert_eq!(Latency::default().since(&read).requests(), 0, "an unrelated earlier state");
    }

    #[test]
    fn coarse_bounds_are_cumulative() {
        let counts = Histogram::default();
        for took in [100, 256, 1023, 1024, 5000, 1 << 35, 1 << 36] {
            counts.add(Duration::from_nanos(took), 1);
        }
        let bounds: Vec<_> = counts.read().below_powers_of_four().collect();
        let ends: Vec<_> = (4..=18).map(|n| Duration::from_nanos(1 << (2 * n))).collect();
        assert!(bounds.iter().map(|(end, _)| *end).eq(ends), "{bounds:?}");
        let counted: Vec<_> = bounds.iter().map(|(_, counted)| *counted).collect();
        assert_eq!(counted, [1, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 6]);
    }
}
