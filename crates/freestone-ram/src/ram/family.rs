//! A family: what disks, their snapshots and forks have in common. One pool and one limit, compression streams, one backing
//! device, and the threads of the background.
//!
//! Every device is charged for its own objects, can be given a cap of its own, and a guarantee: memory of the family that
//! the others leave to it.
//!
//! Lock order: `limits` or `passes`, then a slot; under a slot a compression stream or the pool's locks, one after the
//! other. Requests take neither of the first two.

use std::sync::{Arc, Weak};

use super::config::{Config, ForkConfig, Secondary, SetupError, round_fork_size, round_size};
use super::fetch::{Readers, Waiter};
use super::keeper::Keeper;
use super::layer::{Layer, Layers, Limits, pages_of};
use super::parent::{Base, Parent};
use super::retire::{Removals, Retiring};
use super::rounds::Rounds;
use super::writeback::WritebackError;
use super::{PAGE, Ram, dictionary};
use crate::age::Ages;
use crate::clock::{self, Ticks};
use crate::codec::{Codecs, PRIORITIES, Streams};
use crate::pool::{self, BackRef, Pool};
use crate::spill::store::Store;
use freestone_core::device::Device;
use freestone_core::slot::{Common, Flights, SlotGuard};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};

/// Least cap of a device.
const CAP_BYTES_MIN: u64 = 64 << 10;

/// What its devices have in common. Clones are handles to one family.
#[derive(Clone)]
pub struct Family(pub(super) Arc<Shared>);

/// What the devices of a family share.
pub(super) struct Shared {
    pub common: Arc<Common>,
    pub layers: Layers,
    pub retiring: Retiring,
    pub flights: Flights<Waiter>,
    pub pool: Pool,
    pub codecs: Codecs,
    pub ages: Ages,
    /// The backing device.
    pub store: Option<Arc<Store>>,
    pub keeper: Arc<Keeper>,
    pub readers: Readers,
    pub auto: dictionary::Auto,
    /// Pages that compaction has returned to the system.
    pub compacted: AtomicU64,
    /// As it was made; `mem_limit` may have changed.
    pub config: Config,
    mem_limit: AtomicU64,
    /// Bytes that are kept for devices which have less than what is guaranteed to them.
    kept: AtomicU64,
    /// Held by whoever takes pages out of memory or recompresses them, for the whole of that.
    pub passes: Mutex<()>,
    /// The block at which the next step of reclaiming holes begins.
    pub reclaim_cursor: Mutex<u64>,
    pub removals: Removals,
    pub rounds: Mutex<Rounds>,
    /// What keeps pages from being spilled, as it was logged last.
    pub hindrance: Mutex<Option<WritebackError>>,
    /// Taken to change limits; what is guaranteed to whom.
    limits: Mutex<Vec<Weak<Limits>>>,
}

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
        let backing = match &config.backing {
            None => None,
            Some(backing) => {
                let device: Arc<dyn Device> = Arc::new(backing.open()?);
                Some((device, backing.compressed_writeback))
            }
        };
        Self::with(config, backing)
    }

    /// A family whose pages are spilled to any device; `config.backing` is not looked at.
    ///
    /// # Errors
    /// As [`new`](Self::new); a device that is read-only, zoned or smaller than a page.
    pub fn with_backing(
        config: Config,
        backing: Arc<dyn Device>,
        compressed_writeback: bool,
    ) -> Result<Self, SetupError> {
        Self::with(config, Some((backing, compressed_writeback)))
    }

    fn with(config: Config, backing: Option<(Arc<dyn Device>, bool)>) -> Result<Self, SetupError> {
        let mem_limit = config.mem_limit;
        let shared = Shared::new(config, backing)?;
        if shared.store.is_some() || shared.config.auto_recompress.is_some() {
            shared.keeper.start(&shared).map_err(SetupError::Thread)?;
            let keeper = Arc::clone(&shared.keeper);
            shared.pool.on_alarm(Box::new(move || keeper.kick()));
        }
        if let Some(store) = &shared.store {
            let keeper = Arc::clone(&shared.keeper);
            store.on_room(move || keeper.start_reads());
        }
        let ticks: Arc<dyn Ticks> = Arc::clone(&shared) as _;
        clock::listen(Arc::downgrade(&ticks)).map_err(SetupError::Thread)?;
        let family = Self(shared);
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

    /// A fork: a disk whose pages are those of `base` until they are written. `base` must not change as long as it lives.
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
        self.0.keeper.start(&self.0).map_err(SetupError::Thread)?;
        self.0.fork(Parent::Device(Base::new(base)), geometry.size, config)
    }

    /// Bounds the pool to `bytes`, rounded up to a page; 0 lifts the bound. Parent the present use nothing is evicted, but
    /// writes that need memory fail until enough is freed; with a backing device pages are spilled and writes wait.
    pub fn set_mem_limit(&self, bytes: u64) {
        // Two at one time would leave the pool with the one's limit and the keeper with the other's.
        let _one = self.0.limits.lock();
        let pages = pages_of(bytes);
        // Relaxed: shown only; the pool has its own copy.
        self.0.mem_limit.store(pages.saturating_mul(PAGE), Ordering::Relaxed);
        self.0.pool.set_limit_pages(if pages == 0 { u64::MAX } else { pages });
        self.0.pool.set_alarm_pages(self.0.marks().map_or(u64::MAX, |(high, _)| high));
        self.0.keeper.kick();
    }

    /// The bound of the pool in bytes; 0 is none.
    pub fn mem_limit(&self) -> u64 {
        self.0.mem_limit()
    }

    /// The family's numbers.
    pub fn stat(&self) -> FamilyStat {
        let layers = self.0.layers.all();
        FamilyStat {
            mem_used_total: self.0.pool.pages() * PAGE,
            mem_limit: self.0.mem_limit(),
            charged: layers.iter().filter(|layer| !layer.is_retired()).map(|layer| layer.charged()).sum(),
            retiring: self.0.retiring.bytes(),
            guaranteed: self.0.guaranteed(),
            layers: layers.len() as u64,
        }
    }
}

impl Shared {
    /// A family of which nobody knows yet: no thread works for it.
    pub fn new(config: Config, backing: Option<(Arc<dyn Device>, bool)>) -> Result<Arc<Self>, SetupError> {
        let codecs = Codecs::new(Streams::shared(config.comp_algorithm, &config.algorithm_params)?);
        for (priority, secondary) in (1..).zip(&config.recomp_algorithms) {
            if let Some(Secondary { algorithm, params }) = secondary {
                if priority == PRIORITIES && config.auto_recompress.is_some() {
                    return Err(SetupError::PriorityTaken(*algorithm));
                }
                codecs
                    .set(priority, Streams::shared(*algorithm, params)?)
                    .map_err(|_| SetupError::NoMemory)?;
            }
        }
        let store = match backing {
            None => None,
            Some((device, packed)) => {
                Some(Arc::new(Store::new(device, packed).map_err(SetupError::BackingKind)?))
            }
        };
        Ok(Arc::new(Self {
            common: Arc::new(Common::new()?),
            layers: Layers::default(),
            retiring: Retiring::default(),
            flights: Flights::default(),
            pool: Pool::new()?,
            codecs,
            ages: Ages::default(),
            store,
            keeper: Arc::default(),
            readers: Readers::default(),
            auto: dictionary::Auto::default(),
            compacted: AtomicU64::new(0),
            config,
            mem_limit: AtomicU64::new(0),
            kept: AtomicU64::new(0),
            passes: Mutex::default(),
            reclaim_cursor: Mutex::default(),
            removals: Removals::default(),
            rounds: Mutex::default(),
            hindrance: Mutex::default(),
            limits: Mutex::default(),
        }))
    }

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

    /// Sets a device's cap (0 is none) and what is guaranteed to it.
    ///
    /// # Errors
    /// A guarantee above the cap, or above what the family's limit leaves beside other guarantees.
    pub fn set_device_limits(&self, limits: &Arc<Limits>, cap: u64, least: u64) -> Result<(), SetupError> {
        if (1..CAP_BYTES_MIN).contains(&cap) {
            return Err(SetupError::CapTooSmall(cap));
        }
        if cap > 0 && least > cap {
            return Err(SetupError::GuaranteeAboveCap { guarantee: least, cap });
        }
        let mut all = self.limits.lock();
        // Most devices have no guarantee, and are not looked at.
        if least > 0 || limits.least() > 0 {
            all.retain(|known| {
                known.strong_count() > 0 && !std::ptr::eq(known.as_ptr(), Arc::as_ptr(limits))
            });
            let others: u64 = all.iter().filter_map(Weak::upgrade).map(|other| other.least()).sum();
            let total = self.mem_limit();
            if least > 0 && (total == 0 || others.saturating_add(least) > total) {
                if limits.least() > 0 {
                    all.push(Arc::downgrade(limits));
                }
                return Err(SetupError::Guarantee { wanted: least, left: total.saturating_sub(others) });
            }
            all.push(Arc::downgrade(limits));
        }
        limits.set_cap(if cap == 0 { u64::MAX } else { cap });
        limits.set_least(least);
        Ok(())
    }

    fn guaranteed(&self) -> u64 {
        self.limits.lock().iter().filter_map(Weak::upgrade).map(|limits| limits.least()).sum()
    }

    pub fn mem_limit(&self) -> u64 {
        // Relaxed: shown only.
        self.mem_limit.load(Ordering::Relaxed)
    }

    /// Counts what is kept for a layer; wraps where that gets less.
    pub fn add_kept(&self, bytes: u64) {
        // Relaxed: a hint to those who look for memory.
        self.kept.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Pages that are kept for devices which have less than what is guaranteed to them.
    pub fn kept_pages(&self) -> u64 {
        // Relaxed: a hint. Objects do not fill pages.
        pages_of(self.kept.load(Ordering::Relaxed).saturating_mul(9) / 8)
    }

    /// Pages that this layer must leave to others.
    #[inline]
    pub fn kept_from(&self, layer: &Layer) -> u64 {
        // Relaxed: a hint.
        match self.kept.load(Ordering::Relaxed) {
            0 => 0,
            // Objects do not fill pages.
            kept => pages_of(kept.saturating_sub(layer.kept()).saturating_mul(9) / 8),
        }
    }
}

impl Ticks for Shared {
    fn tick(&self) {
        self.tick_ages();
        // What others freed meanwhile; what is late is answered by the runner, as this thread is everybody's.
        self.keeper.memory_freed();
        self.hand_over_late_reads();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

impl pool::Owners for Shared {
    fn with_slot(&self, owner: BackRef, work: &mut dyn FnMut(SlotGuard<'_>)) {
        let _ = self.at(owner, |_, guard| work(guard));
    }
}

impl Shared {
    /// Locks the slot that `owner` names, if its layer is still there.
    pub fn at<R>(&self, owner: BackRef, work: impl FnOnce(&Arc<Layer>, SlotGuard<'_>) -> R) -> Option<R> {
        let layer = self.layers.get(owner.table())?;
        let leaf = layer.table().leaf(owner.slot())?;
        Some(work(&layer, leaf.lock(owner.slot())))
    }
}
