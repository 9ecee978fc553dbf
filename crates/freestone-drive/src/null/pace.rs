//! A device slowed down: a limit of its bandwidth, and a least time for every answer.
//!
//! What is asked is done at once, in the order in which it came; only the answers wait, with the
//! timer, so that a request in flight costs no thread, and 64 of them take as long as one. Who
//! issues requests bounds how many there are.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use freestone_core::device::zoned::{AppendCompletion, ZoneOp};
use freestone_core::device::{
    Buffer, Changes, Completion, Device, Error, Extent, Flags, Geometry, IoBuf, Op, Request, Result, Tried,
    Zone, Zoned,
};
use freestone_core::sync::{AtomicU64, Instant, Ordering};
use freestone_core::timer;

/// Largest bandwidth limit in MiB/s, as in the kernel.
pub const MBPS_MAX: u32 = 40960;
/// Longest delay of answers: twice what clients commonly wait for one.
pub const COMPLETION_MAX: Duration = Duration::from_secs(60);
/// What a device that was idle has in store, in time: a tick of the kernel's.
const BURST: Duration = Duration::from_millis(20);

/// How a device is slowed down.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PaceConfig {
    /// MiB of data a second, read, written and appended together; 0 is no limit. (Discards, zeroes
    /// and flushes move no data.)
    pub mbps: u32,
    /// `completion_nsec`: a request that is valid is answered no earlier than this after it was
    /// issued, flushes too.
    pub completion: Duration,
}

/// A device that takes its time.
///
/// The limit is a bucket of tokens that carries debt: a request of any size begins when nothing is
/// owed any more, and leaves what it costs to those after it. (The kernel's never admits more than
/// it hands out in 20 ms.)
pub struct Paced {
    inner: Arc<dyn Device>,
    bucket: Option<Bucket>,
    completion: Duration,
}

impl Paced {
    /// Slows `inner` down.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) where `mbps` is above [`MBPS_MAX`] or
    /// `completion` above [`COMPLETION_MAX`]; the timer's thread could not be started.
    pub fn new(inner: Arc<dyn Device>, config: PaceConfig) -> io::Result<Self> {
        let invalid = |what: String| Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        let PaceConfig { mbps, completion } = config;
        if mbps > MBPS_MAX {
            return invalid(format!("mbps is {mbps}; it must be 1 to {MBPS_MAX}, or 0 for no limit"));
        }
        if completion > COMPLETION_MAX {
            return invalid(format!("completion_nsec is {}; it is at most a minute", completion.as_nanos()));
        }
        timer::start()?;
        Ok(Self { inner, bucket: (mbps > 0).then(|| Bucket::new(mbps)), completion })
    }

    /// Runs `work`, which tells how many of `bytes` it moved at once, if it may begin now; what was
    /// not moved is not paid.
    #[inline]
    fn try_now<T>(
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
        if !bucket.admits(paid) {
            return None;
        }
        let outcome = work();
        let moved = moved(&outcome);
        if moved < bytes {
            bucket.refund(paid - bucket.cost(moved));
        }
        Some(outcome)
    }

    /// When a request of so many bytes of data may be answered.
    fn due(&self, bytes: u64) -> Instant {
        let earliest = Instant::now() + self.completion;
        match &self.bucket {
            Some(bucket) if bytes > 0 => earliest.max(bucket.turn(bucket.cost(bytes))),
            _ => earliest,
        }
    }

    fn inner_zones(&self) -> Result<&dyn Zoned> {
        self.inner.zoned().ok_or(Error::Unsupported)
    }
}

/// The bytes of data that a request moves.
#[inline]
fn data_bytes(request: &Request) -> u64 {
    if matches!(request.op, Op::Read | Op::Write) { request.len } else { 0 }
}

/// Answers no earlier than `due`.
fn answer(due: Instant, answer: impl FnOnce() + Send + 'static) {
    if Instant::now() >= due {
        answer();
    } else {
        // It cannot fail: the timer runs since the device was made.
        let _ = timer::at(due, answer);
    }
}

/// See [`Paced`]. Times are nanoseconds since `begin`.
struct Bucket {
    begin: Instant,
    bytes_per_second: u64,
    /// When everything that was admitted is paid.
    paid_at: AtomicU64,
}

impl Bucket {
    fn new(mbps: u32) -> Self {
        Self { begin: Instant::now(), bytes_per_second: u64::from(mbps) << 20, paid_at: AtomicU64::new(0) }
    }

    /// How long so many bytes take.
    #[inline]
    fn cost(&self, bytes: u64) -> u64 {
        let nanos = (u128::from(bytes) * 1_000_000_000).div_ceil(u128::from(self.bytes_per_second));
        u64::try_from(nanos).unwrap_or(u64::MAX)
    }

    fn now(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// What is owed after another `cost`, where `paid_at` and `now` are as given. Little is saved
    /// up.
    fn after(paid_at: u64, now: u64, cost: u64) -> u64 {
        paid_at.max(now.saturating_sub(BURST.as_nanos() as u64)).saturating_add(cost)
    }

    /// Charges `cost` if nothing is owed now.
    #[inline]
    fn admits(&self, cost: u64) -> bool {
        let now = self.now();
        let charge = |paid_at| (paid_at <= now).then(|| Self::after(paid_at, now, cost));
        // Relaxed: nothing else goes with the number; each charge is one exchange.
        self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, charge).is_ok()
    }

    /// Charges `cost`; the moment from which on nothing before it is owed.
    fn turn(&self, cost: u64) -> Instant {
        let now = self.now();
        // Relaxed: as above.
        let turn = self.paid_at.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |paid_at| {
            Some(Self::after(paid_at, now, cost))
        });
        let (Ok(turn) | Err(turn)) = turn;
        self.begin.checked_add(Duration::from_nanos(turn)).unwrap_or(self.begin)
    }

    fn refund(&self, cost: u64) {
        // Relaxed: as above. It was charged, so it is there.
        self.paid_at.fetch_sub(cost, Ordering::Relaxed);
    }
}

impl Device for Paced {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let moved = |outcome: &Result<Tried>| match outcome {
            Ok(Tried::WouldBlock) => 0,
            Ok(Tried::Partly(bytes)) => *bytes,
            Ok(Tried::Done) | Err(_) => request.len,
        };
        // What is refused costs nothing.
        request.check(&self.geometry())?;
        let tried = self.try_now(data_bytes(request), moved, || self.inner.try_io(request, buffer));
        tried.unwrap_or(Ok(Tried::WouldBlock))
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = request.check(&self.geometry()) {
            return done.complete(Err(error), buffer);
        }
        let due = self.due(data_bytes(&request));
        let done =
            Completion::new(move |outcome, buffer| answer(due, move || done.complete(outcome, buffer)));
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        self.inner.extents(offset, len, row)
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.inner.prefetch(offset, len);
    }

    fn zoned(&self) -> Option<&dyn Zoned> {
        self.inner.zoned().map(|_| self as &dyn Zoned)
    }

    fn changes(&self) -> Option<&dyn Changes> {
        self.inner.changes()
    }
}

/// Appends are data; zone operations and reports are not slowed down.
impl Zoned for Paced {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.inner_zones()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.inner_zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        self.inner_zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let zones = self.inner_zones()?;
        let bytes = data.len() as u64;
        let moved = |outcome: &Result<Option<u64>>| if matches!(outcome, Ok(None)) { 0 } else { bytes };
        self.try_now(bytes, moved, || zones.try_append(offset, data, flags)).unwrap_or(Ok(None))
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let zones = match self.inner_zones() {
            Ok(zones) => zones,
            Err(error) => return done(Err(error)),
        };
        let due = self.due(data.len() as u64);
        let done = Box::new(move |outcome| answer(due, move || done(outcome)));
        zones.submit_append(offset, data, flags, done);
    }
}
