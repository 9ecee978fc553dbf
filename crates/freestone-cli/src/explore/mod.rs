//! `freestone explore`: records a workload, and checks the states of its disk after a power loss at every point.
//!
//! The states are made by `freestone-explore`. This room records the workload, exports the disks of the workers, runs
//! the check, and reports.

mod checker;
mod command;
mod disks;
mod fuse;
mod junit;
mod kept;
mod mounted;
mod output;
mod progress;
mod workload;

use std::fs;
use std::io::{self, Write as _};
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::{Args, ValueEnum};
use freestone_explore::{
    Base, Budget, Check as _, End, ExploreError, Model, Options, Report, StateId, Timeline, explore, state_at,
};
use freestone_server::settings::paths;
use freestone_server::usage::Usage;
use freestone_spec::{Devices, machine, size, times};
use tempfile::TempDir;

use self::checker::Checker;
use self::disks::Disks;
use self::kept::Kept;
use self::mounted::FileSystem;
use self::output::Subject;
use self::progress::{Observer, ProgressForm};
use self::workload::Disk;
use crate::client::long::STATUS_INTERRUPTED;
use crate::client::print_json;
use crate::error::{STATUS_FAILURE, Stdout};
use crate::mounts::check_root;

/// Size of the disk of `--run` without `--size` and `--base`, in bytes.
const SIZE_DEFAULT_BYTES: u64 = 1 << 30;
/// Number of states that are checked without `--budget`.
const STATES_DEFAULT: u64 = 5000;
/// Longest time of a check without `--timeout`, as in the help.
const TIMEOUT_DEFAULT: Duration = Duration::from_secs(30);
/// Number of checks at the same time for each CPU, without `--jobs`. A check of a mounted state waits for its mount most
/// of the time.
const JOBS_PER_CPU_MOUNTED: usize = 4;
/// Largest number of checks at the same time.
const JOBS_MAX: usize = 256;

const BUDGET_HELP: &str = "End after N states, or after a TIME such as 60s [default: 5000]";

/// The command line of `explore`.
#[derive(Debug, Args)]
#[allow(clippy::struct_excessive_bools, reason = "each is an option of its own")]
pub struct Line {
    /// Workload to record: `sh -c CMD`, with the disk as $uri
    #[arg(long, value_name = "CMD", required_unless_present = "log")]
    run: Option<String>,
    /// Check of a state: `sh -c CMD`, with the state as $uri; status 0 accepts the state
    #[arg(long, value_name = "CMD")]
    check: String,
    /// Log to explore, of the key `record` or of dm-log-writes; with --run, the new log
    #[arg(long, value_name = "FILE")]
    log: Option<PathBuf>,
    /// Content of the disk before the log: a raw or qcow2 image, which stays unchanged
    #[arg(long, value_name = "IMAGE", conflicts_with = "size")]
    base: Option<PathBuf>,
    /// Size of the disk, which is empty before the log [default with --run: 1G]
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    size: Option<u64>,
    /// Mount the file system, for the workload and for each check, at $dir; needs root
    #[arg(long)]
    mount: bool,
    /// Type of the file system; without --base, it is created first
    #[arg(long, value_name = "TYPE", requires = "mount")]
    fs: Option<String>,
    /// Present each state as a file, $file, by nbdfuse
    #[arg(long)]
    file: bool,
    #[arg(long, value_name = "N|TIME", help = BUDGET_HELP, value_parser = parse_budget)]
    budget: Option<Budget>,
    /// Model of the power loss; can be repeated [default: prefix and subset]
    #[arg(long, value_enum, value_name = "prefix|subset|torn", hide_possible_values = true)]
    model: Vec<ModelName>,
    /// Size of the pieces in which the model torn tears writes, a power of two from 512 to 4096
    #[arg(long, value_name = "BYTES", default_value_t = 512)]
    unit: u64,
    /// Seed of the random choices
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Number of checks at the same time [default: one for each CPU; with --mount, four]
    #[arg(long, value_name = "N", value_parser = parse_jobs)]
    jobs: Option<NonZeroUsize>,
    /// Longest time of one check, after which it counts as failed
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = parse_timeout)]
    timeout: Duration,
    /// End at the first failure
    #[arg(long)]
    stop_at_first: bool,
    /// Check one state only, and print the output of the check
    #[arg(long, value_name = "ID", conflicts_with_all = ["run", "budget", "model", "stop_at_first", "junit"])]
    state: Option<StateId>,
    /// Keep failing states in this directory: qcow2 overlays on the base, or raw images if there is none
    #[arg(long, value_name = "DIR")]
    keep: Option<PathBuf>,
    #[arg(long, value_name = "FILE", help = "Write the result to FILE as JUnit XML")]
    junit: Option<PathBuf>,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Progress on stderr: a bar if stderr is a terminal, or JSON lines [default: bar]
    #[arg(long, value_enum, value_name = "bar|json|none", hide_possible_values = true)]
    progress: Option<ProgressForm>,
}

/// Names of the models on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum ModelName {
    Prefix,
    Subset,
    Torn,
}

impl From<ModelName> for Model {
    fn from(name: ModelName) -> Self {
        match name {
            ModelName::Prefix => Self::Prefix,
            ModelName::Subset => Self::Subset,
            ModelName::Torn => Self::Torn,
        }
    }
}

fn parse_size(text: &str) -> Result<u64, String> {
    match size::parse(text) {
        Ok(0) => Err("must be at least 1".into()),
        Ok(bytes) => Ok(bytes),
        Err(error) => Err(error.to_string()),
    }
}

fn parse_budget(text: &str) -> Result<Budget, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1 state".into()),
        Ok(states) => Ok(Budget::States(states)),
        Err(_) => times::parse(text)
            .map(Budget::Time)
            .map_err(|why| format!("a number of states, or a time: {why}")),
    }
}

fn parse_jobs(text: &str) -> Result<NonZeroUsize, String> {
    let jobs = text.parse().ok().filter(|jobs: &NonZeroUsize| jobs.get() <= JOBS_MAX);
    jobs.ok_or_else(|| format!("must be a number from 1 to {JOBS_MAX}"))
}

fn parse_timeout(text: &str) -> Result<Duration, String> {
    let time = times::parse(text)?;
    if time.is_zero() { Err("must be at least 1ms".into()) } else { Ok(time) }
}

/// Files of a recording without `--log`. They are kept if there is a failure to repeat.
struct Recording {
    log: PathBuf,
    disk: Disk,
    temporary: Option<TempDir>,
}

/// Runs the verb. Returns the exit status.
pub fn run(line: &Line) -> Result<ExitCode> {
    if line.mount {
        check_root("explore --mount")?;
        mounted::release_abandoned();
    }
    let observer = Observer::new(line.progress)?;
    let sockets = paths::private_dir()?;
    let recording = match &line.run {
        Some(text) => record(line, text, sockets.path())?,
        None => Some(existing(line)?),
    };
    if observer.is_interrupted() {
        return Ok(ExitCode::from(STATUS_INTERRUPTED));
    }
    let Some(mut recording) = recording else { return Ok(ExitCode::from(STATUS_FAILURE)) };
    let base = recording.disk.base_spec()?.map(|spec| open(&spec)).transpose()?;
    let timeline = open_timeline(&recording, base.as_ref())?;
    let jobs = line.jobs.unwrap_or_else(|| default_jobs(line.mount));
    let workers = if line.state.is_some() { 1 } else { jobs.get() };
    let disks = Disks::start(sockets.path(), &timeline, workers, line.file, line.mount)?;
    let fs = line.fs.as_deref();
    let checker =
        Checker { text: &line.check, timeout: line.timeout, fs, disks: &disks, observer: &observer };
    if let Some(id) = &line.state {
        return check_one(line, &timeline, &recording.disk, id, &checker);
    }
    let models = match &line.model[..] {
        [] => vec![Model::Prefix, Model::Subset],
        names => names.iter().map(|name| (*name).into()).collect(),
    };
    let budget = line.budget.unwrap_or(Budget::States(STATES_DEFAULT));
    let options =
        Options { models, unit: line.unit, seed: line.seed, jobs, budget, stop_at_first: line.stop_at_first };
    let report = explore(&timeline, &options, &checker, &observer).map_err(usage_or_failure);
    observer.clear();
    let report = report?;
    if !report.failures.is_empty() {
        recording.keep_files();
    }
    let log = std::path::absolute(&recording.log).unwrap_or_else(|_| recording.log.clone());
    let subject =
        Subject { log: &log, disk: &recording.disk, check: &line.check, options: check_options(line) };
    // The result is printed before an error of a file ends the program.
    let (kept, keeping) = keep_failures(line, &timeline, &report, &recording.disk);
    if line.json {
        print_json(&output::json(&report, &subject, line.seed, &kept).to_string())?;
    } else {
        print(&output::text(&report, &subject, &kept))?;
    }
    if let Some(file) = &line.junit {
        let details = |index: usize| {
            output::failure_text(index + 1, &report.failures[index], &subject, kept[index].as_ref())
        };
        let xml = junit::document(&report, &log.display().to_string(), &details);
        fs::write(file, xml).with_context(|| format!("--junit {}", file.display()))?;
    }
    keeping?;
    Ok(match (report.end, report.failures.is_empty()) {
        (End::Stopped, _) => ExitCode::from(STATUS_INTERRUPTED),
        (_, false) => ExitCode::from(STATUS_FAILURE),
        (_, true) => ExitCode::SUCCESS,
    })
}

fn default_jobs(mount: bool) -> NonZeroUsize {
    let cpus = thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let jobs = if mount { cpus.saturating_mul(JOBS_PER_CPU_MOUNTED) } else { cpus };
    NonZeroUsize::new(jobs.min(JOBS_MAX)).unwrap_or(NonZeroUsize::MIN)
}

/// Returns the options of the command line that the result of a check depends on.
fn check_options(line: &Line) -> Vec<String> {
    let mut options = Vec::new();
    if line.mount {
        options.push("--mount".to_owned());
    }
    if let Some(fs) = &line.fs {
        options.push(format!("--fs {fs}"));
    }
    if line.file {
        options.push("--file".to_owned());
    }
    if line.timeout != TIMEOUT_DEFAULT {
        options.push(format!("--timeout {}", times::exact(line.timeout)));
    }
    options
}

/// Records the workload. Returns `None` if the workload failed, after a report.
fn record(line: &Line, text: &str, dir: &Path) -> Result<Option<Recording>> {
    let (log, temporary) = if let Some(log) = &line.log {
        (log.clone(), None)
    } else {
        let dir = tempfile::Builder::new().prefix("freestone-explore-").tempdir();
        let dir = dir.context("cannot create a directory for the log")?;
        (dir.path().join("log"), Some(dir))
    };
    let size = line.size.unwrap_or(SIZE_DEFAULT_BYTES);
    let disk = match (&line.base, &line.fs) {
        (Some(image), _) => Disk::Image(std::path::absolute(image).context("--base")?),
        (None, Some(fs)) => {
            let mut name = log.clone().into_os_string();
            name.push(".base");
            let image = std::path::absolute(PathBuf::from(name)).context("--log")?;
            workload::make_file_system(&image, size, fs)?;
            Disk::Image(image)
        }
        (None, None) if line.mount => {
            return Err(
                Usage("--mount: say --fs TYPE to create a file system, or --base IMAGE".into()).into()
            );
        }
        (None, None) => Disk::Empty(size),
    };
    let status =
        workload::record(text, &disk, &log, dir, line.mount.then_some(FileSystem(line.fs.as_deref())))?;
    let mut recording = Recording { log, disk, temporary };
    if !status.success() {
        recording.keep_files();
        let (log, end) = (recording.log.display(), command::describe(status));
        crate::error::print_error(&anyhow::anyhow!("--run: the workload failed ({end}); its log is {log}"));
        return Ok(None);
    }
    Ok(Some(recording))
}

/// Returns the log of the command line.
fn existing(line: &Line) -> Result<Recording> {
    let Some(log) = &line.log else { bail!("--log is missing") };
    let disk = match (&line.base, line.size) {
        (Some(image), _) => Disk::Image(std::path::absolute(image).context("--base")?),
        (None, Some(size)) => Disk::Empty(size),
        (None, None) => {
            let why = "say the disk before the log: --base IMAGE, or --size SIZE for an empty disk";
            return Err(Usage(format!("--log {}: {why}", log.display())).into());
        }
    };
    Ok(Recording { log: log.clone(), disk, temporary: None })
}

impl Recording {
    fn keep_files(&mut self) {
        if let Some(dir) = self.temporary.take() {
            let _ = dir.keep();
        }
    }
}

fn open(spec: &str) -> Result<Devices> {
    Devices::open(&[spec.to_owned()]).map_err(|error| anyhow::anyhow!("--base: {}", error.sentence))
}

fn open_timeline(recording: &Recording, base: Option<&Devices>) -> Result<Arc<Timeline>> {
    let base = match (&recording.disk, base) {
        (Disk::Empty(size), _) => Base::Zeroes(*size),
        (Disk::Image(image), base) => {
            let entry = base.and_then(|devices| devices.registry().find("base"));
            let device = entry.and_then(|entry| entry.device().cloned());
            Base::Device(device.with_context(|| format!("--base {}: is not a disk", image.display()))?)
        }
    };
    let limit = machine::half_of_memory()?;
    Ok(Arc::new(Timeline::open(&recording.log, base, limit).map_err(usage_or_failure)?))
}

/// Converts an error of the exploration. An invalid unit or state is a usage error.
fn usage_or_failure(error: ExploreError) -> anyhow::Error {
    match error {
        ExploreError::BadUnit { .. } | ExploreError::NoState { .. } => Usage(error.to_string()).into(),
        error => error.into(),
    }
}

fn check_one(
    line: &Line,
    timeline: &Arc<Timeline>,
    disk: &Disk,
    id: &StateId,
    checker: &Checker<'_>,
) -> Result<ExitCode> {
    let state = state_at(timeline, id).map_err(usage_or_failure)?;
    let verdict = checker.check(0, &state, Arc::new(state.disk()?))?;
    let Some(verdict) = verdict else { return Ok(ExitCode::from(STATUS_INTERRUPTED)) };
    let kept = line.keep.as_deref().map(|dir| kept::keep(dir, timeline, id, disk)).transpose()?;
    if line.json {
        let lost: Vec<_> = state.lost_writes().iter().map(|lost| lost.entry).collect();
        let result = serde_json::json!({
            "state": id.to_string(), "entry": id.point, "mark": state.mark(), "lost_entries": lost,
            "passed": verdict.passed, "end": verdict.end, "output": verdict.output,
            "kept": kept.as_ref().map(|kept| kept.path.display().to_string()),
            "reopen": kept.as_ref().map(|kept| &kept.reopen),
        });
        print_json(&result.to_string())?;
    } else {
        print(&output::state_text(id, &verdict, kept.as_ref()))?;
    }
    Ok(if verdict.passed { ExitCode::SUCCESS } else { ExitCode::from(STATUS_FAILURE) })
}

/// Keeps the failures in the directory of `--keep`. Returns those that were kept, by the index of the failure, and the
/// first error. After an error, the other failures are not kept.
fn keep_failures(
    line: &Line,
    timeline: &Arc<Timeline>,
    report: &Report,
    disk: &Disk,
) -> (Vec<Option<Kept>>, Result<()>) {
    let mut kept = Vec::new();
    let mut keep_all = || {
        for failure in &report.failures {
            let dir = line.keep.as_deref();
            kept.push(dir.map(|dir| kept::keep(dir, timeline, &failure.id, disk)).transpose()?);
        }
        Ok(())
    };
    let result = keep_all();
    kept.resize_with(report.failures.len(), || None);
    (kept, result)
}

fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(Stdout::from)?;
    Ok(())
}
