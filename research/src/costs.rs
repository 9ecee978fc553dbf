//! What this machine takes for the things that locks are made of, measured without any device.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone_benches::machine;
use freestone_report::Summary;

use crate::simulate::Costs;

/// Measurements of each; the least counts: what else runs on the machine only adds.
const ROUNDS: usize = 9;
const LINE_TRIPS: u64 = 20_000;
const WAKE_TRIPS: u64 = 400;
const LOOPS: u64 = 20_000;
/// How often std's mutex looks before it sleeps.
const SPINS: u32 = 100;
/// A waiter of the measurement has certainly gone to sleep.
const ASLEEP: Duration = Duration::from_micros(300);

/// Nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub costs: Costs,
    /// Taking and letting go of a free mutex that nobody else wants.
    pub mutex: f64,
    /// Reading the clock.
    pub clock: f64,
}

/// Measures; nothing where this process may use one CPU only.
pub fn measure() -> Result<Option<Machine>> {
    let cpus = machine::allowed_cpus()?;
    let [first, second, ..] = cpus[..] else { return Ok(None) };
    let measured = std::thread::scope(|scope| {
        scope
            .spawn(|| -> Result<Machine> {
                machine::pin_to(first)?;
                let least = |one: &mut dyn FnMut() -> Result<f64>| -> Result<f64> {
                    let rounds: Vec<f64> = (0..ROUNDS).map(|_| one()).collect::<Result<_>>()?;
                    Ok(Summary::of(rounds).min)
                };
                let mutex = Mutex::new(0_u64);
                let (wake, wake_latency) = wakes(second)?;
                Ok(Machine {
                    costs: Costs {
                        line: least(&mut || line_trip(second))?,
                        spin: f64::from(SPINS) * least(&mut || Ok(each(spin_loop)))?,
                        wake,
                        wake_nobody: least(&mut || Ok(each(wake_nobody)))?,
                        wake_latency,
                    },
                    mutex: least(&mut || {
                        Ok(each(|| *black_box(&mutex).lock().unwrap_or_else(PoisonError::into_inner) += 1))
                    })?,
                    clock: least(&mut || {
                        Ok(each(|| {
                            black_box(Instant::now());
                        }))
                    })?,
                })
            })
            .join()
            .ok()
            .context("a thread panicked")?
    })?;
    Ok(Some(measured))
}

/// Nanoseconds a call.
fn each(what: impl Fn()) -> f64 {
    let begun = Instant::now();
    for _ in 0..LOOPS {
        what();
    }
    begun.elapsed().as_nanos() as f64 / LOOPS as f64
}

/// The system call that wakes whoever sleeps on a word, where nobody does.
fn wake_nobody() {
    let word = std::sync::atomic::AtomicU32::new(0);
    // It cannot fail: the word is there, and nobody waits for it.
    let _ = rustix::thread::futex::wake(&word, rustix::thread::futex::Flags::PRIVATE, 1);
}

/// One way of a cache line that two CPUs write in turn.
fn line_trip(other: usize) -> Result<f64> {
    let (turn, start) = (AtomicU64::new(0), Barrier::new(2));
    std::thread::scope(|scope| {
        let answers = scope.spawn(|| -> Result<()> {
            let pinned = machine::pin_to(other);
            start.wait();
            for trip in 0..LINE_TRIPS {
                while turn.load(Ordering::SeqCst) != 2 * trip + 1 {
                    spin_loop();
                }
                turn.store(2 * trip + 2, Ordering::SeqCst);
            }
            pinned
        });
        start.wait();
        let begun = Instant::now();
        for trip in 0..LINE_TRIPS {
            turn.store(2 * trip + 1, Ordering::SeqCst);
            while turn.load(Ordering::SeqCst) != 2 * trip + 2 {
                spin_loop();
            }
        }
        let took = begun.elapsed();
        answers.join().ok().context("a thread panicked")??;
        Ok(took.as_nanos() as f64 / (2 * LINE_TRIPS) as f64)
    })
}

/// Waking a thread that sleeps on another CPU: what the call takes, and after how long the thread
/// runs. Medians.
fn wakes(other: usize) -> Result<(f64, f64)> {
    let begun = Instant::now();
    let (woken_at, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| -> Result<()> {
            let pinned = machine::pin_to(other);
            while !stop.load(Ordering::SeqCst) {
                std::thread::park();
                woken_at.store(begun.elapsed().as_nanos() as u64, Ordering::SeqCst);
            }
            pinned
        });
        let (mut calls, mut latencies) = (Vec::new(), Vec::new());
        for trip in 0..WAKE_TRIPS {
            let wait = Instant::now();
            while wait.elapsed() < ASLEEP {
                spin_loop();
            }
            let last = trip + 1 == WAKE_TRIPS;
            stop.store(last, Ordering::SeqCst);
            woken_at.store(0, Ordering::SeqCst);
            let from = begun.elapsed().as_nanos() as u64;
            sleeper.thread().unpark();
            calls.push((begun.elapsed().as_nanos() as u64 - from) as f64);
            let woken = loop {
                match woken_at.load(Ordering::SeqCst) {
                    // A spurious wake-up lies before.
                    at if at >= from => break at,
                    _ if sleeper.is_finished() => break from,
                    _ => spin_loop(),
                }
            };
            latencies.push((woken - from) as f64);
        }
        sleeper.join().ok().context("a thread panicked")??;
        Ok((Summary::of(calls).median, Summary::of(latencies).median))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_costs_of_a_machine_are_in_order() {
        let Some(Machine { costs, mutex, clock }) = measure().unwrap() else { return };
        // A spinning loop is a hundred times one pause; a sleeper runs only after it was woken.
        for number in
            [costs.line, costs.spin, costs.wake, costs.wake_nobody, costs.wake_latency, mutex, clock]
        {
            assert!(number.is_finite() && number > 0.0, "{costs:?} {mutex} {clock}");
        }
        assert!(costs.wake_latency > costs.line, "{costs:?}");
        assert!(mutex < costs.wake_latency, "{mutex} {costs:?}");
    }
}
