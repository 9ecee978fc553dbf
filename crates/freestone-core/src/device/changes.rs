//! Changes: the data that a fork or snapshot stores itself.

use super::Result;

/// A run of bytes that are all changed or all unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// Offset of the first byte on the device.
    pub offset: u64,
    /// Length in bytes, at least one.
    pub len: u64,
    /// True if the device stores the bytes itself, because they were written, zeroed or discarded in a fork,
    /// or preserved in a snapshot. If false, the bytes are read from the base or origin.
    pub own: bool,
}

/// The changes of a fork against its base, or of a snapshot against its origin.
pub trait Changes: Send + Sync {
    /// Reports the changes of `[offset, offset + len)` by the rules of
    /// [`Device::extents`](super::Device::extents): in order, without gaps, at least one row. Neighbouring
    /// rows may be of the same kind. Returns the number of bytes described.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](super::Error::OutOfRange) (also if `len` is zero),
    /// [`Error::Gone`](super::Error::Gone) for an invalid snapshot.
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64>;
}
