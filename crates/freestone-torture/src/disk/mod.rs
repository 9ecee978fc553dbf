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
mod model;
mod plan;
#[cfg(test)]
mod tests;

use std::fmt;

use freestone::device::{Device, Error, forward_device};
use freestone_testkit::{DiskEngine, DiskShared, Rng};

use crate::oracle::SECTOR_BYTES;
use crate::rt::sync::Arc;
use model::SimModel;
pub use plan::{FaultCounts, FaultRates, Plan};

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
pub struct SimDisk(DiskEngine<SimModel>);

/// Controls a simulated disk and reports its state. Outlives the disk.
#[derive(Clone)]
pub struct DiskControl(Arc<DiskShared<SimModel>>);

// ---- construction and control -------------------------------------------------------------------

impl SimDisk {
    /// Creates a disk of zeroes. The seed decides the faults and the order of completions.
    pub fn new(config: DiskConfig, seed: u64) -> Self {
        Self::with(config, vec![0; config.size as usize], seed)
    }

    /// Creates a disk with this content. The seed decides the faults and the order of completions.
    pub fn with(config: DiskConfig, content: Vec<u8>, seed: u64) -> Self {
        Self(DiskEngine::new(SimModel::new(config, content, seed)))
    }

    pub fn control(&self) -> DiskControl {
        DiskControl(Arc::clone(self.0.shared()))
    }
}

impl DiskControl {
    pub fn set_plan(&self, plan: Plan) {
        self.0.lock().model.plan = plan;
    }

    pub fn plan(&self) -> Plan {
        self.0.lock().model.plan
    }

    /// Sets the free space in bytes; `None` means unlimited. A write that needs more fails with
    /// [`Error::NoSpace`] and does nothing. Only sectors that were not in use need space; discards free
    /// space.
    pub fn set_free_space(&self, bytes: Option<u64>) {
        self.0.lock().model.free_space = bytes;
    }

    /// Shrinks the disk: requests that reach beyond this byte offset fail with [`Error::Media`], while the
    /// geometry stays the same. `None` restores the size.
    pub fn shrink_to(&self, byte: Option<u64>) {
        self.0.lock().model.shrunk_to = byte;
    }

    /// Grows the disk to at least `size` bytes; the new bytes are zeroes.
    pub fn grow(&self, size: u64) {
        let model = &mut self.0.lock().model;
        assert!(size.is_multiple_of(model.config.logical_block.into()));
        model.media.grow(size as usize);
    }

    /// Executes and completes the hanging requests.
    pub fn release(&self) {
        self.0.release(|_| true);
    }

    /// Ends all faults, releases hanging requests, and removes the limits of free space and size.
    pub fn heal(&self) {
        self.0.lock().model.heal();
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
        let mut states: Vec<_> = disks.iter().map(|disk| disk.0.lock()).collect();
        let mut lost = Vec::new();
        for state in states.iter_mut().filter(|state| !state.model.dead) {
            let in_flight = state.take_in_flight();
            state.model.kill(&mut rng, power, &in_flight);
            lost.extend(in_flight);
        }
        drop(states);
        for disk in disks {
            disk.0.notify();
        }
        for job in lost {
            job.done.complete(Err(Error::Gone), job.buffer);
        }
    }

    /// Returns true if the disk lost power or its user, or was dropped with hanging requests.
    pub fn is_dead(&self) -> bool {
        let model = &self.0.lock().model;
        model.dead || model.fault_counts.gone > 0
    }

    /// Creates a disk without faults from the current content of this one, which a crash may have changed.
    pub fn reopen(&self, seed: u64) -> SimDisk {
        let model = &self.0.lock().model;
        let config = DiskConfig { plan: Plan::default(), ..model.config };
        SimDisk::with(config, model.media.visible(), seed)
    }

    // ---- statistics -----------------------------------------------------------------------------

    pub fn fault_counts(&self) -> FaultCounts {
        self.0.lock().model.fault_counts
    }

    pub fn operation_count(&self) -> u64 {
        self.0.lock().model.arrived
    }

    pub fn hanging(&self) -> usize {
        self.0.lock().held()
    }

    /// Returns descriptions of contract violations by the user of the disk: at most the first 16.
    pub fn violations(&self) -> Vec<String> {
        self.0.violations()
    }

    pub fn bytes(&self) -> Vec<u8> {
        self.0.lock().model.media.visible()
    }
}

impl Device for SimDisk {
    forward_device!(|disk| disk.0 => geometry, try_io, submit, extents; prefetch: none, zoned: none, changes: none);
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimDisk({:?})", self.control().fault_counts())
    }
}
