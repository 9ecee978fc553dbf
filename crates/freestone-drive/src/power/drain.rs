//! Writes to the device under the power layer: unflushed blocks, to free cache space or for a
//! flush, and writes that bypass the cache.

use std::ops::Range;
use std::sync::Arc;

use super::cache::{Cache, ClaimedRange, Run, WriteRecord};
use super::completion;
use super::countdown::Countdown;
use super::events::EventCounter;
use super::queue::Queue;
use super::record::EntryKind;
use freestone_core::device::{
    Buffer, Completion, Device, DropSignal, Error, Flags, IoBuf, Op, Request, Result, TryResult,
};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering::SeqCst};

/// Maximum number of unflushed bytes for which a flush runs on the caller's thread. With more, the
/// worker writes them.
const FLUSH_INLINE_MAX_BYTES: u64 = 1 << 20;

/// State shared by [`Power`](super::Power), its worker thread and its requests to the device under
/// this layer.
///
/// Lock order: `change`; then the worker's queue; then `failures`; then the locks of the cache.
/// Only `change`, taken to switch the power, is held during calls of the device under this layer
/// and completions.
pub struct PowerShared {
    pub inner: Arc<dyn Device>,
    pub cache: Cache,
    pub events: Arc<EventCounter>,
    pub queue: Queue,
    /// Gate that is closed while the power is off. All work on requests enters it.
    pub power: FreezeGate<()>,
    /// Number of requests in flight to the device under this layer.
    pub in_flight: AtomicU64,
    /// Number of bytes of unflushed blocks that are being written to the device under this layer.
    pub draining: AtomicU64,
    failures: Mutex<Failures>,
    /// Countdown to a power cut. Lock order: innermost.
    pub countdown: Countdown,
    /// Serializes power switches. Held from switching the power off until it is on again.
    pub change: Mutex<()>,
    /// 1 if the power is off only for a reset of the device, which is not a power loss, else 0. New
    /// requests then wait, and older ones finish. Changed under `change`, while the gate is open.
    pub wiping: AtomicU32,
    /// The last field, so that the log is complete before.
    pub drop_signal: DropSignal,
}

/// Failed writes of unflushed blocks: their number and the last error. The blocks stay cached and
/// are written again later.
#[derive(Debug, Clone, Copy)]
pub struct Failures {
    pub count: u64,
    pub last: Error,
}

impl PowerShared {
    pub fn new(inner: Arc<dyn Device>, cache: Cache, events: Arc<EventCounter>) -> Self {
        Self {
            inner,
            cache,
            events,
            queue: Queue::default(),
            power: FreezeGate::new(()),
            in_flight: AtomicU64::new(0),
            draining: AtomicU64::new(0),
            failures: Mutex::new(Failures { count: 0, last: Error::Media }),
            countdown: Countdown::default(),
            change: Mutex::default(),
            wiping: AtomicU32::new(0),
            drop_signal: DropSignal::default(),
        }
    }

    pub fn failures(&self) -> Failures {
        *self.failures.lock()
    }

    /// Returns the conditions of a flush: the moment before which all cached versions must be
    /// written, and the number of failed writes so far.
    pub fn flush_bound(&self) -> (u64, u64) {
        let failures = self.failures.lock();
        (self.cache.now(), failures.count)
    }

    /// Returns the last error if a write failed since the number of failures was `before`, else
    /// `None`.
    pub fn failed_since(&self, before: u64) -> Option<Error> {
        let now = self.failures();
        (now.count != before).then_some(now.last)
    }

    /// Submits a request to the device under this layer, and calls `then` with the outcome. A power
    /// cut waits until `then` has returned.
    pub fn below(
        self: &Arc<Self>,
        request: Request,
        buffer: IoBuf,
        then: impl FnOnce(&Arc<Self>, Result<()>, IoBuf) + Send + 'static,
    ) {
        self.in_flight.fetch_add(1, SeqCst);
        let shared = Arc::clone(self);
        let done = Completion::new(move |outcome, buffer| {
            completion::inside(|| then(&shared, outcome, buffer));
            shared.in_flight.fetch_sub(1, SeqCst);
            shared.events.notify();
        });
        self.inner.submit(request, buffer, done);
    }

    // ---- unflushed blocks -----------------------------------------------------------------------

    pub fn drain(self: &Arc<Self>, run: Run) {
        let Run { claimed, request, data } = run;
        self.draining.fetch_add(request.len, SeqCst);
        self.below(request, data, move |shared, outcome, _| {
            shared.draining.fetch_sub(request.len, SeqCst);
            shared.finish_drain(claimed, if outcome.is_ok() { request.len } else { 0 }, outcome.err());
        });
    }

    /// Releases the claim of a drained run. If the write failed, counts the failure and requeues
    /// the blocks with a later moment, under one lock. So a flush finds either the blocks before
    /// its bound, or the failure.
    fn finish_drain(&self, claimed: ClaimedRange, done: u64, error: Option<Error>) {
        let Some(error) = error else { return self.cache.release(claimed, done, false) };
        let mut failures = self.failures.lock();
        failures.count += 1;
        failures.last = error;
        self.cache.release(claimed, done, true);
    }

    /// Writes a run of cached blocks on this thread, as far as possible without waiting. Returns
    /// true if the whole run was written.
    fn drain_inline(&self, run: Run) -> Result<bool> {
        let Run { claimed, request, data } = run;
        let mut done = 0;
        let outcome = loop {
            let buffer = if data.is_empty() { Buffer::None } else { Buffer::Write(&data[done as usize..]) };
            match self.inner.try_io(&request.rest(done), buffer) {
                Ok(TryResult::Done) => {
                    done = request.len;
                    break Ok(true);
                }
                Ok(TryResult::Partly(part)) => done += part,
                Ok(TryResult::WouldBlock) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        self.finish_drain(claimed, done, outcome.err());
        self.events.notify();
        outcome
    }

    /// Writes cached blocks to the device under this layer, to free cache space for `len` bytes.
    /// Runs on this thread, as far as possible without waiting.
    ///
    /// # Errors
    /// The error of the last failed write, if no write succeeded.
    pub fn reclaim_space_inline(&self, len: u64) -> Result<()> {
        // Blocks whose write failed are requeued after the bound, so each block is tried once.
        let bound = self.cache.now();
        let want = len.min(self.cache.capacity());
        let mut failed = None;
        let mut wrote = false;
        while self.cache.free_bytes() < want {
            let Some(run) = self.cache.claim_run(bound, None)? else { break };
            match self.drain_inline(run) {
                Ok(true) => wrote = true,
                Ok(false) => return Ok(()),
                Err(error) => failed = Some(error),
            }
        }
        failed.filter(|_| !wrote).map_or(Ok(()), Err)
    }

    // ---- flush ----------------------------------------------------------------------------------

    pub fn try_flush(&self) -> Result<TryResult> {
        let slot = self.open_flush();
        let outcome = self.flush_inline();
        self.close_flush(slot, matches!(outcome, Ok(TryResult::Done)));
        outcome
    }

    fn flush_inline(&self) -> Result<TryResult> {
        let (bound, failures) = self.flush_bound();
        if self.cache.has_before(bound, None) {
            if self.cache.used() > FLUSH_INLINE_MAX_BYTES {
                return Ok(TryResult::WouldBlock);
            }
            while let Some(run) = self.cache.claim_run(bound, None)? {
                if !self.drain_inline(run)? {
                    return Ok(TryResult::WouldBlock);
                }
            }
            // Other threads may still be writing blocks that they claimed.
            if self.cache.has_before(bound, None) {
                return Ok(TryResult::WouldBlock);
            }
        }
        if let Some(error) = self.failed_since(failures) {
            return Err(error);
        }
        self.inner.try_io(&Request::flush(), Buffer::None)
    }

    /// Reserves a slot for a flush in the recording. Must be called before
    /// [`flush_bound`](Self::flush_bound), because the flush covers every entry before the slot.
    /// Returns `None` without a recording.
    pub fn open_flush(&self) -> Option<u64> {
        self.cache.record.as_ref().map(|record| record.open(0, 0, EntryKind::Flush, false))
    }

    pub fn close_flush(&self, slot: Option<u64>, done: bool) {
        if let (Some(record), Some(slot)) = (&self.cache.record, slot) {
            record.close_flush(slot, done);
        }
    }

    // ---- writes past the cache ------------------------------------------------------------------

    pub fn try_past_cache(self: &Arc<Self>, request: Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let data = if let Buffer::Write(data) = buffer { Some(data) } else { None };
        if self.cache.is_log_full() {
            return Ok(TryResult::WouldBlock);
        }
        let Some(claimed) = self.claim(&request, data) else { return Ok(TryResult::WouldBlock) };
        let outcome = self.inner.try_io(&as_zeroes(request), buffer);
        let done = match outcome {
            Ok(TryResult::Done) => request.len,
            Ok(TryResult::Partly(part)) => match (request.offset + part) % self.cache.unit_bytes() {
                0 => part,
                into => return self.finish_unit(claimed, request, data, (part, into)),
            },
            Ok(TryResult::WouldBlock) | Err(_) => 0,
        };
        self.cache.release(claimed, done, false);
        self.events.notify();
        outcome
    }

    /// Completes the last unit of a write that bypasses the cache and stopped after `part` bytes,
    /// `into` bytes after the start of the unit.
    ///
    /// The written part of the unit cannot be undone, so the rest is submitted to the device under
    /// this layer, too. The claim is held meanwhile, so that a power cut waits and finds the unit
    /// complete. The caller retries the request from the start of the unit.
    #[cold]
    fn finish_unit(
        self: &Arc<Self>,
        claimed: ClaimedRange,
        request: Request,
        data: Option<&[u8]>,
        (part, into): (u64, u64),
    ) -> Result<TryResult> {
        let whole = part.saturating_sub(into);
        let end = (part + self.cache.unit_bytes() - into).min(request.len);
        let buffer = match data.map(|data| IoBuf::copy_of(&data[part as usize..end as usize])).transpose() {
            Ok(buffer) => buffer.unwrap_or_else(IoBuf::empty),
            Err(error) => {
                self.cache.release(claimed, part, false);
                return Err(error);
            }
        };
        let rest = Request { len: end - part, ..request.rest(part) };
        self.below(as_zeroes(rest), buffer, move |shared, outcome, _| {
            shared.cache.release(claimed, if outcome.is_ok() { end } else { part }, false);
        });
        Ok(if whole == 0 { TryResult::WouldBlock } else { TryResult::Partly(whole) })
    }

    /// Submits a write that bypasses the cache. Returns the buffer and the completion if another
    /// write to the range is in flight, or the log is full.
    pub fn submit_past_cache(
        self: &Arc<Self>,
        request: Request,
        buffer: IoBuf,
        done: Completion,
    ) -> Option<(IoBuf, Completion)> {
        let data = (request.op == Op::Write).then_some(&*buffer);
        let claimed = if self.cache.is_log_full() { None } else { self.claim(&request, data) };
        let Some(claimed) = claimed else { return Some((buffer, done)) };
        self.below(as_zeroes(request), buffer, move |shared, outcome, buffer| {
            shared.cache.release(claimed, if outcome.is_ok() { request.len } else { 0 }, false);
            done.complete(outcome, buffer);
        });
        None
    }

    fn claim(&self, request: &Request, data: Option<&[u8]>) -> Option<ClaimedRange> {
        let Request { op, flags, offset, len } = *request;
        self.cache.claim(self.cache.blocks(offset, len), || {
            let what = match data {
                Some(data) => EntryKind::Data(data.into()),
                None if op == Op::Discard => EntryKind::Discard,
                None => EntryKind::Zeroes,
            };
            WriteRecord { offset, len, what, fua: flags.contains(Flags::FUA) }
        })
    }

    /// Returns true if blocks from before `bound` are still unflushed, in the range `within` or
    /// anywhere.
    pub fn is_unflushed(&self, bound: u64, within: Option<&Range<u64>>) -> bool {
        self.cache.has_before(bound, within)
    }
}

/// Turns a discard into write zeroes of the same range. The cache drops the versions of the whole
/// range, so a device that discards only a part of the range would expose old data.
fn as_zeroes(request: Request) -> Request {
    if request.op != Op::Discard {
        return request;
    }
    Request { op: Op::WriteZeroes, flags: request.flags | Flags::MAY_FREE, ..request }
}
