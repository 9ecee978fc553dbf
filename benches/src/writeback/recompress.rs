//! `recompress` part: gain and cost of recompression on real files.

use std::time::Duration;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::{Algorithm, Params};
use freestone::device::Blocking;
use freestone::ram::{Config, IdleSelection, Ram, RecompressKind, RecompressOptions, Secondary};
use freestone_report::{Row, Summary, mib};

use super::{Bench, Part, backing};
use crate::data::Data;
use crate::measure::process::{Cpu, UsageMeter};
use crate::measure::settle::wait_until_settled;

/// Idle time after which automatic recompression compresses a page again.
const IDLE: Duration = Duration::from_secs(1);
/// Every `CHECK_STEP`-th page is verified afterwards.
const CHECK_STEP: u64 = 16;
/// Number of pages whose reads are timed, in random order and in order.
const READ_PAGES: u64 = 20_000;
/// Size of a read in order, in pages.
const READ_IN_ORDER: u64 = 16;

/// Sizes and cost of one way of recompression.
struct Side {
    what: &'static str,
    stored: u64,
    pool: u64,
    /// CPU time of the recompression; None for the side without recompression.
    cpu: Option<Cpu>,
    /// Time until the last page shrank.
    wall: Duration,
    parts: Vec<(&'static str, f64)>,
}

pub(super) fn run(bench: &Bench) -> Result<Part> {
    let zstd = Secondary { algorithm: Algorithm::Zstd, params: Params::parse("level=3")? };
    let plain = filled(bench, Config::default())?;
    let mut sides = vec![side(bench, "lz4", &plain, None, Duration::ZERO)?];
    drop(plain);
    let idle = RecompressOptions { kind: Some(RecompressKind::Idle), ..RecompressOptions::default() };
    sides.push(manual(bench, "by hand, zstd level 3", zstd.clone(), &idle)?);
    sides.push(automatic(bench, sides[0].stored)?);
    let in_groups = RecompressOptions { group: true, ..idle };
    sides.push(manual(bench, "by hand, in groups", zstd, &in_groups)?);
    let mut rows = Vec::new();
    for side in &sides {
        let ratio = Summary::one(side.stored as f64 / sides[0].stored as f64);
        let mut row = Row::ratio(format!("recompress: bytes, {}", side.what), ratio)
            .part("MiB", mib(side.stored))
            .part("pool MiB", mib(side.pool))
            .part("pool / lz4's", side.pool as f64 / sides[0].pool as f64);
        if let Some(cpu) = side.cpu {
            row = row
                .part("CPU s", cpu.total().as_secs_f64())
                .part("us a page", cpu.total().as_secs_f64() * 1e6 / bench.data.pages as f64)
                .part("took s", side.wall.as_secs_f64());
        }
        for (name, value) in &side.parts {
            row = row.part(*name, *value);
        }
        rows.push(row);
    }
    let notes = vec![
        "Recompress: compr_data_size and, after compact, mem_used_total, relative to lz4 alone. By hand: all \
         pages idle, zstd level 3 without a dictionary. Automatic: zstd with a dictionary trained on the \
         disk's own pages, for pages idle for 1 s. In groups: recompress group=yes. CPU: of all threads, \
         without filling the disk; us: averaged over all pages. Reads of 4 KiB in random order, and of 64 KiB \
         in order: CPU time a page."
            .to_owned(),
    ];
    Ok(Part { notes, rows })
}

fn filled(bench: &Bench, config: Config) -> Result<Ram> {
    let ram = Ram::new(Config { disksize: bench.data.bytes(), comp_algorithm: Algorithm::Lz4, ..config })?;
    backing::fill(&ram, &bench.data, 1)?;
    Ok(ram)
}

fn side(bench: &Bench, what: &'static str, ram: &Ram, cpu: Option<Cpu>, wall: Duration) -> Result<Side> {
    ram.compact();
    let stat = ram.mm_stat();
    let (stored, pool) = (stat.compr_data_size, stat.mem_used_total);
    let parts = read_times(ram, bench.data.pages)?;
    Ok(Side { what, stored, pool, cpu, wall, parts })
}

/// Returns the CPU times a page of reads of single pages in random order, and of neighbouring pages in order.
fn read_times(ram: &Ram, pages: u64) -> Result<Vec<(&'static str, f64)>> {
    const PAGE: u64 = PAGE_BYTES as u64;
    let count = READ_PAGES.min(pages / READ_IN_ORDER * READ_IN_ORDER);
    let mut buffer = vec![0; (READ_IN_ORDER * PAGE) as usize];
    let us_a_page = |cpu: Cpu| cpu.total().as_secs_f64() * 1e6 / count as f64;
    let watch = UsageMeter::start()?;
    for page in (0..count).step_by(READ_IN_ORDER as usize) {
        ram.read_at(page * PAGE, &mut buffer)?;
    }
    let in_order = us_a_page(watch.stop()?.cpu);
    let watch = UsageMeter::start()?;
    let mut state = 1_u64;
    for _ in 0..count {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ram.read_at((state >> 32) % pages * PAGE, &mut buffer[..PAGE_BYTES])?;
    }
    let random = us_a_page(watch.stop()?.cpu);
    Ok(vec![("random read us", random), ("read in order us", in_order)])
}

fn manual(bench: &Bench, what: &'static str, zstd: Secondary, selection: &RecompressOptions) -> Result<Side> {
    let ram = filled(bench, Config { recomp_algorithms: [Some(zstd), None, None], ..Config::default() })?;
    ram.mark_idle(IdleSelection::All);
    let watch = UsageMeter::start()?;
    let done = ram.recompress(selection);
    let done = done.map_err(|(_, error)| error)?;
    let spent = watch.stop()?;
    check(&ram, &bench.data)?;
    let mut side = side(bench, what, &ram, Some(spent.cpu), spent.wall)?;
    side.parts.extend([("tried", done.tried as f64), ("shrunk", done.shrunk as f64)]);
    Ok(side)
}

fn automatic(bench: &Bench, stored_lz4: u64) -> Result<Side> {
    // Recompression may start while the disk is still being filled. So the cost of filling is
    // measured with a disk that does not recompress.
    let watch = UsageMeter::start()?;
    drop(filled(bench, Config::default())?);
    let fill = watch.stop()?.cpu;
    let watch = UsageMeter::start()?;
    let ram = filled(bench, Config { auto_recompress: Some(IDLE), ..Config::default() })?;
    let stored = &mut || ram.mm_stat().compr_data_size;
    let settled = wait_until_settled(stored_lz4, bench.options.quick, stored)?;
    ensure!(!settled.timeline.is_empty(), "automatic recompression did nothing");
    let cpu = watch.stop()?.cpu - fill;
    check(&ram, &bench.data)?;
    side(bench, "automatic, zstd with a dictionary", &ram, Some(cpu), settled.took())
}

/// Returns an error if a sampled page does not have its original content.
fn check(ram: &Ram, data: &Data) -> Result<()> {
    let mut expected = [0; PAGE_BYTES];
    let mut back = [0; PAGE_BYTES];
    for page in (0..data.pages).step_by(CHECK_STEP as usize) {
        data.read(page, &mut expected)?;
        ram.read_at(page * PAGE_BYTES as u64, &mut back)?;
        ensure!(back == expected, "page {page} was changed by recompression");
    }
    Ok(())
}
