//! Freestone's development commands. Every change must pass `cargo xtask test`; continuous integration also runs
//! `cargo xtask gate`.

mod bench;
mod build;
mod cargo;
mod docs;
mod gate;
mod instructions;
mod package;
mod python;
mod record;
mod release;
mod sanitize;
mod site;
mod steps;
mod suites;
mod tidy;
mod torture;

use std::ffi::OsString;
use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use clap::{Parser, Subcommand, ValueEnum as _};

use build::api::Mode;
use sanitize::Sanitizer;
use steps::{Lane, Step, Verdict};

#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", about = "Freestone's development commands")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the checks and tests that every change must pass, after installing the Debian packages that they need. Exit
    /// status: 0 if all passed, 1 if any failed, 3 if none failed but tests were skipped because a package is missing
    Test {
        /// Run only this step, of any lane; repeat the option for several steps
        #[arg(long, value_name = "STEP", value_enum)]
        only: Vec<Step>,
        /// Also run the gate and the whole slow lane
        #[arg(long, conflicts_with = "only")]
        all: bool,
        /// List the steps
        #[arg(long)]
        list: bool,
    },
    /// Run the checks of continuous integration beyond the tests: instruction counts, a short kernel lab, sanitizers,
    /// and pieces of the slow lane, those that ran longest ago first
    Gate {
        /// Start a piece of the slow lane only if it is expected to end within this time, in minutes
        #[arg(long, default_value_t = 30.0)]
        minutes: f64,
    },
    /// Merge the record that a gate printed into xtask/record.json
    Record {
        /// File with the output of the gate, or only its record line
        file: String,
    },
    /// Run the loom models, which explore every interleaving of the lock protocols
    Models,
    /// Run the tests of the libraries under a sanitizer
    Sanitize {
        /// Sanitizer to use; both by default
        #[arg(value_enum)]
        sanitizer: Option<Sanitizer>,
    },
    /// Run random stacks of devices under random requests, verbs, faults and crashes; see docs/explanation/testing.md
    Torture {
        /// Mode to run; by default all modes, one after the other
        #[arg(long, value_enum)]
        mode: Option<torture::Mode>,
        /// Seed of the first run; random by default
        #[arg(long)]
        seed: Option<u64>,
        /// Total duration in minutes
        #[arg(long, default_value_t = 10.0)]
        minutes: f64,
        /// Reintroduce known faults, one at a time, and check that the torture finds each; all faults if no NAME is given
        #[arg(long, value_name = "NAME", num_args = 0.., conflicts_with_all = ["mode", "seed", "minutes"])]
        mutants: Option<Vec<String>>,
    },
    /// Check the rules of CONTRIBUTING.md that a machine can check
    Tidy {
        /// Check nothing; lower the counts in xtask/src/tidy/prose.txt to the hits of the prose check
        #[arg(long)]
        lower: bool,
    },
    /// Write the lists of the public interface, crates/NAME/api.txt, after a change that is meant
    Api,
    /// Build the documentation as a site in target/site/book, and check its links
    Site,
    /// Build the engine for fio; fetch the source of the installed fio first if it is missing
    Fio,
    /// Build the Debian package and the package of its debug symbols, see docs/how-to/install.md; the wheel of the
    /// Python package, see docs/how-to/python.md; the packages of the published crates; or an archive of the static
    /// program
    Package {
        /// Form of the package
        #[arg(value_enum, default_value = "deb")]
        form: package::Form,
        /// Architecture; arm64 is cross-compiled with Debian's compilers
        #[arg(long, value_enum, default_value = "amd64")]
        arch: package::arch::Arch,
        /// Cargo's profile for the program, to try a package without waiting for the build of packages
        #[arg(long)]
        profile: Option<String>,
    },
    /// Set the version, and build everything that users install in target/release-VERSION, with checksums
    Release {
        /// Version, three numbers
        version: String,
        /// Make only this part; repeat the option for several
        #[arg(long, value_name = "PART", value_enum)]
        only: Vec<release::Part>,
        /// Base image of the container image, in place of that in packaging/Containerfile
        #[arg(long, value_name = "IMAGE")]
        base: Option<String>,
    },
    /// Run a benchmark in a release build; without a name, list the benchmarks
    Bench {
        /// Name of the benchmark and its options
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<OsString>,
    },
}

/// Exit status if no test failed but some tests were skipped.
const INCOMPLETE: u8 = 3;

fn main() -> ExitCode {
    if let Err(error) = heed_interrupts() {
        eprintln!("xtask: cannot restore the default of ignored signals: {error}");
    }
    // Cargo also runs this program in the place of rustdoc.
    let recorded = build::documentation::record_call();
    let verdict =
        recorded.and_then(|recorded| if recorded { Ok(Verdict::Passed) } else { run(Cli::parse()) });
    match verdict {
        Ok(Verdict::Passed) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::FAILURE,
        Ok(Verdict::Incomplete) => ExitCode::from(INCOMPLETE),
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs this program again with default signals if it ignores interrupts, as after `cargo xtask test &` in a script.
/// Programs inherit ignored signals, and some tests interrupt programs.
fn heed_interrupts() -> std::io::Result<()> {
    const SIGINT_BIT: u64 = 1 << (2 - 1);
    let status = std::fs::read_to_string("/proc/self/status")?;
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let ignored = ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or_default();
    if ignored & SIGINT_BIT == 0 {
        return Ok(());
    }
    let mut again = std::process::Command::new("env");
    again.arg("--default-signal=INT,QUIT").arg(std::env::current_exe()?).args(std::env::args_os().skip(1));
    Err(again.exec())
}

fn run(cli: Cli) -> Result<Verdict> {
    // Cargo starts xtask in the caller's directory, but all paths in xtask are relative to the root of the workspace.
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize();
    let root = root.context("the workspace in which xtask was built no longer exists")?;
    std::env::set_current_dir(&root).with_context(|| format!("cannot enter {}", root.display()))?;
    let steps = match cli.command {
        Command::Test { list: true, .. } => {
            steps::list();
            return Ok(Verdict::Passed);
        }
        Command::Test { all: true, .. } => Step::value_variants().to_vec(),
        Command::Test { only, .. } if only.is_empty() => steps::of_lane(Lane::Test),
        Command::Test { only, .. } => steps::chosen(&only),
        Command::Gate { minutes } => {
            return gate::run(Duration::try_from_secs_f64(60.0 * minutes).context("--minutes")?);
        }
        Command::Record { file } => return record::merge(&file).map(|()| Verdict::Passed),
        Command::Models => vec![Step::Models],
        Command::Sanitize { sanitizer } => steps::of_sanitizer(sanitizer),
        Command::Torture { mutants: Some(names), .. } => return Ok(torture::mutants(&names)?.ok.into()),
        Command::Torture { mode, seed, minutes, .. } => return Ok(torture::run(mode, seed, minutes)?.into()),
        Command::Tidy { lower: true } => return tidy::lower().map(|()| Verdict::Passed),
        Command::Tidy { lower: false } => vec![Step::Tidy],
        Command::Api => return Ok(build::documentation::document(Mode::Write)?.ok.into()),
        Command::Site => vec![Step::Site],
        Command::Fio => return Ok(build::fio::run()?.into()),
        Command::Package { form, arch, profile } => {
            return Ok(package::run(form, arch, profile.as_deref())?.into());
        }
        Command::Release { version, only, base } => {
            return release::run(&version, &only, base.as_deref()).map(|()| Verdict::Passed);
        }
        Command::Bench { args } if args.first().is_some_and(|name| name == "docs") => {
            return Ok(docs::command(&args[1..])?.into());
        }
        Command::Bench { args } => return Ok(bench::bench(&args)?.into()),
    };
    let start = Instant::now();
    let done = steps::run_all(&steps, start)?;
    Ok(steps::summary(&done, start, &[]))
}
