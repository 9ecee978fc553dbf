//! A family: what disks, their snapshots and forks have in common. One pool and one limit,
//! compression streams, one backing device, and the threads of the background.
//!
//! Every device is charged for its own objects, can be given a cap of its own, and a guarantee:
//! memory of the family that the others leave to it.

use std::sync::{Arc, Weak};
use std::time::Duration;

use super::config::{Config, ForkConfig, SetupError, round_fork_size, round_size};
use super::full::WhenFull;
use super::idle::tick_ages;
use super::layer::pages_of;
use super::limits::Limits;
use super::parent::{Base, Parent};
use super::parts::FamilyParts;
use super::{PAGE, Ram, threads};
use crate::clock::{self, Ticks};
use freestone_core::device::Device;
use freestone_core::sync::{Instant, Ordering, thread};

/// Less than this is given back at once.
const LARGE_BYTES: u64 = 16 << 20;
/// How long the last user of a family waits for the cleaner, and how often it looks.
const LET_GO_MAX: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// What its devices have in common. Clones are handles to one family.
#[derive(Clone)]
pub struct Family(pub(super) Arc<FamilyParts>);

/// A family's numbers, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FamilyStat {
    /// The pool's memory.
    pub mem_used_total: u64,
    /// The most that may be; 0 is no limit.
    pub mem_limit: u64,
    /// What the devices' objects are charged.
    pub charged: u64,
    /// What is left of layers that are being freed; charged to nobody.
    pub retiring: u64,
    /// What is guaranteed to devices in all.
    pub guaranteed: u64,
    /// Layers: disks, forks, snapshots, and what is left of former ones.
    pub layers: u64,
}

impl Family {
    /// A family without devices; `config.disksize` is not looked at.
    ///
    /// # Errors
    /// The parameters, the backing device, or no memory.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        let mem_limit = config.mem_limit;
        let parts = FamilyParts::new(config)?;
        threads::prepare(&parts);
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

    /// An empty disk of this family.
    ///
    /// # Errors
    /// The size.
    pub fn ram(&self, disksize: u64) -> Result<Ram, SetupError> {
        Ram::make(&self.0, round_size(disksize)?, Parent::Nothing, Arc::default())
    }

    /// A fork: a disk whose pages are those of `base` until they are written. `base` must not
    /// change as long as it lives.
    ///
    /// # Errors
    /// A base that can be written or has zones; the size; a guarantee that the family cannot give.
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

    /// Lets go of a family. Where that was its last user the memory goes back to the system before
    /// this returns, which takes seconds for many gigabytes: `progress` is given bytes, done and in
    /// all, from 16 MiB on.
    pub fn give_back(self, progress: &mut dyn FnMut(u64, u64)) {
        let Some(parts) = Arc::into_inner(self.0) else { return };
        if parts.pages.pool.pages() * PAGE < LARGE_BYTES {
            return;
        }
        let pages = Arc::clone(&parts.pages);
        drop(parts);
        // The cleaner may be at the end of a device of it, and is not to free page by page what
        // goes as a whole.
        let end = Instant::now() + LET_GO_MAX;
        pages.retiring.forget();
        while Arc::strong_count(&pages) > 1 && Instant::now() < end {
            thread::sleep(LOOK_AGAIN);
            pages.retiring.forget();
        }
        if let Some(pages) = Arc::into_inner(pages) {
            pages.pool.give_back(progress);
        }
    }

    /// Bounds the pool to `bytes`, rounded up to a page; 0 lifts the bound. Below the present use
    /// nothing is evicted, but writes that need memory fail until enough is freed; with a backing
    /// device pages are spilled and writes wait.
    pub fn set_mem_limit(&self, bytes: u64) {
        // Two at one time would leave the pool with the one's limit and the keeper with the
        // other's.
        let _one = self.0.guarantees.hold();
        let pages = pages_of(bytes);
        // Relaxed: shown only; the pool has its own copy.
        self.0.pages.mem_limit.store(pages.saturating_mul(PAGE), Ordering::Relaxed);
        self.0.pages.pool.set_limit_pages(if pages == 0 { u64::MAX } else { pages });
        self.0.pages.pool.set_alarm_pages(self.0.pages.marks().map_or(u64::MAX, |(high, _)| high));
        self.0.pages.room_came();
        self.0.pages.keeper.kick();
    }

    /// The bound of the pool in bytes; 0 is none.
    pub fn mem_limit(&self) -> u64 {
        self.0.pages.mem_limit()
    }

    /// What is done where there is no room for a write.
    pub fn when_full(&self) -> WhenFull {
        self.0.pages.full.when()
    }

    /// Changes that, also for writes that wait.
    pub fn set_when_full(&self, when: WhenFull) {
        self.0.pages.full.set_when(when);
        self.0.pages.begin_anew();
    }

    /// Says what the log calls it, once.
    pub fn set_name(&self, name: &str) {
        self.0.pages.set_name(name);
    }

    /// Whether it is this one.
    pub fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// A number that no other family has while this one is there.
    pub fn key(&self) -> usize {
        Arc::as_ptr(&self.0).addr()
    }

    /// The family's numbers.
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
}

impl FamilyParts {
    /// A disk over something.
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
        // What others freed meanwhile; what is late is answered on the work queue, as this thread
        // is everybody's.
        self.pages.keeper.memory_freed();
        self.pages.look_at_room();
        self.fault_in.hand_over_late_reads();
    }
}
