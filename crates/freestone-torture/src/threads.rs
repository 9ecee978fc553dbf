//! Threads mode: the stacks and the judge with real threads, for races that a simulation has not.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::ops;
use crate::run::{Judge, run};

/// Ops of a run.
const OPS: usize = 400;
/// A request or a verb that takes longer fails the run.
const BOUND: Duration = Duration::from_secs(60);
/// No run takes so long: what then makes no progress is shown.
const STUCK: Duration = Duration::from_secs(240);
/// How often a run that failed is repeated.
const REPEATS: u32 = 20;

/// Runs from this seed on until the time is over. Returns how many, and whether all went well; what
/// did not was printed.
pub fn threads(first: u64, time: Duration) -> (u64, bool) {
    let began = Instant::now();
    let ended = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&ended));
    // Threads that the process keeps are started before they are counted.
    let _ = run(None, &ops::warm_up(), Judge { bound: BOUND, ..Judge::default() });
    for seed in 1..4 {
        let _ = run(Some(seed), &ops::draw(seed, 200), Judge { bound: BOUND, ..Judge::default() });
    }
    thread::sleep(Duration::from_secs(1));
    let judge = Judge { bound: BOUND, process: true, ..Judge::default() };
    let mut runs = 0;
    for seed in first.. {
        if began.elapsed() >= time {
            break;
        }
        let ops = ops::draw(seed, OPS);
        let outcome = run(Some(seed), &ops, judge);
        ended.fetch_add(1, Ordering::SeqCst);
        runs += 1;
        if let Err(failure) = outcome {
            // What it left behind is there still.
            let again = Judge { process: false, ..judge };
            let fails = (0..REPEATS).filter(|_| {
                let fails = run(Some(seed), &ops, again).is_err();
                ended.fetch_add(1, Ordering::SeqCst);
                fails
            });
            let fails = fails.count();
            println!("seed {seed} failed: {failure}\n{fails} of {REPEATS} repeats fail");
            return (runs, false);
        }
    }
    (runs, true)
}

/// Runs this seed until it fails or the time is over, and tells each op on standard error.
pub fn again(seed: u64, time: Duration) -> (u64, bool) {
    let began = Instant::now();
    let ended = Arc::new(AtomicU64::new(0));
    watch(Arc::clone(&ended));
    let ops = ops::draw(seed, OPS);
    let judge = Judge { bound: BOUND, trace: true, ..Judge::default() };
    while began.elapsed() < time {
        let run_number = ended.fetch_add(1, Ordering::SeqCst) + 1;
        eprintln!("run {run_number}");
        if let Err(failure) = run(Some(seed), &ops, judge) {
            println!("seed {seed} failed: {failure}");
            return (run_number, false);
        }
    }
    (ended.load(Ordering::SeqCst), true)
}

/// Prints all stacks and ends the process when no run ends for too long.
fn watch(ended: Arc<AtomicU64>) {
    thread::spawn(move || {
        let (mut seen, mut since) = (0, Instant::now());
        loop {
            thread::sleep(Duration::from_secs(1));
            let now = ended.load(Ordering::SeqCst);
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
    // Without a debugger: what each thread waits for.
    for task in std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten() {
        let read =
            |name: &str| std::fs::read_to_string(Path::new(&task.path()).join(name)).unwrap_or_default();
        println!("{}: {} {}", task.file_name().display(), read("comm").trim(), read("wchan").trim());
    }
}
