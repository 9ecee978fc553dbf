//! Begins requests: takes them from the ring, reserves bytes, and passes them to the device.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use freestone_core::device::{Buffer, Completion, Error, Flags, IoBuf, Op, Request, TryResult};
use freestone_core::plug::Plug;
use freestone_core::workers::MIN_BYTES;

use super::Queue;
use crate::ring::RingError;
use crate::task::{CompletedRequest, Kind, Task, check, gather, scatter};
use crate::wire::{ID_BYTES, status};
use crate::zones;

/// Largest buffer kept for the next request, in bytes.
const MAX_SPARE_BYTES: usize = 512 << 10;
/// Smallest size of a buffer in bytes, so that each buffer fits most requests.
const MIN_BUFFER_BYTES: usize = 4096;

impl Queue {
    /// Begins the next request, with `behind` requests available after it. If the queue is stopped first, the
    /// request stays available.
    pub(super) fn next_request(&mut self, behind: u16) -> Result<(), RingError> {
        let resubmit = self.resources.resubmit.last().copied();
        let head = resubmit.unwrap_or_else(|| self.resources.ring.next_head());
        self.resources.ring.chain(head, &self.memory, &mut self.chain)?;
        let task = Task::parse(head, &mut self.chain, &self.memory)?;
        if task.len > 0 && !self.reserve(task.len) {
            return Ok(());
        }
        if resubmit.is_some() {
            self.resources.resubmit.pop();
        } else {
            if let Some(queue_log) = &mut self.resources.queue_log {
                queue_log.begin(head);
            }
            self.resources.ring.take();
        }
        match task.kind {
            Kind::Io(request) => return self.execute(task, request, behind),
            Kind::Append(offset) => return self.append(task, offset),
            Kind::Refused(status) => self.complete(&task, status, 0),
            Kind::Id => {
                let mut id = [0; ID_BYTES];
                let name = self.resources.disk.name.as_bytes();
                let n = name.len().min(ID_BYTES);
                id[..n].copy_from_slice(&name[..n]);
                self.complete_with(&task, &id[..task.len.min(ID_BYTES)]);
            }
            Kind::Zone(_) if task.is_modifying() && self.resources.disk.read_only => {
                self.fail(&task, Error::ReadOnly);
            }
            Kind::Zone(request) => match zones::execute(&*self.resources.disk.device, request, task.len) {
                Err(error) => self.fail(&task, error),
                Ok(reply) => self.complete_with(&task, &reply),
            },
        }
        Ok(())
    }

    /// Completes a request with `bytes` as its reply.
    fn complete_with(&mut self, task: &Task, bytes: &[u8]) {
        match scatter(&self.memory, task.reply_segments(&self.chain.segments), 0, bytes) {
            Ok(()) => self.complete(task, status::OK, bytes.len()),
            Err(_) => self.complete(task, status::IOERR, 0),
        }
    }

    /// Reserves bytes of the memory budget, and waits if the budget is used up. Returns false if the queue is
    /// stopped first.
    fn reserve(&mut self, bytes: usize) -> bool {
        let bytes = bytes.max(MIN_BUFFER_BYTES).next_power_of_two();
        while !self.resources.share.try_reserve((self.charged + self.spare.capacity() + bytes) as u64) {
            self.spare = IoBuf::empty();
            self.resources.share.wait_for(self.charged as u64, bytes as u64);
            self.publish();
            // If bytes were granted in between, this wait returns at once.
            self.wait_for_device();
            if self.resources.answers.is_shut_down() {
                return false;
            }
            self.complete_finished();
        }
        true
    }

    fn buffer(&mut self, len: usize) -> Result<IoBuf, Error> {
        if self.spare.capacity() < len {
            self.spare = IoBuf::empty();
            self.spare = IoBuf::zeroed(len.max(MIN_BUFFER_BYTES).next_power_of_two())?;
        }
        let mut buffer = std::mem::replace(&mut self.spare, IoBuf::empty());
        buffer.set_len(len);
        Ok(buffer)
    }

    pub(super) fn keep_buffer(&mut self, buffer: IoBuf) {
        if buffer.capacity() > self.spare.capacity() && buffer.capacity() <= MAX_SPARE_BYTES {
            self.spare = buffer;
        }
    }

    /// Copies the data of a write into `buffer`, unless the device ignores data. Returns false if part of the
    /// data is outside the frontend's memory.
    fn gather(&self, task: &Task, buffer: &mut IoBuf) -> Result<bool, RingError> {
        let segments = task.data_segments(&self.chain.segments);
        let gathered = if self.ignores_data {
            check(&self.memory, segments, buffer.len())
        } else {
            gather(&self.memory, segments, buffer)
        };
        // Lost pages read as zeroes, which must not be written to the device.
        if self.memory.is_dead() { Err(RingError::Memory) } else { Ok(gathered.is_ok()) }
    }

    /// Returns true if writes must be durable before they complete.
    fn is_write_through(&self) -> bool {
        !self.resources.frontend.writeback.load(Ordering::SeqCst)
    }

    /// Executes a request inline or submits it.
    fn execute(&mut self, mut task: Task, mut request: Request, behind: u16) -> Result<(), RingError> {
        let mut buffer = IoBuf::empty();
        if request.op != Op::Read && task.is_modifying() {
            if self.resources.disk.read_only {
                self.fail(&task, Error::ReadOnly);
                return Ok(());
            }
            if self.is_write_through() {
                request.flags |= Flags::FUA;
            }
        }
        if task.len > 0 {
            buffer = match self.buffer(task.len) {
                Ok(buffer) => buffer,
                Err(error) => {
                    self.fail(&task, error);
                    return Ok(());
                }
            };
            if request.op == Op::Write && !self.gather(&task, &mut buffer)? {
                self.complete(&task, status::IOERR, 0);
                return Ok(());
            }
        }
        let large = task.len as u64 >= MIN_BYTES;
        if large && self.should_use_worker(&request, behind) {
            let done = self.begin_async(task, &request, &buffer);
            self.device.send_to_worker(&self.resources.workers, &self.costs, request, buffer, done);
            return Ok(());
        }
        let began = if large { self.costs.begin() } else { None };
        loop {
            let rest = request.rest(task.done as u64);
            let part = Buffer::rest(request.op, &mut buffer, task.done);
            match self.device.try_io(&rest, part) {
                Ok(TryResult::Done) => {
                    if large {
                        self.costs.record(&request, began);
                    }
                    task.done = 0;
                    self.succeed(&task, buffer, 0);
                    return Ok(());
                }
                Ok(TryResult::Partly(bytes)) => {
                    task.done += bytes as usize;
                    self.complete_finished();
                    self.publish();
                }
                Ok(TryResult::WouldBlock) => {
                    self.submit(task, rest, buffer);
                    return Ok(());
                }
                Err(error) => {
                    self.keep_buffer(buffer);
                    self.fail(&task, error);
                    return Ok(());
                }
            }
        }
    }

    /// Executes an append inline or submits it.
    fn append(&mut self, task: Task, offset: u64) -> Result<(), RingError> {
        if self.resources.disk.read_only {
            self.fail(&task, Error::ReadOnly);
            return Ok(());
        }
        let mut buffer = match self.buffer(task.len) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.fail(&task, error);
                return Ok(());
            }
        };
        if !self.gather(&task, &mut buffer)? {
            self.complete(&task, status::IOERR, 0);
            return Ok(());
        }
        let device = Arc::clone(&self.resources.disk.device);
        let Some(zones) = device.zoned() else {
            self.fail(&task, Error::Unsupported);
            return Ok(());
        };
        let flags = if self.is_write_through() { Flags::FUA } else { Flags::empty() };
        match zones.try_append(offset, &buffer, flags) {
            Ok(Some(at)) => self.succeed(&task, buffer, at),
            Ok(None) => {
                let request = Request::write(offset, buffer.len() as u64);
                let finish = self.charge_in_flight(task, &request, &buffer);
                self.plug.get_or_insert_with(Plug::start);
                let done = Box::new(move |outcome| finish(outcome, IoBuf::empty()));
                zones.submit_append(offset, buffer, flags, done);
            }
            Err(error) => {
                self.keep_buffer(buffer);
                self.fail(&task, error);
            }
        }
        Ok(())
    }

    /// Returns true if a worker should run a large request. Writes to zoned devices must begin in order, so
    /// they are executed on this thread.
    fn should_use_worker(&self, request: &Request, behind: u16) -> bool {
        !(self.zoned && request.op == Op::Write)
            && self.costs.should_use_worker(
                &self.resources.workers,
                request,
                behind.into(),
                self.in_flight > 0,
            )
    }

    fn submit(&mut self, task: Task, rest: Request, buffer: IoBuf) {
        let buffer = if task.done == 0 || buffer.is_empty() {
            buffer
        } else {
            let room = task.reply_segments(&self.chain.segments);
            if task.is_read() && scatter(&self.memory, room, 0, &buffer[..task.done]).is_err() {
                return self.complete(&task, status::IOERR, 0);
            }
            match IoBuf::copy_of(&buffer[task.done..]) {
                Ok(buffer) => buffer,
                Err(error) => return self.fail(&task, error),
            }
        };
        let done = self.begin_async(task, &rest, &buffer);
        self.plug.get_or_insert_with(Plug::start);
        self.device.submit(rest, buffer, done);
    }

    /// Accounts for a request that is submitted or passed to a worker. Returns its completion.
    fn begin_async(&mut self, task: Task, request: &Request, buffer: &IoBuf) -> Completion {
        let finish = self.charge_in_flight(task, request, buffer);
        Completion::new(move |outcome, buffer| finish(outcome.map(|()| 0), buffer))
    }

    /// Accounts for a request that is submitted or passed to a worker, and moves the current chain's segments
    /// to it. Returns the function to call with the outcome.
    fn charge_in_flight(
        &mut self,
        mut task: Task,
        request: &Request,
        buffer: &IoBuf,
    ) -> impl FnOnce(Result<u64, Error>, IoBuf) + Send + 'static {
        task.charge = buffer.capacity() + self.device.extra_bytes(request);
        self.charged += task.charge;
        self.in_flight += 1;
        let segments = std::mem::take(&mut self.chain.segments);
        let answers = Arc::clone(&self.resources.answers);
        move |outcome, buffer| answers.push(CompletedRequest { task, segments, outcome, buffer })
    }
}
