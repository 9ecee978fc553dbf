//! Reads of pages in groups. Each CPU has a reader, which keeps its group decompressed up to the last
//! page that was read.

use super::header::Header;
use super::object_reader::ObjectReader;
use super::{GROUP_SLOTS, Groups, PIECE_BYTES, group_of, position_of};
use crate::codec::Page;
use crate::pool::Pool;
use freestone_core::device::{Error, Result};
use freestone_core::slot::Word;
use freestone_core::sync::Ordering;

/// The group that a CPU reads.
pub(super) struct Reader {
    pub cpu: usize,
    pub object: Option<ObjectReader>,
}

impl Groups {
    /// Reads the page of a slot with this word. The slot is locked.
    ///
    /// # Errors
    /// [`Error::Media`] if the group is damaged, [`Error::NoMemory`] if the first read of a CPU
    /// finds no memory.
    pub fn read(&self, pool: &Pool, word: Word, page: &mut Page) -> Result<()> {
        let first = group_of(word) * GROUP_SLOTS;
        let leaf = self.pieces.leaf(first).ok_or(Error::Media)?;
        // The number of pieces does not change.
        let pieces = Header::of(leaf.peek(first)).pieces as usize;
        self.with_reader(word, |reader| {
            let read = reader.page(position_of(word), |from, decode| {
                let (piece, offset) = (from / PIECE_BYTES, from % PIECE_BYTES);
                if piece >= pieces {
                    return Ok(None);
                }
                let guard = leaf.lock(first + 1 + piece as u64);
                match pool.object(&guard).get(offset..).ok_or(Error::Media)? {
                    [] => Ok(None),
                    rest => decode(rest).map(Some),
                }
            });
            read.map(|read| page.copy_from_slice(read))
        })
    }

    /// Reads a page from its group's `object`, which was read from the device. The page's slot is
    /// locked, or in flight.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    pub fn unpack(&self, word: Word, object: &[u8], page: &mut Page) -> Result<()> {
        self.with_reader(word, |reader| {
            reader.page_of(object, position_of(word)).map(|read| page.copy_from_slice(read))
        })
    }

    /// Calls `read` with this CPU's reader, which continues if it has the page's group. The page is a
    /// user of the group.
    fn with_reader(&self, word: Word, read: impl FnOnce(&mut ObjectReader) -> Result<()>) -> Result<()> {
        let group = group_of(word);
        let mut reader = self.readers.lock();
        let Reader { cpu, object } = &mut *reader;
        let object = match object {
            Some(object) => object,
            None => object.insert(ObjectReader::new()?),
        };
        let in_reader = &self.in_reader[*cpu];
        if in_reader.load(Ordering::SeqCst) != group + 1 {
            object.begin();
            in_reader.store(group + 1, Ordering::SeqCst);
        }
        let done = read(object);
        if done.is_err() {
            in_reader.store(0, Ordering::SeqCst);
        }
        done
    }
}
