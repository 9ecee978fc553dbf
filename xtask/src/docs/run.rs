//! A run as a benchmark wrote it: what of the JSON is shown.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use serde::Deserialize;

use super::RUNS_DIR;

/// One published run.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Run {
    Experiment(Experiment),
    Reports(Reports),
}

/// What every run says of itself.
#[derive(Debug, Deserialize)]
pub struct Origin {
    pub command: String,
    /// Year, month and day; added when the run is taken.
    pub date: String,
    pub machine: Machine,
}

#[derive(Debug, Deserialize)]
pub struct Machine {
    cpu: String,
    cpus: usize,
    memory_mib: u64,
    kernel: String,
    load: String,
}

/// What most benchmarks write.
#[derive(Debug, Deserialize)]
pub struct Reports {
    #[serde(flatten)]
    pub origin: Origin,
    pub reports: Vec<Report>,
}

#[derive(Debug, Deserialize)]
pub struct Report {
    pub name: String,
    pub data: String,
    pub rows: Vec<Row>,
}

/// Numbers that are not there are null.
#[derive(Debug, Deserialize)]
pub struct Row {
    pub what: String,
    pub unit: Unit,
    #[serde(flatten)]
    pub value: Summary,
    #[serde(default)]
    pub parts: Vec<(String, Option<f64>)>,
    pub target: Option<Target>,
    pub met: Option<bool>,
    /// "ahead", "level" or "behind", beside a peer.
    pub verdict: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    Ratio,
    Seconds,
    Mib,
    Kib,
    Millis,
    Micros,
    Nanos,
    Kiops,
    Percent,
    Points,
    Count,
}

#[derive(Debug, Clone, Copy, Deserialize)]
pub struct Summary {
    /// Null where the spread is too wide to give it.
    pub median: Option<f64>,
    pub quartile1: Option<f64>,
    pub quartile3: Option<f64>,
    pub count: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Target {
    AtLeast(f64),
    AtMost(f64),
    Within(f64, f64),
}

/// What `reproduce` writes.
#[derive(Debug, Deserialize)]
pub struct Experiment {
    #[serde(flatten)]
    pub origin: Origin,
    pub title: String,
    pub source: String,
    pub here: Vec<String>,
    pub tables: Vec<Table>,
    pub model: Vec<Modelled>,
    pub sentences: Vec<String>,
    pub charts: Vec<String>,
}

#[derive(Debug, Deserialize)]
pub struct Table {
    pub name: String,
    pub unit: String,
    pub better: Better,
    pub columns: Vec<String>,
    pub old: usize,
    pub rows: Vec<TableRow>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Better {
    More,
    Less,
}

#[derive(Debug, Deserialize)]
pub struct TableRow {
    pub what: String,
    pub threads: usize,
    pub published: Vec<Option<f64>>,
    pub measured: Vec<Option<Summary>>,
    pub ratios: Vec<Option<Summary>>,
}

#[derive(Debug, Deserialize)]
pub struct Modelled {
    pub table: String,
    pub what: String,
    pub checks: Vec<Check>,
    pub beyond: Vec<Beyond>,
}

#[derive(Debug, Deserialize)]
pub struct Check {
    pub threads: usize,
    pub column: String,
    /// Part of the measurement.
    pub error: Option<f64>,
}

#[derive(Debug, Deserialize)]
pub struct Beyond {
    pub threads: usize,
    pub ratio: f64,
}

/// Where the run `name` lies.
pub fn path(name: &str) -> PathBuf {
    Path::new(RUNS_DIR).join(format!("{name}.json"))
}

impl Run {
    pub fn load(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path).context("cannot be read")?;
        let value: serde_json::Value = serde_json::from_str(&text).context("is no JSON")?;
        // By what it has, so that an error names the field and not only that nothing fits.
        let run = if value.get("tables").is_some() {
            serde_json::from_value(value).map(Self::Experiment)
        } else {
            serde_json::from_value(value).map(Self::Reports)
        };
        run.context("is no run of a benchmark")
    }

    /// The files of its charts.
    pub fn charts(&self) -> impl Iterator<Item = &str> {
        let charts: &[String] = match self {
            Self::Experiment(run) => &run.charts,
            Self::Reports(_) => &[],
        };
        charts.iter().map(String::as_str)
    }

    /// Command, date and machine.
    pub fn came_from(&self, name: &str, to_docs: &str) -> String {
        let Origin { command, date, machine } = match self {
            Self::Experiment(run) => &run.origin,
            Self::Reports(run) => &run.origin,
        };
        let Machine { cpu, cpus, memory_mib, kernel, load } = machine;
        let cpu = cpu.replace("(R)", "").replace("(TM)", "");
        let gib = (*memory_mib as f64 / 1024.0).round();
        format!(
            "[`{command}`]({to_docs}runs/{name}.json), {date}: {cpu}, {cpus} CPUs, {gib} GiB, Linux {kernel}, load {load} at the start."
        )
    }
}
