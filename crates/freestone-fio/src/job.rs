//! A job's place at a device: what it has on its way, and what was answered.
#![expect(unsafe_code)]
// UNSAFETY: fio's buffers are known by address and length only, and a read that was submitted is
// copied there later.

use std::collections::VecDeque;
use std::mem;
use std::slice;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use freestone::device::{Buffer, Completion, Error, IoBuf, Op, Request, Result, Tried};

use crate::devices::SharedDevice;

/// How often one who waits looks whether the job is to end.
const LOOK: Duration = Duration::from_millis(50);
/// How long a job that is to end waits for a request that does not.
const END_GRACE: Duration = Duration::from_secs(5);

/// The memory of one request of fio.
#[derive(Debug, Clone, Copy)]
pub struct Memory {
    at: *mut u8,
    len: usize,
}

impl Memory {
    /// The memory of `len` bytes at `at`.
    ///
    /// # Safety
    /// If `len` is not 0, `at` points to `len` initialised bytes. Nobody else touches these bytes until
    /// the request was answered or cancelled. They can be written if the request is a read.
    pub const unsafe fn new(at: *mut u8, len: usize) -> Self {
        Self { at, len }
    }

    fn skip(self, bytes: usize) -> Self {
        assert!(bytes <= self.len, "a device does no more than it was asked");
        // SAFETY: inside the same memory, or just behind it.
        Self { at: unsafe { self.at.add(bytes) }, len: self.len - bytes }
    }

    fn bytes(&self) -> &[u8] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: the promise of `new`.
        unsafe { slice::from_raw_parts(self.at, self.len) }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        if self.len == 0 {
            return &mut [];
        }
        // SAFETY: the promise of `new`; `self` is the only way to it here.
        unsafe { slice::from_raw_parts_mut(self.at, self.len) }
    }
}

/// How far a request came at once.
#[derive(Debug, PartialEq, Eq)]
pub enum Queued {
    /// It is done.
    Done,
    /// It will be answered.
    OnItsWay,
}

/// What one request came to.
#[derive(Debug, Clone, Copy)]
pub struct Event {
    /// As it was given.
    pub token: usize,
    /// Its end.
    pub outcome: Result<()>,
}

/// Why one no longer waits.
#[derive(Debug)]
pub struct Stuck;

/// A job's place at a device; used by its own thread only.
pub struct Job {
    shared: Arc<SharedDevice>,
    flights: Vec<Flight>,
    /// Flights that are not on their way.
    free: Vec<usize>,
    answers: Arc<Answers>,
    /// Taken from `answers`; empty between two calls.
    batch: Vec<Answer>,
    /// What the last call of `wait` found.
    events: Vec<Event>,
}

/// A request on its way, or the place for one.
#[derive(Default)]
struct Flight {
    token: usize,
    /// Tells an answer from one that was cancelled.
    generation: u64,
    on_its_way: bool,
    /// Where a read goes.
    read_to: Option<Memory>,
    /// Memory of earlier requests.
    spare: Option<IoBuf>,
}

/// What devices have answered. The lock is held to put or take, never during anything else.
#[derive(Default)]
struct Answers {
    list: Mutex<VecDeque<Answer>>,
    arrived: Condvar,
}

struct Answer {
    flight: usize,
    generation: u64,
    outcome: Result<()>,
    buffer: IoBuf,
}

impl Job {
    /// A place at the device.
    pub fn new(shared: Arc<SharedDevice>) -> Self {
        Self {
            shared,
            flights: Vec::new(),
            free: Vec::new(),
            answers: Arc::default(),
            batch: Vec::new(),
            events: Vec::new(),
        }
    }

    /// The device with its name.
    pub fn shared(&self) -> &SharedDevice {
        &self.shared
    }

    /// Starts a request: as much as is possible at once on this thread, the rest in the background.
    pub fn queue(&mut self, mut request: Request, mut memory: Memory, token: usize) -> Result<Queued> {
        loop {
            let buffer = match request.op {
                Op::Read => Buffer::Read(memory.bytes_mut()),
                Op::Write => Buffer::Write(memory.bytes()),
                _ => Buffer::None,
            };
            match self.shared.device().try_io(&request, buffer)? {
                Tried::Done => return Ok(Queued::Done),
                Tried::Partly(done) => {
                    request = request.rest(done);
                    if matches!(request.op, Op::Read | Op::Write) {
                        memory = memory.skip(done as usize);
                    }
                }
                Tried::WouldBlock => break,
            }
        }
        self.submit(request, memory, token).map(|()| Queued::OnItsWay)
    }

    fn submit(&mut self, request: Request, memory: Memory, token: usize) -> Result<()> {
        let index = self.free.pop().unwrap_or_else(|| {
            self.flights.push(Flight::default());
            self.flights.len() - 1
        });
        let flight = &mut self.flights[index];
        let buffer = match request.op {
            Op::Read | Op::Write => buffer(flight.spare.take(), memory.len),
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
        flight.token = token;
        flight.generation += 1;
        flight.on_its_way = true;
        flight.read_to = (request.op == Op::Read).then_some(memory);
        let (answers, generation) = (Arc::clone(&self.answers), flight.generation);
        let done = Completion::new(move |outcome, buffer| {
            answers.put(Answer { flight: index, generation, outcome, buffer });
        });
        self.shared.device().submit(request, buffer, done);
        Ok(())
    }

    /// Waits until at least `min` requests were answered, or all that are on their way, or the
    /// timeout has passed. Takes at most `max`. A job that `is_ending` does not wait for what
    /// hangs.
    pub fn wait(
        &mut self,
        min: usize,
        max: usize,
        timeout: Option<Duration>,
        is_ending: &dyn Fn() -> bool,
    ) -> std::result::Result<&[Event], Stuck> {
        self.events.clear();
        let min = min.min(self.flights.len() - self.free.len());
        let deadline = timeout.map(|timeout| Instant::now() + timeout);
        let mut ending_since = None;
        loop {
            let before = self.events.len();
            self.take(max);
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
            let look = now + LOOK;
            self.answers.wait_until(deadline.map_or(look, |deadline| deadline.min(look)));
        }
    }

    /// What the last wait found.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// Forgets a request that is on its way: it is done or not, and its memory is left alone.
    /// False: there is none.
    pub fn cancel(&mut self, token: usize) -> bool {
        let found = self.flights.iter().position(|flight| flight.on_its_way && flight.token == token);
        let Some(index) = found else { return false };
        self.flights[index].on_its_way = false;
        self.free.push(index);
        true
    }

    fn take(&mut self, max: usize) {
        let mut batch = mem::take(&mut self.batch);
        self.answers.take(max.saturating_sub(self.events.len()), &mut batch);
        for answer in batch.drain(..) {
            self.settle(answer);
        }
        self.batch = batch;
    }

    fn settle(&mut self, answer: Answer) {
        let flight = &mut self.flights[answer.flight];
        if !flight.on_its_way || flight.generation != answer.generation {
            return;
        }
        let mut outcome = answer.outcome;
        if let (Ok(()), Some(mut memory)) = (outcome, flight.read_to.take()) {
            if answer.buffer.len() == memory.len {
                memory.bytes_mut().copy_from_slice(&answer.buffer);
            } else {
                outcome = Err(Error::Media);
            }
        }
        flight.on_its_way = false;
        flight.spare = Some(answer.buffer);
        self.events.push(Event { token: flight.token, outcome });
        self.free.push(answer.flight);
    }
}

/// Memory of this length, from what is there.
fn buffer(spare: Option<IoBuf>, len: usize) -> Result<IoBuf> {
    if let Some(mut spare) = spare {
        spare.show(len);
        if spare.len() == len {
            return Ok(spare);
        }
    }
    IoBuf::zeroed(len)
}

impl Answers {
    fn put(&self, answer: Answer) {
        self.lock().push_back(answer);
        self.arrived.notify_one();
    }

    fn take(&self, most: usize, to: &mut Vec<Answer>) {
        let mut list = self.lock();
        let count = most.min(list.len());
        to.extend(list.drain(..count));
    }

    /// Waits for an answer, or until then.
    fn wait_until(&self, then: Instant) {
        let list = self.lock();
        if list.is_empty() {
            let left = then.saturating_duration_since(Instant::now());
            drop(self.arrived.wait_timeout(list, left).unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Answer>> {
        // Each change is one call.
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
