//! Map of a zoned drive: conditions and write pointers of its zones.

use std::collections::BTreeMap;

use freestone::device::zoned::{Zone, ZoneCondition};
use serde::Serialize;

use super::super::api::ApiError;
use super::cells::Cells;
use super::walk::{Pace, Walk};
use crate::verbs::drives::zones::condition_word;

/// Speed of the walk. A step examines one zone.
const PACE: Pace = Pace { steps: 1024, steps_per_second: 65_536 };

/// Numbers of zones in each cell, an equal part of the drive. In the map of a drive with few zones, each cell
/// is one zone.
#[derive(Serialize)]
pub struct Zones {
    /// Bytes per unit: the size of a zone. The last zone may be smaller.
    unit: u64,
    /// Number of zones of the drive.
    units: u64,
    /// Number of zones examined before the deadline, from the start of the drive.
    looked: u64,
    cells: usize,
    /// Zones by condition: for each condition that occurs, the number of its zones in each cell of the map.
    kinds: BTreeMap<&'static str, Vec<u64>>,
    /// Number of bytes before the write pointers of the zones in each cell. A full zone counts as its capacity.
    written: Vec<u64>,
    /// Capacity of the zones with a write pointer in each cell, in bytes.
    capacity: Vec<u64>,
}

/// Returns the numbers of written bytes and of usable bytes of a zone. Both are 0 for a zone without a valid
/// write pointer.
fn filled(zone: &Zone) -> (u64, u64) {
    match zone.condition {
        ZoneCondition::NotWritePointer | ZoneCondition::ReadOnly | ZoneCondition::Offline => (0, 0),
        ZoneCondition::Full => (zone.capacity, zone.capacity),
        _ => (zone.write_pointer - zone.start, zone.capacity),
    }
}

impl Zones {
    /// Draws the map of the drive's zones, with at most `most` cells.
    pub fn draw(walk: &mut Walk, most: u64) -> Result<Self, ApiError> {
        let no_zones = || ApiError::Failed(format!("{}: has no zones", walk.name()));
        let entry = walk.entry()?;
        let geometry = entry.device().and_then(|device| device.geometry().zones).ok_or_else(no_zones)?;
        drop(entry);
        let (unit, units) = (geometry.zone_size, u64::from(geometry.nr_zones));
        let cells = Cells::new(units, most);
        let none = || vec![0; cells.count()];
        let (mut kinds, mut written, mut capacity) = (BTreeMap::new(), none(), none());
        let mut looked = 0;
        while looked < units
            && let Some(entry) = walk.next_turn(PACE)?
        {
            let Some(zoned) = entry.device().and_then(|device| device.zoned()) else { break };
            let stop = (looked + u64::from(PACE.steps)).min(units);
            let reported = zoned.report(looked * unit, &mut |zone| {
                let cell = cells.of(looked);
                kinds.entry(condition_word(zone.condition)).or_insert_with(none)[cell] += 1;
                let (bytes, most) = filled(&zone);
                written[cell] += bytes;
                capacity[cell] += most;
                looked += 1;
                looked < stop
            });
            let why = |error| ApiError::Failed(format!("{}: cannot report the zones: {error}", walk.name()));
            reported.map_err(why)?;
        }
        Ok(Self { unit, units, looked, cells: cells.count(), kinds, written, capacity })
    }
}
