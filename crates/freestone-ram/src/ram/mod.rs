//! The compressed RAM disk: zram's semantics in user space; and forks and snapshots, which are the
//! same table over something.
//!
//! A slot table, an object pool, and one compression stream a CPU. Pages that repeat a pattern of
//! up to 64 bits store only that; pages that do not compress are stored as they are; everything
//! else is compressed. Requests meet only in a page's own lock; beside it they use what belongs to
//! their CPU (a stream, a current span), and a write takes a lock of the pool when that grows,
//! shrinks or reaches its limit.
//!
//! A [`Ram`] is a disk, a fork (an empty slot reads through to its base), or a snapshot
//! (read-only). Those that were made from one another are a [`Family`] and share pool, streams,
//! limit and backing device.
//!
//! Where it differs from zram on purpose:
//! * Logical blocks are 512 bytes; a part of a page is patched under the page's lock (zram: 4096,
//!   no lock).
//! * A write that the memory limit refuses is
//!   [`Error::NoSpace`](freestone_core::device::Error::NoSpace) (zram: an I/O error).
//! * [`reset`](Ram::reset) wipes content and statistics and keeps size, algorithm and limit (zram
//!   forgets them), and it needs no exclusive claim: who reads meanwhile sees the old or the new,
//!   empty content.
//! * The disk can grow while it is used.
//! * Pages are spilled to a backing device by themselves, packed; see [`Config::backing`].
//! * `invalid_io` counts, as in kernels up to 6.1; newer ones print 0.

mod auto_recompress;
mod below;
mod block_state;
mod candidates;
mod chain;
mod config;
mod contents;
#[cfg(test)]
mod contents_tests;
mod device_room;
mod evict;
mod eviction;
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
mod pages;
mod parent;
mod parts;
mod read;
mod reclaim;
mod recompress;
mod removals;
mod retire;
mod room;
mod room_waiters;
mod room_watch;
mod sample;
mod snapshot;
mod source;
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
use self::chain::{Chain, Current, Role, View, carry_on};
pub use self::config::{Backing, Config, ForkConfig, Secondary, SetupError};
use self::config::{round_fork_size, round_size};
pub use self::contents::Contents;
pub use self::export::Lower;
pub(crate) use self::export::{Gathered, Stored};
pub use self::extents::OverBase;
pub use self::family::{Family, FamilyStat};
pub use self::full::WhenFull;
pub use self::idle::Idle;
pub(crate) use self::keep::WeakRam;
use self::layer::Layer;
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

/// Smallest request: a part of a page.
const LOGICAL_BLOCK_BYTES: u32 = 512;
const PAGE: u64 = PAGE_BYTES as u64;

/// Forks of snapshots of forks of snapshots ...: so many.
const BELOW_DEPTH_MAX: u32 = 64;

/// Largest disk in bytes: 256 TiB.
pub const DISKSIZE_BYTES_MAX: u64 = MAX_SLOTS * PAGE;
const _: () = assert!(DISKSIZE_BYTES_MAX == 256 << 40, "SetupError::TooLarge says 256 TiB");

/// A compressed RAM disk, a fork, or a snapshot. Clones are handles to one device.
#[derive(Clone)]
pub struct Ram(Arc<Inner>);

impl PartialEq for Ram {
    /// Handles to one device.
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

/// No write of a device waits for room until this is dropped.
pub struct NoWaiting(Ram);

impl Drop for NoWaiting {
    fn drop(&mut self) {
        self.0.0.limits.room.open();
    }
}

/// Lock order: `changing`, then `chain`.
struct Inner {
    /// As the family has it: one step less on the way to a page.
    pages: Arc<Pages>,
    family: Arc<FamilyParts>,
    view: Swap<View>,
    /// Bytes. Over a base it can end within a page, of which the rest is zeroes: so it reads when
    /// the device has grown.
    size: AtomicU64,
    is_snapshot: bool,
    counters: Counters<{ counter::COUNT }>,
    limits: Arc<Limits>,
    /// As that of every view of it. Here so that it can be read with nothing pinned.
    parent: Parent,
    /// Not 0: all that it holds is in its own slots. It is live, nothing lies below it, and nothing
    /// is left to be loaded.
    plain: AtomicU32,
    /// The live device's chain, or that of which the snapshot is one.
    chain: Current,
    /// Taken by growth, reset and rewind.
    changing: Mutex<()>,
}

// ---- making and changing a device ---------------------------------------------------------------

impl Ram {
    /// An empty disk, which is a family of its own. Costs almost nothing before it is written.
    ///
    /// # Errors
    /// The size, the parameters, the backing device, or no memory.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        let disksize = round_size(config.disksize)?;
        Family::new(config)?.ram(disksize)
    }

    /// An empty live device over something.
    fn make(
        family: &Arc<FamilyParts>,
        size: u64,
        parent: Parent,
        limits: Arc<Limits>,
    ) -> Result<Self, SetupError> {
        retire::pace();
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

    /// What it has in common with those that were made from it, or that it was made from.
    pub fn family(&self) -> Family {
        Family(Arc::clone(&self.0.family))
    }

    /// The device's settings as they are now. Those of a fork or snapshot are its family's, but for
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

    /// As [`Family::set_mem_limit`].
    pub fn set_mem_limit(&self, bytes: u64) {
        self.family().set_mem_limit(bytes);
    }

    /// Sets `mem_used_max` to the present use.
    pub fn reset_mem_used_max(&self) {
        self.0.pages.pool.reset_pages_max();
    }

    /// Grows the disk to `disksize` bytes, rounded up to a page, or a fork to `disksize` bytes,
    /// rounded up to a block of 512; what is new reads as zeroes, also over a base.
    ///
    /// # Errors
    /// Smaller than now, or too large; a snapshot.
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

    /// Wipes content and statistics. Requests in flight finish on the old content. A fork is as its
    /// base after that.
    ///
    /// # Errors
    /// A snapshot.
    pub fn reset(&self) -> Result<(), SetupError> {
        self.rewind()?;
        let inner = &*self.0;
        while inner.pages.help_to_free() {}
        // What others have in it is not for this one to clear.
        if inner.pages.layers.is_alone(inner.layer().id())
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
        Ok(())
    }

    /// Back to what the device was when it was made: a fork to its base, a disk to nothing. Takes
    /// no time that depends on how much was written; what was, is freed in the background. Requests
    /// in flight finish on the old content. Snapshots keep what they show.
    ///
    /// # Errors
    /// A snapshot.
    pub fn rewind(&self) -> Result<(), SetupError> {
        let inner = &*self.0;
        if inner.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        let _one = inner.changing.lock();
        let layer = inner.pages.layers.make(&inner.pages.common, Arc::clone(&inner.limits))?;
        let new = Chain::new(layer, inner.parent.loaded().clone());
        if let Parent::Staged(staged) = &inner.parent {
            // Before anybody writes to the new layer: what is below that is not in the file.
            staged.is_left();
        }
        // Who sees the new content may write before the old one can be freed.
        inner.pages.removal_begins();
        let (unused, held) = inner.chain.rewind(&inner.pages, &new, &self.0);
        if let Some(layer) = unused {
            retire::layer(&inner.pages, layer);
        }
        inner.pages.removal_ended();
        inner.look_if_plain();
        carry_on(held);
        Ok(())
    }

    /// Packs the pool, under traffic, and returns how many pages went back to the system. A second
    /// caller gets 0. Packed objects on a backing device are moved together as well;
    /// [`backing`](Self::backing) shows what that frees.
    pub fn compact(&self) -> u64 {
        self.compact_watched(&mut |_, _| true)
    }

    /// The same, watched: `watch` is given bytes of the pool and of the backing device, done and in
    /// all, every now and then. It ends when that says false; what was moved stays moved.
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
            reclaim.in_turns(&mut |done| watch(pool + done.min(holes), pool + holes));
        }
        self.0.pages.room_came();
        pages
    }

    // ---- snapshots and forks --------------------------------------------------------------------

    /// Prepares a snapshot, which begins with [`consistency_group::take`], together with others
    /// where that is wanted.
    ///
    /// # Errors
    /// This is a snapshot: it does not change. No memory.
    pub fn prepare_snapshot(&self) -> Result<PendingSnapshot, SetupError> {
        if self.0.is_snapshot { Err(SetupError::Snapshot) } else { PendingSnapshot::new(self.clone()) }
    }

    /// A snapshot of this disk or fork: what it holds now.
    ///
    /// # Errors
    /// As [`prepare_snapshot`](Self::prepare_snapshot); [`SetupError::NotInTime`].
    pub fn snapshot(&self) -> Result<Self, SetupError> {
        let mut pending = self.prepare_snapshot()?;
        consistency_group::take(&mut [&mut pending]).map_err(|_| SetupError::NotInTime(NotInTime))?;
        Ok(pending.into_snapshot())
    }

    /// A fork of this snapshot, in the same family.
    ///
    /// # Errors
    /// This is live; the size; a guarantee that the family cannot give.
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

    /// The id of the present layer.
    fn layer_id(&self) -> u32 {
        self.0.layer().id()
    }

    /// Whether this is a snapshot.
    pub fn is_snapshot(&self) -> bool {
        self.0.is_snapshot
    }

    /// Whether this lies over a base.
    pub fn is_fork(&self) -> bool {
        !self.0.is_snapshot && !matches!(self.0.parent.loaded(), Parent::Nothing)
    }

    /// How many snapshots of this disk or fork there are.
    pub fn snapshots(&self) -> usize {
        if self.0.is_snapshot { 0 } else { self.0.chain.get().snapshots() }
    }

    /// The cap on this device's own objects in bytes, 0 where there is none, and what is guaranteed
    /// to it.
    pub fn own_limits(&self) -> (u64, u64) {
        let cap = self.0.limits.cap();
        (if cap == u64::MAX { 0 } else { cap }, self.0.limits.least())
    }

    /// Sets the cap on this device's own objects in bytes, 0 for none, and what of the family's
    /// memory is guaranteed to it. Beyond its cap it spills pages of its own, where the family has
    /// a backing device; else writes fail.
    ///
    /// # Errors
    /// A snapshot; a cap below 64 KiB; a guarantee above the cap, or above what the family has left
    /// for guarantees.
    pub fn set_own_limits(&self, mem_limit: u64, mem_min: u64) -> Result<(), SetupError> {
        if self.0.is_snapshot {
            return Err(SetupError::Snapshot);
        }
        self.0.family.set_device_limits(&self.0.limits, mem_limit, mem_min)?;
        self.0.layer().reckon(&self.0.pages.layers);
        self.0.pages.room_came();
        self.0.pages.keeper.kick();
        Ok(())
    }

    /// Whether its writes wait for room, where it does not do what
    /// [its family does](Family::when_full).
    pub fn own_wait(&self) -> Option<bool> {
        self.0.limits.room.own()
    }

    /// Sets that, also for writes that wait; `None`: as its family.
    pub fn set_own_wait(&self, waits: Option<bool>) {
        self.0.limits.room.set_own(waits);
        self.0.pages.end_waiting(self);
    }

    /// Says what the log calls it, once.
    pub fn set_name(&self, name: &str) {
        self.0.limits.room.set_name(name);
    }

    /// Ends waiting for room, as long as what is returned is there: writes that wait, and those
    /// that come and find none, fail.
    pub fn no_waiting(&self) -> NoWaiting {
        self.0.limits.room.close();
        self.0.pages.end_waiting(self);
        NoWaiting(self.clone())
    }

    // ---- statistics -----------------------------------------------------------------------------

    /// The kernel's `mm_stat`.
    pub fn mm_stat(&self) -> MmStat {
        self.0.mm_stat()
    }

    /// The kernel's `io_stat`.
    pub fn io_stat(&self) -> IoStat {
        self.0.io_stat()
    }

    /// The kernel's `debug_stat`.
    pub fn debug_stat(&self) -> DebugStat {
        self.0.debug_stat()
    }

    /// What a fork or snapshot holds itself, and what moved to snapshots.
    pub fn over_stat(&self) -> OverStat {
        self.0.over_stat()
    }

    /// Requests that wait for room now.
    pub fn waiting(&self) -> u64 {
        self.0.limits.room.waiting()
    }

    /// What the disk takes beside the pool.
    pub fn memory(&self) -> Memory {
        stats::memory(&self.0.pages)
    }
}

impl Inner {
    fn size(&self) -> u64 {
        // Acquire: pairs with the Release in `grow`.
        self.size.load(Ordering::Acquire)
    }

    /// Whether all that it holds is in its own slots.
    #[inline]
    fn is_plain(&self) -> bool {
        // Acquire: pairs with the Release in `look_if_plain`.
        self.plain.load(Ordering::Acquire) != 0
    }

    /// Nothing is left to be loaded, or it has another content now.
    fn look_if_plain(&self) {
        if !self.is_snapshot && matches!(self.parent.loaded(), Parent::Nothing) {
            // Release: pairs with the Acquire in `is_plain`; what was loaded is there.
            self.plain.store(1, Ordering::Release);
        }
    }

    /// Pages; the device can end within the last one.
    fn slots(&self) -> u64 {
        self.size().div_ceil(PAGE)
    }

    /// The present layer.
    fn layer(&self) -> Arc<Layer> {
        pin::pinned(|pin| Arc::clone(&self.view.load(pin).layer))
    }

    /// The device of a snapshot that has begun.
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
        // What was guaranteed to it can be given to others at once.
        self.limits.set_least(0);
        layer.reckon(&self.pages.layers);
        let parent = std::mem::replace(&mut self.parent, Parent::Nothing);
        retire::device(&self.pages, self.chain.get(), number, parent);
    }
}

/// The first multiple of `unit`, a power of two, above `at`.
fn next_multiple(at: u64, unit: u64) -> u64 {
    (at | (unit - 1)) + 1
}

/// The part of the page at `at` that a range of `len` bytes covers: slot, first byte in the page,
/// bytes.
#[inline]
fn piece(at: u64, len: u64) -> (u64, usize, usize) {
    let from = at % PAGE;
    (at / PAGE, from as usize, (PAGE - from).min(len) as usize)
}
