//! Requests on their way to the device.

use std::sync::Arc;

use freestone_core::answers::Answers;
use freestone_core::client_log;
use freestone_core::device::zoned::ZoneRequest;
use freestone_core::device::{Buffer, Completion, Error, Geometry, IoBuf, Op, Request, Tried};
use freestone_core::plug::Plug;
use freestone_core::workers::MIN_BYTES;

use super::copying::Copied;
use super::{CUT, Queue};
use crate::slots::Place;
use crate::task::{Finished, Kind, Task};
use crate::zones;

impl Queue {
    /// Begins the request of a tag, the first that waits. The bytes that it has moved; `None`: there
    /// is no room for it yet.
    pub(super) fn begin_next(&mut self, tag: u16) -> Option<usize> {
        if self.dead {
            self.waiting.pop_front();
            self.commit(tag, CUT);
            return Some(0);
        }
        let descriptor = self.ring.descriptor(tag);
        let task = match Task::parse(&descriptor, self.slots.bytes(), self.parts.user_copy) {
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
        if self.parts.user_copy && task.is_write() {
            self.charged += task.len;
            self.slots.get(tag).place = Place::Fetching;
            self.copying.fetch(&mut *self.ring, task, buffer);
            return Some(0);
        }
        self.execute(task, buffer);
        Some(task.len)
    }

    /// What is wrong with a request before the device is asked.
    fn check(&self, task: &Task) -> Result<(), Error> {
        let read_only = self.disk.read_only;
        match task.kind {
            Kind::Io(request) => request.check(&Geometry { read_only, ..self.device.geometry() }),
            Kind::Zone(ZoneRequest::Report(_)) => Ok(()),
            // The zones themselves know what an append may be.
            Kind::Append(_) | Kind::Zone(_) => {
                if read_only {
                    Err(Error::ReadOnly)
                } else {
                    Ok(())
                }
            }
        }
    }

    /// Begins a request whose data is here. The bytes that it has moved.
    pub(super) fn begin_copied(&mut self, copied: Copied) -> usize {
        let Copied { task, buffer, moved, is_cut } = copied;
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

    /// The buffer of a request's data.
    fn buffer(&mut self, task: &Task) -> Result<IoBuf, Error> {
        if task.len == 0 {
            return Ok(IoBuf::empty());
        }
        if self.parts.user_copy {
            // The device may have kept the last one: else it is missed when the kernel wants it.
            self.slots.address(task.tag)?;
        }
        Ok(self.slots.take(task.tag, task.len))
    }

    /// Has bytes for a request, or waits for them from now on.
    fn reserve(&mut self, bytes: usize) -> bool {
        if self.parts.share.reach((self.charged + bytes) as u64) {
            return true;
        }
        // What was granted meanwhile is noticed by the next look, for which this wakes the thread.
        self.parts.share.wait_for(self.charged as u64, bytes as u64);
        false
    }

    /// Does a request, or begins it.
    fn execute(&mut self, task: Task, buffer: IoBuf) {
        match task.kind {
            Kind::Io(request) => self.execute_io(task, request, buffer),
            Kind::Append(request) => self.append(task, request, buffer),
            Kind::Zone(request) => self.begin_zone(task, request, buffer),
        }
    }

    fn execute_io(&mut self, mut task: Task, request: Request, mut buffer: IoBuf) {
        let large = task.len > 0 && request.len >= MIN_BYTES;
        if large && self.hands_on(&request) {
            let done = completion(self.begin(task, self.device.beside(&request)));
            self.device.hand_on(&self.parts.workers, &self.costs, request, buffer, done);
            return;
        }
        let began = if large { self.costs.begin() } else { None };
        let outcome = loop {
            let rest = request.rest(task.done as u64);
            let part = Buffer::rest(request.op, &mut buffer, task.done);
            match self.device.try_io(&rest, part) {
                Ok(Tried::Done) => {
                    self.costs.learn(&request, began);
                    break Ok(());
                }
                Ok(Tried::Partly(bytes)) => {
                    task.done += bytes as usize;
                    self.harvest();
                    // An error comes again where the thread rests.
                    let _ = self.tell();
                }
                Ok(Tried::WouldBlock) => return self.submit(task, request, rest, buffer),
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

    /// Writes to where a zone's write pointer is.
    fn append(&mut self, task: Task, request: Request, buffer: IoBuf) {
        let device = Arc::clone(&self.disk.device);
        let Some(zones) = device.zoned() else {
            self.slots.put(task.tag, buffer);
            return self.fail(&task, Error::Unsupported);
        };
        let outcome = match zones.try_append(request.offset, &buffer, request.flags) {
            Ok(Some(at)) => Ok(at),
            Ok(None) => {
                let answer = self.begin(task, 0);
                self.plug.get_or_insert_with(Plug::start);
                let done = Box::new(move |outcome| answer.give(outcome, IoBuf::empty()));
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

    /// Has what may wait for the device done by another thread.
    fn begin_zone(&mut self, task: Task, request: ZoneRequest, mut buffer: IoBuf) {
        let Ok(aside) = self.aside.thread() else {
            self.slots.put(task.tag, buffer);
            return self.fail(&task, Error::NoMemory);
        };
        let (device, answer) = (Arc::clone(&self.disk.device), self.begin(task, 0));
        aside.push(move || {
            let outcome = zones::execute(&*device, request, &mut buffer);
            answer.give(outcome.map(|()| 0), buffer);
        });
    }

    /// Whether a worker should do a large request; writes to zones begin in their order.
    fn hands_on(&self, request: &Request) -> bool {
        let (workers, behind) = (&self.parts.workers, self.waiting.len() as u64);
        !(self.parts.user_copy && request.op == Op::Write)
            && self.costs.hand_on(workers, request, behind, self.in_flight > 0)
    }

    /// Hands what is left of a request to the device.
    fn submit(&mut self, task: Task, request: Request, rest: Request, buffer: IoBuf) {
        let part = if task.len == 0 || task.done == 0 {
            buffer
        } else {
            // The rest gets a buffer of its own; what is done stays in the tag's.
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
        let done = completion(self.begin(task, self.device.beside(&rest)));
        self.plug.get_or_insert_with(Plug::start);
        self.device.submit(rest, part, done);
    }

    /// Accounts for a request that is going to be another's, which takes so many bytes beside its
    /// buffer, and says how its outcome comes back.
    fn begin(&mut self, mut task: Task, beside: usize) -> Answer {
        task.charge = task.len + beside;
        self.charged += task.charge;
        self.in_flight += 1;
        self.slots.get(task.tag).place = Place::Device;
        Answer { task: Some(task), answers: Arc::clone(&self.parts.answers) }
    }
}

/// How an outcome comes back to the queue, also where it is forgotten.
struct Answer {
    task: Option<Task>,
    answers: Arc<Answers<Finished>>,
}

impl Answer {
    fn give(mut self, outcome: Result<u64, Error>, buffer: IoBuf) {
        if let Some(task) = self.task.take() {
            self.answers.push(Finished { task, outcome, buffer });
        }
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        if let Some(task) = self.task.take() {
            self.answers.push(Finished { task, outcome: Err(Error::Gone), buffer: IoBuf::empty() });
        }
    }
}

/// The same for a request.
fn completion(answer: Answer) -> Completion {
    Completion::new(move |outcome, buffer| answer.give(outcome.map(|()| 0), buffer))
}
