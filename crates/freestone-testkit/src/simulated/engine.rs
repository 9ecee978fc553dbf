//! The engine of the simulated disks: requests in flight, the thread that completes them, requests that hang, and
//! checks of the disk's user. Content, faults and counts belong to a [`DiskModel`].

use std::ops::Range;
use std::time::Duration;

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_core::sync::{Arc, Condvar, Instant, Mutex, MutexGuard, thread};

/// Time that the executor waits for a second operation, so that there are several to choose from.
const GATHER: Duration = Duration::from_micros(100);
/// Maximum number of stored violations; one is enough to fail a test.
const MAX_VIOLATIONS: usize = 16;

/// When an operation starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    Now,
    /// Later operations may overtake it.
    After(Duration),
    /// Not before [`DiskShared::release`].
    Held,
}

/// Content and faults of a simulated disk.
pub trait DiskModel: Send + 'static {
    /// Effect of a fault on one operation; decided when the operation arrives.
    type Fate: Copy + Send;

    fn geometry(&self) -> Geometry;

    /// Returns an error if the disk accepts no requests any more.
    fn admit(&mut self) -> Result<()> {
        Ok(())
    }

    /// Returns true if this try completes on the caller's thread. The others must be submitted.
    fn is_inline(&mut self) -> bool;

    /// Counts a valid operation and decides its fate.
    fn arrive(&mut self, request: &Request, violations: &mut Violations) -> Self::Fate;

    /// Reverts [`arrive`](Self::arrive) of a try that must be submitted, and will arrive again.
    fn withdraw(&mut self, request: &Request, fate: Self::Fate);

    fn start(fate: Self::Fate) -> Start;

    /// Returns the number of bytes of a try that are completed.
    fn part_of_try(&mut self, request: &Request) -> u64 {
        request.len
    }

    /// Performs an operation. `buffer` is empty unless the request reads or writes.
    fn perform(&mut self, request: &Request, buffer: &mut [u8], fate: Self::Fate) -> Result<()>;

    /// Returns the index, below `ready`, of the operation that completes next; they are in order of arrival.
    fn choose(&mut self, ready: usize) -> usize;

    /// Returns true if the executor waits a moment for a second operation.
    fn gathers(&self) -> bool {
        false
    }

    /// Time that each operation takes.
    fn service_time(&self) -> Duration {
        Duration::ZERO
    }

    /// Returns true if concurrent writes to the same bytes are not a violation.
    fn allows_overlap(&self) -> bool {
        false
    }

    fn extents(&self, range: Range<u64>) -> Vec<Extent>;

    /// Counts held operations that fail because the disk is dropped.
    fn lose(&mut self, _held: usize) {}
}

/// Descriptions of contract violations by the user of a disk: at most the first 16.
#[derive(Default)]
pub struct Violations(Vec<String>);

impl Violations {
    pub fn record(&mut self, violation: String) {
        if self.0.len() < MAX_VIOLATIONS {
            self.0.push(violation);
        }
    }
}

/// A simulated disk. Dropping the disk completes its waiting operations; held ones fail with [`Error::Gone`].
pub struct DiskEngine<M: DiskModel> {
    shared: Arc<DiskShared<M>>,
    executor: Option<thread::JoinHandle<()>>,
}

/// The state of a disk, and its controls. Outlives the disk.
pub struct DiskShared<M: DiskModel> {
    /// Held during a lookup or one operation, never while a completion runs.
    state: Mutex<DiskState<M>>,
    changed: Condvar,
}

pub struct DiskState<M: DiskModel> {
    pub model: M,
    queue: Vec<Job<M::Fate>>,
    held: Vec<Job<M::Fate>>,
    /// Byte ranges of the writes that have arrived and not completed.
    writing: Vec<Range<u64>>,
    violations: Violations,
    stop: bool,
}

/// An operation in flight.
pub struct Job<F> {
    pub request: Request,
    pub buffer: IoBuf,
    pub done: Completion,
    fate: F,
    due: Instant,
}

// ---- control ------------------------------------------------------------------------------------

impl<M: DiskModel> DiskEngine<M> {
    pub fn new(model: M) -> Self {
        let state = DiskState {
            model,
            queue: Vec::new(),
            held: Vec::new(),
            writing: Vec::new(),
            violations: Violations::default(),
            stop: false,
        };
        let shared = Arc::new(DiskShared { state: Mutex::new(state), changed: Condvar::new() });
        let executor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.execute()
        });
        Self { shared, executor: Some(executor) }
    }

    pub fn shared(&self) -> &Arc<DiskShared<M>> {
        &self.shared
    }
}

impl<M: DiskModel> DiskShared<M> {
    pub fn lock(&self) -> MutexGuard<'_, DiskState<M>> {
        self.state.lock()
    }

    /// Lets the executor see a change of the state.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// Performs and completes the held operations for which `which` returns true.
    pub fn release(&self, mut which: impl FnMut(&Request) -> bool) {
        let mut state = self.lock();
        let held = std::mem::take(&mut state.held);
        let (mut released, rest): (Vec<_>, Vec<_>) = held.into_iter().partition(|job| which(&job.request));
        state.held = rest;
        state.queue.append(&mut released);
        drop(state);
        self.notify();
    }

    /// Waits until at least `count` operations are held.
    ///
    /// # Panics
    /// Panics after `timeout`.
    pub fn wait_held(&self, count: usize, timeout: Duration) {
        let start = Instant::now();
        let mut state = self.lock();
        while state.held.len() < count {
            let left = timeout.saturating_sub(start.elapsed());
            assert!(!left.is_zero(), "{} of {count} operations hang", state.held.len());
            state = self.changed.wait_timeout(state, left).0;
        }
    }

    pub fn violations(&self) -> Vec<String> {
        self.lock().violations.0.clone()
    }

    /// Completes submitted operations until the disk is dropped.
    fn execute(&self) {
        let mut state = self.lock();
        loop {
            let now = Instant::now();
            let stop = state.stop;
            let ready: Vec<usize> =
                (0..state.queue.len()).filter(|&at| stop || state.queue[at].due <= now).collect();
            if ready.is_empty() {
                if stop {
                    return;
                }
                state = match state.queue.iter().map(|job| job.due).min() {
                    Some(due) => self.changed.wait_timeout(state, due.saturating_duration_since(now)).0,
                    None => self.changed.wait(state),
                };
                continue;
            }
            let alone = ready.len() == 1 && state.queue[ready[0]].due + GATHER > now;
            if alone && !stop && state.model.gathers() {
                state = self.changed.wait_timeout(state, GATHER).0;
                continue;
            }
            let at = ready[state.model.choose(ready.len())];
            let Job { request, mut buffer, done, fate, .. } = state.queue.remove(at);
            let service_time = state.model.service_time();
            if !stop && service_time > Duration::ZERO {
                drop(state);
                thread::sleep(service_time);
                state = self.lock();
            }
            state.finish_write(&request);
            let outcome = state.model.perform(&request, &mut buffer, fate);
            drop(state);
            done.complete(outcome, buffer);
            state = self.lock();
        }
    }
}

// ---- requests -----------------------------------------------------------------------------------

impl<M: DiskModel> DiskState<M> {
    pub fn held(&self) -> usize {
        self.held.len()
    }

    /// Removes the operations in flight, which the caller must complete.
    pub fn take_in_flight(&mut self) -> Vec<Job<M::Fate>> {
        self.writing.clear();
        let mut taken = std::mem::take(&mut self.queue);
        taken.append(&mut self.held);
        taken
    }

    /// Checks the contract for an operation that arrives, and decides its fate.
    fn arrive(&mut self, request: &Request) -> Result<M::Fate> {
        self.model.admit()?;
        if let Err(error) = request.check(&self.model.geometry()) {
            self.violations.record(format!("{request:?} is refused: {error}"));
            return Err(error);
        }
        if request.op == Op::Write {
            let range = bytes_of(request);
            let other = self.writing.iter().find(|other| other.start < range.end && range.start < other.end);
            if let Some(other) = other.filter(|_| !self.model.allows_overlap()) {
                self.violations.record(format!("{request:?} while {other:?} is being written"));
            }
            self.writing.push(range);
        }
        Ok(self.model.arrive(request, &mut self.violations))
    }

    fn finish_write(&mut self, request: &Request) {
        if request.op == Op::Write
            && let Some(at) = self.writing.iter().rposition(|other| *other == bytes_of(request))
        {
            self.writing.swap_remove(at);
        }
    }
}

fn bytes_of(request: &Request) -> Range<u64> {
    request.offset..request.offset + request.len
}

impl<M: DiskModel> Device for DiskEngine<M> {
    fn geometry(&self) -> Geometry {
        self.shared.lock().model.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let mut state = self.shared.lock();
        if !state.model.is_inline() {
            return request.check(&state.model.geometry()).map(|()| TryResult::WouldBlock);
        }
        let fate = state.arrive(request)?;
        state.finish_write(request);
        if M::start(fate) != Start::Now {
            state.model.withdraw(request, fate);
            return Ok(TryResult::WouldBlock);
        }
        let len = state.model.part_of_try(request);
        let part = Request { len, ..*request };
        match buffer {
            Buffer::Read(out) => state.model.perform(&part, &mut out[..len as usize], fate),
            Buffer::Write(data) => state.model.perform(&part, &mut data[..len as usize].to_vec(), fate),
            Buffer::None => state.model.perform(&part, &mut [], fate),
        }?;
        Ok(if len == request.len { TryResult::Done } else { TryResult::Partly(len) })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let mut state = self.shared.lock();
        let fate = match state.arrive(&request) {
            Ok(fate) => fate,
            Err(error) => {
                drop(state);
                return done.complete(Err(error), buffer);
            }
        };
        let start = M::start(fate);
        let delay = if let Start::After(delay) = start { delay } else { Duration::ZERO };
        let job = Job { request, buffer, done, fate, due: Instant::now() + delay };
        if start == Start::Held {
            state.held.push(job);
        } else {
            state.queue.push(job);
        }
        drop(state);
        self.shared.notify();
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let mut state = self.shared.lock();
        let end = offset.checked_add(len).filter(|&end| len > 0 && end <= state.model.geometry().size);
        let end = end.ok_or(Error::OutOfRange)?;
        state.model.admit()?;
        let extents = state.model.extents(offset..end);
        drop(state);
        let mut covered = 0;
        for extent in extents {
            covered += extent.len;
            if !row(extent) {
                break;
            }
        }
        Ok(covered)
    }
}

impl<M: DiskModel> Drop for DiskEngine<M> {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        let held = std::mem::take(&mut state.held);
        state.model.lose(held.len());
        drop(state);
        self.shared.notify();
        for job in held {
            job.done.complete(Err(Error::Gone), job.buffer);
        }
        if let Some(executor) = self.executor.take()
            && executor.thread().id() != thread::current().id()
        {
            // The panic hook has already reported a panic of the thread.
            let _ = executor.join();
        }
    }
}
