//! Writes to the device below: unflushed blocks, for room or for a flush, and writes past the
//! cache.

use std::ops::Range;
use std::sync::Arc;

use super::cache::{Cache, ClaimedRange, Run, WriteRecord};
use super::completion;
use super::countdown::Countdown;
use super::events::EventCounter;
use super::queue::Queue;
use super::record::EntryKind;
use freestone_core::device::{Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, Tried};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering::SeqCst};

/// Maximum unflushed data that a flush writes on the caller's thread, in bytes.
const FLUSH_INLINE_MAX_BYTES: u64 = 1 << 20;

/// State shared by [`Power`](super::Power), its worker and its requests below.
///
/// Lock order: `change`; then the worker's queue; then `failures`; then those of the cache. Only
/// `change`, taken by power switches, is held during calls of the device below and completions.
pub struct PowerShared {
    pub inner: Arc<dyn Device>,
    pub cache: Cache,
    pub events: Arc<EventCounter>,
    pub queue: Queue,
    /// Closed while the power is off. Entered by all work on requests.
    pub power: FreezeGate<()>,
    /// Requests in flight to the device below.
    pub in_flight: AtomicU64,
    /// Bytes of unflushed blocks in flight to the device below.
    pub draining: AtomicU64,
    failures: Mutex<Failures>,
    /// Lock order: last.
    pub countdown: Countdown,
    /// Held while the power is switched off, until it is on again.
    pub change: Mutex<()>,
    /// 1 if the power is off for a reset only, which is not a power loss. New requests then wait,
    /// and older ones continue. Changed under `change`, while the gate is open.
    pub wiping: AtomicU32,
}

/// Count of failed writes of unflushed blocks. The blocks stay cached and are retried.
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
        }
    }

    pub fn failures(&self) -> Failures {
        *self.failures.lock()
    }

    /// Returns the conditions of a flush: the bound before which everything must be written, and
    /// the failure count so far.
    pub fn flush_bound(&self) -> (u64, u64) {
        let failures = self.failures.lock();
        (self.cache.now(), failures.count)
    }

    /// Returns the last error if a write failed since the count was `before`.
    pub fn failed_since(&self, before: u64) -> Option<Error> {
        let now = self.failures();
        (now.count != before).then_some(now.last)
    }

    /// Submits a request to the device below. The power does not go off before `then` has returned.
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

    /// Counts a failure and moves its blocks to a later position, under one lock. So a flush finds
    /// either the blocks before its bound, or the failure.
    fn finish_drain(&self, claimed: ClaimedRange, done: u64, error: Option<Error>) {
        let Some(error) = error else { return self.cache.release(claimed, done, false) };
        let mut failures = self.failures.lock();
        failures.count += 1;
        failures.last = error;
        self.cache.release(claimed, done, true);
    }

    /// Writes a run on this thread, as far as possible without waiting. Returns true if all of it
    /// is below.
    fn drain_inline(&self, run: Run) -> Result<bool> {
        let Run { claimed, request, data } = run;
        let mut done = 0;
        let outcome = loop {
            let buffer = if data.is_empty() { Buffer::None } else { Buffer::Write(&data[done as usize..]) };
            match self.inner.try_io(&request.rest(done), buffer) {
                Ok(Tried::Done) => {
                    done = request.len;
                    break Ok(true);
                }
                Ok(Tried::Partly(part)) => done += part,
                Ok(Tried::WouldBlock) => break Ok(false),
                Err(error) => break Err(error),
            }
        };
        self.finish_drain(claimed, done, outcome.err());
        self.events.notify();
        outcome
    }

    /// Writes blocks below on this thread, to make room for `len` bytes, as far as possible without
    /// waiting.
    ///
    /// # Errors
    /// The last failure, if no write succeeded.
    pub fn make_room_inline(&self, len: u64) -> Result<()> {
        // Failed blocks move past the bound, so each block is tried once.
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

    pub fn try_flush(&self) -> Result<Tried> {
        let slot = self.open_flush();
        let outcome = self.flush_inline();
        self.close_flush(slot, matches!(outcome, Ok(Tried::Done)));
        outcome
    }

    fn flush_inline(&self) -> Result<Tried> {
        let (bound, failures) = self.flush_bound();
        if self.cache.has_before(bound, None) {
            if self.cache.used() > FLUSH_INLINE_MAX_BYTES {
                return Ok(Tried::WouldBlock);
            }
            while let Some(run) = self.cache.claim_run(bound, None)? {
                if !self.drain_inline(run)? {
                    return Ok(Tried::WouldBlock);
                }
            }
            // Other threads may be writing some blocks.
            if self.cache.has_before(bound, None) {
                return Ok(Tried::WouldBlock);
            }
        }
        if let Some(error) = self.failed_since(failures) {
            return Err(error);
        }
        self.inner.try_io(&Request::flush(), Buffer::None)
    }

    /// Opens the flush's slot in the recording. Must come before
    /// [`flush_bound`](Self::flush_bound): the flush covers every entry before the slot.
    pub fn open_flush(&self) -> Option<u64> {
        self.cache.record.as_ref().map(|record| record.open(0, 0, EntryKind::Flush, false))
    }

    pub fn close_flush(&self, slot: Option<u64>, done: bool) {
        if let (Some(record), Some(slot)) = (&self.cache.record, slot) {
            record.close_flush(slot, done);
        }
    }

    // ---- writes past the cache ------------------------------------------------------------------

    pub fn try_past_cache(self: &Arc<Self>, request: Request, buffer: Buffer<'_>) -> Result<Tried> {
        let data = if let Buffer::Write(data) = buffer { Some(data) } else { None };
        if self.cache.is_log_full() {
            return Ok(Tried::WouldBlock);
        }
        let Some(claimed) = self.claim(&request, data) else { return Ok(Tried::WouldBlock) };
        let outcome = self.inner.try_io(&as_zeroes(request), buffer);
        let done = match outcome {
            Ok(Tried::Done) => request.len,
            Ok(Tried::Partly(part)) => match (request.offset + part) % self.cache.unit_bytes() {
                0 => part,
                into => return self.finish_unit(claimed, request, data, (part, into)),
            },
            Ok(Tried::WouldBlock) | Err(_) => 0,
        };
        self.cache.release(claimed, done, false);
        self.events.notify();
        outcome
    }

    /// Completes a unit of a write past the cache that stopped after `part` bytes, `into` bytes
    /// into a unit.
    ///
    /// The part of the unit below cannot be undone, so the rest is written below, too. The claim is
    /// held meanwhile. So a cut waits and finds the unit whole. The request continues as if nothing
    /// of the unit were done.
    #[cold]
    fn finish_unit(
        self: &Arc<Self>,
        claimed: ClaimedRange,
        request: Request,
        data: Option<&[u8]>,
        (part, into): (u64, u64),
    ) -> Result<Tried> {
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
        Ok(if whole == 0 { Tried::WouldBlock } else { Tried::Partly(whole) })
    }

    /// Submits a write past the cache. Returns it if another write to the range is in flight, or
    /// the log is full.
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

    /// Returns true if blocks from before `bound` are still unflushed.
    pub fn is_unflushed(&self, bound: u64, within: Option<&Range<u64>>) -> bool {
        self.cache.has_before(bound, within)
    }
}

/// Turns a discard into zeroes of the exact range. The cache forgets the range, so a partial
/// discard below would reveal old data.
fn as_zeroes(request: Request) -> Request {
    if request.op != Op::Discard {
        return request;
    }
    Request { op: Op::WriteZeroes, flags: request.flags | Flags::MAY_FREE, ..request }
}
