//! Experiment 2: compression streams from a shared list, and one per CPU.

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone_benches::machine;
use freestone_benches::measure::{Slices, median};
use freestone_benches::options::Options;
use freestone_benches::setup::new_ram_with;
use freestone_core::variants::{self, Streams};
use freestone_report::Unit;

use super::slices;
use crate::load::disk::Disk;
use crate::load::ext4::{self, Ext4};
use crate::load::patterns::Pattern;
use crate::load::{Content, Drive, Load, available_bytes};
use crate::model::costs::{self, Machine};
use crate::model::simulate::Discipline;
use crate::model::{self, HalfReads, Inputs, predict};
use crate::report::words::counted;
use crate::results::TableRow;
use crate::results::published::{Figures, streams as published};
use crate::results::{Better, Experiment, LoadModel, Table, turns};

const ROUNDS: u32 = 7;
const SLICE_MS: u32 = 60;
/// Numbers of threads in the source. `FEW_THREADS` are for tests without published figures,
/// `SOME_THREADS` for those with lz4.
const ALL_THREADS: [usize; THREADS_MAX] = [1, 2, 3, 4, 5, 6, 7, 8, 9, THREADS_MAX];
const FEW_THREADS: [usize; 3] = [1, 2, 4];
const SOME_THREADS: [usize; 4] = [1, 2, 4, THREADS_MAX];
const THREADS_MAX: usize = 10;
/// Tests of iozone without published figures, which run as well.
const WITHOUT_FIGURES: [&str; 6] =
    ["re-read", "reverse read", "stride read", "random read", "pread", "fread"];
/// Size in bytes of the disk, which all threads share. `USED_PERCENT` is the part of the disk in
/// use by their areas.
const DISK_BYTES: u64 = 1 << 30;
const USED_PERCENT: u64 = 95;
/// Record size in bytes, which is multiplied by the number of threads.
const RECORD_BYTES: u64 = 8 << 10;
/// A load has collapsed if its speed is below this part of the speed with as many threads as CPUs.
const COLLAPSE: f64 = 0.5;

/// Number of threads with a disk each, for the model.
const THREADS_APART: usize = 2;
/// Streams of the old list, which limit the number of threads that compress at a time.
const LISTED: f64 = 4.0;
/// KiB per page. The tables are in KiB per second.
const KIB_A_PAGE: f64 = 4.0;
const PAGE: u64 = PAGE_BYTES as u64;

const OURS: usize = 2;
const STREAMS: [Streams; 3] = [Streams::ListOf4, Streams::ListOf8, Streams::Ours];
const COLUMNS: [&str; 3] = [published::COLUMNS[0], published::COLUMNS[1], "ours, one per CPU"];

/// A test of iozone, and the numbers of threads to run it with.
#[derive(Clone, Copy)]
struct Test {
    what: &'static str,
    threads: &'static [usize],
}

struct Bench<'a> {
    content: &'a Content,
    size: u64,
    /// Size of the areas of all threads together.
    used: u64,
    slices: Slices,
}

/// Runs every test with LZO, then some with lz4, and with `on_ext4` the source's tests on files.
pub fn run(on_ext4: bool, options: &Options) -> Result<Experiment> {
    let content = Content::new(options)?;
    let slices = slices(options, ROUNDS, SLICE_MS);
    let size = options.bytes(DISK_BYTES).min(available_bytes() / 2);
    let bench = Bench { content: &content, size, used: size / 100 * USED_PERCENT, slices };
    let measured = bench.run_all(on_ext4);
    variants::set_streams(Streams::Ours);
    let (tables, model) = measured?;
    let cpus = machine::allowed_cpus()?.len();
    let mut here = here(size, &content, cpus)?;
    if on_ext4 {
        here.push(format!(
            "iozone on ext4: {} fwrite is omitted, because its buffer is not aligned. Tests without figures \
             are omitted too.",
            ext4::HOW
        ));
    }
    Ok(Experiment {
        number: 2,
        title: "Streams per CPU",
        source: published::SOURCE.into(),
        here,
        words: past_the_cpus(&tables[0], cpus),
        tables,
        model,
    })
}

fn here(size: u64, content: &Content, cpus: usize) -> Result<Vec<String>> {
    let [lzo, lz4] = [Algorithm::Lzo, Algorithm::Lz4].map(|algorithm| content.compress_ns(algorithm));
    Ok(vec![
        format!(
            "The library's RAM disk with LZO, and for some numbers of threads with lz4 (\"iozone, lz4\", \
             beside the source's figures for LZO), {} MiB, of which the threads' areas take {USED_PERCENT} % \
             together; records of {} KiB times the number of threads. The column gives the source of the \
             streams, selected at run time in one build; all columns take turns on one disk. Content: {}. \
             Thread n is on CPU n modulo {cpus}.",
            size >> 20,
            RECORD_BYTES >> 10,
            content.description
        ),
        format!(
            "LZO is lzokay here. Its search is more thorough than that of the kernel's lzo1x_1 and takes \
             several times as long: the bare codec compresses a page in {:.1} us, with lz4 in {:.1} us. So a \
             write spends a smaller part of its time at the list here than in the source, and lz4 may be \
             closer to the source.",
            lzo? / 1000.0,
            lz4? / 1000.0
        ),
        "The lists work as in the kernel: one lock, the stream that was returned last is borrowed first, and a \
         thread that finds no stream sleeps. pwrite and pread equal a rewrite and a sequential read here, as \
         there is no file position. fwrite and fread go through a buffer of 4 KiB."
            .into(),
        "Omitted: the file system (--ext4 adds it). Reads take no stream, here and in the source, so \
         differences between their columns are measurement noise. This includes the source's reads with 5 and \
         7 threads. Tests without published figures are run with fewer numbers of threads. In mixed with 2 \
         threads, one of them only reads."
            .into(),
        format!(
            "The source's figures are for 4, 5, 7 and 10 threads; \"as many threads as CPUs\" is 4 there and \
             {cpus} here. With {} threads its size column is 0: the files were empty, so that row is not \
             compared.",
            published::NO_SIZE_THREADS
        ),
        "In the model, the old lock is that of the list, taken twice per page and held as long as a mutex. At \
         most 4 threads compress a page at a time, each for the time of the bare codec."
            .into(),
    ])
}

impl Bench<'_> {
    fn run_all(&self, on_ext4: bool) -> Result<(Vec<Table>, Vec<LoadModel>)> {
        let machine = costs::measure()?;
        let mut tables = Vec::new();
        let mut model = Vec::new();
        for (name, algorithm, tests) in [
            ("iozone", Algorithm::Lzo, all_tests()),
            ("iozone, lz4", Algorithm::Lz4, published_tests(&SOME_THREADS)),
        ] {
            let table = self.disk_table(name, algorithm, &tests)?;
            if let Some(machine) = &machine {
                model.extend(self.model(&table, algorithm, machine)?);
            }
            tables.push(table);
        }
        if on_ext4 {
            tables.push(self.file_table()?);
        }
        Ok((tables, model))
    }

    /// Runs tests on the disk itself. The threads' areas take `used` bytes together.
    fn disk_table(&self, name: &str, algorithm: Algorithm, tests: &[Test]) -> Result<Table> {
        // A disk has lists only if a list is selected while the disk is created.
        variants::set_streams(Streams::ListOf4);
        let drive = Drive::new(1, self.size, algorithm, self.content)?;
        let mut table = table(name, tests, &drive, |threads| self.used / threads as u64, self.slices)?;
        table.reasons = vec![(
            "mixed",
            "One of two threads only reads here, and a read takes no stream, so the threads never contend for \
             the list.",
        )];
        Ok(table)
    }

    /// Runs the tests with a file per thread. The files of the largest number of threads nearly
    /// fill the disk.
    fn file_table(&self) -> Result<Table> {
        let mut tests = published_tests(&ALL_THREADS);
        // The C library's buffer is not aligned for direct I/O.
        tests.retain(|test| test.what != "fwrite");
        // A disk has lists only if a list is selected while the disk is created.
        variants::set_streams(Streams::ListOf4);
        let ext4 = Ext4::new(new_ram_with(ext4::disk_bytes(self.used), Algorithm::Lzo)?)?;
        let area = self.used / THREADS_MAX as u64 / PAGE * PAGE;
        let drive = Drive::of_files(&ext4, THREADS_MAX, area, self.content)?;
        let mut table = table("iozone on ext4", &tests, &drive, |_| area, self.slices)?;
        table.reasons = tests.iter().map(|test| (test.what, ext4::REASON)).collect();
        Ok(table)
    }
}

fn published_tests(threads: &'static [usize]) -> Vec<Test> {
    published::FOUR_THREADS.iter().map(|figures| Test { what: figures.what, threads }).collect()
}

fn all_tests() -> Vec<Test> {
    let others = WITHOUT_FIGURES.iter().map(|what| Test { what, threads: &FEW_THREADS });
    published_tests(&ALL_THREADS).into_iter().chain(others).collect()
}

/// Runs every test with its numbers of threads. `area_of` gives the maximum size of an area by
/// number of threads.
fn table<D: Disk>(
    name: &str,
    tests: &[Test],
    drive: &Drive<'_, D>,
    area_of: impl Fn(usize) -> u64,
    slices: Slices,
) -> Result<Table> {
    let mut table = Table::new(name, Unit::KbSecond, Better::More, &COLUMNS);
    (table.old, table.new, table.ours) = (0, OURS, OURS);
    let all_figures = || published::FOUR_THREADS.iter().chain(&published::PAST_THE_CPUS);
    for &Test { what, threads } in tests {
        let pattern = Pattern::named(what)?;
        drive.prepare(pattern)?;
        for &threads in threads.iter().filter(|threads| **threads >= pattern.threads_min()) {
            let rounds = row(drive, pattern, threads, area_of(threads), slices, &STREAMS)?;
            let figures = all_figures().find(|figures| figures.what == what && figures.threads == threads);
            table.add(what, threads, &figures.map(Figures::published).unwrap_or_default(), &rounds);
        }
    }
    Ok(table)
}

/// Returns the speeds by column and round.
fn row<D: Disk>(
    drive: &Drive<'_, D>,
    pattern: Pattern,
    threads: usize,
    room: u64,
    slices: Slices,
    columns: &[Streams],
) -> Result<Vec<Vec<f64>>> {
    let record = RECORD_BYTES * threads as u64;
    let area = room / record * record;
    let mut speeds = vec![Vec::new(); columns.len()];
    for round in 0..slices.pairs {
        for column in turns(columns.len(), round) {
            drive.between_requests(|| variants::set_streams(columns[column]));
            let load = Load { pattern, threads, record, area, shared: false, seed: u64::from(round) };
            speeds[column].push(drive.slice(&load, slices.slice)?);
        }
    }
    Ok(speeds)
}

impl Bench<'_> {
    /// Models the loads that write: each page borrows a stream and returns it. An operation is a
    /// page.
    fn model(&self, table: &Table, algorithm: Algorithm, machine: &Machine) -> Result<Vec<LoadModel>> {
        let apart = Drive::new(THREADS_APART, self.size / THREADS_APART as u64, algorithm, self.content)?;
        let compress = self.content.compress_ns(algorithm)?;
        let alone = |what: &str| -> Result<f64> {
            let row = table.rows.iter().find(|row| row.what == what && row.threads == 1).context("no row")?;
            Ok(row.measured[OURS].context("the load was not run with one thread")?.median)
        };
        let inputs = |what: &str, pattern| -> Result<Inputs> {
            let room = self.used / THREADS_APART as u64;
            let speeds = row(&apart, pattern, THREADS_APART, room, self.slices, &[Streams::Ours])?;
            let alone = alone(what)?;
            Ok(Inputs {
                fine: KIB_A_PAGE * 1e9 / alone,
                hold_time: 2.0 * machine.mutex,
                visits: 2.0,
                // Borrowing from the idle list costs no more than locking the CPU's own stream.
                lock: 0.0,
                discipline: Discipline::Parking,
                apart: median(&speeds[0]) / alone,
                at_most: Some(LISTED * 1e9 / compress),
            })
        };
        let mut models = Vec::new();
        for Figures { what, .. } in &published::FOUR_THREADS {
            let pattern = Pattern::named(what)?;
            apart.prepare(pattern)?;
            let load: Box<dyn model::Speeds> = match pattern {
                Pattern::Read => continue,
                Pattern::ReadersAndWriters => Box::new(HalfReads {
                    read: KIB_A_PAGE * 1e9 / alone("read")?,
                    writes: inputs("random write", Pattern::RandomWrite)?,
                }),
                _ => Box::new(inputs(what, pattern)?),
            };
            models.push(predict(table, what, load.as_ref(), machine, KIB_A_PAGE));
        }
        Ok(models)
    }
}

/// Describes the loads with more threads than CPUs.
fn past_the_cpus(table: &Table, cpus: usize) -> Vec<String> {
    let mut words = Vec::new();
    let (mut least, mut collapsed): (Option<(f64, &TableRow)>, Vec<String>) = (None, Vec::new());
    for full in table.rows.iter().filter(|row| row.threads == cpus.max(2)) {
        let Some(at_cpus) = full.measured[OURS].map(|speed| speed.median) else { continue };
        for row in table.rows.iter().filter(|row| row.what == full.what && row.threads > full.threads) {
            let Some(speed) = row.measured[OURS] else { continue };
            let part = speed.median / at_cpus;
            if least.is_none_or(|(least, _)| part < least) {
                least = Some((part, row));
            }
            if part < COLLAPSE {
                collapsed.push(format!("{} with {} threads {part:.2}", row.what, row.threads));
            }
        }
    }
    let cpus = counted(cpus, "CPU");
    if let Some((part, row)) = least {
        let threads = row.threads;
        words.push(format!(
            "Past {cpus} one stream a CPU does at the least {part:.2} of what it does with as many threads as CPUs ({}, {threads} threads).",
            row.what
        ));
    }
    if !collapsed.is_empty() {
        words.push(format!("It collapses, to less than {COLLAPSE} of that: {}.", collapsed.join(", ")));
    }
    let no_size = |row: &&TableRow| row.threads == published::NO_SIZE_THREADS;
    let published_rows = table.rows.iter().filter(|row| row.threads > 4 && row.published[OURS].is_some());
    for row in published_rows.filter(|row| !no_size(row)) {
        let (Some(there), Some(here)) = (table.published_ratio(row, OURS), row.steady_ratio(OURS)) else {
            continue;
        };
        words.push(format!(
            "{} with {} threads: one per CPU over a list of 4 was {there:.2} there, on 4 CPUs, and is {here:.2} here, on {cpus}.",
            row.what, row.threads
        ));
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_published_load_can_be_run() {
        for figures in published::FOUR_THREADS.iter().chain(&published::PAST_THE_CPUS) {
            Pattern::named(figures.what).unwrap();
            assert!(figures.threads <= THREADS_MAX);
        }
        for test in all_tests().into_iter().chain(published_tests(&SOME_THREADS)) {
            Pattern::named(test.what).unwrap();
        }
        // The model uses the rows with one thread.
        assert!(FEW_THREADS[0] == 1 && SOME_THREADS[0] == 1);
    }

    #[test]
    fn collapse_is_reported() {
        let mut table = Table::new("t", Unit::KbSecond, Better::More, &COLUMNS);
        let add = |table: &mut Table, threads, published: &[Option<f64>], ours: f64| {
            table.add("rewrite", threads, published, &[vec![100.0; 3], vec![100.0; 3], vec![ours; 3]]);
        };
        add(&mut table, 2, &[], 200.0);
        add(&mut table, 3, &[], 180.0);
        let words = past_the_cpus(&table, 2);
        assert!(words.len() == 1 && words[0].contains("0.90") && words[0].contains("3 threads"), "{words:?}");
        add(&mut table, 7, &[Some(10.0), None, Some(1.0)], 20.0);
        let words = past_the_cpus(&table, 2);
        assert!(words[0].contains("0.10") && words[1].contains("rewrite with 7 threads 0.10"), "{words:?}");
        assert!(words[2].contains("was 0.10 there") && words[2].contains("is 0.20 here"), "{words:?}");
        add(&mut table, published::NO_SIZE_THREADS, &[Some(10.0), None, Some(1.0)], 20.0);
        let words = past_the_cpus(&table, 2);
        assert!(words[1].contains("rewrite with 10 threads 0.10"), "{words:?}");
        assert_eq!(words.len(), 3, "files of no size are compared with nothing: {words:?}");
        assert!(past_the_cpus(&Table::new("t", Unit::KbSecond, Better::More, &COLUMNS), 2).is_empty());
    }
}
