//! Mode threads: the same stacks and the same judge as mode exact, but with real threads, for races
//! that a simulation cannot show.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ops;
use crate::run::{RunSettings, run};

const OPS: usize = 400;
/// Maximum duration of a request or a verb; a longer one fails the run.
const TIME_LIMIT: Duration = Duration::from_secs(60);
/// Maximum duration of a run. After this time the process prints all thread stacks and ends.
const STUCK: Duration = Duration::from_secs(240);
/// Number of times that a failed run is repeated.
const REPEATS: u32 = 20;

/// Runs the seeds from `first` on until `time` is over or a run fails, and prints a failure.
/// Returns the number of runs, and false if a run failed.
pub fn run_seeds(first: u64, time: Duration) -> (u64, bool) {
    let began = Instant::now();
    let runs_ended = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&runs_ended));
    // Start the threads that the library keeps for the life of the process before counting threads.
    let _ = run(None, &ops::warm_up(), RunSettings { max_duration: TIME_LIMIT, ..RunSettings::default() });
    for seed in 1..4 {
        let _ = run(
            Some(seed),
            &ops::draw(seed, 200),
            RunSettings { max_duration: TIME_LIMIT, ..RunSettings::default() },
        );
    }
    thread::sleep(Duration::from_secs(1));
    let settings = RunSettings { max_duration: TIME_LIMIT, process: true, ..RunSettings::default() };
    let mut runs = 0;
    for seed in first.. {
        if began.elapsed() >= time {
            break;
        }
        let ops = ops::draw(seed, OPS);
        let outcome = run(Some(seed), &ops, settings);
        runs_ended.fetch_add(1, Ordering::SeqCst);
        runs += 1;
        if let Err(failure) = outcome {
            // Do not check for leaks: threads and descriptors of the failed run still exist.
            let repeat_settings = RunSettings { process: false, ..settings };
            let fails = (0..REPEATS).filter(|_| {
                let fails = run(Some(seed), &ops, repeat_settings).is_err();
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

/// Repeats the run of `seed` until it fails or `time` is over, and prints each op on standard
/// error. Returns the number of runs, and false if a run failed.
pub fn repeat_seed(seed: u64, time: Duration) -> (u64, bool) {
    let began = Instant::now();
    let runs_ended = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&runs_ended));
    let ops = ops::draw(seed, OPS);
    let settings = RunSettings { max_duration: TIME_LIMIT, trace: true, ..RunSettings::default() };
    while began.elapsed() < time {
        let run_number = runs_ended.fetch_add(1, Ordering::SeqCst) + 1;
        eprintln!("run {run_number}");
        if let Err(failure) = run(Some(seed), &ops, settings) {
            println!("seed {seed} failed: {failure}");
            return (run_number, false);
        }
    }
    (runs_ended.load(Ordering::SeqCst), true)
}

/// Starts a thread that prints all thread stacks and ends the process if no run ends within
/// `STUCK`.
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
    // If no debugger is installed, print the kernel function in which each thread waits.
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read =
            |name: &str| std::fs::read_to_string(Path::new(&task.path()).join(name)).unwrap_or_default();
        println!("{}: {} {}", task.file_name().display(), read("comm").trim(), read("wchan").trim());
    }
}
