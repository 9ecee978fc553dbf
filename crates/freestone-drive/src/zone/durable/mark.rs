//! Mark: the durable state of a zone in the state file.

use crate::zone::ZoneCondition;
use crate::zone::table::word::{SECTOR_SHIFT, Word};

/// Durable state of a zone, as stored in the state file: a kind in the bits above the lower 41
/// bits, which contain the write pointer in sectors. Within one generation of a zone, marks only
/// grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(pub u64);

const KIND_SHIFT: u32 = 41;
const POINTER_MASK: u64 = (1 << KIND_SHIFT) - 1;
const WRITTEN: u64 = 0;
const FULL: u64 = 1;
const READ_ONLY: u64 = 2;
const OFFLINE: u64 = 3;

impl Mark {
    pub const EMPTY: Self = Self(0);

    /// Returns the mark of a zone with this state word. Open and closed zones have the same mark.
    pub fn of(word: Word) -> Self {
        let kind = match word.condition() {
            ZoneCondition::Full => FULL,
            ZoneCondition::ReadOnly => return Self(READ_ONLY << KIND_SHIFT),
            ZoneCondition::Offline => return Self(OFFLINE << KIND_SHIFT),
            _ => WRITTEN,
        };
        Self(kind << KIND_SHIFT | word.pointer() >> SECTOR_SHIFT)
    }

    /// Returns the write pointer in bytes from the start of the zone, or 0 if the zone has no write
    /// pointer.
    pub const fn pointer(self) -> u64 {
        (self.0 & POINTER_MASK) << SECTOR_SHIFT
    }

    /// Returns true if the zone is full, read-only or offline.
    pub const fn is_final(self) -> bool {
        self.0 >> KIND_SHIFT != WRITTEN
    }

    /// Returns the state word of the zone after a restart, which closes open zones. Returns `None`
    /// if the mark is impossible for a zone of this capacity and length in bytes.
    pub fn word(self, capacity: u64, len: u64, block: u64) -> Option<Word> {
        let pointer = self.pointer();
        let (condition, good) = match self.0 >> KIND_SHIFT {
            WRITTEN if pointer == 0 => (ZoneCondition::Empty, true),
            WRITTEN => (ZoneCondition::Closed, pointer < capacity && pointer.is_multiple_of(block)),
            FULL => (ZoneCondition::Full, pointer == capacity || pointer == len),
            READ_ONLY => (ZoneCondition::ReadOnly, pointer == 0),
            OFFLINE => (ZoneCondition::Offline, pointer == 0),
            _ => return None,
        };
        good.then(|| Word::new(condition, pointer))
    }
}
