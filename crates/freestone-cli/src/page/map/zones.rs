//! Map of a zoned drive: zone conditions and write pointers.

use std::collections::BTreeMap;

use freestone::device::zoned::{Zone, ZoneCondition};
use serde::Serialize;

use super::super::api::ApiError;
use super::cells::Cells;
use super::walk::{Pace, Walk};
use crate::verbs::zones::condition_word;

/// A step is one zone.
const PACE: Pace = Pace { steps: 1024, steps_per_second: 65_536 };

/// Zones in equal parts of the drive. A drive with few zones has one zone per cell.
#[derive(Serialize)]
pub struct Zones {
    /// Bytes of a zone; the last zone may be shorter.
    unit: u64,
    /// Number of zones of the drive.
    units: u64,
    /// Zones examined before the deadline, from the start of the drive.
    looked: u64,
    cells: usize,
    /// Number of zones in each cell, by condition. Conditions without zones are omitted.
    kinds: BTreeMap<&'static str, Vec<u64>>,
    /// Bytes before the write pointers in each cell. A full zone counts with its capacity.
    written: Vec<u64>,
    /// Capacity of the zones in each cell, in bytes.
    capacity: Vec<u64>,
}

/// Returns the written bytes and the capacity of a zone; 0 and 0 for a zone without a write pointer.
fn filled(zone: &Zone) -> (u64, u64) {
    match zone.condition {
        ZoneCondition::NotWritePointer | ZoneCondition::ReadOnly | ZoneCondition::Offline => (0, 0),
        ZoneCondition::Full => (zone.capacity, zone.capacity),
        _ => (zone.write_pointer - zone.start, zone.capacity),
    }
}

impl Zones {
    /// Draws the map, with at most `most` cells.
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
            && let Some(entry) = walk.turn(PACE)?
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
