//! Data buffers of a connection, reused for later requests. New memory would have to be zeroed page by page.

use freestone_core::device::{IoBuf, Result};

/// Largest total size of the spare buffers of a connection, in bytes.
pub const MAX_SPARE_BYTES: usize = 1 << 20;
/// Smallest buffer kept, in bytes. The allocator provides smaller buffers quickly.
const MIN_KEPT_BYTES: usize = 4 << 10;
/// Smallest buffer kept as a large one, in bytes.
const MIN_LARGE_BYTES: usize = 16 << 10;
/// Largest total size of the small spare buffers, in bytes, so that room for large ones is left: 4 KiB for each
/// of 64 requests in flight.
const MAX_SMALL_BYTES: usize = 256 << 10;
/// Maximum number of spare buffers that one [`Buffers::take`] examines.
const MAX_PROBES: usize = 4;

/// Spare buffers of one connection. Their old data never reaches another client.
#[derive(Debug, Default)]
pub struct Buffers {
    /// Buffers of less than [`MIN_LARGE_BYTES`], apart from the others, so that a few probes find each size.
    small: Spares,
    large: Spares,
}

/// Spare buffers, the most recently used last.
#[derive(Debug, Default)]
struct Spares {
    buffers: Vec<IoBuf>,
    bytes: usize,
}

impl Spares {
    /// Removes and returns one of the last buffers that is suitable for `len` bytes.
    fn take(&mut self, len: usize) -> Option<IoBuf> {
        let fits = |buffer: &IoBuf| buffer.capacity() >= len && buffer.capacity() / 2 <= len;
        let back = self.buffers.iter().rev().take(MAX_PROBES).position(fits)?;
        let buffer = self.buffers.remove(self.buffers.len() - 1 - back);
        self.bytes -= buffer.capacity();
        Some(buffer)
    }
}

impl Buffers {
    /// Returns a buffer of `len` bytes. The buffer may contain data of earlier requests, so the caller must
    /// overwrite all bytes that are sent.
    ///
    /// # Errors
    /// Out of memory.
    pub fn take(&mut self, len: usize) -> Result<IoBuf> {
        let spares = if len < MIN_LARGE_BYTES { &mut self.small } else { &mut self.large };
        let Some(mut buffer) = spares.take(len) else { return IoBuf::zeroed(len) };
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

    /// Keeps a buffer for reuse, or frees it if it is too small or a limit is reached.
    pub fn put_back(&mut self, buffer: IoBuf) {
        let capacity = buffer.capacity();
        let fits = self.bytes() + capacity <= MAX_SPARE_BYTES;
        let spares = match capacity {
            MIN_LARGE_BYTES.. if fits => &mut self.large,
            MIN_KEPT_BYTES.. if fits && self.small.bytes + capacity <= MAX_SMALL_BYTES => &mut self.small,
            _ => return,
        };
        spares.bytes += capacity;
        spares.buffers.push(buffer);
    }

    pub fn bytes(&self) -> usize {
        self.small.bytes + self.large.bytes
    }

    #[inline]
    pub fn clear(&mut self) {
        if self.bytes() > 0 {
            *self = Self::default();
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
        assert_eq!((buffers.large.buffers.len(), buffers.bytes()), (4, MAX_SPARE_BYTES));
        // A much larger spare buffer is not used for a small request.
        assert_eq!(buffers.take(64 << 10).unwrap().capacity(), 64 << 10);
    }

    /// Many small spare buffers neither displace nor hide large ones.
    #[test]
    fn small_buffers_are_kept_apart() {
        let mut buffers = Buffers::default();
        let mut large = buffers.take(128 << 10).unwrap();
        large[0] = 1;
        buffers.put_back(large);
        for _ in 0..2 * MAX_SMALL_BYTES / 4096 {
            let mut small = IoBuf::zeroed(4096).unwrap();
            small[0] = 2;
            buffers.put_back(small);
        }
        buffers.put_back(IoBuf::zeroed(512).unwrap());
        assert_eq!((buffers.small.bytes, buffers.large.bytes), (MAX_SMALL_BYTES, 128 << 10));
        assert_eq!((buffers.take(128 << 10).unwrap()[0], buffers.take(4096).unwrap()[0]), (1, 2));
        assert_eq!(buffers.bytes(), MAX_SMALL_BYTES - 4096);
    }
}
