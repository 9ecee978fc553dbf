//! Servers with a state that end in the middle of verbs and requests, and are started again: what was
//! answered is there then, and what was lost is nobody's to see until somebody says so.
//!
//! A run is drawn from its seed as a list of ops, and each life of a server takes its part of that. A
//! server ends when so many requests and verbs were answered. Threads are real, and so are servers:
//! which of the ops run side by side, and which verbs are under way when a server is killed, is not
//! the same in two runs of a seed. So a run that failed is repeated to see how often it does, and
//! made shorter by runs that are repeated as well.

mod again;
mod case;
mod life;

use std::path::Path;
use std::time::{Duration, Instant};

use super::Report;
use crate::shrink::shrink;
pub use case::{Case, End, Op};
pub use life::run;

/// How often a run that failed is repeated.
const REPEATS: u32 = 5;
/// How often a shorter one is tried that has not failed.
const TRIES: u32 = 2;
/// The time for all runs that are to be shorter.
const SHRINK_MAX: Duration = Duration::from_secs(300);

/// Runs from this seed on until the time is over, at least one. False where one failed: it was
/// printed, and made short where it `shrinks`.
pub fn lives(first: u64, time: Duration, shrinks: bool, binary: &Path) -> (Report, bool) {
    let began = Instant::now();
    let mut all = Report::default();
    for seed in first.. {
        let case = Case::draw(seed);
        match run(seed, &case, binary) {
            Ok(report) => all.add(&report),
            Err(failure) => {
                println!("{failure}");
                // A fault that was put back need not be made short.
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

/// Leaves out what is not needed for the failure, and prints the rest.
fn shorten(seed: u64, case: &Case, binary: &Path) {
    let fails = |case: &Case| {
        let failure = run(seed, case, binary).err()?;
        // Only the first one is kept.
        let _ = std::fs::remove_dir_all(&failure.dir);
        Some(failure)
    };
    let again = (0..REPEATS).filter(|_| fails(case).is_some()).count();
    println!("seed {seed}: of {REPEATS} repeats {again} fail");
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
    // Numbers and names are always JSON.
    println!("{}", serde_json::to_string(&shorter).unwrap_or_default());
    if let Some(failure) = last {
        println!("{}", failure.what);
    }
}
