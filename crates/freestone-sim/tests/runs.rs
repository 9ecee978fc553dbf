//! Tests of simulation runs. A process can run one simulation, so each test starts this test program again
//! for every run.

use std::process::{Command, Output};
use std::time::Duration;

use freestone_sim::sim::sync::{Arc, Condvar, Mutex, mpsc};
use freestone_sim::sim::time::Instant;
use freestone_sim::sim::{Config, Summary, run, thread};

const WHICH: &str = "FREESTONE_SIM_RUN";

/// Runs the test `name` in a new process, with `WHICH` set to the seed.
fn run_in_process(name: &str, seed: u64) -> Output {
    let mut program = Command::new(std::env::current_exe().unwrap());
    program.args(["--exact", name, "--nocapture"]).env(WHICH, seed.to_string());
    program.output().unwrap()
}

fn seed() -> Option<u64> {
    std::env::var(WHICH).ok().map(|seed| seed.parse().unwrap())
}

fn config(seed: u64) -> Config {
    Config { seed, switch_one_in: 4, points_max: 1_000_000 }
}

/// Simulates three threads that change a number under a lock and send it to a channel, with pauses.
fn simulate_threads() -> (u64, Summary) {
    run(config(seed().unwrap()), || {
        let number = Arc::new(Mutex::new(0_u64));
        let (tx, rx) = mpsc::channel();
        let threads: Vec<_> = (0..3_u64)
            .map(|index| {
                let (number, tx) = (Arc::clone(&number), tx.clone());
                thread::spawn(move || {
                    for _ in 0..50 {
                        let mut number = number.lock().unwrap();
                        *number = number.wrapping_mul(31).wrapping_add(index);
                        tx.send(*number).unwrap();
                        drop(number);
                        thread::sleep(Duration::from_millis(index));
                    }
                })
            })
            .collect();
        drop(tx);
        let sum = rx.iter().fold(0, |sum: u64, number| sum.rotate_left(1) ^ number);
        for thread in threads {
            thread.join().unwrap();
        }
        sum
    })
}

fn result_line(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout);
    text.lines().find_map(|line| line.strip_prefix("result ").map(str::to_owned)).expect("no result")
}

#[test]
fn seed_reproduces_run() {
    if seed().is_some() {
        println!("\nresult {:?}", simulate_threads());
        return;
    }
    let lines: Vec<String> =
        [1, 1, 2].map(|seed| result_line(&run_in_process("seed_reproduces_run", seed))).into();
    assert_eq!(lines[0], lines[1]);
    assert_ne!(lines[0], lines[2]);
}

#[test]
fn time_advances_only_if_all_wait() {
    if let Some(seed) = seed() {
        let (hours, summary) = run(config(seed), || {
            let began = Instant::now();
            let sleeper = thread::spawn(|| thread::sleep(Duration::from_hours(3)));
            sleeper.join().unwrap();
            let waited = (Mutex::new(()), Condvar::new());
            let mut guard = waited.0.lock().unwrap();
            let until = Instant::now() + Duration::from_hours(1);
            while Instant::now() < until {
                guard = waited.1.wait_timeout(guard, until - Instant::now()).unwrap().0;
            }
            began.elapsed().as_secs() / 3600
        });
        println!("\nresult {hours} {}", summary.elapsed.as_secs() / 3600);
        return;
    }
    assert_eq!(result_line(&run_in_process("time_advances_only_if_all_wait", 7)), "4 4");
}

#[test]
fn deadlock_is_reported_with_all_stacks() {
    if let Some(seed) = seed() {
        run(config(seed), || {
            let locks = Arc::new((Mutex::new(()), Mutex::new(())));
            let other = Arc::clone(&locks);
            let thread = thread::Builder::new()
                .name("backwards".into())
                .spawn(move || {
                    loop {
                        let _second = other.1.lock().unwrap();
                        let _first = other.0.lock().unwrap();
                    }
                })
                .unwrap();
            for _ in 0..100_000 {
                let _first = locks.0.lock().unwrap();
                let _second = locks.1.lock().unwrap();
            }
            drop(thread);
        });
        return;
    }
    let output = run_in_process("deadlock_is_reported_with_all_stacks", 3);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{stderr}");
    assert!(stderr.contains("no task can run") && stderr.contains("backwards, waiting:"), "{stderr}");
}
