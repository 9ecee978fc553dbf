//! The five published experiments (the sources), repeated: published figures beside those of this
//! machine, as tables, JSON, charts and text.
//!
//! The directory `--out` receives `experiment-N.json` for each experiment that was run, and a chart
//! for each of its tables. Files of other experiments from earlier runs stay.

mod experiments;
mod load;
mod model;
mod report;
mod results;

use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};
use freestone_benches::machine;
use freestone_benches::options::Options;
use freestone_report::{Document, Report};

use self::experiments::{locks, snapshots, streams, writeback, zones};
use self::report::{chart, words};
use self::results::Experiment;

/// The experiments of the sources.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    #[command(flatten)]
    options: Options,
}

// The experiments are a subcommand, because `cargo xtask bench` and the recorded command line treat
// this program as one of the benchmarks.
#[derive(Subcommand)]
enum Bench {
    /// The five experiments of the sources: published figures beside measured ones, with JSON,
    /// charts and text
    Reproduce(Args),
}

/// Options of `reproduce`.
#[derive(Debug, Clone, clap::Args)]
struct Args {
    /// Experiments to run: 1 locks, 2 streams, 3 writeback, 4 snapshots, 5 zones, or all
    #[arg(default_value = "all", value_name = "1..5|all")]
    which: Vec<Selection>,
    /// Directory for the JSON and the charts
    #[arg(long, default_value = "benches/out/reproduce")]
    out: PathBuf,
    /// 1 and 2: also run with ext4 on the disk, through NBD, nbdfuse and a loop device; needs root,
    /// nbdfuse and e2fsprogs
    #[arg(long)]
    ext4: bool,
    /// 3: directory for the backing file, on the disk to measure [default: that of --data-dir]
    #[arg(long)]
    dir: Option<PathBuf>,
}

/// Selected experiments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Selection {
    All,
    One(u8),
}

impl FromStr for Selection {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "all" => Ok(Self::All),
            "1" | "2" | "3" | "4" | "5" => Ok(Self::One(text.as_bytes()[0] - b'0')),
            _ => bail!("an experiment must be a number from 1 to 5, or all"),
        }
    }
}

/// Runs the experiments one after the other. Each is printed and written as soon as it has run.
fn main() -> Result<()> {
    let Cli { bench: Bench::Reproduce(args), options } = Cli::parse();
    options.check()?;
    std::fs::create_dir_all(&args.out).with_context(|| format!("{}", args.out.display()))?;
    let run = freestone_benches::begin();
    let cpus = machine::allowed_cpus()?.len();
    for number in 1..=5 {
        if !args.which.contains(&Selection::All) && !args.which.contains(&Selection::One(number)) {
            continue;
        }
        let experiment = match number {
            1 => locks::run(args.ext4, &options)?,
            2 => streams::run(args.ext4, &options)?,
            3 => writeback::run(args.dir.as_deref(), &options)?,
            4 => snapshots::run(&options)?,
            _ => zones::run(&options)?,
        };
        let findings = words::of(&experiment, cpus);
        write(&args.out, &experiment, Document { findings, ..run.clone() })?;
    }
    Ok(())
}

/// Prints the experiment, draws its charts and writes its JSON.
fn write(out: &Path, experiment: &Experiment, mut document: Document) -> Result<()> {
    let Experiment { number, title, source, tables, .. } = experiment;
    document.notes = vec![format!("{title}. Source: {source}")];
    document.notes.extend_from_slice(&experiment.here);
    document.reports = report::of(experiment);
    for (table, report) in tables.iter().zip(&mut document.reports) {
        let chart = format!("experiment-{number}-{}.svg", file_name(&table.name));
        chart::draw(table, &experiment.model, &format!("{title}: {}", table.name), &out.join(&chart))?;
        report.chart = Some(chart);
    }
    println!("==== {number}. {}\n", document.notes.join("\n   "));
    document.reports = document.reports.into_iter().map(Report::print).collect();
    for line in &document.findings {
        println!("   {line}");
    }
    document.save(&out.join(format!("experiment-{number}.json")))
}

/// Returns the name of a table as a file name of lower-case letters, digits and hyphens.
fn file_name(table: &str) -> String {
    let words = table.to_lowercase();
    let words = words.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.collect::<Vec<_>>().join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn experiment_is_selected_by_number() {
        assert_eq!("all".parse::<Selection>().unwrap(), Selection::All);
        assert_eq!("5".parse::<Selection>().unwrap(), Selection::One(5));
        for bad in ["0", "6", "", "zones", "1..5"] {
            assert!(bad.parse::<Selection>().is_err(), "{bad}");
        }
    }

    #[test]
    fn chart_has_name_of_its_table() {
        assert_eq!(file_name("Reads, no backing (KIOPS)"), "reads-no-backing-kiops");
    }
}
