//! Workers that write pages of their own, each page once: throughput and latency of all of them,
//! variant beside variant.

use std::sync::{Arc, Barrier};
use std::time::Instant;

use anyhow::{Context, Result};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Device, Flags};
use freestone_report::{Row, Summary, Target, Unit};
use hdrhistogram::Histogram;

use crate::data::Random;
use crate::data::page_at;
use crate::machine;

/// Numbers of workers: the source's.
pub const WORKERS: [usize; 4] = [1, 2, 4, 8];
/// Usual number of rounds.
pub const ROUNDS: u32 = 11;
/// Latencies are kept to so many digits, up to a minute.
const DIGITS: u8 = 3;
const LATENCY_NANOS_MAX: u64 = 60_000_000_000;

/// A side of the comparison.
pub trait Variant {
    /// What the rows call it.
    fn name(&self) -> &'static str;
    /// Makes it ready for one slice: no page was written since the snapshot. Returns a device for
    /// each worker, perhaps the same.
    fn fresh(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>>;
    /// What a worker does beside each write, outside of every lock.
    fn beside(&self) -> Beside {
        Beside::Nothing
    }
}

/// See [`Variant::beside`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Beside {
    /// The write is all it does.
    Nothing,
    /// Compresses the page and drops the object; what is written then is a page of one pattern.
    Codec,
}

/// What a slice reached.
pub struct Speed {
    /// Writes a second of all workers.
    pub per_second: f64,
    /// Of one write, in microseconds.
    pub mean: f64,
    /// What 99 of 100 writes do not exceed, in microseconds.
    pub p99: f64,
}

/// An empty histogram of nanoseconds.
pub fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, LATENCY_NANOS_MAX, DIGITS)?)
}

/// Runs all variants in turn, for every number of workers; the speeds by number of workers, then by
/// variant, then by round.
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
            // Another one begins in every round.
            order.rotate_left(round as usize % variants.len());
            for number in order {
                let variant = &mut variants[number];
                let devices = variant.fresh(workers)?;
                speeds[number].push(slice(&devices, variant.beside(), pages, u64::from(round))?);
            }
        }
    }
    Ok(speeds)
}

/// Every page is written once: a worker's share in an order that is the same for every variant.
pub fn slice(devices: &[Arc<dyn Device>], beside: Beside, pages: &[u8], round: u64) -> Result<Speed> {
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
                // A device of the worker's own has only its share.
                let alone = workers > 1 && device.geometry().size < pages.len() as u64;
                scope.spawn(move || -> Result<_> {
                    let first = share * number as u64;
                    let order = Random::new(round << 8 | number as u64).permutation(share);
                    let mut latencies = histogram()?;
                    // Whatever fails, the barrier is reached.
                    let ready = machine::pin_to(cpu).and_then(|()| Work::new(beside));
                    start.wait();
                    let mut work = ready?;
                    let begun = Instant::now();
                    for page in order {
                        let content = page_at(pages, first as u32 + page);
                        let at = u64::from(page) + if alone { 0 } else { first };
                        let from = Instant::now();
                        work.write(&**device, at, content)?;
                        latencies.saturating_record(from.elapsed().as_nanos() as u64);
                    }
                    Ok((begun, Instant::now(), latencies))
                })
            })
            .collect();
        workers
            .into_iter()
            .map(|worker| worker.join().ok().context("a worker panicked")?)
            .collect::<Result<Vec<_>>>()
    })?;
    let begun = ends.iter().map(|(begun, ..)| *begun).min().context("no worker")?;
    let ended = ends.iter().map(|(_, ended, _)| *ended).max().context("no worker")?;
    let mut all = histogram()?;
    for (_, _, latencies) in &ends {
        all.add(latencies)?;
    }
    Ok(Speed {
        per_second: (share * workers as u64) as f64 / (ended - begun).as_secs_f64(),
        mean: all.mean() / 1e3,
        p99: all.value_at_quantile(0.99) as f64 / 1e3,
    })
}

/// What a worker has of its own.
struct Work {
    codec: Option<crate::bare::Ours>,
    pattern: Box<[u8; PAGE_BYTES]>,
}

impl Work {
    fn new(beside: Beside) -> Result<Self> {
        let codec = match beside {
            Beside::Nothing => None,
            Beside::Codec => Some(crate::bare::Ours::new()?),
        };
        Ok(Self { codec, pattern: Box::new([0x5A; PAGE_BYTES]) })
    }

    fn write(&mut self, device: &dyn Device, page: u64, content: &[u8; PAGE_BYTES]) -> Result<()> {
        let mut data = content;
        if let Some(codec) = &mut self.codec {
            let mut scratch = freestone::codec::Scratch::new();
            std::hint::black_box(crate::bare::Codec::compress(codec, content, &mut scratch));
            // Another pattern than the one before: the word changes.
            let pattern = (page as u32).wrapping_mul(0x9E37_79B9) | 1;
            self.pattern.as_chunks_mut().0.fill(pattern.to_ne_bytes());
            data = &self.pattern;
        }
        Ok(device.write_at(page * PAGE_BYTES as u64, data, Flags::empty())?)
    }
}

/// Throughput and latency of every variant, for every number of workers.
pub fn rows(variants: &[Box<dyn Variant + '_>], speeds: &[Vec<Vec<Speed>>]) -> Vec<Row> {
    let mut rows = Vec::new();
    for (workers, speeds) in WORKERS.into_iter().zip(speeds) {
        for (variant, speeds) in variants.iter().zip(speeds) {
            let over = |number: fn(&Speed) -> f64| Summary::of(speeds.iter().map(number));
            let what = format!("{}, {}", worded(workers), variant.name());
            rows.push(
                Row::new(&what, Unit::Kiops, over(|speed| speed.per_second / 1e3))
                    .part("us, mean", over(|speed| speed.mean).median)
                    .part("us, 99 %", over(|speed| speed.p99).median),
            );
        }
    }
    rows
}

/// The throughput of one variant over that of another, for every number of workers.
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
            let row = Row::ratio(format!("{}: {what}", worded(workers)), ratio)
                .part("mean latency", means(&speeds[of]) / means(&speeds[to]));
            match target {
                Some((at, target)) if at == workers => row.target(target).steady(),
                _ => row.steady(),
            }
        })
        .collect()
}

fn worded(workers: usize) -> String {
    if workers == 1 { "1 worker".into() } else { format!("{workers} workers") }
}
