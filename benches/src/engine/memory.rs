//! `memory` benchmark: overhead of a filled disk over its compressed bytes, memory released by
//! discards, and accuracy of the disk's own statistics.

use std::time::Instant;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Flags, IoBuf};
use freestone::ram::Ram;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use std::os::unix::fs::FileExt;

use super::setup::new_ram;
use super::zram_device::ZramDevice;
use crate::data::{Data, Random};
use crate::measure::machine;
use crate::options::{Options, Set};

/// Default data size, in bytes.
const BYTES: u64 = 2560 << 20;
/// Number of times that every page is rewritten.
const ROUNDS: usize = 3;
/// Minimum data size for targets. With less data, constant costs (streams, first arrays) dominate.
const JUDGED_BYTES: u64 = 1 << 30;

/// Runs the benchmark on every selected data set and returns a report for each.
pub fn run(options: &Options) -> Result<Vec<Report>> {
    options.sets(&[Set::Real]).into_iter().map(|set| run_set(set, options)).collect()
}

/// Order of the rewrites. Each round writes every slot once and uses every page's content once.
struct Orders {
    slots: [Vec<u32>; ROUNDS],
    contents: Vec<u32>,
}

impl Orders {
    fn new(pages: u64) -> Self {
        let slots = std::array::from_fn(|round| Random::new(10 + round as u64).permutation(pages));
        Self { slots, contents: Random::new(2).permutation(pages) }
    }

    /// Returns slot and content of each rewrite of a round.
    fn round(&self, round: usize) -> impl Iterator<Item = (u64, u64)> {
        let contents = self.contents.iter().cycle().skip(self.contents.len() * round / ROUNDS);
        self.slots[round].iter().zip(contents).map(|(&slot, &content)| (u64::from(slot), u64::from(content)))
    }
}

/// The disk's own memory statistics at one moment, and the memory of the process as the kernel
/// counts it, in bytes.
#[derive(Clone, Copy)]
struct MemoryStat {
    compressed: u64,
    pool: u64,
    leaves: u64,
    backrefs: u64,
    rest: u64,
    pss: u64,
}

impl MemoryStat {
    fn of(ram: &Ram, pss_before: u64) -> Result<Self> {
        let (stat, memory) = (ram.mm_stat(), ram.memory_overhead());
        Ok(Self {
            compressed: stat.compr_data_size,
            pool: stat.mem_used_total,
            leaves: memory.leaves_bytes,
            backrefs: memory.backrefs_bytes,
            rest: memory.metadata_bytes + memory.streams_bytes,
            pss: machine::pss_bytes()?.saturating_sub(pss_before),
        })
    }

    /// Returns the bytes of pool, leaves and back references, to which the targets apply.
    fn judged_bytes(&self) -> u64 {
        self.pool + self.leaves + self.backrefs
    }

    fn rows(&self, when: &str, target: f64, judged: bool) -> Vec<Row> {
        let judge = |row: Row, target| if judged { row.target(target) } else { row };
        let over = |part: u64| part as f64 / self.compressed as f64;
        let overhead = Row::ratio(format!("overhead {when}"), Summary::one(over(self.judged_bytes())))
            .part("pool", over(self.pool))
            .part("leaves", over(self.leaves))
            .part("backrefs", over(self.backrefs))
            .part("(rest)", over(self.rest));
        let agree = self.pss as f64 / (self.judged_bytes() + self.rest) as f64;
        let pss = Row::ratio(format!("PSS / own numbers {when}"), Summary::one(agree))
            .part("PSS MiB", mib(self.pss))
            .part("own MiB", mib(self.judged_bytes() + self.rest));
        vec![judge(overhead, Target::AtMost(target)), judge(pss, Target::Within(0.95, 1.05))]
    }
}

fn run_set(set: Set, options: &Options) -> Result<Report> {
    let data = Data::open(set, options.bytes(BYTES), options)?;
    let orders = Orders::new(data.pages);
    let judged = data.bytes() >= JUDGED_BYTES;
    let mut notes = vec![
        "Overhead: (pool + leaves + back-references) over compressed bytes. PSS: of this process, minus its \
         value before the disk was created. Own numbers: pool, leaves, back-references, descriptors, streams. \
         One thread."
            .into(),
        "Rewritten: every slot three times, each time in a different random order and with another page's \
         content.".into(),
    ];
    if !judged {
        notes.push("Less than 1 GiB: constant costs dominate, so targets are not judged.".into());
    }
    let mut rows = ours(&data, &orders, judged)?;
    match kernel(&data, &orders, options) {
        Ok(more) => rows.extend(more),
        Err(error) => notes.push(format!("The kernel's side is omitted: {error:#}")),
    }
    Ok(Report { notes, rows, ..Report::new("memory", data.description.clone(), data.bytes(), "lz4") }.print())
}

fn ours(data: &Data, orders: &Orders, judged: bool) -> Result<Vec<Row>> {
    let judge = |row: Row, target| if judged { row.target(target) } else { row };
    let seconds = |since: Instant| Summary::one(since.elapsed().as_secs_f64());
    let mut rows = Vec::new();
    let mut page = IoBuf::zeroed(PAGE_BYTES)?;
    page.fill(1);
    let base = machine::pss_bytes()?;
    let ram = new_ram(data.bytes())?;
    let start = Instant::now();
    for number in 0..data.pages {
        data.read(number, &mut page)?;
        ram.write_at(number * PAGE_BYTES as u64, &page, Flags::empty())?;
    }
    rows.push(Row::new("time of the fill", Unit::Seconds, seconds(start)));
    let filled = MemoryStat::of(&ram, base)?;
    rows.push(
        Row::single("compressed bytes", Unit::Mib, mib(filled.compressed))
            .part("same pages", ram.mm_stat().same_pages as f64)
            .part("huge pages", ram.mm_stat().huge_pages as f64),
    );
    rows.extend(filled.rows("after the fill", 1.02, judged));

    let start = Instant::now();
    for round in 0..ROUNDS {
        for (slot, content) in orders.round(round) {
            data.read(content, &mut page)?;
            ram.write_at(slot * PAGE_BYTES as u64, &page, Flags::empty())?;
        }
    }
    rows.push(Row::new("time of three rewrites", Unit::Seconds, seconds(start)));
    rows.extend(MemoryStat::of(&ram, base)?.rows("rewritten", 1.06, judged));
    check(&ram, data, orders)?;

    let start = Instant::now();
    let pages = ram.compact();
    rows.push(Row::new("time of compact", Unit::Seconds, seconds(start)).part("pages", pages as f64));
    let compacted = MemoryStat::of(&ram, base)?;
    rows.extend(compacted.rows("compacted", 1.02, judged));
    check(&ram, data, orders)?;

    let start = Instant::now();
    ram.discard(0, data.bytes())?;
    rows.push(Row::new("time of discarding all", Unit::Seconds, seconds(start)));
    let empty = MemoryStat::of(&ram, base)?;
    let returned = |before: u64, after: u64| Summary::one(1.0 - after as f64 / before as f64);
    let share = returned(compacted.judged_bytes(), empty.judged_bytes());
    let row = Row::ratio("returned by discarding all", share)
        .part("pool MiB left", mib(empty.pool))
        .part("leaves", mib(empty.leaves))
        .part("backrefs", mib(empty.backrefs));
    rows.push(judge(row, Target::AtLeast(0.98)));
    let share = returned(compacted.pss, empty.pss);
    let row = Row::ratio("returned by discarding all, PSS", share).part("PSS MiB left", mib(empty.pss));
    rows.push(judge(row, Target::AtLeast(0.98)));
    Ok(rows)
}

/// Returns an error unless every page of the disk has the content that the last round wrote.
fn check(ram: &Ram, data: &Data, orders: &Orders) -> Result<()> {
    let mut page = [0; PAGE_BYTES];
    let mut back = [0; PAGE_BYTES];
    for (slot, content) in orders.round(ROUNDS - 1) {
        data.read(content, &mut page)?;
        ram.read_at(slot * PAGE_BYTES as u64, &mut back)?;
        ensure!(page == back, "slot {slot} does not hold page {content}");
    }
    Ok(())
}

/// Runs the same steps on the kernel's zram.
fn kernel(data: &Data, orders: &Orders, options: &Options) -> Result<Vec<Row>> {
    let device = ZramDevice::claim(&options.zram, "lz4", data.bytes())?;
    let mut page = IoBuf::zeroed(PAGE_BYTES)?;
    let mut rows = Vec::new();
    let mut row = |when: &str| -> Result<()> {
        let stat = device.stat()?;
        rows.push(
            Row::ratio(format!("zram: overhead {when}"), Summary::one(stat.overhead(data.pages)))
                .part("pool", stat.mem_used_total as f64 / stat.compr_data_size as f64)
                .part("compressed MiB", mib(stat.compr_data_size)),
        );
        Ok(())
    };
    device.fill(data.pages, |number, into| data.read(number, into))?;
    row("after the fill")?;
    for round in 0..ROUNDS {
        for (slot, content) in orders.round(round) {
            data.read(content, &mut page)?;
            device.file()?.write_all_at(&page, slot * PAGE_BYTES as u64)?;
        }
    }
    row("rewritten")?;
    let start = Instant::now();
    device.compact()?;
    let took = start.elapsed().as_secs_f64();
    row("compacted")?;
    rows.push(Row::single("zram: time of compact", Unit::Seconds, took));
    Ok(rows)
}
