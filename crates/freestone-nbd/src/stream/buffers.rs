//! Data buffers of a connection, reused for later requests. New memory would have to be zeroed page by page.

use freestone_core::device::{IoBuf, Result};

/// Largest total size of the spare buffers of a connection, in bytes.
pub const MAX_SPARE_BYTES: usize = 1 << 20;
/// Smallest buffer kept, in bytes. The allocator provides smaller buffers quickly.
const MIN_KEPT_BYTES: usize = 16 << 10;
/// Maximum number of spare buffers that one [`Buffers::take`] examines.
const MAX_PROBES: usize = 4;

/// Spare buffers of one connection, the most recently used last. Their old data never reaches another client.
#[derive(Debug, Default)]
pub struct Buffers {
    spare: Vec<IoBuf>,
    bytes: usize,
}

impl Buffers {
    /// Returns a buffer of `len` bytes. The buffer may contain data of earlier requests, so the caller must
    /// overwrite all bytes that are sent.
    ///
    /// # Errors
    /// Out of memory.
    pub fn take(&mut self, len: usize) -> Result<IoBuf> {
        let fits = |buffer: &IoBuf| buffer.capacity() >= len && buffer.capacity() / 2 <= len;
        let found = self.spare.iter().rev().take(MAX_PROBES).position(fits);
        let Some(back) = found else { return IoBuf::zeroed(len) };
        let mut buffer = self.spare.remove(self.spare.len() - 1 - back);
        self.bytes -= buffer.capacity();
        buffer.set_len(len);
        Ok(buffer)
    }

    /// Returns a buffer with a copy of `data`.
    ///
    /// # Errors
    /// Out of memory.
    pub fn copy_of(&mut self, data: &[u8]) -> Result<IoBuf> {
        let mut buffer = self.take(data.len())?;
        buffer.copy_from_slice(data);
        Ok(buffer)
    }

    /// Keeps a buffer for reuse, or frees it if it is too small or [`MAX_SPARE_BYTES`] is reached.
    pub fn put_back(&mut self, buffer: IoBuf) {
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
        buffers.put_back(first);
        buffers.put_back(second);
        assert_eq!(buffers.take(65 << 10).unwrap()[0], 2);
        assert_eq!(buffers.take(128 << 10).unwrap()[0], 1);
        assert_eq!(buffers.take(128 << 10).unwrap()[0], 0);
    }

    #[test]
    fn give_beyond_limit_frees_buffer() {
        let mut buffers = Buffers::default();
        let many: Vec<IoBuf> = (0..6).map(|_| buffers.take(256 << 10).unwrap()).collect();
        for buffer in many {
            buffers.put_back(buffer);
        }
        buffers.put_back(IoBuf::zeroed(4096).unwrap());
        assert_eq!((buffers.spare.len(), buffers.bytes), (4, MAX_SPARE_BYTES));
        // A much larger spare buffer is not used for a small request.
        assert_eq!(buffers.take(64 << 10).unwrap().capacity(), 64 << 10);
    }
}
