//! The pages of a [`Memory`](super::Memory): where they lie, and how they are copied.
//!
//! The slots are the RAM disk's. Pages that neighbour on the device neighbour in memory: every leaf
//! of the table has one unit of 2 MiB of address space, taken with the first write to it, so that a
//! request is copied in a few long runs (page by page takes a third longer). Memory is taken by the
//! page, with the first write to that.
//!
//! Lock order: slots of the table in ascending order, up to [`RUN_PAGES`] of them; then a slot of
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
/// Address space of a leaf's pages.
const UNIT_BYTES: u64 = LEAF_SLOTS * PAGE;
/// What a word's location counts.
const LOCATION_UNIT_BYTES: u64 = 16;
/// Pages that are locked at once, to be copied or given back to the system in one go. Who waits for
/// one of them waits some 20 us.
const RUN_PAGES: usize = 32;
/// Memory without content that is kept for the next writes, beside an eighth of what holds data: a
/// page that comes anew from the system takes several times as long as a copy.
const KEPT_BYTES_MAX: u64 = 16 << 20;

/// What is in a slot.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Page {
    /// Reads as zeroes. The place that it would have in memory is a hole, or holds zeroes.
    None,
    /// Reads as zeroes. Memory that holds something else is still there, at this place.
    Kept(u64),
    /// Data, at this place.
    Data(u64),
}

impl Page {
    #[inline]
    fn of(word: Word) -> Self {
        let at = word.location() * LOCATION_UNIT_BYTES;
        match word.kind() {
            Kind::Huge => Self::Data(at),
            Kind::Pattern => Self::Kept(at),
            _ => Self::None,
        }
    }

    #[inline]
    fn word(self) -> Word {
        match self {
            Self::None => Word::EMPTY,
            Self::Kept(at) => Word::pattern(at / LOCATION_UNIT_BYTES),
            Self::Data(at) => Word::huge(at / LOCATION_UNIT_BYTES),
        }
    }

    #[inline]
    fn is_data(self) -> bool {
        matches!(self, Self::Data(_))
    }
}

/// Pages with data.
const DATA: usize = 0;
/// Pages of memory without.
const KEPT: usize = 1;

/// The pages of a memory-backed device. Never shrinks but by discards; a reset exchanges it whole.
pub struct Pages {
    table: Table,
    /// For every leaf its unit: its place as a location, marked idle while the leaf waits in
    /// `stale`. Places stay.
    units: Table,
    arena: Arena,
    common: Arc<Common>,
    counters: Counters<2>,
    /// Leaves with kept pages, those first that were discarded first.
    stale: Mutex<VecDeque<u64>>,
}

/// Locked neighbours. Unlocked in the order in which they were locked.
type Locked<'l, 'a> = &'l mut [Option<SlotGuard<'a>>];

/// Locks `count` slots, which lie in one leaf, and hands them to `work`.
#[inline]
fn with_locked<'a, R>(leaf: Leaf<'a>, first: u64, count: usize, work: impl FnOnce(Locked<'_, 'a>) -> R) -> R {
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
    /// Nothing in use.
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

    /// Where the memory of `slot` is, or will be.
    fn home(&self, slot: u64) -> Result<u64> {
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

    /// Reads from `at` on while what it finds is of one kind; returns how much that was.
    #[inline]
    fn read_run(&self, leaf: Leaf<'_>, at: u64, into: &mut [u8]) -> usize {
        let (slot, count, bytes) = run(at, into.len());
        // Who read a page as empty did so before a write to it was answered: no lock is needed for
        // that.
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
                Page::Data(place) if pages.clone().all(Page::is_data) => {
                    // SAFETY: `guards` are the locks of all these pages.
                    unsafe { self.copy_out(place + at % PAGE, into) };
                }
                // Some were discarded meanwhile.
                _ => {
                    for (n, page) in pages.enumerate() {
                        let (part, within) = part_of(at, bytes, n);
                        match page {
                            // SAFETY: a part of one page, which is locked.
                            Page::Data(place) => unsafe { self.copy_out(place + within, &mut into[part]) },
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
    /// No memory; every page is written or as it was.
    pub fn write(&self, offset: u64, data: &[u8]) -> Result<()> {
        let mut done = 0;
        while done < data.len() {
            let at = offset + done as u64;
            let (slot, count, bytes) = run(at, data.len() - done);
            let leaf = self.table.leaf_or_new(slot)?;
            if (0..count).any(|n| Page::of(leaf.peek(slot + n as u64)) == Page::None) {
                // Brought in at once, and so that a lack of memory is an error and not a signal.
                // What is there already stays.
                self.arena.populate(self.home(slot)?, count as u64 * PAGE)?;
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
                Page::Data(place) | Page::Kept(place) => place,
                Page::None => self.home(slot)?,
            };
            // What a request leaves of its first and last page was something else before.
            for n in [0, count - 1] {
                if let Some(Page::Kept(place)) = guards[n].as_ref().map(|guard| Page::of(guard.word())) {
                    let (part, within) = part_of(at, data.len(), n);
                    let behind = within + part.len() as u64;
                    // SAFETY: parts of one page, which is locked.
                    unsafe {
                        self.zero(place, within);
                        self.zero(place + behind, PAGE - behind);
                    }
                }
            }
            // SAFETY: `guards` are the locks of all these pages, which lie in one unit.
            unsafe { self.copy_in(start + at % PAGE, data) };
            let (mut new, mut reused) = (0, 0);
            for (n, guard) in guards.iter_mut().enumerate() {
                let Some(guard) = guard.take() else { continue };
                match Page::of(guard.word()) {
                    Page::Data(_) => continue,
                    Page::Kept(_) => reused += 1,
                    Page::None => {}
                }
                new += 1;
                guard.publish(Page::Data(start + n as u64 * PAGE).word());
            }
            if new > 0 {
                self.counters.add(DATA, new);
                self.counters.add(KEPT, -reused);
            }
            Ok(())
        })
    }

    /// Makes `[offset, end)` read as zeroes, from the front on, and stops early once it did much;
    /// returns where. The memory of pages of zeroes is free for others.
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
                if let Page::Data(place) = Page::of(guard.word()) {
                    let whole = stop - at == PAGE;
                    if !whole {
                        // SAFETY: a part of one page, which is locked.
                        unsafe { self.zero(place + at % PAGE, stop - at) };
                    }
                    // SAFETY: the page is locked.
                    if whole || unsafe { self.is_zero(place) } {
                        guard.publish(Page::Kept(place).word());
                        freed += 1;
                    }
                }
            }
            at = stop;
        }
        if freed > 0 {
            self.counters.add(KEPT, freed);
            self.counters.add(DATA, -freed);
            self.note_stale(from / PAGE / LEAF_SLOTS);
        }
    }

    /// Whether the page that holds byte `at` of the device has data.
    pub fn has_data(&self, at: u64) -> bool {
        let slot = at / PAGE;
        self.table.leaf(slot).is_some_and(|leaf| Page::of(leaf.peek(slot)).is_data())
    }

    /// The first byte at or after `at` of which there is a leaf; `end` where there is none before
    /// it.
    pub fn next_leaf(&self, at: u64, end: u64) -> u64 {
        let present = self.table.next_present(at / PAGE, end.div_ceil(PAGE));
        present.map_or(end, |slot| at.max(slot * PAGE))
    }

    /// The end of the region of 2 MiB that holds byte `at`.
    pub fn leaf_end(at: u64) -> u64 {
        (at / UNIT_BYTES + 1) * UNIT_BYTES
    }

    // ---- giving memory back ---------------------------------------------------------------------

    /// Bytes of memory that it takes, tables included.
    pub fn used_bytes(&self) -> u64 {
        (self.counters.get(DATA) + self.counters.get(KEPT)) * PAGE + self.common.nodes.bytes()
    }

    /// A leaf has kept pages.
    fn note_stale(&self, number: u64) {
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

    /// Where too much memory is kept: gives that of up to `leaves` leaves back to the system.
    pub fn give_back(&self, leaves: u32) {
        for _ in 0..leaves {
            if self.counters.get(KEPT) * PAGE <= KEPT_BYTES_MAX + self.counters.get(DATA) * PAGE / 8 {
                return;
            }
            let Some(number) = self.stale.lock().pop_front() else { return };
            if let Some(unit) = self.units.leaf(number) {
                let guard = unit.lock(number);
                let word = guard.word();
                guard.publish(word.with_idle(false));
            }
            if let Some(leaf) = self.table.leaf(number * LEAF_SLOTS) {
                self.give_leaf_back(leaf, number * LEAF_SLOTS);
            }
        }
    }

    fn give_leaf_back(&self, leaf: Leaf<'_>, first: u64) {
        let is_kept = |slot: u64| matches!(Page::of(leaf.peek(slot)), Page::Kept(_));
        let end = first + LEAF_SLOTS;
        let mut slot = first;
        while slot < end {
            let most = (end - slot).min(RUN_PAGES as u64);
            let count = (slot..slot + most).take_while(|&slot| is_kept(slot)).count();
            if count == 0 {
                slot += 1;
                continue;
            }
            with_locked(leaf, slot, count, |guards| self.punch(guards));
            slot += count as u64;
        }
    }

    /// Gives back what is still kept of these pages.
    fn punch(&self, guards: Locked<'_, '_>) {
        let place = |guard: &Option<SlotGuard<'_>>| match guard.as_ref().map(|guard| Page::of(guard.word())) {
            Some(Page::Kept(place)) => Some(place),
            _ => None,
        };
        let mut gone = 0;
        // Some may hold data again: they part the others.
        for run in guards.chunk_by_mut(|a, b| place(a).is_some() && place(b).is_some()) {
            let Some(start) = place(&run[0]) else { continue };
            // SAFETY: the run's locks are held, so nobody touches its pages; they lie in one unit
            // of ours.
            unsafe { self.arena.release(start, run.len() as u64 * PAGE) };
            for guard in run.iter_mut().filter_map(Option::take) {
                guard.publish(Page::None.word());
                gone += 1;
            }
        }
        self.counters.add(KEPT, -gone);
    }

    // ---- bytes ----------------------------------------------------------------------------------

    /// # Safety
    /// The bytes are of pages of one unit, whose locks the caller holds.
    #[inline]
    unsafe fn copy_out(&self, from: u64, into: &mut [u8]) {
        let from = self.arena.at(from).as_ptr();
        // SAFETY: mapped; nobody changes what is locked meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) };
    }

    /// # Safety
    /// As [`copy_out`](Self::copy_out).
    #[inline]
    unsafe fn copy_in(&self, to: u64, data: &[u8]) {
        let to = self.arena.at(to).as_ptr();
        // SAFETY: mapped; nobody looks at what is locked meanwhile.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to, data.len()) };
    }

    /// # Safety
    /// As [`copy_out`](Self::copy_out).
    unsafe fn zero(&self, from: u64, bytes: u64) {
        if bytes == 0 {
            // There may be nothing at its end.
            return;
        }
        // SAFETY: as in copy_in.
        unsafe { std::ptr::write_bytes(self.arena.at(from).as_ptr(), 0, bytes as usize) };
    }

    /// Whether a page holds nothing but zeroes.
    ///
    /// # Safety
    /// The caller holds its lock.
    unsafe fn is_zero(&self, place: u64) -> bool {
        // SAFETY: as in copy_out, a whole page.
        let page = unsafe { std::slice::from_raw_parts(self.arena.at(place).as_ptr(), PAGE_BYTES) };
        page.iter().all(|&byte| byte == 0)
    }
}

const _: () = assert!(UNIT_BYTES.is_power_of_two());
const _: () = assert!(LOCATION_UNIT_BYTES << LOCATION_BITS == 1 << 40, "Memory's documentation says 1 TiB");

/// The run of pages that `len` bytes at `at` begin with, inside one leaf: its first slot, its
/// slots, its bytes.
#[inline]
fn run(at: u64, len: usize) -> (u64, usize, usize) {
    let slot = at / PAGE;
    let most = RUN_PAGES.min((LEAF_SLOTS - slot % LEAF_SLOTS) as usize);
    let bytes = len.min(most * PAGE_BYTES - (at % PAGE) as usize);
    let count = ((at % PAGE) as usize + bytes).div_ceil(PAGE_BYTES);
    (slot, count, bytes)
}

/// What `len` bytes at `at` have of the `n`th page that they touch, and where in that page it
/// begins.
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
