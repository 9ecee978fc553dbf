//! Test drives: what the contract itself costs, memory backing against memcpy, and what a lock a
//! zone gains over one a device.

mod floor;
mod memcpy;
pub mod scaling;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use crate::options::Options;

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
}

/// A part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Operations a second of the null device without backing.
    Floor,
    /// 128 KiB requests to memory backing, beside memcpy.
    Memcpy,
    /// Threads on many zones: a lock a zone beside one lock a device.
    Scaling,
}

/// Runs the parts.
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
