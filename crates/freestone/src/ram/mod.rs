//! The compressed RAM disk: zram's semantics in user space.
//!
//! A slot table, an object pool, and one compression stream a CPU. Pages that repeat a pattern of up to 64 bits store
//! only that; pages that do not compress are stored as they are; everything else is compressed. Requests
//! meet only in a page's own lock; beside it they use what belongs to their CPU (a stream, a current span), and a write
//! takes a lock of the pool when that grows, shrinks or reaches its limit.
//!
//! Where it differs from zram on purpose:
//! * Logical blocks are 512 bytes; a part of a page is patched under the page's lock (zram: 4096, no lock).
//! * A write that the memory limit refuses is [`Error::NoSpace`](crate::device::Error::NoSpace) (zram: an I/O error).
//! * [`reset`](Ram::reset) wipes content and statistics and keeps size, algorithm and limit (zram forgets them), and it needs
//!   no exclusive claim: who reads meanwhile sees the old or the new, empty content.
//! * The disk can grow while it is used.
//! * Pages are spilled to a backing device by themselves, packed; see [`Config::backing`].
//! * `invalid_io` counts, as in kernels up to 6.1; newer ones print 0.
//!
//! Lock order: `resetting` or `growing` or `passes`, then a slot; under a slot a compression stream or the pool's locks,
//! one after the other. Requests take none of the first three.

mod candidates;
mod config;
mod dictionary;
mod fetch;
mod keeper;
#[cfg(test)]
mod model_tests;
mod pages;
mod pass;
mod reclaim;
mod recompress;
mod stats;
#[cfg(test)]
mod tests;
mod writeback;

use std::sync::Arc;

use self::config::round_size;
pub use self::config::{BackingDev, Config, Secondary, SetupError};
pub use self::dictionary::AutoRecompressed;
use self::fetch::{Job, Readers, Waiter};
use self::keeper::Keeper;
use self::pages::{Part, Waits};
pub use self::recompress::{Recompress, RecompressError, RecompressKind, Recompressed};
use self::stats::counter;
pub use self::stats::{IoStat, Memory, MmStat};
pub use self::writeback::{BackingStat, BdStat, Idle, Writeback, WritebackError, Written};
use crate::PAGE_BYTES;
use crate::age::Ages;
use crate::clock::{self, Ticks};
use crate::codec::{Codecs, Page, Streams};
use crate::device::{
    self, Buffer, Completion, Device, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Tried,
};
use crate::percpu::Counters;
use crate::pin::{self, Swap};
use crate::pool::{self, BackRef, Pool};
use crate::slot::{Common, Flights, Kind, LEAF_SLOTS, MAX_SLOTS, SlotGuard, Table, Word};
use crate::spill::store::Store;
use crate::sync::{AtomicU64, Mutex, Ordering};

/// Smallest request: a part of a page.
const LOGICAL_BLOCK_BYTES: u32 = 512;
/// Pages that one `try_io` reads, to keep its work bounded: about a millisecond. (For writes the algorithm says.)
const TRY_READ_PAGES: u64 = 256;
/// Leaves (of 512 pages) that one `try_io` frees: about a millisecond where every page has an object.
const TRY_FREE_LEAVES: u32 = 2;
/// Leaves that one call of `extents` describes.
const TRY_EXTENT_LEAVES: u32 = 64;
const PAGE: u64 = PAGE_BYTES as u64;
/// Priority of the automatic recompression.
const AUTO_PRIORITY: usize = 3;

/// Largest disk in bytes: 256 TiB.
pub const DISKSIZE_BYTES_MAX: u64 = MAX_SLOTS * PAGE;
const _: () = assert!(DISKSIZE_BYTES_MAX == 256 << 40, "SetupError::TooLarge says 256 TiB");

/// A compressed RAM disk. Clones are handles to one disk.
#[derive(Clone)]
pub struct Ram(Arc<Inner>);

struct Inner {
    table: Swap<Table>,
    size: AtomicU64,
    common: Arc<Common>,
    flights: Flights<Waiter>,
    pool: Pool,
    codecs: Codecs,
    ages: Ages,
    /// The backing device.
    store: Option<Arc<Store>>,
    keeper: Arc<Keeper>,
    readers: Readers,
    auto: dictionary::Auto,
    counters: Counters<{ counter::COUNT }>,
    mem_limit: AtomicU64,
    config: Config,
    /// Held by whoever takes pages out of memory or recompresses them, for the whole of that.
    passes: Mutex<()>,
    /// The block at which the next step of reclaiming holes begins.
    reclaim_cursor: Mutex<u64>,
    /// How many rounds of spilling failed in a row, and when the last one did.
    spill_failures: Mutex<(u32, u64)>,
    /// What keeps pages from being spilled, as it was logged last.
    spill_error: Mutex<Option<WritebackError>>,
    /// Taken by growth, and to change the memory limit.
    growing: Mutex<()>,
    /// The id of the next table. Held for the whole of a reset.
    resetting: Mutex<u32>,
}

// ---- making and changing a disk ----------------------------------------------------------------------------------

impl Ram {
    /// An empty disk. Costs almost nothing before it is written.
    ///
    /// # Errors
    /// The size, the parameters, the backing device, or no memory.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        round_size(config.disksize)?;
        let backing = match &config.backing {
            None => None,
            Some(backing) => {
                let device: Arc<dyn Device> = Arc::new(backing.open()?);
                Some((device, backing.compressed_writeback))
            }
        };
        Self::with(config, backing)
    }

    /// An empty disk whose pages are spilled to any device; `config.backing` is not looked at.
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
        let inner = Inner::new(config, backing)?;
        if inner.store.is_some() || inner.config.auto_recompress.is_some() {
            let keeper = Arc::clone(&inner.keeper);
            inner.pool.on_alarm(Box::new(move || keeper.kick()));
            inner.keeper.start(&inner).map_err(SetupError::Thread)?;
        }
        let ticks: Arc<dyn Ticks> = Arc::clone(&inner) as _;
        clock::listen(Arc::downgrade(&ticks)).map_err(SetupError::Thread)?;
        let ram = Self(inner);
        ram.set_mem_limit(mem_limit);
        Ok(ram)
    }

    /// The disk's settings as they are now.
    pub fn config(&self) -> Config {
        Config { disksize: self.0.size(), mem_limit: self.0.mem_limit(), ..self.0.config.clone() }
    }

    /// Bounds the pool to `bytes`, rounded up to a page; 0 lifts the bound. Below the present use nothing is evicted, but
    /// writes that need memory fail until enough is freed; with a backing device pages are spilled and writes wait.
    pub fn set_mem_limit(&self, bytes: u64) {
        // Two at one time would leave the pool with the one's limit and the keeper with the other's.
        let _one = self.0.growing.lock();
        let pages = bytes.div_ceil(PAGE);
        // Relaxed: shown only; the pool has its own copy.
        self.0.mem_limit.store(pages.saturating_mul(PAGE), Ordering::Relaxed);
        self.0.pool.set_limit_pages(if pages == 0 { u64::MAX } else { pages });
        self.0.pool.set_alarm_pages(self.0.marks().map_or(u64::MAX, |(high, _)| high));
        self.0.keeper.kick();
    }

    /// Sets `mem_used_max` to the present use.
    pub fn reset_mem_used_max(&self) {
        self.0.pool.reset_pages_max();
    }

    /// Grows the disk to `disksize` bytes, rounded up to a page; what is new reads as zeroes.
    ///
    /// # Errors
    /// Smaller than now, or too large.
    pub fn grow(&self, disksize: u64) -> Result<(), SetupError> {
        let wanted = round_size(disksize)?;
        let _one = self.0.growing.lock();
        let present = self.0.size();
        if wanted < present {
            return Err(SetupError::Shrinks { wanted, present });
        }
        // Release: pairs with the Acquire in `size`.
        self.0.size.store(wanted, Ordering::Release);
        Ok(())
    }

    /// Wipes content and statistics. Requests in flight finish on the old content.
    pub fn reset(&self) {
        let mut next_table = self.0.resetting.lock();
        let id = *next_table;
        // After 2^28 resets the ids begin again: by then the first table is long gone.
        *next_table = (id + 1) % pool::backrefs::MAX_TABLE_ID;
        let empty = Box::new(Table::new(id, Arc::clone(&self.0.common)));
        let mut old = self.0.table.replace(empty, pin::domain());
        let mut forgotten = Vec::new();
        old.drain(|_, word| {
            self.0.account(word, Word::EMPTY);
            match word.kind() {
                Kind::InFlight => forgotten.extend(self.0.flights.forget(word.location())),
                _ => self.0.release(word),
            }
        });
        drop(old);
        if let Some(store) = &self.0.store {
            store.clear_counts();
        }
        self.0.clear_auto_recompressed();
        self.0.keeper.memory_freed();
        self.0.pool.release_empties();
        self.0.pool.reset_pages_max();
        for counter in [
            counter::HUGE_PAGES_SINCE,
            counter::FAILED_READS,
            counter::FAILED_WRITES,
            counter::INVALID_IO,
            counter::NOTIFY_FREE,
            counter::PAGES_COMPACTED,
        ] {
            self.0.counters.clear(counter);
        }
        // Completions run with nothing held.
        drop(next_table);
        for landed in forgotten {
            self.0.answer_forgotten(landed);
        }
    }

    /// Packs the pool, under traffic, and returns how many pages went back to the system. A second caller gets 0. Packed
    /// objects on a backing device are moved together as well; [`backing`](Self::backing) shows what that frees.
    pub fn compact(&self) -> u64 {
        let pages = self.0.compact();
        // Not while a pass waits for the device.
        if let Some(_one) = self.0.passes.try_lock() {
            self.0.reclaim_all();
        }
        pages
    }

    // ---- statistics ------------------------------------------------------------------------------------------------

    /// The kernel's `mm_stat`.
    pub fn mm_stat(&self) -> MmStat {
        self.0.mm_stat()
    }

    /// The kernel's `io_stat`.
    pub fn io_stat(&self) -> IoStat {
        self.0.io_stat()
    }

    /// What the disk takes beside the pool.
    pub fn memory(&self) -> Memory {
        self.0.memory()
    }
}

// ---- the request path --------------------------------------------------------------------------------------------

impl Device for Ram {
    fn geometry(&self) -> Geometry {
        self.0.geometry()
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<Tried> {
        self.0.try_io(request, buffer)
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.go(Job::new(request, buffer, done));
    }

    fn prefetch(&self, offset: u64, len: u64) {
        self.read_ahead(offset, len);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
        match offset.checked_add(len) {
            Some(end) if len > 0 && end <= self.0.size() => Ok(self.0.extents(offset, end, row)),
            _ => Err(device::Error::OutOfRange),
        }
    }
}

impl Inner {
    /// A disk of which nobody knows yet: no thread works for it.
    fn new(config: Config, backing: Option<(Arc<dyn Device>, bool)>) -> Result<Arc<Self>, SetupError> {
        let disksize = round_size(config.disksize)?;
        let codecs = Codecs::new(Streams::shared(config.comp_algorithm, &config.algorithm_params)?);
        for (priority, secondary) in (1..).zip(&config.recomp_algorithms) {
            if let Some(Secondary { algorithm, params }) = secondary {
                if priority == AUTO_PRIORITY && config.auto_recompress.is_some() {
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
        let common = Arc::new(Common::new()?);
        Ok(Arc::new(Self {
            table: Swap::new(Box::new(Table::new(0, Arc::clone(&common)))),
            size: AtomicU64::new(disksize),
            common,
            flights: Flights::default(),
            pool: Pool::new()?,
            codecs,
            ages: Ages::default(),
            store,
            keeper: Arc::default(),
            readers: Readers::default(),
            auto: dictionary::Auto::default(),
            counters: Counters::default(),
            mem_limit: AtomicU64::new(0),
            config,
            passes: Mutex::default(),
            reclaim_cursor: Mutex::default(),
            spill_failures: Mutex::default(),
            spill_error: Mutex::default(),
            growing: Mutex::default(),
            resetting: Mutex::new(1),
        }))
    }

    fn size(&self) -> u64 {
        // Acquire: pairs with the Release in `grow`.
        self.size.load(Ordering::Acquire)
    }

    fn mem_limit(&self) -> u64 {
        // Relaxed: shown only.
        self.mem_limit.load(Ordering::Relaxed)
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size(),
            logical_block: LOGICAL_BLOCK_BYTES,
            physical_block: PAGE_BYTES as u32,
            io_min: PAGE_BYTES as u32,
            io_opt: PAGE_BYTES as u32,
            discard_granularity: PAGE_BYTES as u32,
            fast_zeroes: true,
            volatile_cache: false,
            volatile_media: true,
            read_only: false,
            zones: None,
        }
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> device::Result<Tried> {
        if let Err(error) = request.check_place(self.size(), LOGICAL_BLOCK_BYTES) {
            self.counters.add(counter::INVALID_IO, 1);
            return Err(error);
        }
        let (offset, end) = (request.offset, request.offset + request.len);
        pin::pinned(|pin| {
            let table = self.table.load(pin);
            match (request.op, buffer) {
                (Op::Read, Buffer::Read(into)) if into.len() as u64 == request.len => {
                    self.read(table, offset, into)
                }
                (Op::Write, Buffer::Write(data)) if data.len() as u64 == request.len => {
                    self.write(table, offset, data)
                }
                (Op::Discard, _) => self.free(table, offset, end, false),
                (Op::WriteZeroes, _) => self.free(table, offset, end, true),
                (Op::Flush, _) => Ok(Tried::Done),
                (Op::Read | Op::Write, _) => Err(device::Error::Misaligned),
            }
        })
    }

    #[expect(clippy::inline_always, reason = "a hit in memory is one function")]
    #[inline(always)]
    fn read(&self, table: &Table, offset: u64, into: &mut [u8]) -> device::Result<Tried> {
        let len = into.len() as u64;
        let target = len.min(TRY_READ_PAGES * PAGE);
        let mut done = 0;
        while done < target {
            let leaf_end = next_multiple(offset + done, LEAF_SLOTS * PAGE) - offset;
            let stop = leaf_end.min(target);
            match table.leaf((offset + done) / PAGE) {
                None => into[done as usize..stop as usize].fill(0),
                Some(leaf) => {
                    while done < stop {
                        let (slot, from, n) = piece(offset + done, stop - done);
                        match self.read_page(leaf, slot, from, &mut into[done as usize..][..n]) {
                            Ok(result) => result?,
                            Err(Waits) => return Ok(progress(done, len)),
                        }
                        done += n as u64;
                    }
                }
            }
            done = stop;
        }
        Ok(progress(done, len))
    }

    fn write(&self, table: &Table, offset: u64, data: &[u8]) -> device::Result<Tried> {
        let len = data.len() as u64;
        let target = len.min(self.codecs.primary().pages_per_millisecond() * PAGE);
        let mut done = 0;
        while done < target {
            let (slot, from, n) = piece(offset + done, target - done);
            let leaf =
                table.leaf_or_new(slot).inspect_err(|_| self.counters.add(counter::FAILED_WRITES, 1))?;
            let data = &data[done as usize..][..n];
            let written = match <&Page>::try_from(data) {
                Ok(page) => self.write_page(table, leaf, slot, page),
                Err(_) => self.patch_page(table, leaf, slot, from, Part::Data(data)),
            };
            match written {
                Ok(result) => result?,
                Err(Waits) => return Ok(progress(done, len)),
            }
            done += n as u64;
        }
        Ok(progress(done, len))
    }

    /// Empties the whole pages of a range. The parts of pages at its ends are zeroed where the range must be `exact`
    /// (write zeroes) and skipped where it is a hint (discard), as in the kernel.
    fn free(&self, table: &Table, offset: u64, end: u64, exact: bool) -> device::Result<Tried> {
        let len = end - offset;
        let mut at = offset;
        let mut leaves = 0;
        while at < end {
            let slot = at / PAGE;
            let page_end = next_multiple(at, PAGE);
            if !at.is_multiple_of(PAGE) || page_end > end {
                let stop = page_end.min(end);
                if exact && self.zero_part(table, at, stop)?.is_err() {
                    return Ok(progress(at - offset, len));
                }
                at = stop;
                continue;
            }
            let last = end / PAGE;
            let Some(present) = table.next_present(slot, last) else {
                at = last * PAGE;
                continue;
            };
            at = present * PAGE;
            if leaves == TRY_FREE_LEAVES {
                break;
            }
            leaves += 1;
            let Some(leaf) = table.leaf(present) else { continue };
            let stop = next_multiple(present, LEAF_SLOTS).min(last);
            for slot in present..stop {
                if self.free_page(leaf, slot).is_err() {
                    return Ok(progress(slot * PAGE - offset, len));
                }
            }
            at = stop * PAGE;
        }
        Ok(progress(at - offset, len))
    }

    /// Zeroes a part of one page, if it holds anything.
    fn zero_part(&self, table: &Table, from: u64, to: u64) -> device::Result<Result<(), Waits>> {
        let slot = from / PAGE;
        match table.leaf(slot) {
            Some(leaf) if leaf.peek(slot) != Word::EMPTY => {
                let zeroes = Part::Zeroes((to - from) as usize);
                match self.patch_page(table, leaf, slot, (from % PAGE) as usize, zeroes) {
                    Ok(result) => result.map(Ok),
                    Err(waits) => Ok(Err(waits)),
                }
            }
            _ => Ok(Ok(())),
        }
    }

    fn extents(&self, offset: u64, end: u64, row: &mut dyn FnMut(Extent) -> bool) -> u64 {
        let mut run: Option<Extent> = None;
        let mut given = offset;
        // Adds a piece to the run, or hands out the run and begins another. False: enough.
        let mut add = |at: u64, to: u64, kind: ExtentKind| match &mut run {
            Some(run) if run.kind == kind => {
                run.len = to - run.offset;
                true
            }
            _ => {
                let finished = run.replace(Extent { offset: at, len: to - at, kind });
                finished.is_none_or(|run| {
                    given = run.offset + run.len;
                    row(run)
                })
            }
        };
        let enough = pin::pinned(|pin| {
            let table = self.table.load(pin);
            let mut at = offset;
            for _ in 0..TRY_EXTENT_LEAVES {
                let slot = at / PAGE;
                let last = end.div_ceil(PAGE);
                let present = table.next_present(slot, last).unwrap_or(last);
                if present > slot {
                    let to = (present * PAGE).min(end);
                    if !add(at, to, ExtentKind::Hole) {
                        return true;
                    }
                    at = to;
                }
                if at >= end {
                    break;
                }
                let Some(leaf) = table.leaf(present) else { break };
                for slot in present..next_multiple(present, LEAF_SLOTS).min(last) {
                    let to = ((slot + 1) * PAGE).min(end);
                    if !add(at, to, kind_of(leaf.peek(slot))) {
                        return true;
                    }
                    at = to;
                }
            }
            false
        });
        if let (false, Some(run)) = (enough, run) {
            given = run.offset + run.len;
            row(run);
        }
        given - offset
    }
}

impl Ticks for Inner {
    fn tick(&self) {
        self.tick_ages();
        // What others freed meanwhile; what is late is answered by the runner, as this thread is everybody's.
        self.keeper.memory_freed();
        self.hand_over_late_flights();
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

impl pool::Owners for Inner {
    fn with_slot(&self, owner: BackRef, work: &mut dyn FnMut(SlotGuard<'_>)) {
        pin::pinned(|pin| {
            let table = self.table.load(pin);
            if table.id() == owner.table()
                && let Some(leaf) = table.leaf(owner.slot())
            {
                work(leaf.lock(owner.slot()));
            }
        });
    }
}

fn kind_of(word: Word) -> ExtentKind {
    match word.kind() {
        Kind::Empty => ExtentKind::Hole,
        Kind::Same if word.location() == 0 => ExtentKind::Zero,
        _ => ExtentKind::Data,
    }
}

/// How far a request of `len` bytes came that stopped after `done`.
fn progress(done: u64, len: u64) -> Tried {
    match done {
        0 => Tried::WouldBlock,
        _ if done < len => Tried::Partly(done),
        _ => Tried::Done,
    }
}

/// The first multiple of `unit`, a power of two, above `at`.
fn next_multiple(at: u64, unit: u64) -> u64 {
    (at | (unit - 1)) + 1
}

/// The part of the page at `at` that a range of `len` bytes covers: slot, first byte in the page, bytes.
#[inline]
fn piece(at: u64, len: u64) -> (u64, usize, usize) {
    let from = at % PAGE;
    (at / PAGE, from as usize, (PAGE - from).min(len) as usize)
}
