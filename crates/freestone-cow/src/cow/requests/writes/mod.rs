//! Writes, write zeroes and discards of a snapshot.
//!
//! A write to chunks with exceptions is sent to the COW device. Other writes are submitted and
//! processed in *windows* of chunks. Each round writes the chunks with an exception. A chunk that
//! the write covers completely needs no copy: the data itself is stored as the exception. The round
//! requests the other exceptions together, and the next round finds them complete. Every chunk of
//! the window is written once.
//!
//! Writing zeroes where the snapshot reads as zeroes needs no exception. So such a write queries
//! the origin's extents first.
//!
//! During a merge no exception is made. Writes to chunks without an exception are sent to the
//! origin. Writes to chunks with an exception are sent to the COW device and are counted per chunk.
//! Writes to a chunk of the run that is being merged wait.

mod rounds;

use std::sync::Arc;

use crate::cow::state::permits::Permit;
use crate::cow::state::wait_group::Continuation;
use crate::cow::state::{Mode, Snap};
use freestone_core::device::{Buffer, Completion, Error, Flags, IoBuf, Op, Request, Result, TryResult};
use freestone_core::handoff::try_result;
use freestone_core::mutants::{self, Mutant};
use freestone_core::pin;
use freestone_core::work_queue::WorkQueue;

const WINDOW_CHUNKS: u64 = 256;
/// Maximum number of rounds on the submitting thread; later rounds run on the origin's work queue.
const ROUNDS_INLINE: u32 = 3;
/// Maximum number of runs of chunks per tried write.
const TRY_RUNS: u32 = 64;

/// Write, write zeroes or discard in progress.
struct Write {
    snap: Arc<Snap>,
    /// Remaining part of the request. The data of this part starts at `from` in the buffer.
    request: Request,
    from: usize,
    buffer: IoBuf,
    done: Completion,
    /// Bitmap of the chunks of the window that need no further action.
    handled: [u64; WINDOW_CHUNKS as usize / 64],
    permit: Option<Permit>,
    rounds: u32,
    /// Offset up to which the origin's extents were queried.
    extents_checked_until: u64,
}

#[derive(Clone, Copy)]
struct Piece {
    index: u64,
    chunk: u64,
    offset: u64,
    len: u64,
}

// ---- tried --------------------------------------------------------------------------------------

/// Writes `data`, or zeroes if `data` is `None`, to the first chunks if they have exceptions, as
/// far as possible without waiting.
pub fn try_write(snap: &Arc<Snap>, request: &Request, data: Option<&[u8]>) -> Result<TryResult> {
    if data.is_some_and(|data| data.len() as u64 != request.len) {
        return Err(Error::Misaligned);
    }
    snap.check_writable()?;
    // A COW device with smaller blocks could stop within a block of the snapshot, and a part of a
    // block cannot be reported as done.
    if snap.cow_block() < snap.block() {
        return Ok(TryResult::WouldBlock);
    }
    let started = snap.gate.enter(|mode| (mode == Some(&Mode::Normal)).then(|| snap.gate.begin()));
    if started.is_none() {
        return Ok(TryResult::WouldBlock);
    }
    // Counted at the gate until the COW device has completed the write: no merge starts meanwhile,
    // so no exception is removed.
    let _work = snap.gate.work_guard();
    let chunk = snap.chunk();
    let mut done = 0;
    for _ in 0..TRY_RUNS {
        let at = request.offset + done;
        let (cow_chunk, chunks) =
            snap.exceptions.run(at / chunk, (request.offset + request.len).div_ceil(chunk));
        let Some(cow_chunk) = cow_chunk else { break };
        let len = (chunks * chunk - at % chunk).min(request.len - done);
        let part = Request { offset: cow_chunk * chunk + at % chunk, len, ..*request };
        let data = data.map(|data| &data[done as usize..(done + len) as usize]);
        match snap.store.device().try_io(&part, data.map_or(Buffer::None, Buffer::Write)) {
            Ok(TryResult::Done) => done += len,
            Ok(TryResult::Partly(bytes)) => {
                done += bytes;
                break;
            }
            Err(error) if done == 0 => return Err(error),
            // The caller submits the rest, which then fails with this error.
            Ok(TryResult::WouldBlock) | Err(_) => break,
        }
        if done == request.len {
            break;
        }
    }
    Ok(try_result(done, request.len))
}

/// Completes a discard that is ignored. Returns [`TryResult::WouldBlock`] for other discards, which
/// must be submitted.
pub fn try_discard(snap: &Snap) -> Result<TryResult> {
    snap.check_writable()?;
    let ignored = !snap.config.discard_zeroes_cow || snap.is_merging();
    Ok(if ignored { TryResult::Done } else { TryResult::WouldBlock })
}

// ---- submitted ----------------------------------------------------------------------------------

/// Submits a write or write zeroes to the snapshot.
pub fn submit(snap: &Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    if request.op == Op::Write && buffer.len() as u64 != request.len {
        return done.complete(Err(Error::Misaligned), buffer);
    }
    let chunk = snap.chunk();
    let (first, inside) = (request.offset / chunk, request.offset % chunk);
    // The common case needs no round: the write touches a single chunk, which has an exception.
    let cow_chunk = snap.gate.enter(|mode| {
        let is_single_chunk =
            mode == Some(&Mode::Normal) && inside + request.len <= chunk && snap.check_writable().is_ok();
        let cow_chunk = if is_single_chunk { snap.exceptions.get(first).chunk() } else { None };
        cow_chunk.inspect(|_| snap.gate.begin())
    });
    let Some(cow_chunk) = cow_chunk else {
        return Write::new(Arc::clone(snap), request, buffer, done).resume(Ok(()));
    };
    let gated = Arc::clone(snap);
    let then = Completion::new(move |outcome, buffer| {
        gated.gate.end();
        done.complete(outcome, buffer);
    });
    let request = Request { offset: cow_chunk * chunk + inside, ..request };
    if mutants::on(Mutant::PinnedCall) {
        return pin::pinned(|_| snap.store.device().submit(request, buffer, then));
    }
    snap.store.device().submit(request, buffer, then);
}

/// Submits a write, write zeroes or discard of the origin, which this snapshot serves during its
/// merge.
pub(in crate::cow) fn submit_from_origin(snap: Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    Write::new(snap, request, buffer, done).resume(Ok(()));
}

pub fn submit_discard(snap: &Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    match try_discard(snap) {
        Ok(TryResult::WouldBlock) => {}
        outcome => return done.complete(outcome.map(drop), buffer),
    }
    let job = Write::new(Arc::clone(snap), request, IoBuf::empty(), done);
    if !snap.config.discard_passdown_origin {
        return job.resume(Ok(()));
    }
    // As in the kernel, the discard makes no exceptions in any snapshot of the origin, so all
    // snapshots lose the discarded data.
    let work_queue = Arc::clone(&snap.core.work_queue);
    let then = Completion::new(move |outcome, _| work_queue.push(move || job.resume(outcome)));
    snap.core.device.submit(request, buffer, then);
}

impl Write {
    fn new(snap: Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) -> Self {
        Self {
            snap,
            request,
            from: 0,
            buffer,
            done,
            handled: [0; 4],
            permit: None,
            rounds: 0,
            extents_checked_until: 0,
        }
    }

    /// Iterates over the pieces of the current window: the part of the request in each chunk.
    fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        let (request, chunk) = (self.request, self.snap.chunk());
        let mut end = request.offset + request.len;
        if self.extents_checked_until > request.offset {
            end = end.min(self.extents_checked_until);
        }
        let first = request.offset / chunk;
        let last = end.div_ceil(chunk).min(first + WINDOW_CHUNKS);
        (first..last).map(move |number| {
            let offset = request.offset.max(number * chunk);
            let len = end.min((number + 1) * chunk) - offset;
            Piece { index: number - first, chunk: number, offset, len }
        })
    }

    fn is_handled(&self, piece: Piece) -> bool {
        self.handled[(piece.index / 64) as usize] & 1 << (piece.index % 64) != 0
    }

    fn set_handled(&mut self, piece: Piece) {
        self.handled[(piece.index / 64) as usize] |= 1 << (piece.index % 64);
    }

    /// Moves to the next window if all chunks of the current window are handled. Returns false if
    /// no part of the request is left.
    fn advance(&mut self) -> bool {
        if !self.pieces().all(|piece| self.is_handled(piece)) {
            return true;
        }
        let bytes: u64 = self.pieces().map(|piece| piece.len).sum();
        self.skip(bytes)
    }

    fn skip(&mut self, bytes: u64) -> bool {
        self.request = self.request.rest(bytes);
        self.from += bytes as usize;
        self.handled = [0; 4];
        self.request.len > 0
    }

    fn complete(self, outcome: Result<()>) {
        // The completion may take long, so the permit is released first.
        drop(self.permit);
        self.done.complete(outcome, self.buffer);
    }
}

impl Continuation for Write {
    fn work_queue(&self) -> &Arc<WorkQueue> {
        &self.snap.core.work_queue
    }

    fn resume(mut self, mut so_far: Result<()>) {
        self.rounds = 0;
        loop {
            let checked = if self.request.op == Op::Discard { Ok(()) } else { self.snap.check_writable() };
            if let Err(error) = so_far.and(checked) {
                return self.complete(Err(error));
            }
            if !self.advance() || self.request.op == Op::Discard && !self.skip_unowned() {
                return self.complete(Ok(()));
            }
            if self.needs_extents_check() {
                let snap = Arc::clone(&self.snap);
                self.permit = None;
                return snap.core.extents_queue.push(move || self.check_extents());
            }
            if self.rounds == ROUNDS_INLINE {
                let work_queue = Arc::clone(&self.snap.core.work_queue);
                return work_queue.push(move || self.resume(Ok(())));
            }
            self.rounds += 1;
            let Some((job, outcome)) = self.round() else { return };
            (self, so_far) = (job, outcome);
        }
    }
}

impl Write {
    /// Returns true if the origin's extents must be queried, because they may show that writing
    /// zeroes changes nothing. Zeroes with FUA are always written.
    fn needs_extents_check(&self) -> bool {
        let Request { op, flags, offset, .. } = self.request;
        op == Op::WriteZeroes
            && !flags.contains(Flags::FUA)
            && offset >= self.extents_checked_until
            && self.handled == [0; 4]
            && !self.snap.is_merging()
    }

    /// Queries the origin's extents, and skips whole chunks without exceptions that read as zeroes.
    /// The extents are valid if the chunks still have no exception after the query. Then the range
    /// reads as zeroes in the snapshot, and the request has taken effect. The origin was flushed
    /// when the snapshot was taken.
    fn check_extents(mut self) {
        let (snap, chunk) = (Arc::clone(&self.snap), self.snap.chunk());
        let (at, end) = (self.request.offset, self.request.offset + self.request.len);
        let state = snap.state();
        let (cow_chunk, chunks) = snap.exceptions.run(at / chunk, end.div_ceil(chunk));
        let run_end = ((at / chunk + chunks) * chunk).min(end);
        self.extents_checked_until = run_end;
        if cow_chunk.is_none() {
            let (zeroes_until, extents_checked_until) = snap.core.leading_zeroes(at, run_end);
            let whole = if zeroes_until == end { end } else { zeroes_until - zeroes_until % chunk };
            let is_valid =
                if whole > at { snap.is_origin_data_valid(at, whole - at, state) } else { Ok(true) };
            self.extents_checked_until = match is_valid {
                // A new exception was made meanwhile, so the run is shorter and is checked again.
                Ok(false) => at,
                _ => extents_checked_until.next_multiple_of(chunk).min(run_end),
            };
            if is_valid == Ok(true) && whole > at && !self.skip(whole - at) {
                return self.complete(Ok(()));
            }
        }
        snap.core.work_queue.push(move || self.resume(Ok(())));
    }

    /// Skips chunks without exceptions, which a discard does not change. Returns false if no part
    /// of the request is left.
    fn skip_unowned(&mut self) -> bool {
        let chunk = self.snap.chunk();
        loop {
            let end = self.request.offset + self.request.len;
            let (cow_chunk, chunks) =
                self.snap.exceptions.run(self.request.offset / chunk, end.div_ceil(chunk));
            if cow_chunk.is_some() || self.handled != [0; 4] {
                return true;
            }
            let next = (self.request.offset / chunk + chunks) * chunk;
            if !self.skip(next.min(end) - self.request.offset) {
                return false;
            }
        }
    }
}
