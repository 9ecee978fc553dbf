//! Request path of the power layer. A request is served from the cache, sent to the device under
//! this layer, or queued for the worker.

use std::ops::Range;
use std::sync::Arc;

use super::drain::PowerShared;
use super::log::APART_MAX_BLOCKS;
use super::queue::{Job, WriteOut};
use super::shard::Kind;
use freestone_core::device::{
    Buffer, Completion, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result, TryResult,
    range_end,
};
use freestone_core::freeze_gate::WorkGuard;
use freestone_core::sync::Ordering::SeqCst;

/// Maximum number of bytes that one `try_io` reads or writes.
const PIECE_BYTES: u64 = 1 << 20;
/// Approximate maximum number of unflushed blocks that one call of `extents` describes.
const LOOK_MAX_BLOCKS: usize = 4096;

pub enum PowerAdmission<'a> {
    /// The power is on, and stays on until the guard is dropped.
    On(WorkGuard<'a, ()>),
    /// The power is off for a reset: the request must wait.
    Later,
    Off,
}

impl PowerShared {
    pub fn geometry(&self) -> Geometry {
        // Unflushed writes are kept apart, with their data.
        Geometry { volatile_cache: true, ignores_data: false, ..self.inner.geometry() }
    }

    /// Decides whether a request may run on this thread. Calls `wait`, with the thread pinned, if
    /// the request must wait for the end of a reset.
    pub fn admit(&self, wait: impl FnOnce()) -> PowerAdmission<'_> {
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
            Some(true) => PowerAdmission::On(self.power.work_guard()),
            Some(false) => PowerAdmission::Later,
            None => PowerAdmission::Off,
        }
    }

    pub fn try_io(self: &Arc<Self>, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let geometry = self.geometry();
        request.check(&geometry)?;
        let _under_way = match self.admit(|| {}) {
            PowerAdmission::On(under_way) => under_way,
            PowerAdmission::Later => return Ok(TryResult::WouldBlock),
            PowerAdmission::Off => return Err(Error::Gone),
        };
        match (request.op, buffer) {
            (Op::Read, Buffer::Read(out)) => self.try_read(request, out),
            (Op::Read, _) | (Op::Write, Buffer::None | Buffer::Read(_)) => Err(Error::Misaligned),
            (Op::Flush, _) => self.try_flush(),
            (Op::Discard, _) if ignores_discards(&geometry) => Ok(TryResult::Done),
            (_, buffer) if self.bypasses_cache(request) => self.try_past_cache(*request, buffer),
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
        let PowerAdmission::On(_under_way) = admitted else { return done.complete(Err(Error::Gone), buffer) };
        match request.op {
            Op::Read => self.read(request, buffer, done),
            Op::Flush => self.flush(done),
            Op::Discard if ignores_discards(&geometry) => done.complete(Ok(()), buffer),
            _ if self.bypasses_cache(&request) => {
                if let Some((buffer, done)) = self.submit_past_cache(request, buffer, done) {
                    self.enqueue(Job::PastCache { request, buffer, done });
                }
            }
            _ => self.write(request, buffer, done),
        }
    }

    /// Returns true if a write bypasses the cache: if it has the FUA flag, or if it zeroes or
    /// discards a range too long to be cached per block.
    fn bypasses_cache(&self, request: &Request) -> bool {
        request.flags.contains(Flags::FUA)
            || (request.op != Op::Write && request.len / self.cache.block_bytes() > APART_MAX_BLOCKS)
    }

    // ---- writes ---------------------------------------------------------------------------------

    fn try_write(&self, request: &Request, data: Option<&[u8]>) -> Result<TryResult> {
        if self.queue.has_waiting_writes() {
            return Ok(TryResult::WouldBlock);
        }
        let piece = match data {
            // A long write is cut off at a unit boundary.
            Some(_) if request.len > PIECE_BYTES => {
                let past = (request.offset + PIECE_BYTES) % self.cache.unit_bytes();
                Request { len: PIECE_BYTES - past, ..*request }
            }
            _ => *request,
        };
        let mut done = self.cache.insert(&piece, data)?;
        if done == 0 {
            self.reclaim_space_inline(piece.len)?;
            done = self.cache.insert(&piece, data)?;
        }
        // The worker, if it waits for space, may need to write these new blocks.
        self.events.notify();
        Ok(match done {
            0 => TryResult::WouldBlock,
            done if done == request.len => TryResult::Done,
            part => TryResult::Partly(part),
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
                self.events.notify();
                return done.complete(Ok(()), buffer);
            }
        }
        let failures = self.failures().count;
        self.enqueue(Job::Write { request, buffer, at, failures, done });
    }

    // ---- reads ----------------------------------------------------------------------------------

    fn try_read(&self, request: &Request, out: &mut [u8]) -> Result<TryResult> {
        let len = out.len().min(PIECE_BYTES as usize);
        let mut done = len;
        for range in self.cache.read(request.offset, &mut out[..len]) {
            let part =
                Request::read(request.offset + range.start as u64, range.len() as u64).with(request.flags);
            match self.inner.try_io(&part, Buffer::Read(&mut out[range.clone()]))? {
                TryResult::Done => continue,
                TryResult::Partly(part) => done = range.start + part as usize,
                TryResult::WouldBlock => done = range.start,
            }
            break;
        }
        Ok(match done {
            0 => TryResult::WouldBlock,
            done if done == out.len() => TryResult::Done,
            part => TryResult::Partly(part as u64),
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
        // One read covers everything from the first to the last missing range. A separate buffer is
        // used, since cached data in `buffer` must not be overwritten.
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
        let (bound, failures) = self.flush_bound();
        if self.is_unflushed(bound, None) {
            let write_out = WriteOut { bound, within: None, flush: true, slot, failures, done };
            self.enqueue(Job::WriteOut(write_out));
        } else if let Some(error) = self.failed_since(failures) {
            self.close_flush(slot, false);
            done.complete(Err(error), IoBuf::empty());
        } else {
            self.flush_below(slot, done);
        }
    }

    /// Writes the unflushed blocks of the range `within` to the device under this layer.
    pub fn write_out(self: &Arc<Self>, within: Range<u64>, done: Completion) {
        let mut parts = Some((within, done));
        let admitted = self.admit(|| {
            if let Some((within, done)) = parts.take() {
                let shared = Arc::clone(self);
                self.power.hold(move || shared.write_out(within, done));
            }
        });
        let Some((within, done)) = parts else { return };
        let PowerAdmission::On(_under_way) = admitted else {
            return done.complete(Err(Error::Gone), IoBuf::empty());
        };
        let (bound, failures) = self.flush_bound();
        let within = Some(within);
        self.enqueue(Job::WriteOut(WriteOut { bound, within, flush: false, slot: None, failures, done }));
    }

    // ---- extents --------------------------------------------------------------------------------

    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let geometry = self.geometry();
        let end = range_end(offset, len, geometry.size)?;
        if self.cache.used() == 0 {
            return self.inner.extents(offset, len, row);
        }
        let block = self.cache.block_bytes();
        // The cache is checked first. A block that is not cached then is in the device under this
        // layer.
        let (cached, known) = self.cache.cached_kinds(offset / block..end.div_ceil(block), LOOK_MAX_BLOCKS);
        let end = end.min(known * block);
        let mut cached = cached.into_iter().peekable();
        let mut at = offset;
        while at < end {
            // Describes either the cached block at `at`, or the extents of the device under this
            // layer up to the next cached block.
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

/// Returns true if discards are ignored because the device under this layer frees nothing, or
/// writes zeroes slowly.
const fn ignores_discards(geometry: &Geometry) -> bool {
    geometry.discard_granularity == 0 || !geometry.fast_zeroes
}
