//! Experiment 2: compression streams from a shared list, and one a CPU.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::codec::{Algorithm, Params, Scratch, Streams as Codec};
use freestone_benches::data::whole_pages;
use freestone_benches::machine;
use freestone_benches::measure::{Slices, median};
use freestone_benches::options::Options;
use freestone_benches::setup::new_ram;
use freestone_core::variants::{self, Streams};
use freestone_report::{Summary, Unit};

use crate::costs::{self, Machine};
use crate::disk::Disk;
use crate::drive::{Content, Drive, Load, available_bytes};
use crate::experiment::{Better, Experiment, Modelled, Table, turns};
use crate::ext4::{self, Ext4};
use crate::model::{self, HalfReads, Inputs, predict};
use crate::patterns::Pattern;
use crate::published::{Figures, streams as published};
use crate::simulate::Discipline;
use crate::words::counted;
use crate::{experiment::TableRow, slices};

const ROUNDS: u32 = 7;
const SLICE_MS: u32 = 70;
const THREADS_MAX: usize = 10;
/// The disk, which the threads' areas share, and how much of it they take.
const DISK_BYTES: u64 = 1 << 30;
const USED_PERCENT: u64 = 95;
/// A record is so long for each thread.
const RECORD_BYTES: u64 = 8 << 10;
/// Below this part of what as many threads as CPUs do, more threads have made it collapse.
const COLLAPSE: f64 = 0.5;

/// As many threads have a disk each, for the model.
const THREADS_APART: usize = 2;
/// Streams of the old list: so many threads compress at a time.
const LISTED: f64 = 4.0;
/// A unit of the table is a KiB: a page a second is four of them.
const KIB_A_PAGE: f64 = 4.0;
const PAGE: u64 = PAGE_BYTES as u64;

const OURS: usize = 2;
/// The columns.
const STREAMS: [Streams; 3] = [Streams::ListOf4, Streams::ListOf8, Streams::Ours];
const COLUMNS: [&str; 3] = [published::COLUMNS[0], published::COLUMNS[1], "ours, one per CPU"];

/// Runs every test with 1 to 10 threads and, where `on_ext4`, once more on files.
pub fn run(on_ext4: bool, options: &Options) -> Result<Experiment> {
    let content = Content::new(options)?;
    let size = options.bytes(DISK_BYTES).min(available_bytes() / 2);
    let slices = slices(options, ROUNDS, SLICE_MS);
    let used = size / 100 * USED_PERCENT;
    let measured = of_disk(size, used, &content, slices).and_then(|table| {
        let files = on_ext4.then(|| of_files(used, &content, slices)).transpose()?;
        Ok((table, files))
    });
    variants::set_streams(Streams::Ours);
    let (table, files) = measured?;
    let model = match costs::measure()? {
        Some(machine) => model(&table, &content, (size, used), slices, &machine)?,
        None => Vec::new(),
    };
    let cpus = machine::allowed_cpus()?.len();
    let mut here = here(size, &content.description, cpus);
    if files.is_some() {
        here.push(format!("iozone on ext4: {} fwrite is left out: its buffer is not aligned.", ext4::HOW));
    }
    Ok(Experiment {
        number: 2,
        title: "Streams per CPU",
        source: published::SOURCE.into(),
        here,
        words: past_the_cpus(&table, cpus),
        tables: [Some(table), files].into_iter().flatten().collect(),
        model,
    })
}

fn here(size: u64, content: &str, cpus: usize) -> Vec<String> {
    vec![
            format!(
                "The library's RAM disk with lz4, {} MiB, of which the threads' areas take {USED_PERCENT} % together; records of {} KiB times the \
                 number of threads. Streams come from where the column says, chosen at run time in one build; all columns take turns on one disk. \
                 Content: {}. Thread n is on CPU n modulo {cpus}.",
                size >> 20,
                RECORD_BYTES >> 10,
                content
            ),
            "The lists are as they were in the kernel: one lock, the stream that came back last goes first, who finds none sleeps. pwrite is a rewrite \
             in order here; fwrite is one through a buffer of 4 KiB."
                .into(),
            "Left out: the file system (--ext4 adds it), and LZO. Reads take no stream, with lz4 as with LZO: how far their columns are apart is \
             what the measurement cannot tell, here as there. In mixed with 2 threads one of them only reads."
                .into(),
            "The model's old lock is the list's, taken twice for a page and held as long as a mutex is, and no more than 4 threads compress a page at a \
             time, each for as long as the bare codec takes."
                .into(),
    ]
}

/// The tests on the disk itself, of which the threads' areas take `used` bytes together.
fn of_disk(size: u64, used: u64, content: &Content, slices: Slices) -> Result<Table> {
    // The lists are made with the disk's streams, where one of them is chosen at that time.
    variants::set_streams(Streams::ListOf4);
    let drive = Drive::new(1, size, content)?;
    let mut table =
        table("iozone", &published::FOUR_THREADS, &drive, |threads| used / threads as u64, slices)?;
    table.reasons = vec![(
        "mixed",
        "Of two threads one only reads here, and a read takes no stream: nobody meets the other one at the list.",
    )];
    Ok(table)
}

/// The tests with a file for each thread. As many as there can be nearly fill the disk.
fn of_files(used: u64, content: &Content, slices: Slices) -> Result<Table> {
    // The C library's buffer is not aligned as direct I/O wants it.
    let aligned = |figures: &&Figures<3>| figures.what != "fwrite";
    let figures: Vec<_> = published::FOUR_THREADS.iter().filter(aligned).copied().collect();
    // As in `of_disk`.
    variants::set_streams(Streams::ListOf4);
    let ext4 = Ext4::new(new_ram(ext4::disk_bytes(used))?)?;
    let area = used / THREADS_MAX as u64 / PAGE * PAGE;
    let drive = Drive::of_files(&ext4, THREADS_MAX, area, content)?;
    let mut table = table("iozone on ext4", &figures, &drive, |_| area, slices)?;
    table.reasons = figures.iter().map(|figures| (figures.what, ext4::REASON)).collect();
    Ok(table)
}

/// Every load with every number of threads; an area has `area_of` their number bytes at the most.
fn table<D: Disk>(
    name: &str,
    loads: &[Figures<3>],
    drive: &Drive<'_, D>,
    area_of: impl Fn(usize) -> u64,
    slices: Slices,
) -> Result<Table> {
    let mut table = Table::new(name, Unit::KbSecond, Better::More, &COLUMNS);
    (table.old, table.new, table.ours) = (0, OURS, OURS);
    let all = || published::FOUR_THREADS.iter().chain(&published::PAST_THE_CPUS);
    for Figures { what, .. } in loads {
        let pattern = pattern_of(what)?;
        drive.prepare(pattern)?;
        for threads in pattern.threads_min()..=THREADS_MAX {
            let rounds = row(drive, pattern, threads, area_of(threads), slices, &STREAMS)?;
            let figures = all().find(|figures| figures.what == *what && figures.threads == threads);
            table.add(*what, threads, &figures.map(Figures::published).unwrap_or_default(), &rounds);
        }
    }
    Ok(table)
}

/// Speeds by column and round.
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

/// The loads that write: each page takes a stream and gives it back. An operation is a page.
fn model(
    table: &Table,
    content: &Content,
    (size, used): (u64, u64),
    slices: Slices,
    machine: &Machine,
) -> Result<Vec<Modelled>> {
    let apart = Drive::new(THREADS_APART, size / THREADS_APART as u64, content)?;
    let compress = compress_ns(content)?;
    let alone = |what: &str| -> Result<f64> {
        let row = table.rows.iter().find(|row| row.what == what && row.threads == 1).context("no row")?;
        Ok(row.measured[OURS].context("it was not run")?.median)
    };
    let inputs = |what: &str, pattern| -> Result<Inputs> {
        let room = used / THREADS_APART as u64;
        let speeds = row(&apart, pattern, THREADS_APART, room, slices, &[Streams::Ours])?;
        let alone = alone(what)?;
        Ok(Inputs {
            fine: KIB_A_PAGE * 1e9 / alone,
            held: 2.0 * machine.mutex,
            visits: 2.0,
            // No more than that of the CPU's own stream.
            lock: 0.0,
            discipline: Discipline::Parking,
            apart: median(&speeds[0]) / alone,
            at_most: Some(LISTED * 1e9 / compress),
        })
    };
    let mut modelled = Vec::new();
    for Figures { what, .. } in &published::FOUR_THREADS {
        let pattern = pattern_of(what)?;
        apart.prepare(pattern)?;
        let load: Box<dyn model::Speeds> = match pattern {
            Pattern::Read => continue,
            Pattern::ReadersAndWriters => Box::new(HalfReads {
                read: KIB_A_PAGE * 1e9 / alone("read")?,
                writes: inputs("random write", Pattern::RandomWrite)?,
            }),
            _ => Box::new(inputs(what, pattern)?),
        };
        modelled.push(predict(table, what, load.as_ref(), machine, KIB_A_PAGE));
    }
    Ok(modelled)
}

/// Nanoseconds in which the bare codec compresses a page.
fn compress_ns(content: &Content) -> Result<f64> {
    let codec = Codec::new(Algorithm::Lz4, &Params::default())?;
    let mut scratch = Scratch::new();
    let rounds = (0..3).map(|_| {
        let begun = Instant::now();
        let mut pages = 0_u32;
        for page in whole_pages(content.pages()) {
            black_box(codec.compress(black_box(page), &mut scratch));
            pages += 1;
        }
        begun.elapsed().as_nanos() as f64 / f64::from(pages)
    });
    Ok(Summary::of(rounds).median)
}

/// What a test of iozone does.
fn pattern_of(what: &str) -> Result<Pattern> {
    let known = match what {
        "initial write" => Some(Pattern::InitialWrite),
        "rewrite" | "pwrite" => Some(Pattern::Write),
        "read" => Some(Pattern::Read),
        "random write" => Some(Pattern::RandomWrite),
        "mixed" => Some(Pattern::ReadersAndWriters),
        "fwrite" => Some(Pattern::BufferedWrite),
        _ => None,
    };
    known.with_context(|| format!("nobody knows how to run \"{what}\""))
}

/// What becomes of each load where there are more threads than CPUs.
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
    for row in table.rows.iter().filter(|row| row.threads > 4 && row.published[OURS].is_some()) {
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
    fn all_that_was_published_can_be_run() {
        for figures in published::FOUR_THREADS.iter().chain(&published::PAST_THE_CPUS) {
            pattern_of(figures.what).unwrap();
            assert!(figures.threads <= THREADS_MAX);
        }
        assert!(pattern_of("stride read").is_err());
    }

    #[test]
    fn a_collapse_is_said() {
        let mut table = Table::new("t", Unit::KbSecond, Better::More, &COLUMNS);
        let add = |table: &mut Table, threads, published: &[Option<f64>], ours: f64| {
            table.add("rewrite", threads, published, &[vec![100.0; 3], vec![100.0; 3], vec![ours; 3]]);
        };
        add(&mut table, 2, &[], 200.0);
        add(&mut table, 3, &[], 180.0);
        let words = past_the_cpus(&table, 2);
        assert!(words.len() == 1 && words[0].contains("0.90") && words[0].contains("3 threads"), "{words:?}");
        add(&mut table, 10, &[Some(10.0), None, Some(1.0)], 20.0);
        let words = past_the_cpus(&table, 2);
        assert!(words[0].contains("0.10") && words[1].contains("rewrite with 10 threads 0.10"), "{words:?}");
        assert!(words[2].contains("was 0.10 there") && words[2].contains("is 0.20 here"), "{words:?}");
        assert!(past_the_cpus(&Table::new("t", Unit::KbSecond, Better::More, &COLUMNS), 2).is_empty());
    }
}
