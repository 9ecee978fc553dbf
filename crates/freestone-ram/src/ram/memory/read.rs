//! Reads of the content of one slot.

use super::page_search::has_own_object;
use super::pages::Pages;
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::slot::{Kind, SlotGuard, Word};

/// The operation on a page must wait. The content is on the backing device or being read from
/// there, a base would block, or memory is available only after an eviction.
pub(in crate::ram) struct MustWait;

/// Result of an operation on one page: the request must wait, or the operation succeeded or failed.
pub(in crate::ram) type PageResult<T = ()> = std::result::Result<Result<T>, MustWait>;

impl Pages {
    /// Reads the page of a locked slot, from byte `from` on, into `into`. Records the access in the
    /// page's age.
    #[expect(clippy::inline_always, reason = "a hit in memory is one function")]
    #[inline(always)]
    pub(in crate::ram) fn read_slot(&self, guard: SlotGuard<'_>, from: usize, into: &mut [u8]) -> PageResult {
        let word = guard.word();
        if matches!(word.kind(), Kind::InFlight | Kind::Spilled | Kind::Grouped) {
            return self.read_elsewhere(guard, from, into);
        }
        let result = match <&mut Page>::try_from(&mut *into) {
            Ok(page) => self.load_own(&guard, page),
            Err(_) => self.load_part(&guard, from, into),
        };
        // Only compressed and huge pages are evicted; others need no age.
        if has_own_object(word) {
            guard.publish(word.touched(self.ages.now()));
        }
        Ok(result)
    }

    /// As [`read_slot`](Self::read_slot), for a page without an object of its own in memory.
    #[cold]
    fn read_elsewhere(&self, guard: SlotGuard<'_>, from: usize, into: &mut [u8]) -> PageResult {
        let word = guard.word();
        if word.kind() != Kind::Grouped {
            return Err(MustWait);
        }
        let result = match <&mut Page>::try_from(&mut *into) {
            Ok(page) => self.load_grouped(word, page),
            Err(_) => self.load_part(&guard, from, into),
        };
        let now = self.ages.now();
        guard.publish(if word.is_shared() { word.touched(now) } else { word.read_in_group(now) });
        Ok(result)
    }

    /// Reads the whole page of a locked slot, which must be in memory.
    pub(in crate::ram) fn load(&self, guard: &SlotGuard<'_>, page: &mut Page) -> Result<()> {
        let word = guard.word();
        if word.kind() == Kind::Grouped { self.load_grouped(word, page) } else { self.load_own(guard, page) }
    }

    /// Reads a part of the page of a locked slot, from byte `from` on.
    #[inline(never)]
    fn load_part(&self, guard: &SlotGuard<'_>, from: usize, into: &mut [u8]) -> Result<()> {
        let mut page = [0; PAGE_BYTES];
        self.load(guard, &mut page).map(|()| into.copy_from_slice(&page[from..from + into.len()]))
    }

    /// As [`load`](Self::load), for a page that is not in a group and does not share its object.
    #[expect(clippy::inline_always, reason = "a hit in memory is one function")]
    #[inline(always)]
    fn load_own(&self, guard: &SlotGuard<'_>, page: &mut Page) -> Result<()> {
        let word = guard.word();
        match word.kind() {
            Kind::Empty => page.fill(0),
            Kind::Same => fill(page, u64::from(word.location() as u32) * 0x1_0000_0001),
            Kind::Pattern => {
                fill(page, u64::from_ne_bytes(self.pool.object(guard).try_into().map_err(|_| Error::Media)?));
            }
            Kind::Compressed => {
                self.pool.prefetch_for_read(word);
                return self.codecs.decompress(word.algorithm(), self.pool.object(guard), page);
            }
            Kind::Huge => page.copy_from_slice(self.pool.object(guard)),
            Kind::InFlight | Kind::Spilled | Kind::Grouped | Kind::Base => return Err(Error::Media),
        }
        Ok(())
    }

    /// Reads a page of a group, or one that shares its object. The page's slot is locked.
    #[inline(never)]
    fn load_grouped(&self, word: Word, page: &mut Page) -> Result<()> {
        if word.is_shared() {
            let mut copy = [0; PAGE_BYTES];
            let object = self.copy_shared(word, &mut copy)?;
            return self.unpack(object, &copy[..object.stored_bytes()], page);
        }
        self.groups().ok_or(Error::Media)?.read(&self.pool, word, page)
    }

    /// Copies the object that the page of a locked slot shares. Returns the object's word.
    ///
    /// # Errors
    /// [`Error::Media`] if the object does not exist.
    pub(in crate::ram) fn copy_shared(&self, word: Word, copy: &mut Page) -> Result<Word> {
        self.shared().ok_or(Error::Media)?.copy(&self.pool, word, copy)
    }

    /// Restores a page from a copy of its object. `word` is the slot's word: compressed or huge.
    pub(in crate::ram) fn unpack(&self, word: Word, object: &[u8], page: &mut [u8]) -> Result<()> {
        match word.kind() {
            Kind::Huge if object.len() == page.len() => {
                page.copy_from_slice(object);
                Ok(())
            }
            Kind::Compressed => {
                let page = page.try_into().map_err(|_| Error::Media)?;
                self.codecs.decompress(word.algorithm(), object, page)
            }
            _ => Err(Error::Media),
        }
    }

    /// Restores a page from its object or that of its group, read from the backing device. `held` is
    /// the slot's word before the flight. The flight of a page in a group is open.
    pub(in crate::ram) fn unpack_spilled(&self, held: Word, object: &[u8], page: &mut Page) -> Result<()> {
        if held.is_spilled_in_group() {
            return self.groups().ok_or(Error::Media)?.unpack(held, object, page);
        }
        if held.spilled_bytes() == PAGE_BYTES {
            page.copy_from_slice(object.get(..PAGE_BYTES).ok_or(Error::Media)?);
            return Ok(());
        }
        self.codecs.decompress(held.algorithm(), object, page)
    }
}

fn fill(page: &mut Page, pattern: u64) {
    page.as_chunks_mut().0.fill(pattern.to_ne_bytes());
}
