//! Compressed RAM disks with the semantics of zram, in user space, and their forks and snapshots.
//!
//! A disk consists of a slot table, an object pool and one compression stream per CPU. Pages that
//! repeat a pattern of up to 64 bits store only the pattern. Incompressible pages are stored as
//! they are, all others compressed. Requests for different pages share no lock: each uses the lock
//! bit of its slot, and the stream and current span of its CPU. A write takes a pool lock only if
//! the pool grows, shrinks or reaches its limit.
//!
//! A [`Ram`] is a disk, a fork (an empty slot reads through to its base) or a snapshot (read-only).
//! All devices made from one another form a [`Family`], and share its pool, compression streams,
//! memory limit and backing device.
//!
//! Write zeroes frees memory, even if an NBD client asks to keep the space allocated (`NO_HOLE`): a
//! RAM disk cannot reserve space.
//!
//! Deliberate differences from zram:
//! * Logical blocks are 512 bytes; a write of part of a page modifies it under the slot's lock
//!   (zram: 4096 bytes, no lock).
//! * A write that the memory limit refuses fails with
//!   [`Error::NoSpace`](freestone_core::device::Error::NoSpace) (zram: an I/O error).
//! * [`reset`](Ram::reset) wipes content and statistics and keeps size, algorithm and limit (zram
//!   forgets them). A reset needs no exclusive claim: concurrent readers see the old or the new,
//!   empty content.
//! * The disk can grow while it is in use.
//! * Pages are written back to a backing device automatically, packed; see [`Config::backing`].
//! * `invalid_io` counts rejected requests, as in kernels up to 6.1; newer kernels print 0.

mod auto_recompress;
mod block_state;
mod chain;
mod config;
mod contents;
#[cfg(test)]
mod contents_tests;
mod device_space;
mod evict_batches;
mod evict_rounds;
mod export;
mod extents;
mod family;
mod fault_in;
mod fetch;
mod freeing;
mod full_policy;
#[cfg(test)]
mod full_policy_tests;
mod idle;
mod io;
mod job;
mod keep;
mod keeper;
mod layer;
mod limits;
#[cfg(test)]
mod model_tests;
mod outcome;
mod page_search;
mod pages;
mod parent;
mod parent_zeroes;
mod parts;
mod read;
mod reclaim;
mod recompress;
mod recompress_space;
mod removals;
mod retire;
mod sample;
mod snapshot;
mod source;
mod space_waiters;
mod space_watch;
mod staged;
mod stats;
mod submit;
#[cfg(test)]
mod tests;
mod threads;
mod wait;
mod waiter;
mod write;
mod writeback;

use std::sync::Arc;

pub use self::auto_recompress::AutoRecompressStat;
pub use self::block_state::BlockState;
use self::chain::{Chain, Current, Role, View, resume_held_requests};
pub use self::config::{Backing, Config, ForkConfig, Secondary, SetupError};
use self::config::{round_fork_size, round_size};
pub use self::contents::Contents;
pub use self::export::ParentDevice;
pub(crate) use self::export::{CollectedPages, StoredForm};
pub use self::extents::OverBaseView;
pub use self::family::{Family, FamilyStat};
pub use self::full_policy::FullPolicy;
pub use self::idle::IdleSelection;
pub(crate) use self::keep::WeakRam;
use self::layer::{Layer, stored};
use self::limits::Limits;
pub use self::outcome::{WritebackError, WritebackReport};
use self::pages::Pages;
use self::parent::Parent;
use self::parts::FamilyParts;
pub use self::recompress::{RecompressError, RecompressKind, RecompressOptions, RecompressReport};
pub use self::snapshot::PendingSnapshot;
pub(crate) use self::source::{Incoming, Source};
pub(crate) use self::staged::Loader;
use self::stats::counter;
pub use self::stats::{DebugStat, IoStat, MemoryOverhead, MmStat, OverStat};
pub use self::writeback::{BackingStat, BdStat, Writeback};
use freestone_core::PAGE_BYTES;
use freestone_core::consistency_group::{self, FreezeTimeout};
use freestone_core::percpu::Counters;
use freestone_core::pin::{self, Swap};
use freestone_core::slot::MAX_SLOTS;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Logical block size in bytes: the smallest request. A page has eight logical blocks.
const LOGICAL_BLOCK_BYTES: u32 = 512;
const PAGE: u64 = PAGE_BYTES as u64;

/// Maximum depth of a fork chain (fork of a snapshot of a fork ...). A read recurses once per
/// level.
const BELOW_DEPTH_MAX: u32 = 64;

/// Largest disk in bytes: 256 TiB, as many pages as a slot table can address.
pub const DISKSIZE_BYTES_MAX: u64 = MAX_SLOTS * PAGE;
const _: () = assert!(DISKSIZE_BYTES_MAX == 256 << 40, "SetupError::TooLarge says 256 TiB");

/// A compressed RAM disk, a fork or a snapshot. Clones are handles to the same device.
#[derive(Clone)]
pub struct Ram(Arc<Inner>);

impl PartialEq for Ram {
    /// Returns true if both handles refer to the same device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// Guard that disables waiting for space. While the guard exists, writes of the device that find no
/// space fail.
pub struct NoWaitGuard(Ram);

impl Drop for NoWaitGuard {
    fn drop(&mut self) {
        self.0.0.limits.space.enable_waits();
    }
}

/// State of one device, shared by all its handles. Lock order: `changing`, then `chain`.
struct Inner {
    /// Pages of the family. Also reachable through `family`; held here to save an indirection per
    /// request.
    pages: Arc<Pages>,
    family: Arc<FamilyParts>,
    view: Swap<View>,
    /// Size in bytes. A fork can end within a page; the rest of that page is zeroes, and reads as
    /// zeroes when the device grows.
    size: AtomicU64,
    is_snapshot: bool,
    counters: Counters<{ counter::COUNT }>,
    limits: Arc<Limits>,
    /// Parent of the device: what its empty slots read from. Every view of the device has the
    /// parent too; this copy is readable without a pin.
    parent: Parent,
    /// Not 0 if all content is in the device's own slots: the device is live, has no parent, and
    /// has no page left to load.
    plain: AtomicU32,
    /// The chain of the live device, or the chain that contains the snapshot.
    chain: Current,
    /// Serialises growth, reset and rewind.
    changing: Mutex<()>,
}

// ---- making and changing a device ---------------------------------------------------------------

impl Ram {
    /// Creates an empty disk in a new family. Allocates almost no memory before the first write.
    ///
    /// # Errors
    /// Fails if the size, the parameters or the backing device is unusable, or memory is short.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        let disksize = round_size(config.disksize)?;
        Family::new(config)?.ram(disksize)
    }

    /// Creates an empty live device over `parent`.
    fn make(
        family: &Arc<FamilyParts>,
        size: u64,
        parent: Parent,
        limits: Arc<Limits>,
    ) -> Result<Self, SetupError> {
        retire::throttle_creation();
        let layer = family.pages.layers.make(&family.pages.common, Arc::clone(&limits))?;
        let of_device = parent.of_device();
        let chain = Chain::new(layer, parent);
        let parent = of_device;
        let plain = AtomicU32::new(matches!(parent, Parent::Nothing).into());
        Ok(Self(Arc::new_cyclic(|this| Inner {
            pages: Arc::clone(&family.pages),
            family: Arc::clone(family),
            view: Swap::new(Box::new(chain.first_view(this.clone()))),
            size: AtomicU64::new(size),
            is_snapshot: false,
            counters: Counters::default(),
            limits,
            parent,
            plain,
            chain: Current::new(chain),
            changing: Mutex::default(),
        })))
    }

    /// Returns the family of this device.
    pub fn family(&self) -> Family {
        Family(Arc::clone(&self.0.family))
    }

    /// Returns the current settings. A fork or snapshot has the settings of its family, except
    /// `disksize`.
    pub fn config(&self) -> Config {
        let family = &self.0.family;
        Config {
            disksize: self.0.size(),
            mem_limit: self.0.pages.mem_limit(),
            full_policy: self.0.pages.full.policy(),
            ..family.config.clone()
        }
    }

    /// Sets the family's memory limit; see [`Family::set_mem_limit`].
    pub fn set_mem_limit(&self, bytes: u64) {
        self.family().set_mem_limit(bytes);
    }

    /// Sets the statistic `mem_used_max` to the memory that the pool uses now.
    pub fn reset_mem_used_max(&self) {
        self.0.pages.pool.reset_pages_max();
    }

    /// Grows a disk to `disksize` bytes, rounded up to a page, or a fork, rounded up to 512 bytes.
    /// The added range reads as zeroes, on a fork too.
    ///
    /// # Errors
    /// Fails if `disksize` is smaller than the current size or too large, or this is a snapshot.
    pub fn grow(&self, disksize: u64) -> Result<(), SetupError> {
        let wanted = if self.is_fork() { round_fork_size(disksize)? } else { round_size(disksize)? };
        let _one = self.0.changing.lock();
        let present = self.0.size();
        if self.0.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        if wanted < present {
            return Err(SetupError::Shrinks { wanted, present });
        }
        // Release: pairs with the Acquire in `size`.
        self.0.size.store(wanted, Ordering::Release);
        Ok(())
    }

    /// Wipes content and statistics. Requests in flight finish on the old content. Afterwards a
    /// fork reads as its base again.
    ///
    /// # Errors
    /// Fails on a snapshot.
    pub fn reset(&self) -> Result<(), SetupError> {
        self.rewind()?;
        while self.0.pages.free_leaf_or_yield() {}
        self.clear_counters();
        Ok(())
    }

    /// Resets all statistics to those of a new device, and keeps the content.
    pub fn clear_counters(&self) {
        let inner = &*self.0;
        // Clear the counters of the backing device only if no other device of the family uses it.
        if inner.pages.layers.is_only_active(inner.layer().id())
            && let Some(store) = &inner.pages.store
        {
            store.clear_counts();
        }
        inner.family.auto.clear();
        inner.pages.wake_memory_waiters();
        inner.pages.pool.release_empties();
        inner.pages.pool.reset_pages_max();
        // Relaxed: a statistic.
        inner.pages.compacted.store(0, Ordering::Relaxed);
        (0..counter::COUNT).for_each(|counter| inner.counters.clear(counter));
    }

    /// Returns the device to its initial content: a fork to its base, a disk to zeroes. The call
    /// takes constant time; the old content is freed in the background. Requests in flight finish
    /// on the old content. Snapshots keep their content.
    ///
    /// # Errors
    /// Fails on a snapshot.
    pub fn rewind(&self) -> Result<(), SetupError> {
        let inner = &*self.0;
        if inner.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        let _one = inner.changing.lock();
        let layer = inner.pages.layers.make(&inner.pages.common, Arc::clone(&inner.limits))?;
        let new = Chain::new(layer, inner.parent.loaded().clone());
        if let Parent::Staged(staged) = &inner.parent {
            // Detach the device from its file of pages not loaded yet, before the first write to
            // the new layer. The new content does not include that file.
            staged.detach();
        }
        // A request may write to the new content before the old content is freed. During a removal,
        // such a write waits for memory instead of failing.
        inner.pages.begin_removal();
        let (unused, held) = inner.chain.rewind(&inner.pages, &new, &self.0);
        if let Some(layer) = unused {
            retire::retire_layer(&inner.pages, layer);
        }
        inner.pages.end_removal();
        inner.update_plain();
        resume_held_requests(held);
        Ok(())
    }

    /// Returns true if a [`rewind`](Self::rewind) would not change the content: the device has no
    /// page of its own and no page left to load. Discarded pages over data of its base count as its
    /// own.
    pub fn is_unmodified(&self) -> bool {
        let inner = &*self.0;
        let is_empty = || inner.layer().get(stored::PAGES) == 0 && inner.parent.staged_source().is_none();
        if inner.is_snapshot || !is_empty() {
            return false;
        }
        // The page count of the layer is exact only while writers are frozen.
        let _one = inner.changing.lock();
        let chain = inner.chain.freeze();
        let is_empty = is_empty();
        resume_held_requests(chain.thaw());
        is_empty
    }

    /// Compacts the pool while requests continue. Returns the number of pool pages returned to the
    /// system; 0 if another compaction runs. Packed objects on a backing device are compacted too,
    /// which [`backing`](Self::backing) shows as fewer used bytes.
    pub fn compact(&self) -> u64 {
        self.compact_with_progress(&mut |_, _| true)
    }

    /// Compacts like [`compact`](Self::compact) and reports progress. `watch` receives the bytes
    /// processed and the total bytes, each of pool and backing device together. Compaction ends
    /// early when `watch` returns false; objects already moved stay moved.
    pub fn compact_with_progress(&self, watch: &mut dyn FnMut(u64, u64) -> bool) -> u64 {
        let reclaim = &self.0.family.evict.reclaim;
        let (holes, mut pool) = (reclaim.bytes(), 0);
        let mut go_on = true;
        let pages = self.0.pages.compact_with_progress(&mut |done, all| {
            pool = all;
            go_on = watch(done, all + holes);
            go_on
        });
        if go_on {
            reclaim.reclaim_all(&mut |done| watch(pool + done.min(holes), pool + holes));
        }
        self.0.pages.wake_space_waiters();
        pages
    }

    // ---- snapshots and forks --------------------------------------------------------------------

    /// Prepares a snapshot. [`consistency_group::take_snapshots`] then takes the snapshot, alone or
    /// atomically with snapshots of other devices.
    ///
    /// # Errors
    /// Fails if this is a snapshot, or memory is short.
    pub fn prepare_snapshot(&self) -> Result<PendingSnapshot, SetupError> {
        if self.0.is_snapshot { Err(SetupError::Snapshot) } else { PendingSnapshot::new(self.clone()) }
    }

    /// Takes a snapshot of the current content of this disk or fork.
    ///
    /// # Errors
    /// As [`prepare_snapshot`](Self::prepare_snapshot); [`SetupError::NotInTime`] if the device
    /// cannot be frozen in time.
    pub fn snapshot(&self) -> Result<Self, SetupError> {
        let mut pending = self.prepare_snapshot()?;
        consistency_group::take_snapshots(&mut [&mut pending])
            .map_err(|_| SetupError::NotInTime(FreezeTimeout))?;
        Ok(pending.into_snapshot())
    }

    /// Creates a fork of this snapshot in the same family.
    ///
    /// # Errors
    /// Fails if this is a live device, the size is invalid, or the family's memory limit does not
    /// leave the guaranteed memory.
    pub fn fork(&self, config: &ForkConfig) -> Result<Self, SetupError> {
        if !self.0.is_snapshot {
            return Err(SetupError::WritableBase);
        }
        let parent = Parent::Snapshot(self.clone());
        if parent.depth() > BELOW_DEPTH_MAX {
            return Err(SetupError::TooDeep);
        }
        self.0.family.fork(parent, self.0.size(), config)
    }

    fn layer_id(&self) -> u32 {
        self.0.layer().id()
    }

    /// Returns true if this is a snapshot.
    pub fn is_snapshot(&self) -> bool {
        self.0.is_snapshot
    }

    /// Returns true if this is a live device (not a snapshot) with a base.
    pub fn is_fork(&self) -> bool {
        !self.0.is_snapshot && !matches!(self.0.parent.loaded(), Parent::Nothing)
    }

    /// Returns the number of snapshots of this disk or fork; 0 for a snapshot.
    pub fn snapshots(&self) -> usize {
        if self.0.is_snapshot { 0 } else { self.0.chain.get().snapshots() }
    }

    /// Returns the device's own limits in bytes: its memory limit (0: no limit) and its guaranteed
    /// memory.
    pub fn own_limits(&self) -> (u64, u64) {
        let cap = self.0.limits.cap();
        (if cap == u64::MAX { 0 } else { cap }, self.0.limits.guarantee())
    }

    /// Sets the memory limit of this device's own objects (0: no limit) and the family memory
    /// guaranteed to the device, both in bytes. Near its own limit the device writes back its own
    /// pages; without a backing device its writes find no space.
    ///
    /// # Errors
    /// Fails on a snapshot, if `mem_limit` is below 64 KiB, or if `mem_min` is above `mem_limit` or
    /// above the family's memory not yet guaranteed.
    pub fn set_own_limits(&self, mem_limit: u64, mem_min: u64) -> Result<(), SetupError> {
        if self.0.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        self.0.family.set_device_limits(&self.0.limits, mem_limit, mem_min)?;
        self.0.layer().update_reservation(&self.0.pages.layers);
        self.0.pages.wake_space_waiters();
        self.0.pages.keeper.kick();
        Ok(())
    }

    /// Returns true if writes of the device wait for free space, false if they fail at once; `None`
    /// if the device follows [its family's policy](Family::full_policy).
    pub fn wait_override(&self) -> Option<bool> {
        self.0.limits.space.wait_override()
    }

    /// Sets whether writes of the device wait for free space or fail at once, including those that
    /// wait now. `None` selects the family's policy.
    pub fn set_wait_override(&self, waits: Option<bool>) {
        self.0.limits.space.set_wait_override(waits);
        self.0.pages.end_space_waits(self);
    }

    /// Sets the device's name for log lines. Only the first call has an effect.
    pub fn set_name(&self, name: &str) {
        self.0.limits.space.set_name(name);
    }

    /// Disables waiting for space while the returned guard exists: writes that wait for space now,
    /// and later writes that find no space, fail.
    pub fn disable_waiting(&self) -> NoWaitGuard {
        self.0.limits.space.disable_waits();
        self.0.pages.end_space_waits(self);
        NoWaitGuard(self.clone())
    }

    // ---- statistics -----------------------------------------------------------------------------

    /// Returns the statistics of the kernel's `mm_stat`.
    pub fn mm_stat(&self) -> MmStat {
        self.0.mm_stat()
    }

    /// Returns the statistics of the kernel's `io_stat`.
    pub fn io_stat(&self) -> IoStat {
        self.0.io_stat()
    }

    /// Returns the statistics of the kernel's `debug_stat`.
    pub fn debug_stat(&self) -> DebugStat {
        self.0.debug_stat()
    }

    /// Returns statistics of the pages that a fork or snapshot stores itself, and of those that
    /// moved to snapshots of the device.
    pub fn over_stat(&self) -> OverStat {
        self.0.over_stat()
    }

    /// Returns the number of requests of this device that wait for free space now.
    pub fn waiting_requests(&self) -> u64 {
        self.0.limits.space.waiting_requests()
    }

    /// Returns the memory that the family uses beyond its stored objects, such as slot tables and
    /// compression streams.
    pub fn memory_overhead(&self) -> MemoryOverhead {
        stats::memory(&self.0.pages)
    }
}

impl Inner {
    fn size(&self) -> u64 {
        // Acquire: pairs with the Release in `grow`.
        self.size.load(Ordering::Acquire)
    }

    /// Returns true if all content is in the device's own slots: a read need not look at snapshots
    /// or a parent.
    #[inline]
    fn is_plain(&self) -> bool {
        // Acquire: pairs with the Release in `update_plain`.
        self.plain.load(Ordering::Acquire) != 0
    }

    /// Marks the device as plain if it is live, has no parent, and has no page left to load.
    fn update_plain(&self) {
        if !self.is_snapshot && matches!(self.parent.loaded(), Parent::Nothing) {
            // Release: pairs with the Acquire in `is_plain`; a reader that sees 1 also sees all
            // loaded slots.
            self.plain.store(1, Ordering::Release);
        }
    }

    /// Returns the number of pages of the device; the last one may be partial.
    fn slots(&self) -> u64 {
        self.size().div_ceil(PAGE)
    }

    fn layer(&self) -> Arc<Layer> {
        pin::pinned(|pin| Arc::clone(&self.view.load(pin).layer))
    }

    /// Creates the device of a snapshot that was just attached to the chain. `view` is the
    /// snapshot's view.
    fn snapshot_device(&self, view: View) -> Ram {
        let Role::Snapshot { chain, .. } = &view.role else { unreachable!("only snapshots are attached") };
        Ram(Arc::new(Self {
            pages: Arc::clone(&self.pages),
            family: Arc::clone(&self.family),
            size: AtomicU64::new(self.size()),
            is_snapshot: true,
            counters: Counters::default(),
            limits: Arc::default(),
            parent: view.parent.clone(),
            plain: AtomicU32::new(0),
            chain: Current::new(Arc::clone(chain)),
            changing: Mutex::default(),
            view: Swap::new(Box::new(view)),
        }))
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let (layer, number) = pin::pinned(|pin| {
            let view = self.view.load(pin);
            let number = match view.role {
                Role::Live { .. } => None,
                Role::Snapshot { number, .. } => Some(number),
            };
            (Arc::clone(&view.layer), number)
        });
        // Return the guaranteed memory to the family at once, not when the layer is freed.
        self.limits.set_guarantee(0);
        layer.update_reservation(&self.pages.layers);
        let parent = std::mem::replace(&mut self.parent, Parent::Nothing);
        retire::retire_device(&self.pages, self.chain.get(), number, parent);
    }
}

/// Returns the first multiple of `unit` above `at`. `unit` must be a power of two.
fn next_multiple(at: u64, unit: u64) -> u64 {
    (at | (unit - 1)) + 1
}

/// Returns the part of the byte range `[at, at + len)` in the range's first page: slot, first byte
/// within the page, and length.
#[inline]
fn piece(at: u64, len: u64) -> (u64, usize, usize) {
    let from = at % PAGE;
    (at / PAGE, from as usize, (PAGE - from).min(len) as usize)
}
