//! Reader of one group's object, which decompresses no further than the last page that was read.

use crate::codec::{GroupReader, Page};
use freestone_core::device::{Error, Result};

/// A reader of the object of one group at a time.
pub(in crate::ram) struct ObjectReader {
    decoder: GroupReader,
    /// Number of bytes of the object that the decoder has used.
    used: usize,
}

impl ObjectReader {
    /// # Errors
    /// [`Error::NoMemory`] if memory is short.
    pub fn new() -> Result<Self> {
        Ok(Self { decoder: GroupReader::new()?, used: 0 })
    }

    /// Begins to read another object.
    pub fn begin(&mut self) {
        self.decoder.begin();
        self.used = 0;
    }

    /// Returns the page at `position`. Calls `read` to decompress the object from a byte on, if the
    /// page is not decompressed yet: `read` passes bytes to the decoder, and returns the number of
    /// bytes used, or `None` at the end of the object.
    ///
    /// # Errors
    /// [`Error::Media`] if the object is damaged. The caller must [`begin`](Self::begin) again.
    pub fn page(
        &mut self,
        position: usize,
        mut read: impl FnMut(usize, &mut dyn FnMut(&[u8]) -> Result<usize>) -> Result<Option<usize>>,
    ) -> Result<&Page> {
        let pages = position + 1;
        while self.decoder.pages() < pages {
            let decoder = &mut self.decoder;
            match read(self.used, &mut |bytes| decoder.read(bytes, pages))? {
                Some(0) if self.decoder.pages() < pages => return Err(Error::Media),
                Some(used) => self.used += used,
                None => {
                    // The decoder may hold back bytes that it has read.
                    self.decoder.read(&[], pages)?;
                    break;
                }
            }
        }
        self.decoder.page(position).ok_or(Error::Media)
    }

    /// As [`page`](Self::page), for an object in one piece.
    pub fn page_of(&mut self, object: &[u8], position: usize) -> Result<&Page> {
        self.page(position, |from, decode| match object.get(from..) {
            Some(rest) if !rest.is_empty() => decode(rest).map(Some),
            _ => Ok(None),
        })
    }

    /// Returns the memory use in bytes.
    pub fn bytes(&self) -> usize {
        self.decoder.bytes()
    }
}
