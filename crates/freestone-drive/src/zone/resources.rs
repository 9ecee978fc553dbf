//! How many zones are open and active, and which one is closed next to make room.

use super::layout::Layout;
use freestone_core::device::zoned::ZoneCondition::{self, Closed, ExplicitOpen, ImplicitOpen};

/// Implicitly open zones for which room is made at once; more allocate when they come.
const RESERVED_ZONES: u32 = 1 << 16;

/// The resources of a device whose open or active zones are limited.
#[derive(Debug)]
pub struct Resources {
    /// Implicitly open zones in ascending order.
    implicit: Vec<u32>,
    explicit: u32,
    closed: u32,
    /// Where the search for the next zone to close begins.
    cursor: u32,
    /// The first sequential zone, and the number of all zones: the cursor goes round between them.
    zones: (u32, u32),
    closes: u64,
}

impl Resources {
    /// Nothing is open.
    pub fn new(layout: &Layout) -> Self {
        let most = [layout.max_open, layout.max_active].into_iter().filter(|&limit| limit != 0).min();
        let implicit = Vec::with_capacity(most.unwrap_or(0).min(RESERVED_ZONES) as usize);
        let zones = (layout.conventional, layout.zones);
        Self { implicit, explicit: 0, closed: 0, cursor: zones.0, zones, closes: 0 }
    }

    /// Open zones.
    pub fn open(&self) -> u32 {
        self.implicit() + self.explicit
    }

    /// Open and closed zones.
    pub fn active(&self) -> u32 {
        self.open() + self.closed
    }

    /// Implicitly open zones.
    pub fn implicit(&self) -> u32 {
        self.implicit.len() as u32
    }

    /// Zones that were closed to make room, so far.
    pub fn closes(&self) -> u64 {
        self.closes
    }

    /// A zone goes from one condition to another.
    pub fn change(&mut self, zone: u32, from: ZoneCondition, to: ZoneCondition) {
        match from {
            ImplicitOpen => {
                let at = self.implicit.binary_search(&zone);
                debug_assert!(at.is_ok(), "zone {zone} was not known to be open");
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
                debug_assert!(at.is_err(), "zone {zone} was open already");
                if let Err(at) = at {
                    self.implicit.insert(at, zone);
                }
            }
            ExplicitOpen => self.explicit += 1,
            Closed => self.closed += 1,
            _ => {}
        }
    }

    /// The `nth` implicitly open zone from the cursor on, round the device.
    pub fn candidate(&self, nth: u32) -> u32 {
        let first = self.implicit.partition_point(|&zone| zone < self.cursor);
        self.implicit[(first + nth as usize) % self.implicit.len()]
    }

    /// An implicitly open zone is closed to make room. The next search begins behind it.
    pub fn close(&mut self, victim: u32, to: ZoneCondition) {
        self.change(victim, ImplicitOpen, to);
        self.cursor = if victim + 1 == self.zones.1 { self.zones.0 } else { victim + 1 };
        self.closes += 1;
    }
}
