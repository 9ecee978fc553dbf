//! Throughput and latency of workers that write separate pages, each page once, for several
//! variants of a device.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Device, Flags};
use freestone_report::{Row, Summary, Target, Unit};
use hdrhistogram::Histogram;

use crate::data::Random;
use crate::data::page_at;
use crate::measure::machine;

/// Numbers of workers, as in the published experiment.
pub const WORKERS: [usize; 4] = [1, 2, 4, 8];
pub const ROUNDS: u32 = 11;
/// Significant digits of recorded latencies. `LATENCY_NANOS_MAX`, one minute, is the largest
/// recorded latency in nanoseconds.
const DIGITS: u8 = 3;
const LATENCY_NANOS_MAX: u64 = 60_000_000_000;

/// Variant of the measured device or of its locks.
pub trait Variant {
    fn name(&self) -> &'static str;
    /// Prepares a slice: afterwards, no page has been written since the snapshot. Returns one
    /// device per worker; workers may share a device.
    fn prepare(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>>;
    /// Returns the work that a worker does in addition to each write, outside of every lock.
    fn extra_work(&self) -> ExtraWork {
        ExtraWork::Nothing
    }
}

/// Work in addition to a write. See [`Variant::extra_work`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtraWork {
    Nothing,
    /// Compresses the page and discards the result. The write itself stores a same-filled page.
    Codec,
}

pub struct Speed {
    /// Writes per second of all workers.
    pub per_second: f64,
    /// Mean latency of a write, in microseconds.
    pub mean: f64,
    /// 99th percentile of the latency, in microseconds.
    pub p99: f64,
}

/// Returns an empty histogram of nanoseconds.
pub fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, LATENCY_NANOS_MAX, DIGITS)?)
}

/// Runs all variants in turn, for every number of workers. The result is indexed by number of
/// workers, variant and round.
pub fn run(
    rounds: u32,
    variants: &mut [Box<dyn Variant + '_>],
    pages: &[u8],
) -> Result<Vec<Vec<Vec<Speed>>>> {
    let mut speeds: Vec<Vec<Vec<Speed>>> =
        WORKERS.map(|_| variants.iter().map(|_| Vec::new()).collect()).into();
    for round in 0..rounds {
        for (workers, speeds) in WORKERS.into_iter().zip(&mut speeds) {
            let mut order: Vec<usize> = (0..variants.len()).collect();
            // Each round starts with a different variant.
            order.rotate_left(round as usize % variants.len());
            for number in order {
                let variant = &mut variants[number];
                let devices = variant.prepare(workers)?;
                speeds[number].push(slice(&devices, variant.extra_work(), pages, u64::from(round))?);
            }
        }
    }
    Ok(speeds)
}

/// Runs one slice, which writes every page once. Each worker writes its share in an order that is
/// the same for every variant.
pub fn slice(devices: &[Arc<dyn Device>], extra_work: ExtraWork, pages: &[u8], round: u64) -> Result<Speed> {
    let cpus = machine::allowed_cpus()?;
    let workers = devices.len();
    let share = (pages.len() / PAGE_BYTES / workers) as u64;
    let start = Barrier::new(workers);
    let ends = std::thread::scope(|scope| {
        let workers: Vec<_> = devices
            .iter()
            .enumerate()
            .map(|(number, device)| {
                let (start, cpu) = (&start, cpus[number % cpus.len()]);
                // A device that is not shared has only the size of the worker's share.
                let has_own_device = workers > 1 && device.geometry().size < pages.len() as u64;
                scope.spawn(move || -> Result<_> {
                    let first = share * number as u64;
                    let order = Random::new(round << 8 | number as u64).permutation(share);
                    let mut latencies = histogram()?;
                    // Reach the barrier even after a failure, so that the other workers do not
                    // hang.
                    let ready = machine::pin_to(cpu).and_then(|()| WorkerState::new(extra_work));
                    start.wait();
                    let mut state = ready?;
                    let started = Instant::now();
                    for page in order {
                        let content = page_at(pages, first as u32 + page);
                        let at = u64::from(page) + if has_own_device { 0 } else { first };
                        let from = Instant::now();
                        state.write(&**device, at, content)?;
                        latencies.saturating_record(from.elapsed().as_nanos() as u64);
                    }
                    Ok((started, Instant::now(), latencies))
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().ok().context("a worker panicked")?)
            .collect::<Result<Vec<_>>>()
    })?;
    let started = ends.iter().map(|(started, ..)| *started).min().context("no worker")?;
    let ended = ends.iter().map(|(_, ended, _)| *ended).max().context("no worker")?;
    let mut all = histogram()?;
    for (_, _, latencies) in &ends {
        all.add(latencies)?;
    }
    Ok(Speed {
        per_second: (share * workers as u64) as f64 / (ended - started).as_secs_f64(),
        mean: all.mean() / 1e3,
        p99: all.value_at_quantile(0.99) as f64 / 1e3,
    })
}

struct WorkerState {
    codec: Option<crate::engine::bare::LibraryCodec>,
    pattern: Box<[u8; PAGE_BYTES]>,
}

impl WorkerState {
    fn new(extra_work: ExtraWork) -> Result<Self> {
        let codec = match extra_work {
            ExtraWork::Nothing => None,
            ExtraWork::Codec => Some(crate::engine::bare::LibraryCodec::new()?),
        };
        Ok(Self { codec, pattern: Box::new([0x5A; PAGE_BYTES]) })
    }

    fn write(&mut self, device: &dyn Device, page: u64, content: &[u8; PAGE_BYTES]) -> Result<()> {
        let mut data = content;
        if let Some(codec) = &mut self.codec {
            let mut scratch = freestone::codec::Scratch::new();
            std::hint::black_box(crate::engine::bare::Codec::compress(codec, content, &mut scratch));
            // A different pattern for each page, so that the slot's word changes.
            let pattern = (page as u32).wrapping_mul(0x9E37_79B9) | 1;
            self.pattern.as_chunks_mut().0.fill(pattern.to_ne_bytes());
            data = &self.pattern;
        }
        Ok(device.write_at(page * PAGE_BYTES as u64, data, Flags::empty())?)
    }
}

/// Returns rows with throughput and latency of every variant, for every number of workers.
pub fn rows(variants: &[Box<dyn Variant + '_>], speeds: &[Vec<Vec<Speed>>]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (workers, speeds) in WORKERS.into_iter().zip(speeds) {
        for (variant, speeds) in variants.iter().zip(speeds) {
            let over = |number: fn(&Speed) -> f64| Summary::of(speeds.iter().map(number));
            let what = format!("{}, {}", workers_text(workers), variant.name());
            rows.push(
                Row::new(&what, Unit::Kiops, over(|speed| speed.per_second / 1e3))
                    .part("us, mean", over(|speed| speed.mean).median)
                    .part("us, 99 %", over(|speed| speed.p99).median),
            );
        }
    }
    rows
}

/// Returns rows with the throughput of variant `of` relative to variant `to`, for every number of
/// workers.
pub fn ratios(
    what: &str,
    speeds: &[Vec<Vec<Speed>>],
    [of, to]: [usize; 2],
    target: Option<(usize, Target)>,
) -> Vec<Row> {
    let walls = |speeds: &[Speed]| speeds.iter().map(|speed| speed.per_second).collect::<Vec<_>>();
    let means = |speeds: &[Speed]| Summary::of(speeds.iter().map(|speed| speed.mean)).median;
    WORKERS
        .into_iter()
        .zip(speeds)
        .map(|(workers, speeds)| {
            let ratio = Summary::ratio(&walls(&speeds[of]), &walls(&speeds[to]));
            let row = Row::ratio(format!("{}: {what}", workers_text(workers)), ratio)
                .part("mean latency", means(&speeds[of]) / means(&speeds[to]));
            match target {
                Some((at, target)) if at == workers => row.target(target).withhold_if_unsteady(),
                _ => row.withhold_if_unsteady(),
            }
        })
        .collect()
}

fn workers_text(workers: usize) -> String {
    if workers == 1 { "1 worker".into() } else { format!("{workers} workers") }
}
