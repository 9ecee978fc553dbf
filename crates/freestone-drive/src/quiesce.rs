//! Layer of a test drive that counts requests and can be closed: it then waits for the requests in
//! flight and rejects new ones.
//!
//! The layer lies under the fault and pace layers, which issue requests at once and only delay
//! completions. So closing does not wait for delayed or hung completions. And no request issued
//! before a power loss reaches the device after the power loss.
//!
//! Counters and reference counts are per CPU, so that requests on different CPUs do not contend.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_utils::CachePadded;

use freestone_core::device::zoned::{AppendCompletion, ZoneOp, Zoned};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Flags, IoBuf, OpCounts, OpStats, Request, Result, TryResult,
    forward_device, forward_zoned,
};
use freestone_core::freeze_gate::{FreezeGate, WorkGuard};
use freestone_core::per_cpu_arc::PerCpuArc;

/// Device that can be closed temporarily, so that no request is in flight.
pub struct Quiesce {
    inner: Arc<dyn Device>,
    state: PerCpuArc<SharedState>,
}

struct QuiesceState {
    gate: FreezeGate<()>,
    counts: OpCounts,
}

type SharedState = CachePadded<Arc<QuiesceState>>;

/// Inline request in the layer, counted until the guard is dropped.
struct TriedRequest<'a> {
    counts: &'a OpCounts,
    _inside: WorkGuard<'a, ()>,
}

/// Submitted request in the layer, counted until its completion drops this.
struct SubmittedRequest(Arc<SharedState>);

/// Guard that keeps the device closed. Dropping it opens the device.
pub struct ClosedGuard<'a>(&'a QuiesceState);

impl Quiesce {
    /// Wraps `inner`. The device is initially open.
    pub fn new(inner: Arc<dyn Device>) -> Self {
        let state = Arc::new(QuiesceState { gate: FreezeGate::new(()), counts: OpCounts::default() });
        Self { inner, state: PerCpuArc::new(|| CachePadded::new(Arc::clone(&state))) }
    }

    /// Returns the counters of requests since the device was created.
    pub fn counts(&self) -> OpStats {
        self.state.counts.snapshot()
    }

    /// Closes the device and waits until no request is in flight. New requests fail with
    /// [`Error::Gone`] until the guard is dropped. Returns `None`, with the device open, if
    /// requests are still in flight after `timeout`.
    pub fn close(&self, timeout: Duration) -> Option<ClosedGuard<'_>> {
        let guard = ClosedGuard(&self.state);
        guard.0.gate.close_within(timeout).then_some(guard)
    }

    fn enter_tried(&self) -> Result<TriedRequest<'_>> {
        let state = &**self.state;
        state
            .gate
            .try_begin()
            .map(|inside| TriedRequest { counts: &state.counts, _inside: inside })
            .ok_or(Error::Gone)
    }

    fn enter_submitted(&self) -> Result<SubmittedRequest> {
        let state = Arc::clone(&self.state);
        state.gate.enter(|open| open.map(|()| state.gate.begin())).ok_or(Error::Gone)?;
        Ok(SubmittedRequest(state))
    }
}

impl Drop for SubmittedRequest {
    fn drop(&mut self) {
        self.0.gate.end();
    }
}

impl ClosedGuard<'_> {
    /// Keeps the device closed for ever, without a guard.
    pub fn keep_closed(self) {
        std::mem::forget(self);
    }
}

impl Drop for ClosedGuard<'_> {
    fn drop(&mut self) {
        // The list of held requests is empty: requests to a closed device fail at once.
        drop(self.0.gate.open());
    }
}

impl Device for Quiesce {
    forward_device!(|quiesce| quiesce.inner => geometry; prefetch: below, zoned: self, changes: below);

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let tried = self.enter_tried()?;
        let outcome = self.inner.try_io(request, buffer);
        tried.counts.count_try(request, &outcome);
        outcome
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let submitted = match self.enter_submitted() {
            Ok(submitted) => submitted,
            Err(error) => return done.complete(Err(error), buffer),
        };
        let done = Completion::new(move |outcome, buffer| {
            submitted.0.counts.count_completion(&request, &outcome);
            drop(submitted);
            done.complete(outcome, buffer);
        });
        self.inner.submit(request, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let _tried = self.enter_tried()?;
        self.inner.extents(offset, len, row)
    }
}

impl Zoned for Quiesce {
    forward_zoned!(|quiesce| quiesce.inner => report);

    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()> {
        let _tried = self.enter_tried()?;
        self.inner.zones()?.zone_op(op, offset)
    }

    fn reset_all(&self) -> Result<()> {
        let _tried = self.enter_tried()?;
        self.inner.zones()?.reset_all()
    }

    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>> {
        let tried = self.enter_tried()?;
        let outcome = self.inner.zones()?.try_append(offset, data, flags);
        if !matches!(outcome, Ok(None)) {
            tried.counts.count_append(data.len() as u64, &outcome);
        }
        outcome
    }

    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion) {
        let (submitted, zones) = match (self.enter_submitted(), self.inner.zones()) {
            (Ok(submitted), Ok(zones)) => (submitted, zones),
            (Err(error), _) | (_, Err(error)) => return done(Err(error)),
        };
        let bytes = data.len() as u64;
        let done = Box::new(move |outcome| {
            submitted.0.counts.count_append(bytes, &outcome);
            drop(submitted);
            done(outcome);
        });
        zones.submit_append(offset, data, flags, done);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use super::Quiesce;
    use crate::null::{Config, Null};
    use freestone_core::device::{Blocking as _, Device, Error, Flags};
    use freestone_testkit::{Manner, TestDevice};

    #[test]
    fn shut_waits_for_requests_inside() {
        let null = Arc::new(Null::new(Config::plain(1 << 20, 512)).unwrap());
        let stalled = Arc::new(TestDevice::over(null).with_manner(Manner::Held));
        let quiesce = Arc::new(Quiesce::new(Arc::clone(&stalled) as Arc<dyn Device>));
        let writer = {
            let quiesce = Arc::clone(&quiesce);
            std::thread::spawn(move || quiesce.write_at(0, &[1; 512], Flags::empty()))
        };
        while stalled.held().is_empty() {
            std::thread::yield_now();
        }
        assert!(quiesce.close(Duration::from_millis(20)).is_none());
        // The failed attempt to close opened the device again.
        assert_eq!(quiesce.extents(0, 512, &mut |_| true), Ok(512));
        let waits = {
            let quiesce = Arc::clone(&quiesce);
            std::thread::spawn(move || {
                let guard = quiesce.close(Duration::from_secs(60)).expect("the writer ends");
                assert_eq!(quiesce.flush(), Err(Error::Gone));
                drop(guard);
            })
        };
        stalled.release(0);
        assert_eq!(writer.join().unwrap(), Ok(()));
        waits.join().unwrap();
        assert_eq!((quiesce.counts().writes, quiesce.counts().written_bytes), (1, 512));
        // Dropping a completion also ends the request.
        let writer = {
            let quiesce = Arc::clone(&quiesce);
            std::thread::spawn(move || quiesce.flush())
        };
        while !stalled.release_by(|_| (0, true)) {
            std::thread::yield_now();
        }
        assert_eq!(writer.join().unwrap(), Err(Error::Gone));
        assert!(quiesce.close(Duration::ZERO).is_some());
    }
}
