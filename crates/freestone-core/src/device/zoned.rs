//! Zone operations, an optional trait of devices.

pub use super::geometry::ZoneGeometry;
use super::{Device, Flags, IoBuf, Result};

/// Type of a zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZoneType {
    /// Writable in any order.
    Conventional,
    /// Writable at the write pointer only.
    SequentialRequired,
}

/// Condition of a zone, as in the zoned block standards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZoneCondition {
    /// Conventional zone without a write pointer.
    NotWritePointer,
    /// Not written since the last reset.
    Empty,
    /// Opened implicitly, by a write.
    ImplicitOpen,
    /// Opened explicitly, by an open operation.
    ExplicitOpen,
    /// Partly written and not open; counts as active.
    Closed,
    /// Fully written or finished; not writable until a reset.
    Full,
    /// Readable only.
    ReadOnly,
    /// Neither readable nor writable.
    Offline,
}

impl ZoneType {
    /// Returns the number of the type in the zoned block standards, also used by the kernel and VIRTIO.
    pub fn number(self) -> u8 {
        match self {
            Self::Conventional => 1,
            Self::SequentialRequired => 2,
        }
    }
}

impl ZoneCondition {
    /// Returns the number of the condition in the zoned block standards, also used by the kernel and VIRTIO.
    pub fn number(self) -> u8 {
        match self {
            Self::NotWritePointer => 0,
            Self::Empty => 1,
            Self::ImplicitOpen => 2,
            Self::ExplicitOpen => 3,
            Self::Closed => 4,
            Self::ReadOnly => 13,
            Self::Full => 14,
            Self::Offline => 15,
        }
    }
}

/// A row of a zone report. Sizes and positions are in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zone {
    /// Offset of the first byte of the zone.
    pub start: u64,
    /// Length of the zone in the address space of the device.
    pub len: u64,
    /// Length of the writable part, from the start of the zone.
    pub capacity: u64,
    /// Offset of the next write on the device. For conventional, read-only and offline zones, the end of the
    /// zone.
    pub write_pointer: u64,
    /// Zone type.
    pub kind: ZoneType,
    /// Zone condition.
    pub condition: ZoneCondition,
}

/// An operation on a whole zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZoneOp {
    /// Opens a zone explicitly.
    Open,
    /// Closes a zone. A zone without written data becomes empty.
    Close,
    /// Makes a zone full, so that it is not writable until a reset.
    Finish,
    /// Makes a zone empty. The zone's data is lost.
    Reset,
}

/// A zone command from a client of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZoneRequest {
    /// Report zones, starting with the zone that contains the byte at this offset.
    Report(u64),
    /// Apply the operation to the zone that starts at this offset.
    Op(ZoneOp, u64),
    /// Reset all zones.
    ResetAll,
}

/// Callback of a submitted append. Receives the offset at which the data was written, or the error.
pub type AppendCompletion = Box<dyn FnOnce(Result<u64>) + Send>;

/// A zoned device.
///
/// # Requirements for implementations
/// * Zone operations, writes and appends to one zone take effect one after the other. A write or append takes
///   effect completely or not at all, also if it is tried.
/// * A write that does not start at the write pointer, or does not fit, changes nothing.
/// * `report` describes each zone at one point in time, which may differ between zones.
///
/// The device checks the offsets passed to `zone_op` and the append functions, so callers need not.
pub trait Zoned: Device {
    /// Calls `row` for each zone, starting with the zone that contains `offset`, until `row` returns false or
    /// the device ends.
    ///
    /// # Errors
    /// [`OutOfRange`](super::Error::OutOfRange).
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()>;

    /// Applies `op` to the zone that starts at `offset`.
    ///
    /// # Errors
    /// Zone errors; [`Misaligned`](super::Error::Misaligned) if no zone starts at `offset`.
    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()>;

    /// Resets every sequential zone that can be reset.
    ///
    /// # Errors
    /// [`Media`](super::Error::Media) if a backing file failed.
    fn reset_all(&self) -> Result<()>;

    /// Appends `data` to the zone that starts at `offset`, on the caller's thread. Returns the offset at
    /// which the data was written, or `None` if the append would block and nothing was written.
    ///
    /// # Errors
    /// Zone errors.
    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>>;

    /// Submits an append that would block, with an owned buffer.
    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion);
}
