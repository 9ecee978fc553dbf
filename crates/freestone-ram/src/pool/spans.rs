//! Which objects of which span are taken, and which spans of a class have room.
//!
//! # States of a span
//! * **Nobody's**: in the arena or among the kept empties. Class 0. [`Unused`] stands for it.
//! * **Owned**: one allocator (a CPU's current span, or the compactor) takes objects from it. Not
//!   listed. [`Owned`] stands for it: what only the owner may do asks for that.
//! * **Listed** under its class by tenths of fullness, or **full** (not listed, not owned).
//!
//! # Protocol
//! * Only the owner sets bits. Anyone who holds an object clears its bit, at any time, without a
//!   lock.
//! * `meta` holds the number of used objects together with owner and group, so that whoever frees
//!   an object learns, in the same atomic step, in which state the span was: where that leaves a
//!   listed or full span in the wrong group, the freer refiles it. The group itself is written only
//!   under the class's lock.
//! * `used` is raised before a bit is set and lowered after one is cleared: it is never below the
//!   number of set bits, so a span with `used == 0` is empty for good, and whoever sees that under
//!   the class's lock takes it away.
//!
//! [`Owned`] and [`Unused`] cannot be copied. One of them is made where a span leaves its list, and
//! goes where it is listed again, both under the class's lock; so a span never has two.
//!
//! Lock order: a class's `lists` is taken under a CPU's current-span lock; nothing is taken under
//! it.

use super::class::SPAN_OBJECTS;
use super::span_table::SpanTable;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, MutexGuard, OnceLock, Ordering};

const WORDS: usize = SPAN_OBJECTS / 64;
/// Fullness groups of spans with room: tenths.
pub const GROUPS: usize = 10;
const FULL: u32 = GROUPS as u32;

const USED_MASK: u32 = 0xFFFF;
const GROUP_SHIFT: u32 = 16;
const GROUP_MASK: u32 = 0xF << GROUP_SHIFT;
const OWNED: u32 = 1 << 31;

/// What is known of one span.
#[derive(Default)]
#[cfg_attr(not(loom), derive(zerocopy::FromZeros))]
pub struct Span {
    /// A set bit is a taken object, or a place beyond the class's last.
    bitmap: [AtomicU64; WORDS],
    /// used: 16, group: 4, owned: 1.
    meta: AtomicU32,
    /// Class plus one; 0 is nobody's. Written under the class's lock.
    class: AtomicU32,
    /// Pages at the front that are in memory. Written by the owner.
    resident: AtomicU32,
    /// Neighbours in the list, as span plus one. Guarded by the class's lock.
    next: AtomicU32,
    prev: AtomicU32,
}

/// The spans with room of one class. Heads are span plus one.
#[derive(Default)]
pub struct Lists {
    heads: [u32; GROUPS],
}

/// What a freed object left behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Freed {
    /// Nothing to do.
    Fine,
    /// The span is in the wrong group: call [`Spans::refile`].
    Refile,
    /// It was the last object of an owned span: its owner may want to give it up.
    EmptyOwned,
}

/// The right of a span's owner.
#[derive(Debug, PartialEq, Eq)]
pub struct Owned(u32);

/// A span that is nobody's: empty, and of no class. Whoever has this may give it to a class, or to
/// the arena.
#[derive(Debug, PartialEq, Eq)]
pub struct Unused(Owned);

impl Owned {
    /// The span's number.
    #[inline]
    pub fn number(&self) -> u32 {
        self.0
    }
}

impl Unused {
    /// The span's number.
    pub fn number(&self) -> u32 {
        self.0.0
    }

    /// The span's number; the span is the caller's to hand on, and nobody's witness is left.
    pub fn into_number(self) -> u32 {
        self.0.0
    }

    /// Its memory is its holder's as an owner's is.
    pub fn as_owned(&self) -> &Owned {
        &self.0
    }
}

mod fresh {
    #![expect(unsafe_code)]
    // UNSAFETY: nothing but the caller's word says that a number which comes from outside is a span
    // of nobody's.

    use super::{Owned, Unused};

    impl Unused {
        /// A span that was not there before.
        ///
        /// # Safety
        /// It is nobody's, and nobody has another witness of it: the arena has just handed it out,
        /// or all that was known of spans was forgotten.
        pub unsafe fn new(span: u32) -> Self {
            Self(Owned(span))
        }
    }
}

/// All spans of a pool.
pub struct Spans {
    table: SpanTable<Span>,
    classes: usize,
    /// By class, once there is a span.
    lists: OnceLock<Box<[Mutex<Lists>]>>,
}

fn group_of(used: u32, objects: u32) -> u32 {
    if used >= objects { FULL } else { used * GROUPS as u32 / objects }
}

fn group(meta: u32) -> u32 {
    (meta & GROUP_MASK) >> GROUP_SHIFT
}

impl Spans {
    /// No spans, `classes` classes.
    pub fn new(classes: usize) -> Self {
        Self { table: SpanTable::new(), classes, lists: OnceLock::new() }
    }

    /// What is known of a span that was [adopted](Self::adopt) before.
    #[inline]
    fn get(&self, span: u32) -> &Span {
        self.table.get(span)
    }

    fn lists(&self, class: usize) -> MutexGuard<'_, Lists> {
        self.lists.get_or_init(|| (0..self.classes).map(|_| Mutex::default()).collect())[class].lock()
    }

    /// Makes a span an empty one of `class`.
    pub fn adopt(&self, Unused(span): Unused, class: usize, objects: u32) -> Owned {
        let s = self.table.get_or_new(span.0);
        for (index, word) in s.bitmap.iter().enumerate() {
            let below = (objects as usize).saturating_sub(index * 64).min(64) as u32;
            let beyond = if below == 64 { 0 } else { u64::MAX << below };
            // Relaxed: nobody else reaches the span until it is disowned under the class's lock.
            word.store(beyond, Ordering::Relaxed);
        }
        let _lists = self.lists(class);
        // Relaxed: read by others under the class's lock only, or in `put` by the holder of an
        // object.
        s.meta.store(OWNED, Ordering::Relaxed);
        // Relaxed: as for meta.
        s.class.store(class as u32 + 1, Ordering::Relaxed);
        span
    }

    /// The class of a span that holds a live object.
    #[inline]
    pub fn class_of(&self, span: u32) -> usize {
        // Relaxed: constant while an object of the span lives.
        self.get(span).class.load(Ordering::Relaxed) as usize - 1
    }

    /// Pages at the front of a span that are in memory.
    #[inline]
    pub fn resident(&self, span: &Owned) -> u32 {
        // Relaxed: written by the span's owner, who calls this.
        self.get(span.0).resident.load(Ordering::Relaxed)
    }

    /// Notes how many pages are in memory.
    pub fn set_resident(&self, span: &Owned, pages: u32) {
        // Relaxed: read by the owner; the next one gets the span under a lock.
        self.get(span.0).resident.store(pages, Ordering::Relaxed);
    }

    /// The lowest free object of a span.
    #[inline]
    pub fn lowest_free(&self, span: &Owned) -> Option<usize> {
        self.get(span.0).bitmap.iter().enumerate().find_map(|(index, word)| {
            // Relaxed: a guess that stays true: only the owner, who calls this, sets bits.
            let free = !word.load(Ordering::Relaxed);
            (free != 0).then(|| index * 64 + free.trailing_zeros() as usize)
        })
    }

    /// Takes a free object.
    #[inline]
    pub fn take(&self, span: &Owned, object: usize) {
        let s = self.get(span.0);
        // Relaxed: a count; raised before the bit so that it is never below the bits.
        s.meta.fetch_add(1, Ordering::Relaxed);
        // Acquire: pairs with the Release in `put`: the last user of this place is done with it.
        let before = s.bitmap[object / 64].fetch_or(1 << (object % 64), Ordering::Acquire);
        debug_assert!(before & 1 << (object % 64) == 0, "object {object} of {span:?} is taken twice");
    }

    /// Gives an object back. Any thread that held it.
    #[inline]
    pub fn put(&self, span: u32, object: usize, objects: u32) -> Freed {
        let s = self.get(span);
        // Release: pairs with the Acquire in `take`.
        let before = s.bitmap[object / 64].fetch_and(!(1 << (object % 64)), Ordering::Release);
        debug_assert!(before & 1 << (object % 64) != 0, "object {object} of span {span} is freed twice");
        // AcqRel: Release orders the cleared bit before the count, for whoever empties the span;
        // Acquire orders the count before a refile's look at the rest.
        let meta = s.meta.fetch_sub(1, Ordering::AcqRel);
        let used = (meta & USED_MASK) - 1;
        if meta & OWNED != 0 {
            return if used == 0 { Freed::EmptyOwned } else { Freed::Fine };
        }
        if used == 0 || group_of(used, objects) != group(meta) { Freed::Refile } else { Freed::Fine }
    }

    /// Moves a span to the group it belongs to. `Some`: it is empty, off the lists, and the
    /// caller's to dispose of.
    pub fn refile(&self, span: u32, class: usize, objects: u32) -> Option<Unused> {
        let mut lists = self.lists(class);
        let s = self.get(span);
        // Relaxed: meta's group and owner, and the class, change only under this class's lock; a
        // span that left the class meanwhile shows another class here.
        if s.class.load(Ordering::Relaxed) != class as u32 + 1 {
            return None;
        }
        // Acquire: pairs with the AcqRel in `put`: an empty span's objects are all done with.
        let meta = s.meta.load(Ordering::Acquire);
        if meta & OWNED != 0 {
            return None;
        }
        self.unlink(&mut lists, span, group(meta));
        self.settle(&mut lists, Owned(span), objects)
    }

    /// Gives up a span. `Some`: it is empty and the caller's to dispose of.
    pub fn disown(&self, span: Owned, class: usize, objects: u32) -> Option<Unused> {
        let mut lists = self.lists(class);
        self.settle(&mut lists, span, objects)
    }

    /// Files an unlisted span by its present fullness, or takes it away when it is empty.
    fn settle(&self, lists: &mut Lists, span: Owned, objects: u32) -> Option<Unused> {
        let s = self.get(span.0);
        // Acquire: pairs with the AcqRel in `put`.
        let mut meta = s.meta.load(Ordering::Acquire);
        loop {
            let used = meta & USED_MASK;
            if used == 0 {
                // Relaxed: under the class's lock; no object is left whose freeing could race.
                s.meta.store(OWNED, Ordering::Relaxed);
                // Relaxed: under the class's lock.
                s.class.store(0, Ordering::Relaxed);
                return Some(Unused(span));
            }
            let to = group_of(used, objects);
            // AcqRel and Acquire: pair with `put`, which may lower the count at the same time; then
            // try again.
            match s.meta.compare_exchange(meta, used | to << GROUP_SHIFT, Ordering::AcqRel, Ordering::Acquire)
            {
                Ok(_) => {
                    self.link(lists, span.0, to);
                    return None;
                }
                Err(now) => meta = now,
            }
        }
    }

    /// Takes the fullest span with room for the caller to own.
    pub fn own_fullest(&self, class: usize) -> Option<Owned> {
        let mut lists = self.lists(class);
        let group = (0..GROUPS).rev().find(|&g| lists.heads[g] != 0)?;
        Some(self.own(&mut lists, group))
    }

    /// Takes the emptiest span with room for the caller to own.
    pub fn own_emptiest(&self, class: usize) -> Option<Owned> {
        let mut lists = self.lists(class);
        let group = (0..GROUPS).find(|&g| lists.heads[g] != 0)?;
        Some(self.own(&mut lists, group))
    }

    fn own(&self, lists: &mut Lists, group: usize) -> Owned {
        let span = lists.heads[group] - 1;
        self.unlink(lists, span, group as u32);
        // AcqRel: pairs with `put`: frees from here on see an owned span.
        self.get(span).meta.fetch_or(OWNED, Ordering::AcqRel);
        Owned(span)
    }

    fn link(&self, lists: &mut Lists, span: u32, group: u32) {
        let Some(head) = lists.heads.get_mut(group as usize) else { return };
        let s = self.get(span);
        // Relaxed: next and prev are guarded by the class's lock.
        s.prev.store(0, Ordering::Relaxed);
        // Relaxed: as above.
        s.next.store(*head, Ordering::Relaxed);
        if *head != 0 {
            // Relaxed: as above.
            self.get(*head - 1).prev.store(span + 1, Ordering::Relaxed);
        }
        *head = span + 1;
    }

    fn unlink(&self, lists: &mut Lists, span: u32, group: u32) {
        let Some(head) = lists.heads.get_mut(group as usize) else { return };
        let s = self.get(span);
        // Relaxed: guarded by the class's lock.
        let (next, prev) = (s.next.load(Ordering::Relaxed), s.prev.load(Ordering::Relaxed));
        if prev == 0 {
            *head = next;
        } else {
            // Relaxed: guarded by the class's lock.
            self.get(prev - 1).next.store(next, Ordering::Relaxed);
        }
        if next != 0 {
            // Relaxed: guarded by the class's lock.
            self.get(next - 1).prev.store(prev, Ordering::Relaxed);
        }
    }

    /// Whether an object is taken: a set bit may be cleared at any time, a clear one stays.
    pub fn is_taken(&self, span: &Owned, object: usize) -> bool {
        // Acquire: pairs with the Release in `put`.
        self.get(span.0).bitmap[object / 64].load(Ordering::Acquire) & 1 << (object % 64) != 0
    }

    /// Objects in use, from above: never less than there are.
    pub fn used(&self, span: &Owned) -> u32 {
        // Acquire: pairs with the AcqRel in `put`.
        self.get(span.0).meta.load(Ordering::Acquire) & USED_MASK
    }

    /// Whether a span belongs to `class` at this moment.
    pub fn belongs_to(&self, span: &Owned, class: usize) -> bool {
        // Relaxed: a look.
        self.get(span.0).class.load(Ordering::Relaxed) == class as u32 + 1
    }

    /// Bytes of the descriptors.
    #[cfg(not(loom))]
    pub fn bytes(&self) -> u64 {
        let lists = self.lists.get().map_or(0, |lists| size_of_val(&**lists));
        self.table.bytes() + lists as u64
    }
}
