//! A fio job on a device: the job's requests in flight and their completions.
#![expect(unsafe_code)]
// UNSAFETY: fio's buffers are known only by address and length, and the data of a submitted read is
// copied there later.

use std::collections::VecDeque;
use std::mem;
use std::slice;
use std::sync::Arc;
use std::time::{Duration, Instant};

use freestone::device::{Buffer, Completion, Error, IoBuf, Op, Request, Result, TryResult};
use freestone::sync::{Condvar, Mutex};

use crate::devices::SharedDevice;

/// Interval at which a job that waits for completions checks if it must end.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time that an ending job waits for a completion before its requests are considered to hang.
const END_GRACE: Duration = Duration::from_secs(5);

#[derive(Debug, Clone, Copy)]
pub struct Memory {
    at: *mut u8,
    len: usize,
}

impl Memory {
    /// Returns a reference to fio's buffer of `len` bytes at `at`.
    ///
    /// # Safety
    /// If `len` is not 0, `at` points to `len` initialised bytes. Nothing else accesses these bytes
    /// until the request has completed or was cancelled. They are writable if the request is a
    /// read.
    pub const unsafe fn new(at: *mut u8, len: usize) -> Self {
        Self { at, len }
    }

    fn skip(self, bytes: usize) -> Self {
        assert!(bytes <= self.len, "a device must not transfer more than requested");
        // SAFETY: within the same buffer, or one past its end.
        Self { at: unsafe { self.at.add(bytes) }, len: self.len - bytes }
    }

    fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: guaranteed by the caller of `new`.
        unsafe { slice::from_raw_parts(self.at, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: guaranteed by the caller of `new`; `self` is the only access to the bytes here.
        unsafe { slice::from_raw_parts_mut(self.at, self.len) }
    }
}

#[derive(Debug, PartialEq, Eq)]
pub enum QueueResult {
    Completed,
    InFlight,
}

#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// Token that fio passed when the request was queued.
    pub token: usize,
    pub outcome: Result<()>,
}

/// Error returned by [`Job::wait`]: the job must end, but its requests hang.
#[derive(Debug)]
pub struct Stuck;

/// A fio job on a device; used only by the job's own thread.
pub struct Job {
    shared: Arc<SharedDevice>,
    slots: Vec<Slot>,
    /// Indexes of unused slots.
    free: Vec<usize>,
    completions: Arc<CompletionQueue>,
    /// Batch of completions taken from the queue; empty between calls, and kept to reuse its
    /// memory.
    batch: Vec<CompletedRequest>,
    /// Events returned by the last call of `wait`.
    events: Vec<Event>,
}

#[derive(Default)]
struct Slot {
    token: usize,
    /// Incremented with each request of the slot, so that the completion of a cancelled request is
    /// recognised.
    generation: u64,
    in_flight: bool,
    /// fio's buffer for the data of a read; `None` for other operations.
    read_to: Option<Memory>,
    /// Buffer of the last request, kept to be reused by the next one.
    cached_buffer: Option<IoBuf>,
}

/// Completions that devices report from any thread. The lock is held only while the list changes.
#[derive(Default)]
struct CompletionQueue {
    list: Mutex<VecDeque<CompletedRequest>>,
    arrived: Condvar,
}

struct CompletedRequest {
    slot: usize,
    generation: u64,
    outcome: Result<()>,
    buffer: IoBuf,
}

impl Job {
    pub fn new(shared: Arc<SharedDevice>) -> Self {
        Self {
            shared,
            slots: Vec::new(),
            free: Vec::new(),
            completions: Arc::default(),
            batch: Vec::new(),
            events: Vec::new(),
        }
    }

    pub fn shared(&self) -> &SharedDevice {
        &self.shared
    }

    /// Starts a request. The part that the device can execute at once is executed inline; the
    /// rest is submitted. `token` identifies the request in its event.
    pub fn queue(&mut self, mut request: Request, mut memory: Memory, token: usize) -> Result<QueueResult> {
        loop {
            let buffer = match request.op {
                Op::Read => Buffer::Read(memory.bytes_mut()),
                Op::Write => Buffer::Write(memory.bytes()),
                _ => Buffer::None,
            };
            match self.shared.device().try_io(&request, buffer)? {
                TryResult::Done => return Ok(QueueResult::Completed),
                TryResult::Partly(done) => {
                    request = request.rest(done);
                    if matches!(request.op, Op::Read | Op::Write) {
                        memory = memory.skip(done as usize);
                    }
                }
                TryResult::WouldBlock => break,
            }
        }
        self.submit(request, memory, token).map(|()| QueueResult::InFlight)
    }

    fn submit(&mut self, request: Request, memory: Memory, token: usize) -> Result<()> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        let slot = &mut self.slots[index];
        let buffer = match request.op {
            Op::Read | Op::Write => buffer(slot.cached_buffer.take(), memory.len),
            _ => Ok(IoBuf::empty()),
        };
        let mut buffer = match buffer {
            Ok(buffer) => buffer,
            Err(error) => {
                self.free.push(index);
                return Err(error);
            }
        };
        if request.op == Op::Write {
            buffer.copy_from_slice(memory.bytes());
        }
        slot.token = token;
        slot.generation += 1;
        slot.in_flight = true;
        slot.read_to = (request.op == Op::Read).then_some(memory);
        let (completions, generation) = (Arc::clone(&self.completions), slot.generation);
        let done = Completion::new(move |outcome, buffer| {
            completions.put(CompletedRequest { slot: index, generation, outcome, buffer });
        });
        self.shared.device().submit(request, buffer, done);
        Ok(())
    }

    /// Waits until at least `min` requests have completed, or all in flight, or the timeout has
    /// passed. Returns at most `max` events. If `is_ending` returns true, the job stops waiting
    /// when no request has completed for [`END_GRACE`], and returns [`Stuck`] if the list of
    /// events is empty.
    pub fn wait(
        &mut self,
        min: usize,
        max: usize,
        timeout: Option<Duration>,
        is_ending: &dyn Fn() -> bool,
    ) -> std::result::Result<&[Event], Stuck> {
        self.events.clear();
        let min = min.min(self.slots.len() - self.free.len());
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut ending_since = None;
        loop {
            let before = self.events.len();
            self.collect(max);
            let now = Instant::now();
            if self.events.len() >= min || deadline.is_some_and(|deadline| deadline <= now) {
                return Ok(&self.events);
            }
            if self.events.len() > before {
                ending_since = None;
                continue;
            }
            if is_ending() && now.duration_since(*ending_since.get_or_insert(now)) > END_GRACE {
                return if self.events.is_empty() { Err(Stuck) } else { Ok(&self.events) };
            }
            let poll_at = now + POLL_INTERVAL;
            self.completions.wait_until(deadline.map_or(poll_at, |deadline| deadline.min(poll_at)));
        }
    }

    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Cancels the request with this token: its completion is ignored, and fio's buffer is not
    /// accessed any more. Returns false if the request is not in flight.
    pub fn cancel(&mut self, token: usize) -> bool {
        let found = self.slots.iter().position(|slot| slot.in_flight && slot.token == token);
        let Some(index) = found else { return false };
        self.slots[index].in_flight = false;
        self.free.push(index);
        true
    }

    fn collect(&mut self, max: usize) {
        let mut batch = mem::take(&mut self.batch);
        self.completions.take(max.saturating_sub(self.events.len()), &mut batch);
        for completion in batch.drain(..) {
            self.finish_slot(completion);
        }
        self.batch = batch;
    }

    fn finish_slot(&mut self, completion: CompletedRequest) {
        let slot = &mut self.slots[completion.slot];
        if !slot.in_flight || slot.generation != completion.generation {
            return;
        }
        let mut outcome = completion.outcome;
        if let (Ok(()), Some(mut memory)) = (outcome, slot.read_to.take()) {
            if completion.buffer.len() == memory.len {
                memory.bytes_mut().copy_from_slice(&completion.buffer);
            } else {
                outcome = Err(Error::Media);
            }
        }
        slot.in_flight = false;
        slot.cached_buffer = Some(completion.buffer);
        self.events.push(Event { token: slot.token, outcome });
        self.free.push(completion.slot);
    }
}

/// Returns a buffer of `len` bytes, reusing `cached_buffer` if it is large enough.
fn buffer(cached_buffer: Option<IoBuf>, len: usize) -> Result<IoBuf> {
    if let Some(mut cached_buffer) = cached_buffer {
        cached_buffer.set_len(len);
        if cached_buffer.len() == len {
            return Ok(cached_buffer);
        }
    }
    IoBuf::zeroed(len)
}

impl CompletionQueue {
    fn put(&self, completion: CompletedRequest) {
        self.list.lock().push_back(completion);
        self.arrived.notify_one();
    }

    fn take(&self, most: usize, to: &mut Vec<CompletedRequest>) {
        let mut list = self.list.lock();
        let count = most.min(list.len());
        to.extend(list.drain(..count));
    }

    /// Waits for a completion, until `then` at the latest.
    fn wait_until(&self, then: Instant) {
        let list = self.list.lock();
        if list.is_empty() {
            let left = then.saturating_duration_since(Instant::now());
            drop(self.arrived.wait_timeout(list, left));
        }
    }
}
