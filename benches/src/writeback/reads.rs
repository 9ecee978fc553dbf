//! `reads` part: random reads of written-back pages, many at a time, compared with fio's reads of
//! the same file.

use std::sync::Arc;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{self, Buffer, Completion, Device, IoBuf, Request, TryResult};
use freestone::plug::Plug;
use freestone::ram::Ram;
use freestone::sync::{Condvar, Mutex};
use freestone_report::{Row, Summary, Target, Unit};

use super::backing::{self, BackingFile, Layout};
use super::fio::{self, Job, Speed};
use super::{Bench, Part};
use crate::data::{Data, Random};
use crate::engine::bare::same_filled;
use crate::measure::median;
use crate::measure::process::{ResourceUsage, UsageMeter};

const ROUNDS: u32 = 7;
const DEPTH: usize = 32;
/// Maximum number of reads in a round, which take about a second.
const ROUND_READS: usize = 64 << 10;
/// Number of reads whose content is verified, after the measured reads.
const CHECKED_READS: usize = 1024;

/// Maximum share of reads whose page is already in memory. If a random page follows one of the
/// last, the disk has read it ahead; with few pages that happens often.
const INLINE_SHARE_MAX: f64 = 0.1;

struct Round {
    /// Number of reads that had to wait for the disk.
    reads: usize,
    inline: usize,
    spent: ResourceUsage,
}

pub(super) fn run(bench: &Bench) -> Result<Part> {
    let mut rows = layout(bench, Layout::Packed, "packed")?;
    rows.extend(layout(bench, Layout::Plain, "plain")?);
    let notes = vec![format!(
        "Reads: 4 KiB from random written-back pages, {DEPTH} at a time, each page once. Every read is tried \
         inline and then submitted with its own buffer; reads that are submitted together share a plug. fio: \
         randread, bs=4k, iodepth={DEPTH}, io_uring, O_DIRECT, one job, on the blocks of the same file that \
         the disk uses. With the packed layout, every page that is read returns to memory."
    )];
    Ok(Part { notes, rows })
}

fn layout(bench: &Bench, layout: Layout, name: &str) -> Result<Vec<Row>> {
    let file = BackingFile::new(&bench.dir, bench.data.bytes())?;
    file.fill()?;
    let ram = file.disk(bench.data.pages, layout, 0)?;
    backing::fill(&ram, &bench.data, 1)?;
    backing::spill(&ram)?;
    let used_bytes = ram.bd_stat().bd_count * PAGE_BYTES as u64;
    let order = spilled_pages(&bench.data)?;
    let rounds = bench.options.rounds(ROUNDS, 2) as usize;
    let checked = CHECKED_READS.min(order.len() / 4);
    let count = ((order.len() - checked) / rounds).min(ROUND_READS);
    ensure!(count > 0, "the data has too few pages for {rounds} rounds of reads");
    let (mut ours, mut fio) = (Vec::new(), Vec::new());
    let reads_before = ram.bd_stat().bd_reads;
    for (round, pages) in order.chunks_exact(count).take(rounds).enumerate() {
        let job = Job::random_reads(file.path(), used_bytes, DEPTH as u32, count as u64, round as u64 + 1);
        if round % 2 == 1 {
            fio.push(fio::run(&job)?);
        }
        ours.push(read_all(&ram, pages)?);
        if round % 2 == 0 {
            fio.push(fio::run(&job)?);
        }
    }
    let blocks = ram.bd_stat().bd_reads - reads_before;
    check(&ram, &bench.data, &order[order.len() - checked..])?;
    // In the packed layout, a page may span two blocks, and a page that is read returns to memory.
    // So its target is lower.
    let target = if matches!(layout, Layout::Packed) { 0.75 } else { 0.9 };
    Ok(rows(name, target, &ours, &fio, blocks))
}

fn rows(name: &str, target: f64, ours: &[Round], fio: &[Speed], blocks: u64) -> Vec<Row> {
    let speed: Vec<f64> = ours.iter().map(|r| r.reads as f64 / r.spent.wall.as_secs_f64()).collect();
    let theirs: Vec<f64> = fio.iter().map(|speed| speed.operations_per_second).collect();
    let reads: usize = ours.iter().map(|round| round.reads).sum();
    let micros = Summary::of(ours.iter().map(|r| r.spent.cpu.total().as_secs_f64() * 1e6 / r.reads as f64));
    let busiest: Vec<f64> = ours.iter().map(|round| round.spent.busiest).collect();
    vec![
        Row::ratio_of(format!("reads: random 4 KiB, depth {DEPTH}, {name} / fio"), &speed, &theirs)
            .target(Target::AtLeast(target))
            .part("reads/s", median(&speed))
            .part("fio reads/s", median(&theirs))
            .part("blocks / read", blocks as f64 / reads as f64)
            .part("in memory", ours.iter().map(|round| round.inline).sum::<usize>() as f64)
            .part("busiest thread", median(&busiest)),
        Row::new(format!("reads: CPU a read, {name}"), Unit::Micros, micros).part(
            "fio",
            median(&fio.iter().map(|f| f.cpu * 1e6 / f.operations_per_second).collect::<Vec<_>>()),
        ),
    ]
}

/// Returns the numbers of the pages that writeback moves to the disk, in random order. A
/// same-filled page stays in its slot.
fn spilled_pages(data: &Data) -> Result<Vec<u32>> {
    let mut page = [0; PAGE_BYTES];
    let mut spilled = Vec::new();
    for number in Random::new(5).permutation(data.pages) {
        data.read(u64::from(number), &mut page)?;
        if same_filled(&page).is_none() {
            spilled.push(number);
        }
    }
    Ok(spilled)
}

/// Completed requests with their buffers.
#[derive(Default)]
struct Completed {
    list: Mutex<Vec<(device::Result<()>, IoBuf)>>,
    non_empty: Condvar,
}

impl Completed {
    fn push(&self, outcome: device::Result<()>, buffer: IoBuf) {
        let mut list = self.list.lock();
        list.push((outcome, buffer));
        // A waiting thread found the list empty, so only the first entry needs a notification.
        if list.len() == 1 {
            self.non_empty.notify_one();
        }
    }

    /// Waits for at least one entry and swaps the list with the empty `into`.
    fn take(&self, into: &mut Vec<(device::Result<()>, IoBuf)>) {
        let mut list = self.non_empty.wait_while(self.list.lock(), |list| list.is_empty());
        std::mem::swap(&mut *list, into);
    }
}

/// Reads every one of `pages`, `DEPTH` at a time.
fn read_all(ram: &Ram, pages: &[u32]) -> Result<Round> {
    let completed = Arc::new(Completed::default());
    let mut free = (0..DEPTH).map(|_| IoBuf::zeroed(PAGE_BYTES)).collect::<Result<Vec<_>, _>>()?;
    let mut batch = Vec::with_capacity(DEPTH);
    let mut inline = 0;
    let mut pages = pages.iter();
    let total = pages.len();
    let mut in_flight = 0;
    let watch = UsageMeter::start()?;
    loop {
        let plug = Plug::start();
        while let Some(mut buffer) = free.pop() {
            let Some(&page) = pages.next() else { break };
            let request = Request::read(u64::from(page) * PAGE_BYTES as u64, PAGE_BYTES as u64);
            if ram.try_io(&request, Buffer::Read(&mut buffer))? == TryResult::Done {
                inline += 1;
                free.push(buffer);
                continue;
            }
            let completed = Arc::clone(&completed);
            let done = Completion::new(move |outcome, buffer| completed.push(outcome, buffer));
            ram.submit(request, buffer, done);
            in_flight += 1;
        }
        drop(plug);
        if in_flight == 0 {
            break;
        }
        completed.take(&mut batch);
        in_flight -= batch.len();
        for (outcome, buffer) in batch.drain(..) {
            outcome?;
            free.push(buffer);
        }
    }
    let spent = watch.stop()?;
    let share = inline as f64 / total as f64;
    ensure!(share <= INLINE_SHARE_MAX, "{inline} of {total} written-back pages are in memory");
    Ok(Round { reads: total - inline, inline, spent })
}

/// Returns an error unless written-back pages have their original content.
fn check(ram: &Ram, data: &Data, pages: &[u32]) -> Result<()> {
    let mut expected = [0; PAGE_BYTES];
    let mut back = [0; PAGE_BYTES];
    for &page in pages {
        data.read(u64::from(page), &mut expected)?;
        device::Blocking::read_at(ram, u64::from(page) * PAGE_BYTES as u64, &mut back)?;
        ensure!(back == expected, "page {page} has other content after a read from the disk");
    }
    Ok(())
}
