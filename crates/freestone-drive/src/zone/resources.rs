//! Numbers of open and active zones, and the choice of the next zone to close.

use super::layout::Layout;
use freestone_core::device::zoned::ZoneCondition::{self, Closed, ExplicitOpen, ImplicitOpen};

/// Maximum number of implicitly open zones reserved in advance; more allocate later.
const RESERVED_ZONES: u32 = 1 << 16;

/// Resources of a device with limited open or active zones.
#[derive(Debug)]
pub struct Resources {
    /// Implicitly open zones in ascending order.
    implicit: Vec<u32>,
    explicit: u32,
    closed: u32,
    /// Start of the search for the next zone to close.
    cursor: u32,
    /// First sequential zone and number of zones: the range of the cursor.
    zones: (u32, u32),
    closes: u64,
}

impl Resources {
    pub fn new(layout: &Layout) -> Self {
        let most = [layout.max_open, layout.max_active].into_iter().filter(|&limit| limit != 0).min();
        let implicit = Vec::with_capacity(most.unwrap_or(0).min(RESERVED_ZONES) as usize);
        let zones = (layout.conventional, layout.zones);
        Self { implicit, explicit: 0, closed: 0, cursor: zones.0, zones, closes: 0 }
    }

    pub fn open(&self) -> u32 {
        self.implicit() + self.explicit
    }

    /// Returns the number of open and closed zones.
    pub fn active(&self) -> u32 {
        self.open() + self.closed
    }

    pub fn implicit(&self) -> u32 {
        self.implicit.len() as u32
    }

    /// Returns how many zones were closed to make room.
    pub fn closes(&self) -> u64 {
        self.closes
    }

    /// Counts a change of a zone's condition.
    pub fn change(&mut self, zone: u32, from: ZoneCondition, to: ZoneCondition) {
        match from {
            ImplicitOpen => {
                let at = self.implicit.binary_search(&zone);
                debug_assert!(at.is_ok(), "zone {zone} was not counted as open");
                if let Ok(at) = at {
                    self.implicit.remove(at);
                }
            }
            ExplicitOpen => self.explicit -= 1,
            Closed => self.closed -= 1,
            _ => {}
        }
        match to {
            ImplicitOpen => {
                let at = self.implicit.binary_search(&zone);
                debug_assert!(at.is_err(), "zone {zone} was counted as open already");
                if let Err(at) = at {
                    self.implicit.insert(at, zone);
                }
            }
            ExplicitOpen => self.explicit += 1,
            Closed => self.closed += 1,
            _ => {}
        }
    }

    /// Returns the `nth` implicitly open zone from the cursor on, wrapping around.
    pub fn candidate(&self, nth: u32) -> u32 {
        let first = self.implicit.partition_point(|&zone| zone < self.cursor);
        self.implicit[(first + nth as usize) % self.implicit.len()]
    }

    /// Counts an implicit close to make room. The next search starts after the zone.
    pub fn close(&mut self, victim: u32, to: ZoneCondition) {
        self.change(victim, ImplicitOpen, to);
        self.cursor = if victim + 1 == self.zones.1 { self.zones.0 } else { victim + 1 };
        self.closes += 1;
    }
}
