//! Writes, write zeroes and discards of an origin.
//!
//! A write checks every snapshot, those with the largest chunks first. If all of its chunks have
//! complete exceptions, the write proceeds. Otherwise it requests all missing exceptions together,
//! waits for them, and checks again. A snapshot without room is invalidated: a write to the origin
//! never fails because of a snapshot.
//!
//! A snapshot that is being merged takes over the write
//! ([`OriginState::write_merging`](super::state::OriginState)). Its own writes to the origin come
//! back here and are not redirected again.
//!
//! A discard or write zeroes with missing exceptions first queries the origin's extents. If the
//! origin reads as zeroes already, the request needs no exceptions: see
//! [`OriginWrite::check_extents`].
//!
//! # Protocol
//! * A gate protects the list of snapshots. A write without missing exceptions is counted at the
//!   gate before its thread is unpinned, until the device has completed the write. The device is
//!   called unpinned. A snapshot is attached while the gate is closed, so each write comes wholly
//!   before or after it.
//! * Writes that wait for exceptions are not counted: they check the list again.

use std::sync::Arc;

use super::copy::{RequestResult, StartedException};
use super::exceptions::Exception;
use super::loss::Loss;
use super::state::{OriginCore, Permit, Snap, View, counter};
use super::wait_group::{Continuation, WaitGroup};
use freestone_core::device::{Buffer, Completion, Error, IoBuf, Op, Request, Result, Tried};
use freestone_core::freeze_gate::UnderWay;
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::plug::Plug;
use freestone_core::work_queue::WorkQueue;

/// Maximum number of exceptions requested in one round of a write.
const ROUND_EXCEPTIONS: usize = 256;
/// Rounds on the submitting thread; later rounds run on the origin's work queue.
const ROUNDS_INLINE: u32 = 3;
/// Maximum number of chunks per try, and per step of a request without data.
const STEP_CHUNKS: u64 = 1024;

/// Write, write zeroes or discard in progress.
pub(super) struct OriginWrite {
    core: Arc<OriginCore>,
    request: Request,
    buffer: IoBuf,
    done: Completion,
    /// Bytes of the current step without missing exceptions, in the view of this generation.
    safe: u64,
    /// Byte up to which the origin's extents were queried: the origin has data there, or cannot
    /// report extents.
    extents_checked_until: u64,
    generation: u64,
    permit: Option<Permit>,
    rounds: u32,
    /// Boot number of the first view that the request saw.
    boot: Option<u64>,
    waited: bool,
    kind: Kind,
    /// Merging snapshot that sent this request; it is not redirected there again.
    from_snapshot: Option<Arc<Snap>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Request of a user or of a merging snapshot.
    Data,
    /// Makes exceptions only, without a write.
    Preserve,
}

enum RoundPlan {
    Send,
    Wait,
    /// Query the origin's extents from this byte on; the request is counted at the gate.
    CheckExtents(u64),
    Throttled(Arc<Snap>),
    Merging(Arc<Snap>),
    Held,
    /// The power was lost since the request came.
    Gone,
}

// ---- tried --------------------------------------------------------------------------------------

/// Counts a write if the origin has no snapshots. No snapshot is attached before the guard is
/// dropped.
pub(super) fn without_snapshots(core: &OriginCore) -> Option<UnderWay<'_, View>> {
    let without = core.gate.enter(|view| {
        let without = view.is_some_and(|view| view.snapshots.is_empty() && view.merging.is_none());
        if without {
            core.gate.begin();
            core.content_version.mark_written();
        }
        without
    });
    without.then(|| core.gate.under_way())
}

/// Writes as much as possible without new exceptions and without waiting. The caller checked the
/// range.
pub(super) fn try_write(core: &OriginCore, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
    let safe = core.gate.enter(|view| {
        let safe = match view {
            Some(view @ View { merging: None, .. }) => safe_bytes(view, request),
            // The gate is closed, or a snapshot is being merged.
            _ => 0,
        };
        if safe > 0 {
            core.gate.begin();
            core.content_version.mark_written();
        }
        safe
    });
    if safe == 0 {
        return Ok(Tried::WouldBlock);
    }
    // No snapshot is attached before the device has completed the write.
    let _under_way = core.gate.under_way();
    let buffer = match buffer {
        Buffer::Write(data) => Buffer::Write(data.get(..safe as usize).ok_or(Error::Misaligned)?),
        buffer => buffer,
    };
    match core.device.try_io(&Request { len: safe, ..*request }, buffer)? {
        Tried::Done if safe < request.len => Ok(Tried::Partly(safe)),
        tried => Ok(tried),
    }
}

/// Returns the number of bytes at the start of a request without missing exceptions.
fn safe_bytes(view: &View, request: &Request) -> u64 {
    let end = request.offset + request.len;
    let active = view.snapshots.iter().filter(|snap| snap.is_active());
    active.fold(end, |end, snap| complete_until(snap, request.offset, end)) - request.offset
}

/// Returns the end of the chunks from byte `at` on that have exceptions or need none, at most
/// `end`.
fn complete_until(snap: &Snap, at: u64, end: u64) -> u64 {
    if snap.is_invalid() && at < snap.size {
        return at;
    }
    let chunk = snap.chunk();
    let last = end.min(snap.size).div_ceil(chunk).min(at / chunk + STEP_CHUNKS);
    for number in at / chunk..last {
        if !matches!(snap.exceptions.get(number), Exception::At(_)) {
            return (number * chunk).clamp(at, end);
        }
    }
    if last * chunk >= snap.size { end } else { (last * chunk).clamp(at, end) }
}

// ---- submitted ----------------------------------------------------------------------------------

impl OriginWrite {
    /// Creates a write. The caller checked the range.
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

    /// Creates a write of a merging snapshot. If that merge finishes and another snapshot starts to
    /// merge, the write is redirected to the other one.
    pub fn from_merging_snapshot(
        snap: &Arc<Snap>,
        request: Request,
        buffer: IoBuf,
        done: Completion,
    ) -> Self {
        let core = Arc::clone(&snap.core);
        Self { from_snapshot: Some(Arc::clone(snap)), ..Self::new(core, request, buffer, done) }
    }

    /// Creates a request that makes the exceptions for a range, without writing.
    pub fn preserve(core: Arc<OriginCore>, offset: u64, len: u64, done: Completion) -> Self {
        let request = Request::new(Op::Discard, offset, len);
        Self { kind: Kind::Preserve, ..Self::new(core, request, IoBuf::empty(), done) }
    }

    /// Returns the next part of the request. A request with data has one part only.
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

    fn go(mut self, _: Result<()>) {
        self.rounds = 0;
        // Errors of awaited events are ignored: the next check finds a failed snapshot.
        while self.rounds < ROUNDS_INLINE {
            self.rounds += 1;
            let Some(job) = self.round() else { return };
            self = job;
        }
        let work_queue = Arc::clone(&self.core.work_queue);
        work_queue.push(move || self.go(Ok(())));
    }
}

impl OriginWrite {
    /// Runs one round. Returns `None` if the request is complete or continues elsewhere.
    fn round(self) -> Option<Self> {
        let core = Arc::clone(&self.core);
        let group = WaitGroup::new();
        let (mut started, mut failed_snapshots) = (Vec::new(), Vec::new());
        let mut step = self.request;
        let mut this = Some(self);
        let plan = core.gate.enter(|view| {
            let (Some(view), Some(job)) = (view, &mut this) else {
                let job = this.take();
                core.gate.hold(move || job.into_iter().for_each(|job| job.go(Ok(()))));
                return RoundPlan::Held;
            };
            if job.is_after_power_loss(view) {
                return RoundPlan::Gone;
            }
            if let (Some(snap), Kind::Data) = (&view.merging, job.kind)
                && !job.from_snapshot.as_ref().is_some_and(|from_snapshot| snap.is(from_snapshot))
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
        // A permit held while waiting would block another copy.
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
                    job.go(Ok(()));
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

    /// Returns true if the power was lost since the request, or the snapshot that sent it, started.
    fn is_after_power_loss(&mut self, view: &View) -> bool {
        *self.boot.get_or_insert(view.boot) != view.boot
            || self.from_snapshot.as_ref().is_some_and(|from_snapshot| from_snapshot.is_powered_off())
    }

    /// Passes the write to the merging snapshot, up to the snapshot's end. An origin that has grown
    /// is longer; the rest stays here.
    fn redirect(mut self, snap: Arc<Snap>) -> Option<Self> {
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
                work_queue.push(move || self.go(Ok(())));
            }
            Err(error) => self.done.complete(Err(error), self.buffer),
        });
        write(snap, request, first, then);
        None
    }

    /// Returns the first byte of a step without data that lacks an exception and whose extents were
    /// not queried.
    fn extents_check_start(&self, view: &View, step: &Request) -> Option<u64> {
        // A snapshot may be invalid in memory only. After a crash its merge would resume and undo
        // this request. So the request must wait for the mark in `plan`.
        let waits_for_loss = |snap: &PerCpuArc<Snap>| snap.is_active() && snap.is_invalid();
        if step.op == Op::Write || view.snapshots.iter().any(waits_for_loss) {
            return None;
        }
        let from = step.offset + safe_bytes(view, step);
        (from < step.offset + step.len && from >= self.extents_checked_until).then_some(from)
    }

    /// Queries the origin's extents from byte `from` on, and sends the request for the zeroes found
    /// there. The bytes before `from` have their exceptions. The rest of the request continues like
    /// other writes.
    ///
    /// Discarding or zeroing a range of zeroes changes nothing that a snapshot shows, so it needs
    /// no exceptions. No lock is held. The request was counted at the gate before the query, so its
    /// view of the snapshots stays complete until the device has completed the request.
    /// * The extents include every write that completed before this request came.
    /// * A write between the query and the completion made its exceptions before it started. Both
    ///   requests overlap, so the device may run them in either order.
    /// * A copy for such a write reads zeroes, before or after this request.
    fn check_extents(mut self, from: u64) {
        let end = self.request.offset + self.request.len;
        let (zeroes_until, extents_checked_until) = self.core.leading_zeroes(from, end);
        self.extents_checked_until = extents_checked_until;
        let (core, request) = (Arc::clone(&self.core), self.request);
        // A power loss does not wait for a disk that hangs.
        if core.gate.enter_any(|view| self.is_after_power_loss(view)) {
            core.gate.end();
            self.done.complete(Err(Error::Gone), self.buffer);
        } else if zeroes_until > from {
            // The completion continues with the rest. A merge preserves data when it writes over
            // zeroes.
            if let Some(job) = self.send(Request { len: zeroes_until - request.offset, ..request }) {
                core.work_queue.push(move || job.go(Ok(())));
            }
        } else {
            core.gate.end();
            core.work_queue.push(move || self.go(Ok(())));
        }
    }

    /// Requests the missing exceptions of a step.
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
        // Number of events that the wait group has.
        let mut awaited = 0;
        let mut safe = end;
        for snap in view.snapshots.iter().filter(|snap| snap.is_active()) {
            let chunk = snap.chunk();
            let before = awaited;
            for number in from / chunk..end.min(snap.size).div_ceil(chunk) {
                // An invalid snapshot counts even for complete exceptions. Its COW device may have
                // the mark of a merge. That merge, resumed after a crash, would overwrite this
                // write with the exception.
                let seen = snap.exceptions.get(number);
                if matches!(seen, Exception::At(_)) && !snap.is_invalid() {
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

    /// Sends a step without missing exceptions, counted at the gate, to the device.
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
            work_queue.push(move || self.go(Ok(())));
        });
        device.submit(step, buffer, done);
        None
    }
}
