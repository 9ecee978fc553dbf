//! Experiment 1: one lock around the table of a RAM disk, and four kinds of locks per entry, beside
//! the product's.

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

use super::slices;
use crate::load::disk::Disk;
use crate::load::ext4::{self, Ext4};
use crate::load::patterns::Pattern;
use crate::load::{Content, Drive, Load, available_bytes};
use crate::model::costs::{self, Machine};
use crate::model::shared::Mix;
use crate::model::simulate::Discipline;
use crate::model::{self, Inputs, MixedInputs, predict};
use crate::results::published::{Figures, locks as published};
use crate::results::{Better, Experiment, LoadModel, Table, turns};

const ROUNDS: u32 = 9;
const SLICE_MS: u32 = 50;
/// Numbers of threads. The source published figures for the last number only.
const THREADS: [usize; 3] = [1, 2, 4];
/// Number of threads with a disk each, for the model.
const THREADS_APART: usize = 2;
/// iozone's record size, and its file size per thread.
const RECORD_BYTES: u64 = 16 << 10;
const AREA_BYTES: u64 = 200 << 20;
/// fio's device size and block size.
const DEVICE_BYTES: u64 = 10 << 20;
const BLOCK_BYTES: u64 = 32 << 10;
/// Seed of fio's random numbers, which the source fixed.
const FIO_SEED: u64 = 1;
/// KiB per page. The tables are in KiB per second.
const KIB_A_PAGE: f64 = 4.0;
/// Steps of the loop that measures an atomic operation.
const STEPS: u32 = 1 << 20;

const OLD: usize = 0;
/// Column of the lock that the source chose.
const NEW: usize = 4;
const OURS: usize = 5;
/// Locks of the columns. The last one is the product's.
const LOCKS: [Lock; 6] = [Lock::Table, Lock::Cas, Lock::Spin, Lock::ReadWrite, Lock::BitSpin, Lock::Ours];
const COLUMNS: [&str; 6] = {
    let [old, cas, spin, read_write, bit] = published::COLUMNS;
    [old, cas, spin, read_write, bit, "ours"]
};

struct Bench<'a, D> {
    drive: &'a Drive<'a, D>,
    /// A disk for each of two threads, for the model.
    apart: Option<&'a Drive<'a>>,
    record: u64,
    area: u64,
    shared: bool,
    /// Fixed seed, or None if each round has its own.
    seed: Option<u64>,
    slices: Slices,
    machine: Option<&'a Machine>,
}

/// Runs iozone's tests, then fio's jobs, and with `on_ext4` iozone's tests on files.
pub fn run(on_ext4: bool, options: &Options) -> Result<Experiment> {
    let machine = costs::measure()?;
    let content = Content::new(options)?;
    let slices = slices(options, ROUNDS, SLICE_MS);
    let threads_max = THREADS[THREADS.len() - 1];
    // Use half of the available memory for the shared disk and the separate disks, assuming
    // incompressible data.
    let room = available_bytes() / 2 / (threads_max + THREADS_APART) as u64;
    let area = options.bytes(AREA_BYTES).min(room) / RECORD_BYTES * RECORD_BYTES;
    // A disk with the areas of all threads, and a disk for each of two threads.
    let iozone_table = |name: &str, algorithm| -> Result<(Table, Vec<LoadModel>)> {
        let drive = Drive::new(1, threads_max as u64 * area, algorithm, &content)?;
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
    let (iozone, mut model) = iozone_table("iozone", Algorithm::Lzo)?;
    let (with_lz4, lz4_model) = iozone_table("iozone, lz4", Algorithm::Lz4)?;
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
        tables.push(file_table(threads_max, area, &content, slices)?);
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

/// Runs iozone's tests with a file per thread.
fn file_table(threads: usize, area: u64, content: &Content, slices: Slices) -> Result<Table> {
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
            "The library's RAM disk with LZO, and again with lz4 (\"iozone, lz4\", beside the source's figures \
             for LZO). The lock of a slot is selected at run time in one build; all columns pay for the \
             selection and take turns on one disk. Content: {}. Thread n is on CPU n modulo {cpus}. KB/s of \
             all threads together.",
            content.description
        ),
        format!(
            "LZO is lzokay here. Its search is more thorough than that of the kernel's lzo1x_1 and takes \
             several times as long: the bare codec compresses a page in {:.1} us, with lz4 in {:.1} us. So a \
             write spends a smaller part of its time at the lock here than in the source, and lz4 may be \
             closer to the source.",
            lzo? / 1000.0,
            lz4? / 1000.0
        ),
        format!(
            "iozone's tests: {} KiB records, an area of {} MiB per thread, emptied before each initial write, \
             which ends when the first thread has finished. pwrite and pread equal a rewrite and a sequential \
             read here, as there is no file position. fio's jobs: {} KiB blocks, all jobs on one device of {} \
             MiB, for a fixed time instead of 3000 loops; reads and writes together.",
            RECORD_BYTES >> 10,
            area >> 20,
            BLOCK_BYTES >> 10,
            DEVICE_BYTES >> 20
        ),
        "Readers share the two read-write locks, as in the kernel. There a reader held the table's lock while \
         it decompressed, and a writer while it replaced the entry; it is the same here. \"CAS\" and \"bit \
         spinlock\" are a bit in the slot's word. The other two locks of an entry are in a separate array, on \
         another cache line; in the kernel they were in the entry. A spinning thread yields its CPU after 64 \
         tries, because the holder may be preempted; the kernel's holders are not."
            .into(),
        "Under every lock, including the old one, a read decompresses, and a rewrite copies the object, \
         compressed before, over the old object if both have the same size class. The kernel's reads did the \
         same. Its writes copied to a new location first, and held the lock while they freed the old object \
         and recorded the new one. So a rewrite holds a lock here for the copy of an object as well. Two \
         threads rarely need the same entry, so this makes only the old lock look worse than it was. An \
         initial write copies before it takes the lock, as in the kernel."
            .into(),
        "Omitted: the file system (--ext4 adds it), the block layer, and the kernel's own cost of a system \
         call."
            .into(),
        "In the model, a reader's cost of the old lock is two atomic operations on its cache line and the \
         transfer of the line between CPUs. A writer holds it for the measured hold time of a slot. With reads \
         and writes together, both hold it for that time, readers share it, and waiters do not queue. The old \
         lock replaces the slot's own lock, which costs as many atomic operations."
            .into(),
    ])
}

/// Describes the means of the columns relative to the old lock, in the source and on this machine.
fn shape(table: &Table) -> Option<String> {
    let means = |threads: usize, ratio: &dyn Fn(usize, usize) -> Option<f64>| {
        let rows: Vec<usize> =
            (0..table.rows.len()).filter(|row| table.rows[*row].threads == threads).collect();
        let mean = |column: usize| {
            let logs: Option<Vec<f64>> = rows.iter().map(|row| Some(ratio(*row, column)?.ln())).collect();
            let logs = logs.filter(|logs| !logs.is_empty())?;
            Some((logs.iter().sum::<f64>() / logs.len() as f64).exp())
        };
        let means_by_column = (1..table.columns.len())
            .filter_map(|column| Some(format!("{} {:.2}", table.columns[column], mean(column)?)));
        means_by_column.collect::<Vec<_>>().join(", ")
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

    /// Runs every load with every number of threads. On a machine with two CPUs, also models the
    /// loads that fit the model.
    fn table(&self, name: &str, figures: &[Figures<5>]) -> Result<(Table, Vec<LoadModel>)> {
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
        let models = self.machine.map(|machine| {
            inputs.iter().map(|(of, what)| predict(&table, what, of.as_ref(), machine, KIB_A_PAGE)).collect()
        });
        Ok((table, models.unwrap_or_default()))
    }

    /// Returns the speeds by column and round. For loads with a model, the speeds of threads with a
    /// disk each follow the columns.
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

    /// Returns the inputs of the model, in which an operation is a page. `apart` are the speeds of
    /// two threads with a disk each.
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
                self.mixed_inputs([Pattern::RandomRead, Pattern::RandomWrite], Mix::ByThread, apart, machine)
            }
            Pattern::SequentialMix => {
                self.mixed_inputs([Pattern::Read, Pattern::Write], Mix::ByPages(pages), apart, machine)
            }
            Pattern::RandomMix => self.mixed_inputs(
                [Pattern::RandomRead, Pattern::RandomWrite],
                Mix::ByPages(pages),
                apart,
                machine,
            ),
            _ => {
                let alone = table.rows.iter().find(|row| row.what == what && row.threads == 1);
                let alone = alone
                    .and_then(|row| row.measured[OURS])
                    .context("the load was not run with one thread")?
                    .median;
                self.uniform_inputs(pattern, alone, apart, machine)
            }
        }
    }

    /// Inputs for loads of reads only, which contend for the cache line of the lock, or of writes
    /// only, which hold the lock one at a time.
    fn uniform_inputs(
        &self,
        pattern: Pattern,
        alone: f64,
        apart: f64,
        machine: &Machine,
    ) -> Result<Box<dyn model::Speeds>> {
        let step = step_ns();
        let (hold_time, visits) = if pattern.is_read() {
            (2.0 * step, 2.0)
        } else {
            let (hold_time, slots) = self.hold_time(pattern, machine)?;
            (hold_time + slots * step, slots)
        };
        Ok(Box::new(Inputs {
            fine: KIB_A_PAGE * 1e9 / alone,
            hold_time,
            visits,
            // Locking the free old lock costs no more than locking the fine lock.
            lock: 0.0,
            discipline: Discipline::InTurn,
            apart: apart / alone,
            at_most: None,
        }))
    }

    /// Inputs for loads of reads and writes, from measurements of each kind alone.
    fn mixed_inputs(
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
            let (hold_time, slots) = self.hold_time(pattern, machine)?;
            Ok((KIB_A_PAGE * 1e9 / Summary::of(speeds?).median, hold_time + slots * step_ns()))
        };
        let ((read, read_held), (write, write_held)) = (alone(read)?, alone(write)?);
        let mut of = MixedInputs { read, write, read_held, write_held, mix, apart: 1.0 };
        of.apart = apart / KIB_A_PAGE / model::Speeds::fine(&of, THREADS_APART);
        Ok(Box::new(of))
    }

    /// Profiles a single thread. Returns the nanoseconds per page for which slots are locked, and
    /// the locked slots per page.
    fn hold_time(&self, pattern: Pattern, machine: &Machine) -> Result<(f64, f64)> {
        self.drive.profile(&self.load(pattern, 1, 0), self.slices.slice, machine.clock)
    }
}

/// Returns the nanoseconds of an atomic operation on a cache line that this CPU owns.
fn step_ns() -> f64 {
    let line = AtomicU32::new(0);
    let rounds = (0..9).map(|_| {
        let started = Instant::now();
        for _ in 0..STEPS {
            black_box(&line).fetch_add(1, Ordering::SeqCst);
        }
        started.elapsed().max(Duration::from_nanos(1)).as_nanos() as f64 / f64::from(STEPS)
    });
    Summary::of(rounds).median
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_load_can_be_run() {
        for figures in published::IOZONE.iter().chain(&published::FIO) {
            Pattern::named(figures.what).unwrap();
        }
        assert_eq!(COLUMNS[NEW], "bit spinlock");
        assert_eq!((LOCKS[OLD], LOCKS[NEW], LOCKS[OURS]), (Lock::Table, Lock::BitSpin, Lock::Ours));
    }

    #[test]
    fn shape_reports_means_of_loads() {
        let mut table = Table::new("t", Unit::KbSecond, Better::More, &["old", "new"]);
        table.add("a", 4, &[Some(1.0), Some(4.0)], &[vec![1.0; 3], vec![2.0; 3]]);
        table.add("b", 4, &[Some(1.0), Some(1.0)], &[vec![1.0; 3], vec![8.0; 3]]);
        let text = shape(&table).unwrap();
        assert!(
            text.contains("with 4 threads: new 2.00") && text.contains("with 4 threads new 4.00"),
            "{text}"
        );
        table.rows.clear();
        assert!(shape(&table).is_none());
    }
}
