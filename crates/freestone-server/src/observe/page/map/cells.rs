//! Division of the units of a device (pages, bytes or zones) into equal parts, the cells of a map.

use std::ops::Range;

/// A division of units into cells whose sizes differ by at most one unit.
#[derive(Debug, Clone, Copy)]
pub struct Cells {
    count: u64,
    units: u64,
}

impl Cells {
    /// Divides `units`, at least 1, into at most `most` cells. Each cell has at least one unit.
    pub fn new(units: u64, most: u64) -> Self {
        debug_assert!(units > 0 && most > 0);
        Self { count: most.min(units), units }
    }

    /// Returns the number of cells.
    pub fn count(self) -> usize {
        self.count as usize
    }

    /// Returns the first unit of a cell. If `cell` is the number of cells, returns the number of units.
    pub fn start(self, cell: usize) -> u64 {
        (cell as u128 * u128::from(self.units) / u128::from(self.count)) as u64
    }

    /// Returns the index of the cell that contains a unit.
    pub fn of(self, unit: u64) -> usize {
        debug_assert!(unit < self.units);
        (((u128::from(unit) + 1) * u128::from(self.count) - 1) / u128::from(self.units)) as usize
    }

    /// Calls `f` for each cell that overlaps a range of units, with the index of the cell and its number of
    /// units in the range.
    pub fn each(self, run: Range<u64>, mut f: impl FnMut(usize, u64)) {
        let mut at = run.start;
        let end = run.end.min(self.units);
        while at < end {
            let cell = self.of(at);
            let stop = self.start(cell + 1).min(end);
            f(cell, stop - at);
            at = stop;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_equal_and_hold_each_unit_once() {
        for units in [1, 2, 3, 7, 64, 1000, 4097] {
            for most in [1, 2, 3, 10, 64, 4096] {
                let cells = Cells::new(units, most);
                assert_eq!((cells.start(0), cells.start(cells.count())), (0, units));
                let sizes: Vec<_> =
                    (0..cells.count()).map(|cell| cells.start(cell + 1) - cells.start(cell)).collect();
                let (least, most) = (sizes.iter().min().unwrap(), sizes.iter().max().unwrap());
                assert!(*least >= 1 && most - least <= 1, "{units} in {most}: {sizes:?}");
                for unit in 0..units {
                    let cell = cells.of(unit);
                    assert!(cells.start(cell) <= unit && unit < cells.start(cell + 1), "{unit} of {units}");
                }
                let mut counted = vec![0; cells.count()];
                cells.each(0..units + 5, |cell, units| counted[cell] += units);
                assert_eq!(counted, sizes);
            }
        }
        let cells = Cells::new(u64::MAX, 4096);
        assert_eq!((cells.of(0), cells.of(u64::MAX - 1), cells.start(4096)), (0, 4095, u64::MAX));
    }
}
