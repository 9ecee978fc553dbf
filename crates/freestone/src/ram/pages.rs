//! One page at a time: how a slot's content is read, replaced and freed.

use super::Inner;
use super::stats::counter;
use crate::PAGE_BYTES;
use crate::codec::{Page, Scratch};
use crate::device::{Error, Result};
use crate::pool::BackRef;
use crate::slot::{Kind, Leaf, SlotGuard, Table, Word};

/// The page could not be worked on because it is in flight.
pub(super) struct Waits;

/// What an operation on one page comes to.
pub(super) type PageResult = std::result::Result<Result<()>, Waits>;

impl Inner {
    // ---- read ------------------------------------------------------------------------------------------------------

    /// Reads `into.len()` bytes from `from` of the slot's page.
    #[inline]
    pub(super) fn read_page(&self, leaf: Leaf<'_>, slot: u64, from: usize, into: &mut [u8]) -> PageResult {
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            return Err(Waits);
        }
        let result = if let Ok(page) = <&mut Page>::try_from(&mut *into) {
            self.load(&guard, page)
        } else {
            let mut page = [0; PAGE_BYTES];
            self.load(&guard, &mut page).map(|()| into.copy_from_slice(&page[from..from + into.len()]))
        };
        if result.is_err() {
            self.counters.add(counter::FAILED_READS, 1);
        }
        Ok(result)
    }

    /// The content of a locked slot, which is not in flight.
    #[inline]
    fn load(&self, guard: &SlotGuard<'_>, page: &mut Page) -> Result<()> {
        let word = guard.word();
        match word.kind() {
            Kind::Empty => page.fill(0),
            Kind::Same => fill(page, u64::from(word.location() as u32) * 0x1_0000_0001),
            Kind::Pattern => {
                fill(page, u64::from_ne_bytes(self.pool.object(guard).try_into().map_err(|_| Error::Media)?));
            }
            Kind::Compressed => return self.streams.decompress(self.pool.object(guard), page),
            Kind::Huge => page.copy_from_slice(self.pool.object(guard)),
            Kind::InFlight => return Err(Error::Media),
        }
        Ok(())
    }

    // ---- write -----------------------------------------------------------------------------------------------------

    /// Replaces a whole page. The new object is complete before the old one goes: a failure leaves the old data.
    #[inline]
    pub(super) fn write_page(&self, table: &Table, leaf: Leaf<'_>, slot: u64, page: &Page) -> PageResult {
        let new = match self.pack(table, slot, page) {
            Ok(new) => new,
            Err(error) => {
                self.counters.add(counter::FAILED_WRITES, 1);
                return Ok(Err(error));
            }
        };
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            drop(guard);
            self.release(new);
            return Err(Waits);
        }
        self.replace(guard, new);
        Ok(Ok(()))
    }

    /// Replaces a part of a page, under the slot's lock from the read to the write. `None` writes zeroes.
    pub(super) fn patch_page(
        &self,
        table: &Table,
        leaf: Leaf<'_>,
        slot: u64,
        from: usize,
        part: Part<'_>,
    ) -> PageResult {
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            return Err(Waits);
        }
        let mut page = [0; PAGE_BYTES];
        let new = self.load(&guard, &mut page).and_then(|()| {
            match part {
                Part::Data(data) => page[from..from + data.len()].copy_from_slice(data),
                Part::Zeroes(len) => page[from..from + len].fill(0),
            }
            self.pack(table, slot, &page)
        });
        match new {
            Ok(new) => {
                self.replace(guard, new);
                Ok(Ok(()))
            }
            Err(error) => {
                self.counters.add(counter::FAILED_WRITES, 1);
                Ok(Err(error))
            }
        }
    }

    /// Empties a slot.
    pub(super) fn free_page(&self, leaf: Leaf<'_>, slot: u64) -> std::result::Result<(), Waits> {
        if leaf.peek(slot) == Word::EMPTY {
            // A write that is going on is not ordered against this request: the slot may as well be empty after it.
            return Ok(());
        }
        let guard = leaf.lock(slot);
        if guard.word().kind() == Kind::InFlight {
            return Err(Waits);
        }
        if guard.word() != Word::EMPTY {
            self.counters.add(counter::NOTIFY_FREE, 1);
            self.replace(guard, Word::EMPTY);
        }
        Ok(())
    }

    /// Stores a page's content for a slot and returns the word that says so.
    #[inline]
    fn pack(&self, table: &Table, slot: u64, page: &Page) -> Result<Word> {
        let owner = BackRef::new(table.id(), slot);
        if let Some(pattern) = same_filled(page) {
            return if pattern as u32 == (pattern >> 32) as u32 {
                Ok(Word::same(pattern as u32))
            } else {
                self.pool.store(&pattern.to_ne_bytes(), owner).map(Word::pattern)
            };
        }
        let mut scratch = Scratch::new();
        match self.streams.compress(page, &mut scratch) {
            Some(object) => Ok(Word::compressed(self.pool.store(object, owner)?, object.len() as u32, 0)),
            None => self.pool.store(page, owner).map(Word::huge),
        }
    }

    #[inline]
    fn replace(&self, guard: SlotGuard<'_>, new: Word) {
        let old = guard.word();
        guard.publish(new);
        self.release(old);
        self.account(old, new);
    }

    /// Frees the object of a word that no slot holds.
    #[inline]
    pub(super) fn release(&self, word: Word) {
        if let Some(location) = word.object() {
            self.pool.free(location);
        }
    }
}

/// What is written into a part of a page.
#[derive(Clone, Copy)]
pub(super) enum Part<'a> {
    Data(&'a [u8]),
    Zeroes(usize),
}

/// The 64-bit pattern that the page repeats, if it does.
#[inline]
fn same_filled(page: &Page) -> Option<u64> {
    // First and last word tell most other pages apart at once, as in the kernel.
    if page[..8] != page[PAGE_BYTES - 8..] || page[..PAGE_BYTES - 8] != page[8..] {
        return None;
    }
    page[..8].try_into().ok().map(u64::from_ne_bytes)
}

fn fill(page: &mut Page, pattern: u64) {
    for word in page.chunks_exact_mut(8) {
        word.copy_from_slice(&pattern.to_ne_bytes());
    }
}
