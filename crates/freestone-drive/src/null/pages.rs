//! Pages of a [`Memory`](super::Memory) drive: their location and copying.
//!
//! The slots are those of the RAM disk. Each leaf of the table has one unit of 2 MiB of address
//! space, allocated at its first write. So adjacent pages of the device are adjacent in memory, and
//! a request copies a few long runs. (Copying page by page takes a third longer.) Memory is
//! allocated per page at its first write.
//!
//! Lock order: slots of the table in ascending order, at most [`RUN_PAGES`] of them; then a slot of
//! `units`, or `stale`; then the arena.
#![expect(unsafe_code)]
// UNSAFETY: copies from and to the memory of an arena, which slot locks guard.

use std::collections::VecDeque;

use super::SetupError;
use freestone_core::PAGE_BYTES;
use freestone_core::arena::Arena;
use freestone_core::device::Result;
use freestone_core::percpu::Counters;
use freestone_core::slot::{Common, Kind, LEAF_SLOTS, LOCATION_BITS, Leaf, SlotGuard, Table, Word};
use freestone_core::sync::{Arc, Mutex};

pub const PAGE: u64 = PAGE_BYTES as u64;
/// Address space of a leaf's pages in bytes.
const UNIT_BYTES: u64 = LEAF_SLOTS * PAGE;
/// Unit of a slot's location in bytes.
const LOCATION_UNIT_BYTES: u64 = 16;
/// Maximum number of pages locked at once, to copy or release them in one step. A waiter for one of
/// them waits about 20 us.
const RUN_PAGES: usize = 32;
/// Memory without data that is retained for later writes, in addition to an eighth of the data. A
/// new page from the system takes several times as long as a copy.
const RETAINED_BYTES_MAX: u64 = 16 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Page {
    /// Reads as zeroes. The page's memory is a hole or zeroed.
    None,
    /// Reads as zeroes. The memory at this offset is retained and holds old data.
    Retained(u64),
    /// Data at this offset.
    Data(u64),
}

impl Page {
    #[inline]
    fn of(word: Word) -> Self {
        let at = word.location() * LOCATION_UNIT_BYTES;
        match word.kind() {
            Kind::Huge => Self::Data(at),
            Kind::Pattern => Self::Retained(at),
            _ => Self::None,
        }
    }

    #[inline]
    fn word(self) -> Word {
        match self {
            Self::None => Word::EMPTY,
            Self::Retained(at) => Word::pattern(at / LOCATION_UNIT_BYTES),
            Self::Data(at) => Word::huge(at / LOCATION_UNIT_BYTES),
        }
    }

    #[inline]
    fn is_data(self) -> bool {
        matches!(self, Self::Data(_))
    }
}

const DATA: usize = 0;
const RETAINED: usize = 1;

/// Pages of a memory-backed device. Only discards release memory; a reset replaces the whole
/// object.
pub struct Pages {
    table: Table,
    /// Unit of each leaf, as a location. The idle mark means that the leaf is in `stale`. Units
    /// never move.
    units: Table,
    arena: Arena,
    common: Arc<Common>,
    counters: Counters<2>,
    /// Leaves with retained pages, oldest discards first.
    stale: Mutex<VecDeque<u64>>,
}

/// Locked slots of adjacent pages, unlocked in the order of locking.
type LockedPages<'l, 'a> = &'l mut [Option<SlotGuard<'a>>];

/// Locks `count` slots of one leaf and passes them to `work`.
#[inline]
fn with_locked<'a, R>(
    leaf: Leaf<'a>,
    first: u64,
    count: usize,
    work: impl FnOnce(LockedPages<'_, 'a>) -> R,
) -> R {
    if count == 1 {
        return work(&mut [Some(leaf.lock(first))]);
    }
    let mut guards = [const { None }; RUN_PAGES];
    for (slot, guard) in (first..).zip(&mut guards[..count]) {
        *guard = Some(leaf.lock(slot));
    }
    work(&mut guards[..count])
}

impl Pages {
    pub fn new() -> std::result::Result<Self, SetupError> {
        let common = Arc::new(Common::new().map_err(SetupError::MemoryFile)?);
        let table = |id| Table::new(id, Arc::clone(&common)).map_err(|_| SetupError::NoMemory);
        Ok(Self {
            table: table(0)?,
            units: table(1)?,
            arena: Arena::new("freestone-null", UNIT_BYTES).map_err(SetupError::MemoryFile)?,
            common,
            counters: Counters::default(),
            stale: Mutex::default(),
        })
    }

    /// Returns the offset of the memory of `slot`, allocating its unit if necessary.
    fn memory_of(&self, slot: u64) -> Result<u64> {
        let number = slot / LEAF_SLOTS;
        let guard = self.units.leaf_or_new(number)?.lock(number);
        let unit = if let Page::Data(at) = Page::of(guard.word()) {
            at
        } else {
            let at = u64::from(self.arena.alloc()?) * UNIT_BYTES;
            guard.publish(Page::Data(at).word());
            at
        };
        Ok(unit + slot % LEAF_SLOTS * PAGE)
    }

    /// Returns true if nothing was ever written.
    pub fn is_untouched(&self) -> bool {
        self.arena.handed_out() == 0
    }

    // ---- requests -------------------------------------------------------------------------------

    /// Fills `into` from byte `offset` on.
    pub fn read(&self, offset: u64, into: &mut [u8]) {
        let mut done = 0;
        while done < into.len() {
            let at = offset + done as u64;
            let slot = at / PAGE;
            let left = &mut into[done..];
            done += if let Some(leaf) = self.table.leaf(slot) {
                self.read_run(leaf, at, left)
            } else {
                let bytes = left.len().min((Self::leaf_end(at) - at) as usize);
                left[..bytes].fill(0);
                bytes
            };
        }
    }

    /// Reads a run of pages of one kind. Returns its length.
    #[inline]
    fn read_run(&self, leaf: Leaf<'_>, at: u64, into: &mut [u8]) -> usize {
        let (slot, count, bytes) = run(at, into.len());
        // A page seen as empty needs no lock: a write to it has not completed yet.
        let is_data = |slot| Page::of(leaf.peek(slot)).is_data();
        let data = is_data(slot);
        let same = (1..count).take_while(|&n| is_data(slot + n as u64) == data).count() + 1;
        let bytes = bytes.min((slot + same as u64).wrapping_mul(PAGE).wrapping_sub(at) as usize);
        let into = &mut into[..bytes];
        if !data {
            into.fill(0);
            return bytes;
        }
        with_locked(leaf, slot, same, |guards| {
            let pages = guards.iter().flatten().map(|guard| Page::of(guard.word()));
            match Page::of(first_word(guards)) {
                Page::Data(offset) if pages.clone().all(Page::is_data) => {
                    // SAFETY: `guards` hold the locks of all these pages.
                    unsafe { self.copy_out(offset + at % PAGE, into) };
                }
                // Some pages were discarded meanwhile.
                _ => {
                    for (n, page) in pages.enumerate() {
                        let (part, within) = part_of(at, bytes, n);
                        match page {
                            // SAFETY: a part of one page, whose lock is held.
                            Page::Data(offset) => unsafe { self.copy_out(offset + within, &mut into[part]) },
                            _ => into[part].fill(0),
                        }
                    }
                }
            }
        });
        bytes
    }

    /// Stores `data` at byte `offset`.
    ///
    /// # Errors
    /// Out of memory. Every page is either written or unchanged.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let (slot, count, bytes) = run(at, data.len() - done);
            let leaf = self.table.leaf_or_new(slot)?;
            if (0..count).any(|n| Page::of(leaf.peek(slot + n as u64)) == Page::None) {
                // Populates the pages in one call, and turns a lack of memory into an error instead
                // of a signal. Existing pages stay.
                self.arena.populate(self.memory_of(slot)?, count as u64 * PAGE)?;
            }
            self.write_run(leaf, slot, count, at, &data[done..done + bytes])?;
            done += bytes;
        }
        Ok(())
    }

    #[inline]
    fn write_run(&self, leaf: Leaf<'_>, slot: u64, count: usize, at: u64, data: &[u8]) -> Result<()> {
        with_locked(leaf, slot, count, |guards| {
            let start = match Page::of(first_word(guards)) {
                Page::Data(offset) | Page::Retained(offset) => offset,
                Page::None => self.memory_of(slot)?,
            };
            // The request covers its first and last page partly; the rest must read as zeroes.
            for n in [0, count - 1] {
                if let Some(Page::Retained(offset)) = guards[n].as_ref().map(|guard| Page::of(guard.word())) {
                    let (part, within) = part_of(at, data.len(), n);
                    let behind = within + part.len() as u64;
                    // SAFETY: parts of one page, whose lock is held.
                    unsafe {
                        self.zero(offset, within);
                        self.zero(offset + behind, PAGE - behind);
                    }
                }
            }
            // SAFETY: `guards` hold the locks of all these pages, which lie in one unit.
            unsafe { self.copy_in(start + at % PAGE, data) };
            let (mut new, mut reused) = (0, 0);
            for (n, guard) in guards.iter_mut().enumerate() {
                let Some(guard) = guard.take() else { continue };
                match Page::of(guard.word()) {
                    Page::Data(_) => continue,
                    Page::Retained(_) => reused += 1,
                    Page::None => {}
                }
                new += 1;
                guard.publish(Page::Data(start + n as u64 * PAGE).word());
            }
            if new > 0 {
                self.counters.add(DATA, new);
                self.counters.add(RETAINED, -reused);
            }
            Ok(())
        })
    }

    /// Zeroes `[offset, end)` from its start, for at most `leaves_max` leaves. Returns the end of
    /// the cleared part. Pages that are zero afterwards become retained pages, whose memory can be
    /// released.
    pub fn clear(&self, offset: u64, end: u64, leaves_max: u32) -> u64 {
        let mut at = offset;
        for _ in 0..leaves_max {
            let Some(present) = self.table.next_present(at / PAGE, end.div_ceil(PAGE)) else { return end };
            at = at.max(present * PAGE);
            let leaf_end = end.min(Self::leaf_end(at));
            if let Some(leaf) = self.table.leaf(present) {
                self.clear_in(leaf, at, leaf_end);
            }
            at = leaf_end;
            if at == end {
                break;
            }
        }
        at
    }

    fn clear_in(&self, leaf: Leaf<'_>, from: u64, to: u64) {
        let mut freed = 0;
        let mut at = from;
        while at < to {
            let slot = at / PAGE;
            let stop = to.min((slot + 1) * PAGE);
            if Page::of(leaf.peek(slot)).is_data() {
                let guard = leaf.lock(slot);
                if let Page::Data(offset) = Page::of(guard.word()) {
                    let whole = stop - at == PAGE;
                    if !whole {
                        // SAFETY: a part of one page, whose lock is held.
                        unsafe { self.zero(offset + at % PAGE, stop - at) };
                    }
                    // SAFETY: the page's lock is held.
                    if whole || unsafe { self.is_zero(offset) } {
                        guard.publish(Page::Retained(offset).word());
                        freed += 1;
                    }
                }
            }
            at = stop;
        }
        if freed > 0 {
            self.counters.add(RETAINED, freed);
            self.counters.add(DATA, -freed);
            self.queue_stale(from / PAGE / LEAF_SLOTS);
        }
    }

    /// Returns true if the page with byte `at` of the device holds data.
    pub fn has_data(&self, at: u64) -> bool {
        let slot = at / PAGE;
        self.table.leaf(slot).is_some_and(|leaf| Page::of(leaf.peek(slot)).is_data())
    }

    /// Returns the first byte at or after `at` with a leaf, or `end` if there is none before it.
    pub fn next_leaf(&self, at: u64, end: u64) -> u64 {
        let present = self.table.next_present(at / PAGE, end.div_ceil(PAGE));
        present.map_or(end, |slot| at.max(slot * PAGE))
    }

    /// Returns the end of the 2 MiB region with byte `at`.
    pub fn leaf_end(at: u64) -> u64 {
        (at / UNIT_BYTES + 1) * UNIT_BYTES
    }

    // ---- releasing memory -----------------------------------------------------------------------

    /// Returns the memory used in bytes, tables included.
    pub fn used_bytes(&self) -> u64 {
        (self.counters.get(DATA) + self.counters.get(RETAINED)) * PAGE + self.common.nodes.bytes()
    }

    /// Queues a leaf with retained pages.
    fn queue_stale(&self, number: u64) {
        let Some(unit) = self.units.leaf(number) else { return };
        if unit.peek(number).is_idle() {
            return;
        }
        let guard = unit.lock(number);
        let word = guard.word();
        if !word.is_idle() {
            guard.publish(word.with_idle(true));
            self.stale.lock().push_back(number);
        }
    }

    /// Releases the retained pages of up to `leaves` leaves to the system, if too many are
    /// retained.
    pub fn release_retained(&self, leaves: u32) {
        for _ in 0..leaves {
            if self.counters.get(RETAINED) * PAGE <= RETAINED_BYTES_MAX + self.counters.get(DATA) * PAGE / 8 {
                return;
            }
            let Some(number) = self.stale.lock().pop_front() else { return };
            if let Some(unit) = self.units.leaf(number) {
                let guard = unit.lock(number);
                let word = guard.word();
                guard.publish(word.with_idle(false));
            }
            if let Some(leaf) = self.table.leaf(number * LEAF_SLOTS) {
                self.release_leaf(leaf, number * LEAF_SLOTS);
            }
        }
    }

    fn release_leaf(&self, leaf: Leaf<'_>, first: u64) {
        let is_retained = |slot: u64| matches!(Page::of(leaf.peek(slot)), Page::Retained(_));
        let end = first + LEAF_SLOTS;
        let mut slot = first;
        while slot < end {
            let most = (end - slot).min(RUN_PAGES as u64);
            let count = (slot..slot + most).take_while(|&slot| is_retained(slot)).count();
            if count == 0 {
                slot += 1;
                continue;
            }
            with_locked(leaf, slot, count, |guards| self.punch(guards));
            slot += count as u64;
        }
    }

    /// Releases those of the locked pages that are still retained.
    fn punch(&self, guards: LockedPages<'_, '_>) {
        let offset = |guard: &Option<SlotGuard<'_>>| match guard.as_ref().map(|guard| Page::of(guard.word()))
        {
            Some(Page::Retained(offset)) => Some(offset),
            _ => None,
        };
        let mut released = 0;
        // Pages that hold data again separate the runs.
        for run in guards.chunk_by_mut(|a, b| offset(a).is_some() && offset(b).is_some()) {
            let Some(start) = offset(&run[0]) else { continue };
            // SAFETY: the run's locks are held, so no other thread accesses its pages, which lie in
            // one unit of this arena.
            unsafe { self.arena.release(start, run.len() as u64 * PAGE) };
            for guard in run.iter_mut().filter_map(Option::take) {
                guard.publish(Page::None.word());
                released += 1;
            }
        }
        self.counters.add(RETAINED, -released);
    }

    // ---- bytes ----------------------------------------------------------------------------------

    /// # Safety
    /// The bytes belong to pages of one unit, whose locks the caller holds.
    #[inline]
    unsafe fn copy_out(&self, from: u64, into: &mut [u8]) {
        let from = self.arena.at(from).as_ptr();
        // SAFETY: mapped; the locks prevent changes meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// # Safety
    /// As [`copy_out`](Self::copy_out).
    #[inline]
    unsafe fn copy_in(&self, to: u64, data: &[u8]) {
        let to = self.arena.at(to).as_ptr();
        // SAFETY: mapped; the locks prevent accesses meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
    }

    /// # Safety
    /// As [`copy_out`](Self::copy_out).
    unsafe fn zero(&self, from: u64, bytes: u64) {
        if bytes == 0 {
            // An empty range may start at the end of the arena.
            return;
        }
        // SAFETY: as in copy_in.
        unsafe { std::ptr::write_bytes(self.arena.at(from).as_ptr(), 0, bytes as usize) };
    }

    /// Returns true if a page holds only zeroes.
    ///
    /// # Safety
    /// The caller holds the page's lock.
    unsafe fn is_zero(&self, offset: u64) -> bool {
        // SAFETY: as in `copy_out`, for a whole page.
        let page = unsafe { std::slice::from_raw_parts(self.arena.at(offset).as_ptr(), PAGE_BYTES) };
        page.iter().all(|&byte| byte == 0)
    }
}

const _: () = assert!(UNIT_BYTES.is_power_of_two());
const _: () = assert!(LOCATION_UNIT_BYTES << LOCATION_BITS == 1 << 40, "Memory's documentation says 1 TiB");

/// Returns the run of pages at the start of `len` bytes at `at`, within one leaf: first slot,
/// number of slots, bytes.
#[inline]
fn run(at: u64, len: usize) -> (u64, usize, usize) {
    let slot = at / PAGE;
    let most = RUN_PAGES.min((LEAF_SLOTS - slot % LEAF_SLOTS) as usize);
    let bytes = len.min(most * PAGE_BYTES - (at % PAGE) as usize);
    let count = ((at % PAGE) as usize + bytes).div_ceil(PAGE_BYTES);
    (slot, count, bytes)
}

/// Returns the part of `len` bytes at `at` that lies in the `n`th page, and its start within that
/// page.
fn part_of(at: u64, len: usize, n: usize) -> (std::ops::Range<usize>, u64) {
    let head = (at % PAGE) as usize;
    let from = (n * PAGE_BYTES).saturating_sub(head);
    let to = ((n + 1) * PAGE_BYTES - head).min(len);
    (from..to, if n == 0 { at % PAGE } else { 0 })
}

#[inline]
fn first_word(guards: &[Option<SlotGuard<'_>>]) -> Word {
    guards.first().and_then(Option::as_ref).map_or(Word::EMPTY, SlotGuard::word)
}
