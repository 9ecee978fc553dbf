//! `restarts` benchmark: persistence over restarts (`serve --state`, `keep=yes`), with the real
//! program. Measures verbs with a state directory, starts with many forks, restores, the size of
//! increments, and writes during saves.

mod control;
mod home;
mod increments;
mod many;
mod restore;
mod saved_disk;
mod verbs;
mod writes;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use self::saved_disk::SavedDisk;
use crate::options::{Options, Set};
use crate::programs::program_path;
use crate::programs::run_dir::RunDir;

/// Options of the `restarts` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Parts to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// many: number of forks [default: 10000, with --quick 100]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    forks: Option<u32>,
    /// Path of the `freestone` program to measure [default: the workspace's own, built with this
    /// program's profile, else the one in this program's directory]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// A fork with an export, with a state directory and without.
    Verbs,
    /// Start of a server with many forks.
    Many,
    /// Time to restore the content of a RAM disk.
    Restore,
    /// Size of an increment.
    Increments,
    /// Writes during saves.
    Writes,
}

struct Bench<'a> {
    args: &'a Args,
    options: &'a Options,
    /// Directory on the file system that is measured.
    run_dir: &'a RunDir,
    freestone: PathBuf,
}

/// Runs the selected parts of the benchmark and returns their reports.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let run_dir = RunDir::new(&options.data_dir, "restarts-")?;
    let bench = Bench {
        args,
        options,
        run_dir: &run_dir,
        freestone: program_path::program(args.freestone.as_deref())?,
    };
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut reports = Vec::new();
    let mut add = |report: Report| reports.push(report.print());
    if wanted(PartName::Verbs) {
        add(verbs::run(&bench)?);
    }
    if wanted(PartName::Many) {
        add(many::run(&bench)?);
    }
    if ![PartName::Restore, PartName::Increments, PartName::Writes].into_iter().any(wanted) {
        return Ok(reports);
    }
    for set in options.sets(&[Set::Real]) {
        let saved_disk = SavedDisk::fill(&bench, set)?;
        if wanted(PartName::Restore) {
            add(restore::run(&bench, &saved_disk)?);
        }
        if wanted(PartName::Increments) {
            add(increments::run(&bench, &saved_disk)?);
        }
        if wanted(PartName::Writes) {
            add(writes::run(&bench, &saved_disk)?);
        }
    }
    Ok(reports)
}
