//! Experiment 4: writes of an origin that has a snapshot, and of the snapshot, by several workers
//! over null drives.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::cow::StoreKind;
use freestone::device::{Device, IoBuf};
use freestone_benches::forks::cow_tables::{CHUNK_BYTES, Devices, Which};
use freestone_benches::forks::tables::{self, Beside, Speed, Variant, WORKERS};
use freestone_benches::options::Options;
use freestone_core::variants::{self, Exceptions};
use freestone_report::{Summary, Unit};

use crate::costs::{self, Machine};
use crate::experiment::{Better, Experiment, Modelled, Table};
use crate::model::{Inputs, predict};
use crate::published::{Figures, snapshots as figures};
use crate::simulate::Discipline;
use crate::slices;

/// Size of the origin where `--size` does not say.
const BYTES: u64 = 512 << 20;
const ROUNDS: u32 = 15;
/// Such a part of it is written where every exception is committed, which takes longer.
const COMMITTED_PART: usize = 8;
/// The time under the lock is measured so often; the median counts.
const PROFILES: u64 = 5;

/// Places of the columns, and of the variants.
const OLD: usize = 0;
const OURS: usize = 2;
const COLUMNS: [&str; 3] = [figures::COLUMNS[0], figures::COLUMNS[1], "a lock a chunk (ours)"];
/// A variant that is no column: each worker has an origin and a snapshot of its own.
const APART: usize = 3;

/// Devices whose exceptions have another lock than the product's.
struct With {
    locks: Exceptions,
    devices: Devices,
}

impl Variant for With {
    fn name(&self) -> &'static str {
        self.devices.name()
    }

    fn fresh(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        // Those of the slice before are not used any more.
        self.devices.clear();
        variants::set_exceptions(self.locks);
        self.devices.fresh(workers)
    }
}

/// What is written, and what keeps the snapshot's exceptions.
#[derive(Clone, Copy)]
struct Setup<'a> {
    which: Which,
    store: StoreKind,
    pages: &'a [u8],
}

impl Setup<'_> {
    fn devices(&self, name: &'static str, locks: Exceptions, apart: bool) -> With {
        let devices = Devices::new(name, self.which, self.store, self.pages.len() as u64, apart);
        With { locks, devices }
    }
}

/// Runs both devices, with both kinds of stores.
pub fn run(options: &Options) -> Result<Experiment> {
    let mut pages = IoBuf::zeroed(options.bytes(BYTES) as usize)?;
    pages.fill(0x5A);
    let machine = costs::measure()?;
    let rounds = slices(options, ROUNDS, 1).pairs;
    let (mut tables, mut model) = (Vec::new(), Vec::new());
    let measured = (|| -> Result<()> {
        for (which, name, iops, latency) in [
            (Which::Origin, "origin", &figures::ORIGIN_IOPS, &figures::ORIGIN_LATENCY),
            (Which::Snapshot, "snapshot", &figures::SNAPSHOT_IOPS, &figures::SNAPSHOT_LATENCY),
        ] {
            for store in [StoreKind::Transient, StoreKind::Persistent] {
                let pages = match store {
                    StoreKind::Transient => &pages[..],
                    _ => &pages[..pages.len() / COMMITTED_PART / PAGE_BYTES * PAGE_BYTES],
                };
                let setup = Setup { which, store, pages };
                let mut variants = [
                    setup.devices(COLUMNS[OLD], Exceptions::One, false),
                    setup.devices(COLUMNS[1], Exceptions::Buckets, false),
                    setup.devices(COLUMNS[OURS], Exceptions::Ours, false),
                    setup.devices("apart", Exceptions::Ours, true),
                ]
                .map(|variant| -> Box<dyn Variant> { Box::new(variant) });
                let speeds = tables::run(rounds, &mut variants, pages)?;
                let (name, iops, latency) = match store {
                    StoreKind::Transient => (name.to_owned(), &iops[..], &latency[..]),
                    _ => (format!("{name}, store {store}"), &[][..], &[][..]),
                };
                let throughput =
                    table(&format!("{name}, throughput"), Unit::Iops, Better::More, iops, &speeds, |s| {
                        s.per_second
                    });
                // The queue of a store P is one for all, which the model does not know.
                if let (Some(machine), StoreKind::Transient) = (&machine, store) {
                    model.push(modelled(&setup, &throughput, &speeds, machine)?);
                }
                tables.push(throughput);
                let name = format!("{name}, mean latency");
                tables.push(table(&name, Unit::Micros, Better::Less, latency, &speeds, |s| s.mean));
            }
        }
        Ok(())
    })();
    variants::set_exceptions(Exceptions::Ours);
    measured?;
    let cpus = freestone_benches::machine::allowed_cpus()?.len();
    let mut words = vec![format!(
        "With more than {cpus} workers on {} those of one CPU take turns: a worker that is preempted while it holds the one lock holds up all others, and \
         mean latency is time on the queue of the CPU, not time at the lock. Compare 4 and 8 workers with the modelled rows.",
        crate::words::counted(cpus, "CPU")
    )];
    if machine.is_none() {
        words.push("With one CPU nothing is modelled: a cache line has nowhere to go.".into());
    }
    Ok(Experiment {
        number: 4,
        title: "Snapshot locks",
        source: figures::SOURCE.into(),
        here: vec![
            format!(
                "Null drives below, chunks of {CHUNK_BYTES} bytes; store N, as there, and store P, which has no published figures. Random 4 KiB \
                 writes, each of {} chunks once (store P: of {}), one at a time by each worker, worker n on CPU n modulo {cpus}; a new snapshot before each slice. \
                 Origin: every chunk is copied first. Snapshot: every write covers a chunk, so nothing is copied. No block layer and no scheduler \
                 is in it, there both are.",
                pages.len() / PAGE_BYTES,
                pages.len() / COMMITTED_PART / PAGE_BYTES
            ),
            format!(
                "One build, in which the lock of an exception is chosen at run time; the table is ours in all columns, and with the kernel's locks \
                 its slots have none. \"{}\": a mutex, held to find and begin an exception (with its place on the COW device), to complete it, and \
                 where a complete one is found: three times for a write to the origin, twice for one to the snapshot, as there. \"{}\": as often, a \
                 shared read-write lock, then the chunk's buckets of complete and of pending exceptions; as many buckets as the kernel has.",
                COLUMNS[OLD], COLUMNS[1]
            ),
            "Store P: the drive below answers a flush at once, so a commit costs what the engine does for it: entries in order of their places, \
             one write of an area for as many as have come by then. It has one queue in all columns, as there."
                .into(),
            "Left out: the kernel's copying daemon and its throttle.".into(),
        ],
        tables,
        words,
        model,
    })
}

fn table(
    name: &str,
    unit: Unit,
    better: Better,
    published: &[Figures<2>],
    speeds: &[Vec<Vec<Speed>>],
    number: fn(&Speed) -> f64,
) -> Table {
    let mut table = Table::new(name, unit, better, &COLUMNS);
    table.new = 1;
    for (workers, speeds) in WORKERS.into_iter().zip(speeds) {
        let rounds: Vec<Vec<f64>> =
            speeds[..COLUMNS.len()].iter().map(|column| column.iter().map(number).collect()).collect();
        let figures = published.iter().find(|row| row.threads == workers);
        let figures = figures.map(Figures::published).unwrap_or_default();
        table.add("4 KiB random writes", workers, &figures, &rounds);
    }
    table
}

fn modelled(
    setup: &Setup<'_>,
    table: &Table,
    speeds: &[Vec<Vec<Speed>>],
    machine: &Machine,
) -> Result<Modelled> {
    let median = |workers: usize, variant: usize| -> Result<f64> {
        let at = WORKERS.iter().position(|number| *number == workers).context("not a number of workers")?;
        Ok(Summary::of(speeds[at][variant].iter().map(|speed| speed.per_second)).median)
    };
    let (held, visits) = profile(setup, machine)?;
    let inputs = Inputs {
        fine: 1e9 / median(1, OURS)?,
        held,
        visits,
        lock: machine.mutex,
        discipline: Discipline::Parking,
        apart: median(2, APART)? / median(1, APART)?,
        at_most: None,
    };
    Ok(predict(table, &table.rows[0].what, &inputs, machine, 1.0))
}

/// One worker: nanoseconds that a write holds the one lock, and how often it takes it.
fn profile(setup: &Setup<'_>, machine: &Machine) -> Result<(f64, f64)> {
    let writes = (setup.pages.len() / PAGE_BYTES) as f64;
    let (mut held, mut visits) = (Vec::new(), Vec::new());
    for round in 0..PROFILES {
        let mut variant = setup.devices("timed", Exceptions::Timed, false);
        let devices = variant.fresh(1)?;
        variants::exceptions_held();
        tables::slice(&devices, Beside::Nothing, setup.pages, round)?;
        let (time, count): (Duration, u64) = variants::exceptions_held();
        // Between two readings of the clock lies the time of one.
        held.push((time.as_nanos() as f64 - count as f64 * machine.clock).max(0.0) / writes);
        visits.push(count as f64 / writes);
    }
    Ok((Summary::of(held).median, Summary::of(visits).median))
}
