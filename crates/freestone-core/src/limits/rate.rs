//! Token buckets, implemented with `governor`, which counts in cells of a fixed size.
//!
//! A cell is one operation, or the bytes that pass in 100 ns. With smaller cells rounding to whole
//! nanoseconds would change the rate by more than a hundredth. The unused rest of a paid cell is kept for the
//! next request, so that small requests pay only for their size.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};

use super::paced_queue::{Cost, Pace};
use crate::sync::Instant;

/// Maximum number of operations per second, and of operations in a burst.
pub const OPERATIONS_MAX: u64 = 10_000_000;
/// Minimum rate in bytes per second: one page.
pub const BYTES_PER_SECOND_MIN: u64 = 4096;
/// Maximum rate in bytes per second, and maximum burst in bytes.
pub const BYTES_PER_SECOND_MAX: u64 = 1 << 40;
/// Minimum burst in bytes.
pub const BURST_BYTES_MIN: u64 = 4096;
/// The default burst is the amount that passes in `1/BURST_PART` of a second.
pub const BURST_PART: u64 = 10;

/// Maximum number of cells per second: one cell takes at least 100 ns.
const CELLS_MAX: u64 = 10_000_000;
const NANOS: u64 = 1_000_000_000;
const _: () = {
    assert!(OPERATIONS_MAX <= CELLS_MAX, "an operation is one cell");
    assert!(NANOS / CELLS_MAX >= 100, "rounding to a nanosecond changes the rate by 1 % at most");
    // The longest possible time: all cells of a burst at the slowest rate.
    assert!((OPERATIONS_MAX as u128) * (NANOS as u128) < (u64::MAX / 4) as u128);
    assert!((BYTES_PER_SECOND_MAX / BYTES_PER_SECOND_MIN) as u128 * (NANOS as u128) < (u64::MAX / 4) as u128);
};

/// Limits of a device. 0 means unlimited, or the default burst: a tenth of the amount per second, but at
/// least one operation and [`BURST_BYTES_MIN`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Operations per second, at most [`OPERATIONS_MAX`].
    pub iops: u64,
    /// Bytes read or written per second, from [`BYTES_PER_SECOND_MIN`] to [`BYTES_PER_SECOND_MAX`].
    pub bps: u64,
    /// Burst of operations after an idle time, at most [`OPERATIONS_MAX`].
    pub iops_burst: u64,
    /// Burst of bytes after an idle time, from [`BURST_BYTES_MIN`] to [`BYTES_PER_SECOND_MAX`].
    pub bps_burst: u64,
}

impl Limits {
    /// Returns the burst in effect as a number of operations.
    pub fn burst_operations(&self) -> u64 {
        if self.iops_burst > 0 { self.iops_burst } else { (self.iops / BURST_PART).max(1) }
    }

    /// Returns the burst in effect in bytes.
    pub fn burst_bytes(&self) -> u64 {
        if self.bps_burst > 0 { self.bps_burst } else { (self.bps / BURST_PART).max(BURST_BYTES_MIN) }
    }
}

/// A clock that counts nanoseconds from its creation.
#[derive(Debug, Clone)]
pub struct MonotonicClock(Instant);

impl MonotonicClock {
    pub fn now() -> Self {
        Self(Instant::now())
    }
}

impl Clock for MonotonicClock {
    type Instant = Nanos;

    fn now(&self) -> Nanos {
        self.0.elapsed().into()
    }
}

struct TokenBucket<C: Clock<Instant = Nanos>> {
    limiter: RateLimiter<NotKeyed, InMemoryState, C, NoOpMiddleware<Nanos>>,
    clock: C,
    /// Number of operations or bytes in a cell.
    unit: u64,
    /// Burst as a number of cells.
    burst: NonZeroU32,
    /// Operations or bytes that are paid for and not used yet.
    prepaid: u64,
}

impl<C: Clock<Instant = Nanos> + Clone> TokenBucket<C> {
    /// Creates a bucket with a rate per second and a burst (`at_once`). If `is_spent`, the bucket starts
    /// empty.
    fn new(per_second: NonZeroU64, at_once: u64, clock: &C, is_spent: bool) -> Self {
        let per_second = per_second.get();
        let unit = per_second.div_ceil(CELLS_MAX).max(at_once.div_ceil(u64::from(u32::MAX)));
        let burst = u32::try_from(at_once.div_ceil(unit)).ok().and_then(NonZeroU32::new);
        let burst = burst.unwrap_or(NonZeroU32::MIN);
        // The time of a cell is rounded up, so that the rate is never exceeded.
        let cell_time = (u128::from(unit) * u128::from(NANOS)).div_ceil(u128::from(per_second));
        let cell_time = Duration::from_nanos(u64::try_from(cell_time).unwrap_or(u64::MAX));
        let quota = Quota::with_period(cell_time).expect("the period is not zero").allow_burst(burst);
        let limiter = RateLimiter::direct_with_clock(quota, clock.clone());
        if is_spent {
            // Empties the bucket, because a full bucket has exactly `burst` cells.
            let _ = limiter.check_n(burst);
        }
        Self { limiter, clock: clock.clone(), unit, burst, prepaid: 0 }
    }

    fn pay(&mut self, owed: &mut u64) -> Result<(), Duration> {
        loop {
            let paid = self.prepaid.min(*owed);
            self.prepaid -= paid;
            *owed -= paid;
            let cells = u32::try_from(owed.div_ceil(self.unit)).unwrap_or(u32::MAX).min(self.burst.get());
            let Some(cells) = NonZeroU32::new(cells) else { return Ok(()) };
            match self.limiter.check_n(cells).expect("the cells fit in a burst") {
                Ok(()) => self.prepaid += u64::from(cells.get()) * self.unit,
                // The wait is zero if the cells have become available meanwhile; then try again.
                Err(not_yet) => match not_yet.wait_time_from(self.clock.now()) {
                    Duration::ZERO => {}
                    wait => return Err(wait),
                },
            }
        }
    }
}

/// The token buckets of a queue: for operations and for bytes.
pub struct Rates<C: Clock<Instant = Nanos> = MonotonicClock> {
    operations: Option<TokenBucket<C>>,
    bytes: Option<TokenBucket<C>>,
}

impl<C: Clock<Instant = Nanos> + Clone> Rates<C> {
    /// Creates the buckets, or returns `None` if `limits` limits nothing. If `is_spent`, the buckets start
    /// empty.
    pub fn new(limits: &Limits, clock: &C, is_spent: bool) -> Option<Self> {
        let rate = |per_second, at_once| {
            NonZeroU64::new(per_second)
                .map(|per_second| TokenBucket::new(per_second, at_once, clock, is_spent))
        };
        let operations = rate(limits.iops, limits.burst_operations());
        let bytes = rate(limits.bps, limits.burst_bytes());
        (operations.is_some() || bytes.is_some()).then_some(Self { operations, bytes })
    }
}

impl<C: Clock<Instant = Nanos> + Clone + Send> Pace for Rates<C> {
    fn pay(&mut self, owed: &mut Cost) -> Result<(), Duration> {
        if let Some(rate) = &mut self.operations {
            rate.pay(&mut owed.operations)?;
        }
        match &mut self.bytes {
            Some(rate) => rate.pay(&mut owed.bytes),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use governor::clock::FakeRelativeClock;

    use super::*;

    /// Returns the number of requests of cost `cost` that pass in `time`, each tried as early as possible.
    fn count_passing(limits: &Limits, cost: Cost, time: Duration) -> u64 {
        let clock = FakeRelativeClock::default();
        let mut rates = Rates::new(limits, &clock, false).unwrap();
        let (mut requests, mut now, mut owed) = (0, Duration::ZERO, cost);
        loop {
            match rates.pay(&mut owed) {
                Ok(()) => (requests, owed) = (requests + 1, cost),
                Err(wait) if now + wait > time => return requests,
                Err(wait) => {
                    clock.advance(wait);
                    now += wait;
                }
            }
        }
    }

    const fn cost(bytes: u64) -> Cost {
        Cost { operations: 1, bytes }
    }

    #[test]
    fn operations_keep_rate() {
        for (iops, seconds) in [(1, 10), (7, 10), (1000, 3), (123_457, 1), (OPERATIONS_MAX, 1)] {
            let limits = Limits { iops, ..Limits::default() };
            let expected = iops * seconds + limits.burst_operations();
            let is = count_passing(&limits, cost(1 << 20), Duration::from_secs(seconds));
            assert!(is <= expected && is >= expected * 98 / 100 - 1, "{is} of {expected} at {iops}");
        }
    }

    #[test]
    fn bytes_keep_rate_for_all_request_sizes() {
        for (bps, size) in [
            (BYTES_PER_SECOND_MIN, 512),
            (1 << 20, 512),
            (1 << 20, 4096),
            // A request larger than the burst.
            (1 << 20, 32 << 20),
            (777_777_777, 4096),
            (BYTES_PER_SECOND_MAX, 1 << 20),
            (BYTES_PER_SECOND_MAX, 65536),
        ] {
            let limits = Limits { bps, ..Limits::default() };
            let time = Duration::from_secs(if size > bps { 320 } else { 4 }).min(Duration::from_secs(320));
            let time = if bps > 1 << 32 { Duration::from_millis(50) } else { time };
            let expected = bps as f64 * time.as_secs_f64() + limits.burst_bytes() as f64;
            let is = (count_passing(&limits, cost(size), time) * size) as f64;
            let least = expected * 0.98 - size as f64;
            assert!(is <= expected + 1.0 && is >= least, "{is} of {expected} at {bps} by {size}");
        }
    }

    #[test]
    fn burst_refills_when_idle_up_to_its_size() {
        let limits = Limits { iops: 10, iops_burst: 50, ..Limits::default() };
        let clock = FakeRelativeClock::default();
        let mut rates = Rates::new(&limits, &clock, false).unwrap();
        let mut at_once = || {
            let mut requests = 0;
            while rates.pay(&mut cost(0)).is_ok() {
                requests += 1;
            }
            requests
        };
        assert_eq!(at_once(), 50);
        clock.advance(Duration::from_secs(1));
        assert_eq!(at_once(), 10);
        clock.advance(Duration::from_secs(3600));
        assert_eq!(at_once(), 50);
        let mut spent = Rates::new(&limits, &clock, true).unwrap();
        assert_eq!(spent.pay(&mut cost(0)), Err(Duration::from_millis(100)));
    }

    #[test]
    fn partial_payment_is_kept() {
        let limits = Limits { iops: 1, bps: 10_000, bps_burst: 5000, ..Limits::default() };
        let clock = FakeRelativeClock::default();
        let mut rates = Rates::new(&limits, &clock, false).unwrap();
        let mut owed = cost(10_000);
        assert_eq!(rates.pay(&mut owed), Err(Duration::from_millis(500)));
        assert_eq!(owed, Cost { operations: 0, bytes: 5000 });
        clock.advance(Duration::from_secs(1));
        assert_eq!(rates.pay(&mut owed), Ok(()));
        assert_eq!(owed, Cost { operations: 0, bytes: 0 });
        // Without limits a request owes nothing.
        assert!(Rates::new(&Limits::default(), &clock, false).is_none());
    }

    #[test]
    fn range_limits_do_not_overflow() {
        for bps in [BYTES_PER_SECOND_MIN, BYTES_PER_SECOND_MAX] {
            for bps_burst in [BURST_BYTES_MIN, BYTES_PER_SECOND_MAX] {
                for (iops, iops_burst) in [(1, OPERATIONS_MAX), (OPERATIONS_MAX, 1)] {
                    let limits = Limits { iops, bps, iops_burst, bps_burst };
                    let clock = FakeRelativeClock::default();
                    let mut rates = Rates::new(&limits, &clock, false).unwrap();
                    // 100 years, longer than the lifetime of any server.
                    clock.advance(Duration::from_secs(100 * 365 * 86_400));
                    while rates.pay(&mut Cost { operations: 1, bytes: 1 << 36 }).is_ok() {}
                }
            }
        }
    }
}
