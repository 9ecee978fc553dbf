//! What a benchmark found: one schema, which is written as JSON and read again, and tables of it
//! for the terminal and for Markdown.

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

/// One measurement alone is level with a peer's within so much.
const ONE_ROOM: f64 = 0.02;

/// One run of a program.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Document {
    /// As it was typed.
    pub command: String,
    /// Year, month and day; added when the run is published.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub date: Option<String>,
    /// The version.
    pub freestone: String,
    /// The version of the codec that both sides have.
    #[serde(default)]
    pub liblz4: String,
    /// Where it ran.
    pub machine: Machine,
    /// What must be known to read any of the reports.
    #[serde(default)]
    pub notes: Vec<String>,
    /// In the order in which they were measured.
    pub reports: Vec<Report>,
    /// What the reports say, computed from them.
    #[serde(default)]
    pub findings: Vec<String>,
}

/// One benchmark on one data set.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Report {
    /// Reports of one name differ in their data only.
    pub name: String,
    /// What was stored: a short name, and after a colon what it is.
    pub data: String,
    /// Its size.
    pub data_bytes: u64,
    /// The codec.
    pub algorithm: String,
    /// What must be known to read the rows.
    pub notes: Vec<String>,
    /// In the order in which they are shown.
    pub rows: Vec<Row>,
    /// How names of rows become columns, where that is how it is read best: see [`Choice::pivot`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pivot: Option<String>,
    /// The file of its chart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chart: Option<String>,
}

/// One measured quantity.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Row {
    /// Unique within its report.
    pub what: String,
    /// Of all its numbers but the parts.
    pub unit: Unit,
    /// What was measured.
    #[serde(flatten)]
    pub value: Summary,
    /// The same quantity in the source, where it published one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub published: Option<f64>,
    /// What went into it, by name.
    #[serde(default, deserialize_with = "parts")]
    pub parts: Vec<(String, f64)>,
    /// What the median is to reach.
    pub target: Option<Target>,
    /// Whether it is as it should be, where that is known.
    pub met: Option<bool>,
    /// The spread is too wide: there is no median then, and no judgement.
    #[serde(default)]
    pub refused: bool,
    /// How ours does beside a peer, where that is the question.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verdict: Option<Verdict>,
}

/// Ours beside a peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// One number over another.
    Ratio,
    /// Seconds.
    Seconds,
    /// 2^20 bytes.
    Mib,
    /// 2^10 bytes.
    Kib,
    /// Milliseconds.
    Millis,
    /// Microseconds.
    Micros,
    /// Nanoseconds.
    Nanos,
    /// Operations a second.
    Iops,
    /// Thousands of operations a second.
    Kiops,
    /// KiB a second.
    KbSecond,
    /// Of a hundred.
    Percent,
    /// A difference of percentages.
    Points,
    /// A number of things.
    Count,
}

/// What a number is to reach.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    /// This or more.
    AtLeast(f64),
    /// This or less.
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
}

impl Row {
    /// A row without a target.
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

    /// How many times as much one is as another, or better.
    pub fn ratio(what: impl Into<String>, value: Summary) -> Self {
        Self::new(what, Unit::Ratio, value)
    }

    /// The quotients of numbers that were measured side by side.
    pub fn over(what: impl Into<String>, of: &[f64], to: &[f64]) -> Self {
        Self::ratio(what, Summary::ratio(of, to))
    }

    /// Of one measurement.
    pub fn one(what: impl Into<String>, unit: Unit, number: f64) -> Self {
        Self::new(what, unit, Summary::one(number))
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

    /// The same row, without a median and without a judgement where the numbers are too far apart
    /// to give one. Comes last.
    #[must_use]
    pub fn steady(mut self) -> Self {
        if !self.value.is_steady() {
            (self.refused, self.target, self.met, self.verdict) = (true, None, None, None);
            self.value.median = f64::NAN;
        }
        self
    }

    /// The same row with one of the numbers that it came from.
    #[must_use]
    pub fn part(mut self, name: impl Into<String>, value: f64) -> Self {
        self.parts.push((name.into(), value));
        self
    }
}

impl Report {
    /// Without notes and rows.
    pub fn new(name: impl Into<String>, data: impl Into<String>, data_bytes: u64, algorithm: &str) -> Self {
        let (name, data, algorithm) = (name.into(), data.into(), algorithm.to_owned());
        Self { name, data, data_bytes, algorithm, ..Self::default() }
    }

    /// The same report with one note more.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Self {
        self.notes.push(note.into());
        self
    }

    /// The same report with these rows.
    #[must_use]
    pub fn rows(self, rows: Vec<Row>) -> Self {
        Self { rows, ..self }
    }

    /// The short name of its data.
    pub fn data_name(&self) -> &str {
        self.data.split_once(':').map_or(self.data.as_str(), |(name, _)| name)
    }

    /// Shows it, as soon as it is complete, and gives it back.
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
    /// A run that begins now.
    pub fn begin(freestone: &str, liblz4: String) -> Self {
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

    /// Reads what [`Self::finish`] wrote.
    pub fn load(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).context("cannot be read")?;
        serde_json::from_str(&text).context("is no run of a benchmark")
    }

    /// Writes the JSON.
    pub fn finish(&self, path: &Path) -> Result<()> {
        if let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) {
            fs::create_dir_all(dir).with_context(|| format!("{}", dir.display()))?;
        }
        fs::write(path, serde_json::to_string_pretty(self)? + "\n")
            .with_context(|| format!("{}", path.display()))?;
        println!("JSON: {}", path.display());
        Ok(())
    }

    /// The files of its charts.
    pub fn charts(&self) -> impl Iterator<Item = &str> {
        self.reports.iter().filter_map(|report| report.chart.as_deref())
    }

    /// Command, date and machine in Markdown, with a link to the run.
    pub fn came_from(&self, link: &str) -> String {
        let Machine { cpu, cpus, memory_mib, kernel, load, .. } = &self.machine;
        let cpu = cpu.replace("(R)", "").replace("(TM)", "");
        let gib = (*memory_mib as f64 / 1024.0).round();
        format!(
            "[`{}`]({link}), {}: {cpu}, {cpus} CPUs, {gib} GiB, Linux {kernel}, load {load} at the start.",
            self.command,
            self.date.as_deref().unwrap_or("not published")
        )
    }

    /// The tables of the chosen reports in Markdown; an error says what is not there.
    pub fn markdown(&self, choice: &Choice) -> Result<String, String> {
        table::markdown(&self.reports, choice)
    }
}

/// Bytes as MiB.
pub fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// JSON has no number for what is none.
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

    #[test]
    fn what_is_written_can_be_read() {
        let row = Row::new("x", Unit::Micros, Summary::of([1.0, 9.0])).part("y", f64::NAN);
        let row = Row { published: Some(4.0), ..row.target(Target::Within(1.0, 2.0)).steady().judged(true) };
        let json = serde_json::to_string(&row).unwrap();
        let again: Row = serde_json::from_str(&json).unwrap();
        assert!(again.value.median.is_nan() && again.parts[0].1.is_nan());
        assert_eq!(serde_json::to_string(&again).unwrap(), json);
    }
}
