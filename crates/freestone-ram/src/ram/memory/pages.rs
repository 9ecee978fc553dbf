//! The pages of a family (devices that share a memory pool), in memory and on the backing device,
//! and the requests that wait for memory.

use std::sync::Arc;
use std::time::Duration;

use super::config::{Backing, Config, Secondary, SetupError};
use super::groups::{self, Groups};
use super::layer::{Layer, Layers};
use super::limits::{HIGH_PERCENT, LOW_PERCENT};
use super::retiring::Retiring;
use super::shared::SharedObjects;
use crate::age::Ages;
use crate::codec::{Codecs, PRIORITIES, Params, Streams};
use crate::pool::redo::Redo;
use crate::pool::{self, BackRef, Pool};
use crate::ram::geometry::PAGE;
use crate::ram::waiting::full_policy::SpacePolicy;
use crate::ram::waiting::keeper::Keeper;
use crate::ram::waiting::removals::Removals;
use freestone_core::PAGE_BYTES;
use freestone_core::device;
use freestone_core::slot::{Common, Kind, SlotGuard, Word};
use freestone_core::sync::{AtomicU64, Mutex, MutexGuard, OnceLock, Ordering, thread};
use freestone_spill::layout::Place;
use freestone_spill::objects::Spilled;
use freestone_spill::store::Store;

/// Poll interval while waiting for [`Pages::background`].
const POLL_INTERVAL: Duration = Duration::from_millis(1);

/// The memory and backing device shared by a family's devices.
///
/// Lock order: `background`, then a slot, then the locks of [`Groups`] (its reader, a header, and a
/// piece or a place) or of [`SharedObjects`] (slots of its table), then either a compression stream or
/// a pool lock, never both. Requests do not lock `background`.
pub(in crate::ram) struct Pages {
    name: OnceLock<Box<str>>,
    pub common: Arc<Common>,
    pub layers: Layers,
    pub pool: Pool,
    /// Copies of objects that are being overwritten, if another process can adopt the family.
    pub redo: Option<Redo>,
    pub codecs: Codecs,
    /// Groups of pages that are compressed together; unset until the family forms groups.
    groups: OnceLock<Groups>,
    /// Objects that several pages share; unset until the family compares pages.
    shared: OnceLock<SharedObjects>,
    pub ages: Ages,
    pub store: Option<Arc<Store>>,
    pub keeper: Arc<Keeper>,
    pub retiring: Retiring,
    pub removals: Removals,
    pub full: SpacePolicy,
    /// Number of pool pages that compaction returned to the system.
    pub compacted: AtomicU64,
    /// The family's memory limit in bytes; 0 means no limit.
    pub mem_limit: AtomicU64,
    /// Held during an eviction, a reclaim of holes or a recompression, which exclude each other.
    pub background: Mutex<()>,
}

/// Slot tables and objects of a family.
pub(in crate::ram) struct Memory {
    pub common: Arc<Common>,
    pub pool: Pool,
    /// Copies of objects that are being overwritten, if another process can adopt the family.
    pub redo: Option<Redo>,
    /// Objects on the backing device.
    pub store: Option<Arc<Store>>,
    pub groups: Option<Groups>,
    pub shared: Option<SharedObjects>,
    /// Algorithm of automatic recompression, if its dictionary is trained.
    pub trained: Option<Streams>,
    /// True if no process has used the memory.
    pub is_new: bool,
}

impl Memory {
    pub fn new(config: &Config) -> Result<Self, SetupError> {
        let is_adoptable = config.adoptable;
        let common = if is_adoptable { Common::adoptable() } else { Common::new() };
        let common = Arc::new(common.map_err(SetupError::MemoryFile)?);
        let pool = Pool::with_outside_pages(Arc::clone(&common.same_filled_leaves))
            .map_err(SetupError::MemoryFile)?;
        let redo = if is_adoptable { Some(Redo::new()?) } else { None };
        let store = config.backing.as_ref().map(Backing::store).transpose()?;
        Ok(Self { common, pool, redo, store, groups: None, shared: None, trained: None, is_new: true })
    }
}

impl Backing {
    /// Returns the device without any object.
    pub(in crate::ram) fn store(&self) -> Result<Arc<Store>, SetupError> {
        Store::new(Arc::clone(&self.device), self.compressed_writeback, self.write_through)
            .map(Arc::new)
            .map_err(SetupError::BackingKind)
    }
}

impl Pages {
    pub fn new(config: &Config, memory: Memory) -> Result<Arc<Self>, SetupError> {
        let Memory { common, pool, redo, store, groups, shared, trained, is_new } = memory;
        let store_dictionary = |priority: usize, params: &Params| match (&redo, &params.dictionary) {
            (Some(redo), Some(dictionary)) if is_new => redo.store_dictionary(priority, dictionary.bytes()),
            _ => Ok(()),
        };
        store_dictionary(0, &config.algorithm_params)?;
        let codecs = Codecs::new(Streams::shared(config.comp_algorithm, &config.algorithm_params)?);
        for (priority, secondary) in (1..).zip(&config.recomp_algorithms) {
            if let Some(Secondary { algorithm, params }) = secondary {
                if priority == PRIORITIES && config.auto_recompress.is_some() {
                    return Err(SetupError::PriorityTaken(*algorithm));
                }
                store_dictionary(priority, params)?;
                codecs
                    .set(priority, Streams::shared(*algorithm, params)?)
                    .map_err(|_| SetupError::NoMemory)?;
            }
        }
        if let Some(trained) = trained {
            codecs.set(PRIORITIES, Arc::new(trained)).map_err(|_| SetupError::NoMemory)?;
        }
        let keeper = Arc::<Keeper>::default();
        let pages = Self {
            name: OnceLock::new(),
            common,
            layers: Layers::new(Arc::clone(&keeper)),
            pool,
            redo,
            codecs,
            groups: cell_of(groups),
            shared: cell_of(shared),
            ages: Ages::default(),
            store,
            keeper,
            retiring: Retiring::default(),
            removals: Removals::default(),
            full: SpacePolicy::new(config.full_policy),
            compacted: AtomicU64::new(0),
            mem_limit: AtomicU64::new(0),
            background: Mutex::default(),
        };
        if config.auto_group.is_some() {
            pages.groups_or_new()?;
        }
        if config.auto_dedup.is_some() {
            pages.shared_or_new(true)?;
        }
        Ok(Arc::new(pages))
    }

    /// Returns the groups; `None` if the family has not formed any.
    #[inline]
    pub fn groups(&self) -> Option<&Groups> {
        self.groups.get()
    }

    /// Returns the groups, for a caller that forms some.
    ///
    /// # Errors
    /// Fails if memory is short.
    pub fn groups_or_new(&self) -> device::Result<&Groups> {
        if let Some(groups) = self.groups() {
            return Ok(groups);
        }
        let new = Groups::new(&self.common, self.store.clone())?;
        let groups = self.groups.get_or_init(|| new);
        groups.record();
        Ok(groups)
    }

    /// Returns the shared objects; `None` if the family has not compared pages.
    #[inline]
    pub fn shared(&self) -> Option<&SharedObjects> {
        self.shared.get()
    }

    /// Returns the shared objects, for a caller that compares pages, in the background if
    /// `is_automatic` is true.
    ///
    /// # Errors
    /// Fails if memory is short.
    pub fn shared_or_new(&self, is_automatic: bool) -> device::Result<&SharedObjects> {
        if let Some(shared) = self.shared() {
            return Ok(shared);
        }
        let new = SharedObjects::new(&self.common, is_automatic)?;
        let shared = self.shared.get_or_init(|| new);
        shared.record();
        Ok(shared)
    }

    /// Returns the bytes of pool memory, rounded to size classes, that an eviction of the page
    /// frees on average if all pages with the same object are evicted.
    pub fn evictable_bytes(&self, word: Word) -> u64 {
        let bytes = Pool::charged_bytes(word.memory_bytes());
        match self.shared() {
            Some(shared) if word.is_shared() => bytes / u64::from(shared.users_of(word).max(1)),
            _ => bytes,
        }
    }

    /// Returns the bytes by which the charges of all pages exceed the memory of their objects, since
    /// pages share objects.
    pub fn saved_bytes(&self) -> u64 {
        self.shared().map_or(0, |shared| shared.sizes().saved_bytes)
    }

    pub fn set_name(&self, name: &str) {
        let _ = self.name.set(name.into());
    }

    pub fn name(&self) -> &str {
        self.name.get().map_or("a family of RAM disks", |name| name)
    }

    /// Runs `work` with the slot that `owner` refers to locked. Returns `None` if the slot's layer
    /// or leaf no longer exists.
    pub fn with_owner_slot<R>(
        &self,
        owner: BackRef,
        work: impl FnOnce(&Arc<Layer>, SlotGuard<'_>) -> R,
    ) -> Option<R> {
        let layer = self.layers.get(owner.table())?;
        let leaf = layer.table().leaf(owner.slot())?;
        Some(work(&layer, leaf.lock(owner.slot())))
    }

    pub fn mem_limit(&self) -> u64 {
        // Relaxed: the pool enforces its own copy of the limit.
        self.mem_limit.load(Ordering::Relaxed)
    }

    /// Returns the pool sizes in pages at which eviction starts and stops; `None` without a limit
    /// or a backing device.
    pub fn eviction_marks(&self) -> Option<(u64, u64)> {
        // Relaxed: the marks are approximate.
        let beside = self.common.same_filled_leaves.load(Ordering::Relaxed);
        let limit = (self.mem_limit() / PAGE).saturating_sub(beside);
        self.store.as_ref().filter(|_| limit > 0).map(|_| {
            let low = (limit * LOW_PERCENT / 100).min(limit.saturating_sub(2));
            ((limit * HIGH_PERCENT / 100).max(low), low)
        })
    }

    /// Frees the object of a word, in the pool, in a group or on the backing device, or the word's
    /// use of a shared object. No slot may have this word any more.
    #[inline]
    pub fn release(&self, word: Word) {
        if let Some(location) = word.object() {
            self.pool.free(location);
        } else if matches!(word.kind(), Kind::Spilled | Kind::Grouped) {
            self.release_elsewhere(word);
        }
    }

    #[cold]
    fn release_elsewhere(&self, word: Word) {
        if word.is_shared() {
            if let Some(shared) = self.shared() {
                shared.leave(&self.pool, word);
            }
        } else if word.is_grouped() || word.is_spilled_in_group() {
            if let Some(groups) = self.groups() {
                groups.leave(&self.pool, word);
            }
        } else if let Some(store) = &self.store {
            store.release(word.location(), word.spilled_bytes());
        }
    }

    /// Returns where a spilled page is on the backing device. The page's slot is locked, or in flight.
    /// `header_owner` is the owner in the header of a page that is not in a group.
    pub fn spilled(&self, slot: u64, word: Word, header_owner: u64) -> Spilled {
        if !word.is_spilled_in_group() {
            return Spilled { slot, word, place: Place::of(word), header_owner };
        }
        let place = self.groups().and_then(|groups| groups.place(word));
        let Some(place) = place else { unreachable!("a group without a place has a page on the device") };
        Spilled { slot, word, place, header_owner: groups::owner_of(word).bits() }
    }

    /// Moves a page on the backing device to memory, if its group is in memory because of other pages.
    /// Returns the guard if not.
    pub fn enter_group<'g>(
        &self,
        layer: &Layer,
        guard: SlotGuard<'g>,
    ) -> std::result::Result<(), SlotGuard<'g>> {
        let old = guard.word();
        let groups = self.groups().filter(|_| old.is_spilled_in_group() && layer.has_space(PAGE_BYTES));
        let Some((groups, new)) = groups.and_then(|groups| Some((groups, groups.enter(old)?))) else {
            return Err(guard);
        };
        guard.publish(new.with_age(self.ages.now()));
        layer.account_faulted_in(&self.layers, new);
        groups.leave(&self.pool, old);
        Ok(())
    }

    /// Locks [`background`](Self::background). Returns `None` if `cancelled` returns true before
    /// the lock is free.
    pub fn lock_background(&self, cancelled: &mut dyn FnMut() -> bool) -> Option<MutexGuard<'_, ()>> {
        loop {
            if cancelled() {
                return None;
            }
            if let Some(turn) = self.background.try_lock() {
                return Some(turn);
            }
            thread::sleep(POLL_INTERVAL);
        }
    }

    /// Compacts the pool. Returns the number of pool pages returned to the system.
    pub fn compact(&self) -> u64 {
        self.compact_with_progress(&mut |_, _| true)
    }

    /// As [`compact`](Self::compact). `watch` receives the bytes processed and the total;
    /// compaction ends when `watch` returns false.
    pub fn compact_with_progress(&self, watch: &mut dyn FnMut(u64, u64) -> bool) -> u64 {
        let pages = self.pool.compact(self, watch);
        // Relaxed: a statistic.
        self.compacted.fetch_add(pages, Ordering::Relaxed);
        pages
    }

    /// Compacts one size class of the pool, and counts the pages returned to the system.
    pub fn compact_class(&self, class: usize) {
        let pages = self.pool.compact_one(class, self);
        // Relaxed: a statistic.
        self.compacted.fetch_add(pages, Ordering::Relaxed);
    }
}

impl pool::Owners for Pages {
    fn with_slot(&self, owner: BackRef, work: &mut dyn FnMut(SlotGuard<'_>)) {
        let piece = self.groups().and_then(|groups| groups.piece_slot(owner));
        match piece.or_else(|| self.shared()?.object_slot(owner)) {
            Some(guard) => work(guard),
            None => {
                let _ = self.with_owner_slot(owner, |_, guard| work(guard));
            }
        }
    }
}

/// Returns a cell with the value, if there is one. The cell of simulations has no conversion.
fn cell_of<T>(value: Option<T>) -> OnceLock<T> {
    let cell = OnceLock::new();
    if let Some(value) = value {
        // The cell is empty, so `set` does not fail.
        let _ = cell.set(value);
    }
    cell
}
