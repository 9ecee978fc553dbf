//! What a device says of itself.

/// Sizes, alignments and promises of a device. Asked, never assumed; `size` may grow between two
/// calls, the rest stays as it is for the life of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "independent promises, each with a name")]
pub struct Geometry {
    /// Bytes; a multiple of `logical_block`.
    pub size: u64,
    /// Bytes at the end of `size`, less than a block, that are there to make the last block whole:
    /// what stands behind the device ends before them. They read as zeroes, and what is written
    /// there is dropped.
    pub padding: u32,
    /// Smallest unit of a request in bytes, a power of two, 512 to 4096.
    pub logical_block: u32,
    /// Smallest unit that is written without read-modify-write, in bytes.
    pub physical_block: u32,
    /// Preferred smallest request in bytes.
    pub io_min: u32,
    /// Preferred request size for streaming in bytes.
    pub io_opt: u32,
    /// The largest request that clients should send, in bytes, a multiple of `logical_block`; 0 is
    /// no limit. A larger one is done in pieces.
    pub max_request: u32,
    /// Smallest range that a discard can free, in bytes; 0 where a discard frees nothing (it is
    /// answered all the same).
    pub discard_granularity: u32,
    /// Writing zeroes that may become a hole takes far less work than writing data.
    pub fast_zeroes: bool,
    /// Writes may sit in a volatile cache until a flush. Where false, a write is as durable as the
    /// device ever makes it when it is answered, and a flush has nothing to do.
    pub volatile_cache: bool,
    /// The content ends with the process: a RAM disk.
    pub volatile_media: bool,
    /// Neighbours are cheaper to reach than what is far away, as on a disk that turns.
    pub rotational: bool,
    /// Only reads are served.
    pub read_only: bool,
    /// The zone model, for a device with [`Device::zoned`](super::Device::zoned).
    pub zones: Option<ZoneGeometry>,
}

/// The zone model of a device; all sizes in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ZoneGeometry {
    /// Distance between two zone starts.
    pub zone_size: u64,
    /// Number of zones; the last one may be shorter.
    pub nr_zones: u32,
    /// Sequential zones that may be open at once; 0 is no limit.
    pub max_open: u32,
    /// Sequential zones that may be open or closed at once; 0 is no limit.
    pub max_active: u32,
    /// Largest zone append; 0 where append is not offered.
    pub max_append: u32,
}

/// A run of bytes of one kind, as reported by [`Device::extents`](super::Device::extents).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// First byte.
    pub offset: u64,
    /// Length in bytes, at least one.
    pub len: u64,
    /// What a reader finds there.
    pub kind: ExtentKind,
}

/// Kinds of extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtentKind {
    /// Stored data.
    Data,
    /// Reads as zeroes and occupies a place of its own.
    Zero,
    /// Reads as zeroes and occupies nothing.
    Hole,
}
