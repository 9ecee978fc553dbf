//! `zones` benchmark: test devices. Measures the cost of the device contract, memory backing
//! against memcpy, and a lock per zone against one per device.

mod floor;
mod memcpy;
pub mod scaling;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use crate::options::Options;

/// Options of the `zones` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Parts to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Operations per second of the null device without backing.
    Floor,
    /// 128 KiB requests to memory backing, beside memcpy.
    Memcpy,
    /// Threads on many zones: a lock per zone beside one lock per device.
    Scaling,
}

/// Runs the selected parts of the benchmark and returns their reports.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut reports = Vec::new();
    let mut add = |report: Report| reports.push(report.print());
    if wanted(PartName::Floor) {
        add(floor::run(options)?);
    }
    if wanted(PartName::Memcpy) {
        add(memcpy::run(options)?);
    }
    if wanted(PartName::Scaling) {
        scaling::run(options)?.into_iter().for_each(add);
    }
    Ok(reports)
}
