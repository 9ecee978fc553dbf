//! Instructions of the hot paths against a committed baseline: a rise is seen in the change that
//! brings it.
//!
//! Callgrind counts what a process executes in user space: the same under any load, and on any
//! machine that has the same compilers. Of a device, only the requests are counted, on the caller's
//! thread; of a server the whole process, as the difference of two runs.

mod baseline;
mod paths;
mod server;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use clap::ValueEnum;
use freestone_report::{Report, Row, Summary, Target, Unit};

use self::baseline::Baseline;
pub use self::paths::Loop;
use self::paths::{COUNTED, Hot, REQUESTS};
pub use self::server::{ServerArgs, serve};
use crate::callgrind;

/// A rise beyond this fails, where the baseline was counted in a build by the same compilers.
const RISE_MAX: f64 = 0.03;
/// The same for another build: other compilers give other code for the same source.
const RISE_MAX_OTHER_BUILD: f64 = 0.15;
/// The compilers and flags that made this program.
const BUILD: &str = env!("FREESTONE_BUILD");
/// glibc takes its `memcpy` and the like by the features of the CPU; without these there is one
/// choice for every x86-64.
const TUNABLES: (&str, &str) = (
    "GLIBC_TUNABLES",
    "glibc.cpu.hwcaps=-AVX512F,-AVX512VL,-AVX512BW,-AVX2,-AVX_Fast_Unaligned_Load,-ERMS,-FSRM,-SSSE3,-SSE4_1,\
     -SSE4_2,-BMI1,-BMI2,-LZCNT,-MOVBE,-RTM",
);

/// What it can be told.
#[derive(Debug, Clone, clap::Args)]
pub struct Args {
    /// Write what is counted into the baseline, instead of judging it by the baseline.
    #[arg(long)]
    accept: bool,
    /// The baseline.
    #[arg(long, default_value = "benches/baseline.json")]
    baseline: PathBuf,
    /// Count so often and take the medians; the table shows how far the counts are apart.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=100))]
    rounds: u8,
    /// The paths to count, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', conflicts_with = "accept")]
    path: Vec<Hot>,
}

/// Counts the paths. An error names those that got too expensive.
pub fn run(args: &Args) -> Result<Vec<Report>> {
    // Before what takes long.
    let baseline = if args.accept { None } else { Some(Baseline::load(&args.baseline)?) };
    let mut paths = Hot::value_variants().to_vec();
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
            Some(Verdict { before: Some(before), most, problem }) => {
                problems.extend(problem);
                let change = 100.0 * (count.median / before - 1.0);
                row.target(Target::AtMost(most)).part("baseline", before).part("change %", change)
            }
        });
    }
    let mut notes = vec![
        "Instructions of one request in user space, by callgrind, on the caller's thread. 4 KiB each, lz4, fio's compressible pages \
         where nothing else is said. Of NBD, what the server executes for one request at a time; of vhost-user, for 32 at a time."
            .into(),
        format!("build: {BUILD}"),
    ];
    if let Some(judge) = &judge {
        notes.extend(judge.other_build());
        problems.extend(judge.forgotten());
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
            "{}\nIf that is meant: cargo xtask bench gate --accept, and say in the commit what it buys (CONTRIBUTING.md)",
            problems.join("\n")
        );
    }
    Ok(vec![report])
}

/// Compares with the baseline.
struct Judge<'a> {
    baseline: &'a Baseline,
    rise_max: f64,
    /// All paths were counted.
    whole: bool,
}

struct Verdict {
    before: Option<f64>,
    most: f64,
    problem: Option<String>,
}

impl<'a> Judge<'a> {
    fn new(baseline: &'a Baseline, whole: bool) -> Self {
        let rise_max = if baseline.build == BUILD { RISE_MAX } else { RISE_MAX_OTHER_BUILD };
        Self { baseline, rise_max, whole }
    }

    fn of(&self, path: Hot, now: f64) -> Verdict {
        let name = path.name();
        let Some(&before) = self.baseline.paths.get(&name) else {
            let problem = Some(format!("{name} is not in the baseline"));
            return Verdict { before: None, most: f64::NAN, problem };
        };
        let most = before * (1.0 + self.rise_max);
        let rise = 100.0 * (now / before - 1.0);
        let problem = (now > most).then(|| {
            let allowed = 100.0 * self.rise_max;
            format!("{name} rose by {rise:.1} %, from {before:.0} to {now:.0} instructions; {allowed:.0} % are allowed")
        });
        if now < before * (1.0 - RISE_MAX) && self.baseline.build == BUILD {
            println!("{name} fell by {:.1} %: accept that, or a later rise of as much goes unseen", -rise);
        }
        Verdict { before: Some(before), most, problem }
    }

    fn other_build(&self) -> Option<String> {
        (self.baseline.build != BUILD).then(|| {
            format!(
                "The baseline is of another build, so that a rise by {:.0} % is allowed instead of {:.0} %: {}",
                100.0 * RISE_MAX_OTHER_BUILD,
                100.0 * RISE_MAX,
                self.baseline.build
            )
        })
    }

    /// Paths of the baseline that are no more: nobody would see what they cost.
    fn forgotten(&self) -> Vec<String> {
        let known: Vec<_> = Hot::value_variants().iter().map(|path| path.name()).collect();
        let gone = self.baseline.paths.keys().filter(|name| self.whole && !known.contains(name));
        gone.map(|name| format!("{name} is in the baseline, and there is no such path")).collect()
    }
}

/// Counts of every path, by as many processes at once as there are CPUs: callgrind counts the same
/// beside others.
fn count_all(paths: &[Hot], rounds: u8) -> Result<Vec<(Hot, Summary)>> {
    let own = std::env::current_exe().context("this program's own file")?;
    let jobs = (0..rounds).flat_map(|_| paths.iter().copied());
    let (jobs, counts) = (Mutex::new(jobs), Mutex::new(BTreeMap::<Hot, Vec<f64>>::new()));
    let workers = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let worker = || -> Result<()> {
            loop {
                let job = jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
                let Some(path) = job else { return Ok(()) };
                let count = per_request(&own, path).with_context(|| path.name())?;
                counts.lock().unwrap_or_else(PoisonError::into_inner).entry(path).or_default().push(count);
            }
        };
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        workers.into_iter().try_for_each(|worker| match worker.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        })
    })?;
    let counts = counts.into_inner().unwrap_or_else(PoisonError::into_inner);
    Ok(counts.into_iter().map(|(path, counts)| (path, Summary::of(counts))).collect())
}

/// Instructions of one request.
fn per_request(own: &Path, path: Hot) -> Result<f64> {
    if let Some((over, asked)) = path.served() {
        let (few, many) = (server::FEW, server::FEW + REQUESTS);
        let collected = |count| server::collected(under_callgrind(own), over, asked, count);
        let more = collected(many)?.saturating_sub(collected(few)?);
        return Ok(more as f64 / (many - few) as f64);
    }
    let mut command =
        callgrind::command(own, &["--collect-atstart=no", &format!("--toggle-collect={COUNTED}")]);
    command.env(TUNABLES.0, TUNABLES.1).args(["gate-loop", &path.name(), &REQUESTS.to_string()]);
    let count = callgrind::collected(&mut command)?;
    ensure!(count > 0, "callgrind did not find the function that is to be counted");
    Ok(count as f64 / REQUESTS as f64)
}

fn under_callgrind(own: &Path) -> Command {
    let mut command = callgrind::command(own, &[]);
    command.env(TUNABLES.0, TUNABLES.1);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    fn baseline(build: &str, count: f64) -> Baseline {
        Baseline::new(build, [(Hot::RamRead.name(), count)].into())
    }

    #[test]
    fn a_rise_is_a_problem_and_a_fall_is_not() {
        let same = baseline(BUILD, 1000.0);
        let judge = Judge::new(&same, true);
        assert!(judge.other_build().is_none());
        for (now, fails) in [(1000.0, false), (1029.0, false), (1031.0, true), (500.0, false)] {
            assert_eq!(judge.of(Hot::RamRead, now).problem.is_some(), fails, "{now}");
        }
        assert!(judge.of(Hot::RamWrite, 1.0).problem.unwrap().contains("ram-write is not in the baseline"));
    }

    #[test]
    fn other_compilers_get_more_room_but_not_all() {
        let other = baseline("rustc 1.0.0", 1000.0);
        let judge = Judge::new(&other, true);
        assert!(judge.other_build().unwrap().contains("rustc 1.0.0"));
        for (now, fails) in [(1100.0, false), (1151.0, true)] {
            assert_eq!(judge.of(Hot::RamRead, now).problem.is_some(), fails, "{now}");
        }
    }

    #[test]
    fn a_path_that_is_gone_is_told() {
        let old = Baseline::new(BUILD, [("ram-fly".to_owned(), 1.0)].into());
        assert_eq!(Judge::new(&old, true).forgotten().len(), 1);
        // Who counts some paths only does not judge the others.
        assert!(Judge::new(&old, false).forgotten().is_empty());
    }
}
