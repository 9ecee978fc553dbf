//! The object pool: memory for compressed pages, comparable to zsmalloc.
//!
//! Objects of 1 to 4096 bytes are rounded up to a size class (16-byte steps) and stored in spans of
//! that class. Each CPU has a current span per class, so CPUs allocate without contention. Freeing
//! an object clears a bit. The lock of a class is taken only when a span changes its owner or
//! fullness group. Pool-wide locks (the cached empty spans, the arena) are taken only when a span
//! is created or destroyed, or at the limit.
//!
//! [Compaction](Pool::compact) moves objects without an indirection: each object has a
//! back-reference to the slot with its location, and moves under the lock of that slot.
//!
//! The pool counts resident pages. The pages of a span become resident from the front as the span
//! fills (a few in advance in a class with many spans).
//!
//! Invariant: the pool trusts the words of slots. A word with an object is published only by the
//! thread that allocated the object, or that took over the object from a locked slot. The thread
//! that removes the object from the last slot frees the object.
//!
//! Lock order: `compacting`, a slot, `scarce`, CPUs' current spans (several only under `scarce`), a
//! class's lists, `empties`, the arena.

pub mod backrefs;
pub mod class;
mod compact;
mod limits;
mod object_bytes;
mod rebuild;
pub mod redo;
mod span_life;
mod span_table;
mod spans;

#[cfg(test)]
mod tests;

use std::os::fd::OwnedFd;

use crossbeam_utils::CachePadded;

pub use self::backrefs::BackRef;
use self::backrefs::BackRefs;
use self::class::{CLASS, CLASS_STEP_BYTES, CLASSES, Class, SPAN_BYTES, class_of};
pub use self::compact::Owners;
use self::spans::{FreeOutcome, OwnedSpan, Spans, UnusedSpan};
use freestone_core::PAGE_BYTES;
use freestone_core::arena::Arena;
use freestone_core::device::{Error, Result};
use freestone_core::percpu;
use freestone_core::sync::{Arc, AtomicU32, AtomicU64, Mutex, MutexGuard, OnceLock, Ordering};

/// Number of empty spans that keep their memory, to avoid system calls if use oscillates by a few
/// spans.
const EMPTIES_MAX: usize = 16;
/// A growing span makes 1/`AHEAD_SHARE` of its class's pages resident in advance. So a class with
/// many spans needs few system calls, and a class with few spans wastes little memory.
const AHEAD_SHARE: u32 = 512;

const UNITS_PER_SPAN: u64 = SPAN_BYTES / CLASS_STEP_BYTES as u64;

/// Memory for compressed pages, in spans of one size class each.
pub struct Pool {
    arena: Arena,
    spans: Spans,
    backrefs: BackRefs,
    /// Current spans by CPU, allocated when the CPU stores its first object.
    current: Box<[OnceLock<Box<Currents>>]>,
    empties: Mutex<Vec<UnusedSpan>>,
    compacting: Mutex<()>,
    scarce: Mutex<()>,
    /// Number of spans of each class, which determines how many pages are made resident in advance.
    population: Box<[AtomicU32]>,
    pages: AtomicU64,
    pages_max: AtomicU64,
    limit_pages: AtomicU64,
    /// Number of pages outside the pool that count against the pool's limit.
    outside_pages: Arc<AtomicU64>,
    /// Number of pages above which growth calls `alarm`.
    alarm_pages: AtomicU64,
    alarm: OnceLock<Alarm>,
}

/// Callback for growth above [`Pool::set_alarm_pages`]. The callback must not take a lock that is
/// held while the pool is used.
pub type Alarm = Box<dyn Fn() + Send + Sync>;

/// The current spans of a CPU, by class.
type Currents = CachePadded<[Mutex<Option<OwnedSpan>>; CLASSES]>;

/// Parameters of an allocation from the pool.
#[derive(Clone, Copy)]
struct AllocRequest {
    owner: BackRef,
    /// Number of pages below the limit that are reserved for others.
    reserved: u64,
    /// True if [`Error::NoSpace`] fails the write (and raises the high-water mark); false if
    /// another attempt follows.
    is_last: bool,
}

/// Decoded location of an object.
#[derive(Clone, Copy)]
struct Place {
    span: u32,
    object: usize,
    class: usize,
}

/// An allocated object that no slot holds yet: only the allocating thread may access its bytes.
struct NewObject(Place);

impl Place {
    fn location(self) -> u64 {
        let units = self.object as u64 * u64::from(CLASS[self.class].bytes) / CLASS_STEP_BYTES as u64;
        u64::from(self.span) * UNITS_PER_SPAN + units
    }
}

impl Pool {
    #[cfg(test)]
    pub fn new() -> rustix::io::Result<Self> {
        Self::with_outside_pages(Arc::new(AtomicU64::new(0)))
    }

    /// Creates an empty pool without a limit. `outside_pages` is a number of pages outside the pool
    /// that count against a limit.
    pub fn with_outside_pages(outside_pages: Arc<AtomicU64>) -> rustix::io::Result<Self> {
        Ok(Self::with(Arena::new("freestone-pool", SPAN_BYTES)?, outside_pages))
    }

    /// Takes over the objects of a process that has ended. [`rebuild`](Self::rebuild) must follow.
    ///
    /// # Errors
    /// As [`Arena::adopt`].
    pub fn adopt(file: OwnedFd, outside_pages: Arc<AtomicU64>) -> rustix::io::Result<Self> {
        Ok(Self::with(Arena::adopt(file, SPAN_BYTES)?, outside_pages))
    }

    /// Returns the file of the objects, for a process that adopts it.
    pub const fn arena(&self) -> &Arena {
        &self.arena
    }

    fn with(arena: Arena, outside_pages: Arc<AtomicU64>) -> Self {
        Self {
            arena,
            spans: Spans::new(CLASSES),
            backrefs: BackRefs::new(),
            current: (0..percpu::cpus()).map(|_| OnceLock::new()).collect(),
            empties: Mutex::default(),
            compacting: Mutex::default(),
            scarce: Mutex::default(),
            population: (0..CLASSES).map(|_| AtomicU32::new(0)).collect(),
            pages: AtomicU64::new(0),
            pages_max: AtomicU64::new(0),
            limit_pages: AtomicU64::new(u64::MAX),
            outside_pages,
            alarm_pages: AtomicU64::new(u64::MAX),
            alarm: OnceLock::new(),
        }
    }

    // ---- the request path -----------------------------------------------------------------------

    /// Stores `data` (1 to 4096 bytes) for `owner` and returns the location of the object.
    /// `reserved` pages below the limit are left to others. The call may take page faults, so the
    /// caller must not hold a compression stream. (A partial write holds the page's slot, which
    /// delays only requests for that page.)
    ///
    /// # Errors
    /// [`Error::NoSpace`] at the limit; [`Error::NoMemory`] if the system's memory is short.
    #[expect(clippy::inline_always, reason = "a write in memory is one function")]
    #[inline(always)]
    pub fn store(&self, data: &[u8], owner: BackRef, reserved: u64) -> Result<u64> {
        freestone_core::trail::step!();
        if self.exceeds_lowered_limit() {
            // The cached empty spans may be what exceeds the limit.
            self.release_empties();
            if self.exceeds_lowered_limit() {
                return Err(self.over_limit(0));
            }
        }
        let class = class_of(data.len());
        let request = AllocRequest { owner, reserved, is_last: false };
        let taken = self.take_from(&mut self.lock_current(class), class, request);
        let mut taken = match taken {
            Err(Error::NoSpace) => self.take_at_limit(class, AllocRequest { is_last: true, ..request })?,
            taken => taken?,
        };
        self.fill(&mut taken, data);
        Ok(taken.0.location())
    }

    /// Returns the bytes that an object of `stored` bytes occupies in its span: its class size.
    pub fn charged_bytes(stored: usize) -> u64 {
        u64::from(CLASS[class_of(stored)].bytes)
    }

    /// Returns true if both sizes are in the same class. Size 0 has no class and returns false.
    #[inline]
    pub fn same_class(bytes: usize, other_bytes: usize) -> bool {
        bytes != 0 && other_bytes != 0 && class_of(bytes) == class_of(other_bytes)
    }

    /// Frees an object that no slot holds any more.
    #[inline]
    pub fn free(&self, location: u64) {
        let place = self.place(location);
        match self.spans.put(place.span, place.object, CLASS[place.class].objects) {
            FreeOutcome::Done => {}
            FreeOutcome::Refile => {
                if let Some(span) = self.spans.refile(place.span, place.class, CLASS[place.class].objects) {
                    self.recycle_span(span, place.class);
                }
            }
            FreeOutcome::EmptyOwned => self.drop_empty_current(place),
        }
    }

    /// Locks this CPU's current span of a class, or another CPU's span if a descheduled thread
    /// holds the lock.
    #[inline]
    fn lock_current(&self, class: usize) -> MutexGuard<'_, Option<OwnedSpan>> {
        percpu::lock_nearest(|cpu| &self.current[cpu].get_or_init(new_currents)[class])
    }

    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn take_from(
        &self,
        current: &mut Option<OwnedSpan>,
        class: usize,
        request: AllocRequest,
    ) -> Result<NewObject> {
        loop {
            if let Some(span) = current
                && let Some(object) = self.spans.lowest_free(span)
            {
                self.make_resident(span, object, class, request)?;
                return Ok(self.take(span, object, class, request.owner));
            }
            if let Some(span) = current.take() {
                self.release_span(span, class);
            }
            *current = Some(match self.spans.own_fullest(class) {
                Some(span) => span,
                None => self.new_span(class)?,
            });
        }
    }

    #[inline]
    fn take(&self, span: &OwnedSpan, object: usize, class: usize, owner: BackRef) -> NewObject {
        self.spans.take(span, object);
        self.backrefs.set(span, object, owner);
        NewObject(Place { span: span.number(), object, class })
    }

    /// Allocates at the limit from any free resident place, in any CPU's current span or in a
    /// listed span. (Spans that compaction owns are not considered.)
    #[cold]
    fn take_at_limit(&self, class: usize, request: AllocRequest) -> Result<NewObject> {
        let _one = self.scarce.lock();
        let own = self.current[percpu::current()].get_or_init(new_currents);
        let mut currents: Vec<_> =
            self.currents().map(|cpu| (std::ptr::eq(cpu, &raw const **own), cpu[class].lock())).collect();
        for span in currents.iter_mut().filter_map(|(_, current)| current.take()) {
            self.release_span(span, class);
        }
        let mut without = Vec::new();
        let found = loop {
            match self.spans.own_fullest(class) {
                Some(span) if self.resident_hole(&span, class, CLASS[class].objects as usize).is_none() => {
                    without.push(span);
                }
                found => break found,
            }
        };
        for span in without {
            self.release_span(span, class);
        }
        let Some((_, current)) = currents.iter_mut().find(|(is_own, _)| *is_own) else {
            unreachable!("it was created above")
        };
        **current = found;
        self.take_from(current, class, request)
    }

    /// Returns the index of the lowest free place below `end` of an owned span, if its memory is
    /// resident.
    fn resident_hole(&self, span: &OwnedSpan, class: usize, end: usize) -> Option<usize> {
        let hole = self.spans.lowest_free(span).filter(|&hole| hole < end)?;
        (pages_to_hold(&CLASS[class], hole) <= self.spans.resident(span)).then_some(hole)
    }

    /// Makes the memory of an object resident. The memory stays resident until the span is retired
    /// or trimmed, so this is usually only a comparison.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn make_resident(
        &self,
        span: &OwnedSpan,
        object: usize,
        class: usize,
        request: AllocRequest,
    ) -> Result<()> {
        let needed = pages_to_hold(&CLASS[class], object);
        let resident = self.spans.resident(span);
        if needed <= resident {
            return Ok(());
        }
        let grown = self.grow_resident(span, class, resident, needed, request.reserved);
        if grown == Err(Error::NoSpace) && request.is_last {
            self.over_limit(needed - resident);
        }
        grown
    }

    #[cold]
    fn grow_resident(
        &self,
        span: &OwnedSpan,
        class: usize,
        resident: u32,
        needed: u32,
        reserved: u64,
    ) -> Result<()> {
        let pages = CLASS[class].pages;
        let wanted = (needed + self.pages_ahead(class)).min(pages);
        let target = if self.try_charge(wanted - resident, reserved) {
            wanted
        } else {
            self.release_empties();
            if !self.try_charge(needed - resident, reserved) {
                return Err(Error::NoSpace);
            }
            needed
        };
        let added = target - resident;
        if let Err(error) = self.make_pages_resident(span, resident..target) {
            self.uncharge(added);
            return Err(error);
        }
        self.spans.set_resident(span, target);
        Ok(())
    }

    /// Returns the number of pages that a growing span of a class makes resident in advance.
    fn pages_ahead(&self, class: usize) -> u32 {
        // Relaxed: an approximate number is enough.
        self.population[class].load(Ordering::Relaxed) * CLASS[class].pages / AHEAD_SHARE
    }

    #[inline]
    fn place(&self, location: u64) -> Place {
        let span = (location / UNITS_PER_SPAN) as u32;
        let class = self.spans.class_of(span);
        Place { span, object: CLASS[class].index_at(location % UNITS_PER_SPAN), class }
    }
}

#[cold]
fn new_currents() -> Box<Currents> {
    Box::new(CachePadded::new(std::array::from_fn(|_| Mutex::default())))
}

/// Returns the number of pages at the front of a span that contain objects 0 to `object`.
fn pages_to_hold(class: &Class, object: usize) -> u32 {
    ((object as u32 + 1) * class.bytes).div_ceil(PAGE_BYTES as u32)
}
