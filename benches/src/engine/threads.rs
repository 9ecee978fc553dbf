//! `threads` benchmark: threads on distinct slots against the same number of copies of the bare
//! codec loop. Shows whether threads of the engine slow each other down more than those of the loop
//! do.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone_report::{Report, Row, Target};

use super::bare::LibraryCodec;
use super::codec::{bare_reads, bare_writes, engine_reads, engine_writes};
use super::setup::Setup;
use crate::data::Order;
use crate::measure::machine;
use crate::measure::{median, thread_clock};
use crate::options::{Options, Set};

/// Default data size, in bytes.
const BYTES: u64 = 512 << 20;
/// Numbers of threads. The first number is the reference for scaling.
const THREADS: [usize; 4] = [1, 2, 4, 8];
/// Operations between two checks of the stop flag.
const BATCH: u64 = 32;

#[derive(Clone, Copy)]
enum Load {
    Reads,
    Rewrites,
    /// Reads and rewrites alternately.
    Mix,
}

#[derive(Clone, Copy)]
enum Side {
    Engine,
    Bare,
}

#[derive(Clone, Copy)]
struct Speed {
    wall: f64,
    /// Operations per second of CPU time, which excludes other programs and also every wait.
    cpu: f64,
}

/// Runs the benchmark on every selected data set and returns a report for each.
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
        rows.extend(run_load(name, load, setup, &cpus, options)?);
    }
    Ok(Report::new("threads", setup.data.description.clone(), setup.data.bytes(), "lz4")
        .note(setup.census_note())
        .note(format!(
            "Random 4 KiB operations per second of all threads, in wall-clock time; thread n is pinned to CPU \
             n modulo {}. Every thread has its own slots, and every copy of the bare loop its own streams.",
            cpus.len()
        ))
        .note(
            "\"n threads / n bare loops\" is the engine's speed over the bare codec's. \"Scaling\" is the \
             speed of n threads over that of one, the engine's over the bare loop's.",
        )
        .rows(rows)
        .print())
}

fn run_load(name: &str, load: Load, setup: &Setup, cpus: &[usize], options: &Options) -> Result<Vec<Row>> {
    let slices = options.slices();
    let mut speeds = [const { [const { Vec::new() }; 2] }; THREADS.len()];
    for round in 0..slices.pairs {
        for (threads, speeds) in THREADS.into_iter().zip(&mut speeds) {
            let mut sides = [Side::Engine, Side::Bare];
            if round % 2 == 1 {
                sides.reverse();
            }
            for side in sides {
                let speed = slice(load, side, threads, setup, cpus, u64::from(round), slices.slice)?;
                speeds[side as usize].push(speed);
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
            Row::ratio_of(format!("{name}: {threads} threads / {threads} bare loops"), engine, bare)
                .part("kIOPS", median(engine) / 1e3)
                .part("bare", median(bare) / 1e3),
        ));
        rows.push(Row::ratio_of(
            format!("{name}: {threads} threads / {threads} bare loops, CPU time"),
            &engine_cpu,
            &bare_cpu,
        ));
        if threads > 1 {
            let scale =
                |all: &[f64], one: &[f64]| all.iter().zip(one).map(|(a, o)| a / o).collect::<Vec<f64>>();
            let (of_engine, of_bare) = (scale(engine, &engine_one), scale(bare, &bare_one));
            rows.push(target(
                Row::ratio_of(format!("{name}: scaling 1 to {threads}, engine / bare"), &of_engine, &of_bare)
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

/// Runs `threads` threads for `length` and returns the sum of their speeds.
fn slice(
    load: Load,
    side: Side,
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
                    // Reach the barrier even after a failure, so that the other threads do not
                    // hang.
                    let ready = machine::pin_to(cpus[thread % cpus.len()]).and_then(|()| LibraryCodec::new());
                    start.wait();
                    Ok(run_worker(load, side, share(setup, thread, threads), setup, &mut ready?, round, stop))
                })
            })
            .collect();
        start.wait();
        std::thread::sleep(length);
        // Relaxed: the flag carries no data; joining the threads orders their work.
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

/// Returns the random sequence of the thread's own slots, and that of the contents that the thread
/// writes.
fn share(setup: &Setup, thread: usize, threads: usize) -> [Order; 2] {
    let pages = setup.data.pages as u32;
    let len = pages / threads as u32;
    [Order::new(thread as u64, len * thread as u32, len), Order::new(100 + thread as u64, 0, pages)]
}

fn run_worker(
    load: Load,
    side: Side,
    [slots, contents]: [Order; 2],
    setup: &Setup,
    codec: &mut LibraryCodec,
    round: u64,
    stop: &AtomicBool,
) -> Speed {
    let Setup { ram, store, pages, .. } = setup;
    // Each round starts at a different point of the sequence, which is the same for both sides.
    let mut at = round << 32;
    let first = at;
    let (start, cpu) = (Instant::now(), thread_clock());
    // Relaxed: see `slice`.
    while !stop.load(Ordering::Relaxed) {
        let (reads, writes) = match load {
            Load::Reads => (BATCH, 0),
            Load::Rewrites => (0, BATCH),
            Load::Mix => (BATCH / 2, BATCH / 2),
        };
        match side {
            Side::Engine => {
                engine_reads(ram, slots.choices(at, reads));
                engine_writes(ram, pages, slots.choices(at, writes).zip(contents.choices(at, writes)));
            }
            Side::Bare => {
                bare_reads(store, codec, slots.choices(at, reads));
                bare_writes(store, codec, pages, contents.choices(at, writes));
            }
        }
        at += BATCH;
    }
    let ops = (at - first) as f64;
    Speed {
        wall: ops / start.elapsed().as_secs_f64(),
        cpu: ops / thread_clock().saturating_sub(cpu).as_secs_f64(),
    }
}
