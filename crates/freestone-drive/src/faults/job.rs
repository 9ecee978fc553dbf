//! Executes a submitted request with the injected faults.

use std::sync::Arc;

use super::data;
use super::decide::Decision;
use super::hold::Hold;
use super::rules::WriteFault;
use super::stale::{OLD_REQUEST_BYTES_MAX, OldContent};
use super::zoned::{append_elsewhere, is_sequential};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Flags, IoBuf, Op, Request, Result, TryResult,
};
use freestone_core::work_queue::OwnedQueue;

/// Device under the fault layer, and the state that all faulty requests share.
#[derive(Clone)]
pub struct Below {
    pub device: Arc<dyn Device>,
    pub hold: Arc<Hold>,
    /// Queue for requests to the device that follow a completion, since a completion must not
    /// submit to the device.
    work_queue: Arc<OwnedQueue>,
}

impl Below {
    pub fn new(device: Arc<dyn Device>) -> Self {
        Self { device, hold: Arc::default(), work_queue: Arc::new(OwnedQueue::new("faults")) }
    }
}

pub struct FaultyRequest {
    pub below: Below,
    pub request: Request,
    pub buffer: IoBuf,
    pub done: Completion,
    pub decision: Decision,
    /// Overwritten content kept for stale reads, if a rule has the `stale` effect.
    pub old: Option<Arc<OldContent>>,
}

impl FaultyRequest {
    pub fn run(self) {
        if let Some(error) = self.decision.fail_before {
            return self.complete(Err(error));
        }
        match self.request.op {
            Op::Read => self.read(),
            Op::Flush if self.decision.lie => self.complete(Ok(())),
            Op::Flush => self.submit_below(None, 0),
            Op::Write | Op::WriteZeroes | Op::Discard => self.write(),
        }
    }

    /// Completes the request with `outcome`, without sending it to the device under this layer.
    fn complete(self, outcome: Result<()>) {
        let Self { below, buffer, done, decision, .. } = self;
        complete_held(&below.hold, &decision, outcome, buffer, done);
    }

    fn read(self) {
        let Self { below: Below { device, hold, .. }, request, buffer, done, decision, old } = self;
        // The completion must not own the device under this layer. Otherwise one of the device's
        // own threads could drop the last reference.
        let done = Completion::new(move |outcome, mut buffer| {
            if outcome.is_ok() {
                if let Some(old) = old.filter(|_| decision.stale) {
                    old.recall(request.offset, &mut buffer);
                }
                if let Some(word) = decision.rot {
                    data::rot(word, &mut buffer);
                }
            }
            complete_held(&hold, &decision, outcome, buffer, done);
        });
        device.submit(request, buffer, done);
    }

    fn write(mut self) {
        let device = Arc::clone(&self.below.device);
        let sequential = is_sequential(&*device, self.request.offset);
        if self.decision.lie {
            self.request.flags.remove(Flags::FUA);
        }
        if let Some(word) = self.decision.rot {
            data::rot(word, &mut self.buffer);
        }
        let mut torn = false;
        match self.decision.write_fault {
            None => {}
            Some((WriteFault::Lost, _)) if sequential && self.request.op != Op::Discard => {
                self.buffer.fill(0);
            }
            Some((WriteFault::Lost, _)) => return self.complete(Ok(())),
            Some((WriteFault::Torn(unit), word)) if sequential => {
                data::tear(word, u64::from(unit), self.request.offset, &mut self.buffer, None);
            }
            Some((WriteFault::Torn(_), _)) => torn = true,
            Some((WriteFault::Misdirected, word)) if sequential => {
                append_elsewhere(&*device, word, self.request.offset, &self.buffer, self.request.flags);
                self.buffer.fill(0);
            }
            Some((WriteFault::Misdirected, word)) => {
                let Some(place) = elsewhere(&*device, word, &self.request) else {
                    // The device has no other offset for the data, so the write is lost.
                    return self.complete(Ok(()));
                };
                self.request.offset = place;
            }
        }
        let Request { offset, len, .. } = self.request;
        self.old = self.old.take().filter(|old| !sequential && old.wants(offset, len));
        match (torn, &self.old) {
            (true, _) => self.fetch_old(len),
            (false, Some(_)) => self.fetch_old(len.min(OLD_REQUEST_BYTES_MAX)),
            (false, None) => self.submit_below(None, 0),
        }
    }

    /// Reads the old content of the first `len` bytes of the write's range, then writes.
    fn fetch_old(self, len: u64) {
        let mut old = match IoBuf::zeroed(len as usize) {
            Ok(old) => old,
            Err(error) => return self.complete(Err(error)),
        };
        let device = Arc::clone(&self.below.device);
        let all = Request::read(self.request.offset, len);
        let mut done = 0;
        loop {
            match device.try_io(&all.rest(done), Buffer::Read(&mut old[done as usize..])) {
                Ok(TryResult::Done) => return self.write_fetched(Ok(()), old),
                Ok(TryResult::Partly(more)) => done += more,
                Ok(TryResult::WouldBlock) => break,
                Err(error) => return self.write_fetched(Err(error), old),
            }
        }
        let work_queue = Arc::clone(&**self.below.work_queue);
        if work_queue.start().is_err() {
            return self.complete(Err(Error::NoMemory));
        }
        let then = Completion::new(move |outcome, old| {
            work_queue.push(move || self.write_fetched(outcome, old));
        });
        device.submit(all, old, then);
    }

    fn write_fetched(mut self, outcome: Result<()>, old: IoBuf) {
        if let Some((WriteFault::Torn(unit), word)) = self.decision.write_fault {
            if let Err(error) = outcome {
                return self.complete(Err(error));
            }
            data::tear(word, u64::from(unit), self.request.offset, &mut self.buffer, Some(&old));
        }
        // If the read failed, the old content is unknown. The write is done nevertheless.
        let known = if outcome.is_ok() { (old.len() as u64).min(OLD_REQUEST_BYTES_MAX) } else { 0 };
        self.submit_below(Some(old), known as usize);
    }

    /// Submits the request to the device under this layer. The first `known` bytes of `before` are
    /// the content that the request overwrites.
    fn submit_below(self, before: Option<IoBuf>, known: usize) {
        let Self { below: Below { device, hold, .. }, request, buffer, done, decision, old } = self;
        // The completion must not own the device, or one of the device's own threads could drop the
        // last reference.
        let done = Completion::new(move |outcome, buffer| {
            if let (Ok(()), Some(old)) = (outcome, old) {
                let before = before.as_deref().unwrap_or_default();
                old.keep(request.offset, &before[..known], request.len);
            }
            complete_held(&hold, &decision, outcome, buffer, done);
        });
        device.submit(request, buffer, done);
    }
}

/// Returns the offset of a misdirected write outside of sequential zones, or `None` if there is no
/// other. The offset is in the same zone, or anywhere on a device without zones.
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

/// Completes the request with `outcome` after the pause of `decision`.
fn complete_held(
    hold: &Arc<Hold>,
    decision: &Decision,
    outcome: Result<()>,
    buffer: IoBuf,
    done: Completion,
) {
    let outcome = outcome.and_then(|()| decision.fail_after.map_or(Ok(()), Err::<(), Error>));
    hold.complete_after(decision.pause, move |held| done.complete(held.and(outcome), buffer));
}
