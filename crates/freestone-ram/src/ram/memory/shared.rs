//! Shared objects: pages with the same content that are stored once.
//!
//! # Storage
//! * Object `n` has two slots in a table of its own. Slot `2n` is the *header*, which counts the
//!   users of the object; slot `2n + 1` refers to the object. So compaction moves shared objects as
//!   it moves pages, by their back-references. No layer has this table: passes over the pages of
//!   devices do not see the objects. An object without users is freed, and its number is reused.
//! * The word of a page ([`Word::shared`]) states the object's number. The word can move to another
//!   table, as every word.
//!
//! # Charges
//! Each page is charged for the whole object, as if it had the object alone. So no charge changes
//! when another page joins or leaves, and no device can see from its charges what others store. The
//! memory that is saved belongs to the family: the sum of all charges is the memory of all objects
//! plus [`SharedSizes::saved_bytes`].
//!
//! # Life of an object
//! A page gives its own object to the table ([`share`](SharedObjects::share)) and is the first
//! user. Pages with the same stored bytes [`join`](SharedObjects::join). A thread that removes a
//! word from the last slot calls [`leave`](SharedObjects::leave), and the last user frees the
//! object. An only user can [take the object back](SharedObjects::take_back). The content never
//! changes. None of this allocates memory of the pool, so it works at the memory limit.
//!
//! The table keeps its leaves until the family ends, and reuses them.
//!
//! # Reads
//! While the slot of a page is locked, the page is a user, and so the object exists. A read copies
//! the object under the lock of the object's slot, and decompresses the copy. So readers of
//! different pages delay each other for a copy of at most 4096 bytes.
//!
//! Lock order: the slot of a page, a header, the object's slot, the pool's locks. `numbers` is a
//! leaf lock.

use std::sync::Arc;

use super::layer::LAYER_IDS;
use super::record::SharedTable;
use crate::codec::Page;
use crate::pool::backrefs::MAX_TABLE_ID;
use crate::pool::{BackRef, Pool};
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::kill_points::{self, KillPoint};
use freestone_core::mutants::{self, Mutant};
use freestone_core::percpu::Counters;
use freestone_core::slot::{Common, Kind, LEAF_SLOTS, SlotGuard, Table, Word};
use freestone_core::sync::{AtomicU64, Mutex, Ordering};

/// Table id of the shared objects.
pub(in crate::ram) const TABLE_ID: u32 = MAX_TABLE_ID - 1;
/// Number of slots for each object: the header, and the object.
const OBJECT_SLOTS: u64 = 2;
/// Bytes that a page is charged for an uncompressed object: as many as a word can state. They are
/// in the size class of a whole page.
const HUGE_CHARGE: usize = PAGE_BYTES - 1;
const _: () = assert!(TABLE_ID >= LAYER_IDS && LEAF_SLOTS.is_multiple_of(OBJECT_SLOTS));

/// Indices of the counters.
mod counter {
    pub const OBJECTS: usize = 0;
    pub const PAGES: usize = 1;
    pub const BYTES: usize = 2;
    pub const SAVED_BYTES: usize = 3;
    pub const SAVED_STORED: usize = 4;
    pub const COUNT: usize = 5;
}

/// The shared objects of a family (devices that share a memory pool).
pub(in crate::ram) struct SharedObjects {
    slots: Table,
    numbers: Mutex<Numbers>,
    counters: Counters<{ counter::COUNT }>,
    /// Time in milliseconds of the clock, or 0 before the first pass. All pages that were not accessed
    /// since then have been compared with others.
    compared_ms: AtomicU64,
    /// Bytes of the table of fingerprints.
    fingerprint_bytes: AtomicU64,
}

/// Numbers for new objects.
#[derive(Default)]
struct Numbers {
    free: Vec<u64>,
    next: u64,
}

/// Current sizes of a family's shared objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::ram) struct SharedSizes {
    pub objects: u64,
    /// Number of pages that refer to the objects.
    pub pages: u64,
    /// Bytes of pool memory of the objects.
    pub bytes: u64,
    /// Bytes of pool memory that the pages would use in addition without sharing.
    pub saved_bytes: u64,
    /// The same, without the rounding of the pool's size classes.
    pub saved_stored: u64,
    /// Bytes of the slot table.
    pub table_bytes: u64,
    pub fingerprint_bytes: u64,
}

/// Users of each shared object of a family that is adopted from another process, by number. The words of pages
/// show them; other objects are free, whatever their headers state.
pub(in crate::ram) struct ObjectUsers(Vec<u32>);

impl ObjectUsers {
    /// Returns the objects in a table, without users.
    pub fn new(slots: &Table) -> Self {
        let objects = slots.leaves_in_order() * LEAF_SLOTS / OBJECT_SLOTS;
        Self(vec![0; objects as usize])
    }

    /// Counts a page with this word, which shares an object. Returns false if the object does not exist.
    pub fn count(&mut self, word: Word) -> bool {
        let users = usize::try_from(word.shared_number()).ok().and_then(|number| self.0.get_mut(number));
        users.is_some_and(|users| {
            *users = users.saturating_add(1);
            true
        })
    }

    /// Stores the users in the headers, and empties the slots of objects without users. Returns the number of an
    /// object that has users and does not exist as the error.
    pub fn settle(&self, slots: &Table) -> std::result::Result<(), u64> {
        for (number, &users) in (0..).zip(&self.0) {
            let first = number * OBJECT_SLOTS;
            let leaf = slots.leaf(first).ok_or(number)?;
            if users > 0 && leaf.peek(first + 1).object().is_none() {
                return Err(number);
            }
            leaf.lock(first).publish(Word::same(users));
            if users == 0 {
                leaf.lock(first + 1).publish(Word::EMPTY);
            }
        }
        Ok(())
    }
}

/// A change of a page's word, for the accounts of its layer.
pub(in crate::ram) struct WordChange {
    pub old: Word,
    pub new: Word,
}

/// Returns the owner of a shared object.
pub(in crate::ram) fn owner_of(number: u64) -> BackRef {
    BackRef::new(TABLE_ID, number * OBJECT_SLOTS + 1)
}

/// Returns the number of the shared object that `owner` refers to; `None` if it is not one.
pub(in crate::ram) fn number_of(owner: BackRef) -> Option<u64> {
    (owner.table() == TABLE_ID).then(|| owner.slot() / OBJECT_SLOTS)
}

fn users_in(header: Word) -> u32 {
    debug_assert!(matches!(header.kind(), Kind::Same | Kind::Empty));
    header.location() as u32
}

/// Returns the word of a page that shares object `number`, instead of the object in `own`.
fn page_word(number: u64, own: Word) -> Word {
    let bytes = own.stored_bytes().min(HUGE_CHARGE) as u32;
    marked_as(own, Word::shared(number, bytes, own.algorithm() as u8))
}

/// Returns `word` with the age and marks of the page that has the word `page`.
fn marked_as(page: Word, word: Word) -> Word {
    let word = word.with_age(page.age()).with_idle(page.is_idle());
    if page.is_incompressible() { word.with_incompressible() } else { word }
}

/// Returns the word of an object alone, without the age and marks of its page.
fn object_word(own: Word) -> Word {
    match own.kind() {
        Kind::Huge => Word::huge(own.location()),
        _ => Word::compressed(own.location(), own.stored_bytes() as u32, own.algorithm() as u8),
    }
}

impl SharedObjects {
    /// `is_automatic`: passes in the background compare pages.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if memory is short.
    pub fn new(common: &Arc<Common>, is_automatic: bool) -> Result<Self> {
        Ok(Self::with(Table::new(TABLE_ID, Arc::clone(common))?, is_automatic))
    }

    fn with(slots: Table, is_automatic: bool) -> Self {
        Self {
            slots,
            numbers: Mutex::default(),
            counters: Counters::default(),
            compared_ms: AtomicU64::new(if is_automatic { 0 } else { u64::MAX }),
            fingerprint_bytes: AtomicU64::new(0),
        }
    }

    /// Records the purpose of the table for a process that adopts the family. Called before a page shares an
    /// object.
    pub fn record(&self) {
        SharedTable::SharedObjects.record(&self.slots);
    }

    /// Takes over a table that was [settled](ObjectUsers::settle).
    pub fn adopt(slots: Table, is_automatic: bool, users: &ObjectUsers) -> Self {
        let objects = Self::with(slots, is_automatic);
        let mut free = Vec::new();
        for (number, &users) in (0..).zip(&users.0) {
            let first = number * OBJECT_SLOTS;
            let Some(leaf) = objects.slots.leaf(first).filter(|_| users > 0) else {
                free.push(number);
                continue;
            };
            let stored = leaf.peek(first + 1).stored_bytes();
            objects.counters.add(counter::OBJECTS, 1);
            objects.counters.add(counter::PAGES, 1);
            objects.counters.add(counter::BYTES, Pool::charged_bytes(stored) as i64);
            objects.count_users(stored, i64::from(users) - 1);
        }
        // The lowest numbers are used first.
        free.reverse();
        *objects.numbers.lock() = Numbers { free, next: users.0.len() as u64 };
        objects
    }

    // ---- life of an object ------------------------------------------------------------------------

    /// Makes the object of a locked page, which has an object of its own, a shared one with this
    /// page as only user.
    ///
    /// # Errors
    /// [`Error::NoMemory`] if memory is short. Nothing is changed then.
    pub fn share(&self, pool: &Pool, page: SlotGuard<'_>) -> Result<(u64, WordChange)> {
        let old = page.word();
        let location = old.object().ok_or(Error::Media)?;
        let number = self.take_number().ok_or(Error::NoMemory)?;
        let first = number * OBJECT_SLOTS;
        let leaf = self.slots.leaf_or_new(first).inspect_err(|_| self.numbers.lock().free.push(number))?;
        let header = leaf.lock(first);
        let object = leaf.lock(first + 1);
        pool.set_owner(location, owner_of(number));
        object.publish(object_word(old));
        kill_points::pass(KillPoint::ObjectShared);
        header.publish(Word::same(1));
        let new = page_word(number, old);
        page.publish(new);
        self.counters.add(counter::OBJECTS, 1);
        self.counters.add(counter::PAGES, 1);
        self.counters.add(counter::BYTES, Pool::charged_bytes(old.stored_bytes()) as i64);
        Ok((number, WordChange { old, new }))
    }

    /// Makes a locked page, which has an object of its own, a user of object `number`, and frees
    /// its own object. Returns `None`, and changes nothing, if the objects differ.
    pub fn join(&self, pool: &Pool, number: u64, page: SlotGuard<'_>) -> Option<WordChange> {
        let old = page.word();
        let location = old.object()?;
        let first = number * OBJECT_SLOTS;
        let leaf = self.slots.leaf(first)?;
        let header = leaf.lock(first);
        let users = users_in(header.word());
        let joined = users.checked_add(1).filter(|_| users > 0)?;
        {
            let object = leaf.lock(first + 1);
            let form = |word: Word| (word.kind(), word.stored_bytes(), word.algorithm());
            let is_same = form(object.word()) == form(old) && pool.object(&object) == pool.object(&page);
            if !is_same && !mutants::on(Mutant::DedupBelievesFingerprint) {
                return None;
            }
        }
        header.publish(Word::same(joined));
        let new = page_word(number, old);
        page.publish(new);
        pool.free(location);
        self.count_users(old.stored_bytes(), 1);
        Some(WordChange { old, new })
    }

    /// Removes a page, whose word is in no slot any more, from the users of its object.
    pub fn leave(&self, pool: &Pool, word: Word) {
        let number = word.shared_number();
        let first = number * OBJECT_SLOTS;
        let Some(leaf) = self.slots.leaf(first) else { unreachable!("object {number} has no header") };
        let header = leaf.lock(first);
        let left = users_in(header.word()) - 1;
        let is_last = left == 0 || left == 1 && mutants::on(Mutant::SharedForgetsLastPage);
        if is_last {
            let object = leaf.lock(first + 1);
            let stored = object.word();
            object.publish(Word::EMPTY);
            if let Some(location) = stored.object() {
                pool.free(location);
                self.count_object_gone(stored);
            }
        } else {
            // Compaction may move the object now, which does not change its size.
            self.count_users(leaf.peek(first + 1).stored_bytes(), -1);
        }
        header.publish(Word::same(left));
        if is_last {
            self.numbers.lock().free.push(number);
        }
    }

    /// Gives a locked page its object back, with `owner` as owner, if the page is the only user.
    /// Otherwise returns `None` and changes nothing.
    pub fn take_back(&self, pool: &Pool, mut page: SlotGuard<'_>, owner: BackRef) -> Option<WordChange> {
        let old = page.word();
        let number = old.shared_number();
        let first = number * OBJECT_SLOTS;
        let leaf = self.slots.leaf(first)?;
        let header = leaf.lock(first);
        if !old.is_shared() || users_in(header.word()) != 1 {
            return None;
        }
        let object = leaf.lock(first + 1);
        let stored = object.word();
        pool.set_owner(stored.object()?, owner);
        let new = marked_as(old, stored);
        // First, so that the object is always in a slot.
        page.store(new);
        kill_points::pass(KillPoint::ObjectTakenBack);
        object.publish(Word::EMPTY);
        header.publish(Word::same(0));
        drop(page);
        self.count_object_gone(stored);
        self.numbers.lock().free.push(number);
        Some(WordChange { old, new })
    }

    fn take_number(&self) -> Option<u64> {
        let mut numbers = self.numbers.lock();
        if let Some(number) = numbers.free.pop() {
            return Some(number);
        }
        let next = numbers.next;
        numbers.next += u64::from(next < Word::PLACES / OBJECT_SLOTS);
        (next < numbers.next).then_some(next)
    }

    /// Counts users, besides the first, of an object of `stored` bytes that joined or (negative) left.
    fn count_users(&self, stored: usize, delta: i64) {
        self.counters.add(counter::PAGES, delta);
        self.counters.add(counter::SAVED_BYTES, delta * Pool::charged_bytes(stored) as i64);
        self.counters.add(counter::SAVED_STORED, delta * stored.min(HUGE_CHARGE) as i64);
    }

    /// Counts an object, given by its word, that lost its only user.
    fn count_object_gone(&self, object: Word) {
        self.counters.add(counter::OBJECTS, -1);
        self.counters.add(counter::PAGES, -1);
        self.counters.add(counter::BYTES, -(Pool::charged_bytes(object.stored_bytes()) as i64));
    }

    // ---- reads ------------------------------------------------------------------------------------

    /// Copies the object of a page's slot, which is locked, to `copy`. Returns the object's word,
    /// which states its form and size.
    ///
    /// # Errors
    /// [`Error::Media`] if the object does not exist.
    pub fn copy(&self, pool: &Pool, word: Word, copy: &mut Page) -> Result<Word> {
        let slot = owner_of(word.shared_number()).slot();
        let guard = self.slots.leaf(slot).ok_or(Error::Media)?.lock(slot);
        let object = pool.object(&guard);
        copy[..object.len()].copy_from_slice(object);
        Ok(guard.word())
    }

    /// Returns the present number of users of a page's object. Without the page's lock the number
    /// may be outdated.
    pub fn users_of(&self, word: Word) -> u32 {
        self.users(word.shared_number())
    }

    /// Returns the present number of users of object `number`; 0 if it does not exist.
    pub fn users(&self, number: u64) -> u32 {
        let first = number * OBJECT_SLOTS;
        self.slots.leaf(first).map_or(0, |leaf| users_in(leaf.peek(first)))
    }

    /// Locks and returns the slot of the object that `owner` refers to; `None` if it is not a shared
    /// object.
    pub fn object_slot(&self, owner: BackRef) -> Option<SlotGuard<'_>> {
        number_of(owner)?;
        self.slots.leaf(owner.slot()).map(|leaf| leaf.lock(owner.slot()))
    }

    // ---- passes and statistics --------------------------------------------------------------------

    /// Returns a time in milliseconds of the clock, or `None` before the first pass. Pages that were
    /// not accessed since then have been compared with others, or no pass compares them.
    pub fn compared_ms(&self) -> Option<u64> {
        // Relaxed: an earlier time only delays other passes.
        Some(self.compared_ms.load(Ordering::Relaxed)).filter(|ms| *ms > 0)
    }

    /// Records that a pass compared all pages that were not accessed since `ms`.
    pub fn set_compared_ms(&self, ms: u64) {
        // Relaxed: see `compared_ms`.
        self.compared_ms.store(ms, Ordering::Relaxed);
    }

    pub fn set_fingerprint_bytes(&self, bytes: u64) {
        // Relaxed: a statistic.
        self.fingerprint_bytes.store(bytes, Ordering::Relaxed);
    }

    pub fn sizes(&self) -> SharedSizes {
        let get = |counter| self.counters.get(counter);
        // Numbers are given out in order, and leaves and directories have the same number of entries.
        let leaves = (self.numbers.lock().next * OBJECT_SLOTS).div_ceil(LEAF_SLOTS);
        SharedSizes {
            objects: get(counter::OBJECTS),
            pages: get(counter::PAGES),
            bytes: get(counter::BYTES),
            saved_bytes: get(counter::SAVED_BYTES),
            saved_stored: get(counter::SAVED_STORED),
            table_bytes: (leaves + leaves.div_ceil(LEAF_SLOTS)) * PAGE_BYTES as u64,
            // Relaxed: a statistic.
            fingerprint_bytes: self.fingerprint_bytes.load(Ordering::Relaxed),
        }
    }
}
