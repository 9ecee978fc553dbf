//! Geometry: sizes, alignments and other properties of a device.

/// Properties of a device. `size` may grow between two calls; the rest is constant for the life of the
/// device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent promises, each with a name")]
pub struct Geometry {
    /// Size in bytes, a multiple of `logical_block`.
    pub size: u64,
    /// Bytes at the end of `size`, less than a block, that complete the last block; the backing file ends
    /// before them. The padding reads as zeroes, and writes to it are dropped.
    pub padding: u32,
    /// Smallest unit of a request in bytes, a power of two, 512 to 4096.
    pub logical_block: u32,
    /// Smallest unit that is written without read-modify-write, in bytes.
    pub physical_block: u32,
    /// Preferred smallest request in bytes.
    pub io_min: u32,
    /// Preferred request size for streaming in bytes.
    pub io_opt: u32,
    /// Largest request that clients should send, in bytes, a multiple of `logical_block`; 0 means unlimited.
    /// Larger requests are executed in pieces.
    pub max_request: u32,
    /// Smallest range that a discard can free, in bytes. 0 if discards free nothing; they succeed
    /// nevertheless.
    pub discard_granularity: u32,
    /// Write zeroes with permission to free is much faster than writing data.
    pub fast_zeroes: bool,
    /// Writes may stay in a volatile cache until a flush. If false, a write is durable at its completion as
    /// far as the device can make it, and a flush does nothing.
    pub volatile_cache: bool,
    /// The content is lost when the process ends, as with a RAM disk.
    pub volatile_media: bool,
    /// Near accesses are faster than distant ones, as on a rotating disk.
    pub rotational: bool,
    /// Only reads and flushes are allowed.
    pub read_only: bool,
    /// Zone model of a device with [`Device::zoned`](super::Device::zoned).
    pub zones: Option<ZoneGeometry>,
}

/// Zone model of a device. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneGeometry {
    /// Distance between two zone starts.
    pub zone_size: u64,
    /// Number of zones; the last one may be shorter.
    pub nr_zones: u32,
    /// Maximum number of open sequential zones; 0 means unlimited.
    pub max_open: u32,
    /// Maximum number of active (open or closed) sequential zones; 0 means unlimited.
    pub max_active: u32,
    /// Largest zone append in bytes; 0 if append is not supported.
    pub max_append: u32,
}

/// A run of bytes of one kind, reported by [`Device::extents`](super::Device::extents).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Length in bytes, at least one.
    pub len: u64,
    /// Kind of the content.
    pub kind: ExtentKind,
}

/// Kinds of extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored data.
    Data,
    /// Reads as zeroes and occupies space.
    Zero,
    /// Reads as zeroes and occupies no space.
    Hole,
}
