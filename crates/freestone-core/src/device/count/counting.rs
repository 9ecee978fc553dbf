//! A wrapper that counts and measures the requests of a device, as the block layer's `stat` file does for a
//! disk, and applies limits.

use std::cell::Cell;
use std::io;

use crossbeam_utils::CachePadded;
use tracing::Span;

use super::limiting::{LimitSuspension, LimitedRequest, Limiting, SubmittedOp};
use super::request_trace::{self, RequestTrace};
use super::{Counter, IoStats, OpStats, StatSource, Sum, Tally, sampling};
use crate::device::zoned::{AppendCompletion, Zoned};
use crate::device::{
    Buffer, Completion, Device, Flags, IoBuf, Request, Result, TryResult, forward_device, forward_zoned,
};
use crate::limits::Limits;
use crate::per_cpu_arc::PerCpuArc;
use crate::sync::{Arc, Instant, OnceLock, thread_local};

/// Statistics and [limits](crate::limits) of one access path to a device. Requests on different CPUs share
/// neither counters nor reference counts.
///
/// Counts and bytes are exact. Latencies are measured from the call of the device to the completion: for each
/// submitted request, and for a random sample of 1 in 64 inline requests, which represents the others. If the
/// device executes a sampled request in several turns that follow each other on one thread, the latency
/// starts with the first turn. Otherwise only the last turn is measured.
///
/// While an access path or the device has limits, tried requests would block, and submitted requests wait
/// until they have paid their cost; latencies include this wait. Zone operations, hints and queries pay
/// nothing.
pub struct Counting {
    inner: Arc<dyn Device>,
    path: AccessPath,
    /// Per-CPU references to `path` for submitted requests, created by the first submitted request.
    shells: OnceLock<PerCpuArc<Shell>>,
}

/// Statistics and limits of an access path. The device's sum lives as long as any of its access paths.
#[derive(Clone)]
struct AccessPath {
    tally: Arc<Tally>,
    device_sum: Arc<Sum<Tally>>,
    limiting: Arc<Limiting>,
}

type Shell = CachePadded<AccessPath>;

thread_local! {
    /// The sampled request of this thread of which only a part is complete, if any.
    static SAMPLED: Cell<Option<SampledRequest>> = const { Cell::new(None) };
}

/// The remaining part of a sampled request, and when the request began.
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

    /// Creates another access path to the same device. The device's sum includes the statistics of the new
    /// path.
    #[must_use]
    pub fn new_access_path(&self) -> Self {
        let device_sum = Arc::clone(&self.path.device_sum);
        let limiting = self.path.limiting.new_access_path();
        Self::with(self.tally().device(), Arc::clone(&self.inner), device_sum, limiting)
    }

    fn with(name: &str, inner: Arc<dyn Device>, device_sum: Arc<Sum<Tally>>, limiting: Limiting) -> Self {
        let tally = Arc::new(Tally::new(name));
        device_sum.add(Arc::clone(&tally));
        let path = AccessPath { tally, device_sum, limiting: Arc::new(limiting) };
        Self { inner, path, shells: OnceLock::new() }
    }

    /// Sets the rate limits of this access path, also for waiting requests.
    ///
    /// # Errors
    /// The error from starting a thread. The limits are then unchanged.
    pub fn set_limits(&self, limits: &Limits) -> io::Result<()> {
        self.path.limiting.set_path(limits)
    }

    /// Sets the rate limits of all access paths together, also for waiting requests.
    ///
    /// # Errors
    /// The error from starting a thread. The limits are then unchanged.
    pub fn set_device_limits(&self, limits: &Limits) -> io::Result<()> {
        self.path.limiting.set_device(limits)
    }

    /// Returns the rate limits of this access path.
    pub fn limits(&self) -> Limits {
        self.path.limiting.path()
    }

    /// Returns the rate limits of all access paths together.
    pub fn device_limits(&self) -> Limits {
        self.path.limiting.device()
    }

    /// Suspends the limits of these access paths and of their device until the guard is dropped. Waiting
    /// requests continue.
    #[must_use]
    pub fn suspend_limits<'a>(paths: impl Iterator<Item = &'a Self>) -> LimitSuspension {
        LimitSuspension::suspend(paths.map(|path| &*path.path.limiting))
    }

    /// Fails requests that wait for the limits of these access paths or their device with [`Error::Gone`](crate::device::Error::Gone).
    /// New requests that would have to wait also fail, until the guard is dropped.
    #[must_use]
    pub fn reject_waiting<'a>(paths: impl Iterator<Item = &'a Self>) -> LimitSuspension {
        LimitSuspension::reject(paths.map(|path| &*path.path.limiting))
    }

    /// Returns the operation counters, summed over all access paths.
    pub fn counts(&self) -> OpStats {
        self.path.device_sum.op_stats()
    }

    /// Returns the statistics with latencies, summed over all access paths.
    pub fn stats(&self) -> IoStats {
        self.path.device_sum.stats()
    }

    /// Returns the statistics of this access path.
    pub fn tally(&self) -> &Tally {
        &self.path.tally
    }

    /// Returns the statistics of each present access path.
    pub fn access_paths(&self) -> Vec<Arc<Tally>> {
        self.path.device_sum.members()
    }

    /// Returns the sum of the statistics of all access paths.
    pub fn sum(&self) -> &Arc<Sum<Tally>> {
        &self.path.device_sum
    }

    fn shell(&self) -> Arc<Shell> {
        let make = || PerCpuArc::new(|| CachePadded::new(self.path.clone()));
        Arc::clone(self.shells.get_or_init(make))
    }

    fn limited_request(&self, submitted: SubmittedOp) -> LimitedRequest {
        let AccessPath { tally, limiting, .. } = &self.path;
        LimitedRequest::new(submitted, Arc::clone(&self.inner), Arc::clone(limiting), Arc::clone(tally))
    }

    /// Tries a request of a device with limits. Returns `WouldBlock` if the limits apply to this access path.
    #[cold]
    #[inline(never)]
    fn try_limited(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        if self.path.limiting.is_limited() {
            return Ok(TryResult::WouldBlock);
        }
        self.try_counted(request, buffer)
    }

    #[inline]
    fn try_counted(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        if sampling::is_due() {
            return self.try_observed(request, buffer, true);
        }
        if request_trace::is_enabled() {
            return self.try_observed(request, buffer, false);
        }
        let outcome = self.inner.try_io(request, buffer);
        // Most requests complete at once, so this path is kept short.
        if let Ok(TryResult::Done) = outcome {
            self.path.tally.counts().count_success(request.op, request.len);
            return outcome;
        }
        self.count_try(request, outcome)
    }

    /// Tries a request that is measured or traced.
    #[cold]
    #[inline(never)]
    fn try_observed(&self, request: &Request, buffer: Buffer<'_>, is_due: bool) -> Result<TryResult> {
        if !request_trace::is_enabled() {
            return self.try_measured(request, buffer);
        }
        let tally = &self.path.tally;
        let trace = RequestTrace::begin(tally, request.op.into(), request.offset, request.len, false);
        let outcome = trace.in_span(|| {
            if is_due {
                return self.try_measured(request, buffer);
            }
            let outcome = self.inner.try_io(request, buffer);
            self.count_try(request, outcome)
        });
        trace.end_try(tally, &outcome);
        outcome
    }

    /// Tries a request and measures its latency.
    #[cold]
    #[inline(never)]
    fn try_measured(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let weight = sampling::take_sample();
        let tally = Arc::as_ptr(&self.path.tally).addr();
        let previous = SAMPLED.take().filter(|sampled| sampled.tally == tally && sampled.rest == *request);
        let begun = previous.map_or_else(Instant::now, |sampled| sampled.begun);
        let outcome = self.inner.try_io(request, buffer);
        match outcome {
            Ok(TryResult::Done) => self.path.tally.add_latency(request.op.into(), begun.elapsed(), weight),
            Ok(TryResult::Partly(bytes)) => {
                SAMPLED.set(Some(SampledRequest { tally, rest: request.rest(bytes), begun }));
                sampling::resample_next(weight);
            }
            // Not measured: a request that would block is measured when it is submitted, and failures have no
            // latency.
            Ok(TryResult::WouldBlock) | Err(_) => {}
        }
        self.count_try(request, outcome)
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
        let tally = &self.path.tally;
        let trace = RequestTrace::begin(tally, Counter::Append, offset, data.len() as u64, false);
        let outcome = trace.in_span(|| zones.try_append(offset, data, flags));
        let tried = outcome.map(|place| place.map_or(TryResult::WouldBlock, |_| TryResult::Done));
        trace.end_try(tally, &tried);
        outcome
    }

    #[inline(never)]
    fn count_try(&self, request: &Request, outcome: Result<TryResult>) -> Result<TryResult> {
        self.path.tally.counts().count_try(request, &outcome);
        if outcome.is_err() {
            self.path.tally.count_failure(request.op.into());
        }
        outcome
    }
}

impl AccessPath {
    /// Starts the trace of a submitted request, if tracing is enabled.
    fn start_trace(&self, counter: Counter, offset: u64, bytes: u64) -> Option<RequestTrace> {
        request_trace::is_enabled().then(|| RequestTrace::begin(&self.tally, counter, offset, bytes, true))
    }

    fn record_completion<T>(&self, counter: Counter, begun: Instant, outcome: &Result<T>) {
        self.tally.counts().count_end();
        match outcome {
            Ok(_) => self.tally.add_latency(counter, begun.elapsed(), 1),
            Err(_) => self.tally.count_failure(counter),
        }
    }
}

// A new method of the trait must become a choice of the macro.
#[deny(clippy::missing_trait_methods)]
impl Device for Counting {
    forward_device!(|counting| counting.inner => geometry, extents;
        prefetch: below, zoned: self, changes: below);

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        crate::trail::step!();
        if self.path.limiting.has_any() {
            return self.try_limited(request, buffer);
        }
        self.try_counted(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        crate::trail::step!();
        let (path, begun) = (self.shell(), Instant::now());
        path.tally.counts().count_start();
        let trace = path.start_trace(request.op.into(), request.offset, request.len);
        let span = trace.as_ref().map(RequestTrace::span);
        let done = Completion::new(move |outcome, buffer| {
            if let Some(trace) = trace {
                trace.completed(&path.tally, &outcome);
            }
            path.record_completion(request.op.into(), begun, &outcome);
            path.tally.counts().count_completion(&request, &outcome);
            done.complete(outcome, buffer);
        });
        let _entered = span.as_ref().map(Span::enter);
        if !self.path.limiting.has_any() {
            return self.inner.submit(request, buffer, done);
        }
        // An invalid request fails at once and pays nothing.
        if let Err(error) = request.check(&self.inner.geometry()) {
            return done.complete(Err(error), buffer);
        }
        self.limited_request(SubmittedOp::Io(request, buffer, done)).pay_and_submit();
    }
}

impl Zoned for Counting {
    forward_zoned!(|counting| counting.inner => report, zone_op, reset_all);

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let zones = self.inner.zones()?;
        if self.path.limiting.has_any() && self.path.limiting.is_limited() {
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
        let tally = &self.path.tally;
        tally.counts().count_append(data.len() as u64, &outcome);
        match (&outcome, measured) {
            (Ok(_), Some((weight, begun))) => tally.add_latency(Counter::Append, begun.elapsed(), weight),
            (Ok(_), None) => {}
            (Err(_), _) => tally.count_failure(Counter::Append),
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let zones = match self.inner.zones() {
            Ok(zones) => zones,
            Err(error) => return done(Err(error)),
        };
        let (path, begun, bytes) = (self.shell(), Instant::now(), data.len() as u64);
        path.tally.counts().count_start();
        let trace = path.start_trace(Counter::Append, offset, bytes);
        let done = Box::new(move |outcome| {
            if let Some(trace) = trace {
                trace.completed(&path.tally, &outcome);
            }
            path.record_completion(Counter::Append, begun, &outcome);
            path.tally.counts().count_append(bytes, &outcome);
            done(outcome);
        });
        if self.path.limiting.has_any() {
            return self.limited_request(SubmittedOp::Append(offset, data, flags, done)).pay_and_submit();
        }
        zones.submit_append(offset, data, flags, done);
    }
}

impl Drop for Counting {
    fn drop(&mut self) {
        if self.path.limiting.has_any() {
            self.path.limiting.close_path();
        }
    }
}
