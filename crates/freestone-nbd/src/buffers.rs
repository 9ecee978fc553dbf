//! Used buffers of a connection, kept for its next requests. The allocator would zero new memory page by
//! page.

use freestone_core::device::{IoBuf, Result};

/// Largest total size of spare buffers, in bytes.
pub const MAX_SPARE_BYTES: usize = 1 << 20;
/// Smallest buffer kept, in bytes. The allocator serves smaller ones quickly.
const MIN_KEPT_BYTES: usize = 16 << 10;
/// Maximum number of spare buffers examined for a fitting one.
const MAX_PROBES: usize = 4;

/// Spare buffers, the most recently used last. They contain data of this client only.
#[derive(Debug, Default)]
pub struct Buffers {
    spare: Vec<IoBuf>,
    bytes: usize,
}

impl Buffers {
    /// Returns a buffer of `len` bytes. Its content may be old, so the caller must overwrite bytes before
    /// sending them.
    ///
    /// # Errors
    /// Out of memory.
    pub fn take(&mut self, len: usize) -> Result<IoBuf> {
        let fits = |buffer: &IoBuf| buffer.capacity() >= len && buffer.capacity() / 2 <= len;
        let found = self.spare.iter().rev().take(MAX_PROBES).position(fits);
        let Some(back) = found else { return IoBuf::zeroed(len) };
        let mut buffer = self.spare.remove(self.spare.len() - 1 - back);
        self.bytes -= buffer.capacity();
        buffer.show(len);
        Ok(buffer)
    }

    /// Returns a copy of `data`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn copy_of(&mut self, data: &[u8]) -> Result<IoBuf> {
        let mut buffer = self.take(data.len())?;
        buffer.copy_from_slice(data);
        Ok(buffer)
    }

    /// Keeps a buffer for reuse, or frees it if it is too small or the limit is reached.
    pub fn give(&mut self, buffer: IoBuf) {
        let capacity = buffer.capacity();
        if capacity >= MIN_KEPT_BYTES && self.bytes + capacity <= MAX_SPARE_BYTES {
            self.bytes += capacity;
            self.spare.push(buffer);
        }
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

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
    fn take_reuses_last_fitting_buffer() {
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
    fn give_beyond_limit_frees_buffer() {
        let mut buffers = Buffers::default();
        let many: Vec<IoBuf> = (0..6).map(|_| buffers.take(256 << 10).unwrap()).collect();
        for buffer in many {
            buffers.give(buffer);
        }
        buffers.give(IoBuf::zeroed(4096).unwrap());
        assert_eq!((buffers.spare.len(), buffers.bytes), (4, MAX_SPARE_BYTES));
        // A much larger spare buffer is not used for a small request.
        assert_eq!(buffers.take(64 << 10).unwrap().capacity(), 64 << 10);
    }
}
