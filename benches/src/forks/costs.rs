//! Cost of a fork compared with a disk: the first write of a page, and a read that falls through to
//! the base. The `instructions` benchmark covers rewrites.

use std::cell::Cell;
use std::hint::black_box;
use std::sync::Arc;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Device, Flags};
use freestone::null::{self, Null};
use freestone::ram::{Family, ForkConfig, Ram};
use freestone_report::{Report, Row, Summary, Target, Unit};

use super::{Bench, Image, family, wait_until_freed};
use crate::data::{Data, Order, Random, page_at, whole_pages};
use crate::measure::machine;
use crate::measure::{alternate, median, thread_clock};
use crate::options::Set;

/// Default data size, in bytes.
const BYTES: u64 = 128 << 20;
const ROUNDS: u32 = 21;
/// Number of pages that a leaf of the slot table covers. The first write to one of them allocates
/// the leaf.
const LEAF_PAGES: u64 = 512;

pub(super) fn run(bench: &Bench) -> Result<Vec<Report>> {
    let cpus = machine::allowed_cpus()?;
    machine::pin_to(cpus[0])?;
    let sets = bench.options.sets(&[Set::Fio, Set::Real]);
    let reports = sets.into_iter().map(|set| run_set(bench, set)).collect();
    machine::pin_to_any(&cpus)?;
    reports
}

fn run_set(bench: &Bench, set: Set) -> Result<Report> {
    let data = Data::open(set, bench.options.bytes(BYTES), bench.options)?;
    let pages = data.load()?;
    let image = Image::sparse(&bench.dir, "base", pages.len() as u64)?;
    std::fs::write(&image.0, &*pages)?;
    let mut rows = first_writes(bench, &image, &pages)?;
    rows.extend(fall_through_reads(bench, &image, &pages)?);
    Ok(Report::new("forks: costs", data.description, pages.len() as u64, "lz4")
        .note(format!(
            "First writes: 4 KiB, each page once, in random order, by one pinned thread; one page of every \
             leaf ({LEAF_PAGES} pages) was written before. Ordinary: the same writes to empty pages of a disk. \
             Rewriting: the same writes to pages with other content. CPU time of the thread."
        ))
        .note(
            "Falls through: random 4 KiB reads of an empty fork, minus the same reads of its base, by one \
             pinned thread. Leaf: the fork has every leaf, and the slot that is read is empty.",
        )
        .rows(rows))
}

// ---- first writes -------------------------------------------------------------------------------

/// Disk on which the slices of one side write.
enum Disk {
    /// A disk or fork that a rewind empties before each slice, and its family (disks and forks that
    /// share memory). The number is the family's number of layers without the discarded content.
    Empty(Family, Ram, u64),
    /// A disk that holds every page.
    Full(Ram),
}

impl Disk {
    /// Runs a slice and returns nanoseconds of CPU time per write.
    fn slice(&self, pages: &[u8], round: u64) -> Result<f64> {
        let count = (pages.len() / PAGE_BYTES) as u64;
        let write = |ram: &Ram, slot: u64, content: u32| {
            ram.write_at(slot * PAGE_BYTES as u64, page_at(pages, content), Flags::empty())
        };
        let order = Random::new(round).permutation(count);
        let ram = match self {
            Self::Full(ram) => ram,
            Self::Empty(family, ram, layers) => {
                ram.rewind()?;
                wait_until_freed(family, *layers)?;
                for slot in (0..count).step_by(LEAF_PAGES as usize) {
                    write(ram, slot, slot as u32)?;
                }
                ram
            }
        };
        let start = thread_clock();
        let mut written = 0;
        for slot in order.into_iter().filter(|slot| u64::from(*slot) % LEAF_PAGES != 0) {
            // Write the content of a distant page, another page in each round.
            let content = (u64::from(slot) + count / 2 + round) % count;
            write(ram, u64::from(slot), content as u32)?;
            written += 1;
        }
        Ok(thread_clock().saturating_sub(start).as_nanos() as f64 / f64::from(written))
    }
}

fn first_writes(bench: &Bench, image: &Image, pages: &[u8]) -> Result<Vec<Row>> {
    let empty = || -> Result<_> {
        let family = family()?;
        let ram = family.ram(pages.len() as u64)?;
        Ok(Disk::Empty(family, ram, 1))
    };
    let of_snapshot = || -> Result<_> {
        let family = family()?;
        let origin = filled(&family, pages)?;
        let fork = origin.snapshot()?.fork(&ForkConfig::default())?;
        // Three layers exist: origin, snapshot and fork, because the fork keeps its snapshot.
        drop(origin);
        let layers = family.stat().layers;
        Ok(Disk::Empty(family, fork, layers))
    };
    let of_file = || -> Result<_> {
        let family = family()?;
        let fork = family.fork(Arc::new(image.device()?), &ForkConfig::default())?;
        Ok(Disk::Empty(family, fork, 1))
    };
    let sides = [empty()?, Disk::Full(filled(&family()?, pages)?), of_snapshot()?, of_file()?];
    let mut times = sides.each_ref().map(|_| Vec::new());
    // Round 0 is a warm-up: it allocates memory that later rounds reuse.
    for round in 0..=u64::from(bench.options.rounds(ROUNDS, 2)) {
        let mut order = [0, 1, 2, 3];
        order.rotate_left(round as usize % 4);
        for side in order {
            let nanos = sides[side].slice(pages, round)?;
            if round > 0 {
                times[side].push(nanos);
            }
        }
    }
    let mut rows = Vec::new();
    for (side, fork) in [(2, "fork of a snapshot"), (3, "fork of a file")] {
        for (disk, of) in [(0, "an ordinary first write"), (1, "rewriting")] {
            let ratio = Summary::ratio(&times[side], &times[disk]);
            let row = Row::ratio(format!("first write, {fork} / {of}"), ratio)
                .part("fork ns", median(&times[side]))
                .part("disk ns", median(&times[disk]));
            // The first writes of fork and disk both allocate pool memory; a rewrite reuses its
            // own. So only the comparison of first writes has a target.
            let row = if disk == 0 { row.target(Target::AtMost(1.3)) } else { row };
            rows.push(row.withhold_if_unsteady());
        }
    }
    Ok(rows)
}

/// Creates a disk in the family and writes all pages to it.
fn filled(family: &Family, pages: &[u8]) -> Result<Ram> {
    let ram = family.ram(pages.len() as u64)?;
    for (number, page) in whole_pages(pages).enumerate() {
        ram.write_at((number * PAGE_BYTES) as u64, page, Flags::empty())?;
    }
    Ok(ram)
}

// ---- reads that fall through --------------------------------------------------------------------

fn fall_through_reads(bench: &Bench, image: &Image, pages: &[u8]) -> Result<Vec<Row>> {
    let count = (pages.len() / PAGE_BYTES) as u64;
    let family = family()?;
    let snapshot = filled(&family, pages)?.snapshot()?;
    // A base must be read-only.
    let null = Null::new(null::Config { read_only: true, ..null::Config::plain(pages.len() as u64, 4096) })?;
    let (null, file): (Arc<dyn Device>, Arc<dyn Device>) = (Arc::new(null), Arc::new(image.device()?));
    // Reading the whole file brings it into the page cache.
    let mut page = [0; PAGE_BYTES];
    for number in 0..count {
        file.read_at(number * PAGE_BYTES as u64, &mut page)?;
    }
    let fork = |base: &Arc<dyn Device>| -> Result<Ram> {
        Ok(family.fork(Arc::clone(base), &ForkConfig::default())?)
    };
    let mut rows = Vec::new();
    let of_snapshot = || snapshot.fork(&ForkConfig::default());
    let base: Arc<dyn Device> = Arc::new(snapshot.clone());
    rows.extend(reads(bench, "a RAM snapshot", &*base, [of_snapshot()?, of_snapshot()?], count)?);
    rows.extend(reads(bench, "a file in the page cache", &*file, [fork(&file)?, fork(&file)?], count)?);
    rows.extend(reads(bench, "a null device", &*null, [fork(&null)?, fork(&null)?], count)?);
    Ok(rows)
}

/// Measures reads of a base, of a fork without leaves, and of a fork with every leaf of the slot
/// table. Returns the rows that compare them.
fn reads(bench: &Bench, of: &str, base: &dyn Device, forks: [Ram; 2], count: u64) -> Result<Vec<Row>> {
    let page = PAGE_BYTES as u64;
    let [empty, leaves] = forks;
    for slot in (0..count).step_by(LEAF_PAGES as usize) {
        leaves.write_at(slot * page, &[1; PAGE_BYTES], Flags::empty())?;
    }
    // Only empty slots are read: the first slot of each leaf holds a page.
    let order = Order::new(5, 0, count as u32);
    let failed = Cell::new(None);
    let read = |device: &dyn Device, from: u64, ops: u64| {
        let mut into = [0; PAGE_BYTES];
        for slot in order.choices(from, ops) {
            let slot = u64::from(slot);
            let slot = if slot.is_multiple_of(LEAF_PAGES) { slot + 1 } else { slot };
            if let Err(error) = device.read_at(slot * page, black_box(&mut into)) {
                return failed.set(Some(error));
            }
        }
    };
    let times = alternate(
        bench.options.slices(),
        &mut [
            &mut |from, ops| read(base, from, ops),
            &mut |from, ops| read(&empty, from, ops),
            &mut |from, ops| read(&leaves, from, ops),
        ],
    );
    if let Some(error) = failed.get() {
        return Err(error.into());
    }
    let [below, empty, leaves] = &times[..] else { unreachable!("three sides") };
    let added_nanos =
        |fork: &[f64]| Summary::of(fork.iter().zip(&below.cpu).map(|(fork, below)| fork - below));
    Ok([("", empty), (", leaf", leaves)]
        .into_iter()
        .map(|(leaf, times)| {
            Row::new(
                format!("falls through to {of}{leaf}, more than the base"),
                Unit::Nanos,
                added_nanos(&times.cpu),
            )
            .target(Target::AtMost(200.0))
            .part("fork ns", median(&times.cpu))
            .part("base ns", median(&below.cpu))
        })
        .collect())
}
