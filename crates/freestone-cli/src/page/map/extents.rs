//! The map of a device that tells data from holes, as clients see it: block status.

use std::collections::BTreeMap;

use freestone::device::ExtentKind;
use serde::Serialize;

use super::super::api::Why;
use super::cells::Cells;
use super::walk::{Pace, Walk};

/// A look is what a device does in one call, which may read metadata of a disk.
const PACE: Pace = Pace { looks: 16, looks_per_second: 4096 };

/// Bytes of data and of holes in equal parts of the device.
#[derive(Serialize)]
pub struct Extents {
    /// One byte.
    unit: u64,
    /// Bytes of the device.
    units: u64,
    /// Those that were looked at before the time was over, the first ones.
    looked: u64,
    cells: usize,
    /// By kind, those that are there: how many bytes each part has.
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
    /// Walks over the device.
    pub fn draw(walk: &mut Walk, most: u64) -> Result<Self, Why> {
        let units = walk.entry()?.device().map_or(0, |device| device.geometry().size);
        let cells = Cells::new(units, most);
        let mut kinds = BTreeMap::new();
        let mut at = 0;
        'walk: while at < units
            && let Some(entry) = walk.turn(PACE)?
        {
            let Some(device) = entry.device() else { break };
            for _ in 0..PACE.looks {
                let described = device.extents(at, units - at, &mut |extent| {
                    let counts = kinds.entry(word(extent.kind)).or_insert_with(|| vec![0; cells.count()]);
                    cells
                        .each(extent.offset..extent.offset + extent.len, |cell, bytes| counts[cell] += bytes);
                    true
                });
                let why =
                    |error| Why::Failed(format!("{}: cannot say what lies where: {error}", walk.name()));
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
