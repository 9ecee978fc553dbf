//! Test drives modelled on the kernel's `null_blk` driver.
//!
//! * [`Null`] stores nothing. It is the baseline for measuring exports and the overhead of the
//!   [`Device`] interface.
//! * [`Memory`] stores data uncompressed in memory (`memory_backed=1`), with a lock per page.
//! * [`BadBlocks`] fails requests to bad sectors. [`PacedDevice`] limits the bandwidth and delays
//!   completions. Both are layers over another device.
//!
//! Intentional differences from the kernel's driver:
//! * A drive that stores nothing reads as zeroes. (The kernel leaves the buffer unchanged; requests
//!   with [`Flags::UNREAD`] do so in this module.)
//! * [`Memory`] locks each page separately. (The kernel takes one lock per device around every
//!   copy.)
//! * With a bandwidth limit (`mbps`), requests of any size run. (The kernel never admits a request
//!   larger than its budget of 20 ms.)
//! * Write zeroes is supported, and a discard of a drive that stores nothing succeeds.

mod badblocks;
mod memory;
mod pace;
mod pages;

use rustix::io::Errno;
use thiserror::Error;

pub use self::badblocks::{BAD_RANGES_MAX, BadBlocks, BadBlocksConfig, BadBlocksError};
pub use self::memory::{MEMORY_BYTES_MAX, Memory};
pub use self::pace::{COMPLETION_MAX, MBPS_MAX, PaceConfig, PacedDevice};
use freestone_core::device::{
    Buffer, Completion, Device, Error, Extent, ExtentKind, Flags, Geometry, IoBuf, Op, Request, Result,
    TryResult, range_end,
};

/// Largest size of a drive in bytes. Clients use signed 64-bit file offsets, which cannot address
/// more.
pub const MAX_SIZE_BYTES: u64 = i64::MAX as u64;

/// Configuration of a [`Null`] or [`Memory`] device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Config {
    /// Size of the drive in bytes: a multiple of `logical_block`, at most [`MAX_SIZE_BYTES`], or to
    /// [`MEMORY_BYTES_MAX`] for [`Memory`].
    pub size: u64,
    /// Size of a logical block in bytes: a power of two from 512 to 4096.
    pub logical_block: u32,
    /// True to report the drive as rotational.
    pub rotational: bool,
    /// True to reject writes.
    pub read_only: bool,
    /// True to support discards with the granularity of a block. If false, discards succeed but
    /// free nothing.
    pub discard: bool,
    /// Maximum number of bytes that one `try_io` handles: a multiple of `logical_block`, or 0 for
    /// no limit.
    pub max_request: u32,
}

impl Config {
    /// Returns the configuration of a writable device with discards and without a request limit.
    pub const fn plain(size: u64, logical_block: u32) -> Self {
        Self { size, logical_block, rotational: false, read_only: false, discard: true, max_request: 0 }
    }

    /// Checks the configuration and returns the geometry of the device. `largest` is the maximum
    /// size in bytes.
    fn geometry(&self, largest: u64) -> std::result::Result<Geometry, SetupError> {
        let &Self { size, logical_block: block, rotational, read_only, discard, max_request } = self;
        if !block.is_power_of_two() || !(512..=4096).contains(&block) {
            return Err(SetupError::LogicalBlock(block));
        }
        if size > largest || !size.is_multiple_of(u64::from(block)) {
            return Err(SetupError::Size { size, block, largest });
        }
        if !max_request.is_multiple_of(block) {
            return Err(SetupError::MaxRequest { max_request, block });
        }
        Ok(Geometry {
            size,
            logical_block: block,
            physical_block: block,
            io_min: block,
            io_opt: block,
            max_request,
            discard_granularity: if discard { block } else { 0 },
            fast_zeroes: true,
            volatile_cache: false,
            padding: 0,
            volatile_media: true,
            rotational,
            read_only,
            ignores_data: false,
            zones: None,
        })
    }
}

/// Errors from creating a [`Null`] or [`Memory`] device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum SetupError {
    /// The logical block is not a power of two from 512 to 4096 bytes.
    #[error("logical_block is {0}; it must be 512, 1024, 2048 or 4096")]
    LogicalBlock(u32),
    /// The size is too large or not a multiple of the logical block.
    #[error("size is {size} bytes; it must be a multiple of {block} bytes from {block} to {largest}")]
    Size {
        /// Requested size of the device in bytes.
        size: u64,
        /// Size of a logical block in bytes.
        block: u32,
        /// Maximum size in bytes.
        largest: u64,
    },
    /// The maximum request size is not a multiple of the logical block.
    #[error("max_request is {max_request} bytes; it must be a multiple of {block} bytes, or 0 for no limit")]
    MaxRequest {
        /// Requested maximum request size in bytes.
        max_request: u32,
        /// Size of a logical block in bytes.
        block: u32,
    },
    /// The anonymous file (memfd) for the data could not be created.
    #[error("cannot create a memory file: {0}")]
    MemoryFile(Errno),
    /// The system has no memory for the page tables.
    #[error("out of memory")]
    NoMemory,
}

/// Device that discards written data, reads as zeroes, and completes every request inline.
pub struct Null {
    geometry: Geometry,
}

impl Null {
    /// Creates a null device.
    pub fn new(config: Config) -> std::result::Result<Self, SetupError> {
        Ok(Self { geometry: Geometry { ignores_data: true, ..config.geometry(MAX_SIZE_BYTES)? } })
    }
}

impl Device for Null {
    #[inline]
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    #[inline]
    fn try_io(&self, request: &Request, buffer: Buffer<'_>) -> Result<TryResult> {
        request.check(&self.geometry)?;
        let most = u64::from(self.geometry.max_request);
        let (bytes, tried) = if most != 0 && request.len > most {
            (most as usize, TryResult::Partly(most))
        } else {
            (request.len as usize, TryResult::Done)
        };
        if let Buffer::Read(out) = buffer
            && !request.flags.contains(Flags::UNREAD)
        {
            out.get_mut(..bytes).ok_or(Error::Misaligned)?.fill(0);
        }
        Ok(tried)
    }

    fn submit(&self, request: Request, mut buffer: IoBuf, done: Completion) {
        let outcome = request.check(&self.geometry);
        if outcome.is_ok() && request.op == Op::Read && !request.flags.contains(Flags::UNREAD) {
            buffer.fill(0);
        }
        done.complete(outcome, buffer);
    }

    fn extents(&self, offset: u64, len: u64, row: &mut dyn FnMut(Extent) -> bool) -> Result<u64> {
        range_end(offset, len, self.geometry.size)?;
        row(Extent { offset, len, kind: ExtentKind::Hole });
        Ok(len)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::faults::{Faults, Rules};
    use crate::power::{self, Power};
    use crate::quiesce::Quiesce;

    /// Layers that may use the data of writes do not pass on that a device ignores data.
    #[test]
    fn data_is_ignored_only_without_layers_that_use_it() {
        let null = || Arc::new(Null::new(Config::plain(1 << 20, 512)).unwrap()) as Arc<dyn Device>;
        let ignores_data = |device: &dyn Device| device.geometry().ignores_data;
        assert!(ignores_data(&*null()));
        assert!(ignores_data(&Quiesce::new(null())));
        assert!(ignores_data(&PacedDevice::new(null(), PaceConfig::default()).unwrap()));
        assert!(!ignores_data(&Memory::new(Config::plain(1 << 20, 512)).unwrap()));
        assert!(!ignores_data(&Faults::new(null(), Rules::default(), 1).unwrap()));
        assert!(!ignores_data(&Power::new(null(), power::Config::default()).unwrap()));
    }

    #[test]
    fn invalid_configurations_are_rejected() {
        let make = |size, logical_block| Null::new(Config::plain(size, logical_block)).map(|_| ());
        for block in [0, 1, 256, 513, 1000, 8192, u32::MAX] {
            assert_eq!(make(1 << 20, block), Err(SetupError::LogicalBlock(block)));
        }
        for (size, block) in [(511, 512), (4096 + 512, 4096), (u64::MAX, 512), (1 << 63, 4096)] {
            assert_eq!(make(size, block), Err(SetupError::Size { size, block, largest: MAX_SIZE_BYTES }));
        }
        for (size, block) in [(0, 512), (512, 512), (4096, 4096), (MAX_SIZE_BYTES & !4095, 4096)] {
            assert_eq!(make(size, block), Ok(()));
        }
        let config = Config { max_request: 512, ..Config::plain(1 << 20, 4096) };
        let error = SetupError::MaxRequest { max_request: 512, block: 4096 };
        assert_eq!(Null::new(config).err(), Some(error));
    }

    #[test]
    fn geometry_matches_configuration() {
        let config = Config {
            rotational: true,
            read_only: true,
            discard: false,
            max_request: 8192,
            ..Config::plain(1 << 20, 1024)
        };
        let null = Null::new(config).unwrap();
        let geometry = null.geometry();
        assert!(geometry.rotational && geometry.read_only);
        assert_eq!((geometry.discard_granularity, geometry.max_request), (0, 8192));
        assert_eq!(null.try_io(&Request::write(0, 1024), Buffer::Write(&[0; 1024])), Err(Error::ReadOnly));
    }

    #[test]
    fn reads_return_zeroes_except_unread() {
        let null = Null::new(Config::plain(1 << 20, 512)).unwrap();
        let mut out = [7; 512];
        let unread = Request::read(0, 512).with(Flags::UNREAD);
        assert_eq!(null.try_io(&unread, Buffer::Read(&mut out)), Ok(TryResult::Done));
        assert_eq!(out, [7; 512]);
        assert_eq!(null.try_io(&Request::read(0, 512), Buffer::Read(&mut out)), Ok(TryResult::Done));
        assert_eq!(out, [0; 512]);
    }

    #[test]
    fn requests_above_the_limit_complete_partially() {
        let null = Null::new(Config { max_request: 1024, ..Config::plain(1 << 20, 512) }).unwrap();
        let mut out = [7; 2560];
        let request = Request::read(0, 2560);
        assert_eq!(null.try_io(&request, Buffer::Read(&mut out)), Ok(TryResult::Partly(1024)));
        assert!(out[..1024].iter().all(|&b| b == 0) && out[1024..].iter().all(|&b| b == 7));
        let rest = request.rest(2048);
        assert_eq!(null.try_io(&rest, Buffer::Read(&mut out[2048..])), Ok(TryResult::Done));
    }
}
