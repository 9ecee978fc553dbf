//! What spilling costs and reaches: against the kernel's old way, against the disk itself as fio
//! drives it, and against an exact LRU; and what recompression gains.

pub mod backing;
mod fio;
mod hits;
mod reads;
mod recompress;
mod spill;

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use freestone_report::{Report, Row};

use crate::data::Data;
use crate::options::{Options, Set};

/// Data where `--size` does not say.
const BYTES: u64 = 2 << 30;
/// Below this much data the runs are too short, and targets say nothing.
const JUDGED_BYTES: u64 = 1 << 30;

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Directory for the backing files, on the disk to measure [default: that of --data-dir]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// What to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
}

/// A part of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// A whole idle disk: against batch size 1 without compression, against fio's sequential
    /// writes.
    Spill,
    /// Random reads of spilled pages against fio's.
    Reads,
    /// The share of a zipfian load that memory serves, against exact LRU.
    Zipf,
    /// What recompression gains (real files only).
    Recompress,
}

/// What a part has to say.
struct Part {
    notes: Vec<String>,
    rows: Vec<Row>,
}

impl Part {
    fn note(text: &str) -> Self {
        Self { notes: vec![text.into()], rows: Vec::new() }
    }
}

/// What every part works on.
struct Bench<'a> {
    data: Data,
    dir: PathBuf,
    options: &'a Options,
}

/// Runs the parts on every data set.
pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let sets = options.sets(&[Set::Fio, Set::Real]);
    sets.into_iter().map(|set| one(set, args, options)).collect()
}

fn one(set: Set, args: &Args, options: &Options) -> Result<Report> {
    let dir = args.dir.clone().unwrap_or_else(|| options.data_dir.clone());
    let bench = Bench { data: Data::open(set, options.bytes(BYTES), options)?, dir, options };
    let mut report = Report::new("writeback", bench.data.description.clone(), bench.data.bytes(), "lz4");
    let wanted = |part| args.part.is_empty() || args.part.contains(&part);
    let mut add = |part: Part| {
        report.notes.extend(part.notes);
        report.rows.extend(part.rows);
    };
    if wanted(PartName::Spill) {
        add(spill::run(&bench)?);
    }
    if wanted(PartName::Reads) {
        add(reads::run(&bench)?);
    }
    if wanted(PartName::Zipf) {
        add(hits::run(&bench)?);
    }
    match set {
        Set::Real if wanted(PartName::Recompress) => add(recompress::run(&bench)?),
        Set::Fio => add(Part::note("Recompression is measured on real files only.")),
        Set::Real => {}
    }
    if bench.data.bytes() < JUDGED_BYTES {
        report.notes.push("Less than 1 GiB: the runs are too short, targets are not judged.".into());
        for row in &mut report.rows {
            (row.target, row.met) = (None, None);
        }
    }
    Ok(report.print())
}
