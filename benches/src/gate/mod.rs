//! `gate` benchmark: compares the instruction counts of hot paths with a committed baseline, so
//! that a change that raises a count is found.
//!
//! Callgrind counts instructions in user space: the same number under any load and on any machine
//! with the same compilers. For a device, only the requests on the caller's thread are counted. For
//! a server, the whole process is counted, as the difference of two runs.

mod baseline;
mod paths;
mod server;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use freestone::sync::Mutex;
use freestone_report::{Report, Row, Summary, Target, Unit};

use self::baseline::Baseline;
pub use self::paths::Loop;
use self::paths::{COUNTED, HotPath, REQUESTS};
pub use self::server::{ServerArgs, serve};
use crate::callgrind;

/// Largest accepted rise of a count, relative to a baseline of a build with the same compilers and
/// flags.
const RISE_MAX: f64 = 0.03;
/// Largest accepted rise of a count, relative to a baseline of another build: other compilers
/// generate other code for the same source.
const RISE_MAX_OTHER_BUILD: f64 = 0.15;
/// Compilers and flags of this program.
const BUILD: &str = env!("FREESTONE_BUILD");
/// Disables the CPU features by which glibc selects its `memcpy` and the like, so that every x86-64
/// machine uses the same functions.
const TUNABLES: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM,-SSSE3,-SSE4_1,\
     -SSE4_2,-BMI1,-BMI2,-LZCNT,-MOVBE,-RTM",
);

/// Options of the `gate` benchmark.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Write the counts to the baseline instead of comparing with it
    #[arg(long)]
    accept: bool,
    /// File of the baseline
    #[arg(long, default_value = "benches/baseline.json")]
    baseline: PathBuf,
    /// Count this number of times and take the medians; the table shows the spread
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    rounds: u8,
    /// Paths to count, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "accept")]
    path: Vec<HotPath>,
}

/// Counts the instructions of the hot paths. The error lists the paths whose count rose too much.
pub fn run(args: &Args) -> Result<Vec<Report>> {
    // Load the baseline before the long measurement, to fail early.
    let baseline = if args.accept { None } else { Some(Baseline::load(&args.baseline)?) };
    let mut paths = HotPath::value_variants().to_vec();
    paths.retain(|path| args.path.is_empty() || args.path.contains(path));
    let counts = count_all(&paths, args.rounds)?;
    let judge = baseline.as_ref().map(|baseline| Judge::new(baseline, args.path.is_empty()));
    let mut rows = Vec::new();
    let mut problems = Vec::new();
    for (path, count) in &counts {
        let row = Row::new(format!("{}: {}", path.name(), path.about()), Unit::Count, *count);
        rows.push(match judge.as_ref().map(|judge| judge.of(*path, count.median)) {
            None => row,
            Some(Verdict { before: None, problem, .. }) => {
                problems.extend(problem);
                row
            }
            Some(Verdict { before: Some(before), limit, problem }) => {
                problems.extend(problem);
                let change = 100.0 * (count.median / before - 1.0);
                row.target(Target::AtMost(limit)).part("baseline", before).part("change %", change)
            }
        });
    }
    let mut notes = vec![
        "Instructions of one request in user space, counted by callgrind on the caller's thread. Requests are \
         4 KiB; unless stated otherwise, with lz4 and fio's compressible pages. NBD: what the server executes \
         for one request at a time. vhost-user: for 32 at a time."
            .into(),
        format!("build: {BUILD}"),
    ];
    if let Some(judge) = &judge {
        notes.extend(judge.other_build_note());
        problems.extend(judge.unknown_paths());
    }
    let report = Report {
        notes,
        rows,
        ..Report::new("gate", "fio's compressible pages, same-filled pages", paths::DISK_BYTES, "lz4")
    }
    .print();
    if args.accept {
        let paths = counts.iter().map(|(path, count)| (path.name(), count.median)).collect();
        Baseline::new(BUILD, paths).save(&args.baseline)?;
        println!("accepted: {}", args.baseline.display());
    }
    if !problems.is_empty() {
        bail!(
            "{}\nIf this is intended: run cargo xtask bench gate --accept, and state the reason in the commit \
             (CONTRIBUTING.md)",
            problems.join("\n")
        );
    }
    Ok(vec![report])
}

struct Judge<'a> {
    baseline: &'a Baseline,
    rise_max: f64,
    /// True if all paths were counted.
    all_paths: bool,
}

struct Verdict {
    before: Option<f64>,
    limit: f64,
    problem: Option<String>,
}

impl<'a> Judge<'a> {
    fn new(baseline: &'a Baseline, all_paths: bool) -> Self {
        let rise_max = if baseline.build == BUILD { RISE_MAX } else { RISE_MAX_OTHER_BUILD };
        Self { baseline, rise_max, all_paths }
    }

    fn of(&self, path: HotPath, now: f64) -> Verdict {
        let name = path.name();
        let Some(&before) = self.baseline.paths.get(&name) else {
            let problem = Some(format!("{name} is not in the baseline"));
            return Verdict { before: None, limit: f64::NAN, problem };
        };
        let limit = before * (1.0 + self.rise_max);
        let rise = 100.0 * (now / before - 1.0);
        let problem = (now > limit).then(|| {
            let allowed = 100.0 * self.rise_max;
            format!("{name} rose by {rise:.1} %, from {before:.0} to {now:.0} instructions; {allowed:.0} % are allowed")
        });
        if now < before * (1.0 - RISE_MAX) && self.baseline.build == BUILD {
            println!(
                "{name} fell by {:.1} %: accept the new count, or a later rise by the same amount is not \
                      noticed",
                -rise
            );
        }
        Verdict { before: Some(before), limit, problem }
    }

    fn other_build_note(&self) -> Option<String> {
        (self.baseline.build != BUILD).then(|| {
            format!(
                "The baseline is from another build, so a rise of {:.0} % is allowed instead of {:.0} %: {}",
                100.0 * RISE_MAX_OTHER_BUILD,
                100.0 * RISE_MAX,
                self.baseline.build
            )
        })
    }

    /// Returns a message for each path of the baseline that does not exist any more.
    fn unknown_paths(&self) -> Vec<String> {
        let known: Vec<_> = HotPath::value_variants().iter().map(|path| path.name()).collect();
        let gone = self.baseline.paths.keys().filter(|name| self.all_paths && !known.contains(name));
        gone.map(|name| format!("{name} is in the baseline, but no such path exists")).collect()
    }
}

/// Counts every path, with one process per CPU at a time. Other processes do not change callgrind's
/// counts.
fn count_all(paths: &[HotPath], rounds: u8) -> Result<Vec<(HotPath, Summary)>> {
    let program = std::env::current_exe().context("this program's own file")?;
    let jobs = (0..rounds).flat_map(|_| paths.iter().copied());
    let (jobs, counts) = (Mutex::new(jobs), Mutex::new(BTreeMap::<HotPath, Vec<f64>>::new()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let worker = || -> Result<()> {
            loop {
                let job = jobs.lock().next();
                let Some(path) = job else { return Ok(()) };
                let count = per_request(&program, path).with_context(|| path.name())?;
                counts.lock().entry(path).or_default().push(count);
            }
        };
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    Ok(counts.into_inner().into_iter().map(|(path, counts)| (path, Summary::of(counts))).collect())
}

/// Returns the number of instructions per request of a path.
fn per_request(program: &Path, path: HotPath) -> Result<f64> {
    if let Some((transport, kind)) = path.client_request() {
        let (few, many) = (server::FEW, server::FEW + REQUESTS);
        let count_instructions =
            |count| server::count_instructions(under_callgrind(program), transport, kind, count);
        let more = count_instructions(many)?.saturating_sub(count_instructions(few)?);
        return Ok(more as f64 / (many - few) as f64);
    }
    let mut command =
        callgrind::command(program, &["--collect-atstart=no", &format!("--toggle-collect={COUNTED}")]);
    command.env(TUNABLES.0, TUNABLES.1).args(["gate-loop", &path.name(), &REQUESTS.to_string()]);
    let count = callgrind::count_instructions(&mut command)?;
    ensure!(count > 0, "callgrind did not find the function to count");
    Ok(count as f64 / REQUESTS as f64)
}

fn under_callgrind(program: &Path) -> Command {
    let mut command = callgrind::command(program, &[]);
    command.env(TUNABLES.0, TUNABLES.1);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn baseline(build: &str, count: f64) -> Baseline {
        Baseline::new(build, [(HotPath::RamRead.name(), count)].into())
    }

    #[test]
    fn rise_is_a_problem_and_fall_is_not() {
        let same = baseline(BUILD, 1000.0);
        let judge = Judge::new(&same, true);
        assert!(judge.other_build_note().is_none());
        for (now, fails) in [(1000.0, false), (1029.0, false), (1031.0, true), (500.0, false)] {
            assert_eq!(judge.of(HotPath::RamRead, now).problem.is_some(), fails, "{now}");
        }
        assert!(
            judge.of(HotPath::RamWrite, 1.0).problem.unwrap().contains("ram-write is not in the baseline")
        );
    }

    #[test]
    fn other_build_has_larger_tolerance() {
        let other = baseline("rustc 1.0.0", 1000.0);
        let judge = Judge::new(&other, true);
        assert!(judge.other_build_note().unwrap().contains("rustc 1.0.0"));
        for (now, fails) in [(1100.0, false), (1151.0, true)] {
            assert_eq!(judge.of(HotPath::RamRead, now).problem.is_some(), fails, "{now}");
        }
    }

    #[test]
    fn removed_path_is_reported() {
        let old = Baseline::new(BUILD, [("ram-fly".to_owned(), 1.0)].into());
        assert_eq!(Judge::new(&old, true).unknown_paths().len(), 1);
        // A run of selected paths does not judge the others.
        assert!(Judge::new(&old, false).unknown_paths().is_empty());
    }
}
