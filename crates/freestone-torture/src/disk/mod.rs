//! A simulated disk in memory for the bottom of stacks. As on real disks, requests fail, fail although they
//! were done, tear, are delayed or hang. The disk also runs out of space, shrinks and loses power.
//!
//! A [`Plan`] gives the probability of each fault; [`DiskControl`] can replace it at any time. The disk
//! counts each error ([`FaultCounts`]), so a judge can decide whether an error of a device above the disk has
//! a cause. Some tries (calls that may complete without waiting) complete on the caller's thread; submitted
//! requests complete on a thread of the disk, in random order.
//!
//! The disk also checks its user: [`DiskControl::violations`] lists requests that break the
//! contract, and concurrent writes to one sector.

mod media;
mod plan;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;

use freestone::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, TryResult,
};
use freestone_testkit::Rng;

use crate::oracle::SECTOR_BYTES;
use crate::rt::sync::{Arc, Condvar, Mutex, MutexGuard};
use crate::rt::thread::{self, JoinHandle};
use crate::rt::time::{Duration, Instant};
use media::Media;
use plan::Fate;
pub use plan::{FaultCounts, FaultRates, Plan};
use work::{Job, Shared, State, sectors};

/// Maximum number of contract violations stored; one is enough to fail a run.
const MAX_VIOLATIONS: usize = 16;
const SECTOR: u64 = SECTOR_BYTES as u64;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskConfig {
    /// Size in bytes, a multiple of the logical block size.
    pub size: u64,
    /// Logical block size in bytes: a power of two, 512 to 4096.
    pub logical_block: u32,
    /// The disk has a volatile write cache: writes without FUA are durable only after a flush.
    pub volatile_cache: bool,
    /// Tries per thousand that complete on the caller's thread. The others must be submitted.
    pub inline: u16,
    /// Does not report concurrent writes to one sector, because the user of the disk passes client requests
    /// through.
    pub overlap: bool,
    pub plan: Plan,
}

impl Default for DiskConfig {
    fn default() -> Self {
        let plan = Plan::default();
        Self { size: 1 << 20, logical_block: 512, volatile_cache: true, inline: 300, overlap: false, plan }
    }
}

/// A simulated disk. Dropping the disk completes its waiting requests and fails its hanging ones with
/// [`Error::Gone`].
///
/// ```
/// use freestone::device::{Blocking, Error, Flags};
/// use freestone_torture::disk::{FaultRates, DiskConfig, Plan, SimDisk};
///
/// let disk = SimDisk::new(DiskConfig::default(), 1);
/// disk.write_at(0, &[1; 512], Flags::FUA).unwrap();
/// disk.write_at(512, &[2; 512], Flags::empty()).unwrap();
/// let fails = FaultRates { fail_done: 1000, ..FaultRates::default() };
/// disk.control().set_plan(Plan { write: fails, ..Plan::default() });
/// assert_eq!(disk.write_at(1024, &[3; 512], Flags::FUA), Err(Error::Media));
/// assert_eq!(disk.control().fault_counts().failed_done, 1);
/// disk.control().power_cut(7);
/// let disk = disk.control().reopen(2);
/// let mut sector = [0; 512];
/// disk.read_at(0, &mut sector).unwrap();
/// assert_eq!(sector, [1; 512]);
/// ```
pub struct SimDisk {
    shared: Arc<Shared>,
    executor: Option<JoinHandle<()>>,
}

/// Controls a simulated disk and reports its state. Outlives the disk.
#[derive(Clone)]
pub struct DiskControl(Arc<Shared>);

// ---- construction and control -------------------------------------------------------------------

impl SimDisk {
    /// Creates a disk of zeroes. The seed decides the faults and the order of completions.
    pub fn new(config: DiskConfig, seed: u64) -> Self {
        Self::with(config, vec![0; config.size as usize], seed)
    }

    /// Creates a disk with this content. The seed decides the faults and the order of completions.
    pub fn with(config: DiskConfig, content: Vec<u8>, seed: u64) -> Self {
        let block = config.logical_block;
        assert!(block.is_power_of_two() && (512..=4096).contains(&block));
        assert!(!content.is_empty() && content.len().is_multiple_of(block as usize));
        let state = State {
            media: Media::new(content, config.volatile_cache),
            rng: Rng::new(seed),
            plan: config.plan,
            free_space: None,
            shrunk_to: None,
            queue: Vec::new(),
            hung: Vec::new(),
            writing: Vec::new(),
            fault_counts: FaultCounts::default(),
            arrived: 0,
            violations: Vec::new(),
            dead: false,
            stop: false,
        };
        let shared = Arc::new(Shared { config, state: Mutex::new(state), changed: Condvar::new() });
        let executor = thread::spawn({
            let shared = Arc::clone(&shared);
            move || shared.execute()
        });
        Self { shared, executor: Some(executor) }
    }

    pub fn control(&self) -> DiskControl {
        DiskControl(Arc::clone(&self.shared))
    }
}

impl DiskControl {
    pub fn set_plan(&self, plan: Plan) {
        self.0.lock().plan = plan;
    }

    pub fn plan(&self) -> Plan {
        self.0.lock().plan
    }

    /// Sets the free space in bytes; `None` means unlimited. A write that needs more fails with
    /// [`Error::NoSpace`] and does nothing. Only sectors that were not in use need space; discards free
    /// space.
    pub fn set_free_space(&self, bytes: Option<u64>) {
        self.0.lock().free_space = bytes;
    }

    /// Shrinks the disk: requests that reach beyond this byte offset fail with [`Error::Media`], while the
    /// geometry stays the same. `None` restores the size.
    pub fn shrink_to(&self, byte: Option<u64>) {
        self.0.lock().shrunk_to = byte;
    }

    /// Grows the disk to at least `size` bytes; the new bytes are zeroes.
    pub fn grow(&self, size: u64) {
        assert!(size.is_multiple_of(self.0.config.logical_block.into()));
        self.0.lock().media.grow(size as usize);
    }

    /// Executes and completes the hanging requests.
    pub fn release(&self) {
        let mut state = self.0.lock();
        let mut hung = std::mem::take(&mut state.hung);
        state.queue.append(&mut hung);
        drop(state);
        self.0.changed.notify_all();
    }

    /// Ends all faults, releases hanging requests, and removes the limits of free space and size.
    pub fn heal(&self) {
        let mut state = self.0.lock();
        (state.plan, state.free_space, state.shrunk_to) = (Plan::default(), None, None);
        drop(state);
        self.release();
    }

    /// Cuts the power. Each sector with unflushed writes keeps one of its versions. Requests in
    /// flight are done, torn or not done, and fail with [`Error::Gone`], as do all later requests.
    pub fn power_cut(&self, seed: u64) {
        self.kill(seed, true);
    }

    /// Kills the user of the disk. Like a power cut, except that completed writes survive.
    pub fn detach(&self, seed: u64) {
        self.kill(seed, false);
    }

    fn kill(&self, seed: u64, power: bool) {
        Self::kill_all(std::slice::from_ref(self), seed, power);
    }

    /// Kills all these disks at one moment. `power`: the power fails; otherwise the user of the disks dies.
    pub fn kill_all(disks: &[Self], seed: u64, power: bool) {
        let mut rng = Rng::new(seed);
        let mut states: Vec<MutexGuard<'_, State>> = disks.iter().map(|disk| disk.0.lock()).collect();
        let mut lost = Vec::new();
        for state in states.iter_mut().filter(|state| !state.dead) {
            lost.append(&mut state.kill(&mut rng, power));
        }
        drop(states);
        for disk in disks {
            disk.0.changed.notify_all();
        }
        for job in lost {
            job.done.complete(Err(Error::Gone), job.buffer);
        }
    }

    /// Returns true if the disk lost power or its user, or was dropped with hanging requests.
    pub fn is_dead(&self) -> bool {
        let state = self.0.lock();
        state.dead || state.fault_counts.gone > 0
    }

    /// Creates a disk without faults from the current content of this one, which a crash may have changed.
    pub fn reopen(&self, seed: u64) -> SimDisk {
        let config = DiskConfig { plan: Plan::default(), ..self.0.config };
        SimDisk::with(config, self.0.lock().media.visible(), seed)
    }

    // ---- statistics -----------------------------------------------------------------------------

    pub fn fault_counts(&self) -> FaultCounts {
        self.0.lock().fault_counts
    }

    pub fn operation_count(&self) -> u64 {
        self.0.lock().arrived
    }

    pub fn hanging(&self) -> usize {
        self.0.lock().hung.len()
    }

    /// Returns descriptions of contract violations by the user of the disk: at most the first 16.
    pub fn violations(&self) -> Vec<String> {
        self.0.lock().violations.clone()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().media.visible()
    }
}

impl Device for SimDisk {
    fn geometry(&self) -> Geometry {
        self.shared.geometry(self.shared.lock().media.len())
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        let mut state = self.shared.lock();
        let inline = state.rng.below(1000) < u64::from(self.shared.config.inline);
        if !inline {
            let size = state.media.len();
            drop(state);
            return request.check(&self.shared.geometry(size)).map(|()| TryResult::WouldBlock);
        }
        let fate = state.arrive(request, &self.shared)?;
        if matches!(fate, Fate::Hang | Fate::Delay(_)) {
            state.revert_arrival(request);
            return Ok(TryResult::WouldBlock);
        }
        // Sometimes complete only the beginning of a try, so that the caller must submit the rest.
        let blocks = request.len / u64::from(self.shared.config.logical_block);
        let part = if blocks > 1 && state.rng.chance(10) { 1 + state.rng.below(blocks - 1) } else { blocks };
        let len = part * u64::from(self.shared.config.logical_block);
        let part = Request { len, ..*request };
        if part != *request && request.op == Op::Write {
            state.remove_writing(request);
            state.writing.push(sectors(&part));
        }
        match buffer {
            Buffer::Read(out) => state.perform(&part, &mut out[..len as usize], fate),
            Buffer::Write(data) => state.perform(&part, &mut data[..len as usize].to_vec(), fate),
            Buffer::None => state.perform(&part, &mut [], fate),
        }?;
        Ok(if part == *request { TryResult::Done } else { TryResult::Partly(len) })
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        let mut state = self.shared.lock();
        let fate = match state.arrive(&request, &self.shared) {
            Ok(fate) => fate,
            Err(error) => {
                drop(state);
                return done.complete(Err(error), buffer);
            }
        };
        let delay = if let Fate::Delay(delay) = fate { delay } else { Duration::ZERO };
        let job = Job { request, buffer, done, fate, due: Instant::now() + delay };
        if fate == Fate::Hang {
            state.fault_counts.hung += 1;
            state.hung.push(job);
        } else {
            state.queue.push(job);
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let state = self.shared.lock();
        let end = offset.checked_add(len).filter(|&end| len > 0 && end <= state.media.len());
        let end = end.ok_or(Error::OutOfRange)?;
        if state.dead {
            return Err(Error::Gone);
        }
        let used: Vec<bool> =
            (offset / SECTOR..end.div_ceil(SECTOR)).map(|at| state.media.is_used(at)).collect();
        drop(state);
        let block = u64::from(self.shared.config.logical_block);
        let kind = |at: u64| {
            // A block is a hole if none of its sectors takes up space.
            let first = (at / block * block).max(offset) / SECTOR;
            let last = (at / block * block + block).min(end).div_ceil(SECTOR);
            let data = (first..last).any(|sector| used[(sector - offset / SECTOR) as usize]);
            if data { ExtentKind::Data } else { ExtentKind::Hole }
        };
        let mut at = offset;
        while at < end {
            let (from, is) = (at, kind(at));
            while at < end && kind(at) == is {
                at = (at / block * block + block).min(end);
            }
            if !row(Extent { offset: from, len: at - from, kind: is }) {
                break;
            }
        }
        Ok(at - offset)
    }
}

impl Drop for SimDisk {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.stop = true;
        let hung = std::mem::take(&mut state.hung);
        state.fault_counts.gone += hung.len() as u64;
        drop(state);
        self.shared.changed.notify_all();
        for job in hung {
            job.done.complete(Err(Error::Gone), job.buffer);
        }
        if let Some(executor) = self.executor.take()
            && executor.thread().id() != thread::current().id()
        {
            // The panic hook has already reported a panic of that thread.
            let _ = executor.join();
        }
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimDisk({:?})", self.control().fault_counts())
    }
}
