//! Experiment 4: writes by several workers to an origin with a snapshot, and to the snapshot, over
//! null devices.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::cow::StoreKind;
use freestone::device::{Device, IoBuf};
use freestone_benches::forks::cow_tables::{CHUNK_BYTES, Devices, WrittenDevice};
use freestone_benches::forks::tables::{self, ExtraWork, Speed, Variant, WORKERS};
use freestone_benches::options::Options;
use freestone_core::variants::{self, Exceptions};
use freestone_report::{Summary, Unit};

use super::slices;
use crate::model::costs::{self, Machine};
use crate::model::simulate::Discipline;
use crate::model::{Inputs, predict};
use crate::results::published::{Figures, snapshots as figures};
use crate::results::{Better, Experiment, LoadModel, Table};

/// Default size of the origin, in bytes.
const BYTES: u64 = 512 << 20;
const ROUNDS: u32 = 15;
/// Divisor of the origin's size for exception stores that commit every exception, which takes
/// longer.
const COMMITTED_PART: usize = 8;
/// Number of measurements of the time under the lock. The median is used.
const PROFILES: u64 = 5;

/// Indexes of the columns and of the variants.
const OLD: usize = 0;
const OURS: usize = 2;
const COLUMNS: [&str; 3] = [figures::COLUMNS[0], figures::COLUMNS[1], "a lock a chunk (ours)"];
/// Index of a variant without a column: each worker has its own origin and snapshot.
const APART: usize = 3;

/// Devices, and the kind of locks for their exceptions.
struct LockedDevices {
    locks: Exceptions,
    devices: Devices,
}

impl Variant for LockedDevices {
    fn name(&self) -> &'static str {
        self.devices.name()
    }

    fn prepare(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        // Drop the devices of the previous slice: they must not be used after the kind of locks
        // changes.
        self.devices.clear();
        variants::set_exceptions(self.locks);
        self.devices.prepare(workers)
    }
}

/// Device to which the workers write, and exception store of the snapshot.
#[derive(Clone, Copy)]
struct Setup<'a> {
    written: WrittenDevice,
    store: StoreKind,
    pages: &'a [u8],
}

impl Setup<'_> {
    fn devices(&self, name: &'static str, locks: Exceptions, separate: bool) -> LockedDevices {
        let devices = Devices::new(name, self.written, self.store, self.pages.len() as u64, separate);
        LockedDevices { locks, devices }
    }
}

/// Measures writes to the origin and to the snapshot, with both kinds of exception stores.
pub fn run(options: &Options) -> Result<Experiment> {
    let mut pages = IoBuf::zeroed(options.bytes(BYTES) as usize)?;
    pages.fill(0x5A);
    let machine = costs::measure()?;
    let rounds = slices(options, ROUNDS, 1).pairs;
    let (mut tables, mut model) = (Vec::new(), Vec::new());
    let measured = (|| -> Result<()> {
        for (written, name, iops, latency) in [
            (WrittenDevice::Origin, "origin", &figures::ORIGIN_IOPS, &figures::ORIGIN_LATENCY),
            (WrittenDevice::Snapshot, "snapshot", &figures::SNAPSHOT_IOPS, &figures::SNAPSHOT_LATENCY),
        ] {
            for store in [StoreKind::Transient, StoreKind::Persistent] {
                let pages = match store {
                    StoreKind::Transient => &pages[..],
                    _ => &pages[..pages.len() / COMMITTED_PART / PAGE_BYTES * PAGE_BYTES],
                };
                let setup = Setup { written, store, pages };
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
                // The persistent exception store has a single queue, which the model does not
                // cover.
                if let (Some(machine), StoreKind::Transient) = (&machine, store) {
                    model.push(model_of(&setup, &throughput, &speeds, machine)?);
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
        "With more than {cpus} workers on {} the workers of a CPU take turns: a worker that is preempted while \
         it holds the single lock blocks all others, and mean latency is time in the queue of the CPU, not \
         time at the lock. Compare 4 and 8 workers with the modelled rows.",
        crate::report::words::counted(cpus, "CPU")
    )];
    if machine.is_none() {
        words.push("With one CPU nothing is modelled, because no cache line is transferred.".into());
    }
    Ok(Experiment {
        number: 4,
        title: "Snapshot locks",
        source: figures::SOURCE.into(),
        here: vec![
            format!(
                "Null devices below, chunks of {CHUNK_BYTES} bytes; store N, as in the source, and store P, \
                 which has no published figures. Random 4 KiB writes, each of {} chunks once (store P: of {}), \
                 one at a time by each worker, worker n on CPU n modulo {cpus}; each slice has a new snapshot. \
                 Origin: every chunk is copied first. Snapshot: every write covers a chunk, so nothing is \
                 copied. The source's figures include the block layer and a scheduler, these do not.",
                pages.len() / PAGE_BYTES,
                pages.len() / COMMITTED_PART / PAGE_BYTES
            ),
            format!(
                "The lock of an exception is selected at run time in one build. All columns use the product's \
                 table; with the kernel's locks its slots have no locks. \"{}\": a mutex, held to find and \
                 begin an exception (with its location on the COW device), to complete it, and to return a \
                 complete one: three times for a write to the origin and twice for one to the snapshot, as in \
                 the source. \"{}\": at the same points, a shared read-write lock, then the chunk's buckets of \
                 complete and of pending exceptions; as many buckets as in the kernel.",
                COLUMNS[OLD], COLUMNS[1]
            ),
            "Store P: the device below completes a flush at once, so a commit costs only the engine's work: \
             entries in order of their locations, and one write of an area for all entries that are ready by \
             then. The store has a single queue in all columns, as in the source."
                .into(),
            "Omitted: the kernel's copying daemon and its throttle.".into(),
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

fn model_of(
    setup: &Setup<'_>,
    table: &Table,
    speeds: &[Vec<Vec<Speed>>],
    machine: &Machine,
) -> Result<LoadModel> {
    let median = |workers: usize, variant: usize| -> Result<f64> {
        let at = WORKERS.iter().position(|number| *number == workers).context("not a number of workers")?;
        Ok(Summary::of(speeds[at][variant].iter().map(|speed| speed.per_second)).median)
    };
    let (hold_time, visits) = profile(setup, machine)?;
    let inputs = Inputs {
        fine: 1e9 / median(1, OURS)?,
        hold_time,
        visits,
        lock: machine.mutex,
        discipline: Discipline::Parking,
        apart: median(2, APART)? / median(1, APART)?,
        at_most: None,
    };
    Ok(predict(table, &table.rows[0].what, &inputs, machine, 1.0))
}

/// Profiles a single worker. Returns the nanoseconds per write for which the single lock is held,
/// and how often it is acquired per write.
fn profile(setup: &Setup<'_>, machine: &Machine) -> Result<(f64, f64)> {
    let writes = (setup.pages.len() / PAGE_BYTES) as f64;
    let (mut hold_time, mut visits) = (Vec::new(), Vec::new());
    for round in 0..PROFILES {
        let mut variant = setup.devices("timed", Exceptions::Timed, false);
        let devices = variant.prepare(1)?;
        variants::take_exception_hold_time();
        tables::slice(&devices, ExtraWork::Nothing, setup.pages, round)?;
        let (time, count): (Duration, u64) = variants::take_exception_hold_time();
        // Each time includes one reading of the clock.
        hold_time.push((time.as_nanos() as f64 - count as f64 * machine.clock).max(0.0) / writes);
        visits.push(count as f64 / writes);
    }
    Ok((Summary::of(hold_time).median, Summary::of(visits).median))
}
