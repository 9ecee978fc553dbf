//! What a zoned device did so far, and how its zones are.

use freestone_core::device::Counted;
use freestone_core::device::zoned::ZoneCondition;

/// Zones of each condition now, and what was done since the device was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZoneCounts {
    /// Conventional zones.
    pub conventional: u32,
    /// Empty zones.
    pub empty: u32,
    /// Zones that a write opened.
    pub implicit_open: u32,
    /// Zones that were opened by an operation.
    pub explicit_open: u32,
    /// Closed zones.
    pub closed: u32,
    /// Full zones.
    pub full: u32,
    /// Zones that are only read.
    pub read_only: u32,
    /// Zones that are neither read nor written.
    pub offline: u32,
    /// Reads, writes, appends, flushes; errors of zone operations are among its errors.
    pub ops: Counted,
    /// Zones that were opened by an operation.
    pub opens: u64,
    /// Zones that were closed by an operation.
    pub closes: u64,
    /// Zones that were finished by an operation.
    pub finishes: u64,
    /// Zones that were reset, one by one or all at once.
    pub resets: u64,
    /// Zones that were closed because another one was opened.
    pub implicit_closes: u64,
}

impl ZoneCounts {
    /// Counts a zone.
    pub(super) fn add(&mut self, condition: ZoneCondition) {
        *match condition {
            ZoneCondition::NotWritePointer => &mut self.conventional,
            ZoneCondition::Empty => &mut self.empty,
            ZoneCondition::ImplicitOpen => &mut self.implicit_open,
            ZoneCondition::ExplicitOpen => &mut self.explicit_open,
            ZoneCondition::Closed => &mut self.closed,
            ZoneCondition::Full => &mut self.full,
            ZoneCondition::ReadOnly => &mut self.read_only,
            ZoneCondition::Offline => &mut self.offline,
        } += 1;
    }

    /// Zones that count against the limit of open zones.
    pub fn open(&self) -> u32 {
        self.implicit_open + self.explicit_open
    }

    /// Zones that count against the limit of active zones.
    pub fn active(&self) -> u32 {
        self.open() + self.closed
    }
}

// Counters of zone operations, each with one cell a CPU.
pub const OPENS: usize = 0;
pub const CLOSES: usize = 1;
pub const FINISHES: usize = 2;
pub const RESETS: usize = 3;
pub const COUNTERS: usize = 4;
