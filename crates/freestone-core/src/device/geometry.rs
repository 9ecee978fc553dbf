//! Geometry: sizes, alignments and other properties of a device.

/// Properties of a device. `size` may grow between two calls; the rest is constant for the life of the
/// device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent promises, each with a name")]
pub struct Geometry {
    /// Size in bytes, a multiple of `logical_block`.
    pub size: u64,
    /// Number of bytes at the end of `size`, less than a block, that complete the last block. The backing
    /// file ends before these bytes. The padding reads as zeroes, and writes to it are dropped.
    pub padding: u32,
    /// Smallest unit of a request in bytes, a power of two, 512 to 4096.
    pub logical_block: u32,
    /// Smallest unit that is written without read-modify-write, in bytes.
    pub physical_block: u32,
    /// Smallest preferred request size in bytes.
    pub io_min: u32,
    /// Preferred request size in bytes for sequential I/O.
    pub io_opt: u32,
    /// Largest request that clients should send, in bytes, a multiple of `logical_block`; 0 means unlimited.
    /// Larger requests are executed in pieces.
    pub max_request: u32,
    /// Smallest range that a discard can free, in bytes; 0 if discards succeed but free nothing.
    pub discard_granularity: u32,
    /// True if write zeroes with [`MAY_FREE`](super::Flags::MAY_FREE) is much faster than writing data.
    pub fast_zeroes: bool,
    /// True if writes may stay in a volatile cache until a flush. If false, a write is durable at its
    /// completion as far as the device can make it, and a flush does nothing.
    pub volatile_cache: bool,
    /// True if the content is lost when the process ends, as with a RAM disk.
    pub volatile_media: bool,
    /// True if sequential accesses are faster than random ones, as on a rotating disk.
    pub rotational: bool,
    /// True if only reads and flushes are allowed.
    pub read_only: bool,
    /// True if the device discards the data of every write, so that the buffer of a write may have any content.
    /// False for a device or layer that keeps, counts or records data.
    pub ignores_data: bool,
    /// Zone model of a zoned device (see [`Device::zoned`](super::Device::zoned)), or `None`.
    pub zones: Option<ZoneGeometry>,
}

/// Zone model of a device. Sizes are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneGeometry {
    /// Distance between the starts of neighbouring zones, in bytes.
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
    /// Offset of the first byte on the device.
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
