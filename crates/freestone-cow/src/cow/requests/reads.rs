//! Reads, flushes, extents and changes of a snapshot.
//!
//! A request is split into runs of chunks that are contiguous on the origin or on the COW device.
//! Data read from the origin is valid only if its chunks still have no exception afterwards (see
//! [`exceptions`](crate::cow::exceptions)). Otherwise the copy on the COW device is read instead.

use std::sync::Arc;

use crate::cow::state::{Snap, counter};
use freestone_core::device::{
    Buffer, Change, Completion, Device, Error, Extent, ExtentKind, IoBuf, Request, Result, TryResult,
    range_end,
};
use freestone_core::handoff::try_result;
use freestone_core::sync::Mutex;

/// Maximum number of runs per tried read, and per report of changes.
const TRY_RUNS: u32 = 64;
/// Maximum number of extents collected before they are validated and reported.
const EXTENT_ROWS: usize = 256;

/// Contiguous part of a request on one device.
struct Run {
    /// True if the run is on the COW device, false if it is on the origin.
    own: bool,
    at: u64,
    len: u64,
}

impl Snap {
    /// Returns the run that starts at offset `at` of the snapshot, up to `end`.
    fn run_at(&self, at: u64, end: u64) -> Run {
        // If the origin has grown, it is longer than the snapshot that serves it. Bytes beyond the
        // snapshot's end are read from the origin.
        let end =
            if at < self.size { end.min(self.size) } else { return Run { own: false, at, len: end - at } };
        let chunk = self.chunk();
        let (cow_chunk, chunks) = self.exceptions.run(at / chunk, end.div_ceil(chunk));
        let len = (chunks * chunk - at % chunk).min(end - at);
        match cow_chunk {
            Some(cow_chunk) => Run { own: true, at: cow_chunk * chunk + at % chunk, len },
            None => Run { own: false, at, len },
        }
    }

    fn device_of(&self, run: &Run) -> &Arc<dyn Device> {
        if run.own { &self.cow } else { &self.core.device }
    }

    /// Checks data that was read from `[at, at + len)` of the origin after `state` was loaded.
    /// Returns false if the data must be read again.
    pub fn is_origin_data_valid(&self, at: u64, len: u64, state: u32) -> Result<bool> {
        let chunk = self.chunk();
        self.counters.add(counter::ORIGIN_READS, 1);
        // Beyond the snapshot's end the origin's content is valid, even if the last chunk has an
        // exception for the part before the end.
        let unchanged =
            at >= self.size || self.exceptions.has_none_complete(at / chunk, (at + len).div_ceil(chunk));
        // The state is checked after the exceptions, because a write to the origin makes no
        // exception for a lost snapshot.
        let is_valid = self.is_same_mode_since(state)? && unchanged;
        if !is_valid {
            self.counters.add(counter::REREADS, 1);
        }
        Ok(is_valid)
    }
}

/// Reads as much of a request as possible without waiting.
pub fn try_read(snap: &Snap, request: &Request, into: &mut [u8]) -> Result<TryResult> {
    if into.len() as u64 != request.len {
        return Err(Error::Misaligned);
    }
    let end = request.offset + request.len;
    let mut done = 0;
    for _ in 0..TRY_RUNS {
        let state = snap.state();
        snap.check_readable()?;
        let at = request.offset + done;
        let run = snap.run_at(at, end);
        let into = &mut into[done as usize..(done + run.len) as usize];
        let part = Request { offset: run.at, len: run.len, ..*request };
        let read = match snap.device_of(&run).try_io(&part, Buffer::Read(into)) {
            Ok(TryResult::Done) => run.len,
            Ok(TryResult::Partly(bytes)) => snap.round_down_to_block(at + bytes).saturating_sub(at),
            Err(error) if done == 0 => return Err(error),
            // The caller submits the rest, which then fails with this error.
            Ok(TryResult::WouldBlock) | Err(_) => break,
        };
        if !run.own && !snap.is_origin_data_valid(at, read, state)? {
            continue;
        }
        done += read;
        if read < run.len || done == request.len {
            break;
        }
    }
    Ok(try_result(done, request.len))
}

/// Submitted read that consists of several runs.
struct SplitRead {
    snap: Arc<Snap>,
    offset: u64,
    state: Mutex<SplitReadState>,
}

/// Progress of a split read. Lock order: taken without other locks, and no lock is taken under this
/// lock.
struct SplitReadState {
    buffer: IoBuf,
    left: usize,
    error: Option<Error>,
    done: Option<Completion>,
}

pub fn submit(snap: &Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    let bad = if buffer.len() as u64 == request.len { None } else { Some(Error::Misaligned) };
    if let Some(error) = bad.or(snap.check_readable().err()) {
        return done.complete(Err(error), buffer);
    }
    let state = snap.state();
    let run = snap.run_at(request.offset, request.offset + request.len);
    let device = Arc::clone(snap.device_of(&run));
    if run.len < request.len {
        let split = SplitRead::new(Arc::clone(snap), request.offset, buffer, done);
        split.read(request.offset, request.len);
        return split.finish_part(Ok(()));
    }
    let part = Request { offset: run.at, ..request };
    let snap = Arc::clone(snap);
    let then = Completion::new(move |outcome: Result<()>, buffer| {
        let is_valid = outcome.and_then(|()| {
            if run.own { Ok(true) } else { snap.is_origin_data_valid(request.offset, request.len, state) }
        });
        match is_valid {
            Ok(true) => done.complete(Ok(()), buffer),
            Err(error) => done.complete(Err(error), buffer),
            Ok(false) => {
                let work_queue = Arc::clone(&snap.core.work_queue);
                // The range may now consist of several runs: chunks with an exception, and chunks
                // to read from the origin again.
                work_queue.push(move || submit(&snap, request, buffer, done));
            }
        }
    });
    device.submit(part, buffer, then);
}

impl SplitRead {
    fn new(snap: Arc<Snap>, offset: u64, buffer: IoBuf, done: Completion) -> Arc<Self> {
        let state = SplitReadState { buffer, left: 1, error: None, done: Some(done) };
        Arc::new(Self { snap, offset, state: Mutex::new(state) })
    }

    /// Submits the reads of a range run by run. The caller is counted in `left`, so the request
    /// cannot complete before.
    fn read(self: &Arc<Self>, from: u64, len: u64) {
        let (mut at, end) = (from, from + len);
        while at < end {
            let state = self.snap.state();
            let run = self.snap.run_at(at, end);
            let (start, len) = (at, run.len);
            at += len;
            let buffer = match IoBuf::zeroed(len as usize) {
                Ok(buffer) => buffer,
                Err(error) => {
                    let mut split = self.state.lock();
                    split.error = split.error.or(Some(error));
                    return;
                }
            };
            self.state.lock().left += 1;
            let split = Arc::clone(self);
            let own = run.own;
            let then = Completion::new(move |outcome, data: IoBuf| {
                split.complete(start, len, own, state, outcome, &data);
            });
            self.snap.device_of(&run).submit(Request::read(run.at, len), buffer, then);
        }
    }

    /// Completes the read of one run. Runs on a thread of the device.
    fn complete(self: Arc<Self>, at: u64, len: u64, own: bool, state: u32, outcome: Result<()>, data: &[u8]) {
        let is_valid = outcome
            .and_then(|()| if own { Ok(true) } else { self.snap.is_origin_data_valid(at, len, state) });
        match is_valid {
            Ok(true) => {
                let mut split = self.state.lock();
                let from = (at - self.offset) as usize;
                split.buffer[from..from + len as usize].copy_from_slice(data);
                drop(split);
                self.finish_part(Ok(()));
            }
            Ok(false) => {
                let work_queue = Arc::clone(&self.snap.core.work_queue);
                work_queue.push(move || {
                    self.read(at, len);
                    self.finish_part(Ok(()));
                });
            }
            Err(error) => self.finish_part(Err(error)),
        }
    }

    fn finish_part(&self, outcome: Result<()>) {
        let mut split = self.state.lock();
        split.error = split.error.or(outcome.err());
        split.left -= 1;
        if split.left > 0 {
            return;
        }
        let buffer = std::mem::replace(&mut split.buffer, IoBuf::empty());
        let (error, done) = (split.error, split.done.take());
        drop(split);
        if let Some(done) = done {
            done.complete(error.map_or(Ok(()), Err), buffer);
        }
    }
}

// ---- flush: the COW device, and during a merge also the origin ----------------------------------

impl Snap {
    pub fn try_flush(&self, request: &Request) -> Result<TryResult> {
        self.check_readable()?;
        if self.is_merging() {
            return Ok(TryResult::WouldBlock);
        }
        self.store.device().try_io(request, Buffer::None)
    }

    pub fn flush(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = self.check_readable() {
            return done.complete(Err(error), buffer);
        }
        if !self.is_merging() {
            return self.store.device().submit(request, buffer, done);
        }
        let snap = Arc::clone(self);
        let then = Completion::new(move |outcome: Result<()>, buffer| match outcome {
            Ok(()) => {
                let work_queue = Arc::clone(&snap.core.work_queue);
                work_queue.push(move || snap.core.device.submit(request, buffer, done));
            }
            Err(error) => done.complete(Err(error), buffer),
        });
        self.store.device().submit(request, buffer, then);
    }
}

// ---- extents and changes ------------------------------------------------------------------------

impl Snap {
    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = self.end_of(offset, len)?;
        loop {
            let state = self.state();
            self.check_readable()?;
            let run = self.run_at(offset, end);
            let mut rows = Vec::new();
            self.device_of(&run).extents(run.at, run.len, &mut |extent| {
                rows.push(extent);
                rows.len() < EXTENT_ROWS
            })?;
            let rows = self.in_blocks(&run, rows);
            // The extents may describe data that was written to the origin after the state was
            // loaded.
            let described = rows.iter().map(|row| row.len).sum::<u64>();
            if !run.own && !self.is_origin_data_valid(offset, described, state)? {
                continue;
            }
            let mut given = 0;
            for extent in rows {
                given += extent.len;
                if !row(Extent { offset: extent.offset - run.at + offset, ..extent }) {
                    break;
                }
            }
            return Ok(given);
        }
    }

    /// Rounds extents to whole logical blocks of the snapshot, if the device has smaller blocks. A
    /// block with several kinds of extents is reported as data.
    fn in_blocks(&self, run: &Run, rows: Vec<Extent>) -> Vec<Extent> {
        if u64::from(self.device_of(run).geometry().logical_block) >= self.block() {
            return rows;
        }
        let data = |from, to| Extent { offset: from, len: to - from, kind: ExtentKind::Data };
        let mut whole = Vec::new();
        let (mut at, mut end) = (run.at, run.at);
        let mut rows = rows.into_iter().peekable();
        while let Some(mut row) = rows.next() {
            while let Some(next) = rows.next_if(|next| next.kind == row.kind) {
                row.len += next.len;
            }
            end = row.offset + row.len;
            let (from, to) = (row.offset.next_multiple_of(self.block()), self.round_down_to_block(end));
            if row.kind != ExtentKind::Data && from < to {
                if at < from {
                    whole.push(data(at, from));
                }
                whole.push(Extent { offset: from, len: to - from, ..row });
                at = to;
            }
        }
        end = end.next_multiple_of(self.block()).min(run.at + run.len);
        if at < end {
            whole.push(data(at, end));
        }
        whole
    }

    pub fn prefetch(&self, offset: u64, len: u64) {
        if let Ok(end) = self.end_of(offset, len) {
            let run = self.run_at(offset, end);
            self.device_of(&run).prefetch(run.at, run.len);
        }
    }

    fn end_of(&self, offset: u64, len: u64) -> Result<u64> {
        range_end(offset, len, self.size)
    }

    /// Reports the runs of a range, and for each run whether it is on the COW device. Returns the
    /// number of bytes described.
    pub fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let end = self.end_of(offset, len)?;
        self.check_readable().map_err(|_| Error::Gone)?;
        let mut at = offset;
        for _ in 0..TRY_RUNS {
            let run = self.run_at(at, end);
            let more = row(Change { offset: at, len: run.len, own: run.own });
            at += run.len;
            if !more || at == end {
                break;
            }
        }
        Ok(at - offset)
    }
}
