//! Freestone's own benchmarks. Each prints a table with the target beside what was measured, and writes JSON.
//!
//! Numbers are medians of ratios between slices of two loops that take turns in one run: what else happens on the
//! machine meets both sides alike. Run with `cargo run --release -p freestone-benches -- all`.

mod bare;
mod codec;
mod data;
mod machine;
mod measure;
mod memory;
mod options;
mod report;
mod setup;
mod threads;
mod zram;
mod zram_device;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::options::Options;
use crate::report::{Document, Report};

/// Freestone's own benchmarks.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    bench: Bench,
    #[command(flatten)]
    options: Options,
}

#[derive(Subcommand, Clone, Copy, PartialEq, Eq)]
enum Bench {
    /// Random 4 KiB reads and rewrites of a RAM disk against the bare codec on the same pages, one thread.
    Codec,
    /// The library against the kernel's zram, one synchronous loop each (needs root and an unused zram device).
    Zram,
    /// Threads on distinct slots against as many copies of the bare codec loop.
    Threads,
    /// Memory: overhead after a fill, after rewrites, after compaction; what discarding returns; PSS.
    Memory,
    /// All of these in turn.
    All,
}

type Run = fn(&Options) -> Result<Vec<Report>>;

impl Bench {
    fn name(self) -> &'static str {
        match self {
            Self::Codec => "codec",
            Self::Zram => "zram",
            Self::Threads => "threads",
            Self::Memory => "memory",
            Self::All => "all",
        }
    }

    fn runs(self) -> Vec<Run> {
        match self {
            Self::Codec => vec![codec::run],
            Self::Zram => vec![zram::run],
            Self::Threads => vec![threads::run],
            Self::Memory => vec![memory::run],
            Self::All => vec![codec::run, threads::run, zram::run, memory::run],
        }
    }
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    cli.options.check()?;
    let mut document = Document::begin();
    println!("{}", document.machine);
    println!("command: {}\n", document.command);
    for run in cli.bench.runs() {
        for report in run(&cli.options)? {
            document.reports.push(report);
        }
    }
    document.finish(&cli.options.json_file(cli.bench.name()))
}
