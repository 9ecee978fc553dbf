//! Rounds of a write: each round plans the I/O for the chunks of the window while the thread is
//! pinned, and starts the I/O afterwards.

use std::sync::Arc;

use super::Write;
use crate::cow::exceptions::{Exception, LockedChunk};
use crate::cow::requests::copy::{RequestResult, StartedException};
use crate::cow::requests::origin_write::OriginWrite;
use crate::cow::state::wait_group::{Continuation as _, WaitGroup, Waiter};
use crate::cow::state::{Mode, Snap};
use freestone_core::device::{Completion, Error, Flags, IoBuf, Op, Request, Result};
use freestone_core::handoff::{PutResult, put, try_put};

/// I/O to start after the thread is unpinned. Offsets are in bytes; `from` is relative to the start
/// of the request.
enum Action {
    /// Write to the COW device, counted at the gate. During a merge `tracked` is the chunk for
    /// which the write is counted.
    Cow { op: Op, at: u64, from: u64, len: u64, tracked: Option<u64> },
    /// Write to the origin, for a chunk without an exception during a merge.
    Origin { from: u64, len: u64 },
    /// Copy a chunk from the origin to make its exception.
    Copy(StartedException),
    /// Write a whole chunk of data as its exception, without a copy.
    Whole { started: StartedException, from: u64, len: u64 },
}

enum RoundPlan {
    Go,
    Throttled,
    NoSpace,
    Failed(Error),
    Held,
}

impl Write {
    /// Runs one round of a write. Returns the write and its present outcome, or `None` if the write
    /// continues elsewhere.
    pub(super) fn round(self) -> Option<(Self, Result<()>)> {
        let snap = Arc::clone(&self.snap);
        let group = WaitGroup::new();
        let mut actions = Vec::new();
        let mut this = Some(self);
        // The origin may have grown since the snapshot was taken.
        let origin = snap.core.device.geometry().size;
        let plan = snap.gate.enter(|mode| {
            let Some(mode) = mode else {
                let job = this.take();
                snap.gate.hold(move || job.into_iter().for_each(|job| job.resume(Ok(()))));
                return RoundPlan::Held;
            };
            match (&mut this, mode) {
                (Some(job), Mode::Normal) => job.plan(origin, &group, &mut actions),
                (Some(job), Mode::Merging) => job.plan_merging(&group, &mut actions),
                (None, _) => RoundPlan::Held,
            }
        });
        let mut job = this?;
        // The permit is released, because a permit held while waiting would block another copy.
        job.permit = None;
        for action in actions {
            job.run_action(action, &group);
        }
        match plan {
            RoundPlan::Go | RoundPlan::Held => group.arm(job),
            // The write completes only after all I/O that it started has ended. Otherwise this I/O
            // could overwrite the user's next write.
            RoundPlan::Failed(error) => {
                group.waiter().notify(Err(error));
                group.arm(job)
            }
            RoundPlan::NoSpace => {
                snap.handle_overflow();
                group.waiter().notify(Err(Error::NoSpace));
                group.arm(job)
            }
            RoundPlan::Throttled => {
                snap.queue_for_permit(move |permit| {
                    job.permit = Some(permit);
                    job.resume(Ok(()));
                });
                None
            }
        }
    }

    fn plan(&mut self, origin: u64, group: &Arc<WaitGroup<Self>>, actions: &mut Vec<Action>) -> RoundPlan {
        let snap = Arc::clone(&self.snap);
        let (chunk, op) = (snap.chunk(), self.request.op);
        let mut has_started = false;
        for piece in self.pieces() {
            if self.is_handled(piece) {
                continue;
            }
            let from = piece.offset - self.request.offset;
            // The write covers the origin's last chunk completely if it reaches the origin's end.
            let whole = piece.offset == piece.chunk * chunk
                && piece.offset + piece.len == ((piece.chunk + 1) * chunk).min(origin);
            let seen = snap.exceptions.get(piece.chunk);
            if let Some(cow_chunk) = seen.chunk() {
                let op = if op == Op::Discard && whole { Op::WriteZeroes } else { op };
                snap.push_cow_write(actions, op, cow_chunk * chunk + piece.offset % chunk, from, piece.len);
                self.set_handled(piece);
                has_started = true;
                continue;
            }
            if op == Op::Discard {
                self.set_handled(piece);
                continue;
            }
            match snap.request_exception(piece.chunk, seen, || group.waiter(), &mut self.permit) {
                RequestResult::Complete => {}
                RequestResult::Joined => has_started = true,
                RequestResult::Started(started) if whole => {
                    actions.push(Action::Whole { started, from, len: piece.len });
                    self.set_handled(piece);
                    has_started = true;
                }
                RequestResult::Started(started) => {
                    actions.push(Action::Copy(started));
                    has_started = true;
                }
                RequestResult::Throttled if has_started => break,
                RequestResult::Throttled => return RoundPlan::Throttled,
                RequestResult::Full => return RoundPlan::NoSpace,
                RequestResult::Lost => return RoundPlan::Failed(Error::Media),
                RequestResult::NoMemory => return RoundPlan::Failed(Error::NoMemory),
            }
        }
        RoundPlan::Go
    }

    fn plan_merging(&mut self, group: &Arc<WaitGroup<Self>>, actions: &mut Vec<Action>) -> RoundPlan {
        let snap = Arc::clone(&self.snap);
        let (chunk, op) = (snap.chunk(), self.request.op);
        for piece in self.pieces() {
            if self.is_handled(piece) {
                continue;
            }
            let from = piece.offset - self.request.offset;
            // The kernel ignores discards during a merge, too.
            if op == Op::Discard {
                self.set_handled(piece);
                continue;
            }
            let locked = snap.exceptions.lock_present(piece.chunk);
            match locked.as_ref().map_or(Exception::None, LockedChunk::state) {
                Exception::Complete(cow_chunk) => {
                    snap.merge.begin_cow_write(piece.chunk);
                    snap.gate.begin();
                    let at = cow_chunk * chunk + piece.offset % chunk;
                    let tracked = Some(piece.chunk);
                    actions.push(Action::Cow { op, at, from, len: piece.len, tracked });
                }
                Exception::Merging(_) => {
                    snap.wait_for_run(group.waiter());
                    continue;
                }
                // No exception is pending during a merge, because it starts only when all have
                // ended.
                Exception::None | Exception::Pending => match actions.last_mut() {
                    Some(Action::Origin { from: start, len }) if *start + *len == from => *len += piece.len,
                    _ => actions.push(Action::Origin { from, len: piece.len }),
                },
            }
            self.set_handled(piece);
        }
        RoundPlan::Go
    }

    fn data(&self, from: u64, len: u64) -> Option<&[u8]> {
        let from = self.from + from as usize;
        if self.request.op == Op::Write { self.buffer.get(from..from + len as usize) } else { None }
    }

    fn run_action(&mut self, action: Action, group: &Arc<WaitGroup<Self>>) {
        let Request { op, flags, offset, .. } = self.request;
        match action {
            Action::Copy(started) => started.copy(),
            Action::Whole { started, from, len } => {
                if let Err(error) = started.write(op, flags, len, self.data(from, len)) {
                    group.waiter().notify(Err(error));
                }
            }
            Action::Cow { op, at, from, len, tracked } => {
                let (snap, waiter) = (Arc::clone(&self.snap), group.waiter());
                let (mut flags, is_merging) = (flags, tracked.is_some());
                if op == Op::WriteZeroes && self.request.op == Op::Discard {
                    flags |= Flags::MAY_FREE;
                }
                // Users of an origin without a volatile cache do not flush, so a write to the COW
                // device instead of the origin must be durable.
                if is_merging && !snap.core.device.geometry().volatile_cache {
                    flags |= Flags::FUA;
                }
                let then = move |outcome| {
                    if let Some(chunk) = tracked {
                        snap.merge.end_cow_write(chunk);
                    }
                    snap.gate.end();
                    waiter.notify(outcome);
                };
                // Requests can be smaller than the COW device's blocks only during a merge, when
                // the snapshot serves the origin.
                let snap = &self.snap;
                let device = if is_merging { &*snap.cow } else { &**snap.store.device() };
                let data = self.data(from, len);
                match try_put(device, Request { op, flags, offset: at, len }, data) {
                    PutResult::Done(outcome) => then(outcome),
                    PutResult::Rest(request, from) => {
                        put(device, request, data.map(|data| &data[from..]), then);
                    }
                }
            }
            Action::Origin { from, len } => {
                let waiter = group.waiter();
                let buffer = self.data(from, len).map_or(Ok(IoBuf::empty()), IoBuf::copy_of);
                match buffer {
                    Ok(buffer) => {
                        let done = Completion::new(move |outcome, _| waiter.notify(outcome));
                        let request = Request { op, flags, offset: offset + from, len };
                        OriginWrite::from_merging_snapshot(&self.snap, request, buffer, done).resume(Ok(()));
                    }
                    Err(error) => waiter.notify(Err(error)),
                }
            }
        }
    }
}

impl Snap {
    /// Adds a write to the COW device to `actions`, or extends the last write if both are
    /// contiguous.
    fn push_cow_write(&self, actions: &mut Vec<Action>, op: Op, at: u64, from: u64, len: u64) {
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

    /// Makes a write wait until the run that contains its chunk is merged. The caller holds the
    /// chunk's slot lock.
    fn wait_for_run(self: &Arc<Self>, waiter: Waiter) {
        if !self.merge.hold_write(waiter) {
            return;
        }
        // The merge of the run has failed, and its exceptions were not restored on disk. The store
        // tries to restore them again.
        let snap = Arc::clone(self);
        self.store.restore_entries(move |outcome| {
            let torn = snap.merge.torn();
            if outcome.is_ok() {
                torn.clone()
                    .into_iter()
                    .flatten()
                    .for_each(|chunk| snap.exceptions.set_merging(chunk, false));
            }
            snap.merge.end_run(torn.filter(|_| outcome.is_err()), outcome);
        });
    }
}
