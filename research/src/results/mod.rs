//! Results of an experiment: the figures of the published experiment (the source) and of this
//! machine side by side, by column.
//!
//! Each experiment is a module with `pub fn run(options: &Options) -> Result<Experiment>`. Only
//! ratios are compared with the source, because its machine differs. A ratio is computed from two
//! numbers of the same round ([`turns`]), never from two medians.

pub mod published;

use freestone_report::{Summary, Unit};

/// Direction in which the numbers of a table are better.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Larger numbers are better: throughput.
    More,
    /// Smaller numbers are better: time.
    Less,
}

/// A published experiment and its repetition on this machine.
#[derive(Debug)]
pub struct Experiment {
    /// Number from 1 to 5.
    pub number: u8,
    pub title: &'static str,
    /// Machine and setup of the source.
    pub source: String,
    /// Setup of the repetition, and its omissions.
    pub here: Vec<String>,
    pub tables: Vec<Table>,
    /// Explanation of shapes that differ from the source's. `words.rs` adds the comparison of the
    /// fine lock with the old lock.
    pub words: Vec<String>,
    /// Models for more threads than this machine has CPUs.
    pub model: Vec<LoadModel>,
}

#[derive(Debug, Clone)]
pub struct Table {
    /// Name, unique in the experiment; also the file name of the chart.
    pub name: String,
    pub unit: Unit,
    pub better: Better,
    pub columns: Vec<&'static str>,
    /// Index of the reference column: the old lock.
    pub old: usize,
    /// Index of the column with the variant that the source chose in the end.
    pub new: usize,
    /// Index of the product's column; may equal `new`.
    pub ours: usize,
    pub rows: Vec<TableRow>,
    /// Loads without a model, and the reason why two threads cannot show their gain.
    pub reasons: Vec<(&'static str, &'static str)>,
}

/// Results of one load with one number of threads.
#[derive(Debug, Clone)]
pub struct TableRow {
    pub what: String,
    pub threads: usize,
    /// The source's figures by column; None if not published.
    pub published: Vec<Option<f64>>,
    /// Figures of this machine by column, in the table's unit; None if not run.
    pub measured: Vec<Option<Summary>>,
    /// Ratios to column `old` of the same round. A ratio above 1 is better for every unit.
    pub ratios: Vec<Option<Summary>>,
}

impl Better {
    /// Returns how many times better `of` is than `to`.
    pub fn ratio(self, of: f64, to: f64) -> f64 {
        match self {
            Self::More => of / to,
            Self::Less => to / of,
        }
    }
}

impl Table {
    pub fn new(name: impl Into<String>, unit: Unit, better: Better, columns: &[&'static str]) -> Self {
        let last = columns.len() - 1;
        let columns = columns.to_vec();
        Self {
            name: name.into(),
            unit,
            better,
            columns,
            old: 0,
            new: last,
            ours: last,
            rows: Vec::new(),
            reasons: Vec::new(),
        }
    }

    /// Adds a row. `rounds` has the figures of this machine by column and round, and is empty for a
    /// column that was not run. `published` may be shorter than the columns.
    pub fn add(
        &mut self,
        what: impl Into<String>,
        threads: usize,
        published: &[Option<f64>],
        rounds: &[Vec<f64>],
    ) {
        let count = self.columns.len();
        let mut published = published.to_vec();
        published.resize(count, None);
        let column = |at: usize| rounds.get(at).filter(|numbers| !numbers.is_empty());
        let measured = (0..count).map(|at| Some(Summary::of(column(at)?.iter().copied()))).collect();
        let ratios = (0..count)
            .map(|at| {
                let paired = column(at)?.iter().zip(column(self.old)?);
                Some(Summary::of(paired.map(|(of, to)| self.better.ratio(*of, *to))))
            })
            .collect();
        self.rows.push(TableRow { what: what.into(), threads, published, measured, ratios });
    }

    /// Returns the source's ratio of a column to the column of the old lock, or None if a figure
    /// was not published. A ratio above 1 is better.
    pub fn published_ratio(&self, row: &TableRow, column: usize) -> Option<f64> {
        Some(self.better.ratio(row.published[column]?, row.published[self.old]?))
    }

    /// Returns the row of the same load with `threads` threads, or None if the table has none.
    pub fn sibling(&self, row: &TableRow, threads: usize) -> Option<&TableRow> {
        self.rows.iter().find(|other| other.what == row.what && other.threads == threads)
    }
}

impl TableRow {
    /// Returns the median ratio of a column to the column of the old lock, or None if the spread is
    /// too wide.
    pub fn steady_ratio(&self, column: usize) -> Option<f64> {
        self.ratios[column].filter(Summary::is_steady).map(|ratio| ratio.median)
    }
}

/// Returns the order of the columns of a table in a round. The starting column changes every second
/// round, and every other round is reversed, so that no column is always first or always follows
/// the same other one.
pub fn turns(columns: usize, round: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..columns).collect();
    order.rotate_left((round / 2) as usize % columns);
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// Model of one load with more threads than this machine has CPUs.
#[derive(Debug, Clone)]
pub struct LoadModel {
    /// Name of the table, and of its row.
    pub table: String,
    pub what: String,
    /// Measured inputs of the model, by name.
    pub inputs: Vec<(&'static str, f64)>,
    /// Part of a single thread's time in which the thread holds the old lock.
    pub held_share: f64,
    pub checks: Vec<Check>,
    pub predictions: Vec<Prediction>,
}

/// A prediction compared with its measurement.
#[derive(Debug, Clone)]
pub struct Check {
    pub threads: usize,
    pub column: &'static str,
    pub predicted: f64,
    pub measured: f64,
    /// Error relative to the measurement, or None if its spread is too wide.
    pub error: Option<f64>,
    /// True if the error is above `model::ERROR_MAX`.
    pub off: bool,
}

/// Prediction of the model for a number of threads.
#[derive(Debug, Clone)]
pub struct Prediction {
    pub threads: usize,
    /// Result with the old lock and the mutex of this machine, in the unit of the table.
    pub old: f64,
    /// Result with the old lock and waiters served in order without sleeping, as in the kernel.
    pub in_turn: f64,
    pub ours: f64,
    /// Ratio of `ours` to the better result of the old lock.
    pub ratio: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_uses_same_round_and_better_is_above_one() {
        let mut table = Table::new("t", Unit::Seconds, Better::Less, &["old", "absent", "ours"]);
        table.add("x", 2, &[Some(68.0), None, Some(17.0)], &[vec![2.0, 40.0], vec![], vec![1.0, 10.0]]);
        let row = &table.rows[0];
        assert_eq!(table.published_ratio(row, 2), Some(4.0));
        assert_eq!(table.published_ratio(row, 1), None);
        assert!(row.measured[1].is_none() && row.ratios[1].is_none());
        let ratio = row.ratios[2].unwrap();
        assert_eq!((ratio.min, ratio.max), (2.0, 4.0));
        assert!((row.ratios[0].unwrap().median - 1.0).abs() < 1e-12);
        table.better = Better::More;
        assert_eq!(table.published_ratio(&table.rows[0], 2), Some(0.25));
    }

    #[test]
    fn ratio_with_wide_spread_is_withheld() {
        let mut table = Table::new("t", Unit::Kiops, Better::More, &["old", "ours"]);
        table.add("wide", 1, &[], &[vec![1.0; 4], vec![1.0, 2.0, 3.0, 9.0]]);
        table.add("narrow", 1, &[], &[vec![1.0; 4], vec![2.0, 2.1, 1.9, 2.0]]);
        table.add("few", 1, &[], &[vec![1.0; 2], vec![2.0; 2]]);
        assert_eq!(table.rows[0].steady_ratio(1), None);
        assert_eq!(table.rows[1].steady_ratio(1), Some(2.0));
        assert_eq!(table.rows[2].steady_ratio(1), None);
    }

    #[test]
    fn columns_come_first_equally_often() {
        for columns in 1..7 {
            let mut first = vec![0; columns];
            for round in 0..2 * columns as u32 {
                let mut order = turns(columns, round);
                first[order[0]] += 1;
                order.sort_unstable();
                assert!(order.into_iter().eq(0..columns));
            }
            assert!(first.iter().all(|count| *count == 2), "{first:?}");
        }
    }
}
