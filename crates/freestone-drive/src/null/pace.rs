//! Layer with a bandwidth limit and a minimum completion time.
//!
//! Requests start at once, in order of arrival. A timer delays their completions, so a delayed
//! request needs no thread, and 64 parallel requests take as long as one. The clients limit the
//! number of requests in flight.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::zoned::AppendCompletion;
use freestone_core::device::{
    Buffer, Completion, Device, Flags, IoBuf, Op, Request, Result, TryResult, Zoned, forward_device,
    forward_zoned,
};
use freestone_core::sync::{AtomicU64, Instant, Ordering};
use freestone_core::timer;

/// Largest bandwidth limit in MiB/s, the same as in the kernel's `null_blk`.
pub const MBPS_MAX: u32 = 40960;
/// Longest completion delay. Twice the usual request timeout of clients, 30 s.
pub const COMPLETION_MAX: Duration = Duration::from_secs(60);
/// Maximum unused budget that an idle device accumulates, as time at full bandwidth. The same as
/// the kernel's tick.
const BURST: Duration = Duration::from_millis(20);

/// Configuration of a [`PacedDevice`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PaceConfig {
    /// Maximum bandwidth of reads, writes and appends together, in MiB/s; 0 is no limit. Discards,
    /// zeroes and flushes transfer no data and are not limited.
    pub mbps: u32,
    /// Minimum time between submission and completion of a valid request, including flushes
    /// (`completion_nsec`).
    pub completion: Duration,
}

/// Layer that limits the bandwidth of a device and delays completions.
///
/// The bandwidth limit is a token bucket that allows debt. A request of any size starts when no
/// debt is left, and the cost of the request delays later ones. (The kernel never admits a request
/// larger than its budget of 20 ms.)
pub struct PacedDevice {
    inner: Arc<dyn Device>,
    bucket: Option<Bucket>,
    completion: Duration,
}

impl PacedDevice {
    /// Wraps `inner` with the limits of `config`.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if `mbps` exceeds [`MBPS_MAX`] or `completion`
    /// exceeds [`COMPLETION_MAX`]. An I/O error if the timer thread could not be started.
    pub fn new(inner: Arc<dyn Device>, config: PaceConfig) -> io::Result<Self> {
        let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let PaceConfig { mbps, completion } = config;
        if mbps > MBPS_MAX {
            return invalid(format!("mbps is {mbps}; it must be 1 to {MBPS_MAX}, or 0 for no limit"));
        }
        if completion > COMPLETION_MAX {
            let (nanos, max) = (completion.as_nanos(), COMPLETION_MAX.as_nanos());
            return invalid(format!("completion_nsec is {nanos}; it must be at most {max} (a minute)"));
        }
        timer::start()?;
        Ok(Self { inner, bucket: (mbps > 0).then(|| Bucket::new(mbps)), completion })
    }

    /// Runs `work` if the limits allow an inline request of `bytes` now; otherwise returns `None`.
    /// `moved` returns how many of `bytes` the outcome transferred; the cost of the rest is
    /// refunded.
    #[inline]
    fn try_run<T>(
        &self,
        bytes: u64,
        moved: impl FnOnce(&Result<T>) -> u64,
        work: impl FnOnce() -> Result<T>,
    ) -> Option<Result<T>> {
        if !self.completion.is_zero() {
            return None;
        }
        let Some(bucket) = self.bucket.as_ref().filter(|_| bytes > 0) else { return Some(work()) };
        let paid = bucket.cost(bytes);
        if !bucket.try_charge(paid) {
            return None;
        }
        let outcome = work();
        let moved = moved(&outcome);
        if moved < bytes {
            bucket.refund(paid - bucket.cost(moved));
        }
        Some(outcome)
    }

    /// Charges a request that transfers `bytes` of data, and returns the earliest time of its
    /// completion.
    fn completion_time(&self, bytes: u64) -> Instant {
        let earliest = Instant::now() + self.completion;
        match &self.bucket {
            Some(bucket) if bytes > 0 => earliest.max(bucket.charge(bucket.cost(bytes))),
            _ => earliest,
        }
    }
}

#[inline]
fn data_bytes(request: &Request) -> u64 {
    if matches!(request.op, Op::Read | Op::Write) { request.len } else { 0 }
}

fn complete_at(due: Instant, complete: impl FnOnce() + Send + 'static) {
    if Instant::now() >= due {
        complete();
    } else {
        // Scheduling cannot fail, because `PacedDevice::new` started the timer thread.
        let _ = timer::schedule(due, complete);
    }
}

/// Token bucket of [`PacedDevice`]. Times are in nanoseconds since `begin`.
struct Bucket {
    begin: Instant,
    bytes_per_second: u64,
    /// Time at which the cost of all admitted requests is paid. A time in the future is debt.
    paid_at: AtomicU64,
}

impl Bucket {
    fn new(mbps: u32) -> Self {
        Self { begin: Instant::now(), bytes_per_second: u64::from(mbps) << 20, paid_at: AtomicU64::new(0) }
    }

    /// Returns the time in nanoseconds that `bytes` take at full bandwidth.
    #[inline]
    fn cost(&self, bytes: u64) -> u64 {
        let nanos = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(self.bytes_per_second));
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the new value of `paid_at` after another `cost` in nanoseconds. An idle device
    /// accumulates at most [`BURST`] of unused budget.
    fn paid_after(paid_at: u64, now: u64, cost: u64) -> u64 {
        paid_at.max(now.saturating_sub(BURST.as_nanos() as u64)).saturating_add(cost)
    }

    /// Charges `cost` nanoseconds and returns true, or returns false if there is debt.
    #[inline]
    fn try_charge(&self, cost: u64) -> bool {
        let now = self.now();
        let charge = |paid_at| (paid_at <= now).then(|| Self::paid_after(paid_at, now, cost));
        // Relaxed: no other memory is published with the counter, and each charge is one atomic
        // update.
        self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge).is_ok()
    }

    /// Charges `cost` nanoseconds. Returns the time at which the debt of earlier requests is paid.
    fn charge(&self, cost: u64) -> Instant {
        let now = self.now();
        // Relaxed: no other memory is published with the counter.
        let paid_at = self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |paid_at| {
            Some(Self::paid_after(paid_at, now, cost))
        });
        let (Ok(paid_at) | Err(paid_at)) = paid_at;
        self.begin.checked_add(Duration::from_nanos(paid_at)).unwrap_or(self.begin)
    }

    fn refund(&self, cost: u64) {
        // Relaxed: as in `try_charge`. The amount was charged before, so the subtraction cannot
        // underflow.
        self.paid_at.fetch_sub(cost, Ordering::Relaxed);
    }
}

impl Device for PacedDevice {
    forward_device!(|paced| paced.inner => geometry, extents; prefetch: below, zoned: self, changes: below);

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let moved = |outcome: &Result<TryResult>| match outcome {
            Ok(TryResult::WouldBlock) => 0,
            Ok(TryResult::Partly(bytes)) => *bytes,
            Ok(TryResult::Done) | Err(_) => request.len,
        };
        // An invalid request fails without a charge or a delay.
        request.check(&self.geometry())?;
        let tried = self.try_run(data_bytes(request), moved, || self.inner.try_io(request, buffer));
        tried.unwrap_or(Ok(TryResult::WouldBlock))
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        let due = self.completion_time(data_bytes(&request));
        let done =
            Completion::new(move |outcome, buffer| complete_at(due, move || done.complete(outcome, buffer)));
        self.inner.submit(request, buffer, done);
    }
}

/// Appends count as transferred data. Zone operations and reports are not limited.
impl Zoned for PacedDevice {
    forward_zoned!(|paced| paced.inner => report, zone_op, reset_all);

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let zones = self.inner.zones()?;
        let bytes = data.len() as u64;
        let moved = |outcome: &Result<Option<u64>>| if matches!(outcome, Ok(None)) { 0 } else { bytes };
        self.try_run(bytes, moved, || zones.try_append(offset, data, flags)).unwrap_or(Ok(None))
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let zones = match self.inner.zones() {
            Ok(zones) => zones,
            Err(error) => return done(Err(error)),
        };
        let due = self.completion_time(data.len() as u64);
        let done = Box::new(move |outcome| complete_at(due, move || done(outcome)));
        zones.submit_append(offset, data, flags, done);
    }
}
