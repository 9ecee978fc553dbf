//! What is asked of a device: operation, range, flags, and the memory that goes with it.

use bitflags::bitflags;

use super::{Error, Geometry, Result};

/// The operations every device understands. (Zone operations are [`Zoned`](super::Zoned)'s.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Op {
    /// Fill the buffer from the device.
    Read,
    /// Store the buffer on the device.
    Write,
    /// Forget the range: a hint. Parts smaller than the discard granularity are skipped, as in
    /// zram. What is read afterwards is zeroes or the old data, and does not change from one read
    /// to the next.
    Discard,
    /// Make the range read as zeroes, to the byte. With [`Flags::MAY_FREE`] its space may be given
    /// back.
    WriteZeroes,
    /// Make every write that was answered before this request durable. Offset and length are zero.
    Flush,
}

bitflags! {
    /// Modifiers of a request.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
    pub struct Flags: u8 {
        /// Write, write zeroes, discard: durable before the answer ("force unit access").
        const FUA = 1;
        /// Write zeroes: the range may become a hole.
        const MAY_FREE = 2;
        /// Read: nobody will look at the buffer, so a device that stores nothing may leave it as it
        /// is. For measuring in-process; exports never set it.
        const UNREAD = 4;
    }
}

/// One request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub op: Op,
    /// Modifiers.
    pub flags: Flags,
    /// First byte.
    pub offset: u64,
    /// Length in bytes; zero only for a flush.
    pub len: u64,
}

impl Request {
    /// A request without flags.
    pub const fn new(op: Op, offset: u64, len: u64) -> Self {
        Self { op, flags: Flags::empty(), offset, len }
    }

    /// A read.
    pub const fn read(offset: u64, len: u64) -> Self {
        Self::new(Op::Read, offset, len)
    }

    /// A write.
    pub const fn write(offset: u64, len: u64) -> Self {
        Self::new(Op::Write, offset, len)
    }

    /// A flush.
    pub const fn flush() -> Self {
        Self::new(Op::Flush, 0, 0)
    }

    /// The same request with these flags.
    #[must_use]
    pub const fn with(mut self, flags: Flags) -> Self {
        self.flags = flags;
        self
    }

    /// What is left after the first `done` bytes.
    #[must_use]
    pub const fn rest(mut self, done: u64) -> Self {
        self.offset += done;
        self.len -= done;
        self
    }

    /// The checks that every device makes first, in this order: length and alignment, range,
    /// read-only.
    #[inline]
    pub fn check(&self, geometry: &Geometry) -> Result<()> {
        self.check_place(geometry.size, geometry.logical_block)?;
        if geometry.read_only && !matches!(self.op, Op::Read | Op::Flush) {
            return Err(Error::ReadOnly);
        }
        Ok(())
    }

    /// The part of [`check`](Self::check) that a writable device needs: length and alignment,
    /// range. As every device makes it first, debug builds also check here that whoever calls a
    /// device has no table pinned.
    #[inline]
    pub fn check_place(&self, size: u64, logical_block: u32) -> Result<()> {
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

/// The end of a range of which extents are asked: what every device checks of it first, as it does
/// with a request.
///
/// # Errors
/// Empty, or not within `size`.
pub fn range_end(offset: u64, len: u64, size: u64) -> Result<u64> {
    crate::pin::assert_unpinned();
    offset.checked_add(len).filter(|&end| len > 0 && end <= size).ok_or(Error::OutOfRange)
}

/// The memory of a request that is tried inline. Its length is the request's for reads and writes.
#[derive(Debug)]
pub enum Buffer<'a> {
    /// Discard, write zeroes, flush.
    None,
    /// Read: where the data goes. After an error or beyond the completed part its content is
    /// unspecified.
    Read(&'a mut [u8]),
    /// Write: where the data is.
    Write(&'a [u8]),
}

impl<'a> Buffer<'a> {
    /// What a request of this kind is given of `bytes` when the first `done` are done. One without data
    /// has none, however much of it is done.
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
    fn the_rest_of_a_request_without_data_has_none() {
        assert!(matches!(Buffer::rest(Op::Discard, &mut [], 4096), Buffer::None));
        assert!(matches!(Buffer::rest(Op::Write, &mut [1, 2, 3], 2), Buffer::Write([3])));
        assert!(matches!(Buffer::rest(Op::Read, &mut [1, 2, 3], 3), Buffer::Read([])));
    }
}
