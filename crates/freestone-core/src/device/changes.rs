//! What a device holds itself over what it was made from.

use super::Result;

/// A run of bytes that a device holds itself, or does not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Change {
    /// First byte.
    pub offset: u64,
    /// Length in bytes, at least one.
    pub len: u64,
    /// Whether the device holds it itself: it was written, zeroed or discarded in a fork, or
    /// preserved in a snapshot. What is not held is read from the base.
    pub own: bool,
}

/// A device that was made from another: a fork of a base, a snapshot of an origin.
pub trait Changes: Send + Sync {
    /// Describes `[offset, offset + len)` as [`Device::extents`](super::Device::extents) does, and
    /// with the same rules: in order, without gaps, at least one row, neighbours of one kind
    /// perhaps in several rows. Returns how many bytes were described.
    ///
    /// # Errors
    /// [`Error::OutOfRange`](super::Error::OutOfRange) (also where `len` is zero),
    /// [`Error::Gone`](super::Error::Gone) of a snapshot that is invalid.
    fn changes(&self, offset: u64, len: u64, row: &mut dyn FnMut(Change) -> bool) -> Result<u64>;
}
