//! A submitted request on its way: what is done to it before the device below, and to its answer.

use std::sync::Arc;

use super::data;
use super::decide::Verdict;
use super::hold::Hold;
use super::rules::Astray;
use super::stale::{OLD_REQUEST_BYTES_MAX, Old};
use super::zoned::{append_elsewhere, is_sequential};
use freestone_core::device::{Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, Tried};
use freestone_core::work_queue::WorkQueue;

/// What requests work on.
#[derive(Clone)]
pub struct Below {
    pub device: Arc<dyn Device>,
    pub hold: Arc<Hold>,
    carry: Arc<Carry>,
}

/// A completion must not call the device, and a write that follows a read does: on this thread,
/// which ends with the last that could give it a task.
struct Carry(Arc<WorkQueue>);

impl Drop for Carry {
    fn drop(&mut self) {
        self.0.stop();
    }
}

impl Below {
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, hold: Arc::default(), carry: Arc::new(Carry(WorkQueue::new("faults"))) }
    }
}

/// A request with what was decided about it.
pub struct Job {
    pub below: Below,
    pub request: Request,
    pub buffer: IoBuf,
    pub done: Completion,
    pub verdict: Verdict,
    /// Old content, where it is kept.
    pub old: Option<Arc<Old>>,
}

impl Job {
    /// Starts it.
    pub fn run(self) {
        if let Some(error) = self.verdict.refused {
            return self.answer(Err(error));
        }
        match self.request.op {
            Op::Read => self.read(),
            Op::Flush if self.verdict.lie => self.answer(Ok(())),
            Op::Flush => self.put(None, 0),
            Op::Write | Op::WriteZeroes | Op::Discard => self.write(),
        }
    }

    /// Answers without the device below.
    fn answer(self, outcome: Result<()>) {
        let Self { below, buffer, done, verdict, .. } = self;
        give(&below.hold, &verdict, outcome, buffer, done);
    }

    fn read(self) {
        let Self { below: Below { device, hold, .. }, request, buffer, done, verdict, old } = self;
        // What waits at the device below must not own that device: its last owner would be a thread
        // of its own.
        let done = Completion::new(move |outcome, mut buffer| {
            if outcome.is_ok() {
                if let Some(old) = old.filter(|_| verdict.stale) {
                    old.recall(request.offset, &mut buffer);
                }
                if let Some(word) = verdict.rot {
                    data::rot(word, &mut buffer);
                }
            }
            give(&hold, &verdict, outcome, buffer, done);
        });
        device.submit(request, buffer, done);
    }

    fn write(mut self) {
        let device = Arc::clone(&self.below.device);
        let sequential = is_sequential(&*device, self.request.offset);
        if self.verdict.lie {
            self.request.flags.remove(Flags::FUA);
        }
        if let Some(word) = self.verdict.rot {
            data::rot(word, &mut self.buffer);
        }
        let mut torn = false;
        match self.verdict.astray {
            None => {}
            Some((Astray::Lost, _)) if sequential && self.request.op != Op::Discard => self.buffer.fill(0),
            Some((Astray::Lost, _)) => return self.answer(Ok(())),
            Some((Astray::Torn(unit), word)) if sequential => {
                data::tear(word, u64::from(unit), self.request.offset, &mut self.buffer, None);
            }
            Some((Astray::Torn(_), _)) => torn = true,
            Some((Astray::Misdirected, word)) if sequential => {
                append_elsewhere(&*device, word, self.request.offset, &self.buffer, self.request.flags);
                self.buffer.fill(0);
            }
            Some((Astray::Misdirected, word)) => {
                let Some(place) = elsewhere(&*device, word, &self.request) else {
                    // There is no other place: it does not arrive.
                    return self.answer(Ok(()));
                };
                self.request.offset = place;
            }
        }
        let Request { offset, len, .. } = self.request;
        self.old = self.old.take().filter(|old| !sequential && old.wants(offset, len));
        match (torn, &self.old) {
            (true, _) => self.fetch(len),
            (false, Some(_)) => self.fetch(len.min(OLD_REQUEST_BYTES_MAX)),
            (false, None) => self.put(None, 0),
        }
    }

    /// Reads what the first `len` bytes of the write are about to overwrite, then writes.
    fn fetch(self, len: u64) {
        let mut old = match IoBuf::zeroed(len as usize) {
            Ok(old) => old,
            Err(error) => return self.answer(Err(error)),
        };
        let device = Arc::clone(&self.below.device);
        let all = Request::read(self.request.offset, len);
        let mut done = 0;
        loop {
            match device.try_io(&all.rest(done), Buffer::Read(&mut old[done as usize..])) {
                Ok(Tried::Done) => return self.fetched(Ok(()), old),
                Ok(Tried::Partly(more)) => done += more,
                Ok(Tried::WouldBlock) => break,
                Err(error) => return self.fetched(Err(error), old),
            }
        }
        let work_queue = Arc::clone(&self.below.carry.0);
        if work_queue.start().is_err() {
            return self.answer(Err(Error::NoMemory));
        }
        let then = Completion::new(move |outcome, old| {
            work_queue.push(move || self.fetched(outcome, old));
        });
        device.submit(all, old, then);
    }

    fn fetched(mut self, outcome: Result<()>, old: IoBuf) {
        if let Some((Astray::Torn(unit), word)) = self.verdict.astray {
            if let Err(error) = outcome {
                return self.answer(Err(error));
            }
            data::tear(word, u64::from(unit), self.request.offset, &mut self.buffer, Some(&old));
        }
        // What could not be read is not known; it is overwritten all the same.
        let known = if outcome.is_ok() { (old.len() as u64).min(OLD_REQUEST_BYTES_MAX) } else { 0 };
        self.put(Some(old), known as usize);
    }

    /// Gives the request to the device below. The first `known` bytes of `before` are what it
    /// overwrites.
    fn put(self, before: Option<IoBuf>, known: usize) {
        let Self { below: Below { device, hold, .. }, request, buffer, done, verdict, old } = self;
        // As in `read`: this owns no device.
        let done = Completion::new(move |outcome, buffer| {
            if let (Ok(()), Some(old)) = (outcome, old) {
                let before = before.as_deref().unwrap_or_default();
                old.keep(request.offset, &before[..known], request.len);
            }
            give(&hold, &verdict, outcome, buffer, done);
        });
        device.submit(request, buffer, done);
    }
}

/// Another place for a write outside of sequential zones: anywhere, or in its zone.
fn elsewhere(device: &dyn Device, word: u64, request: &Request) -> Option<u64> {
    let geometry = device.geometry();
    let space = match geometry.zones {
        None => (0, geometry.size),
        Some(zones) => {
            let start = request.offset / zones.zone_size * zones.zone_size;
            (start, geometry.size.min(start + zones.zone_size))
        }
    };
    data::elsewhere(word, request.offset, request.len, u64::from(geometry.logical_block), space)
}

/// Answers, when it is time.
fn give(hold: &Arc<Hold>, verdict: &Verdict, outcome: Result<()>, buffer: IoBuf, done: Completion) {
    let outcome = outcome.and_then(|()| verdict.answer.map_or(Ok(()), Err::<(), Error>));
    hold.give(verdict.pause, move |held| done.complete(held.and(outcome), buffer));
}
