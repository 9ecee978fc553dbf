//! Zeroes below a device: emptying a page there needs no mark in its slot.

/// What a request that empties pages knows about its device's parent. The facts stay true: pages
/// loaded meanwhile were not zeroes, and a rewind keeps the parent below the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Below {
    /// Bytes `[from, until)` read as zeroes from the parent.
    pub zeroes_from: u64,
    pub zeroes_until: u64,
    /// Up to this byte (a page boundary or the request's end) the parent was examined: no other
    /// zeroes are known before it.
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
