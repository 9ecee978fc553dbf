//! `writeback` benchmark: cost and speed of writeback compared with the kernel's old way of one
//! page at a time, with fio and with exact LRU. Also the gain of recompression.

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

/// Default data size, in bytes.
const BYTES: u64 = 2 << 30;
/// Minimum data size in bytes for targets. With less data the runs are too short to judge.
const JUDGED_BYTES: u64 = 1 << 30;

/// Options of the `writeback` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Directory for the backing files, on the disk to measure [default: that of --data-dir]
    #[arg(long)]
    dir: Option<PathBuf>,
    /// Parts to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',')]
    part: Vec<PartName>,
}

/// A part of the benchmark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Writeback of a whole idle disk, against batch size 1 without compression and against fio's
    /// sequential writes.
    Spill,
    /// Random reads of written-back pages, against fio's.
    Reads,
    /// Share of a zipfian load that is served from memory, against exact LRU.
    Zipf,
    /// Gain of recompression (real files only).
    Recompress,
}

struct Part {
    notes: Vec<String>,
    rows: Vec<Row>,
}

impl Part {
    fn note(text: &str) -> Self {
        Self { notes: vec![text.into()], rows: Vec::new() }
    }
}

struct Bench<'a> {
    data: Data,
    dir: PathBuf,
    options: &'a Options,
}

pub fn run(args: &Args, options: &Options) -> Result<Vec<Report>> {
    let sets = options.sets(&[Set::Fio, Set::Real]);
    sets.into_iter().map(|set| run_set(set, args, options)).collect()
}

fn run_set(set: Set, args: &Args, options: &Options) -> Result<Report> {
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
        Set::Fio => add(Part::note("Recompression is measured on real files only.")),
        _ if wanted(PartName::Recompress) => add(recompress::run(&bench)?),
        _ => {}
    }
    if bench.data.bytes() < JUDGED_BYTES {
        report.notes.push("Less than 1 GiB: the runs are too short, so targets are not judged.".into());
        for row in &mut report.rows {
            (row.target, row.met) = (None, None);
        }
    }
    Ok(report.print())
}
