//! The arithmetic of rates: `governor`'s, which counts cells of one size.
//!
//! A cell stands for an operation, or for as many bytes as go through in 100 ns: with finer ones the
//! times, which are whole nanoseconds, would be wrong by more than a hundredth. What was paid and not
//! used of the last cell is kept for the next request, so that small ones pay no more than they are.

use std::num::{NonZeroU32, NonZeroU64};
use std::time::Duration;

use governor::clock::Clock;
use governor::middleware::NoOpMiddleware;
use governor::nanos::Nanos;
use governor::state::{InMemoryState, NotKeyed};
use governor::{Quota, RateLimiter};

use super::line::{Cost, Pace};
use crate::sync::Instant;

/// Most operations a second, and most that come at once.
pub const OPERATIONS_MAX: u64 = 10_000_000;
/// Fewest bytes a second: a page.
pub const BYTES_PER_SECOND_MIN: u64 = 4096;
/// Most bytes a second, and most that come at once.
pub const BYTES_PER_SECOND_MAX: u64 = 1 << 40;
/// Fewest bytes that come at once.
pub const BURST_BYTES_MIN: u64 = 4096;
/// What may come at once where nothing else was said: the part of a second whose worth it is.
pub const BURST_PART: u64 = 10;

/// Most cells a second.
const CELLS_MAX: u64 = 10_000_000;
const NANOS: u64 = 1_000_000_000;
const _: () = {
    assert!(OPERATIONS_MAX <= CELLS_MAX, "an operation is a cell");
    assert!(NANOS / CELLS_MAX >= 100, "a nanosecond more or less is a hundredth at most");
    // The longest time there is: all cells of a burst, at the slowest rate.
    assert!((OPERATIONS_MAX as u128) * (NANOS as u128) < (u64::MAX / 4) as u128);
    assert!((BYTES_PER_SECOND_MAX / BYTES_PER_SECOND_MIN) as u128 * (NANOS as u128) < (u64::MAX / 4) as u128);
};

/// How much gets through. 0 is no limit, or the usual burst: a tenth of what gets through in a second,
/// but at least one operation and [`BURST_BYTES_MIN`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Operations a second, at most [`OPERATIONS_MAX`].
    pub iops: u64,
    /// Bytes a second that are read or written, [`BYTES_PER_SECOND_MIN`] to [`BYTES_PER_SECOND_MAX`].
    pub bps: u64,
    /// Operations that may come at once after a pause, at most [`OPERATIONS_MAX`].
    pub iops_burst: u64,
    /// Bytes that may come at once after a pause, [`BURST_BYTES_MIN`] to [`BYTES_PER_SECOND_MAX`].
    pub bps_burst: u64,
}

impl Limits {
    /// Operations that may come at once.
    pub fn operations_at_once(&self) -> u64 {
        if self.iops_burst > 0 { self.iops_burst } else { (self.iops / BURST_PART).max(1) }
    }

    /// Bytes that may come at once.
    pub fn bytes_at_once(&self) -> u64 {
        if self.bps_burst > 0 { self.bps_burst } else { (self.bps / BURST_PART).max(BURST_BYTES_MIN) }
    }
}

/// Time since something began.
#[derive(Debug, Clone)]
pub struct Since(Instant);

impl Since {
    /// Now.
    pub fn now() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Since {
    type Instant = Nanos;

    fn now(&self) -> Nanos {
        self.0.elapsed().into()
    }
}

/// Something that gets through at a rate.
struct Rate<C: Clock<Instant = Nanos>> {
    limiter: RateLimiter<NotKeyed, InMemoryState, C, NoOpMiddleware<Nanos>>,
    clock: C,
    /// What a cell stands for.
    unit: u64,
    /// In cells.
    burst: NonZeroU32,
    /// Paid, and not used.
    prepaid: u64,
}

impl<C: Clock<Instant = Nanos> + Clone> Rate<C> {
    /// So much a second, and so much at once. `is_spent`: of that there is nothing now.
    fn new(per_second: NonZeroU64, at_once: u64, clock: &C, is_spent: bool) -> Self {
        let per_second = per_second.get();
        let unit = per_second.div_ceil(CELLS_MAX).max(at_once.div_ceil(u64::from(u32::MAX)));
        let burst = u32::try_from(at_once.div_ceil(unit)).ok().and_then(NonZeroU32::new);
        let burst = burst.unwrap_or(NonZeroU32::MIN);
        // Rounded up: never faster than it is to be.
        let of_a_cell = (u128::from(unit) * u128::from(NANOS)).div_ceil(u128::from(per_second));
        let of_a_cell = Duration::from_nanos(u64::try_from(of_a_cell).unwrap_or(u64::MAX));
        let quota = Quota::with_period(of_a_cell).expect("no time is zero").allow_burst(burst);
        let limiter = RateLimiter::direct_with_clock(quota, clock.clone());
        if is_spent {
            // All there is: what it answers is no matter.
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
            match self.limiter.check_n(cells).expect("a burst has as many") {
                Ok(()) => self.prepaid += u64::from(cells.get()) * self.unit,
                // It may have come meanwhile.
                Err(not_yet) => match not_yet.wait_time_from(self.clock.now()) {
                    Duration::ZERO => {}
                    wait => return Err(wait),
                },
            }
        }
    }
}

/// The rates of a line.
pub struct Rates<C: Clock<Instant = Nanos> = Since> {
    operations: Option<Rate<C>>,
    bytes: Option<Rate<C>>,
}

impl<C: Clock<Instant = Nanos> + Clone> Rates<C> {
    /// Those; `None` where there is no limit. `is_spent`: no burst is there now.
    pub fn new(limits: &Limits, clock: &C, is_spent: bool) -> Option<Self> {
        let rate = |per_second, at_once| {
            NonZeroU64::new(per_second).map(|per_second| Rate::new(per_second, at_once, clock, is_spent))
        };
        let operations = rate(limits.iops, limits.operations_at_once());
        let bytes = rate(limits.bps, limits.bytes_at_once());
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

    /// What gets through in `time`, asked for as soon as it can be, by requests that cost so much.
    fn through(limits: &Limits, cost: Cost, time: Duration) -> u64 {
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
    fn operations_keep_their_rate() {
        for (iops, seconds) in [(1, 10), (7, 10), (1000, 3), (123_457, 1), (OPERATIONS_MAX, 1)] {
            let limits = Limits { iops, ..Limits::default() };
            let expected = iops * seconds + limits.operations_at_once();
            let is = through(&limits, cost(1 << 20), Duration::from_secs(seconds));
            assert!(is <= expected && is >= expected * 98 / 100 - 1, "{is} of {expected} at {iops}");
        }
    }

    #[test]
    fn bytes_keep_their_rate_whatever_the_size_of_requests() {
        for (bps, size) in [
            (BYTES_PER_SECOND_MIN, 512),
            (1 << 20, 512),
            (1 << 20, 4096),
            // More than comes at once.
            (1 << 20, 32 << 20),
            (777_777_777, 4096),
            (BYTES_PER_SECOND_MAX, 1 << 20),
            (BYTES_PER_SECOND_MAX, 65536),
        ] {
            let limits = Limits { bps, ..Limits::default() };
            let time = Duration::from_secs(if size > bps { 320 } else { 4 }).min(Duration::from_secs(320));
            let time = if bps > 1 << 32 { Duration::from_millis(50) } else { time };
            let expected = bps as f64 * time.as_secs_f64() + limits.bytes_at_once() as f64;
            let is = (through(&limits, cost(size), time) * size) as f64;
            let least = expected * 0.98 - size as f64;
            assert!(is <= expected + 1.0 && is >= least, "{is} of {expected} at {bps} by {size}");
        }
    }

    #[test]
    fn a_burst_is_there_after_a_pause_and_no_larger() {
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
    fn what_is_paid_is_not_owed_again() {
        let limits = Limits { iops: 1, bps: 10_000, bps_burst: 5000, ..Limits::default() };
        let clock = FakeRelativeClock::default();
        let mut rates = Rates::new(&limits, &clock, false).unwrap();
        let mut owed = cost(10_000);
        assert_eq!(rates.pay(&mut owed), Err(Duration::from_millis(500)));
        assert_eq!(owed, Cost { operations: 0, bytes: 5000 });
        clock.advance(Duration::from_secs(1));
        assert_eq!(rates.pay(&mut owed), Ok(()));
        assert_eq!(owed, Cost { operations: 0, bytes: 0 });
        // By other rates what is left is paid.
        assert!(Rates::new(&Limits::default(), &clock, false).is_none());
    }

    #[test]
    fn the_ends_of_all_ranges_do_not_overflow() {
        for bps in [BYTES_PER_SECOND_MIN, BYTES_PER_SECOND_MAX] {
            for bps_burst in [BURST_BYTES_MIN, BYTES_PER_SECOND_MAX] {
                for (iops, iops_burst) in [(1, OPERATIONS_MAX), (OPERATIONS_MAX, 1)] {
                    let limits = Limits { iops, bps, iops_burst, bps_burst };
                    let clock = FakeRelativeClock::default();
                    let mut rates = Rates::new(&limits, &clock, false).unwrap();
                    // Longer than a server lives.
                    clock.advance(Duration::from_secs(100 * 365 * 86_400));
                    while rates.pay(&mut Cost { operations: 1, bytes: 1 << 36 }).is_ok() {}
                }
            }
        }
    }
}
