//! Ways to store data in a RAM disk, and the memory of each when its background work is done.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone::device::Blocking;
use freestone::ram::{Config, Ram, RecompressOptions};

use crate::data::Data;
use crate::measure::process::UsageMeter;
use crate::measure::settle::wait_until_settled;
use crate::writeback::backing;

/// Every `CHECK_STEP`-th page is verified after the background work.
const CHECK_STEP: u64 = 16;

/// Name of the contender that the others are compared with.
pub const PLAIN: &str = "lz4";

/// A way to store data: settings of a RAM disk, and what happens after it was filled.
#[derive(Clone)]
pub struct Contender {
    pub name: &'static str,
    pub config: Config,
    pub work: Work,
}

/// Work that makes pages smaller after they were written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    None,
    /// The family's own threads work in the background.
    Background,
    /// The verbs `recompress` and `compact`.
    Verb(RecompressOptions),
}

/// Returns all contenders; `idle` is the time without access after which background work begins. A new one is
/// one more line.
pub fn all(idle: Duration) -> Vec<Contender> {
    let lz4 = Config { comp_algorithm: Algorithm::Lz4, ..Config::default() };
    let of = |name, config, work| Contender { name, config, work };
    let in_groups = RecompressOptions { group: true, ..RecompressOptions::default() };
    vec![
        of(PLAIN, lz4.clone(), Work::None),
        of("zstd", Config { comp_algorithm: Algorithm::Zstd, ..lz4.clone() }, Work::None),
        of("auto_recompress", Config { auto_recompress: Some(idle), ..lz4.clone() }, Work::Background),
        of("auto_group", Config { auto_group: Some(idle), ..lz4.clone() }, Work::Background),
        of("recompress group=yes", lz4, Work::Verb(in_groups)),
    ]
}

/// The contenders whose work takes place in the background.
pub fn in_background(idle: Duration) -> impl Iterator<Item = Contender> {
    all(idle).into_iter().filter(|contender| contender.work == Work::Background)
}

/// A filled disk whose background work is done.
pub struct Filled {
    pub name: &'static str,
    pub ram: Ram,
    pub memory: u64,
    /// Bytes of pool and tables after `compact`.
    pub compacted: u64,
    /// CPU seconds of the work after the fill, and the time of its last change. None without work.
    pub spent: Option<(f64, Duration)>,
    /// Time since the fill, and the memory from then on.
    pub timeline: Vec<(Duration, u64)>,
}

/// Returns the bytes of memory that a disk's family uses: pool, tables and compression streams.
pub fn memory(ram: &Ram) -> u64 {
    let overhead = ram.memory_overhead();
    let beside = overhead.leaves_bytes + overhead.backrefs_bytes + overhead.metadata_bytes;
    ram.family().stat().mem_used_total + beside + overhead.streams_bytes
}

/// Returns the number of pages that background work has made smaller.
pub fn background_pages(ram: &Ram) -> u64 {
    ram.auto_recompress_stat().pages + ram.group_stat().map_or(0, |stat| stat.grouped)
}

impl Contender {
    /// Fills a disk with the data, and waits for the end of the background work.
    pub fn fill(&self, data: &Data, quick: bool) -> Result<Filled> {
        let ram = Ram::new(Config { disksize: data.bytes(), ..self.config.clone() })?;
        backing::fill(&ram, data, 1)?;
        let (timeline, cpu) = self.settle(&ram, quick)?;
        let (mut expected, mut back) = ([0; PAGE_BYTES], [0; PAGE_BYTES]);
        for page in (0..data.pages).step_by(CHECK_STEP as usize) {
            data.read(page, &mut expected)?;
            ram.read_at(page * PAGE_BYTES as u64, &mut back)?;
            ensure!(back == expected, "{}: page {page} has changed", self.name);
        }
        let used = memory(&ram);
        ram.compact();
        let compacted = memory(&ram);
        let took = timeline.last().map_or(Duration::ZERO, |(at, _)| *at);
        let spent = (self.work != Work::None).then_some((cpu, took));
        Ok(Filled { name: self.name, ram, memory: used, compacted, spent, timeline })
    }

    /// Does the work, or waits for it. Returns the memory of the disk's family over time, and the CPU seconds of
    /// this process.
    pub fn settle(&self, ram: &Ram, quick: bool) -> Result<(Vec<(Duration, u64)>, f64)> {
        let (before, started) = (memory(ram), Instant::now());
        let watch = UsageMeter::start()?;
        let mut timeline = vec![(Duration::ZERO, before)];
        match self.work {
            Work::None => {}
            Work::Background => {
                timeline.extend(wait_until_settled(before, quick, &mut || memory(ram))?.timeline);
            }
            Work::Verb(options) => {
                let mut look = |_, _| {
                    timeline.push((started.elapsed(), memory(ram)));
                    true
                };
                ram.recompress_with_progress(&options, &mut look).map_err(|(_, error)| error)?;
                ram.compact();
                timeline.push((started.elapsed(), memory(ram)));
            }
        }
        Ok((timeline, watch.stop()?.cpu.total().as_secs_f64()))
    }
}
