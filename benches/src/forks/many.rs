//! A thousand forks of one sparse base: what each takes before and after it was read, how long the
//! last one takes to make beside the first, rewinding all, and whether anything is left of forks
//! that are gone.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Device, ExtentKind, Flags};
use freestone::ram::{Family, ForkConfig, Ram};
use freestone_nbd::{Address, Limits, Server};
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{Bench, Image, family, wait_until_freed};
use crate::data::fio_page;
use crate::export::publish;
use crate::machine::pss_bytes;
use crate::measure::median;

/// The numbers, and those of a smoke run.
const FORKS: u32 = 1000;
const FORKS_QUICK: u32 = 40;
const BASE_BYTES: u64 = 10 << 30;
const BASE_BYTES_QUICK: u64 = 64 << 20;
const CYCLES: u32 = 100_000;
const CYCLES_QUICK: u32 = 500;
const ROUNDS: u32 = 9;
/// What the base holds at its start: the rest is holes.
const DATA_BYTES: u64 = 8 << 20;
/// Bytes that a leaf of a slot table covers: the least that reading could make a fork remember.
const LEAF_BYTES: u64 = 512 * PAGE_BYTES as u64;
/// Pages that a fork is written before it is rewound, and in a cycle.
const WRITTEN_PAGES: u64 = 64;
const CYCLE_PAGES: u64 = 4;
/// Times of the first and of the last so many are put together.
const EDGE: usize = 10;
/// One in so many cycles goes with an export.
const EXPORTED_PART: u64 = 20;
/// Memory is looked at after each quarter of the cycles, so that a leak can be told from a
/// high-water mark.
const QUARTERS: u64 = 4;
/// The bound for a fork that holds nothing.
const FORK_KIB: f64 = 64.0;
/// Memory may waver by so much from one look to the next.
const PSS_SLACK_MIB: f64 = 1.0;
const DESCRIPTORS_MIN: u64 = 4096;

/// A base and how many forks it gets.
struct Herd {
    base: Arc<dyn Device>,
    base_bytes: u64,
    count: u64,
    page: Box<[u8; PAGE_BYTES]>,
}

pub(super) fn run(bench: &Bench) -> Result<Report> {
    let args = bench.args;
    let count = bench.count(args.forks, FORKS, FORKS_QUICK);
    let base_bytes = bench.size(args.base, BASE_BYTES, BASE_BYTES_QUICK);
    let cycles = bench.count(args.cycles, CYCLES, CYCLES_QUICK);
    more_descriptors(count)?;
    let image = Image::sparse(&bench.dir, "base", base_bytes)?;
    write_data(&image.0, DATA_BYTES.min(base_bytes / 2))?;
    let mut page = Box::new([0; PAGE_BYTES]);
    fio_page(1, &mut page[..]);
    let herd = Herd { base: Arc::new(image.device()?), base_bytes, count, page };
    let mut rows = herd.memory()?;
    rows.extend(herd.creations(bench.options.rounds(ROUNDS, 2))?);
    rows.extend(herd.rewinds(bench.options.rounds(ROUNDS, 2))?);
    rows.extend(herd.cycles(cycles)?);
    Ok(Report::new(
        "forks: a thousand of one base",
        format!("a sparse base, {} MiB of data at its start", DATA_BYTES.min(base_bytes / 2) >> 20),
        base_bytes,
        "lz4",
    )
    .note(format!(
        "{count} forks. Memory: by the process's PSS. Read from end to end: all that the base has \
         data for, and one page of every 2 MiB of its holes, which is what one leaf of a slot \
         table covers, so that every leaf that reading could make is asked for; one fork is read \
         whole, to the byte."
    ))
    .note(format!(
        "Creation: median of the first {EDGE} and of the last {EDGE} of {count}, each round in a \
         family of its own; exported: with a Unix socket of its own. Rewinds: of forks with \
         {WRITTEN_PAGES} pages written. Cycles: a fork is made, {CYCLE_PAGES} pages are written, \
         it is dropped; every {EXPORTED_PART}th is also exported on a socket of its own."
    ))
    .rows(rows))
}

/// A socket each, and what the program has open anyway.
fn more_descriptors(forks: u64) -> Result<()> {
    let wanted = (2 * forks).max(DESCRIPTORS_MIN);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum })
        .with_context(|| format!("{wanted} file descriptors are not allowed (ulimit -Hn is {maximum:?})"))
}

fn write_data(path: &Path, bytes: u64) -> Result<()> {
    let file = std::fs::File::options().write(true).open(path)?;
    let mut page = [0; PAGE_BYTES];
    for number in 0..bytes / PAGE_BYTES as u64 {
        fio_page(number, &mut page);
        file.write_all_at(&page, number * PAGE_BYTES as u64)?;
    }
    Ok(())
}

fn descriptors() -> Result<u64> {
    Ok(std::fs::read_dir("/proc/self/fd")?.count() as u64)
}

impl Herd {
    fn fork(&self, family: &Family) -> Result<Ram> {
        Ok(family.fork(Arc::clone(&self.base), &ForkConfig::default())?)
    }

    fn write(&self, fork: &Ram, pages: u64) -> Result<()> {
        let step = self.base_bytes / pages / PAGE_BYTES as u64 * PAGE_BYTES as u64;
        for number in 0..pages {
            fork.write_at(number * step, &self.page[..], Flags::empty())?;
        }
        Ok(())
    }

    // ---- memory ---------------------------------------------------------------------------------

    fn memory(&self) -> Result<Vec<Row>> {
        let family = family()?;
        // What the first one of a process brings: threads, the base's buffers.
        let first = self.fork(&family)?;
        self.read_sparsely(&first)?;
        // Touched, so that it counts from the start.
        let mut buffer = vec![1; 1 << 20];
        let before = pss_bytes()?;
        let forks = (0..self.count).map(|_| self.fork(&family)).collect::<Result<Vec<_>>>()?;
        let made = pss_bytes()?;
        let begun = Instant::now();
        let mut reads = 0;
        for fork in &forks {
            reads += self.read_sparsely(fork)?;
        }
        let took = begun.elapsed();
        let read = pss_bytes()?;
        let begun = Instant::now();
        for at in (0..self.base_bytes).step_by(buffer.len()) {
            let len = (self.base_bytes - at).min(buffer.len() as u64) as usize;
            forks[0].read_at(at, &mut buffer[..len])?;
        }
        let whole = begun.elapsed();
        let read_whole = pss_bytes()?;
        let row = |what: &str, now: u64| {
            let each = now.saturating_sub(before) as f64 / 1024.0 / self.count as f64;
            Row::one(what, Unit::Kib, each)
                .target(Target::AtMost(FORK_KIB))
                .part("leaves of all, KiB", forks[0].memory().leaves_bytes as f64 / 1024.0)
        };
        Ok(vec![
            row("memory of a fork, not written", made),
            row("memory of a fork, read from end to end", read)
                .part("s", took.as_secs_f64())
                .part("reads of each", reads as f64 / self.count as f64),
            Row::one(
                "memory more after one was read to the byte",
                Unit::Mib,
                mib(read_whole.saturating_sub(read)),
            )
            .target(Target::AtMost(FORK_KIB / 1024.0 + PSS_SLACK_MIB))
            .part("s", whole.as_secs_f64()),
        ])
    }

    /// All data, and a page of every leaf's range of what is not. Returns how many reads that took.
    fn read_sparsely(&self, fork: &Ram) -> Result<u64> {
        let mut buffer = vec![0; 256 << 10];
        let (mut at, mut reads) = (0, 0);
        while at < self.base_bytes {
            let mut pieces = Vec::new();
            at += fork.extents(at, self.base_bytes - at, &mut |extent| {
                pieces.push(extent);
                pieces.len() < 1024
            })?;
            for piece in pieces {
                let (step, most) = match piece.kind {
                    ExtentKind::Data => (buffer.len() as u64, buffer.len() as u64),
                    _ => (LEAF_BYTES, PAGE_BYTES as u64),
                };
                let mut offset = piece.offset;
                while offset < piece.offset + piece.len {
                    let len = (piece.offset + piece.len - offset).min(most) as usize;
                    fork.read_at(offset, &mut buffer[..len])?;
                    reads += 1;
                    offset += step;
                }
            }
        }
        Ok(reads)
    }

    // ---- creation -------------------------------------------------------------------------------

    fn creations(&self, rounds: u32) -> Result<Vec<Row>> {
        let mut rows = Vec::new();
        for exported in [false, true] {
            let (mut first, mut last) = (Vec::new(), Vec::new());
            for _ in 0..rounds {
                let micros = self.create_all(exported)?;
                let edge = EDGE.min(micros.len() / 2);
                first.push(median(&micros[..edge]));
                last.push(median(&micros[micros.len() - edge..]));
            }
            let what = if exported { "making and exporting a fork" } else { "making a fork" };
            rows.push(
                Row::over(format!("{what}, the last / the first"), &last, &first)
                    .target(Target::AtMost(1.5))
                    .part("last us", median(&last))
                    .part("first us", median(&first))
                    .steady(),
            );
            rows.push(
                Row::new(format!("{what}, the last"), Unit::Micros, Summary::of(last))
                    .target(Target::AtMost(2000.0)),
            );
        }
        Ok(rows)
    }

    /// Microseconds of each creation.
    fn create_all(&self, exported: bool) -> Result<Vec<f64>> {
        let family = family()?;
        let sockets = tempfile::tempdir()?;
        let server = Server::new(Limits::default());
        let (mut forks, mut micros) = (Vec::new(), Vec::new());
        for number in 0..self.count {
            let address = Address::Unix(sockets.path().join(number.to_string()));
            let begun = Instant::now();
            let fork = self.fork(&family)?;
            if exported {
                publish(&server, &address, Arc::new(fork.clone()))?;
            }
            micros.push(begun.elapsed().as_secs_f64() * 1e6);
            forks.push(fork);
        }
        server.shutdown(Duration::ZERO);
        drop(forks);
        wait_until_freed(&family, 0)?;
        Ok(micros)
    }

    // ---- rewinding ------------------------------------------------------------------------------

    fn rewinds(&self, rounds: u32) -> Result<Vec<Row>> {
        let family = family()?;
        let forks = (0..self.count).map(|_| self.fork(&family)).collect::<Result<Vec<_>>>()?;
        let (mut millis, mut slowest, mut freed) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            for fork in &forks {
                self.write(fork, WRITTEN_PAGES)?;
            }
            let begun = Instant::now();
            let mut most = Duration::ZERO;
            for fork in &forks {
                let one = Instant::now();
                fork.rewind()?;
                most = most.max(one.elapsed());
            }
            millis.push(begun.elapsed().as_secs_f64() * 1e3);
            slowest.push(most.as_secs_f64() * 1e6);
            wait_until_freed(&family, self.count)?;
            freed.push(begun.elapsed().as_secs_f64());
            let own: u64 = forks.iter().map(|fork| fork.over_stat().own_bytes).sum();
            ensure!(own == 0, "{own} bytes are left after the rewinds");
        }
        Ok(vec![
            Row::new(format!("{} rewinds", self.count), Unit::Millis, Summary::of(millis))
                .target(Target::AtMost(1000.0))
                .part("slowest us", median(&slowest))
                .part("until all is freed, s", median(&freed)),
        ])
    }

    // ---- cycles ---------------------------------------------------------------------------------

    fn cycles(&self, cycles: u64) -> Result<Vec<Row>> {
        let family = family()?;
        let sockets = tempfile::tempdir()?;
        let server = Server::new(Limits::default());
        let address = Address::Unix(sockets.path().join("cycle"));
        let run = |cycles: u64| -> Result<()> {
            for number in 0..cycles {
                let fork = self.fork(&family)?;
                let exported = number.is_multiple_of(EXPORTED_PART);
                if exported {
                    publish(&server, &address, Arc::new(fork.clone()))?;
                }
                self.write(&fork, CYCLE_PAGES)?;
                if exported {
                    server.close(&address);
                }
                drop(fork);
            }
            wait_until_freed(&family, 0)
        };
        // The first ones get what all later ones use again.
        run((cycles / 10).max(1))?;
        let (pss, files) = (pss_bytes()?, descriptors()?);
        let begun = Instant::now();
        let mut growth = Vec::new();
        for quarter in 0..QUARTERS {
            run(cycles * (quarter + 1) / QUARTERS - cycles * quarter / QUARTERS)?;
            growth.push(mib(pss_bytes()?) - mib(pss));
        }
        let took = begun.elapsed().as_secs_f64();
        let last = growth.last().copied().context("no cycles")?;
        let mut memory = Row::one(format!("memory more after {cycles} cycles"), Unit::Mib, last)
            .target(Target::AtMost(PSS_SLACK_MIB))
            .part("before", mib(pss))
            .part("us a cycle", took * 1e6 / cycles as f64);
        // Of which the family holds, in tables and in the pool.
        let left = self.fork(&family)?.memory().leaves_bytes;
        memory = memory.part("tables", mib(left)).part("pool", mib(family.stat().mem_used_total));
        for (quarter, growth) in (1..QUARTERS).zip(growth) {
            memory = memory.part(format!("after {quarter}/{QUARTERS}"), growth);
        }
        Ok(vec![
            memory,
            Row::one(
                format!("descriptors more after {cycles} cycles"),
                Unit::Count,
                descriptors()? as f64 - files as f64,
            )
            .target(Target::AtMost(0.0))
            .part("before", files as f64),
        ])
    }
}
