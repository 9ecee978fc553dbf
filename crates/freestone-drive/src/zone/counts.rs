//! Counters of a zoned device.

use freestone_core::device::Counted;
use freestone_core::device::zoned::ZoneCondition;

/// Number of zones per condition, and operations since the device was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZoneCounts {
    /// Conventional zones.
    pub conventional: u32,
    /// Empty zones.
    pub empty: u32,
    /// Implicitly open zones.
    pub implicit_open: u32,
    /// Explicitly open zones.
    pub explicit_open: u32,
    /// Closed zones.
    pub closed: u32,
    /// Full zones.
    pub full: u32,
    /// Read-only zones.
    pub read_only: u32,
    /// Offline zones.
    pub offline: u32,
    /// Reads, writes, appends and flushes. The errors include those of zone operations.
    pub ops: Counted,
    /// Zones opened by an operation.
    pub opens: u64,
    /// Zones closed by an operation.
    pub closes: u64,
    /// Zones finished by an operation.
    pub finishes: u64,
    /// Zones reset, one by one or all at once.
    pub resets: u64,
    /// Zones closed implicitly to open another one.
    pub implicit_closes: u64,
}

impl ZoneCounts {
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

    /// Returns the zones that count as open.
    pub fn open(&self) -> u32 {
        self.implicit_open + self.explicit_open
    }

    /// Returns the zones that count as active.
    pub fn active(&self) -> u32 {
        self.open() + self.closed
    }
}

// Indexes of the per-CPU counters of zone operations.
pub const OPENS: usize = 0;
pub const CLOSES: usize = 1;
pub const FINISHES: usize = 2;
pub const RESETS: usize = 3;
pub const COUNTERS: usize = 4;
