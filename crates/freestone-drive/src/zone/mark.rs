//! What the state file says of a zone.

use super::ZoneCondition;
use super::word::{SECTOR_SHIFT, Word};

/// What is durable of a zone, as the state file has it: two bits of kind over 41 of the write
/// pointer in sectors. Within one generation of a zone marks only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mark(pub u64);

const KIND_SHIFT: u32 = 41;
const POINTER_MASK: u64 = (1 << KIND_SHIFT) - 1;
const WRITTEN: u64 = 0;
const FULL: u64 = 1;
const READ_ONLY: u64 = 2;
const OFFLINE: u64 = 3;

impl Mark {
    /// Of an empty zone.
    pub const EMPTY: Self = Self(0);

    /// What is to become durable of a zone: open and closed are the same there.
    pub fn of(word: Word) -> Self {
        let kind = match word.condition() {
            ZoneCondition::Full => FULL,
            ZoneCondition::ReadOnly => return Self(READ_ONLY << KIND_SHIFT),
            ZoneCondition::Offline => return Self(OFFLINE << KIND_SHIFT),
            _ => WRITTEN,
        };
        Self(kind << KIND_SHIFT | word.pointer() >> SECTOR_SHIFT)
    }

    /// The write pointer in bytes from the start of the zone; 0 of a zone that has none.
    pub const fn pointer(self) -> u64 {
        (self.0 & POINTER_MASK) << SECTOR_SHIFT
    }

    /// Whether the zone was full, or had no write pointer any more.
    pub const fn is_final(self) -> bool {
        self.0 >> KIND_SHIFT != WRITTEN
    }

    /// The zone after a restart: what was open is closed. `None`: no zone of this capacity and
    /// length leaves such a mark.
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
