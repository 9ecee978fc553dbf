//! The 64-bit word of a slot.
//!
//! | bits  | field          | meaning |
//! |-------|----------------|---------|
//! | 0     | lock           | a thread works on this slot |
//! | 1     | waiter         | threads sleep in the parking table until the slot is unlocked |
//! | 2-4   | kind           | see [`Kind`] |
//! | 5-6   | algorithm      | algorithm of the object, 0 to 3 (0 is the primary); in a slot in a group, the number of reads, at most 3; in a spilled slot of size 0, 1 for a page of a group |
//! | 7     | idle           | not accessed since it was marked idle |
//! | 8     | picked         | a background pass works on the page, which has not changed since |
//! | 9     | incompressible | all algorithms failed to compress the page |
//! | 10-15 | age            | epoch of the last access (see `age`); in a picked slot, the tag of the pass |
//! | 16-27 | size           | stored bytes of a compressed object, 1 to 4095; in a spilled slot, 0 means a whole page or a page of a group; in a grouped slot, the bytes charged for the page |
//! | 28-63 | location       | object: location in the pool in 16-byte units; spilled: location on the backing device in 16-byte units; same: the 32-bit pattern; in flight: as before the flight; a page of a group, in memory or spilled: the place in the group; with the highest bit set, in memory: the number of a shared object |
//!
//! A word of kind [`Kind::Base`] has the kind field of an empty slot, and a size, which an empty slot does not have.

use std::fmt;

pub use crate::LOCATION_BITS;
use crate::word_lock::{self, LOCK, WAITER};

/// Kind of a slot's content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// No content: the page reads as zeroes, or as the page of the base.
    Empty = 0,
    /// A page that repeats a 32-bit pattern, which is stored in the word.
    Same = 1,
    /// A page that repeats a 64-bit pattern, which is stored in the pool.
    Pattern = 2,
    /// A compressed page in the pool.
    Compressed = 3,
    /// An incompressible page, stored uncompressed in the pool (a "huge" page in zram's terms).
    Huge = 4,
    /// The page is being read from disk, and requests for the page wait.
    InFlight = 5,
    /// The page was written back and is on the backing device only.
    Spilled = 6,
    /// The page is in an object that several slots refer to: compressed together with other pages in a group, or a
    /// [shared object](Word::is_shared) of pages with the same content.
    Grouped = 7,
    /// In a snapshot: the page is read from the base, because it was not written before the snapshot was
    /// taken. The origin may store another page now.
    Base = 8,
}

/// Value of a slot's word.
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
/// Algorithm field of a spilled slot whose page is in a group. The size field is 0 then; whole pages have
/// algorithm 0.
const SPILLED_IN_GROUP: u8 = 1;

/// Number of different values of the age field.
pub const AGES: usize = 64;
const _: () = assert!(LOCATION_SHIFT + LOCATION_BITS == 64);
/// Bit of the location of a grouped slot that marks a shared object.
const SHARED: u64 = 1 << (LOCATION_BITS - 1);

impl Word {
    /// Word of an empty slot.
    pub const EMPTY: Self = Self(0);

    /// Word of a snapshot's page that is read from the base.
    pub const BASE: Self = Self::new(Kind::Empty, 0, 1, 0);

    const fn new(kind: Kind, algorithm: u8, size: u32, location: u64) -> Self {
        debug_assert!(algorithm < 4 && size < 4096 && location < 1 << LOCATION_BITS);
        Self(
            (kind as u64) << KIND_SHIFT
                | (algorithm as u64) << ALGORITHM_SHIFT
                | (size as u64) << SIZE_SHIFT
                | location << LOCATION_SHIFT,
        )
    }

    /// Returns the word of a page that repeats a 32-bit pattern.
    pub const fn same(pattern: u32) -> Self {
        Self::new(Kind::Same, 0, 0, pattern as u64)
    }

    /// Returns the word of a page that repeats a 64-bit pattern, which is stored at `location` in the pool.
    pub const fn pattern(location: u64) -> Self {
        Self::new(Kind::Pattern, 0, 0, location)
    }

    /// Number of places in groups, and of shared objects.
    pub const PLACES: u64 = SHARED;

    /// Returns the word of a page at `place`, the number of a group and the page's position in it, whose meaning the
    /// caller defines, below [`PLACES`](Self::PLACES). `share` is the part of the group's bytes for which the page is
    /// charged, 1 to 4095.
    pub const fn grouped(place: u64, share: u32) -> Self {
        debug_assert!(share > 0 && place < Self::PLACES);
        Self::new(Kind::Grouped, 0, share, place)
    }

    /// Returns the word of a page that shares an object with pages of the same content. `number` is the object's
    /// number, whose meaning the caller defines, below [`PLACES`](Self::PLACES). The page is charged for `bytes` bytes,
    /// 1 to 4095.
    pub const fn shared(number: u64, bytes: u32, algorithm: u8) -> Self {
        debug_assert!(bytes > 0 && number < Self::PLACES);
        Self::new(Kind::Grouped, algorithm, bytes, number | SHARED)
    }

    /// Returns the word of a compressed page of `size` bytes, 1 to 4095, at `location` in the pool.
    pub const fn compressed(location: u64, size: u32, algorithm: u8) -> Self {
        debug_assert!(size > 0);
        Self::new(Kind::Compressed, algorithm, size, location)
    }

    /// Returns the word of an uncompressed page at `location` in the pool.
    pub const fn huge(location: u64) -> Self {
        Self::new(Kind::Huge, 0, 0, location)
    }

    /// Returns the word while the page is being read from a disk. Only the kind differs.
    #[must_use]
    pub const fn in_flight(self) -> Self {
        Self(self.0 & !KIND_MASK | (Kind::InFlight as u64) << KIND_SHIFT)
    }

    /// Returns the word of a page in flight as it was before the flight.
    #[must_use]
    pub const fn before_flight(self) -> Self {
        debug_assert!(self.0 & KIND_MASK == (Kind::InFlight as u64) << KIND_SHIFT);
        Self(self.0 & !KIND_MASK | (Kind::Spilled as u64) << KIND_SHIFT)
    }

    /// Returns the word of a page whose object of `size` bytes (0 means a whole page) is at `location` on the
    /// backing device.
    pub const fn spilled(location: u64, size: u32, algorithm: u8) -> Self {
        debug_assert!(size > 0 || algorithm == 0);
        Self::new(Kind::Spilled, algorithm, size, location)
    }

    /// Returns the word of a page whose group is on the backing device. `place` is as for
    /// [`grouped`](Self::grouped).
    pub const fn spilled_in_group(place: u64) -> Self {
        Self::new(Kind::Spilled, SPILLED_IN_GROUP, 0, place)
    }

    /// Returns true if the page's group is on the backing device.
    #[inline]
    pub fn is_spilled_in_group(self) -> bool {
        self.kind() == Kind::Spilled
            && self.0 & (ALGORITHM_MASK | SIZE_MASK) == u64::from(SPILLED_IN_GROUP) << ALGORITHM_SHIFT
    }

    /// Returns the kind of the slot's content.
    #[inline]
    pub fn kind(self) -> Kind {
        match (self.0 >> KIND_SHIFT) & 7 {
            0 if self.0 == 0 => Kind::Empty,
            0 => Kind::Base,
            1 => Kind::Same,
            2 => Kind::Pattern,
            3 => Kind::Compressed,
            4 => Kind::Huge,
            5 => Kind::InFlight,
            6 => Kind::Spilled,
            _ => Kind::Grouped,
        }
    }

    /// Returns true if the page shares an object with pages of the same content. Its kind is [`Kind::Grouped`].
    #[inline]
    pub const fn is_shared(self) -> bool {
        self.0 & KIND_MASK == (Kind::Grouped as u64) << KIND_SHIFT && self.location() & SHARED != 0
    }

    /// Returns true if the page is in a group in memory. Its kind is [`Kind::Grouped`].
    #[inline]
    pub const fn is_grouped(self) -> bool {
        self.0 & KIND_MASK == (Kind::Grouped as u64) << KIND_SHIFT && self.location() & SHARED == 0
    }

    /// Returns the number of the object that the page shares.
    pub const fn shared_number(self) -> u64 {
        self.location() & (SHARED - 1)
    }

    /// Returns the word for this compressed or huge page after writeback to `location` on the backing device.
    /// The stored object was written back, or the page if `uncompressed` is true.
    #[must_use]
    pub const fn spilled_to(self, location: u64, uncompressed: bool) -> Self {
        let fields = if uncompressed { 0 } else { self.0 & (ALGORITHM_MASK | SIZE_MASK) };
        Self(Self::spilled(location, 0, 0).0 | fields | self.0 & INCOMPRESSIBLE)
    }

    /// Returns the word for this written-back page after its object was stored in the pool again, at
    /// `location`.
    #[must_use]
    pub const fn loaded_to(self, location: u64) -> Self {
        let kind = if self.0 & SIZE_MASK == 0 { Kind::Huge } else { Kind::Compressed };
        Self(Self::new(kind, 0, 0, location).0 | self.0 & (ALGORITHM_MASK | SIZE_MASK | INCOMPRESSIBLE))
    }

    /// Returns the number of the compression algorithm, 0 to 3.
    #[inline]
    pub const fn algorithm(self) -> usize {
        ((self.0 >> ALGORITHM_SHIFT) & 3) as usize
    }

    /// Returns the size in bytes of the slot's own object in the pool, or 0 if the slot has none.
    #[inline]
    pub fn stored_bytes(self) -> usize {
        match self.kind() {
            Kind::Grouped => 0,
            _ => self.memory_bytes(),
        }
    }

    /// Returns the bytes of pool memory that the page is charged for: the size of its object, or its share of a group.
    #[inline]
    pub fn memory_bytes(self) -> usize {
        match self.kind() {
            Kind::Empty | Kind::Same | Kind::InFlight | Kind::Spilled | Kind::Base => 0,
            Kind::Pattern => 8,
            Kind::Compressed | Kind::Grouped => ((self.0 >> SIZE_SHIFT) & 0xFFF) as usize,
            Kind::Huge => crate::PAGE_BYTES,
        }
    }

    /// Returns the size in bytes of a written-back object on the backing device. The page is not in a group.
    #[inline]
    pub const fn spilled_bytes(self) -> usize {
        match (self.0 >> SIZE_SHIFT) & 0xFFF {
            0 => crate::PAGE_BYTES,
            bytes => bytes as usize,
        }
    }

    /// Returns the location field: depending on the kind an object's location or a pattern.
    #[inline]
    pub const fn location(self) -> u64 {
        self.0 >> LOCATION_SHIFT
    }

    /// Returns the location of the slot's object in the pool, or `None` if the slot has no object there.
    #[inline]
    pub fn object(self) -> Option<u64> {
        matches!(self.kind(), Kind::Pattern | Kind::Compressed | Kind::Huge).then(|| self.location())
    }

    /// Returns this word with its object at `location` instead.
    #[must_use]
    pub const fn moved_to(self, location: u64) -> Self {
        Self(self.0 & ((1 << LOCATION_SHIFT) - 1) | location << LOCATION_SHIFT)
    }

    // ---- background passes: these bits are never set in an empty slot, whose word is 0 ------------

    /// Returns true if the page has not been accessed since it was marked idle.
    pub const fn is_idle(self) -> bool {
        self.0 & IDLE != 0
    }

    /// Returns the word with the idle mark set or cleared.
    #[must_use]
    pub const fn with_idle(self, idle: bool) -> Self {
        if idle { Self(self.0 | IDLE) } else { Self(self.0 & !IDLE) }
    }

    /// Returns true if all algorithms failed to compress the page.
    pub const fn is_incompressible(self) -> bool {
        self.0 & INCOMPRESSIBLE != 0
    }

    /// Returns the word with the page marked as incompressible by all algorithms.
    #[must_use]
    pub const fn with_incompressible(self) -> Self {
        Self(self.0 | INCOMPRESSIBLE)
    }

    /// Returns the epoch of the last access, or for a picked slot the tag of the background pass.
    pub const fn age(self) -> u8 {
        ((self.0 & AGE_MASK) >> AGE_SHIFT) as u8
    }

    /// Returns the word with this epoch of the last access.
    #[must_use]
    pub const fn with_age(self, age: u8) -> Self {
        debug_assert!((age as usize) < AGES);
        Self(self.0 & !AGE_MASK | (age as u64) << AGE_SHIFT)
    }

    /// Returns the word with the page marked as picked by the background pass with this tag. Any change of
    /// the page clears the mark, so a pass that finds its tag again knows that the page is unchanged.
    #[must_use]
    pub const fn picked(self, tag: u8) -> Self {
        Self(self.0 | PICKED).with_age(tag)
    }

    /// Returns true if any background pass works on the page.
    pub const fn is_picked(self) -> bool {
        self.0 & PICKED != 0
    }

    /// Returns true if the background pass with this tag works on the page and the page is unchanged.
    pub const fn is_picked_by(self, tag: u8) -> bool {
        self.is_picked() && self.age() == tag
    }

    /// Returns the word without the mark of a background pass, with this epoch of the last access.
    #[must_use]
    pub const fn unpicked(self, age: u8) -> Self {
        Self(self.0 & !PICKED).with_age(age)
    }

    /// Returns the word after a read in epoch `now`, without the idle mark. Picked slots keep their tag, so
    /// that a page can be evicted even if it is read all the time.
    #[inline]
    #[must_use]
    pub const fn touched(self, now: u8) -> Self {
        let word = Self(self.0 & !IDLE);
        if self.0 & KIND_MASK == 0 || self.is_picked() { word } else { word.with_age(now) }
    }

    /// Returns the number of epochs in which a grouped page was read since
    /// [`without_reads`](Self::without_reads), at most [`READS_MAX`](Self::READS_MAX).
    pub const fn reads(self) -> usize {
        self.algorithm()
    }

    /// Largest number of reads that a grouped slot counts.
    pub const READS_MAX: usize = 3;

    /// Returns the word of a grouped page after a read in epoch `now`. Reads of picked slots do not count.
    #[must_use]
    pub const fn read_in_group(self, now: u8) -> Self {
        let counts = self.age() != now && self.reads() < Self::READS_MAX && !self.is_picked();
        let word = self.touched(now);
        if counts { Self(word.0 + (1 << ALGORITHM_SHIFT)) } else { word }
    }

    /// Returns the word of a grouped page without counted reads.
    #[must_use]
    pub const fn without_reads(self) -> Self {
        Self(self.0 & !ALGORITHM_MASK)
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
    fn marks_do_not_change_content() {
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
        assert_eq!(Word::spilled(5, 0, 0).spilled_bytes(), 4096);
        assert_eq!(Word::spilled(5, 17, 1).spilled_bytes(), 17);
        let spilled = word.spilled_to(9, false);
        assert_eq!((spilled.kind(), spilled.location(), spilled.spilled_bytes()), (Kind::Spilled, 9, 1234));
        assert!(spilled.is_incompressible() && !spilled.is_idle() && !spilled.is_picked());
        assert_eq!(spilled.loaded_to(77), Word::compressed(77, 1234, 2).with_incompressible());
        assert_eq!(word.spilled_to(9, true).spilled_bytes(), 4096);
        assert_eq!(Word::huge(1).spilled_to(9, false).loaded_to(2), Word::huge(2));
        assert_eq!((Word::spilled(5, 17, 1).stored_bytes(), Word::spilled(5, 17, 1).object()), (0, None));
    }

    #[test]
    fn only_stored_kinds_have_objects() {
        assert_eq!(Word::same(7).object(), None);
        assert_eq!(Word::huge(7).in_flight().object(), None);
        assert_eq!(Word::spilled(7, 17, 1).in_flight().location(), 7);
        assert_eq!(Word::EMPTY.object(), None);
        assert_eq!(Word::pattern(7).object(), Some(7));
        assert_eq!(Word::huge(7).object(), Some(7));
        assert_eq!(Word::huge(7).stored_bytes(), 4096);
    }

    #[test]
    fn shared_word_is_grouped_and_has_no_object() {
        let word = Word::shared(Word::PLACES - 1, 4095, 3).with_age(17).with_incompressible();
        assert!(word.is_shared() && !word.is_grouped() && word.is_incompressible());
        assert_eq!(
            (word.kind(), word.shared_number(), word.algorithm()),
            (Kind::Grouped, Word::PLACES - 1, 3)
        );
        assert_eq!((word.memory_bytes(), word.stored_bytes(), word.object()), (4095, 0, None));
        assert_eq!((word.touched(18).age(), word.touched(18).algorithm()), (18, 3));
        assert_eq!(Word::shared(0, 1, 0).shared_number(), 0);
        let others = [Word::grouped(Word::PLACES - 1, 5), Word::compressed(Word::PLACES, 5, 0), Word::EMPTY];
        assert!(others.into_iter().all(|word| !word.is_shared()));
    }

    #[test]
    fn grouped_and_base_words_have_no_object() {
        let top = Word::PLACES - 1;
        let word = Word::grouped(top, 4095).with_age(17);
        assert!(word.is_grouped() && !Word::EMPTY.is_grouped() && !Word::spilled_in_group(top).is_grouped());
        assert_eq!((word.kind(), word.location(), word.memory_bytes()), (Kind::Grouped, top, 4095));
        assert_eq!((word.object(), word.stored_bytes()), (None, 0), "the slot has no object of its own");
        assert_eq!(
            (Word::BASE.kind(), Word::BASE.memory_bytes(), Word::BASE.object()),
            (Kind::Base, 0, None)
        );
        assert_eq!(Word::BASE.touched(9), Word::BASE);
        let read = word.with_idle(true).read_in_group(18).read_in_group(18).read_in_group(19);
        assert_eq!((read.reads(), read.age(), read.is_idle()), (2, 19, false), "a read for each epoch");
        assert_eq!(read.read_in_group(20).read_in_group(21).reads(), Word::READS_MAX);
        assert_eq!(read.without_reads(), word.with_age(19));
        assert_eq!(word.picked(5).read_in_group(18), word.picked(5));
        assert_eq!((read.kind(), read.location(), read.memory_bytes()), (Kind::Grouped, top, 4095));
        let spilled = Word::spilled_in_group(top);
        assert!(spilled.is_spilled_in_group() && spilled.touched(9).is_spilled_in_group());
        assert_eq!((spilled.kind(), spilled.location(), spilled.memory_bytes()), (Kind::Spilled, top, 0));
        let others =
            [word, Word::spilled(5, 0, 0), Word::spilled(5, 17, 1), Word::huge(5).spilled_to(9, false)];
        assert!(others.iter().all(|word| !word.is_spilled_in_group()));
    }
}
