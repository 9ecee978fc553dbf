//! `freestone-torture MODE`: one of the modes. `cargo xtask torture` builds what each of them
//! needs.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Args, Parser, Subcommand};
#[cfg(target_arch = "x86_64")]
use freestone_torture::program::calls;
use freestone_torture::program::lives;
use freestone_torture::{exact, program, threads};

/// Random stacks of devices under random requests, verbs, faults and crashes
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Debug, Args)]
struct Extent {
    /// Everything random is drawn from it
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// How long
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// The library, each run a process of which the seed decides every step
    Exact {
        #[command(flatten)]
        extent: Extent,
        /// So many runs, however long they take
        #[arg(long)]
        runs: Option<u64>,
    },
    /// The library, with real threads
    Threads {
        #[command(flatten)]
        extent: Extent,
        /// This seed alone, again and again until it fails, and each op is told on standard error
        #[arg(long)]
        again: bool,
    },
    /// The built program, over its sockets
    Program {
        #[command(flatten)]
        extent: Extent,
        /// The program [default: freestone beside this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// The built program with a state, whose servers are ended and killed in the middle of everything
    /// and started again
    Lives {
        #[command(flatten)]
        extent: Extent,
        /// A run that fails is printed as it is, and not made shorter
        #[arg(long)]
        whole: bool,
        /// The program [default: freestone beside this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// One run of the lives, as JSON from stdin
    Life {
        /// The program [default: freestone beside this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// The built program, of which one system call after the other fails
    #[cfg(target_arch = "x86_64")]
    Calls {
        #[command(flatten)]
        extent: Extent,
        /// All cases of the seed, however long they take
        #[arg(long)]
        all: bool,
        /// At most N cases
        #[arg(long, value_name = "N")]
        cases: Option<usize>,
        /// Only this scene; can be repeated
        #[arg(long, value_name = "NAME")]
        scene: Vec<String>,
        /// Only calls of this kind, as limit or fsync; can be repeated
        #[arg(long, value_name = "NAME")]
        call: Vec<String>,
        /// End at the first finding
        #[arg(long)]
        first: bool,
        /// One case alone, as a report prints it
        #[arg(long, value_name = "CASE")]
        only: Option<String>,
        /// The program [default: freestone beside this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// One run of the exact mode, as JSON from stdin
    Case {
        /// Tells each op
        #[arg(long)]
        trace: bool,
    },
    /// Prints the run of a seed of the exact mode, for `case`
    Show {
        /// The seed
        seed: u64,
    },
}

/// Ends with 1 for a torture that has found something, and with 2 for one that went wrong.
fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("freestone-torture: {error:#}");
        ExitCode::from(2)
    })
}

fn run() -> Result<ExitCode> {
    match Cli::parse().mode {
        Mode::Exact { extent, runs } => {
            let (report, passed) = exact::exact(extent.seed, time(&extent), runs)?;
            println!("{report}");
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Threads { extent, again } => {
            let how = if again { threads::again } else { threads::threads };
            let (runs, passed) = how(extent.seed, time(&extent));
            println!("{runs} runs");
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Program { extent, bin } => Ok(told(program::run(extent.seed, extent.minutes, &found(bin)?))),
        Mode::Lives { extent, whole, bin } => {
            let (report, passed) = lives::lives(extent.seed, time(&extent), !whole, &found(bin)?);
            println!("{report}");
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Life { bin } => {
            let case = serde_json::from_reader(std::io::stdin()).context("this is no run")?;
            Ok(told(lives::run(0, &case, &found(bin)?)))
        }
        #[cfg(target_arch = "x86_64")]
        Mode::Calls { extent, all, cases, scene, call, first, only, bin } => {
            let time = (!all).then(|| time(&extent));
            let choice = calls::Choice { scenes: scene, calls: call, cases, time, is_first: first };
            let bin = found(bin)?;
            let report = match only {
                Some(case) => calls::again(&case, &bin),
                None => calls::calls(extent.seed, &choice, &bin),
            };
            let report = report.map_err(anyhow::Error::msg)?;
            println!("{report}");
            Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Case { trace } => exact::case(trace),
        Mode::Show { seed } => {
            println!("{}", serde_json::to_string(&exact::case_of(seed))?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn time(extent: &Extent) -> Duration {
    Duration::from_secs_f64(extent.minutes * 60.0)
}

/// The program that is tortured, which is started in directories of its own.
fn found(bin: Option<PathBuf>) -> Result<PathBuf> {
    let bin = bin.map_or_else(beside, Ok)?;
    ensure!(
        bin.is_file(),
        "{}: no such program; build it with `cargo build -p freestone-cli`",
        bin.display()
    );
    Ok(std::path::absolute(bin)?)
}

fn beside() -> Result<PathBuf> {
    Ok(std::env::current_exe().context("where this program is")?.with_file_name("freestone"))
}

fn told<R: std::fmt::Display, F: std::fmt::Display>(outcome: Result<R, F>) -> ExitCode {
    match outcome {
        Ok(report) => {
            println!("{report}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("{failure}");
            ExitCode::FAILURE
        }
    }
}
