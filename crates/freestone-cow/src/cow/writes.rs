//! Writes to a snapshot.
//!
//! A write to chunks with exceptions goes to the COW device. Others are submitted, and carried on
//! in *windows* of chunks: in a round, what has an exception is written, a chunk that is covered
//! whole and has none is written as its own exception, and for the rest exceptions are asked for,
//! all together; the next round finds them complete. Every chunk of the window is written once.
//!
//! Zeroes over what the snapshot shows as zeroes need no exception: where it has none, it looks at the
//! origin's extents first.
//!
//! While the snapshot is merged into its origin no exception is made: what has none goes to the
//! origin, as the origin's writes do; what has one to the COW device, tracked by chunk; what is
//! being merged at the moment waits.

use std::sync::Arc;

use super::copy::{Asked, Begun};
use super::exceptions::{Exception, Locked};
use super::gather::{Gather, Job, Waiter};
use super::origin_write::OriginWrite;
use super::state::{Mode, Permit, Snap};
use freestone_core::device::{Buffer, Completion, Error, Flags, IoBuf, Op, Request, Result, Tried};
use freestone_core::handoff::{Put, progress, put, try_put};
use freestone_core::mutants::{self, Mutant};
use freestone_core::pin;
use freestone_core::work_queue::WorkQueue;

/// Chunks of a window.
const WINDOW_CHUNKS: u64 = 256;
/// Rounds on the submitting thread; later ones run on the origin's own.
const ROUNDS_INLINE: u32 = 3;
/// Runs of chunks that one try goes through.
const TRY_RUNS: u32 = 64;

/// A write, write zeroes or discard under way.
struct Write {
    snap: Arc<Snap>,
    /// What is left of it, and where that begins in the buffer.
    request: Request,
    from: usize,
    buffer: IoBuf,
    done: Completion,
    /// The chunks of the window for which nothing more is to be done.
    settled: [u64; WINDOW_CHUNKS as usize / 64],
    permit: Option<Permit>,
    rounds: u32,
    /// Byte up to which the origin's extents need no further look.
    looked_until: u64,
}

/// A part of a write within one chunk.
#[derive(Clone, Copy)]
struct Piece {
    index: u64,
    chunk: u64,
    offset: u64,
    len: u64,
}

/// What is to be done once the thread is not pinned any more. Places are in bytes, `from` in the
/// request.
enum Action {
    /// Write to the COW device, which is counted at the gate.
    Cow { op: Op, at: u64, from: u64, len: u64, tracked: Option<u64> },
    /// Write to the origin, while the snapshot plays its part.
    Origin { from: u64, len: u64 },
    /// Copy a chunk.
    Copy(Begun),
    /// Write a whole chunk.
    Whole { begun: Begun, from: u64, len: u64 },
}

/// How a round was planned.
enum Planned {
    Go,
    Throttled,
    NoSpace,
    Failed(Error),
    Held,
}

// ---- at once ------------------------------------------------------------------------------------

/// Writes `data`, or zeroes where there is none, as far as chunks have exceptions and the COW
/// device does it at once.
pub fn try_write(snap: &Arc<Snap>, request: &Request, data: Option<&[u8]>) -> Result<Tried> {
    if data.is_some_and(|data| data.len() as u64 != request.len) {
        return Err(Error::Misaligned);
    }
    snap.writable()?;
    // The COW device could stop within a block of the snapshot, and a part of a block cannot be
    // reported as done.
    if snap.cow_block() < snap.block() {
        return Ok(Tried::WouldBlock);
    }
    let begun = snap.gate.enter(|mode| (mode == Some(&Mode::Normal)).then(|| snap.gate.begin()));
    if begun.is_none() {
        return Ok(Tried::WouldBlock);
    }
    // No merge begins before the COW device has answered, so no exception is removed meanwhile.
    let _under_way = snap.gate.under_way();
    let chunk = snap.chunk();
    let mut done = 0;
    for _ in 0..TRY_RUNS {
        let at = request.offset + done;
        let (place, chunks) = snap.exceptions.run(at / chunk, (request.offset + request.len).div_ceil(chunk));
        let Some(place) = place else { break };
        let len = (chunks * chunk - at % chunk).min(request.len - done);
        let part = Request { offset: place * chunk + at % chunk, len, ..*request };
        let data = data.map(|data| &data[done as usize..(done + len) as usize]);
        match snap.store.device().try_io(&part, data.map_or(Buffer::None, Buffer::Write)) {
            Ok(Tried::Done) => done += len,
            Ok(Tried::Partly(bytes)) => {
                done += bytes;
                break;
            }
            Err(error) if done == 0 => return Err(error),
            // An error shows again when the rest is tried.
            Ok(Tried::WouldBlock) | Err(_) => break,
        }
        if done == request.len {
            break;
        }
    }
    Ok(progress(done, request.len))
}

/// A discard that is ignored is done; others are submitted.
pub fn try_discard(snap: &Snap) -> Result<Tried> {
    snap.writable()?;
    let ignored = !snap.config.discard_zeroes_cow || snap.is_merging();
    Ok(if ignored { Tried::Done } else { Tried::WouldBlock })
}

// ---- submitted ----------------------------------------------------------------------------------

/// Takes over a write or write zeroes.
pub fn submit(snap: &Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    if request.op == Op::Write && buffer.len() as u64 != request.len {
        return done.complete(Err(Error::Misaligned), buffer);
    }
    let chunk = snap.chunk();
    let (first, inside) = (request.offset / chunk, request.offset % chunk);
    // The common case needs no round: one chunk, which has its exception.
    let place = snap.gate.enter(|mode| {
        let one = mode == Some(&Mode::Normal) && inside + request.len <= chunk && snap.writable().is_ok();
        let place = if one { snap.exceptions.get(first).chunk() } else { None };
        place.inspect(|_| snap.gate.begin())
    });
    let Some(place) = place else {
        return Write::new(Arc::clone(snap), request, buffer, done).go(Ok(()));
    };
    let gated = Arc::clone(snap);
    let then = Completion::new(move |outcome, buffer| {
        gated.gate.end();
        done.complete(outcome, buffer);
    });
    let request = Request { offset: place * chunk + inside, ..request };
    if mutants::on(Mutant::PinnedCall) {
        return pin::pinned(|_| snap.store.device().submit(request, buffer, then));
    }
    snap.store.device().submit(request, buffer, then);
}

/// Takes over a write, write zeroes or discard that came to the origin, which this snapshot plays
/// the part of.
pub(super) fn take_over(snap: Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    Write::new(snap, request, buffer, done).go(Ok(()));
}

/// Takes over a discard.
pub fn submit_discard(snap: &Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) {
    match try_discard(snap) {
        Ok(Tried::WouldBlock) => {}
        outcome => return done.complete(outcome.map(drop), buffer),
    }
    let job = Write::new(Arc::clone(snap), request, IoBuf::empty(), done);
    if !snap.config.discard_passdown_origin {
        return job.go(Ok(()));
    }
    // No snapshot preserves anything, not even this one, as in the kernel: what is discarded is
    // gone for all of them.
    let work_queue = Arc::clone(&snap.core.work_queue);
    let then = Completion::new(move |outcome, _| work_queue.push(move || job.go(outcome)));
    snap.core.device.submit(request, buffer, then);
}

impl Write {
    /// A write that begins.
    fn new(snap: Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) -> Self {
        Self {
            snap,
            request,
            from: 0,
            buffer,
            done,
            settled: [0; 4],
            permit: None,
            rounds: 0,
            looked_until: 0,
        }
    }

    /// The pieces of the window.
    fn pieces(&self) -> impl Iterator<Item = Piece> + use<> {
        let (request, chunk) = (self.request, self.snap.chunk());
        let mut end = request.offset + request.len;
        if self.looked_until > request.offset {
            end = end.min(self.looked_until);
        }
        let first = request.offset / chunk;
        let last = end.div_ceil(chunk).min(first + WINDOW_CHUNKS);
        (first..last).map(move |number| {
            let offset = request.offset.max(number * chunk);
            let len = end.min((number + 1) * chunk) - offset;
            Piece { index: number - first, chunk: number, offset, len }
        })
    }

    fn is_settled(&self, piece: Piece) -> bool {
        self.settled[(piece.index / 64) as usize] & 1 << (piece.index % 64) != 0
    }

    fn settle(&mut self, piece: Piece) {
        self.settled[(piece.index / 64) as usize] |= 1 << (piece.index % 64);
    }

    /// Goes on to the next window if this one is through. False: nothing is left.
    fn advance(&mut self) -> bool {
        if !self.pieces().all(|piece| self.is_settled(piece)) {
            return true;
        }
        let bytes: u64 = self.pieces().map(|piece| piece.len).sum();
        self.skip(bytes)
    }

    fn skip(&mut self, bytes: u64) -> bool {
        self.request = self.request.rest(bytes);
        self.from += bytes as usize;
        self.settled = [0; 4];
        self.request.len > 0
    }

    fn complete(self, outcome: Result<()>) {
        // Before the completion runs, which may take long.
        drop(self.permit);
        self.done.complete(outcome, self.buffer);
    }
}

impl Job for Write {
    fn work_queue(&self) -> &Arc<WorkQueue> {
        &self.snap.core.work_queue
    }

    fn go(mut self, mut so_far: Result<()>) {
        self.rounds = 0;
        loop {
            let checked = if self.request.op == Op::Discard { Ok(()) } else { self.snap.writable() };
            if let Err(error) = so_far.and(checked) {
                return self.complete(Err(error));
            }
            if !self.advance() || self.request.op == Op::Discard && !self.skip_unowned() {
                return self.complete(Ok(()));
            }
            if self.is_to_look() {
                let snap = Arc::clone(&self.snap);
                self.permit = None;
                return snap.core.extents_queue.push(move || self.look());
            }
            if self.rounds == ROUNDS_INLINE {
                let work_queue = Arc::clone(&self.snap.core.work_queue);
                return work_queue.push(move || self.go(Ok(())));
            }
            self.rounds += 1;
            let Some((job, outcome)) = self.round() else { return };
            (self, so_far) = (job, outcome);
        }
    }
}

impl Write {
    /// Returns true if the origin's extents may show that zeroes change nothing. Ones that must be
    /// durable are written.
    fn is_to_look(&self) -> bool {
        let Request { op, flags, offset, .. } = self.request;
        op == Op::WriteZeroes
            && !flags.contains(Flags::FUA)
            && offset >= self.looked_until
            && self.settled == [0; 4]
            && !self.snap.is_merging()
    }

    /// Skips zeroes over whole chunks without exceptions that read as zeroes, as a read would find
    /// them: the extents count if there is still no exception afterwards. Then they are the
    /// snapshot's, and this request has taken effect. The origin was flushed when the snapshot was
    /// taken.
    fn look(mut self) {
        let (snap, chunk) = (Arc::clone(&self.snap), self.snap.chunk());
        let (at, end) = (self.request.offset, self.request.offset + self.request.len);
        let state = snap.state();
        let (place, chunks) = snap.exceptions.run(at / chunk, end.div_ceil(chunk));
        let run_end = ((at / chunk + chunks) * chunk).min(end);
        self.looked_until = run_end;
        if place.is_none() {
            let (zeroes_until, looked_until) = snap.core.leading_zeroes(at, run_end);
            let whole = if zeroes_until == end { end } else { zeroes_until - zeroes_until % chunk };
            let holds = if whole > at { snap.holds(at, whole - at, state) } else { Ok(true) };
            self.looked_until = match holds {
                // The run ends before the new exception now.
                Ok(false) => at,
                _ => looked_until.next_multiple_of(chunk).min(run_end),
            };
            if holds == Ok(true) && whole > at && !self.skip(whole - at) {
                return self.complete(Ok(()));
            }
        }
        snap.core.work_queue.push(move || self.go(Ok(())));
    }

    /// Skips what a discard does not touch. False: nothing is left.
    fn skip_unowned(&mut self) -> bool {
        let chunk = self.snap.chunk();
        loop {
            let end = self.request.offset + self.request.len;
            let (place, chunks) = self.snap.exceptions.run(self.request.offset / chunk, end.div_ceil(chunk));
            if place.is_some() || self.settled != [0; 4] {
                return true;
            }
            let next = (self.request.offset / chunk + chunks) * chunk;
            if !self.skip(next.min(end) - self.request.offset) {
                return false;
            }
        }
    }

    /// One round. `None`: the job goes on elsewhere.
    fn round(self) -> Option<(Self, Result<()>)> {
        let snap = Arc::clone(&self.snap);
        let gather = Gather::new();
        let mut actions = Vec::new();
        let mut this = Some(self);
        // The origin may have grown since the snapshot began.
        let origin = snap.core.device.geometry().size;
        let planned = snap.gate.enter(|mode| {
            let Some(mode) = mode else {
                let job = this.take();
                snap.gate.hold(move || job.into_iter().for_each(|job| job.go(Ok(()))));
                return Planned::Held;
            };
            match (&mut this, mode) {
                (Some(job), Mode::Normal) => job.plan(origin, &gather, &mut actions),
                (Some(job), Mode::Merging) => job.plan_merging(&gather, &mut actions),
                (None, _) => Planned::Held,
            }
        });
        let mut job = this?;
        // Held while this waits, it would keep another copy from beginning.
        job.permit = None;
        for action in actions {
            job.act(action, &gather);
        }
        match planned {
            Planned::Go | Planned::Held => gather.leave(job),
            // Answered only when all that was begun has ended: it must not overtake what the user
            // writes after the answer.
            Planned::Failed(error) => {
                gather.waiter().arrived(Err(error));
                gather.leave(job)
            }
            Planned::NoSpace => {
                snap.overflows();
                gather.waiter().arrived(Err(Error::NoSpace));
                gather.leave(job)
            }
            Planned::Throttled => {
                snap.queue(move |permit| {
                    job.permit = Some(permit);
                    job.go(Ok(()));
                });
                None
            }
        }
    }

    fn plan(&mut self, origin: u64, gather: &Arc<Gather<Self>>, actions: &mut Vec<Action>) -> Planned {
        let snap = Arc::clone(&self.snap);
        let (chunk, op) = (snap.chunk(), self.request.op);
        let mut asked = false;
        for piece in self.pieces() {
            if self.is_settled(piece) {
                continue;
            }
            let from = piece.offset - self.request.offset;
            // The origin's last chunk is whole where it is covered to the end of the origin.
            let whole = piece.offset == piece.chunk * chunk
                && piece.offset + piece.len == ((piece.chunk + 1) * chunk).min(origin);
            let seen = snap.exceptions.get(piece.chunk);
            if let Some(place) = seen.chunk() {
                let op = if op == Op::Discard && whole { Op::WriteZeroes } else { op };
                snap.to_cow(actions, op, place * chunk + piece.offset % chunk, from, piece.len);
                self.settle(piece);
                asked = true;
                continue;
            }
            if op == Op::Discard {
                self.settle(piece);
                continue;
            }
            match snap.ask(piece.chunk, seen, || gather.waiter(), &mut self.permit) {
                Asked::Complete => {}
                Asked::Joined => asked = true,
                Asked::Begun(begun) if whole => {
                    actions.push(Action::Whole { begun, from, len: piece.len });
                    self.settle(piece);
                    asked = true;
                }
                Asked::Begun(begun) => {
                    actions.push(Action::Copy(begun));
                    asked = true;
                }
                Asked::Throttled if asked => break,
                Asked::Throttled => return Planned::Throttled,
                Asked::Full => return Planned::NoSpace,
                Asked::Lost => return Planned::Failed(Error::Media),
                Asked::NoMemory => return Planned::Failed(Error::NoMemory),
            }
        }
        Planned::Go
    }

    fn plan_merging(&mut self, gather: &Arc<Gather<Self>>, actions: &mut Vec<Action>) -> Planned {
        let snap = Arc::clone(&self.snap);
        let (chunk, op) = (snap.chunk(), self.request.op);
        for piece in self.pieces() {
            if self.is_settled(piece) {
                continue;
            }
            let from = piece.offset - self.request.offset;
            // The kernel swallows discards here as well.
            if op == Op::Discard {
                self.settle(piece);
                continue;
            }
            let locked = snap.exceptions.lock_present(piece.chunk);
            match locked.as_ref().map_or(Exception::None, Locked::now) {
                Exception::At(place) => {
                    snap.merge.track(piece.chunk);
                    snap.gate.begin();
                    let at = place * chunk + piece.offset % chunk;
                    let tracked = Some(piece.chunk);
                    actions.push(Action::Cow { op, at, from, len: piece.len, tracked });
                }
                Exception::Merging(_) => {
                    snap.wait_for_run(gather.waiter());
                    continue;
                }
                // Nothing is pending: the merge began when nothing was.
                Exception::None | Exception::Pending => match actions.last_mut() {
                    Some(Action::Origin { from: start, len }) if *start + *len == from => *len += piece.len,
                    _ => actions.push(Action::Origin { from, len: piece.len }),
                },
            }
            self.settle(piece);
        }
        Planned::Go
    }

    fn data(&self, from: u64, len: u64) -> Option<&[u8]> {
        let from = self.from + from as usize;
        if self.request.op == Op::Write { self.buffer.get(from..from + len as usize) } else { None }
    }

    fn act(&mut self, action: Action, gather: &Arc<Gather<Self>>) {
        let Request { op, flags, offset, .. } = self.request;
        match action {
            Action::Copy(begun) => begun.copy(),
            Action::Whole { begun, from, len } => {
                if let Err(error) = begun.write(op, flags, len, self.data(from, len)) {
                    gather.waiter().arrived(Err(error));
                }
            }
            Action::Cow { op, at, from, len, tracked } => {
                let (snap, waiter) = (Arc::clone(&self.snap), gather.waiter());
                let (mut flags, is_merging) = (flags, tracked.is_some());
                if op == Op::WriteZeroes && self.request.op == Op::Discard {
                    flags |= Flags::MAY_FREE;
                }
                // Users of an origin without a cache do not flush, so what goes to the COW device
                // in its stead must be durable.
                if is_merging && !snap.core.device.geometry().volatile_cache {
                    flags |= Flags::FUA;
                }
                let then = move |outcome| {
                    if let Some(chunk) = tracked {
                        snap.merge.untrack(chunk);
                    }
                    snap.gate.end();
                    waiter.arrived(outcome);
                };
                // Requests to the snapshot itself fit the COW device's blocks.
                let snap = &self.snap;
                let device = if is_merging { &*snap.cow } else { &**snap.store.device() };
                let data = self.data(from, len);
                match try_put(device, Request { op, flags, offset: at, len }, data) {
                    Put::Done(outcome) => then(outcome),
                    Put::Rest(request, from) => {
                        put(device, request, data.map(|data| &data[from..]), then);
                    }
                }
            }
            Action::Origin { from, len } => {
                let waiter = gather.waiter();
                let buffer = self.data(from, len).map_or(Ok(IoBuf::empty()), IoBuf::copy_of);
                match buffer {
                    Ok(buffer) => {
                        let done = Completion::new(move |outcome, _| waiter.arrived(outcome));
                        let request = Request { op, flags, offset: offset + from, len };
                        OriginWrite::past_merge(&self.snap, request, buffer, done).go(Ok(()));
                    }
                    Err(error) => waiter.arrived(Err(error)),
                }
            }
        }
    }
}

impl Snap {
    /// Adds a write to the COW device, to the one before where it goes on there.
    fn to_cow(&self, actions: &mut Vec<Action>, op: Op, at: u64, from: u64, len: u64) {
        if let Some(Action::Cow { op: last, at: start, from: first, len: bytes, tracked: None }) =
            actions.last_mut()
            && (*last, *start + *bytes, *first + *bytes) == (op, at, from)
        {
            *bytes += len;
            return;
        }
        self.gate.begin();
        actions.push(Action::Cow { op, at, from, len, tracked: None });
    }

    /// A write waits for the end of the run that its chunk is marked for. The chunk's slot is
    /// locked.
    fn wait_for_run(self: &Arc<Self>, waiter: Waiter) {
        if !self.merge.hold(waiter) {
            return;
        }
        // A run failed, and the store could not write its exceptions back. It tries again.
        let snap = Arc::clone(self);
        self.store.put_back(move |outcome| {
            let torn = snap.merge.torn();
            if outcome.is_ok() {
                torn.clone().into_iter().flatten().for_each(|chunk| snap.exceptions.mark(chunk, false));
            }
            snap.merge.end_run(torn.filter(|_| outcome.is_err()), outcome);
        });
    }
}
