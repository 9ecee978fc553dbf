//! Experiment 5: threads on the zones of one device, with one lock, with a lock per zone, and
//! without a lock for reads.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::device::{Flags, Request};
use freestone_benches::data::Random;
use freestone_benches::options::Options;
use freestone_benches::zones::scaling::{
    self, LIMIT, Load, Locks, Shape, Side, THREADS, THREADS_APART, ZONES,
};
use freestone_report::{Summary, Unit};

use super::slices;
use crate::model::costs::{self, Machine};
use crate::model::simulate::Discipline;
use crate::model::{Inputs, predict};
use crate::results::published::zones as published;
use crate::results::{Better, Experiment, LoadModel, Table, turns};

const ROUNDS: u32 = 11;
const SLICE_MS: u32 = 120;
/// Operations per run of the empty loop, and number of runs.
const IDLE_OPS: u64 = 200_000;
const IDLE_ROUNDS: usize = 9;
const PAGE: u64 = PAGE_BYTES as u64;

/// Indexes of the columns and of the sides. For reads, the source's new lock is a column between
/// the old lock and the product, which locks nothing for reads. For writes, the source's new lock
/// is the product's.
const OLD: usize = 0;
const NEW: usize = 1;
const READS: [&str; 3] = [published::COLUMNS[0], published::COLUMNS[1], "no lock (ours)"];
const WRITES: [&str; 2] = [published::COLUMNS[0], "a lock a zone (ours)"];

/// Returns the names of the columns for a load.
fn columns(load: Load) -> &'static [&'static str] {
    match load {
        Load::Reads => &READS,
        Load::Writes => &WRITES,
    }
}

/// Runs writes and reads, without and with memory backing, each without and with limits.
pub fn run(options: &Options) -> Result<Experiment> {
    let machine = costs::measure()?;
    let (mut tables, mut model) = (Vec::new(), Vec::new());
    for memory in [false, true] {
        for (load, figures) in [Load::Writes, Load::Reads].into_iter().zip(published::KIOPS) {
            let backing = if memory { "memory backing" } else { "no backing" };
            let name = format!("{}, {backing}", figures.what);
            let mut table = Table::new(name, Unit::Kiops, Better::More, columns(load));
            (table.old, table.new) = (OLD, NEW);
            let mut inputs = Vec::new();
            for limits in [false, true] {
                let shape = Shape { zone_bytes: scaling::zone_bytes(memory, options), memory, limits };
                let what = if limits { format!("{}, limits", figures.what) } else { figures.what.to_owned() };
                let apart = measure(&mut table, &what, shape, load, options)?;
                if !memory && !limits {
                    // The published number of threads is not measured here, so the row has no
                    // measurements.
                    table.add(&what, figures.threads, &figures.published(), &[]);
                }
                if let Some(machine) = &machine {
                    inputs.push((inputs_of(&table, &what, shape, load, apart, machine)?, what));
                }
            }
            if let Some(machine) = &machine {
                let models = inputs.iter().map(|(of, what)| predict(&table, what, of, machine, 1e-3));
                model.extend(models.collect::<Vec<LoadModel>>());
            }
            tables.push(table);
        }
    }
    let cpus = freestone_benches::machine::allowed_cpus()?.len();
    Ok(Experiment {
        number: 5,
        title: "Zone locks",
        source: published::SOURCE.into(),
        here: vec![
            format!(
                "A zoned null device, {ZONES} zones. Reads of 4 KiB at random offsets; writes of 4 KiB at the \
                 write pointers of the thread's own zones, each reset before it is filled, as zonemode=zbd \
                 gives each job its zones. Thread n is on CPU n modulo {cpus}. Limits: {LIMIT} open and active \
                 zones. Every request completes on the caller's thread, so reads have depth 1; in the source \
                 they had depth 8."
            ),
            format!(
                "\"{}\": a mutex around every call of an equal device, whose writes take their zone's own lock \
                 under it. With memory backing it is held while the page is copied, like the kernel's single \
                 lock over the memory; the source published no figure for that. \"{}\" for reads, as in the \
                 source: a mutex per zone around every read of an equal device, which takes no lock for reads \
                 itself. For writes the source's lock per zone and ours are the same.",
                READS[OLD], READS[NEW]
            ),
            "Reads without backing leave the reader's buffer unchanged (the library's UNREAD flag), in all \
             columns, because null_blk copies nothing either. Only benchmarks use the flag: over NBD such a \
             device reads as zeroes. With memory backing the flag has no effect."
                .into(),
            "Omitted: the block layer, and memory backing in the published figures.".into(),
        ],
        tables,
        words: vec![format!(
            "The published gain is for 96 jobs on 48 cores; {} can at most double a speed, unless the old lock \
             itself slows down. Writes gained nothing in the source: zonemode=zbd and the block layer send a \
             zone one write at a time; here neither is involved.",
            crate::report::words::counted(cpus, "CPU")
        )],
        model,
    })
}

/// Adds a row for each number of threads. Returns the speed of two threads with a device each,
/// relative to one thread.
fn measure(table: &mut Table, what: &str, shape: Shape, load: Load, options: &Options) -> Result<f64> {
    // The side after the columns has two threads with a device each.
    let names = columns(load);
    let (ours, apart) = (names.len() - 1, names.len());
    let locks = |at| match at {
        OLD => Locks::one(),
        at if at == ours => Locks::None,
        _ => Locks::reads(),
    };
    let sides = names.iter().enumerate().map(|(at, &name)| Side::new(name, 1, locks(at), shape));
    let mut sides: Vec<Side> = sides.collect::<Result<_>>()?;
    sides.push(Side::new("apart", THREADS_APART, Locks::None, shape)?);
    let slices = slices(options, ROUNDS, SLICE_MS);
    let mut speeds = THREADS.map(|_| vec![Vec::new(); sides.len()]);
    for round in 0..slices.pairs {
        for (threads, speeds) in THREADS.into_iter().zip(&mut speeds) {
            let compared = if threads == THREADS_APART { sides.len() } else { apart };
            for side in turns(compared, round) {
                let speed = scaling::slice(&sides[side], load, threads, round, slices.slice)?;
                speeds[side].push(speed / 1e3);
            }
        }
    }
    for (threads, speeds) in THREADS.into_iter().zip(&speeds) {
        table.add(what, threads, &[], &speeds[..apart]);
    }
    let of = |threads: usize, side: usize| -> Result<&[f64]> {
        let at = THREADS.iter().position(|number| *number == threads).context("not a number of threads")?;
        Ok(&speeds[at][side])
    };
    Ok(Summary::ratio(of(THREADS_APART, apart)?, of(1, ours)?).median)
}

/// Returns the inputs of the model. The lock is held around the whole call, so the hold time is the
/// time of an operation without the loop.
fn inputs_of(
    table: &Table,
    what: &str,
    shape: Shape,
    load: Load,
    apart: f64,
    machine: &Machine,
) -> Result<Inputs> {
    let row = table.rows.iter().find(|row| row.what == what && row.threads == 1).context("no row")?;
    let fine = 1e6 / row.measured[table.ours].context("the load was not run with one thread")?.median;
    Ok(Inputs {
        fine,
        hold_time: (fine - empty_loop_nanos(shape, load)).max(0.0),
        visits: 1.0,
        lock: machine.mutex,
        discipline: Discipline::Parking,
        apart,
        at_most: None,
    })
}

/// Returns the nanoseconds per operation of a thread's loop without the device call.
fn empty_loop_nanos(shape: Shape, load: Load) -> f64 {
    let pages = ZONES * shape.zone_bytes / PAGE;
    let rounds = (0..IDLE_ROUNDS as u64).map(|round| {
        let mut random = Random::new(round);
        let started = Instant::now();
        for at in 0..IDLE_OPS {
            black_box(match load {
                Load::Reads => Request::read(random.next_u64() % pages * PAGE, PAGE).with(Flags::UNREAD),
                Load::Writes => Request::write(at % pages * PAGE, PAGE),
            });
        }
        started.elapsed().as_nanos() as f64 / IDLE_OPS as f64
    });
    Summary::of(rounds).median
}
