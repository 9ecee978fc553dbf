//! The [`Device`] implementation of [`Ram`]. A submitted request runs in slices of bounded time,
//! and waits between them if it must.

use std::sync::Arc;

use super::fetch::{Place, QueueOutcome, locate};
use super::io::Attempt;
use crate::ram::device::flights::Waiter;
use crate::ram::device::parent::{Base, ReadEnd};
use crate::ram::device::stats::counter;
use crate::ram::device::{Inner, Ram};
use crate::ram::geometry::PAGE;
use crate::ram::waiting::device_space::DeviceSpace;
use crate::ram::waiting::job::{Job, RequestOwner};
use crate::ram::waiting::parent_zeroes::ParentZeroes;
use freestone_core::device::{
    self, Buffer, Changes, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_core::slot::{Kind, Word};
use freestone_core::{PAGE_BYTES, pin};

impl Device for Ram {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<TryResult> {
        freestone_core::trail::step!();
        self.0.attempt(request, buffer, &ParentZeroes::default()).map(|attempt| match attempt {
            Attempt::Tried(tried) => tried,
            Attempt::Frozen | Attempt::Removing | Attempt::Full => TryResult::WouldBlock,
        })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        freestone_core::trail::step!();
        self.start_request(Job::new(request, buffer, done));
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

impl RequestOwner for Inner {
    fn layer_id(&self) -> u32 {
        self.layer().id()
    }

    fn space(&self) -> &DeviceSpace {
        &self.limits.space
    }

    fn resume_slice(self: Arc<Self>, job: Job) {
        Ram(self).resume_slice(job);
    }
}

/// Result of running a request for one slice of time.
enum SliceEnd {
    /// The request can continue at once with another slice.
    Continue(Job),
    /// The request is queued, or has completed already.
    Parked,
    /// The request is done: the caller must complete it with this result.
    Complete(Job, Result<()>),
}

impl SliceEnd {
    fn continue_or_park(job: Option<Job>) -> Self {
        job.map_or(Self::Parked, Self::Continue)
    }
}

impl Ram {
    /// Starts a request. If it can continue after its first slice, the work queue runs the rest.
    /// Without a running work queue, this thread runs all slices.
    fn start_request(&self, mut job: Job) {
        loop {
            job = match self.run_slice(job) {
                SliceEnd::Continue(job) if self.0.pages.keeper.is_running() => {
                    return self.0.pages.keeper.resume(self.to_waiting(job));
                }
                SliceEnd::Continue(job) => job,
                SliceEnd::Parked => return,
                SliceEnd::Complete(job, outcome) => return job.done.complete(outcome, job.buffer),
            };
        }
    }

    fn resume(self, job: Job) {
        let keeper = Arc::clone(&self.0.pages.keeper);
        keeper.resume(self.into_waiting(job));
    }

    /// Runs a slice of a request; called on the work queue. Completes the request only after this
    /// reference to the device is dropped. The client may remove the device on completion, and that
    /// must drop the last reference, so that the removal counts as pending at once.
    fn resume_slice(self, job: Job) {
        freestone_core::trail::arrive!();
        match self.run_slice(job) {
            SliceEnd::Continue(job) => self.0.pages.keeper.resume(self.to_waiting(job)),
            SliceEnd::Parked => {}
            SliceEnd::Complete(job, outcome) => {
                drop(self);
                job.done.complete(outcome, job.buffer);
            }
        }
    }

    /// Runs a request for a bounded time. Queues the request if it must wait.
    fn run_slice(&self, mut job: Job) -> SliceEnd {
        if job.request.op == Op::Read {
            return self.read(job);
        }
        if self.0.needs_parent_check(&job.request, &job.below) {
            if self.0.parent.may_wait() {
                let ram = self.clone();
                self.0.pages.keeper.run_on_base_queue(move || {
                    job.below = ram.0.check_parent(&job.request);
                    ram.resume(job);
                });
                return SliceEnd::Parked;
            }
            job.below = self.0.check_parent(&job.request);
        }
        let buffer = match job.request.op {
            Op::Write => job.buffer.get(job.at..).map_or(Buffer::None, Buffer::Write),
            _ => Buffer::None,
        };
        match self.0.attempt(&job.request, buffer, &job.below) {
            Ok(Attempt::Tried(TryResult::Done)) => return SliceEnd::Complete(job, Ok(())),
            Ok(Attempt::Tried(TryResult::Partly(bytes))) => {
                job.advance(bytes);
                return SliceEnd::Continue(job);
            }
            Ok(Attempt::Frozen) => return SliceEnd::continue_or_park(self.wait_for_thaw(job)),
            Ok(Attempt::Removing) => return SliceEnd::continue_or_park(self.wait_for_removal(job)),
            Ok(Attempt::Full) => return SliceEnd::continue_or_park(self.wait_for_space(job)),
            Ok(Attempt::Tried(TryResult::WouldBlock)) if self.waits_for_page(&job) => {
                return SliceEnd::continue_or_park(self.wait_for_page(job));
            }
            // A discard never waits for memory: the page was in flight, and the flight has ended
            // meanwhile.
            Ok(Attempt::Tried(TryResult::WouldBlock)) if job.request.op == Op::Discard => {
                return SliceEnd::Continue(job);
            }
            Ok(Attempt::Tried(TryResult::WouldBlock)) => self.wait_for_eviction(job),
            Err(error) => return SliceEnd::Complete(job, Err(error)),
        }
        SliceEnd::Parked
    }

    /// Runs a read for a bounded time. Looks up each page once and fetches pages that are not in
    /// memory.
    fn read(&self, mut job: Job) -> SliceEnd {
        let (offset, len) = (job.request.offset, job.request.len);
        let into = job.buffer.get_mut(job.at..).filter(|into| into.len() as u64 == len);
        let read = match (self.0.check(&job.request), into) {
            (Ok(()), Some(into)) => self.0.read_some(offset, into),
            (Ok(()), None) => Err(Error::Misaligned),
            (Err(error), _) => Err(error),
        };
        match read {
            Ok((done, _)) if done as u64 == len => SliceEnd::Complete(job, Ok(())),
            Ok((done, read_end)) => {
                job.advance(done as u64);
                if matches!(read_end, ReadEnd::Complete) {
                    return SliceEnd::Continue(job);
                }
                self.fetch(job, read_end);
                SliceEnd::Parked
            }
            Err(error) => SliceEnd::Complete(job, Err(error)),
        }
    }

    /// Returns true if a change that would block waits for its current page, false if it waits for
    /// memory.
    fn waits_for_page(&self, job: &Job) -> bool {
        let slot = job.slot();
        pin::pinned(|pin| {
            let view = self.0.view.load(pin);
            let own = view.layer.table().leaf(slot).map_or(Word::EMPTY, |leaf| leaf.peek(slot));
            match own.kind() {
                Kind::InFlight => true,
                Kind::Spilled => job.needs_content(),
                Kind::Empty if job.needs_content() => {
                    locate(view, pin, slot, |place| !matches!(place, Place::Resident))
                }
                _ => false,
            }
        })
    }

    /// Queues a change on its current page, and reads the page from the backing device or a base if
    /// no read is in flight. Returns the request if it need not wait any more.
    fn wait_for_page(&self, job: Job) -> Option<Job> {
        let slot = job.slot();
        if matches!(job.request.op, Op::Discard | Op::WriteZeroes) && !job.needs_content() {
            self.0.counters.add(counter::MISS_FREE, 1);
        }
        let mut job = Some(job);
        let waiter = |is_own| job.take().map(|job| Waiter::Retry { ram: self.clone(), job, is_own });
        match self.0.queue(slot, waiter) {
            Some(QueueOutcome::PageToRead(wanted)) => self.0.family.fault_in.read(vec![wanted]),
            Some(QueueOutcome::Base(base)) => self.change_over_base(&base, slot, job.take()?),
            Some(QueueOutcome::InFlight) | None => {}
        }
        job
    }

    /// Reads a page from the base and then applies a request's change to a part of the page.
    fn change_over_base(&self, base: &Base, slot: u64, job: Job) {
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
            ram.put_over_parent(job, &mut page);
        });
        base.device.submit(Request::read(slot * PAGE, len), buffer, done);
    }
}
