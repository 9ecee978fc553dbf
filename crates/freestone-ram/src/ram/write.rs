//! One page at a time: how a slot's content is replaced and freed.

use std::cell::Cell;

use super::chain::View;
use super::job::Part;
use super::layer::Layer;
use super::pages::Pages;
use super::parent::Look;
use super::read::{PageResult, Waits};
use crate::codec::{Page, Scratch};
use crate::pool::Pool;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::slot::{Kind, Leaf, SlotGuard, Word};

thread_local! {
    /// Size of the last object that this thread wrote: a guess at the next one's.
    static LAST_OBJECT_BYTES: Cell<usize> = const { Cell::new(0) };
}

/// What changing a part of a page came to.
pub(super) enum Patched {
    Done,
    /// Nothing: the page lies on a base, which is not read under a lock.
    OnBase,
}

impl Pages {
    /// Replaces a whole page. The new content is complete before the old one goes: a failure leaves
    /// the old data.
    #[inline]
    pub(super) fn write_page(&self, view: &View, leaf: Leaf<'_>, slot: u64, page: &Page) -> PageResult {
        let seen = leaf.peek(slot);
        if Pool::same_class(LAST_OBJECT_BYTES.get(), seen.stored_bytes()) {
            // Then this one is likely to fit, too: its place may come nearer while we compress.
            self.pool.prefetch_for_write(seen);
        }
        let mut scratch = Scratch::new();
        let packed = self.pack(page, &mut scratch);
        LAST_OBJECT_BYTES.set(packed.bytes().len());
        if self.fits(&packed, seen) {
            let guard = leaf.lock(slot);
            if guard.word().kind() == Kind::InFlight {
                return Err(Waits);
            }
            if self.fits(&packed, guard.word()) && !view.must_preserve(slot) {
                self.overwrite(&view.layer, guard, &packed);
                return Ok(Ok(()));
            }
        }
        let new = match self.store(&view.layer, slot, &packed) {
            Ok(new) => new,
            Err(error) => return self.refused(error),
        };
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            drop(guard);
            self.release(new);
            return Err(Waits);
        }
        Ok(self.replace(view, slot, guard, new))
    }

    /// Replaces a part of a page, under the slot's lock from the read to the write.
    pub(super) fn patch_page(
        &self,
        view: &View,
        leaf: Leaf<'_>,
        slot: u64,
        from: usize,
        part: Part<'_>,
    ) -> PageResult<Patched> {
        let guard = leaf.lock(slot);
        let mut page = [0; PAGE_BYTES];
        let loaded = match guard.word().kind() {
            Kind::InFlight | Kind::Spilled => return Err(Waits),
            Kind::Empty => match view.parent.page(slot, &mut page) {
                Ok(Look::All) => Ok(()),
                Ok(Look::Waits) => return Err(Waits),
                Ok(Look::Base(..) | Look::Staged(..)) => return Ok(Ok(Patched::OnBase)),
                Err(error) => Err(error),
            },
            _ => self.load(&guard, &mut page),
        };
        if let Err(error) = loaded {
            return Ok(Err(error));
        }
        part.put(from, &mut page);
        self.put_page(view, slot, guard, &page).map(|put| put.map(|()| Patched::Done))
    }

    /// Puts a whole page into a locked slot.
    #[inline(never)]
    pub(super) fn put_page(&self, view: &View, slot: u64, guard: SlotGuard<'_>, page: &Page) -> PageResult {
        let mut scratch = Scratch::new();
        let packed = self.pack(page, &mut scratch);
        if self.fits(&packed, guard.word()) && !view.must_preserve(slot) {
            self.overwrite(&view.layer, guard, &packed);
            return Ok(Ok(()));
        }
        match self.store(&view.layer, slot, &packed) {
            Ok(new) => Ok(self.replace(view, slot, guard, new)),
            Err(error) => self.refused(error),
        }
    }

    /// What becomes of a write that could not be stored.
    #[cold]
    pub(super) fn refused<T>(&self, error: Error) -> PageResult<T> {
        if error == Error::NoSpace && self.store.is_some() { Err(Waits) } else { Ok(Err(error)) }
    }

    /// Returns the leaf of a slot, for a word that is all there is of its page. One that is made counts
    /// against the family's limit: the pool can grow less. Where the pool is full, marks go on until
    /// their leaves alone reach the limit.
    ///
    /// # Errors
    /// [`Error::NoSpace`] there, [`Error::NoMemory`].
    fn leaf_of_marks<'v>(&self, view: &'v View, slot: u64) -> Result<Leaf<'v>> {
        let table = view.layer.table();
        match table.leaf(slot) {
            Some(leaf) => Ok(leaf),
            None if self.pool.is_full_beside() => Err(Error::NoSpace),
            None => table.leaf_of_marks(slot),
        }
    }

    /// Makes the leaf of a slot to which `data` is written.
    ///
    /// # Errors
    /// As [`leaf_of_marks`](Self::leaf_of_marks).
    #[cold]
    pub(super) fn new_leaf<'v>(&self, view: &'v View, slot: u64, data: &[u8]) -> Result<Leaf<'v>> {
        let pattern = <&Page>::try_from(data).ok().and_then(same_filled);
        if pattern.is_some_and(|pattern| pattern as u32 == (pattern >> 32) as u32) {
            return self.leaf_of_marks(view, slot);
        }
        view.layer.table().leaf_or_new(slot)
    }

    /// The leaf of a slot that is to be emptied, if it needs one, and what the slot holds then:
    /// where something else than zeroes may lie below (the slot is not `bare`), that is covered with
    /// zeroes.
    #[inline]
    fn to_empty<'v>(&self, view: &'v View, slot: u64, is_bare: bool) -> Result<Option<(Leaf<'v>, Word)>> {
        if !is_bare && view.parent.reaches(slot) {
            return Ok(Some((self.leaf_of_marks(view, slot)?, Word::same(0))));
        }
        Ok(view.layer.table().leaf(slot).map(|leaf| (leaf, Word::EMPTY)))
    }

    /// Makes a page one of zeroes that is no hole.
    pub(super) fn fill_page(&self, view: &View, slot: u64) -> PageResult {
        let leaf = match self.leaf_of_marks(view, slot) {
            Ok(leaf) => leaf,
            Err(error) => return self.refused(error),
        };
        let new = Word::same(0).with_age(self.ages.now());
        let guard = leaf.lock(slot);
        match guard.word() {
            word if word.kind() == Kind::InFlight => Err(Waits),
            word if is_zeroes(word) => Ok(Ok(())),
            Word::EMPTY if !view.parent.reaches(slot) => {
                self.exchange_zeroes(view, guard, new);
                Ok(Ok(()))
            }
            _ => Ok(self.replace(view, slot, guard, new)),
        }
    }

    /// Puts another word for zeroes into a locked slot that reads as zeroes. Nobody sees a change, so
    /// nothing is kept for snapshots, and nothing is to be saved.
    fn exchange_zeroes(&self, view: &View, guard: SlotGuard<'_>, new: Word) {
        let old = guard.word();
        guard.publish(new);
        view.layer.account(&self.layers, old, new);
    }

    /// Empties a slot, over zeroes if it is `bare`. Returns whether there was anything. A hint (not
    /// `exact`) for which there is no room leaves the page as it is.
    pub(super) fn free_page(&self, view: &View, slot: u64, is_bare: bool, exact: bool) -> PageResult<bool> {
        let (leaf, new) = match self.to_empty(view, slot, is_bare) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Ok(false)),
            Err(Error::NoSpace) if !exact => return Ok(Ok(false)),
            Err(error) => return self.refused(error),
        };
        let is_free = |word: Word| if new == Word::EMPTY { word == new } else { is_zeroes(word) };
        if is_free(leaf.peek(slot)) {
            // A write that is going on is not ordered against this request: the slot may as well be
            // empty after it.
            return Ok(Ok(false));
        }
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            return Err(Waits);
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

    /// Empties the slot of the page within which the device ends, if it `is_end` still when nobody
    /// writes to it. `None`: it is not, so behind what is to be emptied there may be something.
    /// Else as [`free_page`](Self::free_page).
    #[cold]
    pub(super) fn free_end(
        &self,
        view: &View,
        slot: u64,
        is_bare: bool,
        is_end: impl Fn() -> bool,
    ) -> PageResult<Option<bool>> {
        let (leaf, new) = match self.to_empty(view, slot, is_bare) {
            Ok(Some(found)) => found,
            Ok(None) => return Ok(Ok(Some(false))),
            // A part of a page can be spilled, a mark cannot.
            Err(Error::NoSpace) => return Ok(Ok(None)),
            Err(error) => return Ok(Err(error)),
        };
        let guard = leaf.lock(slot);
        // Who writes behind the old end has seen the new size before it locked the slot.
        if !is_end() {
            return Ok(Ok(None));
        }
        match guard.word() {
            word if word == new || new != Word::EMPTY && is_zeroes(word) => Ok(Ok(Some(false))),
            word if word.kind() == Kind::InFlight => Err(Waits),
            _ => Ok(self.replace(view, slot, guard, new).map(|()| Some(true))),
        }
    }

    /// Finds the form in which a page is stored.
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

    /// Stores a page's content for a slot and returns the word that says so.
    #[inline]
    fn store(&self, layer: &Layer, slot: u64, packed: &Packed<'_>) -> Result<Word> {
        let bytes = packed.bytes();
        let location = if bytes.is_empty() { 0 } else { self.store_object(layer, slot, bytes)? };
        Ok(packed.word(location).with_age(self.ages.now()))
    }

    /// Stores an object for a slot and returns its location.
    #[inline]
    pub(super) fn store_object(&self, layer: &Layer, slot: u64, object: &[u8]) -> Result<u64> {
        if !layer.has_room(object.len()) {
            return Err(Error::NoSpace);
        }
        match self.pool.store(object, layer.owner(slot), self.layers.kept_from(layer)) {
            Err(Error::NoSpace) => self.store_after_freeing(layer, slot, object),
            stored => stored,
        }
    }

    /// As long as something is being freed in the background there may be room.
    #[cold]
    fn store_after_freeing(&self, layer: &Layer, slot: u64, object: &[u8]) -> Result<u64> {
        loop {
            let freed = self.help_to_free();
            match self.pool.store(object, layer.owner(slot), self.layers.kept_from(layer)) {
                Err(Error::NoSpace) if freed => {}
                stored => return stored,
            }
        }
    }

    /// Packs a page and stores it for a slot.
    #[inline(never)]
    pub(super) fn store_page(&self, layer: &Layer, slot: u64, page: &Page) -> Result<Word> {
        let mut scratch = Scratch::new();
        self.store(layer, slot, &self.pack(page, &mut scratch))
    }

    /// Whether the new content can go where the old object lies. Over its limit the pool takes
    /// nothing, as in the kernel.
    #[inline]
    fn fits(&self, packed: &Packed<'_>, old: Word) -> bool {
        Pool::same_class(packed.bytes().len(), old.stored_bytes()) && !self.pool.is_over_limit()
    }

    /// Puts content that [`fits`](Self::fits) into the place of the old object. Readers see the old
    /// or the new: they need the slot's lock.
    #[inline]
    fn overwrite(&self, layer: &Layer, mut guard: SlotGuard<'_>, packed: &Packed<'_>) {
        let old = guard.word();
        let new = packed.word(old.location()).with_age(self.ages.now());
        self.pool.overwrite(&mut guard, packed.bytes());
        guard.publish(new);
        layer.account(&self.layers, old, new);
    }

    /// Puts another word into a locked slot of the device; what it held goes to the snapshot that
    /// needs it, or is freed. On failure `new` is freed.
    #[inline]
    fn replace(&self, view: &View, slot: u64, guard: SlotGuard<'_>, new: Word) -> Result<()> {
        view.replace(self, slot, guard, new).inspect_err(|_| self.release(new))
    }
}

/// A page in the form in which it is stored.
enum Packed<'a> {
    /// One 32-bit pattern.
    Same(u32),
    /// One 64-bit pattern: its 8 bytes.
    Pattern(&'a [u8]),
    Compressed(&'a [u8]),
    Huge(&'a Page),
}

impl Packed<'_> {
    /// What goes to the pool; nothing for a pattern of 32 bits.
    #[inline]
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Same(_) => &[],
            Self::Pattern(bytes) | Self::Compressed(bytes) => bytes,
            Self::Huge(page) => *page,
        }
    }

    /// The slot's word, with the bytes at `location`.
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

/// Whether a slot with this word holds a page of zeroes.
fn is_zeroes(word: Word) -> bool {
    word.kind() == Kind::Same && word.location() == 0
}

/// The 64-bit pattern that the page repeats, if it does.
#[inline]
fn same_filled(page: &Page) -> Option<u64> {
    // Each word equals the next one. Nearly every other page differs in its first line. (The kernel
    // looks at the last word first; here that is a cache miss more than it saves.)
    let same = page[..PAGE_BYTES - 8] == page[8..];
    same.then(|| page[..8].try_into().ok().map(u64::from_ne_bytes)).flatten()
}
