//! Writes to an origin, write zeroes and discards among them.
//!
//! A write looks at every snapshot, those with the largest chunks first. Where all of its chunks
//! have complete exceptions it goes on at once. Else it asks for what is missing, of all snapshots
//! together, waits until that is complete, and looks again; only a look that finds nothing missing
//! lets it go. A snapshot for which there is no room is given up: a write to the origin never fails
//! because of a snapshot.
//!
//! While a snapshot is merged, that snapshot does the write
//! ([`OriginState::write_merging`](super::state::OriginState)); what it writes to the origin comes
//! back here, and is not handed to it again.
//!
//! A discard or write zeroes that finds something missing first looks at the origin's extents. Where
//! the origin reads as zeroes already, the request goes on without exceptions: see
//! [`OriginWrite::look`].
//!
//! # Protocol
//! * The list of snapshots is behind a gate. A write that finds nothing missing is counted there
//!   before its thread is unpinned, until the device has answered it; the device is called
//!   unpinned. A snapshot begins with the gate closed, so every write is wholly before or wholly
//!   after it.
//! * Writes that wait for copies are not counted: they look at the list again.

use std::sync::Arc;

use super::copy::{Asked, Begun};
use super::exceptions::Exception;
use super::gather::{Gather, Job};
use super::loss::Loss;
use super::state::{OriginCore, Permit, Snap, View, counter};
use freestone_core::device::{Buffer, Completion, Error, IoBuf, Op, Request, Result, Tried};
use freestone_core::freeze_gate::UnderWay;
use freestone_core::per_cpu_arc::PerCpuArc;
use freestone_core::plug::Plug;
use freestone_core::work_queue::WorkQueue;

/// Exceptions that one round of a write asks for.
const ROUND_EXCEPTIONS: usize = 256;
/// Rounds on the submitting thread; later ones run on the origin's own.
const ROUNDS_INLINE: u32 = 3;
/// Chunks that one try looks at, and that a request without data covers in one step.
const STEP_CHUNKS: u64 = 1024;

/// A write, write zeroes or discard under way.
pub(super) struct OriginWrite {
    core: Arc<OriginCore>,
    /// What is left of it.
    request: Request,
    buffer: IoBuf,
    done: Completion,
    /// Bytes of the present step that were found safe, in the view of this generation.
    safe: u64,
    /// Byte up to which the origin's extents need no further look: the origin has data there, or
    /// cannot tell.
    looked_until: u64,
    generation: u64,
    permit: Option<Permit>,
    rounds: u32,
    /// That of the view that it saw first.
    boot: Option<u64>,
    waited: bool,
    kind: Kind,
    /// It comes from this snapshot, which is being merged, and is not redirected to it again.
    past: Option<Arc<Snap>>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// From a user, or from a snapshot that is being merged.
    Data,
    /// Nothing is written: only exceptions are made.
    Preserve,
}

/// How a round was planned.
enum Planned {
    Send,
    Wait,
    /// Look at the origin's extents from this byte on; the request is counted.
    Look(u64),
    Throttled(Arc<Snap>),
    Merging(Arc<Snap>),
    Held,
    /// The power was lost since it came.
    Gone,
}

// ---- at once ------------------------------------------------------------------------------------

/// A write for which nothing has to be preserved: the origin has no snapshots, and none begins before
/// this is dropped.
pub(super) fn without_snapshots(core: &OriginCore) -> Option<UnderWay<'_, View>> {
    let without = core.gate.enter(|view| {
        let without = view.is_some_and(|view| view.snapshots.is_empty() && view.merging.is_none());
        if without {
            core.gate.begin();
            core.age.wrote();
        }
        without
    });
    without.then(|| core.gate.under_way())
}

/// Writes as far as no exception is missing and the device does it at once. The place was checked.
pub(super) fn try_write(core: &OriginCore, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
    let safe = core.gate.enter(|view| {
        let safe = match view {
            Some(view @ View { merging: None, .. }) => safe_bytes(view, request),
            // Closed, or a merge.
            _ => 0,
        };
        if safe > 0 {
            core.gate.begin();
            core.age.wrote();
        }
        safe
    });
    if safe == 0 {
        return Ok(Tried::WouldBlock);
    }
    // No snapshot begins before the device has answered.
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

/// The bytes from the start of a request on for which nothing is missing.
fn safe_bytes(view: &View, request: &Request) -> u64 {
    let end = request.offset + request.len;
    let active = view.snapshots.iter().filter(|snap| snap.is_active());
    active.fold(end, |end, snap| complete_until(snap, request.offset, end)) - request.offset
}

/// The byte up to which the chunks from byte `at` on have exceptions, or need none; at most `end`.
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
    /// A write that begins. The place was checked.
    pub fn new(core: Arc<OriginCore>, request: Request, buffer: IoBuf, done: Completion) -> Self {
        Self {
            core,
            request,
            buffer,
            done,
            safe: 0,
            looked_until: 0,
            generation: 0,
            permit: None,
            rounds: 0,
            boot: None,
            waited: false,
            kind: Kind::Data,
            past: None,
        }
    }

    /// A write of a snapshot that is being merged. Should that merge be finished meanwhile, and
    /// that of another snapshot have begun, the write goes to that one.
    pub fn past_merge(snap: &Arc<Snap>, request: Request, buffer: IoBuf, done: Completion) -> Self {
        let core = Arc::clone(&snap.core);
        Self { past: Some(Arc::clone(snap)), ..Self::new(core, request, buffer, done) }
    }

    /// Makes the exceptions that a write to this range would need.
    pub fn preserve(core: Arc<OriginCore>, offset: u64, len: u64, done: Completion) -> Self {
        let request = Request::new(Op::Discard, offset, len);
        Self { kind: Kind::Preserve, ..Self::new(core, request, IoBuf::empty(), done) }
    }

    /// The part of the request that is done next: all of it, where it has data.
    fn step(&self, view: &View) -> Request {
        let chunk = view.snapshots.iter().map(|snap| snap.chunk()).min();
        match chunk {
            Some(chunk) if self.request.op != Op::Write => {
                let mut next = (self.request.offset / chunk + STEP_CHUNKS) * chunk;
                if self.looked_until > self.request.offset {
                    next = next.min(self.looked_until);
                }
                Request { len: self.request.len.min(next - self.request.offset), ..self.request }
            }
            _ => self.request,
        }
    }
}

impl Job for OriginWrite {
    fn work_queue(&self) -> &Arc<WorkQueue> {
        &self.core.work_queue
    }

    fn go(mut self, _: Result<()>) {
        self.rounds = 0;
        // Errors of what it waited for are left aside: a snapshot that failed is found by the look
        // at the snapshots.
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
    /// One round. `None`: the job goes on elsewhere, or is done.
    fn round(self) -> Option<Self> {
        let core = Arc::clone(&self.core);
        let gather = Gather::new();
        let (mut begun, mut full) = (Vec::new(), Vec::new());
        let mut step = self.request;
        let mut this = Some(self);
        let planned = core.gate.enter(|view| {
            let (Some(view), Some(job)) = (view, &mut this) else {
                let job = this.take();
                core.gate.hold(move || job.into_iter().for_each(|job| job.go(Ok(()))));
                return Planned::Held;
            };
            if job.is_gone(view) {
                return Planned::Gone;
            }
            if let (Some(snap), Kind::Data) = (&view.merging, job.kind)
                && !job.past.as_ref().is_some_and(|past| snap.is(past))
            {
                return Planned::Merging(Arc::clone(snap));
            }
            step = job.step(view);
            if let Some(from) = job.to_look_at(view, &step) {
                core.gate.begin();
                if from > step.offset && job.kind == Kind::Data {
                    core.age.wrote();
                }
                return Planned::Look(from);
            }
            let planned = job.plan(view, &step, &gather, &mut begun, &mut full);
            if matches!(planned, Planned::Send) {
                core.gate.begin();
                if job.kind != Kind::Preserve {
                    core.age.wrote();
                }
            }
            planned
        });
        let mut job = this?;
        // Held while this waits, it would keep another copy from beginning.
        job.permit = None;
        let plug = Plug::start();
        begun.into_iter().for_each(Begun::copy);
        drop(plug);
        for (snap, loss) in full {
            snap.invalidate(loss, Some(gather.waiter()));
        }
        match planned {
            Planned::Held => None,
            Planned::Gone => {
                job.done.complete(Err(Error::Gone), job.buffer);
                None
            }
            Planned::Merging(snap) => job.redirect(snap),
            Planned::Throttled(snap) => {
                snap.queue(move |permit| {
                    job.permit = Some(permit);
                    job.go(Ok(()));
                });
                None
            }
            Planned::Send => job.send(step),
            Planned::Look(from) => {
                core.extents_queue.push(move || job.look(from));
                None
            }
            Planned::Wait => gather.leave(job).map(|(job, _)| job),
        }
    }

    /// Whether the power was lost since it came, or since it was begun by a snapshot.
    fn is_gone(&mut self, view: &View) -> bool {
        *self.boot.get_or_insert(view.boot) != view.boot
            || self.past.as_ref().is_some_and(|past| past.is_off())
    }

    /// The snapshot that is being merged does this write, as far as it reaches; an origin that has
    /// grown since is longer.
    fn redirect(mut self, snap: Arc<Snap>) -> Option<Self> {
        let write = self.core.write_merging;
        let head = snap.size.saturating_sub(self.request.offset).min(self.request.len);
        if head == self.request.len {
            write(snap, self.request, self.buffer, self.done);
            return None;
        }
        self.past = Some(Arc::clone(&snap));
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

    /// Returns the first byte of a step without data at which an exception is missing and the origin's
    /// extents were not looked at.
    fn to_look_at(&self, view: &View, step: &Request) -> Option<u64> {
        // While a snapshot is invalid only in memory, its merge may still be taken up after a crash
        // and undo this request: then nothing goes on without `plan`.
        let waits_for_loss = |snap: &PerCpuArc<Snap>| snap.is_active() && snap.is_invalid();
        if step.op == Op::Write || view.snapshots.iter().any(waits_for_loss) {
            return None;
        }
        let from = step.offset + safe_bytes(view, step);
        (from < step.offset + step.len && from >= self.looked_until).then_some(from)
    }

    /// Sends the request to the device as far as all before byte `from` has exceptions and the origin
    /// reads as zeroes behind. The rest goes on as other writes do.
    ///
    /// Discarding zeroes, or writing zeroes over them, changes nothing that a snapshot shows, and so
    /// needs no exception. Nothing is locked meanwhile, but the request is counted at the gate since
    /// before the look, so the snapshots of its view are all there are until the device has answered.
    /// * A write that was answered before this request came is in the extents.
    /// * A write that comes between the look and the device's answer has made its exceptions before it
    ///   began. The two overlap, so the device may do them in either order.
    /// * A copy for such a write reads zeroes, whether this request was done before or not.
    fn look(mut self, from: u64) {
        let end = self.request.offset + self.request.len;
        let (zeroes_until, looked_until) = self.core.leading_zeroes(from, end);
        self.looked_until = looked_until;
        let (core, request) = (Arc::clone(&self.core), self.request);
        // A loss of power does not wait for a disk that hangs.
        if core.gate.enter_any(|view| self.is_gone(view)) {
            core.gate.end();
            self.done.complete(Err(Error::Gone), self.buffer);
        } else if zeroes_until > from {
            // The completion carries on with what is left. A merge preserves what it writes over zeroes
            // when it writes.
            if let Some(job) = self.send(Request { len: zeroes_until - request.offset, ..request }) {
                core.work_queue.push(move || job.go(Ok(())));
            }
        } else {
            core.gate.end();
            core.work_queue.push(move || self.go(Ok(())));
        }
    }

    /// Finds what is missing and asks for it.
    fn plan(
        &mut self,
        view: &View,
        step: &Request,
        gather: &Arc<Gather<Self>>,
        begun: &mut Vec<Begun>,
        full: &mut Vec<(Arc<Snap>, Loss)>,
    ) -> Planned {
        if self.generation != view.generation {
            (self.generation, self.safe) = (view.generation, 0);
        }
        let (from, end) = (step.offset + self.safe, step.offset + step.len);
        // How many things the gatherer waits for.
        let mut asked = 0;
        let mut safe = end;
        for snap in view.snapshots.iter().filter(|snap| snap.is_active()) {
            let chunk = snap.chunk();
            let before = asked;
            for number in from / chunk..end.min(snap.size).div_ceil(chunk) {
                // An invalid snapshot counts even where it has an exception: the mark of a merge
                // may be on its COW device, and that merge, taken up later, would overwrite what is
                // written now with the exception.
                let seen = snap.exceptions.get(number);
                if matches!(seen, Exception::At(_)) && !snap.is_invalid() {
                    continue;
                }
                safe = safe.min((number * chunk).max(from));
                if asked >= ROUND_EXCEPTIONS {
                    break;
                }
                if snap.is_invalid() {
                    // It must be invalid on its COW device, too, before the origin is written.
                    snap.wait_for_loss(gather.waiter());
                    asked += 1;
                    break;
                }
                match snap.ask(number, seen, || gather.waiter(), &mut self.permit) {
                    Asked::Complete => {}
                    Asked::Joined => asked += 1,
                    Asked::Begun(one) => {
                        begun.push(one);
                        asked += 1;
                    }
                    Asked::Lost => {
                        snap.wait_for_loss(gather.waiter());
                        asked += 1;
                        break;
                    }
                    Asked::Full => {
                        snap.fails();
                        full.push((Arc::clone(snap), Loss::NoRoom));
                        break;
                    }
                    Asked::NoMemory => {
                        snap.fails();
                        full.push((Arc::clone(snap), Loss::NoMemory));
                        break;
                    }
                    Asked::Throttled if asked == 0 && full.is_empty() => {
                        return Planned::Throttled(Arc::clone(snap));
                    }
                    Asked::Throttled => break,
                }
            }
            if asked > before && !self.waited {
                snap.counters.add(counter::ORIGIN_WAITED, 1);
                self.waited = true;
            }
        }
        self.safe = safe - step.offset;
        if asked == 0 && full.is_empty() { Planned::Send } else { Planned::Wait }
    }

    /// Sends a step, for which nothing is missing and which is counted, to the device.
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
