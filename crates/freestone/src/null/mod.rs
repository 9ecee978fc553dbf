//! The bare null device: writes vanish, reads are zeroes. The yardstick of every export.

use thiserror::Error;

use crate::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Geometry, IoBuf, Op, Request, Result, Tried,
};

/// Largest size in bytes: what a signed 64-bit file offset can address, which clients use.
pub const MAX_SIZE_BYTES: u64 = i64::MAX as u64;

/// What a [`Null`] looks like.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Bytes: 1 block to [`MAX_SIZE_BYTES`], a multiple of `logical_block`.
    pub size: u64,
    /// Bytes: a power of two from 512 to 4096.
    pub logical_block: u32,
}

/// Why a [`Null`] could not be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SetupError {
    /// The block is impossible.
    #[error("logical_block is {0}; it must be 512, 1024, 2048 or 4096")]
    LogicalBlock(u32),
    /// The size is impossible.
    #[error("size is {size} bytes; it must be a multiple of {block} bytes from {block} to {MAX_SIZE_BYTES}")]
    Size {
        /// What was asked for.
        size: u64,
        /// The logical block.
        block: u32,
    },
}

/// Forgets what is written and answers everything inline.
#[derive(Debug)]
pub struct Null {
    geometry: Geometry,
}

impl Null {
    /// Makes the device; nothing is allocated.
    pub fn new(config: Config) -> std::result::Result<Self, SetupError> {
        let Config { size, logical_block } = config;
        if !logical_block.is_power_of_two() || !(512..=4096).contains(&logical_block) {
            return Err(SetupError::LogicalBlock(logical_block));
        }
        if size == 0 || size > MAX_SIZE_BYTES || !size.is_multiple_of(u64::from(logical_block)) {
            return Err(SetupError::Size { size, block: logical_block });
        }
        let geometry = Geometry {
            size,
            logical_block,
            physical_block: logical_block,
            io_min: logical_block,
            io_opt: logical_block,
            discard_granularity: logical_block,
            fast_zeroes: true,
            volatile_cache: false,
            volatile_media: true,
            rotational: false,
            max_request: 0,
            read_only: false,
            zones: None,
        };
        Ok(Self { geometry })
    }
}

impl Device for Null {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<Tried> {
        request.check(&self.geometry)?;
        if let Buffer::Read(out) = buffer {
            out.fill(0);
        }
        Ok(Tried::Done)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let outcome = request.check(&self.geometry);
        if outcome.is_ok() && request.op == Op::Read {
            buffer.fill(0);
        }
        done.complete(outcome, buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        let end = offset.checked_add(len).filter(|&end| len > 0 && end <= self.geometry.size);
        end.ok_or(Error::OutOfRange)?;
        row(Extent { offset, len, kind: ExtentKind::Hole });
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_configurations_are_refused() {
        let make = |size, logical_block| Null::new(Config { size, logical_block }).map(|_| ());
        for block in [0, 1, 256, 513, 1000, 8192, u32::MAX] {
            assert_eq!(make(1 << 20, block), Err(SetupError::LogicalBlock(block)));
        }
        for (size, block) in [(0, 512), (511, 512), (4096 + 512, 4096), (u64::MAX, 512), (1 << 63, 4096)] {
            assert_eq!(make(size, block), Err(SetupError::Size { size, block }));
        }
        for (size, block) in [(512, 512), (4096, 4096), (MAX_SIZE_BYTES & !4095, 4096)] {
            assert_eq!(make(size, block), Ok(()));
        }
    }
}
