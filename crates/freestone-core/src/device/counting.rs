//! A wrapper that counts and measures the requests of a device, as the block layer's `stat` file does for a
//! disk, and applies limits.

use std::cell::Cell;
use std::io;

use crossbeam_utils::CachePadded;
use tracing::Span;

use super::limiting::{Limiting, Submitted, Ticket, Unlimited};
use super::request_trace::{self, RequestTrace};
use super::zoned::{AppendCompletion, Zone, ZoneOp, Zoned};
use super::{
    Account, Buffer, Changes, Completion, Counted, Counter, Device, Error, Extent, Flags, Geometry, IoBuf,
    Request, Result, Sum, Tally, Told, Tried, sampling,
};
use crate::limits::Limits;
use crate::per_cpu_arc::PerCpuArc;
use crate::sync::{Arc, Instant, OnceLock, thread_local};

/// Statistics and [limits](crate::limits) of one access path to a device. Requests on different CPUs share
/// neither counters nor reference counts.
///
/// Counts and bytes are exact. Latencies, from the call of the device to its completion, are measured for
/// each submitted request, and for a random sample of 1 in 64 inline requests, which represents the others.
/// If the device executes a sampled request in several turns, its latency starts with the first one if they
/// follow each other on one thread; otherwise only the last turn is measured.
///
/// While an access path or the device has limits, tried requests would block, and submitted ones wait until
/// they have paid; latencies include this wait. Zone operations, hints and queries pay nothing.
pub struct Counting {
    inner: Arc<dyn Device>,
    way: Way,
    /// Per-CPU references for submitted requests, created by the first one.
    shells: OnceLock<PerCpuArc<Shell>>,
}

/// Statistics and limits of an access path. The sum lives as long as any of its paths.
#[derive(Clone)]
struct Way {
    tally: Arc<Tally>,
    device_sum: Arc<Sum<Tally>>,
    limiting: Arc<Limiting>,
}

type Shell = CachePadded<Way>;

thread_local! {
    /// A measured request on this thread that is not complete.
    static SAMPLED: Cell<Option<SampledRequest>> = const { Cell::new(None) };
}

/// Continuation of a measured request.
#[derive(Clone, Copy)]
struct SampledRequest {
    tally: usize,
    rest: Request,
    begun: Instant,
}

impl Counting {
    /// Creates the first access path to a device, with zero statistics.
    pub fn new(name: &str, inner: Arc<dyn Device>) -> Self {
        Self::with(name, inner, Arc::default(), Limiting::new())
    }

    /// Creates another access path to the same device. The device's sums include its statistics.
    #[must_use]
    pub fn another_way(&self) -> Self {
        let device_sum = Arc::clone(&self.way.device_sum);
        let limiting = self.way.limiting.another_way();
        Self::with(self.tally().device(), Arc::clone(&self.inner), device_sum, limiting)
    }

    fn with(name: &str, inner: Arc<dyn Device>, device_sum: Arc<Sum<Tally>>, limiting: Limiting) -> Self {
        let tally = Arc::new(Tally::new(name));
        device_sum.take_in(Arc::clone(&tally));
        let way = Way { tally, device_sum, limiting: Arc::new(limiting) };
        Self { inner, way, shells: OnceLock::new() }
    }

    /// Sets the limits of this access path, also for waiting requests.
    ///
    /// # Errors
    /// The error from starting a thread. Nothing has changed.
    pub fn set_limits(&self, limits: &Limits) -> io::Result<()> {
        self.way.limiting.set_way(limits)
    }

    /// Sets the limits of all access paths together, also for waiting requests.
    ///
    /// # Errors
    /// The error from starting a thread. Nothing has changed.
    pub fn set_device_limits(&self, limits: &Limits) -> io::Result<()> {
        self.way.limiting.set_device(limits)
    }

    /// Returns the limits of this access path.
    pub fn limits(&self) -> Limits {
        self.way.limiting.way()
    }

    /// Returns the limits of all access paths together.
    pub fn device_limits(&self) -> Limits {
        self.way.limiting.device()
    }

    /// Suspends the limits of these access paths and of their device until the guard is dropped. Waiting
    /// requests continue.
    #[must_use]
    pub fn lift_limits<'a>(ways: impl Iterator<Item = &'a Self>) -> Unlimited {
        Unlimited::lifted(ways.map(|way| &*way.way.limiting))
    }

    /// Fails requests that wait for the limits of these access paths or their device with [`Error::Gone`].
    /// New requests that would have to wait also fail, until the guard is dropped.
    #[must_use]
    pub fn end_waiting<'a>(ways: impl Iterator<Item = &'a Self>) -> Unlimited {
        Unlimited::failing(ways.map(|way| &*way.way.limiting))
    }

    /// Returns the counters of all access paths.
    pub fn counts(&self) -> Counted {
        self.way.device_sum.counted()
    }

    /// Returns the statistics of all access paths, with latencies.
    pub fn account(&self) -> Account {
        self.way.device_sum.told()
    }

    /// Returns the statistics of this access path.
    pub fn tally(&self) -> &Tally {
        &self.way.tally
    }

    /// Returns the statistics of all present access paths.
    pub fn ways(&self) -> Vec<Arc<Tally>> {
        self.way.device_sum.members()
    }

    /// Returns the sum of all access paths.
    pub fn sum(&self) -> &Arc<Sum<Tally>> {
        &self.way.device_sum
    }

    fn shell(&self) -> Arc<Shell> {
        let make = || PerCpuArc::new(|| CachePadded::new(self.way.clone()));
        Arc::clone(self.shells.get_or_init(make))
    }

    fn zones(&self) -> Result<&dyn Zoned> {
        self.inner.zoned().ok_or(Error::Unsupported)
    }

    fn ticket(&self, submitted: Submitted) -> Ticket {
        let Way { tally, limiting, .. } = &self.way;
        Ticket::new(submitted, Arc::clone(&self.inner), Arc::clone(limiting), Arc::clone(tally))
    }

    /// Tries a request although limits exist, perhaps only on another access path.
    #[cold]
    #[inline(never)]
    fn try_limited(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if self.way.limiting.is_limited() {
            return Ok(Tried::WouldBlock);
        }
        self.try_counted(request, buffer)
    }

    #[inline]
    fn try_counted(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if sampling::is_due() {
            return self.try_observed(request, buffer, true);
        }
        if request_trace::is_enabled() {
            return self.try_observed(request, buffer, false);
        }
        let outcome = self.inner.try_io(request, buffer);
        // The usual case, kept short.
        if let Ok(Tried::Done) = outcome {
            self.way.tally.counts().done(request.op, request.len);
            return outcome;
        }
        self.tried(request, outcome)
    }

    /// Tries a request that is measured or traced.
    #[cold]
    #[inline(never)]
    fn try_observed(&self, request: &Request, buffer: Buffer<'_>, is_due: bool) -> Result<Tried> {
        if !request_trace::is_enabled() {
            return self.try_measured(request, buffer);
        }
        let tally = &self.way.tally;
        let trace = RequestTrace::begin(tally, request.op.into(), request.offset, request.len, false);
        let outcome = trace.in_span(|| {
            if is_due {
                return self.try_measured(request, buffer);
            }
            let outcome = self.inner.try_io(request, buffer);
            self.tried(request, outcome)
        });
        trace.tried(tally, &outcome);
        outcome
    }

    /// Tries a request and measures its latency.
    #[cold]
    #[inline(never)]
    fn try_measured(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let stands_for = sampling::take_sample();
        let tally = Arc::as_ptr(&self.way.tally).addr();
        let previous = SAMPLED.take().filter(|sampled| sampled.tally == tally && sampled.rest == *request);
        let begun = previous.map_or_else(Instant::now, |sampled| sampled.begun);
        let outcome = self.inner.try_io(request, buffer);
        match outcome {
            Ok(Tried::Done) => self.way.tally.took(request.op.into(), begun.elapsed(), stands_for),
            Ok(Tried::Partly(bytes)) => {
                SAMPLED.set(Some(SampledRequest { tally, rest: request.rest(bytes), begun }));
                sampling::resample_next(stands_for);
            }
            // Submitted requests are measured separately.
            Ok(Tried::WouldBlock) | Err(_) => {}
        }
        self.tried(request, outcome)
    }

    #[cold]
    #[inline(never)]
    fn append_traced(
        &self,
        zones: &dyn Zoned,
        offset: u64,
        data: &[u8],
        flags: Flags,
    ) -> Result<Option<u64>> {
        let tally = &self.way.tally;
        let trace = RequestTrace::begin(tally, Counter::Append, offset, data.len() as u64, false);
        let outcome = trace.in_span(|| zones.try_append(offset, data, flags));
        let tried = outcome.map(|place| place.map_or(Tried::WouldBlock, |_| Tried::Done));
        trace.tried(tally, &tried);
        outcome
    }

    #[inline(never)]
    fn tried(&self, request: &Request, outcome: Result<Tried>) -> Result<Tried> {
        self.way.tally.counts().tried(request, &outcome);
        if outcome.is_err() {
            self.way.tally.failed(request.op.into());
        }
        outcome
    }
}

impl Way {
    /// Starts the trace of a submitted request, if tracing is enabled.
    fn start_trace(&self, counter: Counter, offset: u64, bytes: u64) -> Option<RequestTrace> {
        request_trace::is_enabled().then(|| RequestTrace::begin(&self.tally, counter, offset, bytes, true))
    }

    fn answered<T>(&self, counter: Counter, begun: Instant, outcome: &Result<T>) {
        self.tally.counts().ended();
        match outcome {
            Ok(_) => self.tally.took(counter, begun.elapsed(), 1),
            Err(_) => self.tally.failed(counter),
        }
    }
}

impl Device for Counting {
    fn geometry(&self) -> Geometry {
        self.inner.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        if self.way.limiting.has_any() {
            return self.try_limited(request, buffer);
        }
        self.try_counted(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let (way, begun) = (self.shell(), Instant::now());
        way.tally.counts().begun();
        let trace = way.start_trace(request.op.into(), request.offset, request.len);
        let span = trace.as_ref().map(RequestTrace::span);
        let done = Completion::new(move |outcome, buffer| {
            if let Some(trace) = trace {
                trace.completed(&way.tally, &outcome);
            }
            way.answered(request.op.into(), begun, &outcome);
            way.tally.counts().answered(&request, &outcome);
            done.complete(outcome, buffer);
        });
        let _entered = span.as_ref().map(Span::enter);
        if !self.way.limiting.has_any() {
            return self.inner.submit(request, buffer, done);
        }
        // An invalid request pays nothing.
        if let Err(error) = request.check(&self.inner.geometry()) {
            return done.complete(Err(error), buffer);
        }
        self.ticket(Submitted::Io(request, buffer, done)).pay_and_submit();
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

impl Zoned for Counting {
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()> {
        self.zones()?.report(offset, row)
    }

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        self.zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        self.zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let zones = self.zones()?;
        if self.way.limiting.has_any() && self.way.limiting.is_limited() {
            return Ok(None);
        }
        let measured = sampling::is_due().then(|| (sampling::take_sample(), Instant::now()));
        let outcome = if request_trace::is_enabled() {
            self.append_traced(zones, offset, data, flags)
        } else {
            zones.try_append(offset, data, flags)
        };
        if matches!(outcome, Ok(None)) {
            return outcome;
        }
        let tally = &self.way.tally;
        tally.counts().appended(data.len() as u64, &outcome);
        match (&outcome, measured) {
            (Ok(_), Some((stands_for, begun))) => tally.took(Counter::Append, begun.elapsed(), stands_for),
            (Ok(_), None) => {}
            (Err(_), _) => tally.failed(Counter::Append),
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let zones = match self.zones() {
            Ok(zones) => zones,
            Err(error) => return done(Err(error)),
        };
        let (way, begun, bytes) = (self.shell(), Instant::now(), data.len() as u64);
        way.tally.counts().begun();
        let trace = way.start_trace(Counter::Append, offset, bytes);
        let done = Box::new(move |outcome| {
            if let Some(trace) = trace {
                trace.completed(&way.tally, &outcome);
            }
            way.answered(Counter::Append, begun, &outcome);
            way.tally.counts().appended(bytes, &outcome);
            done(outcome);
        });
        if self.way.limiting.has_any() {
            return self.ticket(Submitted::Append(offset, data, flags, done)).pay_and_submit();
        }
        zones.submit_append(offset, data, flags, done);
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if self.way.limiting.has_any() {
            self.way.limiting.close_way();
        }
    }
}
