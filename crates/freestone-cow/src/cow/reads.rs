//! Reads and flushes of a snapshot, and what it says of itself.
//!
//! A request is cut into runs of chunks that lie together, with the origin or on the COW device.
//! What was read from the origin counts only if the chunks still have no exception afterwards (see
//! [`exceptions`](super::exceptions)); where one was made meanwhile, the copy is read instead.

use std::sync::Arc;

use super::state::{Snap, counter};
use freestone_core::device::{
    Buffer, Change, Completion, Device, Error, Extent, ExtentKind, IoBuf, Request, Result, Tried, range_end,
};
use freestone_core::handoff::progress;
use freestone_core::sync::Mutex;

/// Runs of chunks that one try goes through.
const TRY_RUNS: u32 = 64;
/// Extents that are looked at before they are checked and given out.
const EXTENT_ROWS: usize = 256;

/// Where a run of a request lies: on which device, from which byte on, and how long it is.
struct Run {
    /// On the COW device; else on the origin.
    own: bool,
    at: u64,
    len: u64,
}

impl Snap {
    /// The run at byte `at`, up to `end`.
    fn run_at(&self, at: u64, end: u64) -> Run {
        // Behind the snapshot's end: read from an origin that has grown, while the snapshot plays
        // its part.
        let end =
            if at < self.size { end.min(self.size) } else { return Run { own: false, at, len: end - at } };
        let chunk = self.chunk();
        let (place, chunks) = self.exceptions.run(at / chunk, end.div_ceil(chunk));
        let len = (chunks * chunk - at % chunk).min(end - at);
        match place {
            Some(place) => Run { own: true, at: place * chunk + at % chunk, len },
            None => Run { own: false, at, len },
        }
    }

    fn device_of(&self, run: &Run) -> &Arc<dyn Device> {
        if run.own { &self.cow } else { &self.core.device }
    }

    /// Whether the bytes `[at, at + len)` that the origin gave are the snapshot's.
    pub fn holds(&self, at: u64, len: u64, state: u32) -> Result<bool> {
        let chunk = self.chunk();
        self.counters.add(counter::ORIGIN_READS, 1);
        // Behind the snapshot's end the origin's content counts, also where the chunk has an
        // exception for the part before.
        let unmade = at >= self.size || self.exceptions.none_complete(at / chunk, (at + len).div_ceil(chunk));
        // Checked after the exceptions: a write of the origin makes none for a snapshot that is
        // lost.
        let holds = self.still(state)? && unmade;
        if !holds {
            self.counters.add(counter::REREADS, 1);
        }
        Ok(holds)
    }
}

/// Reads what can be read at once.
pub fn try_read(snap: &Snap, request: &Request, into: &mut [u8]) -> Result<Tried> {
    if into.len() as u64 != request.len {
        return Err(Error::Misaligned);
    }
    let end = request.offset + request.len;
    let mut done = 0;
    for _ in 0..TRY_RUNS {
        let state = snap.state();
        snap.readable()?;
        let at = request.offset + done;
        let run = snap.run_at(at, end);
        let into = &mut into[done as usize..(done + run.len) as usize];
        let part = Request { offset: run.at, len: run.len, ..*request };
        let read = match snap.device_of(&run).try_io(&part, Buffer::Read(into)) {
            Ok(Tried::Done) => run.len,
            Ok(Tried::Partly(bytes)) => snap.whole_blocks(at + bytes).saturating_sub(at),
            Err(error) if done == 0 => return Err(error),
            // An error shows again when the rest is tried.
            Ok(Tried::WouldBlock) | Err(_) => break,
        };
        if !run.own && !snap.holds(at, read, state)? {
            continue;
        }
        done += read;
        if read < run.len || done == request.len {
            break;
        }
    }
    Ok(progress(done, request.len))
}

/// A submitted read that consists of several parts.
struct Reading {
    snap: Arc<Snap>,
    offset: u64,
    state: Mutex<ReadingState>,
}

/// Lock order: taken with nothing held, and nothing under it.
struct ReadingState {
    buffer: IoBuf,
    left: usize,
    error: Option<Error>,
    done: Option<Completion>,
}

/// Takes over a read.
pub fn submit(snap: &Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    let bad = if buffer.len() as u64 == request.len { None } else { Some(Error::Misaligned) };
    if let Some(error) = bad.or(snap.readable().err()) {
        return done.complete(Err(error), buffer);
    }
    let state = snap.state();
    let run = snap.run_at(request.offset, request.offset + request.len);
    let device = Arc::clone(snap.device_of(&run));
    if run.len < request.len {
        let reading = Reading::new(Arc::clone(snap), request.offset, buffer, done);
        reading.read(request.offset, request.len);
        return reading.arrived(Ok(()));
    }
    let part = Request { offset: run.at, ..request };
    let snap = Arc::clone(snap);
    let then = Completion::new(move |outcome: Result<()>, buffer| {
        let holds = outcome
            .and_then(|()| if run.own { Ok(true) } else { snap.holds(request.offset, request.len, state) });
        match holds {
            Ok(true) => done.complete(Ok(()), buffer),
            Err(error) => done.complete(Err(error), buffer),
            Ok(false) => {
                let work_queue = Arc::clone(&snap.core.work_queue);
                // Run by run now: some chunks have an exception, others are read from the origin
                // again.
                work_queue.push(move || submit(&snap, request, buffer, done));
            }
        }
    });
    device.submit(part, buffer, then);
}

impl Reading {
    fn new(snap: Arc<Snap>, offset: u64, buffer: IoBuf, done: Completion) -> Arc<Self> {
        let state = ReadingState { buffer, left: 1, error: None, done: Some(done) };
        Arc::new(Self { snap, offset, state: Mutex::new(state) })
    }

    /// Reads a range, run by run. The caller holds a share of `left` meanwhile.
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
                    let mut reading = self.state.lock();
                    reading.error = reading.error.or(Some(error));
                    return;
                }
            };
            self.state.lock().left += 1;
            let reading = Arc::clone(self);
            let own = run.own;
            let then = Completion::new(move |outcome, data: IoBuf| {
                reading.complete(start, len, own, state, outcome, &data);
            });
            self.snap.device_of(&run).submit(Request::read(run.at, len), buffer, then);
        }
    }

    /// A part was read. Runs on a thread of a device.
    fn complete(self: Arc<Self>, at: u64, len: u64, own: bool, state: u32, outcome: Result<()>, data: &[u8]) {
        let holds = outcome.and_then(|()| if own { Ok(true) } else { self.snap.holds(at, len, state) });
        match holds {
            Ok(true) => {
                let mut reading = self.state.lock();
                let from = (at - self.offset) as usize;
                reading.buffer[from..from + len as usize].copy_from_slice(data);
                drop(reading);
                self.arrived(Ok(()));
            }
            Ok(false) => {
                let work_queue = Arc::clone(&self.snap.core.work_queue);
                work_queue.push(move || {
                    self.read(at, len);
                    self.arrived(Ok(()));
                });
            }
            Err(error) => self.arrived(Err(error)),
        }
    }

    fn arrived(&self, outcome: Result<()>) {
        let mut reading = self.state.lock();
        reading.error = reading.error.or(outcome.err());
        reading.left -= 1;
        if reading.left > 0 {
            return;
        }
        let buffer = std::mem::replace(&mut reading.buffer, IoBuf::empty());
        let (error, done) = (reading.error, reading.done.take());
        drop(reading);
        if let Some(done) = done {
            done.complete(error.map_or(Ok(()), Err), buffer);
        }
    }
}

// ---- flush: to the COW device; of a snapshot that is merged to the origin as well ---------------

impl Snap {
    pub fn try_flush(&self, request: &Request) -> Result<Tried> {
        self.readable()?;
        if self.is_merging() {
            return Ok(Tried::WouldBlock);
        }
        self.store.device().try_io(request, Buffer::None)
    }

    pub fn flush(self: &Arc<Self>, request: Request, buffer: IoBuf, done: Completion) {
        if let Err(error) = self.readable() {
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

// ---- what it says of itself ---------------------------------------------------------------------

impl Snap {
    pub fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = self.end_of(offset, len)?;
        loop {
            let state = self.state();
            self.readable()?;
            let run = self.run_at(offset, end);
            let mut rows = Vec::new();
            self.device_of(&run).extents(run.at, run.len, &mut |extent| {
                rows.push(extent);
                rows.len() < EXTENT_ROWS
            })?;
            let rows = self.in_blocks(&run, rows);
            // The origin may have described what was written meanwhile.
            let described = rows.iter().map(|row| row.len).sum::<u64>();
            if !run.own && !self.holds(offset, described, state)? {
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

    /// The same in whole blocks, where the device has smaller ones: a block that is not all of one
    /// kind is data.
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
            let (from, to) = (row.offset.next_multiple_of(self.block()), self.whole_blocks(end));
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

    /// Which runs of a range are the snapshot's own, on the COW device.
    pub fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64> {
        let end = self.end_of(offset, len)?;
        self.readable().map_err(|_| Error::Gone)?;
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
