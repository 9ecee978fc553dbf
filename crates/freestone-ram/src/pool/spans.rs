//! States of spans and their objects, and the lists of spans with free objects.
//!
//! # States of a span
//! * **Unused**: in the arena or among the cached empty spans, without a class. Represented by
//!   [`UnusedSpan`].
//! * **Owned**: one allocator (a CPU's current span, or compaction) takes objects from the span.
//!   Not listed. Represented by [`OwnedSpan`], which operations of the owner require.
//! * **Listed** in the lists of its class by tenths of fullness, or **full** (neither listed nor
//!   owned).
//!
//! # Protocol
//! * Only the owner sets bits of the bitmap. The holder of an object may clear its bit at any time
//!   without a lock.
//! * `meta` contains the number of used objects together with owner flag and fullness group. A
//!   thread that frees an object therefore sees the state of the span in the same atomic step. The
//!   thread refiles a listed or full span that is now in the wrong group. The group is written only
//!   under the class's lock.
//! * `used` is raised before a bit is set and lowered after one is cleared, so it is never below
//!   the number of set bits. A span with `used == 0` stays empty. The thread that sees this under
//!   the class's lock removes the span.
//!
//! [`OwnedSpan`] and [`UnusedSpan`] cannot be copied. Leaving a list creates such a token, and
//! returning to a list consumes it, both under the class's lock. So a span never has two tokens.
//!
//! Lock order: a class's `lists` is taken under the lock of a CPU's current span, and no lock is
//! taken under `lists`.

use super::class::SPAN_OBJECTS;
use super::span_table::SpanTable;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, MutexGuard, OnceLock, Ordering};

const WORDS: usize = SPAN_OBJECTS / 64;
/// Number of fullness groups (tenths) of spans that have free objects.
pub const GROUPS: usize = 10;
const FULL: u32 = GROUPS as u32;

const USED_MASK: u32 = 0xFFFF;
const GROUP_SHIFT: u32 = 16;
const GROUP_MASK: u32 = 0xF << GROUP_SHIFT;
const OWNED: u32 = 1 << 31;

/// Allocation state of one span.
#[derive(Default)]
#[cfg_attr(not(loom), derive(zerocopy::FromZeros))]
pub struct Span {
    /// Bitmap of the objects. A set bit is a used object, or an index beyond the class's last
    /// object.
    bitmap: [AtomicU64; WORDS],
    /// Bits 0 to 15: number of used objects; bits 16 to 19: fullness group; bit 31: the span is
    /// owned.
    meta: AtomicU32,
    /// Class index plus one; 0 if the span is unused. Written under the class's lock.
    class: AtomicU32,
    /// Number of resident pages at the front of the span. Written by the owner.
    resident: AtomicU32,
    /// Neighbours in the list, as span number plus one; 0 if there is none. Guarded by the class's
    /// lock.
    next: AtomicU32,
    prev: AtomicU32,
}

/// Lists of a class's spans with free objects, by fullness group. A head is a span number plus one,
/// or 0.
#[derive(Default)]
pub struct Lists {
    heads: [u32; GROUPS],
}

/// Action that the caller must take after an object was freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FreeOutcome {
    Done,
    /// The span is in the wrong fullness group: call [`Spans::refile`].
    Refile,
    /// The last object of an owned span was freed: the owner may release the span.
    EmptyOwned,
}

#[derive(Debug, PartialEq, Eq)]
pub struct OwnedSpan(u32);

/// Token of an empty span without a class. The holder may assign the span to a class or return it
/// to the arena.
#[derive(Debug, PartialEq, Eq)]
pub struct UnusedSpan(OwnedSpan);

impl OwnedSpan {
    #[inline]
    pub fn number(&self) -> u32 {
        self.0
    }
}

impl UnusedSpan {
    pub fn number(&self) -> u32 {
        self.0.0
    }

    /// Consumes the token and returns the number of the span.
    pub fn into_number(self) -> u32 {
        self.0.0
    }

    /// Returns the token as that of an owner, for access to the span's memory.
    pub fn as_owned_span(&self) -> &OwnedSpan {
        &self.0
    }
}

mod fresh {
    #![expect(unsafe_code)]
    // UNSAFETY: only the caller can guarantee that a number from outside is an unused span.

    use super::{OwnedSpan, UnusedSpan};

    impl UnusedSpan {
        /// Creates the token of the unused span with number `span`.
        ///
        /// # Safety
        /// The span must be unused and have no other token: the arena has just returned it, or all
        /// span state was dropped.
        pub unsafe fn new(span: u32) -> Self {
            Self(OwnedSpan(span))
        }
    }
}

pub struct Spans {
    table: SpanTable<Span>,
    classes: usize,
    /// Lists by class, allocated with the first span of the pool.
    lists: OnceLock<Box<[Mutex<Lists>]>>,
}

fn group_of(used: u32, objects: u32) -> u32 {
    if used >= objects { FULL } else { used * GROUPS as u32 / objects }
}

fn group(meta: u32) -> u32 {
    (meta & GROUP_MASK) >> GROUP_SHIFT
}

impl Spans {
    pub fn new(classes: usize) -> Self {
        Self { table: SpanTable::new(), classes, lists: OnceLock::new() }
    }

    /// Returns the metadata of a span that was [adopted](Self::adopt) before.
    #[inline]
    fn get(&self, span: u32) -> &Span {
        self.table.get(span)
    }

    fn lists(&self, class: usize) -> MutexGuard<'_, Lists> {
        self.lists.get_or_init(|| (0..self.classes).map(|_| Mutex::default()).collect())[class].lock()
    }

    /// Assigns an unused span to the class `class`, with room for `objects` objects.
    pub fn adopt(&self, UnusedSpan(span): UnusedSpan, class: usize, objects: u32) -> OwnedSpan {
        let s = self.table.get_or_new(span.0);
        for (index, word) in s.bitmap.iter().enumerate() {
            let below = (objects as usize).saturating_sub(index * 64).min(64) as u32;
            let beyond = if below == 64 { 0 } else { u64::MAX << below };
            // Relaxed: no other thread can reach the span until it is disowned under the class's
            // lock.
            word.store(beyond, Ordering::Relaxed);
        }
        let _lists = self.lists(class);
        // Relaxed: other threads read the value only under the class's lock, or in `put` while they
        // hold an object.
        s.meta.store(OWNED, Ordering::Relaxed);
        // Relaxed: other threads read the value only while they hold an object, or under the
        // class's lock.
        s.class.store(class as u32 + 1, Ordering::Relaxed);
        span
    }

    /// Returns the class index of a span that has a used object.
    #[inline]
    pub fn class_of(&self, span: u32) -> usize {
        // Relaxed: the value is constant while the span has a used object.
        self.get(span).class.load(Ordering::Relaxed) as usize - 1
    }

    #[inline]
    pub fn resident(&self, span: &OwnedSpan) -> u32 {
        // Relaxed: written by the span's owner, which is the caller.
        self.get(span.0).resident.load(Ordering::Relaxed)
    }

    pub fn set_resident(&self, span: &OwnedSpan, pages: u32) {
        // Relaxed: read by the owner only; the next owner receives the span under a lock.
        self.get(span.0).resident.store(pages, Ordering::Relaxed);
    }

    /// Returns the index of the lowest free object of a span; `None` if all are used.
    #[inline]
    pub fn lowest_free(&self, span: &OwnedSpan) -> Option<usize> {
        freestone_core::trail::step!();
        self.get(span.0).bitmap.iter().enumerate().find_map(|(index, word)| {
            // Relaxed: a free object stays free, as only the owner (the caller) sets bits.
            let free = !word.load(Ordering::Relaxed);
            (free != 0).then(|| index * 64 + free.trailing_zeros() as usize)
        })
    }

    #[inline]
    pub fn take(&self, span: &OwnedSpan, object: usize) {
        let s = self.get(span.0);
        // Relaxed: raised before the bit is set, so that the count is never below the number of set
        // bits.
        s.meta.fetch_add(1, Ordering::Relaxed);
        // Acquire: pairs with the Release in `put`, so that the object's last user has finished.
        let before = s.bitmap[object / 64].fetch_or(1 << (object % 64), Ordering::Acquire);
        debug_assert!(before & 1 << (object % 64) == 0, "object {object} of {span:?} is taken twice");
    }

    /// Frees an object. Called by the thread that holds the object.
    #[inline]
    pub fn put(&self, span: u32, object: usize, objects: u32) -> FreeOutcome {
        let s = self.get(span);
        // Release: pairs with the Acquire in `take`.
        let before = s.bitmap[object / 64].fetch_and(!(1 << (object % 64)), Ordering::Release);
        debug_assert!(before & 1 << (object % 64) != 0, "object {object} of span {span} is freed twice");
        // AcqRel: Release orders the cleared bit before the count, for the thread that removes the
        // empty span. Acquire orders the count before the reads of a refile.
        let meta = s.meta.fetch_sub(1, Ordering::AcqRel);
        let used = (meta & USED_MASK) - 1;
        if meta & OWNED != 0 {
            return if used == 0 { FreeOutcome::EmptyOwned } else { FreeOutcome::Done };
        }
        if used == 0 || group_of(used, objects) != group(meta) {
            FreeOutcome::Refile
        } else {
            FreeOutcome::Done
        }
    }

    /// Moves a span to the right fullness group. If the span is empty, unlists and returns the
    /// span, which the caller must recycle.
    pub fn refile(&self, span: u32, class: usize, objects: u32) -> Option<UnusedSpan> {
        let mut lists = self.lists(class);
        let s = self.get(span);
        // Relaxed: group, owner flag and class change only under this class's lock. A span that has
        // left the class has another value here.
        if s.class.load(Ordering::Relaxed) != class as u32 + 1 {
            return None;
        }
        // Acquire: pairs with the AcqRel in `put`, so that the users of an empty span's objects
        // have finished.
        let meta = s.meta.load(Ordering::Acquire);
        if meta & OWNED != 0 {
            return None;
        }
        self.unlink(&mut lists, span, group(meta));
        self.file_span(&mut lists, OwnedSpan(span), objects)
    }

    /// Lists an owned span. If the span is empty, returns the span instead, which the caller must
    /// recycle.
    pub fn disown(&self, span: OwnedSpan, class: usize, objects: u32) -> Option<UnusedSpan> {
        let mut lists = self.lists(class);
        self.file_span(&mut lists, span, objects)
    }

    /// Lists an unlisted span by its fullness, or returns the span if it is empty.
    fn file_span(&self, lists: &mut Lists, span: OwnedSpan, objects: u32) -> Option<UnusedSpan> {
        let s = self.get(span.0);
        // Acquire: pairs with the AcqRel in `put`, so that the users of an empty span's objects
        // have finished.
        let mut meta = s.meta.load(Ordering::Acquire);
        loop {
            let used = meta & USED_MASK;
            if used == 0 {
                // Relaxed: written under the class's lock, and no object is left that could be
                // freed concurrently.
                s.meta.store(OWNED, Ordering::Relaxed);
                // Relaxed: written under the class's lock.
                s.class.store(0, Ordering::Relaxed);
                return Some(UnusedSpan(span));
            }
            let to = group_of(used, objects);
            // AcqRel and Acquire: pair with `put`, which may lower the count concurrently; the
            // exchange then fails and is retried.
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

    /// Removes the fullest span with free objects from its list, and makes the caller its owner;
    /// `None` if no span is listed.
    pub fn own_fullest(&self, class: usize) -> Option<OwnedSpan> {
        let mut lists = self.lists(class);
        let group = (0..GROUPS).rev().find(|&g| lists.heads[g] != 0)?;
        Some(self.own(&mut lists, group))
    }

    /// Removes the emptiest listed span from its list, and makes the caller its owner; `None` if no
    /// span is listed.
    pub fn own_emptiest(&self, class: usize) -> Option<OwnedSpan> {
        let mut lists = self.lists(class);
        let group = (0..GROUPS).find(|&g| lists.heads[g] != 0)?;
        Some(self.own(&mut lists, group))
    }

    fn own(&self, lists: &mut Lists, group: usize) -> OwnedSpan {
        let span = lists.heads[group] - 1;
        self.unlink(lists, span, group as u32);
        // AcqRel: pairs with `put`, so that later frees find an owned span.
        self.get(span).meta.fetch_or(OWNED, Ordering::AcqRel);
        OwnedSpan(span)
    }

    fn link(&self, lists: &mut Lists, span: u32, group: u32) {
        let Some(head) = lists.heads.get_mut(group as usize) else { return };
        let s = self.get(span);
        // Relaxed: next and prev are guarded by the class's lock.
        s.prev.store(0, Ordering::Relaxed);
        // Relaxed: guarded by the class's lock.
        s.next.store(*head, Ordering::Relaxed);
        if *head != 0 {
            // Relaxed: guarded by the class's lock.
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

    /// Returns true if an object is used at this moment. A used object may be freed at any time; a
    /// free object stays free.
    pub fn is_taken(&self, span: &OwnedSpan, object: usize) -> bool {
        // Acquire: pairs with the Release in `put`, so that the last user of a free object has
        // finished.
        self.get(span.0).bitmap[object / 64].load(Ordering::Acquire) & 1 << (object % 64) != 0
    }

    /// Returns an upper bound of the number of used objects in a span.
    pub fn used(&self, span: &OwnedSpan) -> u32 {
        // Acquire: pairs with the AcqRel in `put`, so that the users of an empty span's objects
        // have finished.
        self.get(span.0).meta.load(Ordering::Acquire) & USED_MASK
    }

    /// Returns true if a span is in the class `class` at this moment.
    pub fn belongs_to(&self, span: &OwnedSpan, class: usize) -> bool {
        // Relaxed: the caller needs only a momentary state.
        self.get(span.0).class.load(Ordering::Relaxed) == class as u32 + 1
    }

    #[cfg(not(loom))]
    pub fn bytes(&self) -> u64 {
        let lists = self.lists.get().map_or(0, |lists| size_of_val(&**lists));
        self.table.bytes() + lists as u64
    }
}
