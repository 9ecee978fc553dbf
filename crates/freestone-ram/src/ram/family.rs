//! A family: disks, forks and snapshots that share a pool with its limit, compression streams, a
//! backing device and background threads.
//!
//! Each device is charged for its own objects. It can have a cap and a guarantee (family memory
//! that the others leave to it).

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::config::{Config, ForkConfig, SetupError, round_fork_size, round_size};
use super::full::WhenFull;
use super::idle::tick_ages;
use super::layer::pages_of;
use super::limits::Limits;
use super::parent::{Base, Parent};
use super::parts::FamilyParts;
use super::writeback::BackingStat;
use super::{PAGE, Ram, threads};
use crate::clock::{self, Ticks};
use freestone_core::device::Device;
use freestone_core::sync::{Instant, Ordering, thread};

/// Pools below this size are freed at once, without progress reports.
const LARGE_BYTES: u64 = 16 << 20;
/// How long the last user of a family waits for the cleaner.
const CLEANER_WAIT_MAX: Duration = Duration::from_secs(1);
/// Poll interval of that wait.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// Shared parts of a group of devices. Clones are handles to the same family.
#[derive(Clone)]
pub struct Family(pub(super) Arc<FamilyParts>);

/// Statistics of a family, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FamilyStat {
    /// Memory of the pool.
    pub mem_used_total: u64,
    /// Limit of the pool; 0 means no limit.
    pub mem_limit: u64,
    /// Sum of the bytes charged to devices.
    pub charged: u64,
    /// Bytes of layers that are being freed; not charged to any device.
    pub retiring: u64,
    /// Sum of all guarantees.
    pub guaranteed: u64,
    /// Number of layers: disks, forks, snapshots, and former layers not freed yet.
    pub layers: u64,
}

impl Family {
    /// Creates a family without devices; `config.disksize` is ignored.
    ///
    /// # Errors
    /// Fails if the parameters or the backing device is unusable, or memory is short.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        let mem_limit = config.mem_limit;
        let parts = FamilyParts::new(config)?;
        threads::prepare_keeper(&parts);
        if parts.pages.store.is_some() || parts.config.auto_recompress.is_some() {
            parts.pages.keeper.start().map_err(SetupError::Thread)?;
            let keeper = Arc::clone(&parts.pages.keeper);
            parts.pages.pool.on_alarm(Box::new(move || keeper.kick()));
        }
        if let Some(store) = &parts.pages.store {
            let keeper = Arc::clone(&parts.pages.keeper);
            let weak = Arc::downgrade(store);
            store.on_room(move || {
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
    /// Fails if the size is invalid.
    pub fn ram(&self, disksize: u64) -> Result<Ram, SetupError> {
        Ram::make(&self.0, round_size(disksize)?, Parent::Nothing, Arc::default())
    }

    /// Creates a fork: a disk that reads `base` until its pages are written. `base` must not change
    /// while the fork exists.
    ///
    /// # Errors
    /// Fails if the base is writable or zoned, the size is invalid, or the family cannot give the
    /// guarantee.
    pub fn fork(&self, base: Arc<dyn Device>, config: &ForkConfig) -> Result<Ram, SetupError> {
        let geometry = base.geometry();
        if !geometry.read_only {
            return Err(SetupError::Live);
        }
        if geometry.zones.is_some() {
            return Err(SetupError::ZonedBase);
        }
        // Reads of the base may have to wait.
        self.0.pages.keeper.start_over_base().map_err(SetupError::Thread)?;
        self.0.fork(Parent::Device(Base::new(base)), geometry.size, config)
    }

    /// Drops this handle. If it was the last one, returns the pool's memory to the system first,
    /// which takes seconds for many gigabytes. From 16 MiB on, `progress` receives the bytes done
    /// and the total.
    pub fn give_back(self, progress: &mut dyn FnMut(u64, u64)) {
        let Some(parts) = Arc::into_inner(self.0) else { return };
        if parts.pages.pool.pages() * PAGE < LARGE_BYTES {
            return;
        }
        let pages = Arc::clone(&parts.pages);
        drop(parts);
        // The cleaner may hold the pages for a dropped device. Stop it: freeing the whole pool is
        // faster than freeing page by page.
        let end = Instant::now() + CLEANER_WAIT_MAX;
        pages.retiring.clear();
        while Arc::strong_count(&pages) > 1 && Instant::now() < end {
            thread::sleep(POLL_INTERVAL);
            pages.retiring.clear();
        }
        if let Some(pages) = Arc::into_inner(pages) {
            pages.pool.give_back(progress);
        }
    }

    /// Limits the pool to `bytes`, rounded up to a page; 0 removes the limit. If the pool is
    /// larger, writes that need memory fail until enough is freed; with a backing device pages are
    /// written back and writes wait.
    pub fn set_mem_limit(&self, bytes: u64) {
        // Two concurrent calls could give the pool one limit and the keeper the other.
        let _one = self.0.guarantees.hold();
        let pages = pages_of(bytes);
        // Relaxed: for display only; the pool has its own copy.
        self.0.pages.mem_limit.store(pages.saturating_mul(PAGE), Ordering::Relaxed);
        self.0.pages.pool.set_limit_pages(if pages == 0 { u64::MAX } else { pages });
        self.0.pages.pool.set_alarm_pages(self.0.pages.eviction_marks().map_or(u64::MAX, |(high, _)| high));
        self.0.pages.wake_space_waiters();
        self.0.pages.keeper.kick();
    }

    /// Returns the limit of the pool in bytes; 0 means no limit.
    pub fn mem_limit(&self) -> u64 {
        self.0.pages.mem_limit()
    }

    /// Returns the policy for writes that find no space.
    pub fn when_full(&self) -> WhenFull {
        self.0.pages.full.when()
    }

    /// Sets the policy for writes that find no space, including those that wait now.
    pub fn set_when_full(&self, when: WhenFull) {
        self.0.pages.full.set_when(when);
        self.0.pages.retry_space_waiters();
    }

    /// Sets the family's name for log lines. Only the first call has an effect.
    pub fn set_name(&self, name: &str) {
        self.0.pages.set_name(name);
    }

    /// Returns true if both are handles to the same family.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Returns a number that is unique among existing families.
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

    /// Returns the statistics of the backing device.
    pub fn backing(&self) -> Option<BackingStat> {
        self.0.pages.store.as_deref().map(BackingStat::of)
    }
}

impl FamilyParts {
    /// Creates a fork over `parent`.
    pub fn fork(
        self: &Arc<Self>,
        parent: Parent,
        base_size: u64,
        config: &ForkConfig,
    ) -> Result<Ram, SetupError> {
        let size = config.size.unwrap_or(base_size);
        if size < base_size {
            return Err(SetupError::SmallerThanBase { wanted: size, base: base_size });
        }
        let limits = Arc::new(Limits::default());
        self.set_device_limits(&limits, config.mem_limit, config.mem_min)?;
        Ram::make(self, round_fork_size(size)?, parent, limits)
    }
}

impl Ticks for FamilyParts {
    fn tick(&self) {
        tick_ages(&self.pages);
        // Others may have freed memory. Overdue requests complete on the work queue, as the clock
        // thread is shared by the process.
        self.pages.keeper.memory_freed();
        self.pages.check_space();
        self.fault_in.fail_late_reads();
    }
}
