//! `freestone-torture MODE`: one of the modes from the command line.

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use freestone_torture::program;

/// Random stacks of devices under random requests, verbs, faults and crashes
#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    mode: Mode,
}

#[derive(Debug, Subcommand)]
enum Mode {
    /// The built program, over its sockets
    Program {
        /// Everything random is drawn from it
        #[arg(long, default_value_t = 1)]
        seed: u64,
        /// How long
        #[arg(long, default_value_t = 1.0)]
        minutes: f64,
        /// The program [default: freestone beside this one]
        #[arg(long, value_name = "PATH")]
        bin: Option<PathBuf>,
    },
}

fn main() -> Result<ExitCode> {
    match Cli::parse().mode {
        Mode::Program { seed, minutes, bin } => {
            let bin = bin.map_or_else(beside, Ok)?;
            ensure!(
                bin.is_file(),
                "{}: no such program; build it with `cargo build -p freestone-cli`",
                bin.display()
            );
            // It is started in directories of its own.
            Ok(told(program::run(seed, minutes, &std::path::absolute(bin)?)))
        }
    }
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
