//! What a benchmark says: a table for people, JSON for programs.

use std::fmt::Write;
use std::path::Path;

use anyhow::{Context, Result};
use comfy_table::{CellAlignment, Table, presets};
use serde::Serialize;

use crate::bare;
use crate::machine::Machine;
use crate::measure::Summary;

/// One measurement alone is level with a peer's within so much.
const ONE_ROOM: f64 = 0.02;

/// One run of the program.
#[derive(Serialize)]
pub struct Document {
    pub command: String,
    pub freestone: &'static str,
    pub liblz4: String,
    pub machine: Machine,
    pub reports: Vec<Report>,
}

/// One benchmark on one data set.
#[derive(Serialize)]
pub struct Report {
    pub name: &'static str,
    pub data: String,
    pub data_bytes: u64,
    pub algorithm: &'static str,
    /// What must be known to read the rows.
    pub notes: Vec<String>,
    pub rows: Vec<Row>,
}

/// One measured quantity.
#[derive(Serialize)]
pub struct Row {
    pub what: String,
    pub unit: Unit,
    #[serde(flatten)]
    pub value: Summary,
    /// What went into it, by name.
    pub parts: Vec<(String, f64)>,
    pub target: Option<Target>,
    pub met: Option<bool>,
    /// The spread is too wide: there is no median then, and no judgement.
    pub refused: bool,
    /// How ours does beside a peer, where that is the question.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

/// Ours beside a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Better: the quartiles say so too.
    Ahead,
    /// The quartiles lie on both sides.
    Level,
    /// Worse: the quartiles say so too.
    Behind,
}

/// What a number counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    Ratio,
    Seconds,
    Mib,
    Kib,
    /// Milliseconds.
    Millis,
    /// Microseconds.
    Micros,
    /// Nanoseconds.
    Nanos,
    /// Thousands of operations a second.
    Kiops,
    /// Of a hundred.
    Percent,
    /// A difference of percentages.
    Points,
    /// A number of things.
    Count,
}

/// What a number is to reach.
#[derive(Debug, Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
    /// Between these two.
    Within(f64, f64),
}

impl Target {
    fn met(self, value: f64) -> bool {
        match self {
            Self::AtLeast(bound) => value >= bound,
            Self::AtMost(bound) => value <= bound,
            Self::Within(low, high) => (low..=high).contains(&value),
        }
    }

    fn text(self) -> String {
        match self {
            Self::AtLeast(bound) => format!(">= {bound:.2}"),
            Self::AtMost(bound) => format!("<= {bound:.2}"),
            Self::Within(low, high) => format!("{low:.2} to {high:.2}"),
        }
    }
}

impl Row {
    /// A row without a target.
    pub fn new(what: impl Into<String>, unit: Unit, value: Summary) -> Self {
        let what = what.into();
        Self { what, unit, value, parts: Vec::new(), target: None, met: None, refused: false, verdict: None }
    }

    /// What could not be measured: no number, no judgement. The table says so; the notes say why.
    pub fn absent(what: impl Into<String>, unit: Unit) -> Self {
        let nothing = Summary { count: 0, ..Summary::one(f64::NAN) };
        Self { refused: true, ..Self::new(what, unit, nothing) }
    }

    /// The same row of ours over a peer's, judged: more than 1 is ahead, or less is.
    #[must_use]
    pub fn judged(mut self, more_is_ahead: bool) -> Self {
        let Summary { quartile1, quartile3, count, .. } = self.value;
        let room = if count == 1 { ONE_ROOM } else { 0.0 };
        self.verdict = Some(match (quartile1 > 1.0 + room, quartile3 < 1.0 - room) {
            (true, _) if more_is_ahead => Verdict::Ahead,
            (_, true) if !more_is_ahead => Verdict::Ahead,
            (false, false) => Verdict::Level,
            _ => Verdict::Behind,
        });
        self
    }

    /// The same row with a target for its median.
    #[must_use]
    pub fn target(mut self, target: Target) -> Self {
        self.met = Some(target.met(self.value.median));
        self.target = Some(target);
        self
    }

    /// The same row, without a median and without a judgement where the numbers are too far apart to give one. Comes last.
    #[must_use]
    pub fn steady(mut self) -> Self {
        if !self.value.is_steady() {
            (self.refused, self.target, self.met, self.verdict) = (true, None, None, None);
            self.value.median = f64::NAN;
        }
        self
    }

    /// In words; empty where there is none.
    fn judgement(&self) -> String {
        let met = self.met.map(|met| if met { "met" } else { "MISSED" });
        let verdict = self.verdict.map(|verdict| match verdict {
            Verdict::Ahead => "ahead",
            Verdict::Level => "level",
            Verdict::Behind => "behind",
        });
        met.into_iter().chain(verdict).collect::<Vec<_>>().join(", ")
    }

    /// The same row with one of the numbers that it came from.
    #[must_use]
    pub fn part(mut self, name: impl Into<String>, value: f64) -> Self {
        self.parts.push((name.into(), value));
        self
    }
}

impl Unit {
    fn text(self, value: f64) -> String {
        match self {
            Self::Ratio => format!("{value:.3}"),
            Self::Seconds => format!("{value:.2} s"),
            Self::Mib => format!("{value:.1} MiB"),
            Self::Kib => format!("{value:.2} KiB"),
            Self::Millis => format!("{value:.2} ms"),
            Self::Micros => format!("{value:.2} us"),
            Self::Nanos => format!("{value:.1} ns"),
            Self::Kiops => format!("{value:.1} k/s"),
            Self::Percent => format!("{value:.2} %"),
            Self::Points => format!("{value:.2}"),
            Self::Count => format!("{value:.1}"),
        }
    }
}

impl Report {
    /// Shows it, as soon as it is complete.
    pub fn print(&self) {
        println!("== {} | {} | {} MiB | {}", self.name, self.data, self.data_bytes >> 20, self.algorithm);
        for note in &self.notes {
            println!("   {note}");
        }
        let mut table = Table::new();
        table.load_style(presets::UTF8_HORIZONTAL_ONLY);
        table.set_header(["", "median", "quartiles", "min .. max", "n", "target", "", "of"]);
        for row in &self.rows {
            let Row { value, unit, .. } = row;
            let spread = value.count > 1;
            let pair = |a, b, between| {
                if spread { format!("{}{between}{}", unit.text(a), unit.text(b)) } else { String::new() }
            };
            let mut parts = String::new();
            for (name, part) in &row.parts {
                // Writing to a String cannot fail.
                let _ = write!(parts, "{}{name} {}", if parts.is_empty() { "" } else { ", " }, tidy(*part));
            }
            table.add_row([
                row.what.clone(),
                match (row.refused, value.count) {
                    (true, 0) => "absent".into(),
                    (true, _) => "too wide a spread".into(),
                    (false, _) => unit.text(value.median),
                },
                pair(value.quartile1, value.quartile3, " - "),
                pair(value.min, value.max, " .. "),
                if spread { value.count.to_string() } else { String::new() },
                row.target.map(Target::text).unwrap_or_default(),
                row.judgement(),
                parts,
            ]);
        }
        for column in [1, 4, 5] {
            if let Some(column) = table.column_mut(column) {
                column.set_cell_alignment(CellAlignment::Right);
            }
        }
        println!("{table}\n");
    }
}

/// Bytes as MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn tidy(value: f64) -> String {
    if value.abs() >= 100.0 { format!("{value:.0}") } else { format!("{value:.3}") }
}

impl Document {
    /// A run that begins now.
    pub fn begin() -> Self {
        Self {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            freestone: env!("CARGO_PKG_VERSION"),
            liblz4: bare::lz4_version(),
            machine: Machine::here(),
            reports: Vec::new(),
        }
    }

    /// Writes the JSON.
    pub fn finish(&self, path: &Path) -> Result<()> {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            std::fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
        }
        std::fs::write(path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("{}", path.display()))?;
        println!("JSON: {}", path.display());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn targets_judge_the_median() {
        let row = |value, target| Row::new("x", Unit::Ratio, Summary::one(value)).target(target).met;
        assert_eq!(row(0.9, Target::AtLeast(0.9)), Some(true));
        assert_eq!(row(0.89, Target::AtLeast(0.9)), Some(false));
        assert_eq!(row(1.03, Target::AtMost(1.02)), Some(false));
        assert_eq!(row(0.96, Target::Within(0.95, 1.05)), Some(true));
        assert_eq!(Row::new("x", Unit::Mib, Summary::one(1.0)).met, None);
    }

    #[test]
    fn a_ratio_that_is_not_sure_is_not_given() {
        let row = |numbers: &[f64]| {
            let value = Summary::of(numbers.iter().copied());
            Row::new("x", Unit::Ratio, value).target(Target::AtLeast(0.5)).steady()
        };
        let sure = row(&[1.0, 1.1, 1.05]);
        assert_eq!((sure.met, sure.refused), (Some(true), false));
        for unsure in [&[1.0, 2.0, 3.0][..], &[1.0], &[1.0, 1.0], &[f64::NAN, f64::NAN, f64::NAN]] {
            let row = row(unsure);
            assert!(row.refused && row.met.is_none() && row.value.median.is_nan());
            assert!(serde_json::to_value(&row).unwrap()["median"].is_null());
        }
    }

    #[test]
    fn a_peer_is_judged_by_the_quartiles_and_not_where_the_ratio_is_not_sure() {
        let verdict = |numbers: &[f64], more| {
            Row::new("x", Unit::Ratio, Summary::of(numbers.iter().copied())).judged(more).steady().verdict
        };
        assert_eq!(verdict(&[1.1, 1.2, 1.15], true), Some(Verdict::Ahead));
        assert_eq!(verdict(&[1.1, 1.2, 1.15], false), Some(Verdict::Behind));
        assert_eq!(verdict(&[0.9, 0.8, 0.85], true), Some(Verdict::Behind));
        assert_eq!(verdict(&[0.9, 0.8, 0.85], false), Some(Verdict::Ahead));
        assert_eq!(verdict(&[0.9, 0.95, 1.1], true), Some(Verdict::Level));
        assert_eq!(verdict(&[0.1, 0.8, 3.0], true), None);
        let once = |number| Row::new("x", Unit::Ratio, Summary::one(number)).judged(false).verdict;
        assert_eq!((once(1.01), once(1.03)), (Some(Verdict::Level), Some(Verdict::Behind)));
        let absent = serde_json::to_value(Row::absent("x", Unit::Ratio)).unwrap();
        assert!(absent["median"].is_null() && absent["refused"] == true && absent["count"] == 0, "{absent}");
    }
}
