//! What goes below: unflushed blocks when there is no room or a flush wants them, and writes past
//! the cache.

use std::ops::Range;
use std::sync::Arc;

use super::bell::Bell;
use super::cache::{Cache, Claimed, Recorded, Run};
use super::completion;
use super::countdown::Countdown;
use super::queue::Queue;
use super::record::What;
use freestone_core::device::{Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, Tried};
use freestone_core::freeze_gate::FreezeGate;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering::SeqCst};

/// A flush on the caller's thread writes at most this much below.
const FLUSH_INLINE_MAX_BYTES: u64 = 1 << 20;

/// What [`Power`](super::Power), its worker and its requests below share.
///
/// Lock order: `change`; then the worker's queue; then `failures`; then the cache's. No lock is
/// held across a call of the device below or a completion, but for `change`, which only whoever
/// switches the power takes.
pub struct PowerShared {
    pub inner: Arc<dyn Device>,
    pub cache: Cache,
    pub bell: Arc<Bell>,
    pub queue: Queue,
    /// Closed while the power is off. What runs here on whatever thread is under way at it.
    pub power: FreezeGate<()>,
    /// Requests that the device below has.
    pub in_flight: AtomicU64,
    /// Bytes of unflushed blocks that the device below is writing.
    pub draining: AtomicU64,
    failures: Mutex<Failures>,
    /// Lock order: last; see there.
    pub countdown: Countdown,
    /// Held by who switches the power off, until it is on again.
    pub change: Mutex<()>,
    /// 1: the power is off for a wipe only, which is no loss of power. Who comes waits for the end
    /// of it, and what was there before goes on. Changed under `change`, while the gate is open.
    pub wiping: AtomicU32,
}

/// Unflushed blocks that could not be written below. They stay and are tried again.
#[derive(Debug, Clone, Copy)]
pub struct Failures {
    pub count: u64,
    pub last: Error,
}

impl PowerShared {
    pub fn new(inner: Arc<dyn Device>, cache: Cache, bell: Arc<Bell>) -> Self {
        Self {
            inner,
            cache,
            bell,
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

    /// What a flush has to wait for: all that is unflushed before the first number, and no failure
    /// after the second.
    pub fn moment(&self) -> (u64, u64) {
        let failures = self.failures.lock();
        (self.cache.now(), failures.count)
    }

    /// The error of a failure since `before`.
    pub fn failed_since(&self, before: u64) -> Option<Error> {
        let now = self.failures();
        (now.count != before).then_some(now.last)
    }

    /// Submits to the device below. The power does not go off before `then` is through.
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
            shared.bell.ring();
        });
        self.inner.submit(request, buffer, done);
    }

    // ---- unflushed blocks -----------------------------------------------------------------------

    /// Submits a run.
    pub fn drain(self: &Arc<Self>, run: Run) {
        let Run { claimed, request, data } = run;
        self.draining.fetch_add(request.len, SeqCst);
        self.below(request, data, move |shared, outcome, _| {
            shared.draining.fetch_sub(request.len, SeqCst);
            shared.drained(claimed, if outcome.is_ok() { request.len } else { 0 }, outcome.err());
        });
    }

    /// A failure is counted, and the blocks get a later place, in one moment: a flush finds them
    /// before its bound, or it finds the failure.
    fn drained(&self, claimed: Claimed, done: u64, error: Option<Error>) {
        let Some(error) = error else { return self.cache.release(claimed, done, false) };
        let mut failures = self.failures.lock();
        failures.count += 1;
        failures.last = error;
        self.cache.release(claimed, done, true);
    }

    /// Writes a run on this thread, as far as that goes. Whether all of it is below.
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
        self.drained(claimed, done, outcome.err());
        self.bell.ring();
        outcome
    }

    /// Makes room for `len` bytes on this thread, as far as that goes.
    ///
    /// # Errors
    /// Nothing could be written below.
    pub fn make_room_inline(&self, len: u64) -> Result<()> {
        // What fails gets a later place: each block is tried once.
        let bound = self.cache.now();
        let want = len.min(self.cache.capacity());
        let mut failed = None;
        let mut wrote = false;
        while self.cache.room() < want {
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
        let (bound, failures) = self.moment();
        if self.cache.has_before(bound, None) {
            if self.cache.used() > FLUSH_INLINE_MAX_BYTES {
                return Ok(Tried::WouldBlock);
            }
            while let Some(run) = self.cache.claim_run(bound, None)? {
                if !self.drain_inline(run)? {
                    return Ok(Tried::WouldBlock);
                }
            }
            // Others may be writing some.
            if self.cache.has_before(bound, None) {
                return Ok(Tried::WouldBlock);
            }
        }
        if let Some(error) = self.failed_since(failures) {
            return Err(error);
        }
        self.inner.try_io(&Request::flush(), Buffer::None)
    }

    /// Takes the flush's place in the recording. Before its bound is asked for: what stands before
    /// it there is covered by it.
    pub fn open_flush(&self) -> Option<u64> {
        self.cache.record.as_ref().map(|record| record.open(0, 0, What::Flush, false))
    }

    pub fn close_flush(&self, slot: Option<u64>, done: bool) {
        if let (Some(record), Some(slot)) = (&self.cache.record, slot) {
            record.close_flush(slot, done);
        }
    }

    // ---- writes past the cache ------------------------------------------------------------------

    pub fn try_through(self: &Arc<Self>, request: Request, buffer: Buffer<'_>) -> Result<Tried> {
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
        self.bell.ring();
        outcome
    }

    /// A write past the cache stopped after `part` bytes, `into` bytes into a unit. What is below
    /// of that unit cannot be taken back, so the device below gets the rest of it, and nobody else
    /// writes there until that is done: a cut waits for it and finds the unit whole. The request
    /// goes on with the unit as if nothing of it were done.
    #[cold]
    fn finish_unit(
        self: &Arc<Self>,
        claimed: Claimed,
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

    /// Submits a write past the cache; gives it back where another write to the range is on its
    /// way, or the log has to catch up.
    pub fn through(
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

    fn claim(&self, request: &Request, data: Option<&[u8]>) -> Option<Claimed> {
        let Request { op, flags, offset, len } = *request;
        self.cache.claim(self.cache.blocks(offset, len), || {
            let what = match data {
                Some(data) => What::Data(data.into()),
                None if op == Op::Discard => What::Discard,
                None => What::Zeroes,
            };
            Recorded { offset, len, what, fua: flags.contains(Flags::FUA) }
        })
    }

    /// Whether something that was unflushed at `bound` still is.
    pub fn is_unflushed(&self, bound: u64, within: Option<&Range<u64>>) -> bool {
        self.cache.has_before(bound, within)
    }
}

/// A discard becomes zeroes to the byte: what the cache knew of a range is forgotten with it, so
/// the old data below must not come to light where a discard passes something over.
fn as_zeroes(request: Request) -> Request {
    if request.op != Op::Discard {
        return request;
    }
    Request { op: Op::WriteZeroes, flags: request.flags | Flags::MAY_FREE, ..request }
}
