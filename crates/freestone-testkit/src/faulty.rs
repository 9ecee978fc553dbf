//! A memory disk with fault injection.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
};

use crate::Rng;

/// Time that the executor waits for a second request, so that there is an order to shuffle.
const GATHER: Duration = Duration::from_micros(100);
/// Timeout of [`Faulty::await_held`].
const HELD_MAX: Duration = Duration::from_secs(20);
/// Maximum number of stored complaints; one is enough to fail a test.
const COMPLAINTS_MAX: usize = 16;

/// Operations that a fault applies to. Operations are numbered from 0 in order of arrival since the
/// device was created; a fault for one kind counts only that kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// All operations.
    Always,
    /// The operation with this number.
    At(u64),
    /// The operation with this number and all later ones.
    From(u64),
}

/// Effect of a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Fails with this error, without effect.
    Fail(Error),
    /// Takes effect, but fails with this error.
    FailDone(Error),
    /// A write stores its first half (rounded down to blocks) and fails with [`Error::Media`].
    /// Other operations fail without effect.
    Tear,
    /// Is held until [`Faulty::heal`], and then takes effect.
    Hang,
    /// Starts after this time; later operations may overtake it.
    Delay(Duration),
    /// A read succeeds with one damaged byte per block. Other operations are not affected.
    Corrupt,
}

/// Counts of operations so far. Requests refused as invalid are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Reads.
    pub reads: u64,
    /// Writes.
    pub writes: u64,
    /// Flushes.
    pub flushes: u64,
    /// Discards and write zeroes.
    pub frees: u64,
    /// Longest read or write in bytes.
    pub largest: u64,
    /// Bytes stored by writes.
    pub bytes_written: u64,
    /// Bytes returned by reads.
    pub bytes_read: u64,
    /// Operations currently held until [`Faulty::heal`].
    pub held: u64,
    /// Operations in flight, including held ones.
    pub in_flight: u64,
    /// Largest number of operations in flight.
    pub in_flight_max: u64,
}

impl Counts {
    /// Returns the number of operations of all kinds, which is the number of the next one.
    pub fn total(&self) -> u64 {
        self.reads + self.writes + self.flushes + self.frees
    }

    fn of(&mut self, op: Op) -> &mut u64 {
        match op {
            Op::Read => &mut self.reads,
            Op::Write => &mut self.writes,
            Op::Flush => &mut self.flushes,
            Op::Discard | Op::WriteZeroes => &mut self.frees,
        }
    }
}

/// A memory disk to be placed below another device. Tries return "would block"; submitted requests
/// complete on a separate thread. The disk works correctly until [`fault`](Self::fault) and similar
/// calls change that; they may be called at any time.
///
/// The disk also checks its user: [`complaints`](Self::complaints) lists concurrent writes to one
/// block, invalid requests and, if enabled, reads of blocks that were never written.
///
/// Operations that are still held when the device is dropped fail with [`Error::Gone`].
///
/// ```
/// use freestone_core::device::{Blocking, Error, Flags, Op};
/// use freestone_testkit::{Faulty, What, When};
///
/// let disk = Faulty::new(1 << 20, 4096);
/// disk.fault(Some(Op::Write), When::At(1), What::Fail(Error::Media));
/// assert_eq!(disk.write_at(0, &[1; 4096], Flags::empty()), Ok(()));
/// assert_eq!(disk.write_at(0, &[2; 4096], Flags::empty()), Err(Error::Media));
/// assert_eq!(disk.counts().writes, 2);
/// ```
pub struct Faulty {
    shared: Arc<FaultyShared>,
    inline: bool,
    executor: Option<JoinHandle<()>>,
}

struct FaultyShared {
    state: Mutex<FaultyState>,
    changed: Condvar,
    geometry: Geometry,
}

struct FaultyState {
    bytes: Vec<u8>,
    /// Per block: true if it was written.
    written: Vec<bool>,
    faults: Vec<Fault>,
    no_space_from: Option<u64>,
    no_space_after: Option<u64>,
    truncated_at: Option<u64>,
    strict_reads: bool,
    queue: Vec<Job>,
    held: Vec<Job>,
    /// Ranges of writes in flight.
    writing: Vec<Range<u64>>,
    counts: Counts,
    complaints: Vec<String>,
    shuffle: Option<Rng>,
    /// Time per operation.
    service_time: Duration,
    stop: bool,
}

#[derive(Clone, Copy)]
struct Fault {
    op: Option<Op>,
    when: When,
    what: What,
}

struct Job {
    request: Request,
    buffer: IoBuf,
    done: Completion,
    fault: Option<What>,
    due: Instant,
}

// ---- construction and faults --------------------------------------------------------------------

impl Faulty {
    /// Returns a disk of `size` zero bytes. `size` must be a multiple of `logical_block`, which
    /// must be a power of two from 512 to 4096.
    pub fn new(size: usize, logical_block: u32) -> Self {
        assert!(logical_block.is_power_of_two() && (512..=4096).contains(&logical_block));
        assert!(size > 0 && size.is_multiple_of(logical_block as usize));
        let state = FaultyState {
            bytes: vec![0; size],
            written: vec![false; size / logical_block as usize],
            faults: Vec::new(),
            no_space_from: None,
            no_space_after: None,
            truncated_at: None,
            strict_reads: false,
            queue: Vec::new(),
            held: Vec::new(),
            writing: Vec::new(),
            counts: Counts::default(),
            complaints: Vec::new(),
            shuffle: None,
            service_time: Duration::ZERO,
            stop: false,
        };
        let geometry = Geometry {
            size: size as u64,
            logical_block,
            physical_block: logical_block,
            io_min: logical_block,
            io_opt: logical_block,
            discard_granularity: logical_block,
            fast_zeroes: false,
            volatile_cache: true,
            padding: 0,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: false,
            zones: None,
        };
        let shared = Arc::new(FaultyShared { state: Mutex::new(state), changed: Condvar::new(), geometry });
        let executor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.execute()
        });
        Self { shared, inline: false, executor: Some(executor) }
    }

    /// Completes operations in an order that depends on the seed and on arrival times.
    #[must_use]
    pub fn shuffled(self, seed: u64) -> Self {
        self.shared.lock().shuffle = Some(Rng::new(seed));
        self
    }

    /// Runs one operation at a time, in order of arrival, and takes `each` for it.
    #[must_use]
    pub fn one_by_one(self, each: Duration) -> Self {
        self.shared.lock().service_time = each;
        self
    }

    /// Completes tries inline, unless they are held or delayed. Submitted requests still run on the
    /// device's thread.
    #[must_use]
    pub fn inline(mut self) -> Self {
        self.inline = true;
        self
    }

    /// Reports reads of blocks that were never written as complaints.
    #[must_use]
    pub fn strict_reads(self) -> Self {
        self.shared.lock().strict_reads = true;
        self
    }

    /// Adds a fault for operations of kind `op` (`None`: all kinds) that `when` selects. If several
    /// faults match, the first one applies.
    pub fn fault(&self, op: Option<Op>, when: When, what: What) {
        self.shared.lock().faults.push(Fault { op, when, what });
    }

    /// Makes writes beyond this byte fail with [`Error::NoSpace`], without effect.
    pub fn no_space_from(&self, byte: u64) {
        self.shared.lock().no_space_from = Some(byte);
    }

    /// Makes a write fail with [`Error::NoSpace`], without effect, if more than `bytes` would then
    /// have been written in total.
    pub fn no_space_after(&self, bytes: u64) {
        self.shared.lock().no_space_after = Some(bytes);
    }

    /// Truncates the disk: operations beyond this byte fail with [`Error::Media`]. The geometry
    /// does not change.
    pub fn truncate_at(&self, byte: u64) {
        self.shared.lock().truncated_at = Some(byte);
    }

    /// Removes all faults; held operations take effect and complete.
    pub fn heal(&self) {
        let mut state = self.shared.lock();
        state.faults.clear();
        (state.no_space_from, state.no_space_after, state.truncated_at) = (None, None, None);
        let mut held = std::mem::take(&mut state.held);
        for job in &mut held {
            job.fault = None;
        }
        state.queue.append(&mut held);
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Completes held operations of one kind; the faults stay.
    pub fn release(&self, op: Op) {
        let mut state = self.shared.lock();
        let held = std::mem::take(&mut state.held);
        let (mut released, rest): (Vec<_>, Vec<_>) = held.into_iter().partition(|job| job.request.op == op);
        state.held = rest;
        for job in &mut released {
            job.fault = None;
        }
        state.queue.append(&mut released);
        drop(state);
        self.shared.changed.notify_all();
    }

    // ---- observation ----------------------------------------------------------------------------

    /// Returns the counts.
    pub fn counts(&self) -> Counts {
        let state = self.shared.lock();
        let held = state.held.len() as u64;
        Counts { held, ..state.counts }
    }

    /// Returns descriptions of the first misuses by the disk's user.
    pub fn complaints(&self) -> Vec<String> {
        self.shared.lock().complaints.clone()
    }

    /// Waits until at least `count` operations are held. Panics after a timeout.
    pub fn await_held(&self, count: u64) {
        let start = Instant::now();
        let mut state = self.shared.lock();
        while (state.held.len() as u64) < count {
            assert!(start.elapsed() < HELD_MAX, "{} of {count} operations hang", state.held.len());
            state = self.shared.wait(state, Some(GATHER));
        }
    }
}

// ---- implementation
// -------------------------------------------------------------------------------

impl FaultyShared {
    fn lock(&self) -> MutexGuard<'_, FaultyState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, FaultyState>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, FaultyState> {
        match most {
            Some(most) => self.changed.wait_timeout(state, most).unwrap_or_else(PoisonError::into_inner).0,
            None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
        }
    }

    /// Runs submitted operations until the device is dropped.
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
                let next = state.queue.iter().map(|job| job.due).min();
                state = self.wait(state, next.map(|due| due.saturating_duration_since(now)));
                continue;
            }
            let alone = ready.len() == 1 && !stop && state.queue[ready[0]].due + GATHER > now;
            if alone && state.shuffle.is_some() {
                state = self.wait(state, Some(GATHER));
                continue;
            }
            let at = match &mut state.shuffle {
                Some(rng) => ready[rng.below(ready.len() as u64) as usize],
                None => ready[0],
            };
            let Job { request, mut buffer, done, fault, .. } = state.queue.remove(at);
            let service_time = state.service_time;
            if !stop && service_time > Duration::ZERO {
                drop(state);
                thread::sleep(service_time);
                state = self.lock();
            }
            let outcome = state.perform(&request, &mut Some(&mut buffer), fault, &self.geometry);
            drop(state);
            done.complete(outcome, buffer);
            state = self.lock();
        }
    }
}

impl FaultyState {
    /// Numbers an operation and finds its fault.
    fn arrive(&mut self, request: &Request, geometry: &Geometry) -> Result<Option<What>> {
        if let Err(error) = request.check(geometry) {
            self.complain(format!("{request:?} is refused: {error}"));
            return Err(error);
        }
        let all = self.counts.total();
        let count = self.counts.of(request.op);
        let of_kind = *count;
        *count += 1;
        self.counts.largest = self.counts.largest.max(request.len);
        self.counts.in_flight += 1;
        self.counts.in_flight_max = self.counts.in_flight_max.max(self.counts.in_flight);
        let range = request.offset..request.offset + request.len;
        if request.op == Op::Write {
            let other = self.writing.iter().find(|other| other.start < range.end && range.start < other.end);
            if let Some(other) = other.cloned() {
                self.complain(format!("{request:?} while {other:?} is being written"));
            }
            self.writing.push(range);
        } else if request.op == Op::Read && self.strict_reads {
            let blocks = blocks(&range, geometry);
            if let Some(block) = blocks.clone().find(|&block| !self.written[block]) {
                self.complain(format!("{request:?} reads block {block}, which was never written"));
            }
        }
        let matches_fault = |fault: &&Fault| {
            let number = match fault.op {
                Some(op) if op == request.op => of_kind,
                Some(_) => return false,
                None => all,
            };
            match fault.when {
                When::Always => true,
                When::At(n) => n == number,
                When::From(n) => n <= number,
            }
        };
        Ok(self.faults.iter().find(matches_fault).map(|fault| fault.what))
    }

    /// Performs an operation and counts it as complete. `data` is the buffer of a read or write.
    fn perform(
        &mut self,
        request: &Request,
        data: &mut Option<&mut [u8]>,
        fault: Option<What>,
        geometry: &Geometry,
    ) -> Result<()> {
        self.counts.in_flight -= 1;
        let range = request.offset..request.offset + request.len;
        if request.op == Op::Write
            && let Some(at) = self.writing.iter().position(|other| *other == range)
        {
            self.writing.swap_remove(at);
        }
        match fault {
            Some(What::Fail(error)) => return Err(error),
            Some(What::Tear) if request.op != Op::Write => return Err(Error::Media),
            _ => {}
        }
        if self.truncated_at.is_some_and(|at| range.end > at) {
            return Err(Error::Media);
        }
        let at = range.start as usize..range.end as usize;
        match (request.op, data) {
            (Op::Write, Some(data)) => {
                let written = self.counts.bytes_written + request.len;
                if self.no_space_from.is_some_and(|from| range.end > from)
                    || self.no_space_after.is_some_and(|most| written > most)
                {
                    return Err(Error::NoSpace);
                }
                let block = geometry.logical_block as usize;
                let torn = fault == Some(What::Tear);
                let len = if torn { data.len() / 2 / block * block } else { data.len() };
                self.bytes[at.start..at.start + len].copy_from_slice(&data[..len]);
                self.counts.bytes_written += len as u64;
                self.written[blocks(&(range.start..range.start + len as u64), geometry)].fill(true);
                if torn {
                    return Err(Error::Media);
                }
            }
            (Op::Read, Some(data)) => {
                data.copy_from_slice(&self.bytes[at]);
                self.counts.bytes_read += request.len;
                if fault == Some(What::Corrupt) {
                    for block in data.chunks_mut(geometry.logical_block as usize) {
                        // In the middle, not in a header whose check would detect it.
                        let middle = block.len() / 2;
                        block[middle] ^= 0x55;
                    }
                }
            }
            (Op::Discard | Op::WriteZeroes, _) => {
                self.bytes[at].fill(0);
                self.written[blocks(&range, geometry)].fill(request.op == Op::WriteZeroes);
            }
            (Op::Flush, _) => {}
            (Op::Read | Op::Write, None) => return Err(Error::Misaligned),
        }
        if let Some(What::FailDone(error)) = fault { Err(error) } else { Ok(()) }
    }

    fn complain(&mut self, complaint: String) {
        if self.complaints.len() < COMPLAINTS_MAX {
            self.complaints.push(complaint);
        }
    }
}

fn blocks(range: &Range<u64>, geometry: &Geometry) -> Range<usize> {
    let block = u64::from(geometry.logical_block);
    (range.start / block) as usize..(range.end / block) as usize
}

impl Device for Faulty {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let geometry = &self.shared.geometry;
        if !self.inline {
            return request.check(geometry).map(|()| Tried::WouldBlock);
        }
        let mut state = self.shared.lock();
        let fault = state.arrive(request, geometry)?;
        if matches!(fault, Some(What::Hang | What::Delay(_))) {
            // Undoes the arrival: the operation arrives again when it is submitted.
            *state.counts.of(request.op) -= 1;
            state.counts.in_flight -= 1;
            if request.op == Op::Write {
                state.writing.pop();
            }
            return Ok(Tried::WouldBlock);
        }
        let outcome = match buffer {
            Buffer::Read(out) => state.perform(request, &mut Some(out), fault, geometry),
            Buffer::Write(data) => state.perform(request, &mut Some(&mut data.to_vec()), fault, geometry),
            Buffer::None => state.perform(request, &mut None, fault, geometry),
        };
        outcome.map(|()| Tried::Done)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let mut state = self.shared.lock();
        let fault = match state.arrive(&request, &self.shared.geometry) {
            Ok(fault) => fault,
            Err(error) => {
                drop(state);
                return done.complete(Err(error), buffer);
            }
        };
        let delay = if let Some(What::Delay(delay)) = fault { delay } else { Duration::ZERO };
        let job = Job { request, buffer, done, fault, due: Instant::now() + delay };
        if fault == Some(What::Hang) {
            state.held.push(job);
        } else {
            state.queue.push(job);
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        match offset.checked_add(len) {
            Some(end) if len > 0 && end <= self.shared.geometry.size => {
                row(Extent { offset, len, kind: ExtentKind::Data });
                Ok(len)
            }
            _ => Err(Error::OutOfRange),
        }
    }
}

impl Drop for Faulty {
    /// Queued operations complete; held ones fail with [`Error::Gone`].
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        let held = std::mem::take(&mut state.held);
        drop(state);
        self.shared.changed.notify_all();
        drop(held);
        if let Some(executor) = self.executor.take()
            && executor.thread().id() != thread::current().id()
        {
            // The panic hook has reported a panic of the thread.
            let _ = executor.join();
        }
    }
}

impl fmt::Debug for Faulty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faulty({:?})", self.counts())
    }
}
