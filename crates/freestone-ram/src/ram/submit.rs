//! The device that a [`Ram`] is; and requests that were submitted to it: how they are carried on,
//! and what they wait for when they change content.

use std::sync::Arc;

use super::fetch::{Place, Queued, locate};
use super::io::Attempt;
use super::job::Job;
use super::parent::{Base, Look};
use super::stats::counter;
use super::waiter::Waiter;
use super::{PAGE, Ram};
use freestone_core::device::{
    self, Buffer, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone_core::slot::{Kind, Word};
use freestone_core::{PAGE_BYTES, pin};

impl Device for Ram {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<Tried> {
        self.0.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.go(Job::new(request, buffer, done));
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.read_ahead(offset, len);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
        match offset.checked_add(len) {
            Some(end) if len > 0 && end <= self.0.size() => self.0.extents(offset, end, row),
            _ => Err(Error::OutOfRange),
        }
    }

    fn changes(&self) -> Option<&dyn Changes> {
        (self.is_snapshot() || self.is_fork()).then_some(self)
    }
}

/// What carrying on with a request came to.
pub(super) enum Sliced {
    /// It can go on at once.
    Again(Job),
    /// It waits, or was answered.
    Gone,
    /// It is to be answered so.
    Ended(Job, Result<()>),
}

impl Sliced {
    fn again_or_gone(job: Option<Job>) -> Self {
        job.map_or(Self::Gone, Self::Again)
    }
}

impl Ram {
    /// Begins a request. Where it does not have to wait, the work queue carries on with it; a
    /// family without one never waits.
    pub(super) fn go(&self, mut job: Job) {
        loop {
            job = match self.slice(job) {
                Sliced::Again(job) if self.0.pages.keeper.is_running() => {
                    return self.0.pages.keeper.resume(self.clone(), job);
                }
                Sliced::Again(job) => job,
                Sliced::Gone => return,
                Sliced::Ended(job, outcome) => return job.done.complete(outcome, job.buffer),
            };
        }
    }

    /// Has the work queue carry on with a request.
    fn resume(self, job: Job) {
        let keeper = Arc::clone(&self.0.pages.keeper);
        keeper.resume(self, job);
    }

    /// As [`slice`](Self::slice), on the work queue. A request is answered when this hold on its
    /// device is gone: who has the answer may remove the device, and what it leaves is then known
    /// to be about to come back.
    pub(super) fn carry_on(self, job: Job) {
        match self.slice(job) {
            Sliced::Again(job) => self.0.pages.keeper.resume(self.clone(), job),
            Sliced::Gone => {}
            Sliced::Ended(job, outcome) => {
                drop(self);
                job.done.complete(outcome, job.buffer);
            }
        }
    }

    /// Carries on with a request for a bounded time.
    fn slice(&self, mut job: Job) -> Sliced {
        if job.request.op == Op::Read {
            return self.read(job);
        }
        if self.0.looks_below(&job.request, &job.below) {
            if self.0.parent.may_wait() {
                let ram = self.clone();
                self.0.pages.keeper.look(move || {
                    job.below = ram.0.look_below(&job.request);
                    ram.resume(job);
                });
                return Sliced::Gone;
            }
            job.below = self.0.look_below(&job.request);
        }
        let buffer = match job.request.op {
            Op::Write => job.buffer.get(job.at..).map_or(Buffer::None, Buffer::Write),
            _ => Buffer::None,
        };
        match self.0.attempt(&job.request, buffer, &job.below) {
            Ok(Attempt::Tried(Tried::Done)) => return Sliced::Ended(job, Ok(())),
            Ok(Attempt::Tried(Tried::Partly(bytes))) => {
                job.advance(bytes);
                return Sliced::Again(job);
            }
            Ok(Attempt::Frozen) => return Sliced::again_or_gone(self.wait_for_thaw(job)),
            Ok(Attempt::Removing) => return Sliced::again_or_gone(self.wait_for_removal(job)),
            Ok(Attempt::Full) => return Sliced::again_or_gone(self.wait_for_room(job)),
            Ok(Attempt::Tried(Tried::WouldBlock)) if self.waits_for_page(&job) => {
                return Sliced::again_or_gone(self.wait_for_page(job));
            }
            // A discard needs no memory: its page has landed meanwhile.
            Ok(Attempt::Tried(Tried::WouldBlock)) if job.request.op == Op::Discard => {
                return Sliced::Again(job);
            }
            Ok(Attempt::Tried(Tried::WouldBlock)) => self.wait_for_memory(job),
            Err(error) => return Sliced::Ended(job, Err(error)),
        }
        Sliced::Gone
    }

    /// Carries on with a read for a bounded time. Each page is looked up once: what is not in
    /// memory is asked for at that.
    fn read(&self, mut job: Job) -> Sliced {
        let (offset, len) = (job.request.offset, job.request.len);
        let into = job.buffer.get_mut(job.at..).filter(|into| into.len() as u64 == len);
        let read = match (self.0.check(&job.request), into) {
            (Ok(()), Some(into)) => self.0.read_some(offset, into),
            (Ok(()), None) => Err(Error::Misaligned),
            (Err(error), _) => Err(error),
        };
        match read {
            Ok((done, _)) if done as u64 == len => Sliced::Ended(job, Ok(())),
            Ok((done, look)) => {
                job.advance(done as u64);
                if matches!(look, Look::All) {
                    return Sliced::Again(job);
                }
                self.fetch(job, look);
                Sliced::Gone
            }
            Err(error) => Sliced::Ended(job, Err(error)),
        }
    }

    /// Whether it is its page that a request could not go on without; else it is memory.
    fn waits_for_page(&self, job: &Job) -> bool {
        let slot = job.slot();
        pin::pinned(|pin| {
            let view = self.0.view.load(pin);
            let own = view.layer.table().leaf(slot).map_or(Word::EMPTY, |leaf| leaf.peek(slot));
            match own.kind() {
                Kind::InFlight => true,
                Kind::Spilled => job.needs_content(),
                Kind::Empty if job.needs_content() => {
                    locate(view, pin, slot, |place| !matches!(place, Place::Here))
                }
                _ => false,
            }
        })
    }

    /// Queues a request on the page at which it stands; has the page read if it needs the content.
    /// Returned: it need not wait any more.
    fn wait_for_page(&self, job: Job) -> Option<Job> {
        let slot = job.slot();
        if matches!(job.request.op, Op::Discard | Op::WriteZeroes) && !job.needs_content() {
            self.0.counters.add(counter::MISS_FREE, 1);
        }
        let mut job = Some(job);
        let waiter = |is_own| job.take().map(|job| Waiter::Retry { ram: self.clone(), job, is_own });
        match self.0.queue(slot, waiter) {
            Some(Queued::Wanted(wanted)) => self.0.family.fault_in.read(vec![wanted]),
            Some(Queued::Base(base)) => self.change_over(&base, slot, job.take()?),
            Some(Queued::Waits) | None => {}
        }
        job
    }

    /// Has a page read from the base, and then changed as the request says.
    fn change_over(&self, base: &Base, slot: u64, job: Job) {
        let len = (base.size - slot * PAGE).min(PAGE);
        let buffer = match IoBuf::zeroed(len as usize) {
            Ok(buffer) => buffer,
            Err(error) => return self.fail_write(job, error),
        };
        let ram = self.clone();
        let done = Completion::new(move |outcome: Result<()>, buffer: IoBuf| {
            if let Err(error) = outcome {
                return ram.fail_write(job, error);
            }
            let mut page = [0; PAGE_BYTES];
            page[..buffer.len()].copy_from_slice(&buffer);
            ram.put_over(job, &mut page);
        });
        base.device.submit(Request::read(slot * PAGE, len), buffer, done);
    }
}
