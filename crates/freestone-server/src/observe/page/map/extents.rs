//! Map of data and holes, as NBD clients see them by block status.

use std::collections::BTreeMap;

use freestone::device::ExtentKind;
use serde::Serialize;

use super::super::api::ApiError;
use super::cells::Cells;
use super::walk::{Pace, Walk};

/// Speed of the walk. A step is one call of the device's `extents`, which may read metadata from a disk.
const PACE: Pace = Pace { steps: 16, steps_per_second: 4096 };

/// Numbers of bytes of data and of holes in each cell, an equal part of the device.
#[derive(Serialize)]
pub struct Extents {
    /// Bytes per unit: always 1.
    unit: u64,
    /// Size of the device, in bytes.
    units: u64,
    /// Number of bytes examined before the deadline, from the start of the device.
    looked: u64,
    cells: usize,
    /// Number of bytes in each cell, by kind. Kinds without bytes are omitted.
    kinds: BTreeMap<&'static str, Vec<u64>>,
}

const fn word(kind: ExtentKind) -> &'static str {
    match kind {
        ExtentKind::Data => "data",
        ExtentKind::Zero => "zero",
        ExtentKind::Hole => "hole",
    }
}

impl Extents {
    /// Draws the map of the device's extents, with at most `most` cells.
    pub fn draw(walk: &mut Walk, most: u64) -> Result<Self, ApiError> {
        let units = walk.entry()?.device().map_or(0, |device| device.geometry().size);
        let cells = Cells::new(units, most);
        let mut kinds = BTreeMap::new();
        let mut at = 0;
        'walk: while at < units
            && let Some(entry) = walk.next_turn(PACE)?
        {
            let Some(device) = entry.device() else { break };
            for _ in 0..PACE.steps {
                let described = device.extents(at, units - at, &mut |extent| {
                    let counts = kinds.entry(word(extent.kind)).or_insert_with(|| vec![0; cells.count()]);
                    cells
                        .each(extent.offset..extent.offset + extent.len, |cell, bytes| counts[cell] += bytes);
                    true
                });
                let why =
                    |error| ApiError::Failed(format!("{}: cannot read the extents: {error}", walk.name()));
                let described = described.map_err(why)?;
                at += described;
                if at >= units || described == 0 {
                    break 'walk;
                }
            }
        }
        Ok(Self { unit: 1, units, looked: at, cells: cells.count(), kinds })
    }
}
