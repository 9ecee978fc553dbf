//! Threads on distinct slots against as many copies of the bare codec loop: does anything but the
//! machine hold them up?

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone_report::{Report, Row, Target};

use crate::bare::Ours;
use crate::codec::{bare_reads, bare_writes, engine_reads, engine_writes};
use crate::data::Order;
use crate::machine;
use crate::measure::{median, thread_clock};
use crate::options::{Options, Set};
use crate::setup::Setup;

/// Data where `--size` does not say.
const BYTES: u64 = 512 << 20;
/// Numbers of threads; the first is what the others are compared with.
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// Operations between two looks at the clock's flag.
const BATCH: u64 = 32;

#[derive(Clone, Copy)]
enum Load {
    Reads,
    Rewrites,
    /// Reads and rewrites in turn.
    Mix,
}

#[derive(Clone, Copy)]
enum Which {
    Engine,
    Bare,
}

/// Operations a second of all threads of a slice.
#[derive(Clone, Copy)]
struct Speed {
    wall: f64,
    /// A second of CPU time, which leaves out what other programs took, and also every wait.
    cpu: f64,
}

/// Runs it on every data set.
pub fn run(options: &Options) -> Result<Vec<Report>> {
    options
        .sets(&[Set::Fio, Set::Real])
        .into_iter()
        .map(|set| one(&Setup::new(set, BYTES, options)?, options))
        .collect()
}

fn one(setup: &Setup, options: &Options) -> Result<Report> {
    let cpus = machine::allowed_cpus()?;
    let mut rows = Vec::new();
    for (name, load) in [("reads", Load::Reads), ("rewrites", Load::Rewrites), ("mix", Load::Mix)] {
        rows.extend(one_load(name, load, setup, &cpus, options)?);
    }
    Ok(Report::new("threads", setup.data.description.clone(), setup.data.bytes(), "lz4")
        .note(setup.census_note())
        .note(format!(
            "Random 4 KiB operations a second of all threads, on the wall clock; thread n is pinned \
             to CPU n modulo {}. Every thread has slots, and every copy of the bare loop streams, of \
             its own.",
            cpus.len()
        ))
        .note(
            "\"n threads / n bare loops\" is the engine's speed over the bare codec's; \"scaling\" is \
             how often more n threads do than one, the engine's over the bare loop's.",
        )
        .rows(rows)
        .print())
}

fn one_load(name: &str, load: Load, setup: &Setup, cpus: &[usize], options: &Options) -> Result<Vec<Row>> {
    let slices = options.slices();
    let mut speeds = [const { [const { Vec::new() }; 2] }; THREADS.len()];
    for round in 0..slices.pairs {
        for (threads, speeds) in THREADS.into_iter().zip(&mut speeds) {
            let mut sides = [Which::Engine, Which::Bare];
            if round % 2 == 1 {
                sides.reverse();
            }
            for which in sides {
                let speed = slice(load, which, threads, setup, cpus, u64::from(round), slices.slice)?;
                speeds[which as usize].push(speed);
            }
        }
    }
    let [engine_one, bare_one] = speeds[0].each_ref().map(|speeds| walls(speeds));
    let mut rows = Vec::new();
    for (threads, both) in THREADS.into_iter().zip(&speeds) {
        let [engine, bare] = &both.each_ref().map(|speeds| walls(speeds));
        let [engine_cpu, bare_cpu] =
            both.each_ref().map(|speeds| speeds.iter().map(|s| s.cpu).collect::<Vec<f64>>());
        let target = |row: Row| if threads == 2 { row.target(Target::AtLeast(0.95)) } else { row };
        rows.push(target(
            Row::over(format!("{name}: {threads} threads / {threads} bare loops"), engine, bare)
                .part("kIOPS", median(engine) / 1e3)
                .part("bare", median(bare) / 1e3),
        ));
        rows.push(Row::over(
            format!("{name}: {threads} threads / {threads} bare loops, CPU time"),
            &engine_cpu,
            &bare_cpu,
        ));
        if threads > 1 {
            let scale =
                |all: &[f64], one: &[f64]| all.iter().zip(one).map(|(a, o)| a / o).collect::<Vec<f64>>();
            let (of_engine, of_bare) = (scale(engine, &engine_one), scale(bare, &bare_one));
            rows.push(target(
                Row::over(format!("{name}: scaling 1 to {threads}, engine / bare"), &of_engine, &of_bare)
                    .part("engine", median(&of_engine))
                    .part("bare", median(&of_bare)),
            ));
        }
    }
    Ok(rows)
}

fn walls(speeds: &[Speed]) -> Vec<f64> {
    speeds.iter().map(|speed| speed.wall).collect()
}

/// Runs `threads` threads for `length`.
fn slice(
    load: Load,
    which: Which,
    threads: usize,
    setup: &Setup,
    cpus: &[usize],
    round: u64,
    length: Duration,
) -> Result<Speed> {
    let (start, stop) = (Barrier::new(threads + 1), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads)
            .map(|thread| {
                let (start, stop) = (&start, &stop);
                scope.spawn(move || -> Result<Speed> {
                    // Whatever fails, the barrier is reached.
                    let ready = machine::pin_to(cpus[thread % cpus.len()]).and_then(|()| Ours::new());
                    start.wait();
                    Ok(work(load, which, share(setup, thread, threads), setup, &mut ready?, round, stop))
                })
            })
            .collect();
        start.wait();
        std::thread::sleep(length);
        // Relaxed: the flag carries no data; joining the threads orders what they did.
        stop.store(true, Ordering::Relaxed);
        let mut all = Speed { wall: 0.0, cpu: 0.0 };
        for worker in workers {
            let one = worker.join().ok().context("a worker panicked")??;
            all.wall += one.wall;
            all.cpu += one.cpu;
        }
        Ok(all)
    })
}

/// A thread's own part of the slots, and what it writes there.
fn share(setup: &Setup, thread: usize, threads: usize) -> [Order; 2] {
    let pages = setup.data.pages as u32;
    let len = pages / threads as u32;
    [Order::new(thread as u64, len * thread as u32, len), Order::new(100 + thread as u64, 0, pages)]
}

/// One thread's loop.
fn work(
    load: Load,
    which: Which,
    [slots, contents]: [Order; 2],
    setup: &Setup,
    codec: &mut Ours,
    round: u64,
    stop: &AtomicBool,
) -> Speed {
    let Setup { ram, store, pages, .. } = setup;
    // Every round begins elsewhere, both sides at the same place.
    let mut at = round << 32;
    let first = at;
    let (begin, cpu) = (Instant::now(), thread_clock());
    // Relaxed: see `slice`.
    while !stop.load(Ordering::Relaxed) {
        let (reads, writes) = match load {
            Load::Reads => (BATCH, 0),
            Load::Rewrites => (0, BATCH),
            Load::Mix => (BATCH / 2, BATCH / 2),
        };
        match which {
            Which::Engine => {
                engine_reads(ram, slots.choices(at, reads));
                engine_writes(ram, pages, slots.choices(at, writes).zip(contents.choices(at, writes)));
            }
            Which::Bare => {
                bare_reads(store, codec, slots.choices(at, reads));
                bare_writes(store, codec, pages, contents.choices(at, writes));
            }
        }
        at += BATCH;
    }
    let ops = (at - first) as f64;
    Speed {
        wall: ops / begin.elapsed().as_secs_f64(),
        cpu: ops / thread_clock().saturating_sub(cpu).as_secs_f64(),
    }
}
