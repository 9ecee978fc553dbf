//! Mode lives: servers with a state directory end in the middle of verbs and requests, and are
//! started again. Every completed write and verb must still have its effect. A device that lost its
//! content must be withheld (not served) until a verb releases it. In half of the runs, the servers are
//! recoverable: after a kill, the next one adopts devices in memory with their content.
//!
//! A run is a list of ops drawn from its seed; each life of a server executes a part of the list. A
//! server ends after a given number of completions. Threads and servers are real: which ops run
//! concurrently, and which verbs a kill cuts off, differs between two runs of a seed. A failed run
//! is therefore repeated to measure how often it fails, and shortened with repeated runs.

mod case;
mod holder;
mod life;
mod restart;

use std::path::Path;
use std::time::{Duration, Instant};

use super::Report;
use crate::shrink::shrink;
pub use case::{Case, End, Op};
pub use life::run;

/// Number of times that a failed run is repeated, to measure how often it fails.
const REPEATS: u32 = 5;
/// Number of times that a shortened run is tried before it counts as passing.
const TRIES: u32 = 2;
/// Maximum total time for shortening a run.
const SHRINK_MAX: Duration = Duration::from_secs(300);

/// Runs the seeds from `first` on, at least one, until `time` is over or a run fails. Returns false
/// if a run failed and was printed. If `shrinks` is set, also prints a shortened run.
pub fn run_seeds(first: u64, time: Duration, shrinks: bool, binary: &Path) -> (Report, bool) {
    let began = Instant::now();
    let mut all = Report::default();
    for seed in first.. {
        let case = Case::draw(seed);
        match run(seed, &case, binary) {
            Ok(report) => all.add(&report),
            Err(failure) => {
                println!("{failure}");
                // A run that fails with an injected fault (a mutant) need not be shortened.
                if shrinks && std::env::var_os("FREESTONE_MUTANT").is_none_or(|name| name.is_empty()) {
                    shorten(seed, &case, binary);
                }
                return (all, false);
            }
        }
        if began.elapsed() >= time {
            break;
        }
    }
    (all, true)
}

/// Removes the ops that a failing run does not need, and prints the rest.
fn shorten(seed: u64, case: &Case, binary: &Path) {
    let fails = |case: &Case| {
        let failure = run(seed, case, binary).err()?;
        // Remove the directories of repeats: only that of the first failure is needed.
        let _ = std::fs::remove_dir_all(&failure.dir);
        Some(failure)
    };
    let again = (0..REPEATS).filter(|_| fails(case).is_some()).count();
    println!("seed {seed}: {again} of {REPEATS} repeats fail");
    if again == 0 {
        return;
    }
    let began = Instant::now();
    let mut last = None;
    let ops = shrink(&case.ops, |ops| {
        let shorter = Case { ops: ops.to_vec(), ..case.clone() };
        (0..TRIES).any(|_| {
            let failure = if began.elapsed() < SHRINK_MAX { fails(&shorter) } else { None };
            let failed = failure.is_some();
            last = failure.or(last.take());
            failed
        })
    });
    println!("{} of {} steps are enough, for `freestone-torture life`:", ops.len(), case.ops.len());
    let shorter = Case { ops, ..case.clone() };
    // Serialization of numbers and names cannot fail, so the default is never used.
    println!("{}", serde_json::to_string(&shorter).unwrap_or_default());
    if let Some(failure) = last {
        println!("{}", failure.what);
    }
}
