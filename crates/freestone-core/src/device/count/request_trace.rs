//! Tracing of single requests: by `tracing` spans, and by tools attached to the [probes](super::probe). While
//! tracing is disabled, a request only loads one rarely written word.

use std::time::Duration;

use tracing::Span;
use tracing::field::Empty;

use super::{Counter, Tally, probe};
use crate::device::{Error, Result, TryResult};
use crate::sync::Instant;

/// `tracing` target of request spans, for use in filters.
pub const REQUEST_SPANS: &str = "freestone::request";

/// Enables request spans: each request of each [counted](super::Counting) device gets a `tracing` span of
/// level trace. Without this call no request spans are created, unless a tracer is attached to the probes.
pub fn span_requests() {
    probe::enable();
}

#[inline]
pub fn is_enabled() -> bool {
    probe::is_enabled()
}

/// A traced request, from the call of the device to its completion.
pub struct RequestTrace {
    span: Span,
    counter: Counter,
    offset: u64,
    bytes: u64,
    begun: Instant,
}

impl RequestTrace {
    /// Starts the trace of a tried request, or of a submitted request if `waits` is true.
    pub fn begin(tally: &Tally, counter: Counter, offset: u64, bytes: u64, waits: bool) -> Self {
        let span = tracing::trace_span!(
            target: REQUEST_SPANS,
            "request",
            device = tally.device(),
            place = tally.address(),
            op = counter.name(),
            offset,
            bytes,
            waits,
            end = Empty,
        );
        let trace = Self { span, counter, offset, bytes, begun: Instant::now() };
        probe::request_begin(trace.info(tally), waits);
        trace
    }

    pub fn in_span<T>(&self, run: impl FnOnce() -> T) -> T {
        self.span.in_scope(run)
    }

    pub fn span(&self) -> Span {
        self.span.clone()
    }

    pub fn end_try(self, tally: &Tally, outcome: &Result<TryResult>) {
        match outcome {
            Ok(TryResult::Done) => self.end(tally, 0, "done"),
            Ok(TryResult::Partly(_)) => self.end(tally, -1, "done in part"),
            Ok(TryResult::WouldBlock) => self.end(tally, -2, "has to wait"),
            Err(error) => self.failed(tally, *error),
        }
    }

    pub fn completed<T>(self, tally: &Tally, outcome: &Result<T>) {
        match outcome {
            Ok(_) => self.end(tally, 0, "done"),
            Err(error) => self.failed(tally, *error),
        }
    }

    fn failed(self, tally: &Tally, error: Error) {
        self.end(tally, 1 + error as i64, error.name());
    }

    fn end(self, tally: &Tally, code: i64, word: &str) {
        let took: Duration = self.begun.elapsed();
        self.span.record("end", word);
        probe::request_end(self.info(tally), u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), code);
    }

    fn info<'a>(&self, tally: &'a Tally) -> probe::RequestInfo<'a> {
        let Self { counter, offset, bytes, .. } = *self;
        probe::RequestInfo { device: tally.device(), op: counter as usize, offset, bytes }
    }
}
