//! Writes and appends to sequential zones. Inline ones hold the zone's lock; submitted ones own the
//! zone while the data is in flight.

use std::sync::Arc;

use super::queue::{Write, WriteCompletion, ZoneWaiter};
use crate::zone::Inner;
use crate::zone::table::Guard;
use crate::zone::table::word::Word;
use crate::zone::table::{Change, ChangeResult, Place};
use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::handoff::{PutResult, try_put};

/// Write or append in flight to the device under this layer.
struct WriteInFlight {
    zone: u32,
    request: Request,
    /// True if the zone was empty before this write.
    was_empty: bool,
    /// Number of bytes that are transferred if the write fails on a bad block.
    bytes_before_bad: u64,
    done: WriteCompletion,
}

impl Inner {
    // ---- tried ----------------------------------------------------------------------------------

    /// Writes to a sequential zone inline, completely or not at all. Returns the offset of the data
    /// on the device, or `None` if the write would wait.
    #[inline]
    pub fn try_write(&self, zone: u32, place: Place, request: Request, data: &[u8]) -> Result<Option<u64>> {
        if self.is_recorded() && request.flags.contains(Flags::FUA) {
            return Ok(None);
        }
        loop {
            let guard = self.table.lock(zone);
            let before = guard.word();
            if before.is_busy() {
                return Ok(None);
            }
            let at = self.table.position(zone, before, place, request.len)?;
            let opened = match self.table.enter(zone, before, Change::Write) {
                ChangeResult::Go(opened) => opened,
                ChangeResult::Refused(error) => return Err(error),
                ChangeResult::Locked(other) => {
                    drop(guard);
                    self.table.wait_for(other);
                    continue;
                }
            };
            let request = Request { offset: at, ..request };
            let bytes_before_bad = self.bytes_before_bad(&request);
            let data = (request.op == Op::Write).then_some(data);
            return match try_put(&*self.backing, request, data) {
                PutResult::Done(Ok(())) => {
                    let after = self.table.advanced_word(zone, opened, request.len);
                    guard.publish(after);
                    self.record_fua_write(zone, after, &request);
                    Ok(Some(at))
                }
                PutResult::Rest(..) => {
                    // The part already written lies beyond the write pointer, so it is not
                    // readable, and the zone is unchanged. (A zone that was closed implicitly stays
                    // closed.)
                    self.table.settle(zone, opened, before.condition());
                    Ok(None)
                }
                PutResult::Done(Err(error)) => {
                    let was_empty = before.condition() == crate::zone::ZoneCondition::Empty;
                    let transferred = if error == Error::Media { bytes_before_bad } else { 0 };
                    guard.publish(self.table.failed_word(zone, opened, was_empty, transferred));
                    Err(error)
                }
            };
        }
    }

    // ---- submitted ------------------------------------------------------------------------------

    pub fn submit_write(self: &Arc<Self>, write: Write) {
        if let Err(error) = self.start_threads().map_err(|_| Error::NoMemory) {
            return self.complete(write.done, write.request, Err(error), write.buffer);
        }
        let guard = self.table.lock(write.zone);
        let word = guard.word();
        if word.is_busy() {
            self.queues.push(write.zone, ZoneWaiter::Write(write));
            return;
        }
        guard.publish(word.with_busy(true));
        self.start_write(write);
    }

    /// Starts a write that already owns its zone: opens the zone and submits the data.
    pub fn start_write(self: &Arc<Self>, write: Write) {
        let Write { zone, place, request, buffer, done } = write;
        let (at, was_empty) = match self.open(zone, place, request.len) {
            Ok(opened) => opened,
            Err(error) => {
                self.release_zone(zone);
                return self.complete(done, request, Err(error), buffer);
            }
        };
        let mut below = Request { offset: at, ..request };
        if self.is_recorded() {
            // The sync after the write makes the data and the write pointer durable together.
            below.flags.remove(Flags::FUA);
        }
        let bytes_before_bad = self.bytes_before_bad(&below);
        let request = Request { offset: at, ..request };
        let write = WriteInFlight { zone, request, was_empty, bytes_before_bad, done };
        let inner = Arc::clone(self);
        let done = Completion::new(move |outcome, buffer| inner.end(write, outcome, buffer));
        self.backing.submit(below, buffer, done);
    }

    /// Opens the zone for a write that owns the zone. Returns the offset of the write on the
    /// device, and true if the zone was empty.
    fn open(&self, zone: u32, place: Place, len: u64) -> Result<(u64, bool)> {
        self.table.change(zone, Change::Write, |before| {
            let at = self.table.position(zone, before, place, len)?;
            Ok((at, before.condition() == crate::zone::ZoneCondition::Empty))
        })
    }

    /// Ends a write that the device under this layer has completed with `outcome`, and releases the
    /// zone.
    fn end(self: &Arc<Self>, write: WriteInFlight, outcome: Result<()>, buffer: IoBuf) {
        let WriteInFlight { zone, request, was_empty, bytes_before_bad, done } = write;
        let guard = self.table.lock(zone);
        let word = guard.word();
        let after = match outcome {
            Ok(()) => self.table.advanced_word(zone, word, request.len),
            Err(Error::Media) => self.table.failed_word(zone, word, was_empty, bytes_before_bad),
            Err(_) => self.table.failed_word(zone, word, was_empty, 0),
        };
        self.publish_and_pass(zone, guard, after);
        if outcome.is_ok() && request.flags.contains(Flags::FUA) {
            if self.is_recorded() {
                let inner = Arc::clone(self);
                return self.sync_later(move |outcome| inner.complete(done, request, outcome, buffer));
            }
            self.record_fua_write(zone, after, &request);
        }
        self.complete(done, request, outcome, buffer);
    }

    fn complete(&self, done: WriteCompletion, request: Request, outcome: Result<()>, buffer: IoBuf) {
        match done {
            WriteCompletion::Io(done) => {
                self.ops.count_completion(&request, &outcome);
                done.complete(outcome, buffer);
            }
            WriteCompletion::Append(done) => {
                self.ops.count_append(request.len, &outcome);
                done.complete(outcome.map(|()| request.offset));
            }
        }
    }

    // ---- ownership of zones ---------------------------------------------------------------------

    pub fn release_zone(self: &Arc<Self>, zone: u32) {
        let guard = self.table.lock(zone);
        let word = guard.word();
        self.publish_and_pass(zone, guard, word);
    }

    /// Publishes the state word of an owned zone, and passes the ownership to the first waiter, if
    /// there is one.
    pub fn publish_and_pass(self: &Arc<Self>, zone: u32, guard: Guard<'_>, word: Word) {
        let next = self.queues.pop(zone);
        guard.publish(word.with_busy(next.is_some()));
        match next {
            Some(ZoneWaiter::Write(write)) => {
                let inner = Arc::clone(self);
                self.work_queue.push(move || inner.start_write(write));
            }
            Some(ZoneWaiter::Thread(waiter)) => waiter.give(),
            None => {}
        }
    }

    /// Returns the number of bytes of a write that are transferred if it fails on a bad block.
    /// Returns 0 if it touches none.
    #[inline]
    fn bytes_before_bad(&self, request: &Request) -> u64 {
        match &self.bad {
            Some(bad) => bad.bytes_before_bad(request.offset, request.len).unwrap_or(0),
            None => 0,
        }
    }
}
