//! Groups on the backing device: pages move there and back, and reclaim moves the objects.

use super::header::{Header, HeaderGuard};
use super::{
    GROUP_SLOTS, Groups, bytes_in, charged_bytes, counter, group_of, header_of, pieces_of, position_of,
    publish_pieces, share, store_pieces,
};
use crate::pool::{BackRef, Pool};
use freestone_core::device::{Error, Result};
use freestone_core::slot::{Kind, LEAF_SLOTS, Table, Word};
use freestone_spill::clean_copies::CopyContent;
use freestone_spill::layout::{self, GROUP_ALGORITHM, Place, UNIT_BYTES};

/// A thread's use of a group, in memory and possibly on the device. The thread must
/// [release](Groups::release) the hold.
#[must_use]
#[derive(Debug)]
pub(in crate::ram) struct Hold {
    group: u64,
    in_memory: u32,
    on_device: u32,
    /// Number of pages in the group's object.
    pages: u32,
}

impl Hold {
    /// Returns true if the group is on the device, and stays there until the hold is released.
    pub fn is_on_device(&self) -> bool {
        self.on_device > 0
    }

    pub fn pages(&self) -> usize {
        self.pages as usize
    }

    /// Returns the slot of the group's header.
    pub fn header(&self) -> BackRef {
        header_of(self.group)
    }

    /// Returns slot and content of the clean copy of the group, whose object is `object`.
    pub fn clean_copy<'o>(&self, object: &'o [u8]) -> ((u32, u64), CopyContent<'o>) {
        clean_copy(self.group, object)
    }

    /// Returns true if this is the word of a page of the group in memory.
    pub fn has(&self, word: Word) -> bool {
        word.is_grouped() && group_of(word) == self.group
    }
}

impl Groups {
    /// Holds the group of a page in memory, whose slot is locked. If the group is on the device too,
    /// it stays there.
    pub fn hold(&self, word: Word) -> Hold {
        debug_assert!(word.is_grouped());
        let group = group_of(word);
        let (_, header) = self.lock_header(group);
        let pages = header.get().pages;
        Hold { group, in_memory: 1, on_device: header.hold(), pages }
    }

    /// Releases a hold. If no page refers to the group any more, where it was held, the group is freed
    /// there.
    #[expect(clippy::needless_pass_by_value, reason = "a hold is released once")]
    pub fn release(&self, pool: &Pool, hold: Hold) {
        self.remove_users(pool, hold.group, (hold.in_memory, hold.on_device), None);
    }

    /// Copies the object of a held group to `object`. Returns the size in bytes; `None` if the object
    /// does not fit.
    pub fn copy_object(&self, pool: &Pool, hold: &Hold, object: &mut [u8]) -> Option<usize> {
        let first = hold.group * GROUP_SLOTS;
        let leaf = self.pieces.leaf(first)?;
        let mut len = 0;
        for slot in first + 1..=first + u64::from(self.peek_header(hold.group)?.pieces) {
            let guard = leaf.lock(slot);
            let piece = pool.object(&guard);
            object.get_mut(len..len + piece.len())?.copy_from_slice(piece);
            len += piece.len();
        }
        Some(len)
    }

    /// Allocates the slot of a group's place, which [`put_on_device`](Self::put_on_device) needs. The
    /// caller holds [`Pages::background`](crate::ram::memory::pages::Pages::background).
    ///
    /// # Errors
    /// [`Error::NoMemory`] if memory is short.
    pub fn prepare_place(&self, hold: &Hold) -> Result<()> {
        let mut leaves = self.numbers.lock().place_leaves;
        // Leaves are allocated in order, so that their number is known.
        while leaves * LEAF_SLOTS <= hold.group {
            self.places.leaf_or_new(leaves * LEAF_SLOTS)?;
            leaves += 1;
            self.numbers.lock().place_leaves = leaves;
        }
        Ok(())
    }

    /// Records that the object of a held group, of `bytes` bytes, is on the device at `unit`. The hold
    /// extends to the device. Returns false if the group is on the device already, at another place:
    /// the caller must free the object at `unit`.
    pub fn put_on_device(&self, hold: &mut Hold, unit: u64, bytes: usize) -> bool {
        let place = place_at(unit, bytes);
        debug_assert_eq!(hold.on_device, 0);
        let (_, header) = self.lock_header(hold.group);
        let is_first = header.put_on_device(|| self.set_place(hold.group, place));
        hold.on_device = 1;
        if is_first && let Some(store) = &self.store {
            store.count_written_back(0, u64::from(place.stored));
        }
        is_first
    }

    /// Moves a page, with a word that the [hold](Hold::has) is for, to the device, where the group is
    /// held. Returns the page's new word. The slot is locked.
    pub fn spill(&self, hold: &Hold, word: Word) -> Word {
        debug_assert!(hold.has(word) && hold.is_on_device());
        self.lock_header(hold.group).1.spill();
        self.counters.add(counter::PAGES, -1);
        self.count_spilled(1);
        Word::spilled_in_group(word.location())
    }

    /// Makes a page of a spilled group a user of the group in memory. Returns the page's new word;
    /// `None` if the group is not in memory. The page's slot is locked, or in flight, so the page stays
    /// a user on the device until its word [leaves](Self::leave) there.
    pub fn enter(&self, word: Word) -> Option<Word> {
        let group = group_of(word);
        let (leaf, header) = self.lock_header(group);
        let Header { pieces, pages, .. } = header.get();
        if !header.enter() {
            return None;
        }
        self.counters.add(counter::PAGES, 1);
        // A user now, so the pieces stay.
        let share = share(charged_bytes(bytes_in(leaf, group, pieces)), pages as usize, position_of(word));
        Some(Word::grouped(word.location(), share))
    }

    /// As [`enter`](Self::enter). Stores the group's `object` in memory if the group is only on the
    /// device.
    ///
    /// # Errors
    /// As [`Pool::store`]. Nothing is stored then.
    pub fn load(&self, pool: &Pool, word: Word, object: &[u8], reserved: u64) -> Result<Word> {
        if let Some(word) = self.enter(word) {
            return Ok(word);
        }
        let (group, first) = (group_of(word), group_of(word) * GROUP_SLOTS);
        let pieces = store_pieces(pool, object, first, reserved)?;
        let (leaf, header) = self.lock_header(group);
        debug_assert_eq!(header.get().pieces as usize, pieces_of(object.len()));
        if header.get().in_memory == 0 {
            publish_pieces(leaf, first, object, &pieces);
            self.counters.add(counter::BYTES, charged_bytes(object.len()) as i64);
            // A user until the page has entered.
            header.load();
            let entered = self.enter(word).ok_or(Error::NoSpace);
            self.remove_users(pool, group, (1, 0), None);
            return entered;
        }
        // Another thread has loaded the group meanwhile.
        drop(header);
        pieces[..pieces_of(object.len())].iter().for_each(|&piece| pool.free(piece));
        self.enter(word).ok_or(Error::NoSpace)
    }

    /// Returns the place of the object of a page of a spilled group. The page's slot is locked, or in
    /// flight.
    pub fn place(&self, word: Word) -> Option<Place> {
        self.place_of(group_of(word))
    }

    /// Holds the group with this header on the device, if its object is at `unit`. The number of
    /// another group is `None`, too.
    pub fn hold_at(&self, header: BackRef, unit: u64) -> Option<Hold> {
        let (group, first) = (header.slot() / GROUP_SLOTS, header.slot());
        let leaf = self.pieces.leaf(first).filter(|_| first.is_multiple_of(GROUP_SLOTS))?;
        let header = HeaderGuard::new(leaf.lock(first));
        let Header { on_device, pages, .. } = header.get();
        if on_device == 0 || self.place_of(group)?.unit != unit {
            return None;
        }
        header.hold_on_device();
        Some(Hold { group, in_memory: 0, on_device: 1, pages })
    }

    /// Records that the object of a group that is held on the device was copied to `unit`. Returns the
    /// former place, which the caller must free.
    pub fn move_on_device(&self, hold: &Hold, unit: u64) -> Option<Place> {
        let (_, _header) = self.lock_header(hold.group);
        let former = self.place_of(hold.group)?;
        self.set_place(hold.group, Place { unit, ..former });
        Some(former)
    }

    pub(super) fn place_of(&self, group: u64) -> Option<Place> {
        place_in(&self.places, group)
    }

    fn set_place(&self, group: u64, place: Place) {
        let Some(leaf) = self.places.leaf(group) else { unreachable!("group {group} has no place") };
        // The size is in units here, which fits the field of a word.
        leaf.lock(group).publish(Word::spilled(place.unit, place.stored / UNIT_BYTES as u32, 0));
    }

    pub(super) fn count_spilled(&self, pages: i64) {
        self.counters.add(counter::SPILLED_PAGES, pages);
        match &self.store {
            Some(store) if pages > 0 => store.count_written_back(pages as u64, 0),
            Some(store) => store.count_left(pages.unsigned_abs(), 0),
            None => {}
        }
    }
}

/// Returns the place of a group's object from the table of places.
pub(super) fn place_in(places: &Table, group: u64) -> Option<Place> {
    let word = places.leaf(group)?.peek(group);
    (word.kind() == Kind::Spilled).then(|| place_at(word.location(), word.spilled_bytes() * UNIT_BYTES))
}

/// Returns the place of a group's object of `bytes` bytes.
fn place_at(unit: u64, bytes: usize) -> Place {
    // Without the header's unit.
    let stored = (layout::units(bytes) as usize - 1) * UNIT_BYTES;
    Place { unit, stored: stored as u32, algorithm: GROUP_ALGORITHM }
}

/// Returns slot and content of the clean copy of a group with this `object`.
pub(super) fn clean_copy(group: u64, object: &[u8]) -> ((u32, u64), CopyContent<'_>) {
    let header = header_of(group);
    let content = CopyContent { header_owner: header.bits(), algorithm: GROUP_ALGORITHM, object };
    ((header.table(), header.slot()), content)
}
