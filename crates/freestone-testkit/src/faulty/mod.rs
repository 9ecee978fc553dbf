//! A simulated disk in memory with fault injection.

mod operations;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_core::sync::{Condvar, Mutex, MutexGuard};

use crate::Rng;

/// Time that the executor waits for a second operation, so that there are several to shuffle.
const GATHER: Duration = Duration::from_micros(100);
/// Time after which [`FaultyDisk::wait_held`] panics.
const HELD_MAX: Duration = Duration::from_secs(20);

/// Selects the operations to which a fault applies. Operations are numbered from 0 in order of arrival since
/// the disk was created. A fault for one kind of operation counts only that kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultSchedule {
    /// The fault applies to all operations.
    Always,
    /// The fault applies to the operation with this number.
    At(u64),
    /// The fault applies to the operation with this number and all later ones.
    From(u64),
}

/// Effect of a fault on an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FaultEffect {
    /// The operation fails with this error, without effect.
    Fail(Error),
    /// The operation takes effect, but fails with this error.
    FailDone(Error),
    /// A write stores its first half (rounded down to blocks) and fails with [`Error::Media`].
    /// Other operations fail without effect.
    Tear,
    /// The operation is held until [`FaultyDisk::heal`] or [`FaultyDisk::release`], and then takes effect.
    Hang,
    /// The operation starts after this time; later operations may overtake it.
    Delay(Duration),
    /// A read succeeds, but one byte per block is damaged. Other operations are not affected.
    Corrupt,
}

/// Counts of operations since the disk was created. Requests refused as invalid are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OpCounts {
    pub reads: u64,
    pub writes: u64,
    pub flushes: u64,
    /// Number of discards and of writes of zeroes.
    pub frees: u64,
    /// Length in bytes of the longest operation.
    pub largest: u64,
    /// Number of bytes stored by writes.
    pub bytes_written: u64,
    /// Number of bytes returned by reads.
    pub bytes_read: u64,
    /// Number of operations that are held now.
    pub held: u64,
    /// Number of operations in flight now, including held ones.
    pub in_flight: u64,
    /// Largest number of operations that were in flight at the same time.
    pub in_flight_max: u64,
}

impl OpCounts {
    /// Returns the number of operations of all kinds, which is also the number of the next one.
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

/// A simulated disk in memory, to be placed below another device. Tries return "would block"; submitted
/// requests complete on a separate thread. The disk works correctly until [`fault`](Self::fault) and similar
/// calls inject faults; these may be called at any time.
///
/// The disk also checks its user: [`violations`](Self::violations) lists concurrent writes to one
/// block, invalid requests and, if enabled, reads of blocks that were never written.
///
/// Operations that are still held when the device is dropped fail with [`Error::Gone`].
///
/// ```
/// use freestone_core::device::{Blocking, Error, Flags, Op};
/// use freestone_testkit::{FaultyDisk, FaultEffect, FaultSchedule};
///
/// let disk = FaultyDisk::new(1 << 20, 4096);
/// disk.fault(Some(Op::Write), FaultSchedule::At(1), FaultEffect::Fail(Error::Media));
/// assert_eq!(disk.write_at(0, &[1; 4096], Flags::empty()), Ok(()));
/// assert_eq!(disk.write_at(0, &[2; 4096], Flags::empty()), Err(Error::Media));
/// assert_eq!(disk.counts().writes, 2);
/// ```
pub struct FaultyDisk {
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
    /// For each block, true if it was ever written.
    written: Vec<bool>,
    faults: Vec<Fault>,
    no_space_from: Option<u64>,
    no_space_after: Option<u64>,
    truncated_at: Option<u64>,
    strict_reads: bool,
    queue: Vec<Job>,
    held: Vec<Job>,
    /// Byte ranges of the writes in flight.
    writing: Vec<Range<u64>>,
    counts: OpCounts,
    violations: Vec<String>,
    shuffle: Option<Rng>,
    /// Time that each operation takes.
    service_time: Duration,
    stop: bool,
}

#[derive(Clone, Copy)]
struct Fault {
    op: Option<Op>,
    schedule: FaultSchedule,
    effect: FaultEffect,
}

struct Job {
    request: Request,
    buffer: IoBuf,
    done: Completion,
    fault: Option<FaultEffect>,
    due: Instant,
}

// ---- construction and faults --------------------------------------------------------------------

impl FaultyDisk {
    /// Returns a disk of `size` zero bytes.
    ///
    /// # Panics
    /// Panics unless `size` is a multiple of `logical_block`, which must be a power of two from 512 to 4096.
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
            counts: OpCounts::default(),
            violations: Vec::new(),
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

    /// Completes operations in a random order, which depends on the seed and on arrival times.
    #[must_use]
    pub fn shuffled(self, seed: u64) -> Self {
        self.shared.state.lock().shuffle = Some(Rng::new(seed));
        self
    }

    /// Performs one operation at a time, in order of arrival. Each takes the time `each`.
    #[must_use]
    pub fn one_by_one(self, each: Duration) -> Self {
        self.shared.state.lock().service_time = each;
        self
    }

    /// Completes tries on the caller's thread, unless they are held or delayed. Submitted requests still run
    /// on the disk's thread.
    #[must_use]
    pub fn inline(mut self) -> Self {
        self.inline = true;
        self
    }

    /// Reports reads of blocks that were never written as violations.
    #[must_use]
    pub fn strict_reads(self) -> Self {
        self.shared.state.lock().strict_reads = true;
        self
    }

    /// Adds a fault for the operations of kind `op` (`None`: of all kinds) that `schedule` selects. If
    /// several faults match, the one added first applies.
    pub fn fault(&self, op: Option<Op>, schedule: FaultSchedule, effect: FaultEffect) {
        self.shared.state.lock().faults.push(Fault { op, schedule, effect });
    }

    /// Makes writes that reach beyond this byte offset fail with [`Error::NoSpace`], without effect.
    pub fn no_space_from(&self, byte: u64) {
        self.shared.state.lock().no_space_from = Some(byte);
    }

    /// Makes a write fail with [`Error::NoSpace`], without effect, if more than `bytes` would then
    /// have been written in total.
    pub fn no_space_after(&self, bytes: u64) {
        self.shared.state.lock().no_space_after = Some(bytes);
    }

    /// Truncates the disk: operations that reach beyond this byte offset fail with [`Error::Media`]. The
    /// geometry does not change.
    pub fn truncate_at(&self, byte: u64) {
        self.shared.state.lock().truncated_at = Some(byte);
    }

    /// Removes all faults. Held operations take effect and complete.
    pub fn heal(&self) {
        let mut state = self.shared.state.lock();
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

    /// Completes the held operations of one kind, which take effect. The faults stay.
    pub fn release(&self, op: Op) {
        let mut state = self.shared.state.lock();
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

    pub fn counts(&self) -> OpCounts {
        let state = self.shared.state.lock();
        let held = state.held.len() as u64;
        OpCounts { held, ..state.counts }
    }

    /// Returns descriptions of contract violations by the user of the disk: at most the first 16.
    pub fn violations(&self) -> Vec<String> {
        self.shared.state.lock().violations.clone()
    }

    /// Waits until at least `count` operations are held.
    ///
    /// # Panics
    /// Panics after 20 seconds.
    pub fn wait_held(&self, count: u64) {
        let start = Instant::now();
        let mut state = self.shared.state.lock();
        while (state.held.len() as u64) < count {
            assert!(start.elapsed() < HELD_MAX, "{} of {count} operations hang", state.held.len());
            state = self.shared.wait(state, Some(GATHER));
        }
    }
}

impl FaultyShared {
    fn wait<'a>(
        &self,
        state: MutexGuard<'a, FaultyState>,
        most: Option<Duration>,
    ) -> MutexGuard<'a, FaultyState> {
        match most {
            Some(most) => self.changed.wait_timeout(state, most).0,
            None => self.changed.wait(state),
        }
    }

    /// Performs submitted operations until the disk is dropped.
    fn execute(&self) {
        let mut state = self.state.lock();
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
                state = self.state.lock();
            }
            let outcome = state.perform(&request, &mut Some(&mut buffer), fault, &self.geometry);
            drop(state);
            done.complete(outcome, buffer);
            state = self.state.lock();
        }
    }
}

impl Device for FaultyDisk {
    fn geometry(&self) -> Geometry {
        self.shared.geometry
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let geometry = &self.shared.geometry;
        if !self.inline {
            return request.check(geometry).map(|()| TryResult::WouldBlock);
        }
        let mut state = self.shared.state.lock();
        let fault = state.arrive(request, geometry)?;
        if matches!(fault, Some(FaultEffect::Hang | FaultEffect::Delay(_))) {
            // Undo the arrival: the operation arrives again when it is submitted.
            *state.counts.of(request.op) -= 1;
            state.counts.in_flight -= 1;
            if request.op == Op::Write {
                state.writing.pop();
            }
            return Ok(TryResult::WouldBlock);
        }
        let outcome = match buffer {
            Buffer::Read(out) => state.perform(request, &mut Some(out), fault, geometry),
            Buffer::Write(data) => state.perform(request, &mut Some(&mut data.to_vec()), fault, geometry),
            Buffer::None => state.perform(request, &mut None, fault, geometry),
        };
        outcome.map(|()| TryResult::Done)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let mut state = self.shared.state.lock();
        let fault = match state.arrive(&request, &self.shared.geometry) {
            Ok(fault) => fault,
            Err(error) => {
                drop(state);
                return done.complete(Err(error), buffer);
            }
        };
        let delay = if let Some(FaultEffect::Delay(delay)) = fault { delay } else { Duration::ZERO };
        let job = Job { request, buffer, done, fault, due: Instant::now() + delay };
        if fault == Some(FaultEffect::Hang) {
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

impl Drop for FaultyDisk {
    /// Completes queued operations; held ones fail with [`Error::Gone`].
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        state.stop = true;
        let held = std::mem::take(&mut state.held);
        drop(state);
        self.shared.changed.notify_all();
        drop(held);
        if let Some(executor) = self.executor.take()
            && executor.thread().id() != thread::current().id()
        {
            // The panic hook has already reported a panic of the thread.
            let _ = executor.join();
        }
    }
}

impl fmt::Debug for FaultyDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultyDisk({:?})", self.counts())
    }
}
