//! `freestone-torture MODE`: runs one of the modes. `cargo xtask torture` builds what each mode
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
struct RunOptions {
    /// Seed of all random draws
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Duration in minutes
    #[arg(long, default_value_t = 1.0)]
    minutes: f64,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// The library, one process per run; the seed decides every step
    Exact {
        #[command(flatten)]
        run_options: RunOptions,
        /// Number of runs, however long they take
        #[arg(long)]
        runs: Option<u64>,
    },
    /// The library, with real threads
    Threads {
        #[command(flatten)]
        run_options: RunOptions,
        /// Repeat this one seed until it fails, and print each op on standard error
        #[arg(long)]
        again: bool,
    },
    /// The built program, over its sockets
    Program {
        #[command(flatten)]
        run_options: RunOptions,
        /// The program [default: freestone next to this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// The built program with a state directory; its servers are stopped or killed at random
    /// moments and started again
    Lives {
        #[command(flatten)]
        run_options: RunOptions,
        /// Print a failing run as it is, without shortening it
        #[arg(long)]
        whole: bool,
        /// The program [default: freestone next to this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// One run of mode lives, read as JSON from stdin
    Life {
        /// The program [default: freestone next to this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// The built program; its system calls fail one after the other
    #[cfg(target_arch = "x86_64")]
    Calls {
        #[command(flatten)]
        run_options: RunOptions,
        /// All cases of the seed, however long they take
        #[arg(long)]
        all: bool,
        /// At most N cases
        #[arg(long, value_name = "N")]
        cases: Option<usize>,
        /// Only this scene; can be repeated
        #[arg(long, value_name = "NAME")]
        scene: Vec<String>,
        /// Only calls of this kind, for example limit or fsync; can be repeated
        #[arg(long, value_name = "NAME")]
        call: Vec<String>,
        /// End at the first finding
        #[arg(long)]
        first: bool,
        /// One case only, in the form that a report prints
        #[arg(long, value_name = "CASE")]
        only: Option<String>,
        /// The program [default: freestone next to this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
    /// One run of mode exact, read as JSON from stdin
    Case {
        /// Print each op
        #[arg(long)]
        trace: bool,
    },
    /// Print the run of a seed of mode exact as JSON, for `case`
    Show {
        /// The seed
        seed: u64,
    },
}

/// Exits with 1 if the torture found a defect, and with 2 if the torture itself failed.
fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("freestone-torture: {error:#}");
        ExitCode::from(2)
    })
}

fn run() -> Result<ExitCode> {
    match Cli::parse().mode {
        Mode::Exact { run_options, runs } => {
            let (report, passed) = exact::run_seeds(run_options.seed, duration(&run_options), runs)?;
            println!("{report}");
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Threads { run_options, again } => {
            let run = if again { threads::repeat_seed } else { threads::run_seeds };
            let (runs, passed) = run(run_options.seed, duration(&run_options));
            println!("{runs} runs");
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Program { run_options, bin } => {
            Ok(print_outcome(program::run(run_options.seed, run_options.minutes, &program_path(bin)?)))
        }
        Mode::Lives { run_options, whole, bin } => {
            let (report, passed) =
                lives::run_seeds(run_options.seed, duration(&run_options), !whole, &program_path(bin)?);
            println!("{report}");
            Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Life { bin } => {
            let case = serde_json::from_reader(std::io::stdin()).context("the input is not a run")?;
            Ok(print_outcome(lives::run(0, &case, &program_path(bin)?)))
        }
        #[cfg(target_arch = "x86_64")]
        Mode::Calls { run_options, all, cases, scene, call, first, only, bin } => {
            let time = (!all).then(|| duration(&run_options));
            let choice = calls::CaseFilter { scenes: scene, calls: call, cases, time, is_first: first };
            let bin = program_path(bin)?;
            let report = match only {
                Some(case) => calls::repeat(&case, &bin),
                None => calls::run_cases(run_options.seed, &choice, &bin),
            };
            let report = report.map_err(anyhow::Error::msg)?;
            println!("{report}");
            Ok(if report.is_clean() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        Mode::Case { trace } => exact::run_case(trace),
        Mode::Show { seed } => {
            println!("{}", serde_json::to_string(&exact::case_of(seed))?);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn duration(run_options: &RunOptions) -> Duration {
    Duration::from_secs_f64(run_options.minutes * 60.0)
}

/// Returns the absolute path of the program under test: it is started with other working
/// directories.
fn program_path(bin: Option<PathBuf>) -> Result<PathBuf> {
    let bin = bin.map_or_else(default_program, Ok)?;
    ensure!(
        bin.is_file(),
        "{}: program does not exist; build it with `cargo build -p freestone-cli`",
        bin.display()
    );
    Ok(std::path::absolute(bin)?)
}

fn default_program() -> Result<PathBuf> {
    Ok(std::env::current_exe().context("cannot find the path of this program")?.with_file_name("freestone"))
}

fn print_outcome<R: std::fmt::Display, F: std::fmt::Display>(outcome: Result<R, F>) -> ExitCode {
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
