//! Schema of benchmark results: written as JSON, read again, and shown as tables in the terminal
//! and in Markdown.

#![allow(missing_docs, reason = "of tools: only what a name does not say has a comment")]

mod machine;
mod number;
mod summary;
mod table;

// Writing to a String cannot fail: results are dropped.
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use serde::{Deserialize, Deserializer, Serialize};

pub use machine::Machine;
pub use number::plain;
pub use summary::Summary;
pub use table::Choice;

/// Tolerance around 1 for a ratio of one measurement: within it the verdict is "level".
const SINGLE_TOLERANCE: f64 = 0.02;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Document {
    pub command: String,
    /// Date as year, month and day; added when the run is published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    pub freestone: String,
    /// Version of liblz4, which both sides of a comparison use.
    #[serde(default)]
    pub liblz4: String,
    pub machine: Machine,
    /// Notes that apply to all reports.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Reports in the order of measurement.
    pub reports: Vec<Report>,
    /// Statements computed from the reports.
    #[serde(default)]
    pub findings: Vec<String>,
}

/// Results of one benchmark on one data set.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// Name of the benchmark. Reports with the same name differ only in their data.
    pub name: String,
    /// Data that was stored: a short name, then after a colon a description.
    pub data: String,
    pub data_bytes: u64,
    pub algorithm: String,
    pub notes: Vec<String>,
    /// Rows in display order.
    pub rows: Vec<Row>,
    /// Pattern that turns row names into columns, if the table reads best that way. See
    /// [`Choice::pivot`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pivot: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chart: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// Name of the quantity, unique in its report.
    pub what: String,
    /// Unit of all numbers of the row except the parts.
    pub unit: Unit,
    #[serde(flatten)]
    pub value: Summary,
    /// Value of the same quantity in the published experiment, if it reports one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<f64>,
    /// Names and values of the numbers from which the value was computed.
    #[serde(default, deserialize_with = "parts")]
    pub parts: Vec<(String, f64)>,
    pub target: Option<Target>,
    /// Result of comparing the median with the target, or None without a target.
    pub met: Option<bool>,
    /// True if the median is withheld: the spread is too wide, or nothing was measured.
    #[serde(default)]
    pub refused: bool,
    /// Result of the comparison, if the row compares Freestone with a peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

/// Result of comparing Freestone with a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Freestone is better, and both quartiles confirm it.
    Ahead,
    /// The quartiles lie on both sides of 1.
    Level,
    /// Freestone is worse, and both quartiles confirm it.
    Behind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// Quotient of two numbers.
    Ratio,
    Seconds,
    /// Units of 2^20 bytes.
    Mib,
    /// Units of 2^10 bytes.
    Kib,
    Millis,
    Micros,
    Nanos,
    /// Operations per second.
    Iops,
    /// Thousands of operations per second.
    Kiops,
    /// KiB per second.
    KbSecond,
    Percent,
    /// Difference of two percentages.
    Points,
    Count,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// Lower bound, inclusive.
    AtLeast(f64),
    /// Upper bound, inclusive.
    AtMost(f64),
    /// Lower and upper bound, both inclusive.
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
}

impl Row {
    pub fn new(what: impl Into<String>, unit: Unit, value: Summary) -> Self {
        Self {
            what: what.into(),
            unit,
            value,
            published: None,
            parts: Vec::new(),
            target: None,
            met: None,
            refused: false,
            verdict: None,
        }
    }

    pub fn ratio(what: impl Into<String>, value: Summary) -> Self {
        Self::new(what, Unit::Ratio, value)
    }

    /// Creates a row for the quotients `of[i] / to[i]` of numbers that were measured side by side.
    pub fn ratio_of(what: impl Into<String>, of: &[f64], to: &[f64]) -> Self {
        Self::ratio(what, Summary::ratio(of, to))
    }

    pub fn single(what: impl Into<String>, unit: Unit, number: f64) -> Self {
        Self::new(what, unit, Summary::one(number))
    }

    /// Creates a row for a quantity that could not be measured: no number and no judgement. The notes of the
    /// report must say why.
    pub fn absent(what: impl Into<String>, unit: Unit) -> Self {
        let no_number = Summary { count: 0, ..Summary::one(f64::NAN) };
        Self { refused: true, ..Self::new(what, unit, no_number) }
    }

    /// Adds the verdict of a row that compares Freestone with a peer. `higher_is_better` is true if a ratio
    /// above 1 means that Freestone is better.
    #[must_use]
    pub fn with_verdict(mut self, higher_is_better: bool) -> Self {
        let Summary { quartile1, quartile3, count, .. } = self.value;
        let tolerance = if count == 1 { SINGLE_TOLERANCE } else { 0.0 };
        self.verdict = Some(match (quartile1 > 1.0 + tolerance, quartile3 < 1.0 - tolerance) {
            (true, _) if higher_is_better => Verdict::Ahead,
            (_, true) if !higher_is_better => Verdict::Ahead,
            (false, false) => Verdict::Level,
            _ => Verdict::Behind,
        });
        self
    }

    #[must_use]
    pub fn target(mut self, target: Target) -> Self {
        self.met = Some(target.met(self.value.median));
        self.target = Some(target);
        self
    }

    /// Withholds median, target and verdict if the spread of the numbers is too wide. Must be called last,
    /// because other methods set these fields.
    #[must_use]
    pub fn withhold_if_unsteady(mut self) -> Self {
        if !self.value.is_steady() {
            (self.refused, self.target, self.met, self.verdict) = (true, None, None, None);
            self.value.median = f64::NAN;
        }
        self
    }

    /// Adds a number from which the value was computed.
    #[must_use]
    pub fn part(mut self, name: impl Into<String>, value: f64) -> Self {
        self.parts.push((name.into(), value));
        self
    }
}

impl Report {
    pub fn new(name: impl Into<String>, data: impl Into<String>, data_bytes: u64, algorithm: &str) -> Self {
        let (name, data, algorithm) = (name.into(), data.into(), algorithm.to_owned());
        Self { name, data, data_bytes, algorithm, ..Self::default() }
    }

    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    #[must_use]
    pub fn rows(self, rows: Vec<Row>) -> Self {
        Self { rows, ..self }
    }

    pub fn data_name(&self) -> &str {
        self.data.split_once(':').map_or(self.data.as_str(), |(name, _)| name)
    }

    #[must_use]
    pub fn print(self) -> Self {
        let mut title = self.name.clone();
        if !self.data.is_empty() {
            let _ = write!(title, " | {} | {} MiB | {}", self.data, self.data_bytes >> 20, self.algorithm);
        }
        println!("== {title}");
        for note in &self.notes {
            println!("   {note}");
        }
        if let Some(table) = table::of(&self) {
            println!("{}", table.terminal());
        }
        println!();
        self
    }
}

impl Document {
    /// Creates a run without reports, with the command line and the machine of this process.
    pub fn new(freestone: &str, liblz4: String) -> Self {
        Self {
            command: std::env::args().collect::<Vec<_>>().join(" "),
            date: None,
            freestone: freestone.into(),
            liblz4,
            machine: Machine::here(),
            notes: Vec::new(),
            reports: Vec::new(),
            findings: Vec::new(),
        }
    }

    /// Reads a run that [`Self::save`] wrote.
    pub fn load(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).context("cannot be read")?;
        serde_json::from_str(&text).context("is not a run of a benchmark")
    }

    pub fn save(&self, path: &Path) -> Result<()> {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
        }
        fs::write(path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("{}", path.display()))?;
        println!("JSON: {}", path.display());
        Ok(())
    }

    pub fn charts(&self) -> impl Iterator<Item = &str> {
        self.reports.iter().filter_map(|report| report.chart.as_deref())
    }

    /// Returns command, date and machine in Markdown, with a link to the run.
    pub fn provenance(&self, link: &str) -> String {
        let Machine { cpu, cpus, memory_mib, kernel, load, .. } = &self.machine;
        let cpu = cpu.replace("(R)", "").replace("(TM)", "");
        let gib = (*memory_mib as f64 / 1024.0).round();
        format!(
            "[`{}`]({link}), {}: {cpu}, {cpus} CPUs, {gib} GiB, Linux {kernel}, load {load} at the start.",
            self.command,
            self.date.as_deref().unwrap_or("not published")
        )
    }

    /// Returns the tables of the chosen reports in Markdown. The error names what is missing.
    pub fn markdown(&self, choice: &Choice) -> Result<String, String> {
        table::markdown(&self.reports, choice)
    }
}

pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Reads a number that JSON writes as null if it is not finite.
fn or_nan<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or(f64::NAN))
}

fn parts<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<(String, f64)>, D::Error> {
    let parts = Vec::<(String, Option<f64>)>::deserialize(from)?;
    Ok(parts.into_iter().map(|(name, part)| (name, part.unwrap_or(f64::NAN))).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn target_judges_median() {
        let row = |value, target| Row::new("x", Unit::Ratio, Summary::one(value)).target(target).met;
        assert_eq!(row(0.9, Target::AtLeast(0.9)), Some(true));
        assert_eq!(row(0.89, Target::AtLeast(0.9)), Some(false));
        assert_eq!(row(1.03, Target::AtMost(1.02)), Some(false));
        assert_eq!(row(0.96, Target::Within(0.95, 1.05)), Some(true));
        assert_eq!(Row::new("x", Unit::Mib, Summary::one(1.0)).met, None);
    }

    #[test]
    fn unsteady_ratio_withholds_median() {
        let row = |numbers: &[f64]| {
            let value = Summary::of(numbers.iter().copied());
            Row::new("x", Unit::Ratio, value).target(Target::AtLeast(0.5)).withhold_if_unsteady()
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
    fn peer_verdict_follows_quartiles() {
        let verdict = |numbers: &[f64], more| {
            Row::new("x", Unit::Ratio, Summary::of(numbers.iter().copied()))
                .with_verdict(more)
                .withhold_if_unsteady()
                .verdict
        };
        assert_eq!(verdict(&[1.1, 1.2, 1.15], true), Some(Verdict::Ahead));
        assert_eq!(verdict(&[1.1, 1.2, 1.15], false), Some(Verdict::Behind));
        assert_eq!(verdict(&[0.9, 0.8, 0.85], true), Some(Verdict::Behind));
        assert_eq!(verdict(&[0.9, 0.8, 0.85], false), Some(Verdict::Ahead));
        assert_eq!(verdict(&[0.9, 0.95, 1.1], true), Some(Verdict::Level));
        assert_eq!(verdict(&[0.1, 0.8, 3.0], true), None);
        let once = |number| Row::new("x", Unit::Ratio, Summary::one(number)).with_verdict(false).verdict;
        assert_eq!((once(1.01), once(1.03)), (Some(Verdict::Level), Some(Verdict::Behind)));
        let absent = serde_json::to_value(Row::absent("x", Unit::Ratio)).unwrap();
        assert!(absent["median"].is_null() && absent["refused"] == true && absent["count"] == 0, "{absent}");
    }

    #[test]
    fn row_json_round_trip_is_lossless() {
        let row = Row::new("x", Unit::Micros, Summary::of([1.0, 9.0])).part("y", f64::NAN);
        let row = Row {
            published: Some(4.0),
            ..row.target(Target::Within(1.0, 2.0)).withhold_if_unsteady().with_verdict(true)
        };
        let json = serde_json::to_string(&row).unwrap();
        let read_back: Row = serde_json::from_str(&json).unwrap();
        assert!(read_back.value.median.is_nan() && read_back.parts[0].1.is_nan());
        assert_eq!(serde_json::to_string(&read_back).unwrap(), json);
    }
}
