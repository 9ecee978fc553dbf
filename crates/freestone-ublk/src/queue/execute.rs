//! Begins requests: checks them, reserves bytes, and passes them to the device.

use std::sync::Arc;

use freestone_core::client_log;
use freestone_core::completion_queue::CompletionQueue;
use freestone_core::device::zoned::ZoneRequest;
use freestone_core::device::{Buffer, Completion, Error, Geometry, IoBuf, Op, Request, TryResult};
use freestone_core::plug::Plug;
use freestone_core::workers::MIN_BYTES;

use super::user_copy::FetchedRequest;
use super::{CUT, Queue};
use crate::format::task::{CompletedRequest, Kind, Task};
use crate::format::zones;
use crate::queue::slots::TagState;

impl Queue {
    /// Begins the first waiting request, that of `tag`. Returns the number of bytes that the
    /// request moved, or `None` if the memory budget has no room yet.
    pub(super) fn begin_next(&mut self, tag: u16) -> Option<usize> {
        if self.dead {
            self.waiting.pop_front();
            self.commit(tag, CUT);
            return Some(0);
        }
        let descriptor = self.ring.descriptor(tag);
        let task = match Task::parse(&descriptor, self.slots.bytes(), self.resources.user_copy) {
            Ok(task) => Task { tag, serial: self.slots.get(tag).serial, ..task },
            Err(error) => {
                self.waiting.pop_front();
                self.refuse(tag, descriptor.op(), error);
                return Some(0);
            }
        };
        if let Err(error) = self.check(&task) {
            self.waiting.pop_front();
            self.fail(&task, error);
            return Some(0);
        }
        if task.len > 0 && !self.reserve(task.len) {
            return None;
        }
        self.waiting.pop_front();
        let buffer = match self.buffer(&task) {
            Ok(buffer) => buffer,
            Err(error) => {
                self.fail(&task, error);
                return Some(0);
            }
        };
        if self.resources.user_copy && task.is_write() {
            self.charged += task.len;
            self.slots.get(tag).state = TagState::Fetching;
            self.copies.fetch(&mut *self.ring, task, buffer);
            return Some(0);
        }
        self.execute(task, buffer);
        Some(task.len)
    }

    /// Checks a request before it is passed to the device.
    fn check(&self, task: &Task) -> Result<(), Error> {
        let read_only = self.disk.read_only;
        match task.kind {
            Kind::Io(request) => request.check(&Geometry { read_only, ..self.device.geometry() }),
            Kind::Zone(ZoneRequest::Report(_)) => Ok(()),
            // The device checks the range of zone operations and appends.
            Kind::Append(_) | Kind::Zone(_) => {
                if read_only {
                    Err(Error::ReadOnly)
                } else {
                    Ok(())
                }
            }
        }
    }

    /// Begins a write whose data was fetched. Returns the number of bytes that the write moved.
    pub(super) fn begin_fetched(&mut self, fetched: FetchedRequest) -> usize {
        let FetchedRequest { task, buffer, result: moved, is_cut } = fetched;
        self.charged -= task.len;
        if is_cut || moved != Some(task.len as i32) {
            self.slots.put(task.tag, buffer);
            if is_cut {
                self.commit(task.tag, CUT);
            } else {
                client_log!(error, "{}: ublk: the data of a write did not come: {moved:?}", self.disk.name);
                self.fail(&task, Error::Media);
            }
            return 0;
        }
        self.execute(task, buffer);
        task.len
    }

    fn buffer(&mut self, task: &Task) -> Result<IoBuf, Error> {
        if task.len == 0 {
            return Ok(IoBuf::empty());
        }
        if self.resources.user_copy {
            // Allocates a new buffer if the device kept the last one, because the kernel is about
            // to copy data into it.
            self.slots.address(task.tag)?;
        }
        Ok(self.slots.take(task.tag, task.len))
    }

    /// Reserves bytes of the memory budget. Returns false and registers for a wakeup if the budget
    /// is used up.
    fn reserve(&mut self, bytes: usize) -> bool {
        if self.resources.share.try_reserve((self.charged + bytes) as u64) {
            return true;
        }
        // If bytes were granted in between, this call wakes the thread, which then retries.
        self.resources.share.wait_for(self.charged as u64, bytes as u64);
        false
    }

    /// Runs a request inline or submits it.
    fn execute(&mut self, task: Task, buffer: IoBuf) {
        match task.kind {
            Kind::Io(request) => self.execute_io(task, request, buffer),
            Kind::Append(request) => self.append(task, request, buffer),
            Kind::Zone(request) => self.begin_zone(task, request, buffer),
        }
    }

    fn execute_io(&mut self, mut task: Task, request: Request, mut buffer: IoBuf) {
        let large = task.len > 0 && request.len >= MIN_BYTES;
        if large && self.should_use_worker(&request) {
            let done = completion(self.track_in_flight(task, self.device.extra_bytes(&request)));
            self.device.send_to_worker(&self.resources.workers, &self.costs, request, buffer, done);
            return;
        }
        let began = if large { self.costs.begin() } else { None };
        let outcome = loop {
            let rest = request.rest(task.done as u64);
            let part = Buffer::rest(request.op, &mut buffer, task.done);
            match self.device.try_io(&rest, part) {
                Ok(TryResult::Done) => {
                    self.costs.record(&request, began);
                    break Ok(());
                }
                Ok(TryResult::Partly(bytes)) => {
                    task.done += bytes as usize;
                    self.complete_finished();
                    // If the ring fails again at the next wait, the error is handled there.
                    let _ = self.submit_completions();
                }
                Ok(TryResult::WouldBlock) => return self.submit(task, request, rest, buffer),
                Err(error) => break Err(error),
            }
        };
        if task.len > 0 {
            self.slots.put(task.tag, buffer);
        }
        match outcome {
            Ok(()) => self.succeed(&task, 0),
            Err(error) => self.fail(&task, error),
        }
    }

    fn append(&mut self, task: Task, request: Request, buffer: IoBuf) {
        let device = Arc::clone(&self.disk.device);
        let Some(zones) = device.zoned() else {
            self.slots.put(task.tag, buffer);
            return self.fail(&task, Error::Unsupported);
        };
        let outcome = match zones.try_append(request.offset, &buffer, request.flags) {
            Ok(Some(at)) => Ok(at),
            Ok(None) => {
                let sender = self.track_in_flight(task, 0);
                self.plug.get_or_insert_with(Plug::start);
                let done = Box::new(move |outcome| sender.send(outcome, IoBuf::empty()));
                return zones.submit_append(request.offset, buffer, request.flags, done);
            }
            Err(error) => Err(error),
        };
        self.slots.put(task.tag, buffer);
        match outcome {
            Ok(at) => self.succeed(&task, at),
            Err(error) => self.fail(&task, error),
        }
    }

    /// Runs a zone operation or report on the zone thread, because it may block.
    fn begin_zone(&mut self, task: Task, request: ZoneRequest, mut buffer: IoBuf) {
        if self.zone_thread.start().is_err() {
            self.slots.put(task.tag, buffer);
            return self.fail(&task, Error::NoMemory);
        }
        let (device, sender) = (Arc::clone(&self.disk.device), self.track_in_flight(task, 0));
        self.zone_thread.push(move || {
            let outcome = zones::execute(&*device, request, &mut buffer);
            sender.send(outcome.map(|()| 0), buffer);
        });
    }

    /// Returns true if a worker should run a large request. Writes to zoned devices must begin in
    /// order, so they are executed on this thread.
    fn should_use_worker(&self, request: &Request) -> bool {
        let (workers, behind) = (&self.resources.workers, self.waiting.len() as u64);
        !(self.resources.user_copy && request.op == Op::Write)
            && self.costs.should_use_worker(workers, request, behind, self.in_flight > 0)
    }

    fn submit(&mut self, task: Task, request: Request, rest: Request, buffer: IoBuf) {
        let part = if task.len == 0 || task.done == 0 {
            buffer
        } else {
            // The rest gets a separate buffer; the finished part stays in the tag's buffer.
            let part = match request.op {
                Op::Read => IoBuf::zeroed(task.len - task.done),
                _ => IoBuf::copy_of(&buffer[task.done..]),
            };
            self.slots.put(task.tag, buffer);
            match part {
                Ok(part) => part,
                Err(error) => return self.fail(&task, error),
            }
        };
        let done = completion(self.track_in_flight(task, self.device.extra_bytes(&rest)));
        self.plug.get_or_insert_with(Plug::start);
        self.device.submit(rest, part, done);
    }

    /// Accounts for a request that is passed to another thread or submitted. `beside` is the memory
    /// in bytes that the request needs in addition to its buffer.
    fn track_in_flight(&mut self, mut task: Task, beside: usize) -> CompletionSender {
        task.charge = task.len + beside;
        self.charged += task.charge;
        self.in_flight += 1;
        self.slots.get(task.tag).state = TagState::Device;
        CompletionSender { task: Some(task), answers: Arc::clone(&self.resources.answers) }
    }
}

/// Sends a request's outcome to the queue. If the sender is dropped unused, the request fails with
/// [`Error::Gone`].
struct CompletionSender {
    task: Option<Task>,
    answers: Arc<CompletionQueue<CompletedRequest>>,
}

impl CompletionSender {
    fn send(mut self, outcome: Result<u64, Error>, buffer: IoBuf) {
        if let Some(task) = self.task.take() {
            self.answers.push(CompletedRequest { task, outcome, buffer });
        }
    }
}

impl Drop for CompletionSender {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            self.answers.push(CompletedRequest { task, outcome: Err(Error::Gone), buffer: IoBuf::empty() });
        }
    }
}

fn completion(sender: CompletionSender) -> Completion {
    Completion::new(move |outcome, buffer| sender.send(outcome.map(|()| 0), buffer))
}
