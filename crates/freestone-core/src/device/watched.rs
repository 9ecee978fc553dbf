//! Who looks at single requests: a subscriber of `tracing`, with a span for each, and who has
//! attached to the [probes](super::probe). While nobody does, a request pays for a look at a word that
//! does not change.

use std::time::Duration;

use tracing::Span;
use tracing::field::Empty;

use super::{Counter, Error, Result, Tally, Tried, probe};
use crate::sync::Instant;

/// What spans of requests can be chosen by: their target.
pub const REQUEST_SPANS: &str = "freestone::request";

/// From now on each request of each device that is [counted](super::Counting) has a span of
/// `tracing`, at the level trace. Before, none has, whatever a subscriber wants.
pub fn span_requests() {
    probe::look();
}

/// Whether anybody wants to see each request.
#[inline]
pub fn is_wanted() -> bool {
    probe::is_looked_at()
}

/// A request that is looked at, from when the device is asked until it has answered.
pub struct Watched {
    span: Span,
    counter: Counter,
    offset: u64,
    bytes: u64,
    begun: Instant,
}

impl Watched {
    /// It is tried, or one that `waits` is handed over.
    pub fn begin(tally: &Tally, counter: Counter, offset: u64, bytes: u64, waits: bool) -> Self {
        let span = tracing::trace_span!(
            target: REQUEST_SPANS,
            "request",
            device = tally.device(),
            place = tally.place(),
            op = counter.word(),
            offset,
            bytes,
            waits,
            end = Empty,
        );
        let watched = Self { span, counter, offset, bytes, begun: Instant::now() };
        probe::request_begin(watched.told(tally), waits);
        watched
    }

    /// Runs what the device does, inside of the span.
    pub fn within<T>(&self, run: impl FnOnce() -> T) -> T {
        self.span.in_scope(run)
    }

    /// Its span.
    pub fn span(&self) -> Span {
        self.span.clone()
    }

    /// A try ends.
    pub fn tried(self, tally: &Tally, outcome: &Result<Tried>) {
        match outcome {
            Ok(Tried::Done) => self.end(tally, 0, "done"),
            Ok(Tried::Partly(_)) => self.end(tally, -1, "done in part"),
            Ok(Tried::WouldBlock) => self.end(tally, -2, "has to wait"),
            Err(error) => self.failed(tally, *error),
        }
    }

    /// One that waited is answered.
    pub fn answered<T>(self, tally: &Tally, outcome: &Result<T>) {
        match outcome {
            Ok(_) => self.end(tally, 0, "done"),
            Err(error) => self.failed(tally, *error),
        }
    }

    fn failed(self, tally: &Tally, error: Error) {
        self.end(tally, 1 + error as i64, error.word());
    }

    fn end(self, tally: &Tally, code: i64, word: &str) {
        let took: Duration = self.begun.elapsed();
        self.span.record("end", word);
        probe::request_end(self.told(tally), u64::try_from(took.as_nanos()).unwrap_or(u64::MAX), code);
    }

    fn told<'a>(&self, tally: &'a Tally) -> probe::Told<'a> {
        let Self { counter, offset, bytes, .. } = *self;
        probe::Told { device: tally.device(), op: counter as usize, offset, bytes }
    }
}
