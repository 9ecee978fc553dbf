//! Buffers of a connection that were used, for its next requests: memory from the allocator would be
//! zeroed first, page by page.

use freestone_core::device::{IoBuf, Result};

/// Bytes that are kept at most.
pub const MAX_SPARE_BYTES: usize = 1 << 20;
/// Smaller ones are left to the allocator, which has them at hand.
const MIN_KEPT_BYTES: usize = 16 << 10;
/// How many are looked at for one that fits.
const LOOKS: usize = 4;

/// Spare buffers, the last used one last. What they hold was this client's.
#[derive(Debug, Default)]
pub struct Buffers {
    spare: Vec<IoBuf>,
    bytes: usize,
}

impl Buffers {
    /// A buffer of `len` bytes, of which nothing is to be shown that was not written before.
    ///
    /// # Errors
    /// No memory is left.
    pub fn take(&mut self, len: usize) -> Result<IoBuf> {
        let fits = |buffer: &IoBuf| buffer.capacity() >= len && buffer.capacity() / 2 <= len;
        let found = self.spare.iter().rev().take(LOOKS).position(fits);
        let Some(back) = found else { return IoBuf::zeroed(len) };
        let mut buffer = self.spare.remove(self.spare.len() - 1 - back);
        self.bytes -= buffer.capacity();
        buffer.show(len);
        Ok(buffer)
    }

    /// A copy of `data`.
    ///
    /// # Errors
    /// No memory is left.
    pub fn copy_of(&mut self, data: &[u8]) -> Result<IoBuf> {
        let mut buffer = self.take(data.len())?;
        buffer.copy_from_slice(data);
        Ok(buffer)
    }

    /// Keeps a buffer, or drops it where there are enough.
    pub fn give(&mut self, buffer: IoBuf) {
        let capacity = buffer.capacity();
        if capacity >= MIN_KEPT_BYTES && self.bytes + capacity <= MAX_SPARE_BYTES {
            self.bytes += capacity;
            self.spare.push(buffer);
        }
    }

    /// Bytes that are kept.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Keeps none.
    #[inline]
    pub fn clear(&mut self) {
        if self.bytes > 0 {
            self.spare.clear();
            self.bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_one_that_fits_is_used_again() {
        let mut buffers = Buffers::default();
        let mut first = buffers.take(128 << 10).unwrap();
        first[0] = 1;
        let mut second = buffers.take(100 << 10).unwrap();
        second[0] = 2;
        buffers.give(first);
        buffers.give(second);
        assert_eq!(buffers.take(65 << 10).unwrap()[0], 2);
        assert_eq!(buffers.take(128 << 10).unwrap()[0], 1);
        assert_eq!(buffers.take(128 << 10).unwrap()[0], 0);
    }

    #[test]
    fn what_is_kept_is_bounded() {
        let mut buffers = Buffers::default();
        let many: Vec<IoBuf> = (0..6).map(|_| buffers.take(256 << 10).unwrap()).collect();
        for buffer in many {
            buffers.give(buffer);
        }
        buffers.give(IoBuf::zeroed(4096).unwrap());
        assert_eq!((buffers.spare.len(), buffers.bytes), (4, MAX_SPARE_BYTES));
        // A large one is not used for little.
        assert_eq!(buffers.take(64 << 10).unwrap().capacity(), 64 << 10);
    }
}
