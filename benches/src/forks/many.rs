//! A thousand forks of one sparse base: memory of a fork before and after reading it, and creation
//! time of the last forks compared with the first. Also the time to rewind all forks, and the
//! memory that removed forks leave behind.

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
use crate::measure::machine::pss_bytes;
use crate::measure::median;
use crate::transport::export::publish;

/// Number of forks, by default. The values of a full run are those of the requirement; constants
/// with `QUICK` are for a smoke run.
const FORKS: u32 = 1000;
const FORKS_QUICK: u32 = 40;
const BASE_BYTES: u64 = 10 << 30;
const BASE_BYTES_QUICK: u64 = 64 << 20;
const CYCLES: u32 = 100_000;
const CYCLES_QUICK: u32 = 500;
const ROUNDS: u32 = 9;
/// Bytes of data at the start of the base; the rest is a hole.
const DATA_BYTES: u64 = 8 << 20;
/// Bytes that a leaf of a slot table covers: the smallest range for which a read could make a fork
/// allocate memory.
const LEAF_BYTES: u64 = 512 * PAGE_BYTES as u64;
/// Number of pages written to a fork before it is rewound. `CYCLE_PAGES` are written in each cycle
/// of creation and removal.
const WRITTEN_PAGES: u64 = 64;
const CYCLE_PAGES: u64 = 4;
/// Number of first forks and of last forks whose creation times are compared.
const EDGE: usize = 10;
/// Every EXPORTED_PART-th cycle also exports its fork over NBD.
const EXPORTED_PART: u64 = 20;
/// Memory is measured after each quarter of the cycles, to tell a leak from a high-water mark.
const QUARTERS: u64 = 4;
/// Target for the memory of an empty fork, in KiB.
const FORK_KIB: f64 = 64.0;
/// Growth of the process's memory that counts as noise, in MiB: two measurements may differ by this
/// much without a leak.
const PSS_SLACK_MIB: f64 = 1.0;
const DESCRIPTORS_MIN: u64 = 4096;

struct ForkSet {
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
    raise_descriptor_limit(count)?;
    let image = Image::sparse(&bench.dir, "base", base_bytes)?;
    write_data(&image.0, DATA_BYTES.min(base_bytes / 2))?;
    let mut page = Box::new([0; PAGE_BYTES]);
    fio_page(1, &mut page[..]);
    let fork_set = ForkSet { base: Arc::new(image.device()?), base_bytes, count, page };
    let mut rows = fork_set.memory()?;
    rows.extend(fork_set.creations(bench.options.rounds(ROUNDS, 2))?);
    rows.extend(fork_set.rewinds(bench.options.rounds(ROUNDS, 2))?);
    rows.extend(fork_set.cycles(cycles)?);
    Ok(Report::new(
        "forks: a thousand of one base",
        format!("a sparse base, {} MiB of data at its start", DATA_BYTES.min(base_bytes / 2) >> 20),
        base_bytes,
        "lz4",
    )
    .note(format!(
        "{count} forks. Memory: PSS of the process. Read from end to end: all data of the base, and one page \
         of every 2 MiB of its holes. A leaf of a slot table covers 2 MiB, so the reads touch every leaf that \
         a read could allocate. One fork is also read completely."
    ))
    .note(format!(
        "Creation: median of the first {EDGE} and of the last {EDGE} of {count}, each round in a new family; \
         exported: with its own Unix socket. Rewinds: of forks with {WRITTEN_PAGES} written pages. Cycles: \
         create a fork, write {CYCLE_PAGES} pages, drop the fork; every {EXPORTED_PART}th is also exported on \
         its own socket."
    ))
    .rows(rows))
}

/// Raises the limit of open files, because each fork needs a socket in addition to the files of the
/// program.
fn raise_descriptor_limit(forks: u64) -> Result<()> {
    let wanted = (2 * forks).max(DESCRIPTORS_MIN);
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= wanted) {
        return Ok(());
    }
    setrlimit(Resource::Nofile, Rlimit { current: Some(wanted), maximum }).with_context(|| {
        format!("cannot raise the limit of open files to {wanted} (ulimit -Hn is {maximum:?})")
    })
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

impl ForkSet {
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
        // The first fork of a process allocates threads and the base's buffers.
        let first = self.fork(&family)?;
        self.read_sparsely(&first)?;
        // The buffer is filled, so that its memory counts from the first measurement on.
        let mut buffer = vec![1; 1 << 20];
        let before = pss_bytes()?;
        let forks = (0..self.count).map(|_| self.fork(&family)).collect::<Result<Vec<_>>>()?;
        let created = pss_bytes()?;
        let start = Instant::now();
        let mut reads = 0;
        for fork in &forks {
            reads += self.read_sparsely(fork)?;
        }
        let took = start.elapsed();
        let read = pss_bytes()?;
        let start = Instant::now();
        for at in (0..self.base_bytes).step_by(buffer.len()) {
            let len = (self.base_bytes - at).min(buffer.len() as u64) as usize;
            forks[0].read_at(at, &mut buffer[..len])?;
        }
        let whole = start.elapsed();
        let read_whole = pss_bytes()?;
        let row = |what: &str, now: u64| {
            let each = now.saturating_sub(before) as f64 / 1024.0 / self.count as f64;
            Row::single(what, Unit::Kib, each)
                .target(Target::AtMost(FORK_KIB))
                .part("leaves of all, KiB", forks[0].memory_overhead().leaves_bytes as f64 / 1024.0)
        };
        Ok(vec![
            row("memory of a fork, not written", created),
            row("memory of a fork, read from end to end", read)
                .part("s", took.as_secs_f64())
                .part("reads of each", reads as f64 / self.count as f64),
            Row::single(
                "memory more after one was read to the byte",
                Unit::Mib,
                mib(read_whole.saturating_sub(read)),
            )
            .target(Target::AtMost(FORK_KIB / 1024.0 + PSS_SLACK_MIB))
            .part("s", whole.as_secs_f64()),
        ])
    }

    /// Reads all data, and in holes one page per leaf. Returns the number of reads.
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
                let (step, len_max) = match piece.kind {
                    ExtentKind::Data => (buffer.len() as u64, buffer.len() as u64),
                    _ => (LEAF_BYTES, PAGE_BYTES as u64),
                };
                let mut offset = piece.offset;
                while offset < piece.offset + piece.len {
                    let len = (piece.offset + piece.len - offset).min(len_max) as usize;
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
                Row::ratio_of(format!("{what}, the last / the first"), &last, &first)
                    .target(Target::AtMost(1.5))
                    .part("last us", median(&last))
                    .part("first us", median(&first))
                    .withhold_if_unsteady(),
            );
            rows.push(
                Row::new(format!("{what}, the last"), Unit::Micros, Summary::of(last))
                    .target(Target::AtMost(2000.0)),
            );
        }
        Ok(rows)
    }

    /// Creates all forks and returns the microseconds of each creation.
    fn create_all(&self, exported: bool) -> Result<Vec<f64>> {
        let family = family()?;
        let sockets = tempfile::tempdir()?;
        let server = Server::new(Limits::default());
        let (mut forks, mut micros) = (Vec::new(), Vec::new());
        for number in 0..self.count {
            let address = Address::Unix(sockets.path().join(number.to_string()));
            let start = Instant::now();
            let fork = self.fork(&family)?;
            if exported {
                publish(&server, &address, Arc::new(fork.clone()))?;
            }
            micros.push(start.elapsed().as_secs_f64() * 1e6);
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
            let start = Instant::now();
            let mut longest = Duration::ZERO;
            for fork in &forks {
                let one = Instant::now();
                fork.rewind()?;
                longest = longest.max(one.elapsed());
            }
            millis.push(start.elapsed().as_secs_f64() * 1e3);
            slowest.push(longest.as_secs_f64() * 1e6);
            wait_until_freed(&family, self.count)?;
            freed.push(start.elapsed().as_secs_f64());
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
        // Warm-up: these cycles allocate memory that all later cycles reuse.
        run((cycles / 10).max(1))?;
        let (pss, files) = (pss_bytes()?, descriptors()?);
        let start = Instant::now();
        let mut growth = Vec::new();
        for quarter in 0..QUARTERS {
            run(cycles * (quarter + 1) / QUARTERS - cycles * quarter / QUARTERS)?;
            growth.push(mib(pss_bytes()?) - mib(pss));
        }
        let took = start.elapsed().as_secs_f64();
        let last = growth.last().copied().context("no cycles")?;
        let mut memory = Row::single(format!("memory more after {cycles} cycles"), Unit::Mib, last)
            .target(Target::AtMost(PSS_SLACK_MIB))
            .part("before", mib(pss))
            .part("us a cycle", took * 1e6 / cycles as f64);
        // Memory that the family (a base and its forks, which share memory) still holds, in tables
        // and in the pool.
        let left = self.fork(&family)?.memory_overhead().leaves_bytes;
        memory = memory.part("tables", mib(left)).part("pool", mib(family.stat().mem_used_total));
        for (quarter, growth) in (1..QUARTERS).zip(growth) {
            memory = memory.part(format!("after {quarter}/{QUARTERS}"), growth);
        }
        Ok(vec![
            memory,
            Row::single(
                format!("descriptors more after {cycles} cycles"),
                Unit::Count,
                descriptors()? as f64 - files as f64,
            )
            .target(Target::AtMost(0.0))
            .part("before", files as f64),
        ])
    }
}
