//! A family: disks, forks and snapshots that share a memory pool with its limit, compression
//! streams, a backing device and background threads.
//!
//! Each device is charged for its own objects. A device can have its own memory limit, and
//! guaranteed memory: family memory that other devices leave to it.
//!
//! The room owns the public handle, the keeper thread, and the adoption of a family by another
//! process. The rooms of content and maintenance use it.

mod adopt;
mod adopt_error;
mod adopted_tables;
pub(in crate::ram) mod threads;

pub use self::adopt::{Adopted, FamilyFiles, FamilyMemory};
pub use self::adopt_error::AdoptError;

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::ram::device::Ram;
use crate::ram::device::parent::{Base, Parent};
use crate::ram::device::parts::FamilyParts;
use crate::ram::geometry::PAGE;
use crate::ram::memory::ages::tick_ages;
use crate::ram::memory::config::{Config, ForkConfig, SetupError, round_size};
use crate::ram::memory::layer::pages_of;
use crate::ram::spilling::writeback::BackingStat;
use crate::ram::waiting::full_policy::FullPolicy;
use freestone_core::clock::{self, Ticks};
use freestone_core::device::Device;
use freestone_core::sync::{Instant, Ordering, thread};

/// Pools below this size in bytes are freed at once, without progress reports.
const LARGE_BYTES: u64 = 16 << 20;
/// Maximum time that [`Family::release`] waits for the cleaner thread to drop the family's pages.
const CLEANER_WAIT_MAX: Duration = Duration::from_secs(1);
/// Poll interval while [`Family::release`] waits for the cleaner thread.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A group of devices that share a memory pool and a backing device. Clones are handles to the same
/// family.
#[derive(Clone)]
pub struct Family(pub(in crate::ram) Arc<FamilyParts>);

/// Handle to a family that does not keep it alive.
#[derive(Clone)]
pub struct WeakFamily(Weak<FamilyParts>);

impl WeakFamily {
    /// Returns the family; `None` if it has no handle and no device any more.
    pub fn upgrade(&self) -> Option<Family> {
        self.0.upgrade().map(Family)
    }

    /// Returns true if the family has a handle or a device.
    pub fn exists(&self) -> bool {
        self.0.strong_count() > 0
    }
}

/// Statistics of a family, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FamilyStat {
    /// Memory that the pool uses.
    pub mem_used_total: u64,
    /// Memory limit of the pool; 0 means no limit.
    pub mem_limit: u64,
    /// Sum of the bytes charged to devices for their objects. Each page that shares an object is
    /// charged for the whole object.
    pub charged: u64,
    /// Objects of layers that are being freed; not charged to any device.
    pub retiring: u64,
    /// Sum of the memory guaranteed to devices.
    pub guaranteed: u64,
    /// Number of layers: one per disk, fork and snapshot, and former layers that are not freed yet.
    pub layers: u64,
}

impl Family {
    /// Creates a family without devices; `config.disksize` is ignored.
    ///
    /// # Errors
    /// Fails if the parameters or the backing device is unusable, or memory is short.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        config.check_adoptable()?;
        Self::start(FamilyParts::new(config)?)
    }

    fn start(parts: Arc<FamilyParts>) -> Result<Self, SetupError> {
        let mem_limit = parts.config.mem_limit;
        threads::prepare_keeper(&parts);
        let Config { auto_recompress, auto_group, auto_dedup, .. } = &parts.config;
        let is_automatic = [auto_recompress, auto_group, auto_dedup].iter().any(|age| age.is_some());
        if parts.pages.store.is_some() || is_automatic {
            parts.pages.keeper.start().map_err(SetupError::Thread)?;
            let keeper = Arc::clone(&parts.pages.keeper);
            parts.pages.pool.on_alarm(Box::new(move || keeper.kick()));
        }
        if let Some(store) = &parts.pages.store {
            let keeper = Arc::clone(&parts.pages.keeper);
            let weak = Arc::downgrade(store);
            store.set_free_slot_callback(move || {
                let weak = Weak::clone(&weak);
                keeper.run(move || {
                    if let Some(store) = weak.upgrade() {
                        store.start_reads();
                    }
                });
            });
        }
        let ticks: Arc<dyn Ticks> = Arc::clone(&parts) as _;
        clock::listen(Arc::downgrade(&ticks)).map_err(SetupError::Thread)?;
        let family = Self(parts);
        family.set_mem_limit(mem_limit);
        Ok(family)
    }

    /// Creates an empty disk in this family.
    ///
    /// # Errors
    /// Fails if the size is zero or above 256 TiB, or memory is short.
    pub fn ram(&self, disksize: u64) -> Result<Ram, SetupError> {
        Ram::make(&self.0, round_size(disksize)?, Parent::Nothing, Arc::default())
    }

    /// Creates a fork: a device whose pages read from `base` until they are written. `base` must
    /// not change while the fork exists.
    ///
    /// # Errors
    /// Fails if the base is writable or zoned, the size is invalid, or the family's memory limit
    /// does not leave the guaranteed memory.
    pub fn fork(&self, base: Arc<dyn Device>, config: &ForkConfig) -> Result<Ram, SetupError> {
        freestone_core::trail::step!();
        let geometry = base.geometry();
        if !geometry.read_only {
            return Err(SetupError::WritableBase);
        }
        if geometry.zones.is_some() {
            return Err(SetupError::ZonedBase);
        }
        // Reads of the base may wait for a disk, and continue on the work queue.
        self.0.pages.keeper.start_over_base().map_err(SetupError::Thread)?;
        self.0.fork(Parent::Device(Base::new(base)), geometry.size, config)
    }

    /// Drops this handle. If it was the last handle of the family, first returns the pool's memory
    /// to the system, which takes seconds for many gigabytes. For pools of at least 16 MiB,
    /// `progress` receives the bytes returned so far and the total.
    pub fn release(self, progress: &mut dyn FnMut(u64, u64)) {
        let Some(parts) = Arc::into_inner(self.0) else { return };
        if parts.pages.pool.pages() * PAGE < LARGE_BYTES {
            return;
        }
        let pages = Arc::clone(&parts.pages);
        drop(parts);
        // The cleaner may still free pages of a dropped device. Empty its queue: freeing the whole
        // pool is faster than freeing page by page.
        let end = Instant::now() + CLEANER_WAIT_MAX;
        pages.retiring.clear();
        while Arc::strong_count(&pages) > 1 && Instant::now() < end {
            thread::sleep(POLL_INTERVAL);
            pages.retiring.clear();
        }
        if let Some(pages) = Arc::into_inner(pages) {
            pages.pool.release_memory(progress);
        }
    }

    /// Limits the pool to `bytes`, rounded up to a page; 0 removes the limit. If the pool is
    /// larger, writes that need memory find no space until enough is freed. With a backing device,
    /// pages are written back, and writes wait for the writeback.
    pub fn set_mem_limit(&self, bytes: u64) {
        // Serialise callers: otherwise the pool could end up with one limit, and the keeper's marks
        // with another.
        let _one = self.0.guarantees.lock();
        let pages = pages_of(bytes);
        // Relaxed: the pool enforces its own copy of the limit.
        self.0.pages.mem_limit.store(pages.saturating_mul(PAGE), Ordering::Relaxed);
        self.0.pages.pool.set_limit_pages(if pages == 0 { u64::MAX } else { pages });
        self.0.pages.pool.set_alarm_pages(self.0.pages.eviction_marks().map_or(u64::MAX, |(high, _)| high));
        self.0.pages.wake_space_waiters();
        self.0.pages.keeper.kick();
    }

    /// Returns the memory limit of the pool in bytes; 0 means no limit.
    pub fn mem_limit(&self) -> u64 {
        self.0.pages.mem_limit()
    }

    /// Returns the policy for writes that find no space.
    pub fn full_policy(&self) -> FullPolicy {
        self.0.pages.full.policy()
    }

    /// Sets the policy for writes that find no space. Applies also to writes that wait now.
    pub fn set_full_policy(&self, policy: FullPolicy) {
        self.0.pages.full.set_policy(policy);
        self.0.pages.retry_space_waiters();
    }

    /// Sets the family's name for log lines. Only the first call has an effect.
    pub fn set_name(&self, name: &str) {
        self.0.pages.set_name(name);
    }

    /// Returns true if both handles refer to the same family.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns a number that identifies the family among all existing families.
    pub fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// Returns the family's statistics.
    pub fn stat(&self) -> FamilyStat {
        let layers = self.0.pages.layers.all();
        FamilyStat {
            mem_used_total: self.0.pages.pool.pages() * PAGE,
            mem_limit: self.0.pages.mem_limit(),
            charged: layers.iter().filter(|layer| !layer.is_retired()).map(|layer| layer.charged()).sum(),
            retiring: self.0.pages.retiring.bytes(),
            guaranteed: self.0.guarantees.sum(),
            layers: layers.len() as u64,
        }
    }

    /// Returns the statistics of the backing device; `None` without one.
    pub fn backing(&self) -> Option<BackingStat> {
        self.0.pages.store.as_deref().map(BackingStat::of)
    }
}

impl Ram {
    /// Creates an empty disk in a new family. Allocates almost no memory before the first write.
    ///
    /// # Errors
    /// Fails if the size, the parameters or the backing device is unusable, or memory is short.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        let disksize = round_size(config.disksize)?;
        Family::new(config)?.ram(disksize)
    }

    /// Returns the family of this device.
    pub fn family(&self) -> Family {
        Family(Arc::clone(&self.0.family))
    }

    /// Sets the family's memory limit; see [`Family::set_mem_limit`].
    pub fn set_mem_limit(&self, bytes: u64) {
        self.family().set_mem_limit(bytes);
    }
}

impl Ticks for FamilyParts {
    fn tick(&self) {
        tick_ages(&self.pages);
        // Memory may have been freed without a wake-up. Retries and failures run on the work queue,
        // as all families share the clock thread.
        self.pages.keeper.wake_memory_waiters();
        self.pages.check_space();
        self.fault_in.fail_timed_out_reads();
    }
}
