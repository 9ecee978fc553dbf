//! The 64-bit word of a page slot.
//!
//! | bits  | field          | meaning |
//! |-------|----------------|---------|
//! | 0     | lock           | somebody works on this slot |
//! | 1     | waiter         | somebody sleeps in the parking table for it |
//! | 2-4   | kind           | see [`Kind`] |
//! | 5-6   | algorithm      | which of up to four algorithms made the object (0 is the primary) |
//! | 7     | idle           | not touched since it was marked |
//! | 8     | picked         | a background pass works on it, and nobody has changed it since |
//! | 9     | incompressible | every algorithm failed on it |
//! | 10-15 | age            | epoch of the last access (see `age`); of a picked slot: the pass's tag |
//! | 16-27 | size           | stored bytes of a compressed object, 1 to 4095; spilled: 0 is a whole page |
//! | 28-63 | location       | object: place in the pool in 16-byte units; spilled: place on the backing device in 16-byte units; same: the 32-bit pattern; in flight: its number |

use std::fmt;

pub use crate::LOCATION_BITS;
use crate::word_lock::{self, LOCK, WAITER};

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
    /// The page's content is on its way from a disk; requests queue on it.
    InFlight = 5,
    /// The page lies on the backing device.
    Spilled = 6,
    /// In a snapshot: the page was never written since the origin was at its base, whatever the
    /// origin holds now.
    Base = 7,
}

/// One slot's word, by value.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
pub struct Word(u64);

const KIND_SHIFT: u32 = 2;
const KIND_MASK: u64 = 7 << KIND_SHIFT;
const ALGORITHM_SHIFT: u32 = 5;
const ALGORITHM_MASK: u64 = 3 << ALGORITHM_SHIFT;
const IDLE: u64 = 1 << 7;
const PICKED: u64 = 1 << 8;
const INCOMPRESSIBLE: u64 = 1 << 9;
const AGE_SHIFT: u32 = 10;
const AGE_MASK: u64 = (AGES as u64 - 1) << AGE_SHIFT;
const SIZE_SHIFT: u32 = 16;
const SIZE_MASK: u64 = 0xFFF << SIZE_SHIFT;
const LOCATION_SHIFT: u32 = 28;

/// Values of the age field.
pub const AGES: usize = 64;
const _: () = assert!(LOCATION_SHIFT + LOCATION_BITS == 64);

impl Word {
    /// An empty slot.
    pub const EMPTY: Self = Self(0);

    /// A page of a snapshot that is the base's.
    pub const BASE: Self = Self::new(Kind::Base, 0, 0, 0);

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

    /// A slot that waits for a disk; `flight`, below 2^36, numbers the wait.
    pub const fn in_flight(flight: u64) -> Self {
        Self::new(Kind::InFlight, 0, 0, flight)
    }

    /// A page whose object of `size` bytes (0: a whole page), made by algorithm number `algorithm`,
    /// lies on the backing device at `location`.
    pub const fn spilled(location: u64, size: u32, algorithm: u8) -> Self {
        Self::new(Kind::Spilled, algorithm, size, location)
    }

    /// The kind.
    #[inline]
    pub fn kind(self) -> Kind {
        match (self.0 >> KIND_SHIFT) & 7 {
            0 => Kind::Empty,
            1 => Kind::Same,
            2 => Kind::Pattern,
            3 => Kind::Compressed,
            4 => Kind::Huge,
            5 => Kind::InFlight,
            6 => Kind::Spilled,
            _ => Kind::Base,
        }
    }

    /// The word of this slot, which holds a compressed or huge object, once the object lies at
    /// `location` of the backing device: as it is, or as an `uncompressed` page.
    #[must_use]
    pub const fn spilled_to(self, location: u64, uncompressed: bool) -> Self {
        let kept = if uncompressed { 0 } else { self.0 & (ALGORITHM_MASK | SIZE_MASK) };
        Self(Self::spilled(location, 0, 0).0 | kept | self.0 & INCOMPRESSIBLE)
    }

    /// The word of this spilled slot, once its object lies in the pool again.
    #[must_use]
    pub const fn back_at(self, location: u64) -> Self {
        let kind = if self.0 & SIZE_MASK == 0 { Kind::Huge } else { Kind::Compressed };
        Self(Self::new(kind, 0, 0, location).0 | self.0 & (ALGORITHM_MASK | SIZE_MASK | INCOMPRESSIBLE))
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
            Kind::Empty | Kind::Same | Kind::InFlight | Kind::Spilled | Kind::Base => 0,
            Kind::Pattern => 8,
            Kind::Compressed => ((self.0 >> SIZE_SHIFT) & 0xFFF) as usize,
            Kind::Huge => crate::PAGE_BYTES,
        }
    }

    /// Bytes of the object on the backing device of a spilled slot.
    #[inline]
    pub const fn spilled_bytes(self) -> usize {
        match (self.0 >> SIZE_SHIFT) & 0xFFF {
            0 => crate::PAGE_BYTES,
            bytes => bytes as usize,
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

    // ---- what background passes know of a slot; never of an empty one, which is all zeroes ------

    /// Whether nobody has touched the page since it was marked.
    pub const fn is_idle(self) -> bool {
        self.0 & IDLE != 0
    }

    /// Marks a page idle, or takes the mark away.
    #[must_use]
    pub const fn with_idle(self, idle: bool) -> Self {
        if idle { Self(self.0 | IDLE) } else { Self(self.0 & !IDLE) }
    }

    /// Whether every algorithm failed on the page.
    pub const fn is_incompressible(self) -> bool {
        self.0 & INCOMPRESSIBLE != 0
    }

    /// Says that every algorithm failed on the page.
    #[must_use]
    pub const fn with_incompressible(self) -> Self {
        Self(self.0 | INCOMPRESSIBLE)
    }

    /// The epoch of the last access; of a picked slot the tag.
    pub const fn age(self) -> u8 {
        ((self.0 & AGE_MASK) >> AGE_SHIFT) as u8
    }

    /// The page was last touched in this epoch.
    #[must_use]
    pub const fn with_age(self, age: u8) -> Self {
        debug_assert!((age as usize) < AGES);
        Self(self.0 & !AGE_MASK | (age as u64) << AGE_SHIFT)
    }

    /// A background pass, whose work has this tag, takes the page on. The mark is gone as soon as
    /// somebody changes the page, so a pass that finds its tag again knows that nobody has.
    #[must_use]
    pub const fn picked(self, tag: u8) -> Self {
        Self(self.0 | PICKED).with_age(tag)
    }

    /// Whether any pass works on the page.
    pub const fn is_picked(self) -> bool {
        self.0 & PICKED != 0
    }

    /// Whether the pass with this tag works on the page, and nobody has changed it since.
    pub const fn is_picked_by(self, tag: u8) -> bool {
        self.is_picked() && self.age() == tag
    }

    /// The pass gave the page up; it is as old as `age` says.
    #[must_use]
    pub const fn unpicked(self, age: u8) -> Self {
        Self(self.0 & !PICKED).with_age(age)
    }

    /// The word after a read in epoch `now`: not idle. An empty one stays as it is; a picked one
    /// keeps its tag, so that a page which is read all the time can still leave memory.
    #[inline]
    #[must_use]
    pub const fn touched(self, now: u8) -> Self {
        let word = Self(self.0 & !IDLE);
        if self.0 & KIND_MASK == 0 || self.is_picked() { word } else { word.with_age(now) }
    }
}

impl word_lock::Word for Word {
    #[inline]
    fn from_bits(bits: u64) -> Self {
        Self(bits & !(LOCK | WAITER))
    }

    #[inline]
    fn bits(self) -> u64 {
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
    use crate::word_lock::Word as _;

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
    fn marks_do_not_touch_what_the_slot_holds() {
        let word = Word::compressed(77, 1234, 2).with_age(63).with_idle(true).with_incompressible();
        assert!(word.is_idle() && word.is_incompressible() && !word.is_picked() && word.age() == 63);
        let picked = word.picked(5);
        assert!(picked.is_picked_by(5) && !picked.is_picked_by(6) && picked.is_idle());
        assert_eq!(picked.unpicked(63), word);
        let touched = word.touched(9);
        assert!(!touched.is_idle() && touched.is_incompressible() && touched.age() == 9);
        assert!(picked.touched(9).is_picked_by(5) && !picked.touched(9).is_idle());
        for word in [word, picked, touched] {
            let fields = (word.kind(), word.location(), word.stored_bytes(), word.algorithm());
            assert_eq!(fields, (Kind::Compressed, 77, 1234, 2));
        }
        assert_eq!(Word::EMPTY.touched(9), Word::EMPTY);
        assert_eq!(Word::spilled(5, 0, 1).spilled_bytes(), 4096);
        assert_eq!(Word::spilled(5, 17, 1).spilled_bytes(), 17);
        let spilled = word.spilled_to(9, false);
        assert_eq!((spilled.kind(), spilled.location(), spilled.spilled_bytes()), (Kind::Spilled, 9, 1234));
        assert!(spilled.is_incompressible() && !spilled.is_idle() && !spilled.is_picked());
        assert_eq!(spilled.back_at(77), Word::compressed(77, 1234, 2).with_incompressible());
        assert_eq!(word.spilled_to(9, true).spilled_bytes(), 4096);
        assert_eq!(Word::huge(1).spilled_to(9, false).back_at(2), Word::huge(2));
        assert_eq!((Word::spilled(5, 17, 1).stored_bytes(), Word::spilled(5, 17, 1).object()), (0, None));
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
