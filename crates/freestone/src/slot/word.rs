//! The 64-bit word of a page slot.
//!
//! | bits  | field          | meaning |
//! |-------|----------------|---------|
//! | 0     | lock           | somebody works on this slot |
//! | 1     | waiter         | somebody sleeps in the parking table for it |
//! | 2-4   | kind           | see [`Kind`] |
//! | 5-6   | algorithm      | which of up to four algorithms made the object (0 is the primary) |
//! | 7     | idle           | not touched since it was marked |
//! | 8     | picked         | chosen by a background pass |
//! | 9     | incompressible | every algorithm failed on it |
//! | 10-15 | age            | coarse time of the last access |
//! | 16-27 | size           | stored bytes of a compressed object, 1 to 4095 |
//! | 28-63 | location       | object: place in the pool in 16-byte units; same: the 32-bit pattern; in flight: its number |

use std::fmt;

/// What a slot holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Nothing: reads as zeroes (or, over a base, as the base).
    Empty = 0,
    /// A page that repeats one 32-bit pattern, which lies in the word.
    Same = 1,
    /// A page that repeats one 64-bit pattern, which lies in the pool.
    Pattern = 2,
    /// A compressed object in the pool.
    Compressed = 3,
    /// An incompressible page, stored as it is ("huge" in the kernel's words).
    Huge = 4,
    /// The page's content is on its way from or to a disk; requests queue on it.
    InFlight = 5,
}

/// One slot's word, by value.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Word(u64);

pub(super) const LOCK: u64 = 1;
pub(super) const WAITER: u64 = 1 << 1;
const KIND_SHIFT: u32 = 2;
const ALGORITHM_SHIFT: u32 = 5;
const SIZE_SHIFT: u32 = 16;
const LOCATION_SHIFT: u32 = 28;

/// Bits of a location; a pool ends at 2^36 units of 16 bytes, 1 TiB.
pub const LOCATION_BITS: u32 = 36;
const _: () = assert!(LOCATION_SHIFT + LOCATION_BITS == 64);

impl Word {
    /// An empty slot.
    pub const EMPTY: Self = Self(0);

    const fn new(kind: Kind, algorithm: u8, size: u32, location: u64) -> Self {
        debug_assert!(algorithm < 4 && size < 4096 && location < 1 << LOCATION_BITS);
        Self(
            (kind as u64) << KIND_SHIFT
                | (algorithm as u64) << ALGORITHM_SHIFT
                | (size as u64) << SIZE_SHIFT
                | location << LOCATION_SHIFT,
        )
    }

    /// A page of one repeated 32-bit pattern.
    pub const fn same(pattern: u32) -> Self {
        Self::new(Kind::Same, 0, 0, pattern as u64)
    }

    /// A page of one repeated 64-bit pattern, stored at `location`.
    pub const fn pattern(location: u64) -> Self {
        Self::new(Kind::Pattern, 0, 0, location)
    }

    /// A compressed object of `size` bytes (1 to 4095) made by algorithm number `algorithm`.
    pub const fn compressed(location: u64, size: u32, algorithm: u8) -> Self {
        debug_assert!(size > 0);
        Self::new(Kind::Compressed, algorithm, size, location)
    }

    /// An uncompressed page.
    pub const fn huge(location: u64) -> Self {
        Self::new(Kind::Huge, 0, 0, location)
    }

    /// A slot that waits for a disk; `flight` numbers the wait.
    pub const fn in_flight(flight: u32) -> Self {
        Self::new(Kind::InFlight, 0, 0, flight as u64)
    }

    /// The kind. Words come from tables of this process only, so every value is known.
    #[inline]
    pub fn kind(self) -> Kind {
        match (self.0 >> KIND_SHIFT) & 7 {
            0 => Kind::Empty,
            1 => Kind::Same,
            2 => Kind::Pattern,
            3 => Kind::Compressed,
            4 => Kind::Huge,
            5 => Kind::InFlight,
            other => unreachable!("slot of unknown kind {other}"),
        }
    }

    /// The number of the algorithm, 0 to 3.
    #[inline]
    pub const fn algorithm(self) -> usize {
        ((self.0 >> ALGORITHM_SHIFT) & 3) as usize
    }

    /// Bytes of the object in the pool; 0 where there is none.
    #[inline]
    pub fn stored_bytes(self) -> usize {
        match self.kind() {
            Kind::Empty | Kind::Same | Kind::InFlight => 0,
            Kind::Pattern => 8,
            Kind::Compressed => ((self.0 >> SIZE_SHIFT) & 0xFFF) as usize,
            Kind::Huge => crate::PAGE_BYTES,
        }
    }

    /// The location field: an object's place, a pattern, or a flight's number, by kind.
    #[inline]
    pub const fn location(self) -> u64 {
        self.0 >> LOCATION_SHIFT
    }

    /// Where the pool holds this slot's object, if it has one.
    #[inline]
    pub fn object(self) -> Option<u64> {
        matches!(self.kind(), Kind::Pattern | Kind::Compressed | Kind::Huge).then(|| self.location())
    }

    /// The same word with its object at another place.
    #[must_use]
    pub const fn moved_to(self, location: u64) -> Self {
        Self(self.0 & ((1 << LOCATION_SHIFT) - 1) | location << LOCATION_SHIFT)
    }

    pub(super) const fn from_bits(bits: u64) -> Self {
        Self(bits & !(LOCK | WAITER))
    }

    pub(super) const fn bits(self) -> u64 {
        self.0
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?}(algorithm {}, {} bytes, at {:#x})",
            self.kind(),
            self.algorithm(),
            self.stored_bytes(),
            self.location()
        )
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn fields_do_not_overlap() {
        let top = (1 << LOCATION_BITS) - 1;
        let word = Word::compressed(top, 4095, 3);
        assert_eq!(
            (word.kind(), word.algorithm(), word.stored_bytes(), word.location()),
            (Kind::Compressed, 3, 4095, top)
        );
        assert_eq!(word.bits() & (LOCK | WAITER), 0);
        let moved = word.moved_to(5);
        assert_eq!(
            (moved.kind(), moved.algorithm(), moved.stored_bytes(), moved.location()),
            (Kind::Compressed, 3, 4095, 5)
        );
        assert_eq!(Word::same(u32::MAX).location(), u64::from(u32::MAX));
        assert_eq!(Word::EMPTY.kind(), Kind::Empty);
    }

    #[test]
    fn only_stored_kinds_have_objects() {
        assert_eq!(Word::same(7).object(), None);
        assert_eq!(Word::in_flight(7).object(), None);
        assert_eq!(Word::EMPTY.object(), None);
        assert_eq!(Word::pattern(7).object(), Some(7));
        assert_eq!(Word::huge(7).object(), Some(7));
        assert_eq!(Word::huge(7).stored_bytes(), 4096);
    }
}
