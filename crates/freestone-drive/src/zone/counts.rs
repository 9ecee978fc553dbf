//! Counters of the zones of a device and of operations on them.

use freestone_core::device::OpStats;
use freestone_core::device::zoned::ZoneCondition;

/// Number of zones per condition, and counters of operations since the device was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ZoneCounts {
    /// Number of conventional zones.
    pub conventional: u32,
    /// Number of empty zones.
    pub empty: u32,
    /// Number of implicitly open zones.
    pub implicit_open: u32,
    /// Number of explicitly open zones.
    pub explicit_open: u32,
    /// Number of closed zones.
    pub closed: u32,
    /// Number of full zones.
    pub full: u32,
    /// Number of read-only zones.
    pub read_only: u32,
    /// Number of offline zones.
    pub offline: u32,
    /// Counters of reads, writes, appends and flushes. The error counter includes failed zone
    /// operations.
    pub ops: OpStats,
    /// Number of open operations that succeeded.
    pub opens: u64,
    /// Number of close operations that succeeded.
    pub closes: u64,
    /// Number of finish operations that succeeded.
    pub finishes: u64,
    /// Number of zones reset, by a reset of one zone or of all zones.
    pub resets: u64,
    /// Number of zones that the device closed implicitly to open another zone.
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

    /// Returns the number of open zones: implicitly or explicitly open.
    pub fn open(&self) -> u32 {
        self.implicit_open + self.explicit_open
    }

    /// Returns the number of active zones: open or closed.
    pub fn active(&self) -> u32 {
        self.open() + self.closed
    }
}

// Indices of the per-CPU counters of zone operations, and their number.
pub const OPENS: usize = 0;
pub const CLOSES: usize = 1;
pub const FINISHES: usize = 2;
pub const RESETS: usize = 3;
pub const COUNTERS: usize = 4;
