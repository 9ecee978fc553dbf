//! What lasts over restarts (`serve --state`, `keep=yes`), with the real program: what a state costs
//! verbs, how long a start with many forks takes, how fast content is there again, how large
//! increments are, and what writers notice of saves.

mod beside;
mod control;
mod home;
mod increments;
mod kept;
mod many;
mod restore;
mod verbs;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::Report;

use self::kept::Kept;
use crate::options::{Options, Set};
use crate::ours;
use crate::place::Place;

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// What to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
    /// many: how many forks [default: 10000, with --quick 100]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    forks: Option<u32>,
    /// The program to measure [default: the workspace's own, built as this program was, else the one
    /// beside it]
    #[arg(long)]
    freestone: Option<PathBuf>,
}

/// A part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// A fork with an export, with a state and without.
    Verbs,
    /// The start of a server with many forks.
    Many,
    /// How fast a RAM disk's content is there again.
    Restore,
    /// How large an increment is.
    Increments,
    /// Writes while saves run.
    Writes,
}

/// What every part works with.
struct Bench<'a> {
    args: &'a Args,
    options: &'a Options,
    /// On the file system that is measured.
    place: &'a Place,
    freestone: PathBuf,
}

/// Runs the parts.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let place = Place::new(&options.data_dir, "restarts-")?;
    let bench = Bench { args, options, place: &place, freestone: ours::program(args.freestone.as_deref())? };
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
        let kept = Kept::fill(&bench, set)?;
        if wanted(PartName::Restore) {
            add(restore::run(&bench, &kept)?);
        }
        if wanted(PartName::Increments) {
            add(increments::run(&bench, &kept)?);
        }
        if wanted(PartName::Writes) {
            add(beside::run(&bench, &kept)?);
        }
    }
    Ok(reports)
}
