//! The object pool: memory for compressed pages, in zsmalloc's role.
//!
//! Objects of 1 to 4096 bytes are rounded up to a class (16-byte steps) and live in spans of their
//! class. A CPU takes objects from a current span of its own for each class, so two CPUs allocate
//! without meeting; an object is freed by clearing a bit. A class's lock is taken only when a span
//! changes hands or fullness group. Pool-wide locks (the kept empties, the arena) are taken when a
//! span begins or ends, and where the limit is reached.
//!
//! Objects move ([`compact`](Pool::compact)) without an indirection: each has a back-reference to
//! the slot that holds its location, and moves under that slot's lock.
//!
//! Memory is counted in pages that are really there: a span's pages come into memory from the
//! front, as it fills (a few ahead of need in a large class).
//!
//! What a slot's word says of an object is believed: words with objects are published by those only
//! who took the object, or took it over from a slot that they had locked, and it is freed by
//! whoever took it out of the last slot.
//!
//! Lock order: `compacting`, a slot, `scarce`, CPUs' current spans (more than one only under
//! `scarce`), a class's lists, the kept empties, the arena.

pub mod backrefs;
pub mod class;
mod compact;
mod memory;
mod rebuild;
mod span_table;
mod spans;

#[cfg(test)]
mod tests;

use crossbeam_utils::CachePadded;

pub use self::backrefs::BackRef;
use self::backrefs::BackRefs;
use self::class::{CLASS, CLASS_STEP_BYTES, CLASSES, Class, SPAN_BYTES, class_of};
pub use self::compact::Owners;
use self::spans::{Freed, Owned, Spans, Unused};
use freestone_core::PAGE_BYTES;
use freestone_core::arena::Arena;
use freestone_core::device::{Error, Result};
use freestone_core::percpu;
use freestone_core::sync::{Arc, AtomicU32, AtomicU64, Mutex, MutexGuard, OnceLock, Ordering};

/// Empty spans that keep their memory, so that a pool whose use swings by a few spans makes no
/// system calls.
const KEPT_EMPTIES: usize = 16;
/// A current span brings this share of its class's pages into memory ahead of need: few system
/// calls while a large class fills, little waste in a small one.
const AHEAD_SHARE: u32 = 512;

const UNITS_PER_SPAN: u64 = SPAN_BYTES / CLASS_STEP_BYTES as u64;

/// The memory in which compressed objects lie, in spans of one size class each.
pub struct Pool {
    arena: Arena,
    spans: Spans,
    backrefs: BackRefs,
    /// By CPU, from its first object on.
    current: Box<[OnceLock<Box<Currents>>]>,
    empties: Mutex<Vec<Unused>>,
    compacting: Mutex<()>,
    scarce: Mutex<()>,
    /// Spans of each class, to size the read-ahead of memory.
    population: Box<[AtomicU32]>,
    pages: AtomicU64,
    pages_max: AtomicU64,
    limit_pages: AtomicU64,
    /// Pages beside the pool's own that count against its limit.
    beside_pages: Arc<AtomicU64>,
    /// Above this many pages growth is reported to `alarm`.
    alarm_pages: AtomicU64,
    alarm: OnceLock<Alarm>,
}

/// Told that the pool has grown above its mark; takes no lock under which the pool is used.
pub type Alarm = Box<dyn Fn() + Send + Sync>;

/// One CPU's current spans, one a class.
type Currents = CachePadded<[Mutex<Option<Owned>>; CLASSES]>;

/// For whom a place is looked for.
#[derive(Clone, Copy)]
struct Asker {
    owner: BackRef,
    /// Pages of the limit that are kept for others.
    kept: u64,
    /// A refusal for want of memory is the write's failure; else another place will be looked for.
    is_last: bool,
}

/// An object's place, taken apart.
#[derive(Clone, Copy)]
struct Place {
    span: u32,
    object: usize,
    class: usize,
}

/// The place of an object that was taken and that no slot holds yet: its bytes are the taker's
/// alone.
struct Taken(Place);

impl Place {
    fn location(self) -> u64 {
        let units = self.object as u64 * u64::from(CLASS[self.class].bytes) / CLASS_STEP_BYTES as u64;
        u64::from(self.span) * UNITS_PER_SPAN + units
    }
}

impl Pool {
    /// An empty pool without a limit, with nothing beside it.
    #[cfg(test)]
    pub fn new() -> rustix::io::Result<Self> {
        Self::beside(Arc::new(AtomicU64::new(0)))
    }

    /// An empty pool without a limit; so many pages beside it will count against its limit.
    ///
    /// # Errors
    /// Those of `memfd_create(2)`.
    pub fn beside(beside_pages: Arc<AtomicU64>) -> rustix::io::Result<Self> {
        Ok(Self {
            arena: Arena::new("freestone-pool", SPAN_BYTES)?,
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
            beside_pages,
            alarm_pages: AtomicU64::new(u64::MAX),
            alarm: OnceLock::new(),
        })
    }

    // ---- the request path -----------------------------------------------------------------------

    /// Stores `data` (1 to 4096 bytes) for `owner` and returns its location; of the limit, `kept`
    /// pages are left to others. It may fault in memory, so it is called with no compression stream
    /// held. (A write to a part of a page holds the page's slot: what waits then is that page.)
    ///
    /// # Errors
    /// [`Error::NoSpace`] where the limit forbids it, [`Error::NoMemory`].
    #[expect(clippy::inline_always, reason = "a write in memory is one function")]
    #[inline(always)]
    pub fn store(&self, data: &[u8], owner: BackRef, kept: u64) -> Result<u64> {
        if self.is_over_limit() {
            // Perhaps because of spans that are kept for nothing else.
            self.release_empties();
            if self.is_over_limit() {
                return Err(self.over_limit(0));
            }
        }
        let class = class_of(data.len());
        let asker = Asker { owner, kept, is_last: false };
        let taken = self.take_from(&mut self.lock_current(class), class, asker);
        let mut taken = match taken {
            Err(Error::NoSpace) => self.take_when_scarce(class, Asker { is_last: true, ..asker })?,
            taken => taken?,
        };
        self.fill(&mut taken, data);
        Ok(taken.0.location())
    }

    /// Bytes that an object takes of its span: its class.
    pub fn charged_bytes(stored: usize) -> u64 {
        u64::from(CLASS[class_of(stored)].bytes)
    }

    /// Whether objects of these sizes take places of one class; no object, of size 0, has one.
    #[inline]
    pub fn same_class(bytes: usize, other_bytes: usize) -> bool {
        bytes != 0 && other_bytes != 0 && class_of(bytes) == class_of(other_bytes)
    }

    /// Whether the limit was lowered below what the pool has.
    #[inline]
    pub fn is_over_limit(&self) -> bool {
        // Relaxed: a limit that changes at this moment counts from the next write on.
        self.pages.load(Ordering::Relaxed) > self.limit_pages.load(Ordering::Relaxed)
    }

    /// Frees an object that no slot holds any more.
    #[inline]
    pub fn free(&self, location: u64) {
        let place = self.place(location);
        match self.spans.put(place.span, place.object, CLASS[place.class].objects) {
            Freed::Fine => {}
            Freed::Refile => {
                if let Some(span) = self.spans.refile(place.span, place.class, CLASS[place.class].objects) {
                    self.retire(span, place.class);
                }
            }
            Freed::EmptyOwned => self.drop_empty_current(place),
        }
    }

    /// This CPU's current span of a class; another CPU's where a descheduled thread holds it.
    #[inline]
    fn lock_current(&self, class: usize) -> MutexGuard<'_, Option<Owned>> {
        percpu::lock_nearest(|cpu| &self.current[cpu].get_or_init(new_currents)[class])
    }

    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn take_from(&self, current: &mut Option<Owned>, class: usize, asker: Asker) -> Result<Taken> {
        loop {
            if let Some(span) = current
                && let Some(object) = self.spans.lowest_free(span)
            {
                self.make_resident(span, object, class, asker)?;
                return Ok(self.take(span, object, class, asker.owner));
            }
            if let Some(span) = current.take() {
                self.give_up(span, class);
            }
            *current = Some(match self.spans.own_fullest(class) {
                Some(span) => span,
                None => self.new_span(class)?,
            });
        }
    }

    /// Takes a free object, which lies in memory.
    #[inline]
    fn take(&self, span: &Owned, object: usize, class: usize, owner: BackRef) -> Taken {
        self.spans.take(span, object);
        self.backrefs.set(span, object, owner);
        Taken(Place { span: span.number(), object, class })
    }

    /// The limit forbids more memory: takes any place that is in memory, in whatever CPU's current
    /// span or less full one it lies. (A span that compaction works on is not found.)
    #[cold]
    fn take_when_scarce(&self, class: usize, asker: Asker) -> Result<Taken> {
        let _one = self.scarce.lock();
        let own = self.current[percpu::current()].get_or_init(new_currents);
        let mut currents: Vec<_> =
            self.currents().map(|cpu| (std::ptr::eq(cpu, &raw const **own), cpu[class].lock())).collect();
        for span in currents.iter_mut().filter_map(|(_, current)| current.take()) {
            self.give_up(span, class);
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
            self.give_up(span, class);
        }
        let Some((_, current)) = currents.iter_mut().find(|(is_own, _)| *is_own) else {
            unreachable!("it was made above")
        };
        **current = found;
        self.take_from(current, class, asker)
    }

    /// A free object below `end` of an owned span that lies in memory.
    fn resident_hole(&self, span: &Owned, class: usize, end: usize) -> Option<usize> {
        let hole = self.spans.lowest_free(span).filter(|&hole| hole < end)?;
        (pages_to_hold(&CLASS[class], hole) <= self.spans.resident(span)).then_some(hole)
    }

    /// Sees to it that an object of an owned span lies in memory. A place once in memory stays
    /// there until its span is retired or trimmed, so this is a comparison in the steady state.
    #[expect(clippy::inline_always, reason = "as above")]
    #[inline(always)]
    fn make_resident(&self, span: &Owned, object: usize, class: usize, asker: Asker) -> Result<()> {
        let needed = pages_to_hold(&CLASS[class], object);
        let resident = self.spans.resident(span);
        if needed <= resident {
            return Ok(());
        }
        let grown = self.grow_resident(span, class, resident, needed, asker.kept);
        if grown == Err(Error::NoSpace) && asker.is_last {
            self.over_limit(needed - resident);
        }
        grown
    }

    #[cold]
    fn grow_resident(&self, span: &Owned, class: usize, resident: u32, needed: u32, kept: u64) -> Result<()> {
        let pages = CLASS[class].pages;
        let wanted = (needed + self.pages_ahead(class)).min(pages);
        let target = if self.charge(wanted - resident, kept) {
            wanted
        } else {
            self.release_empties();
            if !self.charge(needed - resident, kept) {
                return Err(Error::NoSpace);
            }
            needed
        };
        let added = target - resident;
        if let Err(error) = self.bring_in(span, resident..target) {
            self.uncharge(added);
            return Err(error);
        }
        self.spans.set_resident(span, target);
        Ok(())
    }

    /// Pages that a growing span of a class brings in beyond its need.
    fn pages_ahead(&self, class: usize) -> u32 {
        // Relaxed: a hint.
        self.population[class].load(Ordering::Relaxed) * CLASS[class].pages / AHEAD_SHARE
    }

    /// Counts pages in, unless the limit forbids it. The count never passes the limit on the way:
    /// others would take that for a pool that is over it.
    fn charge(&self, pages: u32, kept: u64) -> bool {
        // Relaxed: a limit that changes at this moment counts from the next growth on.
        let limit = self.limit_pages.load(Ordering::Relaxed).saturating_sub(kept);
        // Relaxed: as above.
        let limit = limit.saturating_sub(self.beside_pages.load(Ordering::Relaxed));
        let add = |now: u64| Some(now + u64::from(pages)).filter(|&sum| sum <= limit);
        // Relaxed: the sum alone decides.
        let before = self.pages.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        if let Ok(before) = before {
            // Relaxed: a statistic.
            self.pages_max.fetch_max(before + u64::from(pages), Ordering::Relaxed);
            // Relaxed: a mark that changes at this moment counts from the next growth on.
            if before + u64::from(pages) > self.alarm_pages.load(Ordering::Relaxed)
                && let Some(alarm) = self.alarm.get()
            {
                alarm();
            }
        }
        before.is_ok()
    }

    fn uncharge(&self, pages: u32) {
        // Relaxed: as in charge.
        self.pages.fetch_sub(u64::from(pages), Ordering::Relaxed);
    }

    /// As in the kernel, the high-water mark is raised before the verdict, so it can exceed the
    /// limit.
    #[cold]
    fn over_limit(&self, pages: u32) -> Error {
        // Relaxed: statistics.
        let attempted = self.pages.load(Ordering::Relaxed) + u64::from(pages);
        self.pages_max.fetch_max(attempted, Ordering::Relaxed);
        Error::NoSpace
    }

    // ---- spans come and go ----------------------------------------------------------------------

    fn new_span(&self, class: usize) -> Result<Owned> {
        let kept = self.empties.lock().pop();
        let span = match kept {
            Some(span) => span,
            None => self.fresh_span()?,
        };
        let span = self.spans.adopt(span, class, CLASS[class].objects);
        // A span that was kept has the memory of its former class, which may be more than this one
        // needs.
        self.trim(&span, (pages_to_hold(&CLASS[class], 0) + self.pages_ahead(class)).min(CLASS[class].pages));
        self.backrefs.open(&span, CLASS[class].objects);
        // Relaxed: a hint.
        self.population[class].fetch_add(1, Ordering::Relaxed);
        Ok(span)
    }

    /// Files a span.
    fn give_up(&self, span: Owned, class: usize) {
        if let Some(span) = self.spans.disown(span, class, CLASS[class].objects) {
            self.retire(span, class);
        }
    }

    /// Disposes of a span that was of `class`.
    fn retire(&self, span: Unused, class: usize) {
        self.backrefs.close(&span);
        // Relaxed: a hint.
        self.population[class].fetch_sub(1, Ordering::Relaxed);
        {
            let mut empties = self.empties.lock();
            if empties.len() < KEPT_EMPTIES {
                empties.push(span);
                return;
            }
        }
        self.dispose(span);
    }

    /// Returns a span to the arena, and its memory to the system.
    fn dispose(&self, span: Unused) {
        self.trim(span.as_owned(), 0);
        self.return_span(span);
    }

    /// Returns the memory of a span beyond its first `pages`, in which no object lies.
    fn trim(&self, span: &Owned, pages: u32) {
        let resident = self.spans.resident(span);
        if resident > pages {
            self.send_out(span, pages..resident);
            self.spans.set_resident(span, pages);
            self.uncharge(resident - pages);
        }
    }

    /// Returns the memory of every kept empty span.
    pub fn release_empties(&self) {
        // Locked until all is done: whoever comes meanwhile finds the memory gone, not the list
        // empty.
        let mut empties = self.empties.lock();
        for span in empties.drain(..) {
            self.dispose(span);
        }
    }

    /// The last object of some CPU's current span was freed: give the span up, unless its owner is
    /// at work on it.
    #[cold]
    fn drop_empty_current(&self, place: Place) {
        let cpu = percpu::current();
        // Most likely it is this CPU's.
        for cpu in self.current[cpu..].iter().chain(&self.current[..cpu]).filter_map(OnceLock::get) {
            let Some(mut current) = cpu[place.class].try_lock() else { continue };
            if current.as_ref().is_some_and(|span| span.number() == place.span) {
                if let Some(span) = current.take_if(|span| self.spans.used(span) == 0) {
                    self.give_up(span, place.class);
                }
                return;
            }
        }
    }

    fn currents(&self) -> impl Iterator<Item = &Currents> {
        self.current.iter().filter_map(OnceLock::get).map(|currents| &**currents)
    }

    /// Files every CPU's current span of a class.
    fn give_up_currents(&self, class: usize) {
        for cpu in self.currents() {
            let span = cpu[class].lock().take();
            if let Some(span) = span {
                self.give_up(span, class);
            }
        }
    }

    // ---- memory ---------------------------------------------------------------------------------

    #[inline]
    fn place(&self, location: u64) -> Place {
        let span = (location / UNITS_PER_SPAN) as u32;
        let class = self.spans.class_of(span);
        Place { span, object: CLASS[class].index_at(location % UNITS_PER_SPAN), class }
    }

    // ---- limits and statistics ------------------------------------------------------------------

    /// Pages the pool may hold; `u64::MAX` is no limit. Lowering it below the present use evicts
    /// nothing.
    pub fn set_limit_pages(&self, pages: u64) {
        // Relaxed: counts from the next allocation on.
        self.limit_pages.store(pages, Ordering::Relaxed);
    }

    /// Whether what is beside the pool takes the whole limit.
    pub fn is_full_beside(&self) -> bool {
        // Relaxed: as in `charge`. Several at one time can pass the limit by a page each.
        self.beside_pages.load(Ordering::Relaxed) >= self.limit_pages.load(Ordering::Relaxed)
    }

    /// Who is told of growth above [`set_alarm_pages`](Self::set_alarm_pages). Once.
    pub fn on_alarm(&self, alarm: Alarm) {
        let first = self.alarm.set(alarm).is_ok();
        debug_assert!(first, "a pool has one alarm");
    }

    /// Growth above so many pages is reported.
    pub fn set_alarm_pages(&self, pages: u64) {
        // Relaxed: counts from the next growth on.
        self.alarm_pages.store(pages, Ordering::Relaxed);
    }

    /// Pages in memory.
    pub fn pages(&self) -> u64 {
        // Relaxed: a statistic.
        self.pages.load(Ordering::Relaxed)
    }

    /// Most pages ever in memory or asked for, since [`reset_pages_max`](Self::reset_pages_max).
    pub fn pages_max(&self) -> u64 {
        // Relaxed: a statistic.
        self.pages_max.load(Ordering::Relaxed)
    }

    /// Sets the high-water mark to the present use.
    pub fn reset_pages_max(&self) {
        // Relaxed: a statistic.
        self.pages_max.store(self.pages(), Ordering::Relaxed);
    }

    /// Bytes of the back-references.
    pub fn backrefs_bytes(&self) -> u64 {
        self.backrefs.bytes()
    }

    /// Bytes of everything else that describes spans.
    pub fn metadata_bytes(&self) -> u64 {
        let currents = size_of_val(&*self.current) + self.currents().count() * size_of::<Currents>();
        self.spans.bytes() + self.backrefs.overhead_bytes() + currents as u64
    }
}

#[cold]
fn new_currents() -> Box<Currents> {
    Box::new(CachePadded::new(std::array::from_fn(|_| Mutex::default())))
}

/// Pages at the front of a span that reach to the end of an object.
fn pages_to_hold(class: &Class, object: usize) -> u32 {
    ((object as u32 + 1) * class.bytes).div_ceil(PAGE_BYTES as u32)
}
