//! Equal parts of something that has units: pages, bytes, zones.

use std::ops::Range;

/// So many parts, in which sizes differ by one unit at most.
#[derive(Debug, Clone, Copy)]
pub struct Cells {
    count: u64,
    units: u64,
}

impl Cells {
    /// At most so many, and none without a unit. There has to be a unit.
    pub fn new(units: u64, most: u64) -> Self {
        debug_assert!(units > 0 && most > 0);
        Self { count: most.min(units), units }
    }

    /// How many there are.
    pub fn count(self) -> usize {
        self.count as usize
    }

    /// The first unit of a part, or the end of all.
    pub fn start(self, cell: usize) -> u64 {
        (cell as u128 * u128::from(self.units) / u128::from(self.count)) as u64
    }

    /// The part that a unit is in.
    pub fn of(self, unit: u64) -> usize {
        debug_assert!(unit < self.units);
        (((u128::from(unit) + 1) * u128::from(self.count) - 1) / u128::from(self.units)) as usize
    }

    /// A run of units, part by part.
    pub fn each(self, run: Range<u64>, mut row: impl FnMut(usize, u64)) {
        let mut at = run.start;
        let end = run.end.min(self.units);
        while at < end {
            let cell = self.of(at);
            let stop = self.start(cell + 1).min(end);
            row(cell, stop - at);
            at = stop;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_equal_and_hold_each_unit_once() {
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
