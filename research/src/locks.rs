//! Experiment 1: one lock around the table of a RAM disk, and four locks of its entries, beside the
//! product's.

use std::hint::black_box;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone_benches::machine;
use freestone_benches::measure::{Slices, median};
use freestone_benches::options::Options;
use freestone_benches::setup::new_ram_with;
use freestone_core::variants::{self, Lock};
use freestone_report::{Summary, Unit};

use crate::costs::{self, Machine};
use crate::disk::Disk;
use crate::drive::{Content, Drive, Load, available_bytes};
use crate::experiment::{Better, Experiment, Modelled, Table, turns};
use crate::ext4::{self, Ext4};
use crate::model::{self, Inputs, Mixed, predict};
use crate::patterns::Pattern;
use crate::published::{Figures, locks as published};
use crate::shared::Mix;
use crate::simulate::Discipline;
use crate::slices;

const ROUNDS: u32 = 9;
const SLICE_MS: u32 = 50;
/// Numbers of threads; the source has the last one.
const THREADS: [usize; 3] = [1, 2, 4];
/// As many threads have a disk each, for the model.
const THREADS_APART: usize = 2;
/// iozone's record, and its file for each thread.
const RECORD_BYTES: u64 = 16 << 10;
const AREA_BYTES: u64 = 200 << 20;
/// fio's device and blocks.
const DEVICE_BYTES: u64 = 10 << 20;
const BLOCK_BYTES: u64 = 32 << 10;
/// Seeds what fio draws: it is fixed there.
const FIO_SEED: u64 = 1;
/// A unit of the tables is a KiB: a page a second is four of them.
const KIB_A_PAGE: f64 = 4.0;
/// Steps of the loop that measures one on a lock's line.
const STEPS: u32 = 1 << 20;

const OLD: usize = 0;
/// What the source chose.
const NEW: usize = 4;
const OURS: usize = 5;
/// The columns; the last one is the product's.
const LOCKS: [Lock; 6] = [Lock::Table, Lock::Cas, Lock::Spin, Lock::ReadWrite, Lock::BitSpin, Lock::Ours];
const COLUMNS: [&str; 6] = {
    let [old, cas, spin, read_write, bit] = published::COLUMNS;
    [old, cas, spin, read_write, bit, "ours"]
};

/// What the loads of a table have in common.
struct Bench<'a, D> {
    drive: &'a Drive<'a, D>,
    /// A disk for each of two threads, for the model.
    apart: Option<&'a Drive<'a>>,
    record: u64,
    area: u64,
    shared: bool,
    /// Nothing where rounds have seeds of their own.
    seed: Option<u64>,
    slices: Slices,
    machine: Option<&'a Machine>,
}

/// Runs iozone's tests, then fio's jobs, then, where `on_ext4`, iozone's on files.
pub fn run(on_ext4: bool, options: &Options) -> Result<Experiment> {
    let machine = costs::measure()?;
    let content = Content::new(options)?;
    let slices = slices(options, ROUNDS, SLICE_MS);
    let most = THREADS[THREADS.len() - 1];
    // Half of what is free, for the areas and the disks apart; nothing of it may be compressible.
    let room = available_bytes() / 2 / (most + THREADS_APART) as u64;
    let area = options.bytes(AREA_BYTES).min(room) / RECORD_BYTES * RECORD_BYTES;
    // One disk with the areas of all threads, and one for each of two threads.
    let of_iozone = |name: &str, algorithm| -> Result<(Table, Vec<Modelled>)> {
        let drive = Drive::new(1, most as u64 * area, algorithm, &content)?;
        let apart = Drive::new(THREADS_APART, area, algorithm, &content)?;
        let bench = Bench {
            drive: &drive,
            apart: Some(&apart),
            record: RECORD_BYTES,
            area,
            shared: false,
            seed: None,
            slices,
            machine: machine.as_ref(),
        };
        bench.table(name, &published::IOZONE)
    };
    let (iozone, mut model) = of_iozone("iozone", Algorithm::Lzo)?;
    let (with_lz4, lz4_model) = of_iozone("iozone, lz4", Algorithm::Lz4)?;
    let (fio, fio_model) = {
        let drive = Drive::new(1, DEVICE_BYTES, Algorithm::Lzo, &content)?;
        let apart = Drive::new(THREADS_APART, DEVICE_BYTES, Algorithm::Lzo, &content)?;
        let bench = Bench {
            drive: &drive,
            apart: Some(&apart),
            record: BLOCK_BYTES,
            area: DEVICE_BYTES,
            shared: true,
            seed: Some(FIO_SEED),
            slices,
            machine: machine.as_ref(),
        };
        bench.table("fio, raw device", &published::FIO)?
    };
    let mut tables = vec![iozone, with_lz4, fio];
    model.extend(lz4_model.into_iter().chain(fio_model));
    let mut here = here(area, &content)?;
    if on_ext4 {
        tables.push(of_files(most, area, &content, slices)?);
        here.push(format!("iozone on ext4: {}", ext4::HOW));
    }
    Ok(Experiment {
        number: 1,
        title: "A lock a slot",
        source: published::SOURCE.into(),
        here,
        words: tables.iter().filter_map(shape).collect(),
        tables,
        model,
    })
}

/// iozone's tests with a file for each thread.
fn of_files(threads: usize, area: u64, content: &Content, slices: Slices) -> Result<Table> {
    let ext4 = Ext4::new(new_ram_with(ext4::disk_bytes(threads as u64 * area), Algorithm::Lzo)?)?;
    let drive = Drive::of_files(&ext4, threads, area, content)?;
    let bench = Bench {
        drive: &drive,
        apart: None,
        record: RECORD_BYTES,
        area,
        shared: false,
        seed: None,
        slices,
        machine: None,
    };
    let (mut table, _) = bench.table("iozone on ext4", &published::IOZONE)?;
    table.reasons = published::IOZONE.iter().map(|figures| (figures.what, ext4::REASON)).collect();
    Ok(table)
}

fn here(area: u64, content: &Content) -> Result<Vec<String>> {
    let cpus = machine::allowed_cpus()?.len();
    let [lzo, lz4] = [Algorithm::Lzo, Algorithm::Lz4].map(|algorithm| content.compress_ns(algorithm));
    Ok(vec![
        format!(
            "The library's RAM disk with LZO, and once more with lz4 (\"iozone, lz4\", beside the source's figures for LZO), in one build in which the \
             lock of a slot is chosen at run time; all columns pay for the choice and take turns on one disk. Content: {}. Thread n is on CPU n \
             modulo {cpus}. KB/s of all threads together.",
            content.description
        ),
        format!(
            "LZO is lzokay's here. Its search is more thorough than that of the kernel's lzo1x_1, and takes several times as long: the bare codec \
             compresses a page in {:.1} us, with lz4 in {:.1} us. So a write spends less of its time at the lock here than in the source, and lz4 \
             may be nearer to it.",
            lzo? / 1000.0,
            lz4? / 1000.0
        ),
        format!(
            "iozone's tests: {} KiB records, an area of {} MiB for each thread, emptied before each initial write, which ends with the first thread \
             that is through. pwrite and pread have no file position to leave alone here: they are a rewrite and a read in order. fio's jobs: \
             {} KiB blocks, all jobs in one device of {} MiB, until the time is over instead of 3000 loops; reads and writes together.",
            RECORD_BYTES >> 10,
            area >> 20,
            BLOCK_BYTES >> 10,
            DEVICE_BYTES >> 20
        ),
        "Readers share the two read-write locks, as in the kernel; there the table's was held by a reader while it decompressed, and by a writer while \
         it replaced the entry, and so it is here. \"CAS\" and \"bit spinlock\" are a bit in the slot's word, the other two locks of an entry lie in \
         an array beside it, a cache line further; in the kernel they lay in the entry. What spins yields its CPU after 64 looks, since a holder may \
         have lost its own; the kernel's holders do not."
            .into(),
        "Under every lock, the old one too, a read decompresses, and a rewrite copies what it has compressed before into the place of the old object \
         where both are of one size class. The kernel's reads did the same. Its writes copied to a new place first and held the lock while they freed \
         the old object and noted the new one: where pages are written over, a lock is held here for the copy of an object as well. Two threads \
         seldom want one entry at once, so it is the old lock that looks worse for it than it was. An initial write copies before it takes the lock, \
         as in the kernel."
            .into(),
        "Left out: the file system (--ext4 adds it) and the block layer, the kernel's own cost of a system call."
            .into(),
        "The model's old lock is, for readers, two steps on the line of the one lock and the line's way between CPUs; for writers it is held as long \
         as a slot is here, by the clock. Where reads and writes come together, both are held so long, readers together, and nobody queues. It \
         takes the place of the slot's own lock, which takes as many steps."
            .into(),
    ])
}

/// The means of the columns over the old lock, there and here.
fn shape(table: &Table) -> Option<String> {
    let means = |threads: usize, ratio: &dyn Fn(usize, usize) -> Option<f64>| {
        let rows: Vec<usize> =
            (0..table.rows.len()).filter(|row| table.rows[*row].threads == threads).collect();
        let mean = |column: usize| {
            let logs: Option<Vec<f64>> = rows.iter().map(|row| Some(ratio(*row, column)?.ln())).collect();
            let logs = logs.filter(|logs| !logs.is_empty())?;
            Some((logs.iter().sum::<f64>() / logs.len() as f64).exp())
        };
        let named = (1..table.columns.len())
            .filter_map(|column| Some(format!("{} {:.2}", table.columns[column], mean(column)?)));
        named.collect::<Vec<_>>().join(", ")
    };
    let published = means(4, &|row, column| table.published_ratio(&table.rows[row], column));
    let here: Vec<String> = THREADS[1..]
        .iter()
        .map(|&threads| {
            (threads, means(threads, &|row, column| table.rows[row].ratios[column].map(|r| r.median)))
        })
        .filter(|(_, means)| !means.is_empty())
        .map(|(threads, means)| format!("with {threads} threads {means}"))
        .collect();
    (!here.is_empty()).then(|| {
        format!(
            "{}: means of all loads over \"{}\", there with 4 threads: {published}. Here {}.",
            table.name,
            table.columns[OLD],
            here.join("; ")
        )
    })
}

impl<D: Disk> Bench<'_, D> {
    fn load(&self, pattern: Pattern, threads: usize, round: u32) -> Load {
        let &Self { record, area, shared, .. } = self;
        Load { pattern, threads, record, area, shared, seed: self.seed.unwrap_or(u64::from(round)) }
    }

    /// Every load with every number of threads and, where the machine has two CPUs, the model of
    /// those that it fits.
    fn table(&self, name: &str, figures: &[Figures<5>]) -> Result<(Table, Vec<Modelled>)> {
        let mut table = Table::new(name, Unit::KbSecond, Better::More, &COLUMNS);
        (table.old, table.new, table.ours) = (OLD, NEW, OURS);
        let mut inputs = Vec::new();
        for figures in figures {
            let pattern = Pattern::named(figures.what)?;
            self.drive.prepare(pattern)?;
            self.apart.map_or(Ok(()), |apart| apart.prepare(pattern))?;
            for threads in THREADS.into_iter().filter(|threads| *threads >= pattern.threads_min()) {
                let published = if threads == figures.threads { figures.published() } else { Vec::new() };
                let rounds = self.row(pattern, threads)?;
                table.add(figures.what, threads, &published, &rounds[..COLUMNS.len()]);
                if threads == THREADS_APART
                    && let (Some(machine), Some(apart)) = (self.machine, rounds.get(COLUMNS.len()))
                {
                    inputs.push((self.inputs(&table, figures.what, pattern, apart, machine)?, figures.what));
                }
            }
        }
        let modelled = self.machine.map(|machine| {
            inputs.iter().map(|(of, what)| predict(&table, what, of.as_ref(), machine, KIB_A_PAGE)).collect()
        });
        Ok((table, modelled.unwrap_or_default()))
    }

    /// Speeds by column and round; behind the columns, for what is modelled, those of threads
    /// apart.
    fn row(&self, pattern: Pattern, threads: usize) -> Result<Vec<Vec<f64>>> {
        let apart = self.apart.filter(|_| threads == THREADS_APART);
        let sides = LOCKS.len() + usize::from(apart.is_some());
        let mut speeds = vec![Vec::new(); sides];
        for round in 0..self.slices.pairs {
            for side in turns(sides, round) {
                let load = self.load(pattern, threads, round);
                let speed = match LOCKS.get(side) {
                    None => apart.context("no side of threads apart")?.slice(&load, self.slices.slice),
                    Some(&lock) => {
                        self.drive.between_requests(|| variants::set_lock(lock));
                        let speed = self.drive.slice(&load, self.slices.slice);
                        self.drive.between_requests(|| variants::set_lock(Lock::Ours));
                        speed
                    }
                };
                speeds[side].push(speed?);
            }
        }
        Ok(speeds)
    }

    /// What goes into the model, of which an operation is a page. `apart` are the speeds of two
    /// threads with a disk each.
    fn inputs(
        &self,
        table: &Table,
        what: &str,
        pattern: Pattern,
        apart: &[f64],
        machine: &Machine,
    ) -> Result<Box<dyn model::Speeds>> {
        let apart = median(apart);
        let pages = (self.record / PAGE_BYTES as u64) as u32;
        match pattern {
            Pattern::ReadersAndWriters => {
                self.mixed([Pattern::RandomRead, Pattern::RandomWrite], Mix::ByThread, apart, machine)
            }
            Pattern::SequentialMix => {
                self.mixed([Pattern::Read, Pattern::Write], Mix::ByPages(pages), apart, machine)
            }
            Pattern::RandomMix => {
                self.mixed([Pattern::RandomRead, Pattern::RandomWrite], Mix::ByPages(pages), apart, machine)
            }
            _ => {
                let alone = table.rows.iter().find(|row| row.what == what && row.threads == 1);
                let alone = alone.and_then(|row| row.measured[OURS]).context("it was not run")?.median;
                self.alike(pattern, alone, apart, machine)
            }
        }
    }

    /// Reads only, which meet at the lock's line, or writes only, which have it one after the
    /// other.
    fn alike(
        &self,
        pattern: Pattern,
        alone: f64,
        apart: f64,
        machine: &Machine,
    ) -> Result<Box<dyn model::Speeds>> {
        let step = step_ns();
        let (held, visits) = if pattern.is_read() {
            (2.0 * step, 2.0)
        } else {
            let (held, slots) = self.held(pattern, machine)?;
            (held + slots * step, slots)
        };
        Ok(Box::new(Inputs {
            fine: KIB_A_PAGE * 1e9 / alone,
            held,
            visits,
            // No more than that of the fine lock.
            lock: 0.0,
            discipline: Discipline::InTurn,
            apart: apart / alone,
            at_most: None,
        }))
    }

    /// Reads and writes, each as it is by itself.
    fn mixed(
        &self,
        [read, write]: [Pattern; 2],
        mix: Mix,
        apart: f64,
        machine: &Machine,
    ) -> Result<Box<dyn model::Speeds>> {
        let alone = |pattern| -> Result<(f64, f64)> {
            let speeds: Result<Vec<f64>> = (0..self.slices.pairs)
                .map(|round| self.drive.slice(&self.load(pattern, 1, round), self.slices.slice))
                .collect();
            let (held, slots) = self.held(pattern, machine)?;
            Ok((KIB_A_PAGE * 1e9 / Summary::of(speeds?).median, held + slots * step_ns()))
        };
        let ((read, read_held), (write, write_held)) = (alone(read)?, alone(write)?);
        let mut of = Mixed { read, write, read_held, write_held, mix, apart: 1.0 };
        of.apart = apart / KIB_A_PAGE / model::Speeds::fine(&of, THREADS_APART);
        Ok(Box::new(of))
    }

    /// Of one thread, for each page: nanoseconds that a slot is held, and how many slots are
    /// locked.
    fn held(&self, pattern: Pattern, machine: &Machine) -> Result<(f64, f64)> {
        self.drive.profile(&self.load(pattern, 1, 0), self.slices.slice, machine.clock)
    }
}

/// Nanoseconds of one atomic step on a line that this CPU has.
fn step_ns() -> f64 {
    let line = AtomicU32::new(0);
    let rounds = (0..9).map(|_| {
        let begun = Instant::now();
        for _ in 0..STEPS {
            black_box(&line).fetch_add(1, Ordering::SeqCst);
        }
        begun.elapsed().max(Duration::from_nanos(1)).as_nanos() as f64 / f64::from(STEPS)
    });
    Summary::of(rounds).median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_was_published_can_be_run() {
        for figures in published::IOZONE.iter().chain(&published::FIO) {
            Pattern::named(figures.what).unwrap();
        }
        assert_eq!(COLUMNS[NEW], "bit spinlock");
        assert_eq!((LOCKS[OLD], LOCKS[NEW], LOCKS[OURS]), (Lock::Table, Lock::BitSpin, Lock::Ours));
    }

    #[test]
    fn the_shape_is_said_as_means() {
        let mut table = Table::new("t", Unit::KbSecond, Better::More, &["old", "new"]);
        table.add("a", 4, &[Some(1.0), Some(4.0)], &[vec![1.0; 3], vec![2.0; 3]]);
        table.add("b", 4, &[Some(1.0), Some(1.0)], &[vec![1.0; 3], vec![8.0; 3]]);
        let said = shape(&table).unwrap();
        assert!(
            said.contains("with 4 threads: new 2.00") && said.contains("with 4 threads new 4.00"),
            "{said}"
        );
        table.rows.clear();
        assert!(shape(&table).is_none());
    }
}
