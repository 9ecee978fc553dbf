//! Counts the open and active zones of a device, and chooses the next zone to close implicitly.

use super::layout::Layout;
use freestone_core::device::zoned::ZoneCondition::{self, Closed, ExplicitOpen, ImplicitOpen};

/// Maximum number of implicitly open zones for which memory is reserved in advance.
const RESERVED_ZONES: u32 = 1 << 16;

/// Open and active zones of a device that limits their number.
#[derive(Debug)]
pub struct Resources {
    /// Numbers of the implicitly open zones in ascending order.
    implicit: Vec<u32>,
    explicit: u32,
    closed: u32,
    /// Zone at which the search for the next zone to close starts.
    cursor: u32,
    /// First sequential zone, and number of zones of the device: the range of the cursor.
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

    /// Returns the number of active zones: open or closed.
    pub fn active(&self) -> u32 {
        self.open() + self.closed
    }

    pub fn implicit(&self) -> u32 {
        self.implicit.len() as u32
    }

    /// Returns the number of zones that were closed implicitly so far.
    pub fn closes(&self) -> u64 {
        self.closes
    }

    /// Updates the counters for a zone that changes from the condition `from` to the condition
    /// `to`.
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

    /// Returns the `nth` implicitly open zone (from 0) after the cursor, wrapping around.
    pub fn candidate(&self, nth: u32) -> u32 {
        let first = self.implicit.partition_point(|&zone| zone < self.cursor);
        self.implicit[(first + nth as usize) % self.implicit.len()]
    }

    /// Counts the implicit close of the zone `victim`. The next search starts after this zone.
    pub fn close(&mut self, victim: u32, to: ZoneCondition) {
        self.change(victim, ImplicitOpen, to);
        self.cursor = if victim + 1 == self.zones.1 { self.zones.0 } else { victim + 1 };
        self.closes += 1;
    }
}
