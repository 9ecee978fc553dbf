//! Writes, replaces and frees the content of one slot.
//!
//! A new object of the same size class overwrites the old one under the slot's lock. The overwrite
//! needs no allocation, and halves the time of a rewrite if the old and the new content compress
//! alike. The overwrite cannot fail, as the new object is complete before it starts. A process that
//! dies during the copy leaves a torn page of a write that was never completed; in a family that
//! another process can adopt, [`redo`](crate::pool::redo) completes the copy.

use std::cell::Cell;

use crate::codec::{Page, Scratch};
use crate::pool::Pool;
use crate::ram::device::chain::View;
use crate::ram::device::parent::ReadEnd;
use crate::ram::memory::layer::Layer;
use crate::ram::memory::pages::Pages;
use crate::ram::memory::read::{MustWait, PageResult};
use crate::ram::waiting::job::Part;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::slot::{Kind, Leaf, SlotGuard, Word};

thread_local! {
    /// Size in bytes of the last object that this thread wrote: an estimate for the next object.
    static LAST_OBJECT_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// Result of a change to part of a page.
pub(super) enum PatchOutcome {
    Done,
    /// Nothing was changed: the old content is on a base, which must not be read under a slot lock.
    OnBase,
}

impl Pages {
    /// Replaces a whole page. The new object is complete before the old object is freed, so a
    /// failure leaves the old content.
    #[inline]
    pub(super) fn write_page(&self, view: &View, leaf: Leaf<'_>, slot: u64, page: &Page) -> PageResult {
        freestone_core::trail::step!();
        let seen = leaf.peek(slot);
        if Pool::same_class(LAST_OBJECT_BYTES.get(), seen.stored_bytes()) {
            // The new object will probably overwrite the old one: prefetch the old object during
            // compression.
            self.pool.prefetch_for_write(seen);
        }
        let mut scratch = Scratch::new();
        let packed = self.pack(page, &mut scratch);
        LAST_OBJECT_BYTES.set(packed.bytes().len());
        if self.fits(&packed, seen) {
            let guard = leaf.lock(slot);
            if guard.word().kind() == Kind::InFlight {
                return Err(MustWait);
            }
            if self.fits(&packed, guard.word()) && !view.must_preserve(slot) {
                self.overwrite(&view.layer, slot, guard, &packed);
                return Ok(Ok(()));
            }
        }
        let new = match self.store(&view.layer, slot, &packed) {
            Ok(new) => new,
            Err(error) => return self.wait_for_eviction_or_error(error),
        };
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            drop(guard);
            self.release(new);
            return Err(MustWait);
        }
        Ok(self.replace(view, slot, guard, new))
    }

    /// Replaces part of a page, from byte `from` on. Holds the slot's lock from read to write, so
    /// that concurrent changes of other parts are not lost.
    pub(super) fn patch_page(
        &self,
        view: &View,
        leaf: Leaf<'_>,
        slot: u64,
        from: usize,
        part: Part<'_>,
    ) -> PageResult<PatchOutcome> {
        let guard = leaf.lock(slot);
        let mut page = [0; PAGE_BYTES];
        let loaded = match guard.word().kind() {
            Kind::InFlight | Kind::Spilled => return Err(MustWait),
            Kind::Empty => match view.parent.page(slot, &mut page) {
                Ok(ReadEnd::Complete) => Ok(()),
                Ok(ReadEnd::MustWait) => return Err(MustWait),
                Ok(ReadEnd::Base(..) | ReadEnd::Staged(..)) => return Ok(Ok(PatchOutcome::OnBase)),
                Err(error) => Err(error),
            },
            _ => self.load(&guard, &mut page),
        };
        if let Err(error) = loaded {
            return Ok(Err(error));
        }
        part.put(from, &mut page);
        self.put_page(view, slot, guard, &page).map(|put| put.map(|()| PatchOutcome::Done))
    }

    /// Compresses a whole page and stores it in a locked slot.
    #[inline(never)]
    pub(super) fn put_page(&self, view: &View, slot: u64, guard: SlotGuard<'_>, page: &Page) -> PageResult {
        let mut scratch = Scratch::new();
        let packed = self.pack(page, &mut scratch);
        if self.fits(&packed, guard.word()) && !view.must_preserve(slot) {
            self.overwrite(&view.layer, slot, guard, &packed);
            return Ok(Ok(()));
        }
        match self.store(&view.layer, slot, &packed) {
            Ok(new) => Ok(self.replace(view, slot, guard, new)),
            Err(error) => self.wait_for_eviction_or_error(error),
        }
    }

    /// Returns the result of a write that failed with `error`: [`MustWait`] if an eviction may free
    /// space, else the error.
    #[cold]
    pub(super) fn wait_for_eviction_or_error<T>(&self, error: Error) -> PageResult<T> {
        if error == Error::NoSpace && self.store.is_some() { Err(MustWait) } else { Ok(Err(error)) }
    }

    /// Returns the leaf of a slot whose page needs no object. A new leaf counts towards the memory
    /// limit of the family (devices that share a memory pool), and leaves less of it to the pool.
    /// Even if the pool is full, such leaves are allocated until they alone reach the limit.
    ///
    /// # Errors
    /// [`Error::NoSpace`] if such leaves alone reach the limit; [`Error::NoMemory`] if the system
    /// has no memory.
    fn same_filled_leaf<'v>(&self, view: &'v View, slot: u64) -> Result<Leaf<'v>> {
        let table = view.layer.table();
        match table.leaf(slot) {
            Some(leaf) => Ok(leaf),
            None if self.pool.is_limit_used_outside() => Err(Error::NoSpace),
            None => table.same_filled_leaf(slot),
        }
    }

    /// Allocates the leaf of a slot for a write of `data`. If the data repeat a 32-bit pattern, the
    /// leaf counts as same-filled.
    #[cold]
    pub(super) fn new_leaf<'v>(&self, view: &'v View, slot: u64, data: &[u8]) -> Result<Leaf<'v>> {
        let pattern = <&Page>::try_from(data).ok().and_then(same_filled);
        if pattern.is_some_and(|pattern| pattern as u32 == (pattern >> 32) as u32) {
            return self.same_filled_leaf(view, slot);
        }
        view.layer.table().leaf_or_new(slot)
    }

    /// Returns the leaf of a slot to be emptied, and the slot's new word; `None` if the slot has no
    /// leaf and needs none. The new word is empty, or a zero page if the parent may have other
    /// content (not `over_zeroes`).
    #[inline]
    fn prepare_empty<'v>(
        &self,
        view: &'v View,
        slot: u64,
        over_zeroes: bool,
    ) -> Result<Option<(Leaf<'v>, Word)>> {
        if !over_zeroes && view.parent.reaches(slot) {
            return Ok(Some((self.same_filled_leaf(view, slot)?, Word::same(0))));
        }
        Ok(view.layer.table().leaf(slot).map(|leaf| (leaf, Word::EMPTY)))
    }

    /// Replaces a page with a zero page, which extents report as zeroes and not as a hole.
    pub(super) fn fill_page(&self, view: &View, slot: u64) -> PageResult {
        let leaf = match self.same_filled_leaf(view, slot) {
            Ok(leaf) => leaf,
            Err(error) => return self.wait_for_eviction_or_error(error),
        };
        let new = Word::same(0).with_age(self.ages.now());
        let guard = leaf.lock(slot);
        match guard.word() {
            word if word.kind() == Kind::InFlight => Err(MustWait),
            word if is_zeroes(word) => Ok(Ok(())),
            Word::EMPTY if !view.parent.reaches(slot) => {
                self.exchange_zeroes(view, guard, new);
                Ok(Ok(()))
            }
            _ => Ok(self.replace(view, slot, guard, new)),
        }
    }

    /// Replaces a zero page by a hole or a hole by a zero page. The content does not change, so no
    /// snapshot needs the old word.
    fn exchange_zeroes(&self, view: &View, guard: SlotGuard<'_>, new: Word) {
        let old = guard.word();
        guard.publish(new);
        view.layer.account(&self.layers, old, new);
    }

    /// Empties a slot. Returns true if the slot was not empty before. `over_zeroes`: the parent
    /// reads as zeroes here, so that no zero page must hide its content. If the leaf of a zero page
    /// finds no space, a hint (not `exact`) leaves the page unchanged.
    pub(super) fn free_page(
        &self,
        view: &View,
        slot: u64,
        over_zeroes: bool,
        exact: bool,
    ) -> PageResult<bool> {
        let (leaf, new) = match self.prepare_empty(view, slot, over_zeroes) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Ok(false)),
            Err(Error::NoSpace) if !exact => return Ok(Ok(false)),
            Err(error) => return self.wait_for_eviction_or_error(error),
        };
        let is_free = |word: Word| if new == Word::EMPTY { word == new } else { is_zeroes(word) };
        if is_free(leaf.peek(slot)) {
            // No lock is needed to find that the slot is empty already. A concurrent write has no
            // order relative to this request, so it may count as later.
            return Ok(Ok(false));
        }
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            return Err(MustWait);
        }
        if is_free(guard.word()) {
            return Ok(Ok(false));
        }
        if is_zeroes(guard.word()) {
            self.exchange_zeroes(view, guard, new);
            return Ok(Ok(true));
        }
        Ok(self.replace(view, slot, guard, new).map(|()| true))
    }

    /// Empties the slot of the page in which the device ends, as [`free_page`](Self::free_page).
    /// Returns `None` if the slot was not emptied. Then `is_end` is false under the slot's lock, so
    /// the page may have content beyond the request's end, or the new leaf found no space.
    #[cold]
    pub(in crate::ram) fn free_last_page(
        &self,
        view: &View,
        slot: u64,
        over_zeroes: bool,
        is_end: impl Fn() -> bool,
    ) -> PageResult<Option<bool>> {
        let (leaf, new) = match self.prepare_empty(view, slot, over_zeroes) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Ok(Some(false))),
            // Eviction can make space for the object of a partly zeroed page, but not for the leaf
            // of a zero page.
            Err(Error::NoSpace) => return Ok(Ok(None)),
            Err(error) => return Ok(Err(error)),
        };
        let guard = leaf.lock(slot);
        // Check the end under the lock: a write beyond the old end has read the new size before it
        // locks the slot.
        if !is_end() {
            return Ok(Ok(None));
        }
        match guard.word() {
            word if word == new || new != Word::EMPTY && is_zeroes(word) => Ok(Ok(Some(false))),
            word if word.kind() == Kind::InFlight => Err(MustWait),
            _ => Ok(self.replace(view, slot, guard, new).map(|()| Some(true))),
        }
    }

    /// Returns the form in which a page is stored: a pattern, compressed or uncompressed.
    #[inline]
    fn pack<'p>(&self, page: &'p Page, scratch: &'p mut Scratch) -> Packed<'p> {
        match same_filled(page) {
            Some(pattern) if pattern as u32 == (pattern >> 32) as u32 => Packed::Same(pattern as u32),
            Some(_) => Packed::Pattern(&page[..8]),
            None => {
                self.codecs.primary().compress(page, scratch).map_or(Packed::Huge(page), Packed::Compressed)
            }
        }
    }

    /// Stores a page's object, if it needs one, and returns the new word for the slot. The caller
    /// publishes the word.
    #[inline]
    fn store(&self, layer: &Layer, slot: u64, packed: &Packed<'_>) -> Result<Word> {
        let bytes = packed.bytes();
        let location = if bytes.is_empty() { 0 } else { self.store_object(layer, slot, bytes)? };
        Ok(packed.word(location).with_age(self.ages.now()))
    }

    /// Stores an object for a slot and returns the object's location in the pool.
    #[inline]
    pub(in crate::ram) fn store_object(&self, layer: &Layer, slot: u64, object: &[u8]) -> Result<u64> {
        if !layer.has_space(object.len()) {
            return Err(Error::NoSpace);
        }
        match self.pool.store(object, layer.owner(slot), self.layers.pages_reserved_for_others(layer)) {
            Err(Error::NoSpace) => self.store_after_freeing(layer, slot, object),
            stored => stored,
        }
    }

    /// Stores an object in a full pool: frees retired layers until the object fits or nothing is
    /// left to free.
    #[cold]
    fn store_after_freeing(&self, layer: &Layer, slot: u64, object: &[u8]) -> Result<u64> {
        loop {
            let freed = self.free_leaf_or_yield();
            match self.pool.store(object, layer.owner(slot), self.layers.pages_reserved_for_others(layer)) {
                Err(Error::NoSpace) if freed => {}
                stored => return stored,
            }
        }
    }

    /// Compresses a page, stores its object, and returns the new word for the slot. The caller
    /// publishes the word.
    #[inline(never)]
    pub(in crate::ram) fn store_page(&self, layer: &Layer, slot: u64, page: &Page) -> Result<Word> {
        let mut scratch = Scratch::new();
        self.store(layer, slot, &self.pack(page, &mut scratch))
    }

    /// Returns true if the new object can overwrite the object of `old`: both are of the same size
    /// class. While the pool is above a lowered limit nothing is stored, as in the kernel.
    #[inline]
    fn fits(&self, packed: &Packed<'_>, old: Word) -> bool {
        Pool::same_class(packed.bytes().len(), old.stored_bytes()) && !self.pool.exceeds_lowered_limit()
    }

    /// Overwrites the old object with content that [`fits`](Self::fits). Readers see the old or the
    /// new content, never a mix, as they take the slot's lock.
    #[inline]
    fn overwrite(&self, layer: &Layer, slot: u64, mut guard: SlotGuard<'_>, packed: &Packed<'_>) {
        let old = guard.word();
        let new = packed.word(old.location()).with_age(self.ages.now());
        match &self.redo {
            None => self.pool.overwrite(&mut guard, packed.bytes()),
            Some(redo) => redo.overwrite(&self.pool, &mut guard, layer.owner(slot), new, packed.bytes()),
        }
        guard.publish(new);
        layer.account(&self.layers, old, new);
    }

    /// Replaces the word of a locked slot. The old object moves to the snapshot that needs it, or
    /// is freed. On failure the object of `new` is freed.
    #[inline]
    fn replace(&self, view: &View, slot: u64, guard: SlotGuard<'_>, new: Word) -> Result<()> {
        view.replace(self, slot, guard, new).inspect_err(|_| self.release(new))
    }
}

enum Packed<'a> {
    Same(u32),
    /// The 8 bytes of a 64-bit pattern.
    Pattern(&'a [u8]),
    Compressed(&'a [u8]),
    Huge(&'a Page),
}

impl Packed<'_> {
    /// Returns the bytes of the object to store in the pool; an empty slice for a 32-bit pattern,
    /// which is stored in the slot.
    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Same(_) => &[],
            Self::Pattern(bytes) | Self::Compressed(bytes) => bytes,
            Self::Huge(page) => *page,
        }
    }

    /// Returns the slot's word for an object stored at `location`.
    #[inline]
    fn word(&self, location: u64) -> Word {
        match self {
            Self::Same(pattern) => Word::same(*pattern),
            Self::Pattern(_) => Word::pattern(location),
            Self::Compressed(object) => Word::compressed(location, object.len() as u32, 0),
            Self::Huge(_) => Word::huge(location),
        }
    }
}

fn is_zeroes(word: Word) -> bool {
    word.kind() == Kind::Same && word.location() == 0
}

/// Returns the 64-bit pattern that the page repeats, if any.
#[inline]
fn same_filled(page: &Page) -> Option<u64> {
    // Compare each word with the next. Pages without a pattern nearly always differ in their first
    // cache line. The kernel checks the last word first; here the cache miss for that would cost
    // more than it saves.
    let same = page[..PAGE_BYTES - 8] == page[8..];
    same.then(|| page[..8].try_into().ok().map(u64::from_ne_bytes)).flatten()
}
