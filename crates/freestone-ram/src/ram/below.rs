//! Where a device lies over zeroes: there emptying a page needs no mark.

/// What a request that empties pages knows of what lies below its device. It stays true, as that does
/// not change: what is loaded meanwhile was no zeroes, and a rewind leaves what is below the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Below {
    /// Bytes `[from, until)` read as zeroes below.
    pub zeroes_from: u64,
    pub zeroes_until: u64,
    /// Up to this byte, a whole page's or the request's end, nothing else is known to be zeroes.
    pub known_until: u64,
}

impl Below {
    /// Returns the end of the zeroes in which byte `at` lies, or `at`.
    pub fn end_of_zeroes(&self, at: u64) -> u64 {
        if (self.zeroes_from..self.zeroes_until).contains(&at) { self.zeroes_until } else { at }
    }
}

#[cfg(test)]
#[path = "below_tests.rs"]
mod tests;
