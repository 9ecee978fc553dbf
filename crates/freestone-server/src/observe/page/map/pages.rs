//! Map of the pages of a RAM disk, fork or snapshot, by kind.

use std::collections::BTreeMap;

use freestone::PAGE_BYTES;
use freestone::ram::Contents;
use serde::Serialize;

use super::super::api::ApiError;
use super::cells::Cells;
use super::walk::{Pace, Walk};

/// Speed of the walk. A step examines at most one leaf of the slot table (512 pages), so a full disk of 1 TiB
/// takes 8 s.
const PACE: Pace = Pace { steps: 1024, steps_per_second: 65_536 };

/// Name of a kind of page in the API, and the function that returns the number of such pages.
type Kind = (&'static str, fn(&Contents) -> u64);

const KINDS: [Kind; 8] = [
    ("compressed", |contents| contents.compressed),
    ("huge", |contents| contents.huge),
    ("same", |contents| contents.same),
    ("zero", |contents| contents.zero),
    ("spilled", |contents| contents.spilled),
    ("unloaded", |contents| contents.unloaded),
    ("below", |contents| contents.below),
    ("hole", |contents| contents.hole),
];

/// Numbers of pages in each cell, an equal part of the device.
#[derive(Serialize)]
pub struct Pages {
    /// Bytes per unit: the size of a page.
    unit: u64,
    /// Number of pages of the device.
    units: u64,
    /// Number of pages examined before the deadline, from the start of the device.
    looked: u64,
    cells: usize,
    /// Number of pages in each cell, by kind. Kinds without pages are omitted.
    kinds: BTreeMap<&'static str, Vec<u64>>,
    /// Remark about the map for the user, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

impl Pages {
    /// Draws the map of the device's pages, with at most `most` cells. If `has_unflushed` is true, the device
    /// holds unflushed writes back, and a note says that the map does not show them.
    pub fn draw(walk: &mut Walk, most: u64, has_unflushed: bool) -> Result<Self, ApiError> {
        let unit = PAGE_BYTES as u64;
        let units = walk.entry()?.size().div_ceil(unit);
        let cells = Cells::new(units, most);
        let mut counts = vec![Contents::default(); cells.count()];
        let (mut at, mut cell) = (0, 0);
        'walk: while cell < cells.count()
            && let Some(entry) = walk.next_turn(PACE)?
        {
            let Some(ram) = entry.kind.ram() else { break };
            for _ in 0..PACE.steps {
                let end = cells.start(cell + 1);
                let next = ram.contents(at, end, &mut counts[cell]);
                if next <= at {
                    break 'walk;
                }
                at = next;
                if at == end {
                    cell += 1;
                    if cell == cells.count() {
                        break 'walk;
                    }
                }
            }
        }
        let of_kind = |(word, count): Kind| {
            let counts: Vec<_> = counts.iter().map(count).collect();
            counts.iter().any(|count| *count > 0).then_some((word, counts))
        };
        let kinds = KINDS.into_iter().filter_map(of_kind).collect();
        let note = has_unflushed.then_some("unflushed writes are not shown");
        Ok(Self { unit, units, looked: at, cells: cells.count(), kinds, note })
    }
}
