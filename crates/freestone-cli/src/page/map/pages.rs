//! The map of a RAM disk, fork or snapshot: what its pages are.

use std::collections::BTreeMap;

use freestone::PAGE_BYTES;
use freestone::ram::Contents;
use serde::Serialize;

use super::super::api::Why;
use super::cells::Cells;
use super::walk::{Pace, Walk};

/// A look is one leaf at most: 512 pages. A disk of a TiB that is full takes 8 s.
const PACE: Pace = Pace { looks: 1024, looks_per_second: 65_536 };

/// What pages are, as the page calls it, and how many of them there are.
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

/// Counts of pages in equal parts of the device.
#[derive(Serialize)]
pub struct Pages {
    /// Bytes of a page.
    unit: u64,
    /// Pages of the device.
    units: u64,
    /// Those that were looked at before the time was over, the first ones.
    looked: u64,
    cells: usize,
    /// By kind, those that are there: how many pages each part has.
    kinds: BTreeMap<&'static str, Vec<u64>>,
    /// What is to be known of it.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<&'static str>,
}

impl Pages {
    /// Walks over the pages. `apart`: writes that were not flushed are elsewhere.
    pub fn draw(walk: &mut Walk, most: u64, apart: bool) -> Result<Self, Why> {
        let unit = PAGE_BYTES as u64;
        let units = walk.entry()?.size().div_ceil(unit);
        let cells = Cells::new(units, most);
        let mut counts = vec![Contents::default(); cells.count()];
        let (mut at, mut cell) = (0, 0);
        'walk: while cell < cells.count()
            && let Some(entry) = walk.turn(PACE)?
        {
            let Some(ram) = entry.kind.ram() else { break };
            for _ in 0..PACE.looks {
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
        let note = apart.then_some("writes that were not flushed yet are kept apart, and are not in the map");
        Ok(Self { unit, units, looked: at, cells: cells.count(), kinds, note })
    }
}
