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
//! * `invalid_io` counts, as in kernels up to 6.1; newer ones print 0.
//!
//! Lock order: `resetting` or `growing`, then a slot; under a slot a compression stream or the pool's locks, one after
//! the other. Requests take neither of the first two.

#[cfg(test)]
mod model_tests;
mod pages;
mod stats;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use thiserror::Error;

use self::pages::{Part, Waits};
use self::stats::counter;
pub use self::stats::{IoStat, Memory, MmStat};
use crate::PAGE_BYTES;
use crate::codec::{Algorithm, Page, Params, ParamsError, Streams, StreamsError};
use crate::device::{
    self, Buffer, Completion, Device, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Tried,
};
use crate::percpu::Counters;
use crate::pin::{self, Swap};
use crate::pool::{self, BackRef, Pool};
use crate::slot::{Common, Flights, Kind, LEAF_SLOTS, MAX_SLOTS, SlotGuard, Table, Word};
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

/// Largest disk in bytes: 256 TiB.
pub const DISKSIZE_BYTES_MAX: u64 = MAX_SLOTS * PAGE;
const _: () = assert!(DISKSIZE_BYTES_MAX == 256 << 40, "SetupError::TooLarge says 256 TiB");

/// What a RAM disk is made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// Bytes, rounded up to a page.
    pub disksize: u64,
    /// The algorithm that new pages are compressed with.
    pub comp_algorithm: Algorithm,
    /// Its parameters.
    pub algorithm_params: Params,
    /// Most bytes the pool may hold, rounded up to a page; 0 is no limit.
    pub mem_limit: u64,
}

/// Why a RAM disk could not be made or changed.
#[derive(Debug, Error)]
pub enum SetupError {
    /// Zero.
    #[error("disksize must be at least one byte")]
    Empty,
    /// Beyond what a table of slots can address.
    #[error("disksize={0} bytes is beyond the largest disk, 256 TiB")]
    TooLarge(u64),
    /// Growth to less than there is.
    #[error("disksize={wanted} bytes would shrink the disk, which has {present}; it can only grow")]
    Shrinks {
        /// What was asked for.
        wanted: u64,
        /// What there is.
        present: u64,
    },
    /// The algorithm's parameters.
    #[error(transparent)]
    Params(#[from] ParamsError),
    /// No memory for tables or streams.
    #[error("out of memory")]
    NoMemory,
}

impl From<device::Error> for SetupError {
    fn from(_: device::Error) -> Self {
        Self::NoMemory
    }
}

impl From<StreamsError> for SetupError {
    fn from(error: StreamsError) -> Self {
        match error {
            StreamsError::Params(error) => Self::Params(error),
            StreamsError::Device(_) => Self::NoMemory,
        }
    }
}

/// A compressed RAM disk. Clones are handles to one disk.
#[derive(Clone)]
pub struct Ram(Arc<Inner>);

struct Inner {
    table: Swap<Table>,
    size: AtomicU64,
    common: Arc<Common>,
    flights: Flights,
    pool: Pool,
    streams: Arc<Streams>,
    counters: Counters<{ counter::COUNT }>,
    mem_limit: AtomicU64,
    config: Config,
    /// Taken by growth.
    growing: Mutex<()>,
    /// The id of the next table. Held for the whole of a reset.
    resetting: Mutex<u32>,
}

// ---- making and changing a disk ----------------------------------------------------------------------------------

impl Ram {
    /// An empty disk. Costs almost nothing before it is written.
    ///
    /// # Errors
    /// The size, the parameters, or no memory.
    pub fn new(config: Config) -> Result<Self, SetupError> {
        let disksize = round_size(config.disksize)?;
        let mem_limit = config.mem_limit;
        let streams = Streams::shared(config.comp_algorithm, &config.algorithm_params)?;
        let common = Arc::new(Common::new()?);
        let inner = Inner {
            table: Swap::new(Box::new(Table::new(0, Arc::clone(&common)))),
            size: AtomicU64::new(disksize),
            common,
            flights: Flights::default(),
            pool: Pool::new()?,
            streams,
            counters: Counters::default(),
            mem_limit: AtomicU64::new(0),
            config,
            growing: Mutex::default(),
            resetting: Mutex::new(1),
        };
        let ram = Self(Arc::new(inner));
        ram.set_mem_limit(mem_limit);
        Ok(ram)
    }

    /// The disk's settings as they are now.
    pub fn config(&self) -> Config {
        Config { disksize: self.0.size(), mem_limit: self.0.mem_limit(), ..self.0.config.clone() }
    }

    /// Bounds the pool to `bytes`, rounded up to a page; 0 lifts the bound. Below the present use nothing is evicted, but
    /// writes that need memory fail until enough is freed.
    pub fn set_mem_limit(&self, bytes: u64) {
        let pages = bytes.div_ceil(PAGE);
        // Relaxed: shown only; the pool has its own copy.
        self.0.mem_limit.store(pages.saturating_mul(PAGE), Ordering::Relaxed);
        self.0.pool.set_limit_pages(if pages == 0 { u64::MAX } else { pages });
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
        old.drain(|_, word| {
            self.0.release(word);
            self.0.account(word, Word::EMPTY);
        });
        drop(old);
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
    }

    /// Packs the pool, under traffic, and returns how many pages went back to the system. A second caller gets 0.
    pub fn compact(&self) -> u64 {
        let pages = self.0.pool.compact(&*self.0);
        self.0.counters.add(counter::PAGES_COMPACTED, pages as i64);
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

fn round_size(bytes: u64) -> Result<u64, SetupError> {
    match bytes.checked_next_multiple_of(PAGE) {
        _ if bytes == 0 => Err(SetupError::Empty),
        Some(rounded) if rounded <= DISKSIZE_BYTES_MAX => Ok(rounded),
        _ => Err(SetupError::TooLarge(bytes)),
    }
}

// ---- the request path --------------------------------------------------------------------------------------------

impl Device for Ram {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.0.size(),
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
        self.0.try_io(request, buffer, &self.geometry())
    }

    fn submit(&self, request: Request, buffer: IoBuf, done: Completion) {
        self.run(request, 0, buffer, done);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> device::Result<u64> {
        match offset.checked_add(len) {
            Some(end) if len > 0 && end <= self.0.size() => Ok(self.0.extents(offset, end, row)),
            _ => Err(device::Error::OutOfRange),
        }
    }
}

impl Ram {
    /// Goes on with a submitted request from byte `at` of its buffer until it is done or meets a page in flight; then it
    /// queues there.
    fn run(&self, mut request: Request, mut at: usize, mut buffer: IoBuf, mut done: Completion) {
        loop {
            let part = match request.op {
                Op::Read => buffer.get_mut(at..).map_or(Buffer::None, Buffer::Read),
                Op::Write => buffer.get(at..).map_or(Buffer::None, Buffer::Write),
                _ => Buffer::None,
            };
            match self.try_io(&request, part) {
                Ok(Tried::Done) => return done.complete(Ok(()), buffer),
                Ok(Tried::Partly(n)) => {
                    request = request.rest(n);
                    at += if buffer.is_empty() { 0 } else { n as usize };
                }
                Err(error) => return done.complete(Err(error), buffer),
                Ok(Tried::WouldBlock) => {
                    let mut job = Some((buffer, done));
                    self.0.queue(request.offset / PAGE, || {
                        let ram = self.clone();
                        job.take().map(|(buffer, done)| -> Box<dyn FnOnce() + Send> {
                            Box::new(move || ram.run(request, at, buffer, done))
                        })
                    });
                    match job {
                        None => return,
                        // It landed meanwhile.
                        Some(back) => (buffer, done) = back,
                    }
                }
            }
        }
    }
}

impl Inner {
    fn size(&self) -> u64 {
        // Acquire: pairs with the Release in `grow`.
        self.size.load(Ordering::Acquire)
    }

    fn mem_limit(&self) -> u64 {
        // Relaxed: shown only.
        self.mem_limit.load(Ordering::Relaxed)
    }

    fn try_io(&self, request: &Request, buffer: Buffer<'_>, geometry: &Geometry) -> device::Result<Tried> {
        if let Err(error) = request.check(geometry) {
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
        let target = len.min(self.streams.pages_per_millisecond() * PAGE);
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

    /// Queues what `job` makes on a slot in flight; does not call it where the slot has landed.
    fn queue(&self, slot: u64, job: impl FnOnce() -> Option<Box<dyn FnOnce() + Send>>) {
        pin::pinned(|pin| {
            let Some(leaf) = self.table.load(pin).leaf(slot) else { return };
            let guard = leaf.lock(slot);
            if guard.word().kind() == Kind::InFlight
                && let Some(job) = job()
            {
                self.flights.wait(&guard, job);
            }
        });
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
