//! Experiment 4: writes of an origin that has a snapshot, and of the snapshot, by several workers
//! over null drives.

use std::time::Duration;

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::cow::StoreKind;
use freestone::device::IoBuf;
use freestone_benches::forks::cow_tables::{CHUNK_BYTES, Devices, Which};
use freestone_benches::forks::locks::{Kind, Profile};
use freestone_benches::forks::tables::{self, Beside, Speed, Variant, WORKERS};
use freestone_benches::options::Options;
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
/// The time under the lock is measured so often; the median counts.
const PROFILES: u64 = 5;

/// Places of the columns, and of the variants.
const OLD: usize = 0;
const OURS: usize = 2;
const COLUMNS: [&str; 3] = [figures::COLUMNS[0], figures::COLUMNS[1], "a lock a chunk (ours)"];
/// A variant that is no column: each worker has an origin and a snapshot of its own.
const APART: usize = 3;

/// Runs both devices.
pub fn run(options: &Options) -> Result<Experiment> {
    let mut pages = IoBuf::zeroed(options.bytes(BYTES) as usize)?;
    pages.fill(0x5A);
    let machine = costs::measure()?;
    let rounds = slices(options, ROUNDS, 1).pairs;
    let (mut tables, mut model) = (Vec::new(), Vec::new());
    for (which, name, iops, latency) in [
        (Which::Origin, "origin", figures::ORIGIN_IOPS, figures::ORIGIN_LATENCY),
        (Which::Snapshot, "snapshot", figures::SNAPSHOT_IOPS, figures::SNAPSHOT_LATENCY),
    ] {
        let variant = |name, apart, locks| -> Box<dyn Variant> {
            Box::new(Devices::new(name, which, StoreKind::Transient, pages.len() as u64, apart, locks))
        };
        let mut variants = [
            variant(COLUMNS[OLD], false, Some(Kind::One)),
            variant(COLUMNS[1], false, Some(Kind::Buckets)),
            variant(COLUMNS[OURS], false, None),
            variant("apart", true, None),
        ];
        let speeds = tables::run(rounds, &mut variants, &pages)?;
        let throughput =
            table(&format!("{name}, throughput"), Unit::Iops, Better::More, &iops, &speeds, |s| s.per_second);
        tables.push(table(
            &format!("{name}, mean latency"),
            Unit::Micros,
            Better::Less,
            &latency,
            &speeds,
            |s| s.mean,
        ));
        if let Some(machine) = &machine {
            model.push(modelled(which, &throughput, &speeds, machine, &pages)?);
        }
        tables.insert(tables.len() - 1, throughput);
    }
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
                "Null drives below, store N, chunks of {CHUNK_BYTES} bytes. Random 4 KiB writes, each of {} chunks once, one at a time by each worker, \
                 worker n on CPU n modulo {cpus}; a new snapshot before each slice. Origin: every chunk is copied first. Snapshot: every write \
                 covers a chunk, so nothing is copied. No block layer and no scheduler is in it, there both are.",
                pages.len() / PAGE_BYTES
            ),
            format!(
                "\"{}\": a mutex around all of the engine's work on the caller's thread, let go around every access to the drives below. \"{}\": a \
                 shared read-write lock, then the chunk's buckets of complete and of pending exceptions, held for the same time. Both are \
                 around the engine as it is, whose own locks they have in addition.",
                COLUMNS[OLD], COLUMNS[1]
            ),
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
    which: Which,
    table: &Table,
    speeds: &[Vec<Vec<Speed>>],
    machine: &Machine,
    pages: &[u8],
) -> Result<Modelled> {
    let median = |workers: usize, variant: usize| -> Result<f64> {
        let at = WORKERS.iter().position(|number| *number == workers).context("not a number of workers")?;
        Ok(Summary::of(speeds[at][variant].iter().map(|speed| speed.per_second)).median)
    };
    let profile = profile(which, machine, pages)?;
    let inputs = Inputs {
        fine: 1e9 / median(1, OURS)?,
        held: profile.0,
        visits: profile.1,
        lock: machine.mutex,
        discipline: Discipline::Parking,
        apart: median(2, APART)? / median(1, APART)?,
        at_most: None,
    };
    Ok(predict(table, &table.rows[0].what, &inputs, machine, 1.0))
}

/// One worker: nanoseconds that a write holds the one lock, and how often it takes it.
fn profile(which: Which, machine: &Machine, pages: &[u8]) -> Result<(f64, f64)> {
    let writes = (pages.len() / PAGE_BYTES) as f64;
    let (mut held, mut visits) = (Vec::new(), Vec::new());
    for round in 0..PROFILES {
        // The locks live as long as the program as well.
        let profile: &'static Profile = Box::leak(Box::default());
        let locks = Some(Kind::Timed(profile));
        let mut variant =
            Devices::new("timed", which, StoreKind::Transient, pages.len() as u64, false, locks);
        let devices = variant.fresh(1)?;
        tables::slice(&devices, Beside::Nothing, pages, round)?;
        let (time, count): (Duration, u64) = profile.held();
        // Between two readings of the clock lies the time of one.
        held.push((time.as_nanos() as f64 - count as f64 * machine.clock).max(0.0) / writes);
        visits.push(count as f64 / writes);
    }
    Ok((Summary::of(held).median, Summary::of(visits).median))
}
