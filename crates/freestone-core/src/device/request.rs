//! Requests: operation, range, flags and buffer.

use bitflags::bitflags;

use super::{Error, Geometry, Result};

/// Operations that every device supports. Zone operations are in [`Zoned`](super::Zoned).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Reads the range into the buffer.
    Read,
    /// Writes the buffer to the range.
    Write,
    /// Discards the range, as a hint. Parts smaller than the discard granularity are skipped, as in zram.
    /// Later reads return zeroes or the old data, but the same on every read.
    Discard,
    /// Zeroes the range, exact to the byte. With [`Flags::MAY_FREE`] the space of the range may be freed.
    WriteZeroes,
    /// Makes every write completed before this request durable. Offset and length are zero.
    Flush,
}

bitflags! {
    /// Modifiers of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Flags: u8 {
        /// Write, write zeroes, discard: the effect is durable at completion ("force unit access").
        const FUA = 1;
        /// Write zeroes: the range may become a hole.
        const MAY_FREE = 2;
        /// Read: the caller ignores the data, so a device that stores nothing may leave the buffer unchanged.
        /// For in-process benchmarks; exports never set this flag.
        const UNREAD = 4;
    }
}

/// A request to a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// Operation to execute.
    pub op: Op,
    /// Modifiers of the operation.
    pub flags: Flags,
    /// Offset of the first byte on the device.
    pub offset: u64,
    /// Length in bytes; zero only for a flush.
    pub len: u64,
}

impl Request {
    /// Creates a request without flags.
    pub const fn new(op: Op, offset: u64, len: u64) -> Self {
        Self { op, flags: Flags::empty(), offset, len }
    }

    /// Creates a read.
    pub const fn read(offset: u64, len: u64) -> Self {
        Self::new(Op::Read, offset, len)
    }

    /// Creates a write.
    pub const fn write(offset: u64, len: u64) -> Self {
        Self::new(Op::Write, offset, len)
    }

    /// Creates a flush.
    pub const fn flush() -> Self {
        Self::new(Op::Flush, 0, 0)
    }

    /// Returns the request with these flags.
    #[must_use]
    pub const fn with(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// Returns the request without its first `done` bytes.
    #[must_use]
    pub const fn rest(mut self, done: u64) -> Self {
        self.offset += done;
        self.len -= done;
        self
    }

    /// Checks the request, as every device must do first. The order is: length and alignment, range,
    /// read-only.
    #[inline]
    pub fn check(&self, geometry: &Geometry) -> Result<()> {
        self.check_range(geometry.size, geometry.logical_block)?;
        if geometry.read_only && !matches!(self.op, Op::Read | Op::Flush) {
            return Err(Error::ReadOnly);
        }
        Ok(())
    }

    /// Checks like [`check`](Self::check), but without the check for read-only devices. Because every device
    /// calls this function first, debug builds also check that the caller is not pinned.
    #[inline]
    pub fn check_range(&self, size: u64, logical_block: u32) -> Result<()> {
        crate::pin::assert_unpinned();
        if self.op == Op::Flush {
            return if self.offset == 0 && self.len == 0 { Ok(()) } else { Err(Error::Misaligned) };
        }
        let mask = u64::from(logical_block) - 1;
        if self.len == 0 || (self.offset | self.len) & mask != 0 {
            return Err(Error::Misaligned);
        }
        match self.offset.checked_add(self.len) {
            Some(end) if end <= size => Ok(()),
            _ => Err(Error::OutOfRange),
        }
    }
}

/// Returns the exclusive end of a range whose extents are queried. Every device calls this first, to check
/// the range.
///
/// # Errors
/// [`Error::OutOfRange`] if the range is empty or not within `size`.
pub fn range_end(offset: u64, len: u64, size: u64) -> Result<u64> {
    crate::pin::assert_unpinned();
    offset.checked_add(len).filter(|&end| len > 0 && end <= size).ok_or(Error::OutOfRange)
}

/// Memory of a request that is tried inline. For reads and writes its length is the length of the request.
#[derive(Debug)]
pub enum Buffer<'a> {
    /// No data: discard, write zeroes and flush.
    None,
    /// Destination of a read. The content is unspecified after an error and beyond the completed part.
    Read(&'a mut [u8]),
    /// Source of a write.
    Write(&'a [u8]),
}

impl<'a> Buffer<'a> {
    /// Returns the part of `bytes` for the rest of a request whose first `done` bytes are complete. Returns
    /// [`Buffer::None`] for requests without data.
    #[inline]
    pub fn rest(op: Op, bytes: &'a mut [u8], done: usize) -> Self {
        match op {
            Op::Read => Self::Read(&mut bytes[done..]),
            Op::Write => Self::Write(&bytes[done..]),
            Op::Flush | Op::Discard | Op::WriteZeroes => Self::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rest_without_data_is_none() {
        assert!(matches!(Buffer::rest(Op::Discard, &mut [], 4096), Buffer::None));
        assert!(matches!(Buffer::rest(Op::Write, &mut [1, 2, 3], 2), Buffer::Write([3])));
        assert!(matches!(Buffer::rest(Op::Read, &mut [1, 2, 3], 3), Buffer::Read([])));
    }
}
