//! Errors of device requests.

use thiserror::Error;

/// Reason of a failed request. The set is closed on purpose: exports match all variants, so a new one must be
/// mapped everywhere before the code compiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum Error {
    /// The range is not inside the device.
    #[error("out of range")]
    OutOfRange,
    /// Offset or length is not a multiple of the logical block, or the length is zero.
    #[error("not aligned to the logical block")]
    Misaligned,
    /// The request writes to a read-only device.
    #[error("read-only")]
    ReadOnly,
    /// The device has no space: a limit was reached, or its backing device is full.
    #[error("no space left on the device")]
    NoSpace,
    /// The host has no memory for this request.
    #[error("out of memory")]
    NoMemory,
    /// The data could not be read or written.
    #[error("I/O error")]
    Media,
    /// The device was removed, or the server shuts down.
    #[error("the device is gone")]
    Gone,
    /// The device does not support this operation.
    #[error("not supported")]
    Unsupported,
    /// A write to a zone does not start at the zone's write pointer, or exceeds the zone's capacity.
    #[error("not at the zone's write pointer")]
    ZoneWritePointer,
    /// The zone's condition (full, read-only, offline, conventional) forbids the operation.
    #[error("the zone's condition forbids it")]
    ZoneCondition,
    /// The request crosses the boundary between two zones, which this request must not cross.
    #[error("the request crosses a zone boundary")]
    ZoneBoundary,
    /// The maximum number of open zones is reached, and no zone can be closed implicitly.
    #[error("too many open zones")]
    ZoneTooManyOpen,
    /// The maximum number of active zones is reached.
    #[error("too many active zones")]
    ZoneTooManyActive,
}

impl Error {
    /// All variants, for tables and tests.
    pub const ALL: [Self; 13] = [
        Self::OutOfRange,
        Self::Misaligned,
        Self::ReadOnly,
        Self::NoSpace,
        Self::NoMemory,
        Self::Media,
        Self::Gone,
        Self::Unsupported,
        Self::ZoneWritePointer,
        Self::ZoneCondition,
        Self::ZoneBoundary,
        Self::ZoneTooManyOpen,
        Self::ZoneTooManyActive,
    ];

    /// Returns the name used in statistics and other machine-readable output.
    pub const fn name(self) -> &'static str {
        match self {
            Self::OutOfRange => "out_of_range",
            Self::Misaligned => "misaligned",
            Self::ReadOnly => "read_only",
            Self::NoSpace => "no_space",
            Self::NoMemory => "no_memory",
            Self::Media => "io_error",
            Self::Gone => "gone",
            Self::Unsupported => "not_supported",
            Self::ZoneWritePointer => "zone_write_pointer",
            Self::ZoneCondition => "zone_condition",
            Self::ZoneBoundary => "zone_boundary",
            Self::ZoneTooManyOpen => "zone_too_many_open",
            Self::ZoneTooManyActive => "zone_too_many_active",
        }
    }

    /// Returns the Linux errno that a kernel block device would return. Exports with fewer error codes map
    /// the variants themselves.
    pub const fn errno(self) -> i32 {
        match self {
            Self::OutOfRange | Self::Misaligned => libc::EINVAL,
            Self::ReadOnly => libc::EPERM,
            Self::NoSpace => libc::ENOSPC,
            Self::NoMemory => libc::ENOMEM,
            Self::Media | Self::ZoneWritePointer | Self::ZoneCondition | Self::ZoneBoundary => libc::EIO,
            Self::Gone => libc::ESHUTDOWN,
            Self::Unsupported => libc::EOPNOTSUPP,
            // The kernel's errno values of BLK_STS_ZONE_OPEN_RESOURCE and BLK_STS_ZONE_ACTIVE_RESOURCE.
            Self::ZoneTooManyOpen => libc::ETOOMANYREFS,
            Self::ZoneTooManyActive => libc::EOVERFLOW,
        }
    }
}

/// Result of device operations.
pub type Result<T> = std::result::Result<T, Error>;
