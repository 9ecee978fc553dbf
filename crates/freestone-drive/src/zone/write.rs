//! Writes and appends: at once on the caller's thread, or with the zone as their own while the
//! device below takes its time.

use std::sync::Arc;

use super::Inner;
use super::queue::{Done, Job, Write};
use super::states::Guard;
use super::states::{Change, Place, Step};
use super::word::Word;
use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::handoff::{Put, try_put};

/// A write that the device below has.
struct Begun {
    zone: u32,
    request: Request,
    /// It was to be the zone's first one.
    was_empty: bool,
    /// How much of it is transferred if it fails on a bad block.
    before_bad: u64,
    done: Done,
}

impl Inner {
    // ---- on the caller's thread -----------------------------------------------------------------

    /// Writes to a sequential zone at once, all or nothing. `None`: that would have to wait. Else
    /// where it went.
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
                Step::Go(opened) => opened,
                Step::Refused(error) => return Err(error),
                Step::Held(other) => {
                    drop(guard);
                    self.table.wait_for(other);
                    continue;
                }
            };
            let request = Request { offset: at, ..request };
            let before_bad = self.before_bad(&request);
            let data = (request.op == Op::Write).then_some(data);
            return match try_put(&*self.backing, request, data) {
                Put::Done(Ok(())) => {
                    let after = self.table.advanced(zone, opened, request.len);
                    guard.publish(after);
                    self.wrote_through(zone, after, &request);
                    Ok(Some(at))
                }
                Put::Rest(..) => {
                    // What the device below has already lies behind the write pointer, where nobody
                    // sees it: the zone is as it was. (A zone that was closed for it stays closed.)
                    self.table.settle(zone, opened, before.condition());
                    Ok(None)
                }
                Put::Done(Err(error)) => {
                    let was_empty = before.condition() == super::ZoneCondition::Empty;
                    let transferred = if error == Error::Media { before_bad } else { 0 };
                    guard.publish(self.table.failed(zone, opened, was_empty, transferred));
                    Err(error)
                }
            };
        }
    }

    // ---- submitted ------------------------------------------------------------------------------

    /// Takes over a write to a sequential zone.
    pub fn submit_write(self: &Arc<Self>, write: Write) {
        if let Err(error) = self.start_threads().map_err(|_| Error::NoMemory) {
            return self.answer(write.done, write.request, Err(error), write.buffer);
        }
        let guard = self.table.lock(write.zone);
        let word = guard.word();
        if word.is_busy() {
            self.queues.push(write.zone, Job::Write(write));
            return;
        }
        guard.publish(word.with_busy(true));
        self.begin(write);
    }

    /// Begins a write whose zone is its own.
    pub fn begin(self: &Arc<Self>, write: Write) {
        let Write { zone, place, request, buffer, done } = write;
        let (at, was_empty) = match self.open(zone, place, request.len) {
            Ok(opened) => opened,
            Err(error) => {
                self.disown(zone);
                return self.answer(done, request, Err(error), buffer);
            }
        };
        let mut below = Request { offset: at, ..request };
        if self.is_recorded() {
            // It becomes durable together with the write pointer.
            below.flags.remove(Flags::FUA);
        }
        let before_bad = self.before_bad(&below);
        let request = Request { offset: at, ..request };
        let begun = Begun { zone, request, was_empty, before_bad, done };
        let inner = Arc::clone(self);
        let done = Completion::new(move |outcome, buffer| inner.end(begun, outcome, buffer));
        self.backing.submit(below, buffer, done);
    }

    /// Opens the zone of a write whose own it is. Where it goes, and whether the zone was empty.
    fn open(&self, zone: u32, place: Place, len: u64) -> Result<(u64, bool)> {
        self.table.change(zone, Change::Write, |before| {
            let at = self.table.position(zone, before, place, len)?;
            Ok((at, before.condition() == super::ZoneCondition::Empty))
        })
    }

    /// The device below has answered.
    fn end(self: &Arc<Self>, begun: Begun, outcome: Result<()>, buffer: IoBuf) {
        let Begun { zone, request, was_empty, before_bad, done } = begun;
        let guard = self.table.lock(zone);
        let word = guard.word();
        let after = match outcome {
            Ok(()) => self.table.advanced(zone, word, request.len),
            Err(Error::Media) => self.table.failed(zone, word, was_empty, before_bad),
            Err(_) => self.table.failed(zone, word, was_empty, 0),
        };
        self.pass_on(zone, guard, after);
        if outcome.is_ok() && request.flags.contains(Flags::FUA) {
            if self.is_recorded() {
                let inner = Arc::clone(self);
                return self.sync_later(move |outcome| inner.answer(done, request, outcome, buffer));
            }
            self.wrote_through(zone, after, &request);
        }
        self.answer(done, request, outcome, buffer);
    }

    fn answer(&self, done: Done, request: Request, outcome: Result<()>, buffer: IoBuf) {
        match done {
            Done::Io(done) => {
                self.ops.answered(&request, &outcome);
                done.complete(outcome, buffer);
            }
            Done::Append(done) => {
                self.ops.appended(request.len, &outcome);
                done.complete(outcome.map(|()| request.offset));
            }
        }
    }

    // ---- whose a zone is ------------------------------------------------------------------------

    /// Gives up a zone that is the caller's own.
    pub fn disown(self: &Arc<Self>, zone: u32) {
        let guard = self.table.lock(zone);
        let word = guard.word();
        self.pass_on(zone, guard, word);
    }

    /// Publishes the word of a zone that was somebody's own, and makes it that of the next who
    /// waits.
    pub fn pass_on(self: &Arc<Self>, zone: u32, guard: Guard<'_>, word: Word) {
        let next = self.queues.pop(zone);
        guard.publish(word.with_busy(next.is_some()));
        match next {
            Some(Job::Write(write)) => {
                let inner = Arc::clone(self);
                self.work_queue.push(move || inner.begin(write));
            }
            Some(Job::Thread(turn)) => turn.give(),
            None => {}
        }
    }

    /// How much of a write is transferred if it fails on a bad block.
    #[inline]
    fn before_bad(&self, request: &Request) -> u64 {
        match &self.bad {
            Some(bad) => bad.verdict(request.offset, request.len).unwrap_or(0),
            None => 0,
        }
    }
}
