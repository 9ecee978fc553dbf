//! Zone operations: a second trait that a device may offer.

pub use super::geometry::ZoneGeometry;
use super::{Device, Flags, IoBuf, Result};

/// Type of a zone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZoneType {
    /// Written in any order.
    Conventional,
    /// Written at the write pointer only.
    SequentialRequired,
}

/// Condition of a zone, as in the zoned block standards.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZoneCondition {
    /// A conventional zone: it has no write pointer.
    NotWritePointer,
    /// Nothing written since the last reset.
    Empty,
    /// Opened by a write.
    ImplicitOpen,
    /// Opened by an open operation.
    ExplicitOpen,
    /// Partly written, holds no open resource.
    Closed,
    /// No more writes until a reset.
    Full,
    /// Reads only.
    ReadOnly,
    /// Neither reads nor writes.
    Offline,
}

impl ZoneType {
    /// Its number in the zoned block standards, and so in the kernel and in VIRTIO.
    pub fn number(self) -> u8 {
        match self {
            Self::Conventional => 1,
            Self::SequentialRequired => 2,
        }
    }
}

impl ZoneCondition {
    /// Its number in the zoned block standards, and so in the kernel and in VIRTIO.
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

/// One row of a zone report; all in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Zone {
    /// First byte of the zone.
    pub start: u64,
    /// Its length on the device.
    pub len: u64,
    /// How much of it can be written.
    pub capacity: u64,
    /// Where the next write goes (absolute). For conventional, read-only and offline zones: the end
    /// of the zone.
    pub write_pointer: u64,
    /// Its type.
    pub kind: ZoneType,
    /// Its condition.
    pub condition: ZoneCondition,
}

/// What can be done to a zone as a whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ZoneOp {
    /// To explicitly open.
    Open,
    /// To closed (or empty, where nothing was written).
    Close,
    /// To full.
    Finish,
    /// To empty; its data is gone.
    Reset,
}

/// What those who export a device are asked to do with its zones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ZoneRequest {
    /// Tell of them, from the one that has this byte on.
    Report(u64),
    /// This, to the zone that begins at this byte.
    Op(ZoneOp, u64),
    /// Reset all.
    ResetAll,
}

/// How an append that did not finish inline is answered: where the data went, or why it did not.
pub type AppendCompletion = Box<dyn FnOnce(Result<u64>) + Send>;

/// A zoned device.
///
/// # What an implementor must do
/// * Zone operations, writes and appends to one zone take effect one after the other; a write or
///   append is all or nothing, also when it is only tried.
/// * A write that does not start at the write pointer, or does not fit, changes nothing.
/// * `report` shows each zone as it was at one moment; two zones may be seen at two moments.
///
/// # What an implementor may rely on
/// * Offsets handed to `zone_op` and `append` are checked by the device, not by the caller.
pub trait Zoned: Device {
    /// Calls `row` for the zones from the one that holds `offset` on, until it returns false or the
    /// device ends.
    ///
    /// # Errors
    /// [`OutOfRange`](super::Error::OutOfRange).
    fn report(&self, offset: u64, row: &mut dyn FnMut(Zone) -> bool) -> Result<()>;

    /// Does `op` to the zone that starts at `offset`.
    ///
    /// # Errors
    /// Zone errors; [`Misaligned`](super::Error::Misaligned) where no zone starts at `offset`.
    fn zone_op(&self, op: ZoneOp, offset: u64) -> Result<()>;

    /// Resets every sequential zone that can be reset.
    ///
    /// # Errors
    /// [`Media`](super::Error::Media) where a backing failed.
    fn reset_all(&self) -> Result<()>;

    /// Writes `data` at the write pointer of the zone that starts at `offset`, on the caller's
    /// thread. `None` is "would block", nothing was written; else the byte where the data went.
    ///
    /// # Errors
    /// Zone errors.
    fn try_append(&self, offset: u64, data: &[u8], flags: Flags) -> Result<Option<u64>>;

    /// The second half of [`try_append`](Self::try_append), with an owned buffer.
    fn submit_append(&self, offset: u64, data: IoBuf, flags: Flags, done: AppendCompletion);
}
