//! Experiment 5: threads on the zones of one drive, with one lock, with a lock a zone, and without
//! one for reads.

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

use crate::costs::{self, Machine};
use crate::experiment::{Better, Experiment, Modelled, Table, turns};
use crate::model::{Inputs, predict};
use crate::published::zones as published;
use crate::simulate::Discipline;
use crate::slices;

const ROUNDS: u32 = 11;
const SLICE_MS: u32 = 120;
/// Operations of the loop that does nothing, and how often it is run.
const IDLE_OPS: u64 = 200_000;
const IDLE_ROUNDS: usize = 9;
const PAGE: u64 = PAGE_BYTES as u64;

/// Places of the columns, and of the sides. In a table of reads the source's new lock stands between
/// the old one and ours, which reads do not take; for writes it is ours.
const OLD: usize = 0;
const NEW: usize = 1;
const READS: [&str; 3] = [published::COLUMNS[0], published::COLUMNS[1], "no lock (ours)"];
const WRITES: [&str; 2] = [published::COLUMNS[0], "a lock a zone (ours)"];

/// The columns of a load.
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
                    // What was published has a number of threads that nothing is measured with
                    // here.
                    table.add(&what, figures.threads, &figures.published(), &[]);
                }
                if let Some(machine) = &machine {
                    inputs.push((inputs_of(&table, &what, shape, load, apart, machine)?, what));
                }
            }
            if let Some(machine) = &machine {
                let modelled = inputs.iter().map(|(of, what)| predict(&table, what, of, machine, 1e-3));
                model.extend(modelled.collect::<Vec<Modelled>>());
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
                "A zoned null drive, {ZONES} zones. Reads of 4 KiB at random places; writes of 4 KiB at the write pointers of zones of the thread's own, \
                 each reset before it is filled, as zonemode=zbd gives each job its zones. Thread n is on CPU n modulo {cpus}. Limits: {LIMIT} open and \
                 active zones. Every request is answered on the caller's thread, so reads have depth 1; there they had depth 8."
            ),
            format!(
                "\"{}\": a mutex around every call of an equal drive, whose writes take their zone's own lock under it. With memory backing it is \
                 held while the page is copied, as the kernel's one lock over the memory is; there is no published figure of that. \"{}\" for \
                 reads, as the source has it: a mutex a zone around every read of an equal drive, which takes no lock for it by itself. For \
                 writes the source's lock a zone and ours are one.",
                READS[OLD], READS[NEW]
            ),
            "Reads without backing leave the reader's buffer as it is (the library's UNREAD flag), in all columns: null_blk copies nothing there \
             either. Only benchmarks ask for that: over NBD such a drive gives zeroes. With memory backing the flag changes nothing."
                .into(),
            "Left out: the block layer, and memory backing in the published figures.".into(),
        ],
        tables,
        words: vec![format!(
            "The published gain is of 96 jobs on 48 cores, and {} can double a speed at most, unless the old lock itself loses by it. Writes \
             gained nothing there: zonemode=zbd and the block layer give a zone one write at a time; here neither is in the way.",
            crate::words::counted(cpus, "CPU")
        )],
        model,
    })
}

/// Adds a row for each number of threads. Returns what two threads that share nothing do over what
/// one does.
fn measure(table: &mut Table, what: &str, shape: Shape, load: Load, options: &Options) -> Result<f64> {
    // Behind the columns one that is none: two threads with a drive each.
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

/// The lock is around the whole call: what an operation takes beyond the loop around it is under
/// the lock.
fn inputs_of(
    table: &Table,
    what: &str,
    shape: Shape,
    load: Load,
    apart: f64,
    machine: &Machine,
) -> Result<Inputs> {
    let row = table.rows.iter().find(|row| row.what == what && row.threads == 1).context("no row")?;
    let fine = 1e6 / row.measured[table.ours].context("it was not run")?.median;
    Ok(Inputs {
        fine,
        held: (fine - idle(shape, load)).max(0.0),
        visits: 1.0,
        lock: machine.mutex,
        discipline: Discipline::Parking,
        apart,
        at_most: None,
    })
}

/// Nanoseconds an operation of a thread's loop without the call of the drive.
fn idle(shape: Shape, load: Load) -> f64 {
    let pages = ZONES * shape.zone_bytes / PAGE;
    let rounds = (0..IDLE_ROUNDS as u64).map(|round| {
        let mut random = Random::new(round);
        let begun = Instant::now();
        for at in 0..IDLE_OPS {
            black_box(match load {
                Load::Reads => Request::read(random.next_u64() % pages * PAGE, PAGE).with(Flags::UNREAD),
                Load::Writes => Request::write(at % pages * PAGE, PAGE),
            });
        }
        begun.elapsed().as_nanos() as f64 / IDLE_OPS as f64
    });
    Summary::of(rounds).median
}
