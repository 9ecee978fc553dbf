//! The compressed RAM disk with the semantics of zram in user space, its forks and its snapshots.
//!
//! A disk consists of a slot table, an object pool and one compression stream per CPU. Pages that
//! repeat a pattern of up to 64 bits store only the pattern. Incompressible pages are stored as
//! they are, all others compressed. Requests for different pages share no lock: each uses the lock
//! bit of its slot, and the stream and current span of its CPU. A write takes a pool lock only if
//! the pool grows, shrinks or reaches its limit.
//!
//! A [`Ram`] is a disk, a fork (an empty slot reads through to its base) or a snapshot (read-only).
//! All devices made from one another are one [`Family`] and share pool, streams, limit and backing
//! device.
//!
//! Write zeroes frees memory, also if an NBD client asks to keep the space (`NO_HOLE`): a RAM disk has
//! no space to reserve.
//!
//! Deliberate differences from zram:
//! * Logical blocks are 512 bytes; a write of part of a page modifies it under the slot's lock
//!   (zram: 4096 bytes, no lock).
//! * A write that the memory limit refuses fails with
//!   [`Error::NoSpace`](freestone_core::device::Error::NoSpace) (zram: an I/O error).
//! * [`reset`](Ram::reset) wipes content and statistics and keeps size, algorithm and limit (zram
//!   forgets them). It needs no exclusive claim: concurrent readers see the old or the new, empty
//!   content.
//! * The disk can grow while it is in use.
//! * Pages are written back to a backing device automatically, packed; see [`Config::backing`].
//! * `invalid_io` counts, as in kernels up to 6.1; newer kernels print 0.

mod auto_recompress;
mod below;
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
mod full;
#[cfg(test)]
mod full_tests;
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

pub use self::auto_recompress::AutoRecompressed;
pub use self::block_state::BlockState;
use self::chain::{Chain, Current, Role, View, resume_held_requests};
pub use self::config::{Backing, Config, ForkConfig, Secondary, SetupError};
use self::config::{round_fork_size, round_size};
pub use self::contents::Contents;
pub use self::export::Lower;
pub(crate) use self::export::{CollectedPages, Stored};
pub use self::extents::OverBase;
pub use self::family::{Family, FamilyStat};
pub use self::full::WhenFull;
pub use self::idle::Idle;
pub(crate) use self::keep::WeakRam;
use self::layer::{Layer, stored};
use self::limits::Limits;
pub use self::outcome::{WritebackError, Written};
use self::pages::Pages;
use self::parent::Parent;
use self::parts::FamilyParts;
pub use self::recompress::{Recompress, RecompressError, RecompressKind, Recompressed};
pub use self::snapshot::PendingSnapshot;
pub(crate) use self::source::{Incoming, Source};
pub(crate) use self::staged::Loader;
use self::stats::counter;
pub use self::stats::{DebugStat, IoStat, Memory, MmStat, OverStat};
pub use self::writeback::{BackingStat, BdStat, Writeback};
use freestone_core::PAGE_BYTES;
use freestone_core::consistency_group::{self, NotInTime};
use freestone_core::percpu::Counters;
use freestone_core::pin::{self, Swap};
use freestone_core::slot::MAX_SLOTS;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Logical block size: the smallest request, a part of a page.
const LOGICAL_BLOCK_BYTES: u32 = 512;
const PAGE: u64 = PAGE_BYTES as u64;

/// Maximum depth of a fork chain (fork of a snapshot of a fork ...).
const BELOW_DEPTH_MAX: u32 = 64;

/// Largest disk in bytes: 256 TiB.
pub const DISKSIZE_BYTES_MAX: u64 = MAX_SLOTS * PAGE;
const _: () = assert!(DISKSIZE_BYTES_MAX == 256 << 40, "SetupError::TooLarge says 256 TiB");

/// A compressed RAM disk, a fork or a snapshot. Clones are handles to the same device.
#[derive(Clone)]
pub struct Ram(Arc<Inner>);

impl PartialEq for Ram {
    /// Returns true if both are handles to the same device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// A guard. While it exists, no write of its device waits for space.
pub struct NoWaiting(Ram);

impl Drop for NoWaiting {
    fn drop(&mut self) {
        self.0.0.limits.room.enable_waits();
    }
}

/// Lock order: `changing`, then `chain`.
struct Inner {
    /// The family's pages, held directly to save one indirection on the way to a page.
    pages: Arc<Pages>,
    family: Arc<FamilyParts>,
    view: Swap<View>,
    /// Size in bytes. A fork can end within a page; the rest of that page is zeroes, and reads as
    /// zeroes when the device grows.
    size: AtomicU64,
    is_snapshot: bool,
    counters: Counters<{ counter::COUNT }>,
    limits: Arc<Limits>,
    /// The parent, as in every view of the device. Stored here too so that it can be read without a
    /// pin.
    parent: Parent,
    /// Not 0 if all content is in the device's own slots: it is live, has no parent, and nothing is
    /// left to load.
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

    /// Returns the current settings. Those of a fork or snapshot are its family's, except
    /// `disksize`.
    pub fn config(&self) -> Config {
        let family = &self.0.family;
        Config {
            disksize: self.0.size(),
            mem_limit: self.0.pages.mem_limit(),
            when_full: self.0.pages.full.when(),
            ..family.config.clone()
        }
    }

    /// Sets the family's memory limit; see [`Family::set_mem_limit`].
    pub fn set_mem_limit(&self, bytes: u64) {
        self.family().set_mem_limit(bytes);
    }

    /// Sets `mem_used_max` to the present use.
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

    /// Wipes content and statistics. Requests in flight finish on the old content. A fork then
    /// shows its base again.
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
        // Clear the counters of a shared store only if no other layer uses it.
        if inner.pages.layers.is_only_active(inner.layer().id())
            && let Some(store) = &inner.pages.store
        {
            store.clear_counts();
        }
        inner.family.auto.clear();
        inner.pages.memory_freed();
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
            // Detach before the first write to the new layer: the new content does not include the
            // file.
            staged.detach();
        }
        // A request that sees the new content may write before the old content is freed.
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
    /// page of its own, including discarded pages over data of its base, and no page left to load.
    pub fn holds_nothing(&self) -> bool {
        let inner = &*self.0;
        let is_empty = || inner.layer().get(stored::PAGES) == 0 && inner.parent.staged_source().is_none();
        if inner.is_snapshot || !is_empty() {
            return false;
        }
        // The count is exact only while there are no writes.
        let _one = inner.changing.lock();
        let chain = inner.chain.freeze();
        let is_empty = is_empty();
        resume_held_requests(chain.thaw());
        is_empty
    }

    /// Compacts the pool under traffic and returns the number of pages returned to the system. A
    /// concurrent second call returns 0. Packed objects on a backing device are compacted too;
    /// [`backing`](Self::backing) shows the blocks that this frees.
    pub fn compact(&self) -> u64 {
        self.compact_watched(&mut |_, _| true)
    }

    /// Compacts like [`compact`](Self::compact) and reports progress. `watch` receives the bytes
    /// done and the total bytes, of pool and backing device together. Compaction ends early when
    /// `watch` returns false; objects already moved stay moved.
    pub fn compact_watched(&self, watch: &mut dyn FnMut(u64, u64) -> bool) -> u64 {
        let reclaim = &self.0.family.evict.reclaim;
        let (holes, mut pool) = (reclaim.bytes(), 0);
        let mut go_on = true;
        let pages = self.0.pages.compact_watched(&mut |done, all| {
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

    /// Prepares a snapshot. [`consistency_group::take`] then takes it, alone or together with
    /// others.
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
        consistency_group::take(&mut [&mut pending]).map_err(|_| SetupError::NotInTime(NotInTime))?;
        Ok(pending.into_snapshot())
    }

    /// Creates a fork of this snapshot in the same family.
    ///
    /// # Errors
    /// Fails if this is a live device, the size is invalid, or the family cannot give the
    /// guarantee.
    pub fn fork(&self, config: &ForkConfig) -> Result<Self, SetupError> {
        if !self.0.is_snapshot {
            return Err(SetupError::Live);
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

    /// Returns true if this is a live device with a base.
    pub fn is_fork(&self) -> bool {
        !self.0.is_snapshot && !matches!(self.0.parent.loaded(), Parent::Nothing)
    }

    /// Returns the number of snapshots of this disk or fork.
    pub fn snapshots(&self) -> usize {
        if self.0.is_snapshot { 0 } else { self.0.chain.get().snapshots() }
    }

    /// Returns the device's own limits in bytes: its cap (0: no cap) and its guarantee.
    pub fn own_limits(&self) -> (u64, u64) {
        let cap = self.0.limits.cap();
        (if cap == u64::MAX { 0 } else { cap }, self.0.limits.guarantee())
    }

    /// Sets the cap on this device's own objects in bytes (0: no cap) and the family memory
    /// guaranteed to the device. Above its cap the device writes back its own pages; writes fail if
    /// the family has no backing device.
    ///
    /// # Errors
    /// Fails on a snapshot, if the cap is below 64 KiB, or if the guarantee is above the cap or
    /// above the family's memory that is not yet guaranteed.
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

    /// Returns whether the device's writes wait for space; `None` if the device follows [its
    /// family](Family::when_full).
    pub fn own_wait(&self) -> Option<bool> {
        self.0.limits.room.wait_override()
    }

    /// Sets whether writes wait for space, including those that wait now; `None` follows the
    /// family.
    pub fn set_own_wait(&self, waits: Option<bool>) {
        self.0.limits.room.set_wait_override(waits);
        self.0.pages.end_space_waits(self);
    }

    /// Sets the device's name for log lines. Only the first call has an effect.
    pub fn set_name(&self, name: &str) {
        self.0.limits.room.set_name(name);
    }

    /// Disables waiting for space while the returned guard exists. Writes that wait now, and later
    /// writes that find no space, fail.
    pub fn no_waiting(&self) -> NoWaiting {
        self.0.limits.room.disable_waits();
        self.0.pages.end_space_waits(self);
        NoWaiting(self.clone())
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

    /// Returns what a fork or snapshot stores itself, and how much moved to snapshots.
    pub fn over_stat(&self) -> OverStat {
        self.0.over_stat()
    }

    /// Returns the number of requests that wait for space now.
    pub fn waiting(&self) -> u64 {
        self.0.limits.room.waiting()
    }

    /// Returns the memory used beyond the stored objects.
    pub fn memory(&self) -> Memory {
        stats::memory(&self.0.pages)
    }
}

impl Inner {
    fn size(&self) -> u64 {
        // Acquire: pairs with the Release in `grow`.
        self.size.load(Ordering::Acquire)
    }

    /// Returns true if all content is in the device's own slots.
    #[inline]
    fn is_plain(&self) -> bool {
        // Acquire: pairs with the Release in `update_plain`.
        self.plain.load(Ordering::Acquire) != 0
    }

    /// Marks the device as plain if it has no parent and nothing is left to load.
    fn update_plain(&self) {
        if !self.is_snapshot && matches!(self.parent.loaded(), Parent::Nothing) {
            // Release: pairs with the Acquire in `is_plain`; all loaded slots are written.
            self.plain.store(1, Ordering::Release);
        }
    }

    /// Returns the number of pages; the last one may be partial.
    fn slots(&self) -> u64 {
        self.size().div_ceil(PAGE)
    }

    fn layer(&self) -> Arc<Layer> {
        pin::pinned(|pin| Arc::clone(&self.view.load(pin).layer))
    }

    /// Creates the device of a snapshot that was just attached.
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
        // Return the guarantee to the family at once.
        self.limits.set_guarantee(0);
        layer.update_reservation(&self.pages.layers);
        let parent = std::mem::replace(&mut self.parent, Parent::Nothing);
        retire::retire_device(&self.pages, self.chain.get(), number, parent);
    }
}

/// Returns the first multiple of `unit`, a power of two, above `at`.
fn next_multiple(at: u64, unit: u64) -> u64 {
    (at | (unit - 1)) + 1
}

/// Splits off the part of the range `[at, at + len)` in its first page. Returns the slot, the first
/// byte in the page, and the length.
#[inline]
fn piece(at: u64, len: u64) -> (u64, usize, usize) {
    let from = at % PAGE;
    (at / PAGE, from as usize, (PAGE - from).min(len) as usize)
}
