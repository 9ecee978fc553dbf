//! The map of a zoned drive: conditions and write pointers.

use std::collections::BTreeMap;

use freestone::device::zoned::{Zone, ZoneCondition};
use serde::Serialize;

use super::super::api::Why;
use super::cells::Cells;
use super::walk::{Pace, Walk};
use crate::verbs::zones::condition_word;

/// A look is a zone.
const PACE: Pace = Pace { looks: 1024, looks_per_second: 65_536 };

/// Zones in equal parts of the drive; a part of few zones is one of them.
#[derive(Serialize)]
pub struct Zones {
    /// Bytes of a zone; the last one may be shorter.
    unit: u64,
    /// Zones of the drive.
    units: u64,
    /// Those that were looked at before the time was over, the first ones.
    looked: u64,
    cells: usize,
    /// By condition, those that are there: how many zones each part has.
    kinds: BTreeMap<&'static str, Vec<u64>>,
    /// Bytes before the write pointers of each part; of a zone that is full, all that it can hold.
    written: Vec<u64>,
    /// Bytes that can be written in each part.
    capacity: Vec<u64>,
}

/// What of a zone is written, and can be. One without a write pointer counts for neither.
fn filled(zone: &Zone) -> (u64, u64) {
    match zone.condition {
        ZoneCondition::NotWritePointer | ZoneCondition::ReadOnly | ZoneCondition::Offline => (0, 0),
        ZoneCondition::Full => (zone.capacity, zone.capacity),
        _ => (zone.write_pointer - zone.start, zone.capacity),
    }
}

impl Zones {
    /// Walks over the zones. It waits where a write to one of them does.
    pub fn draw(walk: &mut Walk, most: u64) -> Result<Self, Why> {
        let no_zones = || Why::Failed(format!("{}: has no zones", walk.name()));
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
            let stop = (looked + u64::from(PACE.looks)).min(units);
            let reported = zoned.report(looked * unit, &mut |zone| {
                let cell = cells.of(looked);
                kinds.entry(condition_word(zone.condition)).or_insert_with(none)[cell] += 1;
                let (bytes, most) = filled(&zone);
                written[cell] += bytes;
                capacity[cell] += most;
                looked += 1;
                looked < stop
            });
            let why = |error| Why::Failed(format!("{}: cannot say how its zones are: {error}", walk.name()));
            reported.map_err(why)?;
        }
        Ok(Self { unit, units, looked, cells: cells.count(), kinds, written, capacity })
    }
}
