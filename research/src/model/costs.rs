//! Costs of the building blocks of locks on this machine, measured without any device.

use std::hint::{black_box, spin_loop};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Barrier, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone_benches::machine;
use freestone_report::Summary;

use super::simulate::Costs;

/// Number of measurements of a cost. The minimum is used, because other load only adds time.
const ROUNDS: usize = 9;
const LINE_TRIPS: u64 = 20_000;
const WAKE_TRIPS: u64 = 400;
const LOOPS: u64 = 20_000;
/// Number of times that a waiter of std's mutex spins before it sleeps.
const SPINS: u32 = 100;
/// Time after which the waiting thread of the measurement has gone to sleep.
const ASLEEP: Duration = Duration::from_micros(300);

/// Costs of lock operations on this machine, in nanoseconds.
#[derive(Debug, Clone, Copy)]
pub struct Machine {
    pub costs: Costs,
    /// Locking and unlocking a free mutex without contention.
    pub mutex: f64,
    /// Reading the clock.
    pub clock: f64,
}

/// Measures the costs. Returns None if this process may use only one CPU.
pub fn measure() -> Result<Option<Machine>> {
    let cpus = machine::allowed_cpus()?;
    let [first, second, ..] = cpus[..] else { return Ok(None) };
    let measured = std::thread::scope(|scope| {
        scope
            .spawn(|| -> Result<Machine> {
                machine::pin_to(first)?;
                let minimum = |one: &mut dyn FnMut() -> Result<f64>| -> Result<f64> {
                    let rounds: Vec<f64> = (0..ROUNDS).map(|_| one()).collect::<Result<_>>()?;
                    Ok(Summary::of(rounds).min)
                };
                let mutex = Mutex::new(0_u64);
                let (wake, wake_latency) = wake_costs(second)?;
                Ok(Machine {
                    costs: Costs {
                        line: minimum(&mut || line_trip(second))?,
                        spin: f64::from(SPINS) * minimum(&mut || Ok(nanos_per_call(spin_loop)))?,
                        wake,
                        wake_nobody: minimum(&mut || Ok(nanos_per_call(wake_nobody)))?,
                        wake_latency,
                    },
                    mutex: minimum(&mut || {
                        Ok(nanos_per_call(|| {
                            *black_box(&mutex).lock().unwrap_or_else(PoisonError::into_inner) += 1;
                        }))
                    })?,
                    clock: minimum(&mut || {
                        Ok(nanos_per_call(|| {
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

/// Returns the nanoseconds that a call of `call` takes.
fn nanos_per_call(call: impl Fn()) -> f64 {
    let started = Instant::now();
    for _ in 0..LOOPS {
        call();
    }
    started.elapsed().as_nanos() as f64 / LOOPS as f64
}

/// Calls futex wake on a word that no thread waits for.
fn wake_nobody() {
    let word = std::sync::atomic::AtomicU32::new(0);
    // Cannot fail: the word is valid, and no thread waits for it.
    let _ = rustix::thread::futex::wake(&word, rustix::thread::futex::Flags::PRIVATE, 1);
}

/// Returns the nanoseconds in which a cache line moves between this thread's CPU and CPU `other`,
/// which write the line in turn.
fn line_trip(other: usize) -> Result<f64> {
    let (turn, start) = (AtomicU64::new(0), Barrier::new(2));
    std::thread::scope(|scope| {
        let responder = scope.spawn(|| -> Result<()> {
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
        let started = Instant::now();
        for trip in 0..LINE_TRIPS {
            turn.store(2 * trip + 1, Ordering::SeqCst);
            while turn.load(Ordering::SeqCst) != 2 * trip + 2 {
                spin_loop();
            }
        }
        let took = started.elapsed();
        responder.join().ok().context("a thread panicked")??;
        Ok(took.as_nanos() as f64 / (2 * LINE_TRIPS) as f64)
    })
}

/// Wakes a thread that sleeps on CPU `other`. Returns the medians of the duration of the waking
/// call and of the time until the thread runs.
fn wake_costs(other: usize) -> Result<(f64, f64)> {
    let started = Instant::now();
    let (woken_at, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| -> Result<()> {
            let pinned = machine::pin_to(other);
            while !stop.load(Ordering::SeqCst) {
                std::thread::park();
                woken_at.store(started.elapsed().as_nanos() as u64, Ordering::SeqCst);
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
            let from = started.elapsed().as_nanos() as u64;
            sleeper.thread().unpark();
            calls.push((started.elapsed().as_nanos() as u64 - from) as f64);
            let woken = loop {
                match woken_at.load(Ordering::SeqCst) {
                    // An older time is from a spurious wake-up.
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
    fn machine_costs_are_plausible() {
        let Some(Machine { costs, mutex, clock }) = measure().unwrap() else { return };
        // Every cost must be positive. Waking a thread takes longer than transferring a cache line
        // or locking a free mutex.
        for number in
            [costs.line, costs.spin, costs.wake, costs.wake_nobody, costs.wake_latency, mutex, clock]
        {
            assert!(number.is_finite() && number > 0.0, "{costs:?} {mutex} {clock}");
        }
        assert!(costs.wake_latency > costs.line, "{costs:?}");
        assert!(mutex < costs.wake_latency, "{mutex} {costs:?}");
    }
}
