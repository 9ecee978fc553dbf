//! A disk in memory for the bottom of stacks, which does what disks do: it fails, fails although it
//! was done, tears, is late, hangs, has no room, shrinks, loses power.
//!
//! What goes wrong is drawn from a seed by a [`Plan`], which may change at any time through the
//! [`DiskControl`]. Each error is counted ([`Injected`]), so that a judge knows of an error above
//! whether it has a cause. Some tries are answered on the caller's thread; what is submitted is
//! answered on a thread of the disk, in an order that is drawn too.
//!
//! It watches its user: [`DiskControl::complaints`] lists requests that break the contract, and
//! writes to one sector that are in flight at once.

mod media;
mod plan;
#[cfg(test)]
mod tests;
mod work;

use std::fmt;

use freestone::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
};
use freestone_testkit::Rng;

use crate::oracle::SECTOR_BYTES;
use crate::rt::sync::{Arc, Condvar, Mutex, MutexGuard};
use crate::rt::thread::{self, JoinHandle};
use crate::rt::time::{Duration, Instant};
use media::Media;
use plan::Fate;
pub use plan::{Chances, Injected, Plan};
use work::{Job, Shared, State, sectors};

/// Complaints that are kept; one is enough to fail a run.
const COMPLAINTS_MAX: usize = 16;
const SECTOR: u64 = SECTOR_BYTES as u64;

/// What a disk is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiskConfig {
    /// Bytes, a multiple of the logical block.
    pub size: u64,
    /// A power of two, 512 to 4096.
    pub logical_block: u32,
    /// What is written is safe only when it is flushed.
    pub volatile_cache: bool,
    /// How many of a thousand tries are answered on the caller's thread.
    pub inline: u16,
    /// Writes of one sector may be in flight at once: its user hands down what clients ask.
    pub overlap: bool,
    /// What goes wrong.
    pub plan: Plan,
}

impl Default for DiskConfig {
    fn default() -> Self {
        let plan = Plan::default();
        Self { size: 1 << 20, logical_block: 512, volatile_cache: true, inline: 300, overlap: false, plan }
    }
}

/// The disk. When it is dropped, what waits is done and answered, and what hangs is answered
/// [`Error::Gone`].
///
/// ```
/// use freestone::device::{Blocking, Error, Flags};
/// use freestone_torture::disk::{Chances, DiskConfig, Plan, SimDisk};
///
/// let disk = SimDisk::new(DiskConfig::default(), 1);
/// disk.write_at(0, &[1; 512], Flags::FUA).unwrap();
/// disk.write_at(512, &[2; 512], Flags::empty()).unwrap();
/// let fails = Chances { fail_done: 1000, ..Chances::default() };
/// disk.control().set_plan(Plan { write: fails, ..Plan::default() });
/// assert_eq!(disk.write_at(1024, &[3; 512], Flags::FUA), Err(Error::Media));
/// assert_eq!(disk.control().injected().failed_done, 1);
/// disk.control().power_cut(7);
/// let disk = disk.control().reopened(2);
/// let mut sector = [0; 512];
/// disk.read_at(0, &mut sector).unwrap();
/// assert_eq!(sector, [1; 512]);
/// ```
pub struct SimDisk {
    shared: Arc<Shared>,
    executor: Option<JoinHandle<()>>,
}

/// Tells a disk what to do and what it did; outlives it.
#[derive(Clone)]
pub struct DiskControl(Arc<Shared>);

// ---- making it, and telling it what to do -------------------------------------------------------

impl SimDisk {
    /// A disk of zeroes.
    pub fn new(config: DiskConfig, seed: u64) -> Self {
        Self::with(config, vec![0; config.size as usize], seed)
    }

    /// A disk with this content.
    pub fn with(config: DiskConfig, content: Vec<u8>, seed: u64) -> Self {
        let block = config.logical_block;
        assert!(block.is_power_of_two() && (512..=4096).contains(&block));
        assert!(!content.is_empty() && content.len().is_multiple_of(block as usize));
        let state = State {
            media: Media::new(content, config.volatile_cache),
            rng: Rng::new(seed),
            plan: config.plan,
            room: None,
            shrunk_to: None,
            queue: Vec::new(),
            hung: Vec::new(),
            writing: Vec::new(),
            injected: Injected::default(),
            arrived: 0,
            complaints: Vec::new(),
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

    /// What tells it what to do.
    pub fn control(&self) -> DiskControl {
        DiskControl(Arc::clone(&self.shared))
    }
}

impl DiskControl {
    /// From now on this goes wrong.
    pub fn set_plan(&self, plan: Plan) {
        self.0.lock().plan = plan;
    }

    /// What goes wrong.
    pub fn plan(&self) -> Plan {
        self.0.lock().plan
    }

    /// Writes that take up more than these bytes, of sectors that took up none, answer
    /// [`Error::NoSpace`] and do nothing. Discards give room back.
    pub fn set_room(&self, bytes: Option<u64>) {
        self.0.lock().room = bytes;
    }

    /// What reaches beyond this byte answers [`Error::Media`]; the geometry does not tell. `None`
    /// ends it.
    pub fn shrink_to(&self, byte: Option<u64>) {
        self.0.lock().shrunk_to = byte;
    }

    /// The disk has at least `size` bytes; what is new is zeroes.
    pub fn grow(&self, size: u64) {
        assert!(size.is_multiple_of(self.0.config.logical_block.into()));
        self.0.lock().media.grow(size as usize);
    }

    /// What hangs is done now, and answered.
    pub fn release(&self) {
        let mut state = self.0.lock();
        let mut hung = std::mem::take(&mut state.hung);
        state.queue.append(&mut hung);
        drop(state);
        self.0.changed.notify_all();
    }

    /// No faults from now on, and what hangs is released; it has room and its size again.
    pub fn heal(&self) {
        let mut state = self.0.lock();
        (state.plan, state.room, state.shrunk_to) = (Plan::default(), None, None);
        drop(state);
        self.release();
    }

    /// The power goes. Of each sector that was written and not flushed, one of the versions stays.
    /// What is in flight is answered [`Error::Gone`], or was done before; what was not may be torn.
    /// All later requests are answered so, too.
    pub fn power_cut(&self, seed: u64) {
        self.die(seed, true);
    }

    /// Its user dies, and the disk lives on: as with the power, but what was answered stays.
    pub fn detach(&self, seed: u64) {
        self.die(seed, false);
    }

    fn die(&self, seed: u64, power: bool) {
        Self::all_die(std::slice::from_ref(self), seed, power);
    }

    /// The power of all of these goes at one moment, or what uses them dies.
    pub fn all_die(disks: &[Self], seed: u64, power: bool) {
        let mut rng = Rng::new(seed);
        let mut states: Vec<MutexGuard<'_, State>> = disks.iter().map(|disk| disk.0.lock()).collect();
        let mut lost = Vec::new();
        for state in states.iter_mut().filter(|state| !state.dead) {
            lost.append(&mut state.die(&mut rng, power));
        }
        drop(states);
        for disk in disks {
            disk.0.changed.notify_all();
        }
        for job in lost {
            job.done.complete(Err(Error::Gone), job.buffer);
        }
    }

    /// Whether it has died, or was dropped with requests in flight.
    pub fn is_dead(&self) -> bool {
        let state = self.0.lock();
        state.dead || state.injected.gone > 0
    }

    /// A new disk with the bytes that this one shows, or that its death left. Without faults.
    pub fn reopened(&self, seed: u64) -> SimDisk {
        let config = DiskConfig { plan: Plan::default(), ..self.0.config };
        SimDisk::with(config, self.0.lock().media.visible(), seed)
    }

    // ---- what it saw ----------------------------------------------------------------------------

    /// How often it did what good disks do not.
    pub fn injected(&self) -> Injected {
        self.0.lock().injected
    }

    /// Operations that arrived.
    pub fn arrived(&self) -> u64 {
        self.0.lock().arrived
    }

    /// Operations that wait to be released.
    pub fn hanging(&self) -> usize {
        self.0.lock().hung.len()
    }

    /// What its user did wrong, in words. The first few; empty is good.
    pub fn complaints(&self) -> Vec<String> {
        self.0.lock().complaints.clone()
    }

    /// The bytes that it shows.
    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().media.visible()
    }
}

impl Device for SimDisk {
    fn geometry(&self) -> Geometry {
        self.shared.geometry(self.shared.lock().media.len())
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        let mut state = self.shared.lock();
        let inline = state.rng.below(1000) < u64::from(self.shared.config.inline);
        if !inline {
            let size = state.media.len();
            drop(state);
            return request.check(&self.shared.geometry(size)).map(|()| Tried::WouldBlock);
        }
        let fate = state.arrive(request, &self.shared)?;
        if matches!(fate, Fate::Hang | Fate::Delay(_)) {
            state.depart(request);
            return Ok(Tried::WouldBlock);
        }
        // Sometimes only the beginning, so that callers have to go on.
        let blocks = request.len / u64::from(self.shared.config.logical_block);
        let part = if blocks > 1 && state.rng.chance(10) { 1 + state.rng.below(blocks - 1) } else { blocks };
        let len = part * u64::from(self.shared.config.logical_block);
        let part = Request { len, ..*request };
        if part != *request && request.op == Op::Write {
            state.answered(request);
            state.writing.push(sectors(&part));
        }
        match buffer {
            Buffer::Read(out) => state.perform(&part, &mut out[..len as usize], fate),
            Buffer::Write(data) => state.perform(&part, &mut data[..len as usize].to_vec(), fate),
            Buffer::None => state.perform(&part, &mut [], fate),
        }?;
        Ok(if part == *request { Tried::Done } else { Tried::Partly(len) })
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
            state.injected.hung += 1;
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
            // A block is a hole if all of it is.
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
        state.injected.gone += hung.len() as u64;
        drop(state);
        self.shared.changed.notify_all();
        for job in hung {
            job.done.complete(Err(Error::Gone), job.buffer);
        }
        if let Some(executor) = self.executor.take()
            && executor.thread().id() != thread::current().id()
        {
            // A panic there was reported by its own hook.
            let _ = executor.join();
        }
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimDisk({:?})", self.control().injected())
    }
}
