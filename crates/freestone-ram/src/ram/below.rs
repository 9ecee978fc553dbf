//! Where a device lies over zeroes: there emptying a page needs no mark.

use super::extents::below_extents;
use super::parent::Parent;
use super::{Inner, LOGICAL_BLOCK_BYTES, PAGE};
use freestone_core::device::{Flags, Op, Request};
use freestone_core::zeroes::leading_zeroes;

/// Bytes that one look goes through.
const LOOK_BYTES_MAX: u64 = 1 << 30;

/// What a request that empties pages knows of what lies below its device. It stays true, as that does
/// not change: what is loaded meanwhile was no zeroes, and a rewind leaves what is below the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Below {
    /// Bytes `[from, until)` read as zeroes below.
    zeroes_from: u64,
    zeroes_until: u64,
    /// Up to this byte, a whole page's or the request's end, nothing else is known to be zeroes.
    pub known_until: u64,
}

impl Below {
    /// Returns the end of the zeroes in which byte `at` lies, or `at`.
    pub fn zeroes_until(&self, at: u64) -> u64 {
        if (self.zeroes_from..self.zeroes_until).contains(&at) { self.zeroes_until } else { at }
    }
}

impl Inner {
    /// Returns true if a request must look at what lies below the device before it goes on.
    pub(super) fn looks_below(&self, request: &Request, below: &Below) -> bool {
        let empties = match request.op {
            Op::Discard => true,
            Op::WriteZeroes => request.flags.contains(Flags::MAY_FREE),
            Op::Read | Op::Write | Op::Flush => false,
        };
        let is_unknown =
            empties && !matches!(self.parent, Parent::Nothing) && below.known_until <= request.offset;
        // A request that is refused looks at nothing.
        is_unknown && request.check_place(self.size(), LOGICAL_BLOCK_BYTES).is_ok()
    }

    /// Looks at what lies below the device, from the start of a request on. May wait for a disk.
    pub(super) fn look_below(&self, request: &Request) -> Below {
        let (offset, end) = (request.offset, request.offset + request.len);
        let end = end.min((offset + LOOK_BYTES_MAX) / PAGE * PAGE);
        let here = self.parent.here();
        let (zeroes_until, known_until) = leading_zeroes(offset, end, |from, len, row| {
            below_extents(&self.parent, here.as_ref(), from, from + len, row).map(drop)
        });
        // A page that is no whole one of zeroes is data.
        let known_until = known_until.next_multiple_of(PAGE).min(offset + request.len);
        Below { zeroes_from: offset, zeroes_until, known_until }
    }
}

#[cfg(test)]
#[path = "below_tests.rs"]
mod tests;
