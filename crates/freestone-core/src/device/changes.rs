//! Changes: the data that a fork or snapshot stores itself.

use super::Result;

/// A run of bytes that are all changed or all unchanged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// First byte.
    pub offset: u64,
    /// Length in bytes, at least one.
    pub len: u64,
    /// True if the device stores the bytes itself: they were written, zeroed or discarded in a fork, or
    /// preserved in a snapshot. Otherwise they are read from the base.
    pub own: bool,
}

/// A fork of a base, or a snapshot of an origin.
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
