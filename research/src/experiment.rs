//! What an experiment comes to: the source's figures and ours side by side, column by column.
//!
//! Each experiment is a module with `pub fn run(options: &Options) -> Result<Experiment>`. Only
//! ratios are compared with the source: its machine is another one. A ratio is of two numbers of
//! one round ([`turns`]), never of two medians.

use freestone_report::{Summary, Unit};

/// Which numbers of a table are the good ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Better {
    /// Throughput.
    More,
    /// Time.
    Less,
}

/// One of the source's experiments.
#[derive(Debug)]
pub struct Experiment {
    /// 1 to 5.
    pub number: u8,
    pub title: &'static str,
    /// Machine and setup of the source.
    pub source: String,
    /// What is done here, and what is left out.
    pub here: Vec<String>,
    pub tables: Vec<Table>,
    /// Where the shape differs from the source's, and why. The comparison of the fine lock with the
    /// old one is added by itself (`words.rs`).
    pub words: Vec<String>,
    /// More threads than this machine has CPUs.
    pub model: Vec<Modelled>,
}

/// Rows with the same columns.
#[derive(Debug, Clone)]
pub struct Table {
    /// Unique within the experiment: the chart's file is called after it.
    pub name: String,
    pub unit: Unit,
    pub better: Better,
    pub columns: Vec<&'static str>,
    /// The column that the others are compared with: the old lock.
    pub old: usize,
    /// The column that the source chose in the end.
    pub new: usize,
    /// The product's column. It may be the same as `new`.
    pub ours: usize,
    pub rows: Vec<TableRow>,
    /// Loads of which no model is made, and why two threads cannot show what they gained.
    pub reasons: Vec<(&'static str, &'static str)>,
}

/// One load with one number of threads.
#[derive(Debug, Clone)]
pub struct TableRow {
    pub what: String,
    pub threads: usize,
    /// The source's figures by column; nothing where it has none.
    pub published: Vec<Option<f64>>,
    /// Ours by column, in the table's unit; nothing where it was not run.
    pub measured: Vec<Option<Summary>>,
    /// Of the same round over column `old`; above 1 is better, whatever the unit.
    pub ratios: Vec<Option<Summary>>,
}

impl Better {
    /// How many times better `of` is than `to`.
    pub fn ratio(self, of: f64, to: f64) -> f64 {
        match self {
            Self::More => of / to,
            Self::Less => to / of,
        }
    }
}

impl Table {
    /// A table without rows.
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

    /// Adds a row. `rounds` are our figures by column, then by round; a column that was not run has
    /// none. `published` may be shorter than the columns.
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

    /// The source's ratio of a column over the old one; above 1 is better.
    pub fn published_ratio(&self, row: &TableRow, column: usize) -> Option<f64> {
        Some(self.better.ratio(row.published[column]?, row.published[self.old]?))
    }

    /// The row of the same load with another number of threads.
    pub fn sibling(&self, row: &TableRow, threads: usize) -> Option<&TableRow> {
        self.rows.iter().find(|other| other.what == row.what && other.threads == threads)
    }
}

impl TableRow {
    /// Our ratio of a column over the old one where the rounds agree well enough to give one.
    pub fn steady_ratio(&self, column: usize) -> Option<f64> {
        self.ratios[column].filter(Summary::is_steady).map(|ratio| ratio.median)
    }
}

/// In which order the columns of a table take turns in a round: another one begins in every other
/// round, and every other round goes backwards, so that none of them always comes first or always
/// after the same other one.
pub fn turns(columns: usize, round: u32) -> Vec<usize> {
    let mut order: Vec<usize> = (0..columns).collect();
    order.rotate_left((round / 2) as usize % columns);
    if round % 2 == 1 {
        order.reverse();
    }
    order
}

/// One load beyond this machine's cores.
#[derive(Debug, Clone)]
pub struct Modelled {
    /// The table and the row's name.
    pub table: String,
    pub what: String,
    /// The measured numbers that go in, by name.
    pub inputs: Vec<(&'static str, f64)>,
    /// The part of one thread's time that it keeps others from the old lock.
    pub held_share: f64,
    pub checks: Vec<Check>,
    pub beyond: Vec<Beyond>,
}

/// A prediction beside its measurement.
#[derive(Debug, Clone)]
pub struct Check {
    pub threads: usize,
    pub column: &'static str,
    pub predicted: f64,
    pub measured: f64,
    /// Of the measurement; nothing where its spread is too wide to compare with.
    pub error: Option<f64>,
    /// The error is above `model::ERROR_MAX`.
    pub off: bool,
}

/// Modelled, not measured.
#[derive(Debug, Clone)]
pub struct Beyond {
    pub threads: usize,
    /// The old lock as it is measured here.
    pub old: f64,
    /// The old lock where whoever waits gets it in turn and nobody sleeps, as in the kernel.
    pub in_turn: f64,
    pub ours: f64,
    /// Over the better one of the old ones.
    pub ratio: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_the_same_round_and_above_one_is_better() {
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
    fn a_ratio_with_too_wide_a_spread_is_not_given() {
        let mut table = Table::new("t", Unit::Kiops, Better::More, &["old", "ours"]);
        table.add("wide", 1, &[], &[vec![1.0; 4], vec![1.0, 2.0, 3.0, 9.0]]);
        table.add("narrow", 1, &[], &[vec![1.0; 4], vec![2.0, 2.1, 1.9, 2.0]]);
        table.add("few", 1, &[], &[vec![1.0; 2], vec![2.0; 2]]);
        assert_eq!(table.rows[0].steady_ratio(1), None);
        assert_eq!(table.rows[1].steady_ratio(1), Some(2.0));
        assert_eq!(table.rows[2].steady_ratio(1), None);
    }

    #[test]
    fn every_column_comes_first_as_often_as_the_others() {
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
