//! Mode threads: the same stacks and judge with real threads, for races that a simulation cannot
//! show.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ops;
use crate::run::{Judge, run};

/// Ops per run.
const OPS: usize = 400;
/// Longest duration of a request or a verb; exceeding it fails the run.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Longest duration of a run. After this time all stacks are printed.
const STUCK: Duration = Duration::from_secs(240);
/// Repetitions of a failed run.
const REPEATS: u32 = 20;

/// Runs seeds from `first` on until the time is over. Returns the number of runs, and false if one
/// failed. Prints the failure.
pub fn run_seeds(first: u64, time: Duration) -> (u64, bool) {
    let began = Instant::now();
    let runs_ended = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&runs_ended));
    // Start the threads that the process keeps before counting threads.
    let _ = run(None, &ops::warm_up(), Judge { bound: TIME_LIMIT, ..Judge::default() });
    for seed in 1..4 {
        let _ = run(Some(seed), &ops::draw(seed, 200), Judge { bound: TIME_LIMIT, ..Judge::default() });
    }
    thread::sleep(Duration::from_secs(1));
    let judge = Judge { bound: TIME_LIMIT, process: true, ..Judge::default() };
    let mut runs = 0;
    for seed in first.. {
        if began.elapsed() >= time {
            break;
        }
        let ops = ops::draw(seed, OPS);
        let outcome = run(Some(seed), &ops, judge);
        runs_ended.fetch_add(1, Ordering::SeqCst);
        runs += 1;
        if let Err(failure) = outcome {
            // Threads and descriptors of the failed run still exist.
            let repeat_judge = Judge { process: false, ..judge };
            let fails = (0..REPEATS).filter(|_| {
                let fails = run(Some(seed), &ops, repeat_judge).is_err();
                runs_ended.fetch_add(1, Ordering::SeqCst);
                fails
            });
            let fails = fails.count();
            println!("seed {seed} failed: {failure}\n{fails} of {REPEATS} repeats fail");
            return (runs, false);
        }
    }
    (runs, true)
}

/// Repeats this seed until it fails or the time is over, and prints each op on standard error.
pub fn repeat_seed(seed: u64, time: Duration) -> (u64, bool) {
    let began = Instant::now();
    let runs_ended = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&runs_ended));
    let ops = ops::draw(seed, OPS);
    let judge = Judge { bound: TIME_LIMIT, trace: true, ..Judge::default() };
    while began.elapsed() < time {
        let run_number = runs_ended.fetch_add(1, Ordering::SeqCst) + 1;
        eprintln!("run {run_number}");
        if let Err(failure) = run(Some(seed), &ops, judge) {
            println!("seed {seed} failed: {failure}");
            return (run_number, false);
        }
    }
    (runs_ended.load(Ordering::SeqCst), true)
}

/// Prints all stacks and ends the process if no run ends within `STUCK`.
fn watch(runs_ended: Arc<AtomicU64>) {
    thread::spawn(move || {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            thread::sleep(Duration::from_secs(1));
            let now = runs_ended.load(Ordering::SeqCst);
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
            if since.elapsed() > STUCK {
                println!("no run has ended for {STUCK:?}; all stacks:");
                show_stacks();
                std::process::exit(1);
            }
        }
    });
}

fn show_stacks() {
    let pid = std::process::id().to_string();
    let gdb = Command::new("gdb").args(["-batch", "-p", &pid, "-ex", "thread apply all bt"]).status();
    if gdb.is_ok_and(|status| status.success()) {
        return;
    }
    // Without a debugger, print the kernel function in which each thread waits.
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read =
            |name: &str| std::fs::read_to_string(Path::new(&task.path()).join(name)).unwrap_or_default();
        println!("{}: {} {}", task.file_name().display(), read("comm").trim(), read("wchan").trim());
    }
}
