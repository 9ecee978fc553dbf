//! The request path: what is done from memory, what is handed below, what the worker gets.

use std::ops::Range;
use std::sync::Arc;

use super::drain::PowerShared;
use super::log::APART_MAX_BLOCKS;
use super::queue::{Job, Settle};
use super::shard::Kind;
use freestone_core::device::{
    Buffer, Completion, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result, Tried,
    range_end,
};
use freestone_core::freeze_gate::UnderWay;
use freestone_core::sync::Ordering::SeqCst;

/// The most that one try reads or writes, in bytes.
const PIECE_BYTES: u64 = 1 << 20;
/// About how many unflushed blocks one call of `extents` looks at.
const LOOK_MAX_BLOCKS: usize = 4096;

/// Whether a request may go on.
pub enum Admitted<'a> {
    /// The power is on, and does not go off as long as this lives.
    On(UnderWay<'a, ()>),
    /// After a wipe.
    Later,
    /// The power is off.
    Off,
}

impl PowerShared {
    pub fn geometry(&self) -> Geometry {
        Geometry { volatile_cache: true, ..self.inner.geometry() }
    }

    /// Whether a request may go on, on this thread. `wait` is told, pinned, that it has to wait for
    /// the end of a wipe.
    pub fn admit(&self, wait: impl FnOnce()) -> Admitted<'_> {
        let begun = self.power.enter(|open| match open {
            Some(()) => {
                self.power.begin();
                Some(true)
            }
            None if self.wiping.load(SeqCst) == 1 => {
                wait();
                Some(false)
            }
            None => None,
        });
        match begun {
            Some(true) => Admitted::On(self.power.under_way()),
            Some(false) => Admitted::Later,
            None => Admitted::Off,
        }
    }

    pub fn try_io(self: &Arc<Self>, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let geometry = self.geometry();
        request.check(&geometry)?;
        let _under_way = match self.admit(|| {}) {
            Admitted::On(under_way) => under_way,
            Admitted::Later => return Ok(Tried::WouldBlock),
            Admitted::Off => return Err(Error::Gone),
        };
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(out)) => self.try_read(request, out),
            (Op::Read, _) | (Op::Write, Buffer::None | Buffer::Read(_)) => Err(Error::Misaligned),
            (Op::Flush, _) => self.try_flush(),
            (Op::Discard, _) if ignores_discards(&geometry) => Ok(Tried::Done),
            (_, buffer) if self.goes_past(request) => self.try_through(*request, buffer),
            (_, Buffer::Write(data)) => self.try_write(request, Some(data)),
            (_, _) => self.try_write(request, None),
        }
    }

    pub fn submit(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        let geometry = self.geometry();
        if let Err(error) = request.check(&geometry) {
            return done.complete(Err(error), buffer);
        }
        let mut parts = Some((buffer, done));
        let admitted = self.admit(|| {
            if let Some((buffer, done)) = parts.take() {
                let shared = Arc::clone(self);
                self.power.hold(move || shared.submit(request, buffer, done));
            }
        });
        let Some((buffer, done)) = parts else { return };
        let Admitted::On(_under_way) = admitted else { return done.complete(Err(Error::Gone), buffer) };
        match request.op {
            Op::Read => self.read(request, buffer, done),
            Op::Flush => self.flush(done),
            Op::Discard if ignores_discards(&geometry) => done.complete(Ok(()), buffer),
            _ if self.goes_past(&request) => {
                if let Some((buffer, done)) = self.through(request, buffer, done) {
                    self.enqueue(Job::Through { request, buffer, done });
                }
            }
            _ => self.write(request, buffer, done),
        }
    }

    /// Whether a write goes below at once: one that has to be durable, and a range so long that
    /// keeping its blocks apart would take more than it is worth.
    fn goes_past(&self, request: &Request) -> bool {
        request.flags.contains(Flags::FUA)
            || (request.op != Op::Write && request.len / self.cache.block_bytes() > APART_MAX_BLOCKS)
    }

    // ---- writes ---------------------------------------------------------------------------------

    fn try_write(&self, request: &Request, data: Option<&[u8]>) -> Result<Tried> {
        if self.queue.has_waiting_writes() {
            return Ok(Tried::WouldBlock);
        }
        let piece = match data {
            // Up to the end of a unit.
            Some(_) if request.len > PIECE_BYTES => {
                let past = (request.offset + PIECE_BYTES) % self.cache.unit_bytes();
                Request { len: PIECE_BYTES - past, ..*request }
            }
            _ => *request,
        };
        let mut done = self.cache.insert(&piece, data)?;
        if done == 0 {
            self.make_room_inline(piece.len)?;
            done = self.cache.insert(&piece, data)?;
        }
        // Somebody may wait for room, and for what was cached here to be written below for that.
        self.bell.ring();
        Ok(match done {
            0 => Tried::WouldBlock,
            done if done == request.len => Tried::Done,
            part => Tried::Partly(part),
        })
    }

    fn write(&self, request: Request, buffer: IoBuf, done: Completion) {
        let mut at = 0;
        while !self.queue.has_waiting_writes() {
            let data = (request.op == Op::Write).then(|| &buffer[at as usize..]);
            match self.cache.insert(&request.rest(at), data) {
                Ok(0) => break,
                Ok(part) => at += part,
                Err(error) => return done.complete(Err(error), buffer),
            }
            if at == request.len {
                self.bell.ring();
                return done.complete(Ok(()), buffer);
            }
        }
        let failures = self.failures().count;
        self.enqueue(Job::Write { request, buffer, at, failures, done });
    }

    // ---- reads ----------------------------------------------------------------------------------

    fn try_read(&self, request: &Request, out: &mut [u8]) -> Result<Tried> {
        let len = out.len().min(PIECE_BYTES as usize);
        let mut done = len;
        for range in self.cache.read(request.offset, &mut out[..len]) {
            let part =
                Request::read(request.offset + range.start as u64, range.len() as u64).with(request.flags);
            match self.inner.try_io(&part, Buffer::Read(&mut out[range.clone()]))? {
                Tried::Done => continue,
                Tried::Partly(part) => done = range.start + part as usize,
                Tried::WouldBlock => done = range.start,
            }
            break;
        }
        Ok(match done {
            0 => Tried::WouldBlock,
            done if done == out.len() => Tried::Done,
            part => Tried::Partly(part as u64),
        })
    }

    fn read(self: &Arc<Self>, request: Request, mut buffer: IoBuf, done: Completion) {
        let missing = self.cache.read(request.offset, &mut buffer);
        let (Some(first), Some(last)) = (missing.first(), missing.last()) else {
            return done.complete(Ok(()), buffer);
        };
        if missing.len() == 1 && first.len() == buffer.len() {
            return self.below(request, buffer, move |_, outcome, buffer| done.complete(outcome, buffer));
        }
        // One read of all that is between, into memory of its own: what is cached stays as it was
        // found.
        let span = first.start..last.end;
        let part = Request::read(request.offset + span.start as u64, span.len() as u64);
        let below = match IoBuf::zeroed(span.len()) {
            Ok(below) => below,
            Err(error) => return done.complete(Err(error), buffer),
        };
        self.below(part, below, move |_, outcome, below| {
            if outcome.is_ok() {
                for range in missing {
                    let from = range.start - span.start..range.end - span.start;
                    buffer[range].copy_from_slice(&below[from]);
                }
            }
            done.complete(outcome, buffer);
        });
    }

    // ---- flush ----------------------------------------------------------------------------------

    fn flush(self: &Arc<Self>, done: Completion) {
        let slot = self.open_flush();
        let (bound, failures) = self.moment();
        if self.is_unflushed(bound, None) {
            let settle = Settle { bound, within: None, flush: true, slot, failures, done };
            self.enqueue(Job::Settle(settle));
        } else if let Some(error) = self.failed_since(failures) {
            self.close_flush(slot, false);
            done.complete(Err(error), IoBuf::empty());
        } else {
            self.flush_below(slot, done);
        }
    }

    /// Has what is unflushed of `within` written below.
    pub fn settle(self: &Arc<Self>, within: Range<u64>, done: Completion) {
        let mut parts = Some((within, done));
        let admitted = self.admit(|| {
            if let Some((within, done)) = parts.take() {
                let shared = Arc::clone(self);
                self.power.hold(move || shared.settle(within, done));
            }
        });
        let Some((within, done)) = parts else { return };
        let Admitted::On(_under_way) = admitted else {
            return done.complete(Err(Error::Gone), IoBuf::empty());
        };
        let (bound, failures) = self.moment();
        let within = Some(within);
        self.enqueue(Job::Settle(Settle { bound, within, flush: false, slot: None, failures, done }));
    }

    // ---- extents --------------------------------------------------------------------------------

    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let geometry = self.geometry();
        let end = range_end(offset, len, geometry.size)?;
        if self.cache.used() == 0 {
            return self.inner.extents(offset, len, row);
        }
        let block = self.cache.block_bytes();
        // The cache first: what is not there then is below.
        let (cached, known) = self.cache.look(offset / block..end.div_ceil(block), LOOK_MAX_BLOCKS);
        let end = end.min(known * block);
        let mut cached = cached.into_iter().peekable();
        let mut at = offset;
        while at < end {
            // What is cached here, or what is below up to the next cached block.
            if let Some((number, kind)) = cached.next_if(|(number, _)| number * block <= at) {
                let kind = match kind {
                    Kind::Bytes => ExtentKind::Data,
                    Kind::Zeroes => ExtentKind::Zero,
                    Kind::Hole => ExtentKind::Hole,
                };
                let len = ((number + 1) * block).min(end) - at;
                let more = row(Extent { offset: at, len, kind });
                at += len;
                if !more {
                    break;
                }
                continue;
            }
            let until = cached.peek().map_or(end, |(number, _)| number * block);
            let mut more = true;
            let described = self.inner.extents(at, until - at, &mut |extent| {
                more = row(extent);
                more
            })?;
            at += described;
            if !more || at < until {
                break;
            }
        }
        Ok(at - offset)
    }
}

/// Whether discards are hints that nobody takes: the device below frees nothing, or writing zeroes
/// instead would be work.
const fn ignores_discards(geometry: &Geometry) -> bool {
    geometry.discard_granularity == 0 || !geometry.fast_zeroes
}
