//! State of a zone in one 64-bit word.
//!
//! | bits | field |
//! |---|---|
//! | 0 | locked |
//! | 1 | a thread waits for the lock |
//! | 2 | busy: a request or an operation owns the zone for longer |
//! | 3-6 | condition, with the numbers of the zoned block standards |
//! | 7-47 | write pointer, in sectors of 512 bytes from the start of the zone |
//! | 48-63 | generation: changes whenever data disappears or reappears, as by a reset |
//!
//! Readers take no lock, but check the generation after they have read the data. The generation
//! wraps around after 65 536 changes. A reader would miss a change only if exactly that many
//! happened during one read.

use std::fmt;

use freestone_core::device::zoned::ZoneCondition;
use freestone_core::word_lock::{self, LOCK, WAITER};

const BUSY: u64 = 4;
const CONDITION_SHIFT: u32 = 3;
const CONDITION_MASK: u64 = 0xF << CONDITION_SHIFT;
const POINTER_SHIFT: u32 = 7;
const POINTER_BITS: u32 = 41;
const POINTER_MASK: u64 = ((1 << POINTER_BITS) - 1) << POINTER_SHIFT;
const GENERATION_SHIFT: u32 = POINTER_SHIFT + POINTER_BITS;
/// log2 of the size of a sector in bytes.
pub const SECTOR_SHIFT: u32 = 9;

const _: () = assert!(GENERATION_SHIFT + u16::BITS == u64::BITS);
const _: () = assert!(super::layout::ZONE_SIZE_MAX_BYTES >> SECTOR_SHIFT < 1 << POINTER_BITS);

/// State word of a zone, without the bits of the lock.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Word(u64);

impl Word {
    /// Creates the state word of a zone that is not busy, with generation 0. `pointer` is the write
    /// pointer in bytes from the start of the zone.
    pub const fn new(condition: ZoneCondition, pointer: u64) -> Self {
        Self(code(condition) << CONDITION_SHIFT).with_pointer(pointer)
    }

    #[inline]
    pub const fn condition(self) -> ZoneCondition {
        match (self.0 & CONDITION_MASK) >> CONDITION_SHIFT {
            0 => ZoneCondition::NotWritePointer,
            1 => ZoneCondition::Empty,
            2 => ZoneCondition::ImplicitOpen,
            3 => ZoneCondition::ExplicitOpen,
            4 => ZoneCondition::Closed,
            0xD => ZoneCondition::ReadOnly,
            0xE => ZoneCondition::Full,
            // `code` produces no other value than 0xF here.
            _ => ZoneCondition::Offline,
        }
    }

    #[inline]
    #[must_use]
    pub const fn with_condition(self, condition: ZoneCondition) -> Self {
        Self(self.0 & !CONDITION_MASK | code(condition) << CONDITION_SHIFT)
    }

    /// Returns the write pointer in bytes from the start of the zone.
    #[inline]
    pub const fn pointer(self) -> u64 {
        ((self.0 & POINTER_MASK) >> POINTER_SHIFT) << SECTOR_SHIFT
    }

    /// Returns the word with this write pointer, in bytes from the start of the zone.
    #[inline]
    #[must_use]
    pub const fn with_pointer(self, bytes: u64) -> Self {
        debug_assert!(bytes <= super::layout::ZONE_SIZE_MAX_BYTES && bytes.is_multiple_of(1 << SECTOR_SHIFT));
        Self(self.0 & !POINTER_MASK | (bytes >> SECTOR_SHIFT) << POINTER_SHIFT)
    }

    /// Returns true if a request or an operation owns the zone.
    #[inline]
    pub const fn is_busy(self) -> bool {
        self.0 & BUSY != 0
    }

    /// Returns the word with the busy bit set or cleared.
    #[inline]
    #[must_use]
    pub const fn with_busy(self, busy: bool) -> Self {
        if busy { Self(self.0 | BUSY) } else { Self(self.0 & !BUSY) }
    }

    /// Returns the generation, which changes whenever data disappears or reappears, so that readers
    /// must repeat a read.
    #[inline]
    pub const fn generation(self) -> u16 {
        (self.0 >> GENERATION_SHIFT) as u16
    }

    #[must_use]
    pub const fn next_generation(self) -> Self {
        Self(self.0.wrapping_add(1 << GENERATION_SHIFT))
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

const fn code(condition: ZoneCondition) -> u64 {
    match condition {
        ZoneCondition::NotWritePointer => 0,
        ZoneCondition::Empty => 1,
        ZoneCondition::ImplicitOpen => 2,
        ZoneCondition::ExplicitOpen => 3,
        ZoneCondition::Closed => 4,
        ZoneCondition::ReadOnly => 0xD,
        ZoneCondition::Full => 0xE,
        ZoneCondition::Offline => 0xF,
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let busy = if self.is_busy() { ", busy" } else { "" };
        let (condition, pointer, generation) = (self.condition(), self.pointer(), self.generation());
        write!(f, "{condition:?}(pointer {pointer}, generation {generation}{busy})")
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::zone::ZONE_SIZE_MAX_BYTES;
    use freestone_core::word_lock::Word as _;

    #[test]
    fn zone_word_fields_do_not_overlap() {
        use ZoneCondition::{
            Closed, Empty, ExplicitOpen, Full, ImplicitOpen, NotWritePointer, Offline, ReadOnly,
        };
        for condition in [NotWritePointer, Empty, ImplicitOpen, ExplicitOpen, Closed, Full, ReadOnly, Offline]
        {
            for pointer in [0, 512, 4096, ZONE_SIZE_MAX_BYTES - 512, ZONE_SIZE_MAX_BYTES] {
                let mut word = Word::new(condition, pointer);
                for generation in [0, 1, u16::MAX, 0] {
                    while word.generation() != generation {
                        word = word.next_generation();
                    }
                    for busy in [true, false] {
                        word = word.with_busy(busy);
                        assert_eq!((word.condition(), word.pointer()), (condition, pointer));
                        assert_eq!((word.generation(), word.is_busy()), (generation, busy));
                        assert_eq!(word.bits() & (LOCK | WAITER), 0);
                    }
                }
                assert_eq!(word.with_condition(Full).with_pointer(512), Word::new(Full, 512));
            }
        }
    }
}
