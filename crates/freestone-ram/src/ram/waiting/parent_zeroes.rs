//! Zeroes in the parent of a device. To empty a page there, the slot can be left empty: no zero
//! page must hide the parent's content.

/// Zeroes that a request which empties pages has looked up in the parent of its device. The result
/// stays valid: pages loaded from a file meanwhile were not zeroes, and a rewind keeps the parent
/// below the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(in crate::ram) struct ParentZeroes {
    /// The bytes `[zeroes_from, zeroes_until)` read as zeroes from the parent.
    pub zeroes_from: u64,
    pub zeroes_until: u64,
    /// Byte up to which the parent was examined: a page boundary or the request's end. Bytes from
    /// `zeroes_until` to here count as data.
    pub known_until: u64,
}

impl ParentZeroes {
    /// Returns the end of the known zeroes that include byte `at`; `at` itself if it is not known
    /// to be zero.
    pub fn end_of_zeroes(&self, at: u64) -> u64 {
        if (self.zeroes_from..self.zeroes_until).contains(&at) { self.zeroes_until } else { at }
    }
}
