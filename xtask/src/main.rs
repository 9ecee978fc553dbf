//! Freestone's development commands. `cargo xtask test` is the whole gate; the other verbs are
//! parts of it.

mod bench;
mod cargo;
mod docs;
mod failures;
mod fio;
mod package;
mod packages;
mod sanitize;
mod slow;
mod steps;
mod tidy;
mod torture;
mod variants;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand, ValueEnum as _};

use sanitize::Sanitizer;
use steps::Step;

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Freestone's development commands")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the checks and tests that every change has to pass; install the Debian packages they
    /// need first
    Test {
        /// Run these steps only; may be given several times
        #[arg(long, value_name = "STEP", value_enum)]
        only: Vec<Step>,
        /// Run the slow lane as well: what is rare and takes long
        #[arg(long, conflicts_with = "only")]
        all: bool,
        /// List the steps
        #[arg(long)]
        list: bool,
    },
    /// Run the loom models: every interleaving of the lock protocols
    Models,
    /// Run the tests of the libraries under a sanitizer, or under both
    Sanitize {
        #[arg(value_enum)]
        sanitizer: Option<Sanitizer>,
    },
    /// Random stacks of devices under random requests, verbs, faults and crashes; see
    /// docs/testing.md
    Torture {
        /// What is tortured; all of them, one after the other, if it is not said
        #[arg(long, value_enum)]
        mode: Option<torture::Mode>,
        /// The seed to begin with; a random one if it is not said
        #[arg(long)]
        seed: Option<u64>,
        /// How long, in all
        #[arg(long, default_value_t = 10.0)]
        minutes: f64,
        /// Put faults back that were found once, one at a time, and have each found; of these
        /// names, or all
        #[arg(long, value_name = "NAME", num_args = 0.., conflicts_with_all = ["mode", "seed", "minutes"])]
        mutants: Option<Vec<String>>,
    },
    /// Check the rules of CONTRIBUTING.md that a machine can check
    Tidy,
    /// Build the engine for fio, against the source of the fio that is installed; fetch that first
    Fio,
    /// Make the Debian package, and one of its debug symbols; see docs/install.md
    Package {
        /// What it is for; arm64 is built with Debian's cross compilers
        #[arg(long, value_enum, default_value = "amd64")]
        arch: package::arch::Arch,
    },
    /// Run a benchmark, built for release; without a name, list them
    Bench {
        /// The benchmark and what it takes
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

fn main() -> ExitCode {
    match run(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Tells whether all went well.
fn run(cli: Cli) -> Result<bool> {
    // Cargo runs us in the directory of the caller; the workspace's root is where all paths start.
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize();
    let root = root.context("the workspace that xtask was built in is gone")?;
    std::env::set_current_dir(&root).with_context(|| format!("cannot enter {}", root.display()))?;
    let is_gate = matches!(cli.command, Command::Test { .. });
    let steps = match cli.command {
        Command::Test { list: true, .. } => {
            steps::list();
            return Ok(true);
        }
        Command::Test { all: true, .. } => Step::value_variants().to_vec(),
        Command::Test { only, .. } => steps::chosen(&only),
        Command::Models => vec![Step::Models],
        Command::Sanitize { sanitizer: Some(Sanitizer::Thread) } => vec![Step::Tsan, Step::TsanRest],
        Command::Sanitize { sanitizer: Some(Sanitizer::Address) } => vec![Step::Asan, Step::AsanRest],
        Command::Sanitize { sanitizer: None } => {
            vec![Step::Tsan, Step::TsanRest, Step::Asan, Step::AsanRest]
        }
        Command::Torture { mutants: Some(names), .. } => return Ok(torture::mutants(&names)?.ok),
        Command::Torture { mode, seed, minutes, .. } => return torture::run(mode, seed, minutes),
        Command::Tidy => vec![Step::Tidy],
        Command::Fio => return fio::run(),
        Command::Package { arch } => return package::run(arch),
        Command::Bench { args } if args.first().is_some_and(|name| name == "docs") => {
            return docs::command(&args[1..]);
        }
        Command::Bench { args } => return bench::bench(&args),
    };
    let done = steps::run(&steps)?;
    slow::record(&done)?;
    if is_gate {
        slow::tell();
    }
    Ok(done.iter().all(|done| done.ok))
}
