//! Page table and memory of a [`Memory`](super::Memory) drive: locates, locks, copies and releases
//! pages.
//!
//! The table is that of the RAM disk, with one slot per page. Each leaf of the table owns a unit of
//! 2 MiB of address space, allocated at the first write to the leaf. So adjacent pages of the
//! device are adjacent in memory, and a request copies a few long runs. (Copying page by page takes
//! a third longer.) Memory is allocated per page at its first write.
//!
//! Lock order: slots of the page table in ascending order, at most [`RUN_PAGES`] of them; then a
//! slot of `units`, or `stale`; then the arena.
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
/// Size in bytes of a unit: the address space of all pages of a leaf.
const UNIT_BYTES: u64 = LEAF_SLOTS * PAGE;
/// Granularity in bytes of the memory location stored in a slot.
const LOCATION_UNIT_BYTES: u64 = 16;
/// Maximum number of pages locked at once, to copy or release them in one step. Another thread
/// waits about 20 us for one of these locks.
const RUN_PAGES: usize = 32;
/// Maximum memory of discarded pages retained for later writes, in bytes, in addition to an eighth
/// of the stored data. Retaining is worthwhile because the system takes several times as long to
/// allocate a page as a copy takes.
const RETAINED_BYTES_MAX: u64 = 16 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Page {
    /// The page reads as zeroes. The memory of the page is not allocated, or zeroed.
    None,
    /// The page reads as zeroes. The memory of the page, at this offset of the arena, is retained
    /// for later writes and contains old data.
    Retained(u64),
    /// The page's data is at this offset of the arena.
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

/// Pages of a memory-backed device. Only discards and zeroing release memory. A reset of the device
/// replaces the whole object.
pub struct Pages {
    table: Table,
    /// Location of the unit of each leaf. The idle bit of a slot means that the leaf is queued in
    /// `stale`. Units never move.
    units: Table,
    arena: Arena,
    common: Arc<Common>,
    counters: Counters<2>,
    /// Numbers of leaves with retained pages, oldest discards first.
    stale: Mutex<VecDeque<u64>>,
}

/// Locks of the slots of adjacent pages, released in ascending order.
type LockedPages<'l, 'a> = &'l mut [Option<SlotGuard<'a>>];

/// Locks `count` slots of `leaf` from `first` on, and passes the guards to `work`.
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

    /// Returns the offset in the arena of the memory of `slot`. Allocates the leaf's unit if
    /// necessary.
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

    /// Returns true if no page was ever written.
    pub fn is_untouched(&self) -> bool {
        self.arena.units_ever_allocated() == 0
    }

    // ---- requests -------------------------------------------------------------------------------

    /// Reads `into.len()` bytes from byte `offset` of the device.
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

    /// Reads a run of pages that either all have data or all read as zeroes. Returns the number of
    /// bytes read.
    #[inline]
    fn read_run(&self, leaf: Leaf<'_>, at: u64, into: &mut [u8]) -> usize {
        let (slot, count, bytes) = run(at, into.len());
        // A page without data needs no lock: a concurrent write to it has not completed yet, so
        // zeroes are correct.
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
                // Some pages were discarded after `peek`, so each page is handled separately.
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

    /// Stores `data` at byte `offset` of the device.
    ///
    /// # Errors
    /// `NoMemory` if the system is out of memory. Every page is then either written or unchanged.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let (slot, count, bytes) = run(at, data.len() - done);
            let leaf = self.table.leaf_or_new(slot)?;
            if (0..count).any(|n| Page::of(leaf.peek(slot + n as u64)) == Page::None) {
                // Allocates the memory of all these pages in one call. A lack of memory is then an
                // error instead of a signal. Memory that already exists is unchanged.
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
            // The write may cover only parts of its first and last page. The other bytes of a
            // retained page contain old data and must read as zeroes.
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

    /// Zeroes the bytes `[offset, end)` from the start, in at most `leaves_max` leaves. Returns the
    /// end of the zeroed part. Pages that contain only zeroes afterwards become retained pages,
    /// whose memory can be released.
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

    /// Returns the first byte from `at` on for which a leaf exists, or `end` if there is none
    /// before `end`.
    pub fn next_leaf(&self, at: u64, end: u64) -> u64 {
        let present = self.table.next_present(at / PAGE, end.div_ceil(PAGE));
        present.map_or(end, |slot| at.max(slot * PAGE))
    }

    /// Returns the end of the leaf with byte `at`: the next multiple of 2 MiB.
    pub fn leaf_end(at: u64) -> u64 {
        (at / UNIT_BYTES + 1) * UNIT_BYTES
    }

    // ---- releasing memory -----------------------------------------------------------------------

    /// Returns the memory used in bytes: data, retained pages and page tables.
    pub fn used_bytes(&self) -> u64 {
        (self.counters.get(DATA) + self.counters.get(RETAINED)) * PAGE + self.common.nodes.bytes()
    }

    /// Appends a leaf that has retained pages to `stale`, unless it is already queued.
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

    /// Releases the retained pages of up to `leaves` leaves to the system while more memory than
    /// the limit is retained.
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

    /// Releases the memory of those locked pages that are still retained.
    fn punch(&self, guards: LockedPages<'_, '_>) {
        let offset = |guard: &Option<SlotGuard<'_>>| match guard.as_ref().map(|guard| Page::of(guard.word()))
        {
            Some(Page::Retained(offset)) => Some(offset),
            _ => None,
        };
        let mut released = 0;
        // Pages that were written again are not released, so they separate the runs.
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
    /// The bytes must belong to pages of one unit, and the caller must hold the locks of these
    /// pages.
    #[inline]
    unsafe fn copy_out(&self, from: u64, into: &mut [u8]) {
        let from = self.arena.at(from).as_ptr();
        // SAFETY: mapped; the locks prevent changes meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// # Safety
    /// The bytes must belong to pages of one unit, and the caller must hold the locks of these
    /// pages.
    #[inline]
    unsafe fn copy_in(&self, to: u64, data: &[u8]) {
        let to = self.arena.at(to).as_ptr();
        // SAFETY: mapped; the locks prevent accesses meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
    }

    /// # Safety
    /// The bytes must belong to pages of one unit, and the caller must hold the locks of these
    /// pages.
    unsafe fn zero(&self, from: u64, bytes: u64) {
        if bytes == 0 {
            // An empty range may start at the end of the arena, where no address exists.
            return;
        }
        // SAFETY: as in copy_in.
        unsafe { std::ptr::write_bytes(self.arena.at(from).as_ptr(), 0, bytes as usize) };
    }

    /// Returns true if a page holds only zeroes.
    ///
    /// # Safety
    /// `offset` must be the start of a page's memory, and the caller must hold the lock of the
    /// page.
    unsafe fn is_zero(&self, offset: u64) -> bool {
        // SAFETY: as in `copy_out`, for a whole page.
        let page = unsafe { std::slice::from_raw_parts(self.arena.at(offset).as_ptr(), PAGE_BYTES) };
        page.iter().all(|&byte| byte == 0)
    }
}

const _: () = assert!(UNIT_BYTES.is_power_of_two());
const _: () = assert!(LOCATION_UNIT_BYTES << LOCATION_BITS == 1 << 40, "Memory's documentation says 1 TiB");

/// Returns the longest run of pages of one leaf at the start of the range of `len` bytes at `at`:
/// first slot, number of slots, number of bytes.
#[inline]
fn run(at: u64, len: usize) -> (u64, usize, usize) {
    let slot = at / PAGE;
    let most = RUN_PAGES.min((LEAF_SLOTS - slot % LEAF_SLOTS) as usize);
    let bytes = len.min(most * PAGE_BYTES - (at % PAGE) as usize);
    let count = ((at % PAGE) as usize + bytes).div_ceil(PAGE_BYTES);
    (slot, count, bytes)
}

/// Returns which of the `len` bytes at `at` lie in the `n`th page of the range (from 0), and where
/// in that page they start.
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
