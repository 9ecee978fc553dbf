//! Reading the content of one slot.

use super::page_search::is_spillable;
use super::pages::Pages;
use crate::codec::Page;
use freestone_core::PAGE_BYTES;
use freestone_core::device::{Error, Result};
use freestone_core::slot::{Kind, SlotGuard, Word};

/// The page is not available at once: its content is on the backing device or being read from
/// there, a base would wait for a disk, or memory is only available after eviction.
pub(super) struct MustWait;

/// Result of an operation on one page.
pub(super) type PageResult<T = ()> = std::result::Result<Result<T>, MustWait>;

impl Pages {
    /// Reads `into.len()` bytes at byte `from` of a locked slot's page.
    #[expect(clippy::inline_always, reason = "a hit in memory is one function")]
    #[inline(always)]
    pub(super) fn read_slot(&self, guard: SlotGuard<'_>, from: usize, into: &mut [u8]) -> PageResult {
        let word = guard.word();
        if matches!(word.kind(), Kind::InFlight | Kind::Spilled) {
            return Err(MustWait);
        }
        let result = if let Ok(page) = <&mut Page>::try_from(&mut *into) {
            self.load(&guard, page)
        } else {
            let mut page = [0; PAGE_BYTES];
            self.load(&guard, &mut page).map(|()| into.copy_from_slice(&page[from..from + into.len()]))
        };
        // Pages that are never evicted need no age.
        if is_spillable(word) {
            guard.publish(word.touched(self.ages.now()));
        }
        Ok(result)
    }

    /// Reads the page of a locked slot, which must not be in flight.
    #[inline]
    pub(super) fn load(&self, guard: &SlotGuard<'_>, page: &mut Page) -> Result<()> {
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
            Kind::InFlight | Kind::Spilled | Kind::Base => return Err(Error::Media),
        }
        Ok(())
    }

    /// Restores a page from a copy of a compressed or huge slot's object.
    pub(super) fn unpack(&self, word: Word, object: &[u8], page: &mut [u8]) -> Result<()> {
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

    /// Restores a page from an object read from the backing device.
    pub(super) fn unpack_spilled(&self, held: Word, object: &[u8], page: &mut Page) -> Result<()> {
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
