//! Writes, write zeroes and discards of an origin.
//!
//! A write checks every snapshot, those with the largest chunks first. If all of its chunks have
//! complete exceptions, the write proceeds. Otherwise it requests all missing exceptions together,
//! waits for them, and checks again. A snapshot without space on its COW device is invalidated: a
//! write to the origin never fails because of a snapshot.
//!
//! A snapshot that is being merged executes the write instead
//! ([`OriginState::write_merging`](crate::cow::state::OriginState)). Writes of the merging snapshot to
//! the origin also use this module and are not redirected again.
//!
//! A discard or write zeroes with missing exceptions first queries the origin's extents. If the
//! origin reads as zeroes already, the request needs no exceptions: see
//! [`OriginWrite::check_extents`].
//!
//! # Protocol
//! * A gate protects the list of snapshots. A write without missing exceptions is counted at the
//!   gate before its thread is unpinned, until the device has completed the write. The device is
//!   called unpinned. A snapshot is attached while the gate is closed, so each write is completely
//!   before or completely after the attachment.
//! * Writes that wait for exceptions are not counted, because they check the list again.

mod tried;

use std::sync::Arc;

use super::copy::{RequestResult, StartedException};
use crate::cow::exceptions::Exception;
use crate::cow::state::loss::Loss;
use crate::cow::state::permits::Permit;
use crate::cow::state::wait_group::{Continuation, WaitGroup};
use crate::cow::state::{OriginCore, Snap, View, counter};
use freestone_core::device::{Completion, Error, IoBuf, Op, Request, Result};
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::plug::Plug;
use freestone_core::work_queue::WorkQueue;
use tried::safe_bytes;

pub(in crate::cow) use tried::{try_write, without_snapshots};

/// Maximum number of exceptions requested in one round of a write.
const ROUND_EXCEPTIONS: usize = 256;
/// Maximum number of rounds on the submitting thread; later rounds run on the origin's work queue.
const ROUNDS_INLINE: u32 = 3;
/// Maximum number of chunks checked per tried request, and per step of a request without data.
const STEP_CHUNKS: u64 = 1024;

/// Write, write zeroes or discard in progress.
pub(in crate::cow) struct OriginWrite {
    core: Arc<OriginCore>,
    request: Request,
    buffer: IoBuf,
    done: Completion,
    /// Number of bytes at the start of the current step without missing exceptions, in the view
    /// numbered `generation`.
    safe: u64,
    /// Offset up to which the origin's extents were queried: before it the origin has data or
    /// cannot report extents.
    extents_checked_until: u64,
    generation: u64,
    permit: Option<Permit>,
    rounds: u32,
    /// Boot number of the first view that the request saw.
    boot: Option<u64>,
    waited: bool,
    kind: Kind,
    /// Merging snapshot that sent this request. The request is not redirected to this snapshot
    /// again.
    from_snapshot: Option<Arc<Snap>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// The request of a user or of a merging snapshot.
    Data,
    /// The request only makes exceptions, without a write.
    Preserve,
}

enum RoundPlan {
    Send,
    Wait,
    /// Query the origin's extents from this offset on. The request is already counted at the gate.
    CheckExtents(u64),
    Throttled(Arc<Snap>),
    Merging(Arc<Snap>),
    Held,
    /// The simulated power was lost since the request was submitted.
    Gone,
}

impl OriginWrite {
    /// Creates a write request. The caller must have checked the range.
    pub fn new(core: Arc<OriginCore>, request: Request, buffer: IoBuf, done: Completion) -> Self {
        Self {
            core,
            request,
            buffer,
            done,
            safe: 0,
            extents_checked_until: 0,
            generation: 0,
            permit: None,
            rounds: 0,
            boot: None,
            waited: false,
            kind: Kind::Data,
            from_snapshot: None,
        }
    }

    /// Creates a write that a merging snapshot sends to the origin. If this merge finishes and
    /// another snapshot starts to merge, the write is redirected to the other snapshot.
    pub fn from_merging_snapshot(
        snap: &Arc<Snap>,
        request: Request,
        buffer: IoBuf,
        done: Completion,
    ) -> Self {
        let core = Arc::clone(&snap.core);
        Self { from_snapshot: Some(Arc::clone(snap)), ..Self::new(core, request, buffer, done) }
    }

    /// Creates a request that makes the exceptions for a range in all snapshots, without writing
    /// the origin.
    pub fn preserve(core: Arc<OriginCore>, offset: u64, len: u64, done: Completion) -> Self {
        let request = Request::new(Op::Discard, offset, len);
        Self { kind: Kind::Preserve, ..Self::new(core, request, IoBuf::empty(), done) }
    }

    /// Returns the next part of the request. A request with data has only one part.
    fn step(&self, view: &View) -> Request {
        let chunk = view.snapshots.iter().map(|snap| snap.chunk()).min();
        match chunk {
            Some(chunk) if self.request.op != Op::Write => {
                let mut next = (self.request.offset / chunk + STEP_CHUNKS) * chunk;
                if self.extents_checked_until > self.request.offset {
                    next = next.min(self.extents_checked_until);
                }
                Request { len: self.request.len.min(next - self.request.offset), ..self.request }
            }
            _ => self.request,
        }
    }
}

impl Continuation for OriginWrite {
    fn work_queue(&self) -> &Arc<WorkQueue> {
        &self.core.work_queue
    }

    fn resume(mut self, _: Result<()>) {
        self.rounds = 0;
        // Errors of awaited events are ignored, because the next check finds a failed snapshot.
        while self.rounds < ROUNDS_INLINE {
            self.rounds += 1;
            let Some(job) = self.round() else { return };
            self = job;
        }
        let work_queue = Arc::clone(&self.core.work_queue);
        work_queue.push(move || self.resume(Ok(())));
    }
}

impl OriginWrite {
    /// Runs one round of a write. Returns the write for another round, or `None` if the request is
    /// complete or continues elsewhere.
    fn round(self) -> Option<Self> {
        let core = Arc::clone(&self.core);
        let group = WaitGroup::new();
        let (mut started, mut failed_snapshots) = (Vec::new(), Vec::new());
        let mut step = self.request;
        let mut this = Some(self);
        let plan = core.gate.enter(|view| {
            let (Some(view), Some(job)) = (view, &mut this) else {
                let job = this.take();
                core.gate.hold(move || job.into_iter().for_each(|job| job.resume(Ok(()))));
                return RoundPlan::Held;
            };
            if job.is_after_power_loss(view) {
                return RoundPlan::Gone;
            }
            if let (Some(snap), Kind::Data) = (&view.merging, job.kind)
                && !job.from_snapshot.as_ref().is_some_and(|from_snapshot| snap.is_same(from_snapshot))
            {
                return RoundPlan::Merging(Arc::clone(snap));
            }
            step = job.step(view);
            if let Some(from) = job.extents_check_start(view, &step) {
                core.gate.begin();
                if from > step.offset && job.kind == Kind::Data {
                    core.content_version.mark_written();
                }
                return RoundPlan::CheckExtents(from);
            }
            let plan = job.plan(view, &step, &group, &mut started, &mut failed_snapshots);
            if matches!(plan, RoundPlan::Send) {
                core.gate.begin();
                if job.kind != Kind::Preserve {
                    core.content_version.mark_written();
                }
            }
            plan
        });
        let mut job = this?;
        // The permit is released, because a permit held while waiting would block another copy.
        job.permit = None;
        let plug = Plug::start();
        started.into_iter().for_each(StartedException::copy);
        drop(plug);
        for (snap, loss) in failed_snapshots {
            snap.invalidate(loss, Some(group.waiter()));
        }
        match plan {
            RoundPlan::Held => None,
            RoundPlan::Gone => {
                job.done.complete(Err(Error::Gone), job.buffer);
                None
            }
            RoundPlan::Merging(snap) => job.redirect(snap),
            RoundPlan::Throttled(snap) => {
                snap.queue_for_permit(move |permit| {
                    job.permit = Some(permit);
                    job.resume(Ok(()));
                });
                None
            }
            RoundPlan::Send => job.send(step),
            RoundPlan::CheckExtents(from) => {
                core.extents_queue.push(move || job.check_extents(from));
                None
            }
            RoundPlan::Wait => group.arm(job).map(|(job, _)| job),
        }
    }

    /// Returns true if the simulated power was lost since the request, or the snapshot that sent
    /// the request, started.
    fn is_after_power_loss(&mut self, view: &View) -> bool {
        *self.boot.get_or_insert(view.boot) != view.boot
            || self.from_snapshot.as_ref().is_some_and(|from_snapshot| from_snapshot.is_powered_off())
    }

    /// Passes the write to the merging snapshot, up to the snapshot's end. If the origin has grown
    /// beyond this end, returns or continues the rest of the write.
    fn redirect(mut self, snap: Arc<Snap>) -> Option<Self> {
        // The buffer may have any content then. The snapshot would keep it, so it keeps zeroes, as which the
        // device reads.
        if self.core.device.geometry().ignores_data {
            self.buffer.fill(0);
        }
        let write = self.core.write_merging;
        let head = snap.size.saturating_sub(self.request.offset).min(self.request.len);
        if head == self.request.len {
            write(snap, self.request, self.buffer, self.done);
            return None;
        }
        self.from_snapshot = Some(Arc::clone(&snap));
        if head == 0 {
            return Some(self);
        }
        let request = Request { len: head, ..self.request };
        let cut = self.buffer.len().min(head as usize);
        let halves = IoBuf::copy_of(&self.buffer[..cut])
            .and_then(|first| Ok((first, IoBuf::copy_of(&self.buffer[cut..])?)));
        let (first, second) = match halves {
            Ok(halves) => halves,
            Err(error) => {
                self.done.complete(Err(error), self.buffer);
                return None;
            }
        };
        self.buffer = second;
        self.request = self.request.rest(head);
        let then = Completion::new(move |outcome: Result<()>, _| match outcome {
            Ok(()) => {
                let work_queue = Arc::clone(&self.core.work_queue);
                work_queue.push(move || self.resume(Ok(())));
            }
            Err(error) => self.done.complete(Err(error), self.buffer),
        });
        write(snap, request, first, then);
        None
    }

    /// Returns the first offset in a step without data that lacks an exception and whose extents
    /// were not queried. Returns `None` for a write with data, or if no query is needed.
    fn extents_check_start(&self, view: &View, step: &Request) -> Option<u64> {
        // A snapshot may be invalid in memory only. After a crash its merge would resume and undo
        // this request. So the request must wait in `plan` until the COW device is marked invalid.
        let waits_for_loss = |snap: &PerCpuArc<Snap>| snap.is_active() && snap.is_invalid();
        if step.op == Op::Write || view.snapshots.iter().any(waits_for_loss) {
            return None;
        }
        let from = step.offset + safe_bytes(view, step);
        (from < step.offset + step.len && from >= self.extents_checked_until).then_some(from)
    }

    /// Queries the origin's extents from offset `from` on, and sends the part of the request up to
    /// the end of the zeroes found at `from`. The bytes before `from` have their exceptions. The
    /// rest of the request continues like other writes.
    ///
    /// Discarding or zeroing a range of zeroes does not change the content of any snapshot, so it
    /// needs no exceptions. No lock is held. The request was counted at the gate before the query,
    /// so its view of the snapshots stays complete until the device has completed the request.
    /// * The extents include every write that completed before this request was submitted.
    /// * A write that starts between the query and the completion has made its exceptions before.
    ///   Both requests overlap, so the device may run them in either order.
    /// * A copy for such a write reads zeroes, whether it runs before or after this request.
    fn check_extents(mut self, from: u64) {
        let end = self.request.offset + self.request.len;
        let (zeroes_until, extents_checked_until) = self.core.leading_zeroes(from, end);
        self.extents_checked_until = extents_checked_until;
        let (core, request) = (Arc::clone(&self.core), self.request);
        // A simulated power loss does not wait for a disk that hangs, so it may have happened
        // during the query.
        if core.gate.enter_any(|view| self.is_after_power_loss(view)) {
            core.gate.end();
            self.done.complete(Err(Error::Gone), self.buffer);
        } else if zeroes_until > from {
            // The completion continues with the rest. A request that only makes exceptions skips
            // the zeroes: the merge makes these exceptions if it later writes over the zeroes.
            if let Some(job) = self.send(Request { len: zeroes_until - request.offset, ..request }) {
                core.work_queue.push(move || job.resume(Ok(())));
            }
        } else {
            core.gate.end();
            core.work_queue.push(move || self.resume(Ok(())));
        }
    }

    /// Requests the missing exceptions of a step, and returns how the round continues.
    fn plan(
        &mut self,
        view: &View,
        step: &Request,
        group: &Arc<WaitGroup<Self>>,
        started: &mut Vec<StartedException>,
        failed_snapshots: &mut Vec<(Arc<Snap>, Loss)>,
    ) -> RoundPlan {
        if self.generation != view.generation {
            (self.generation, self.safe) = (view.generation, 0);
        }
        let (from, end) = (step.offset + self.safe, step.offset + step.len);
        // Number of events that the wait group waits for.
        let mut awaited = 0;
        let mut safe = end;
        for snap in view.snapshots.iter().filter(|snap| snap.is_active()) {
            let chunk = snap.chunk();
            let before = awaited;
            for number in from / chunk..end.min(snap.size).div_ceil(chunk) {
                // A complete exception of an invalid snapshot is not enough. The COW device of the
                // snapshot may have the mark of a merge. After a crash the resumed merge would
                // overwrite this write with the exception.
                let seen = snap.exceptions.get(number);
                if matches!(seen, Exception::Complete(_)) && !snap.is_invalid() {
                    continue;
                }
                safe = safe.min((number * chunk).max(from));
                if awaited >= ROUND_EXCEPTIONS {
                    break;
                }
                if snap.is_invalid() {
                    // The COW device must be marked invalid before the origin is written.
                    snap.wait_for_loss(group.waiter());
                    awaited += 1;
                    break;
                }
                match snap.request_exception(number, seen, || group.waiter(), &mut self.permit) {
                    RequestResult::Complete => {}
                    RequestResult::Joined => awaited += 1,
                    RequestResult::Started(one) => {
                        started.push(one);
                        awaited += 1;
                    }
                    RequestResult::Lost => {
                        snap.wait_for_loss(group.waiter());
                        awaited += 1;
                        break;
                    }
                    RequestResult::Full => {
                        snap.mark_invalid();
                        failed_snapshots.push((Arc::clone(snap), Loss::NoRoom));
                        break;
                    }
                    RequestResult::NoMemory => {
                        snap.mark_invalid();
                        failed_snapshots.push((Arc::clone(snap), Loss::NoMemory));
                        break;
                    }
                    RequestResult::Throttled if awaited == 0 && failed_snapshots.is_empty() => {
                        return RoundPlan::Throttled(Arc::clone(snap));
                    }
                    RequestResult::Throttled => break,
                }
            }
            if awaited > before && !self.waited {
                snap.counters.add(counter::ORIGIN_WAITED, 1);
                self.waited = true;
            }
        }
        self.safe = safe - step.offset;
        if awaited == 0 && failed_snapshots.is_empty() { RoundPlan::Send } else { RoundPlan::Wait }
    }

    /// Sends a step without missing exceptions to the device. The step is counted at the gate.
    /// Returns the request if the caller must continue with the next step.
    fn send(mut self, step: Request) -> Option<Self> {
        let core = Arc::clone(&self.core);
        if self.kind == Kind::Preserve {
            core.gate.end();
            if step.len == self.request.len {
                self.done.complete(Ok(()), self.buffer);
                return None;
            }
            self.request = self.request.rest(step.len);
            self.safe = 0;
            return Some(self);
        }
        let device = Arc::clone(&core.device);
        let buffer = std::mem::replace(&mut self.buffer, IoBuf::empty());
        let done = Completion::new(move |outcome: Result<()>, buffer| {
            core.gate.end();
            if outcome.is_err() || step.len == self.request.len {
                return self.done.complete(outcome, buffer);
            }
            // Only requests without data have several steps.
            self.request = self.request.rest(step.len);
            self.safe = 0;
            let work_queue = Arc::clone(&core.work_queue);
            work_queue.push(move || self.resume(Ok(())));
        });
        device.submit(step, buffer, done);
        None
    }
}
