//! The closed set of errors a device can answer with.

use thiserror::Error;

/// Why a request failed. Closed on purpose: every export maps every variant, and a new one must be
/// mapped everywhere before it compiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Error)]
pub enum Error {
    /// The range does not lie inside the device.
    #[error("out of range")]
    OutOfRange,
    /// Offset or length is not a multiple of the logical block, or the length is zero.
    #[error("not aligned to the logical block")]
    Misaligned,
    /// A write to a device that is read-only.
    #[error("read-only")]
    ReadOnly,
    /// The device's own space is used up: a limit was reached, or the backing is full.
    #[error("no space left on the device")]
    NoSpace,
    /// The machine has no memory left for this request.
    #[error("out of memory")]
    NoMemory,
    /// The data could not be read or written.
    #[error("I/O error")]
    Media,
    /// The device was removed, or its server is going away.
    #[error("the device is gone")]
    Gone,
    /// The device does not offer this operation.
    #[error("not supported")]
    Unsupported,
    /// A zone was written elsewhere than at its write pointer, or past its capacity.
    #[error("not at the zone's write pointer")]
    ZoneWritePointer,
    /// The zone's condition (full, read-only, offline, conventional) forbids the operation.
    #[error("the zone's condition forbids it")]
    ZoneCondition,
    /// The request crosses a zone boundary that it must not cross.
    #[error("the request crosses a zone boundary")]
    ZoneBoundary,
    /// The limit of open zones is reached and none can be closed implicitly.
    #[error("too many open zones")]
    ZoneTooManyOpen,
    /// The limit of active zones is reached.
    #[error("too many active zones")]
    ZoneTooManyActive,
}

impl Error {
    /// Every variant once, for tables and tests.
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

    /// A word for programs: statistics are kept under it.
    pub const fn word(self) -> &'static str {
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

    /// The Linux errno that a block device of the kernel would answer with. Exports whose protocol
    /// knows fewer numbers map from the variant, not from this.
    pub const fn errno(self) -> i32 {
        match self {
            Self::OutOfRange | Self::Misaligned => libc::EINVAL,
            Self::ReadOnly => libc::EPERM,
            Self::NoSpace => libc::ENOSPC,
            Self::NoMemory => libc::ENOMEM,
            Self::Media | Self::ZoneWritePointer | Self::ZoneCondition | Self::ZoneBoundary => libc::EIO,
            Self::Gone => libc::ESHUTDOWN,
            Self::Unsupported => libc::EOPNOTSUPP,
            // The numbers of the kernel's BLK_STS_ZONE_OPEN_RESOURCE and
            // BLK_STS_ZONE_ACTIVE_RESOURCE.
            Self::ZoneTooManyOpen => libc::ETOOMANYREFS,
            Self::ZoneTooManyActive => libc::EOVERFLOW,
        }
    }
}

/// What device operations return.
pub type Result<T> = std::result::Result<T, Error>;
