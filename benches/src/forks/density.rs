//! Many forks that hold more than their family's memory, written all the time, and a quiet one
//! among them with a guarantee.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone::device::{Blocking, Device, Flags, IoBuf};
use freestone::file::File;
use freestone::ram::{Config, Family, ForkConfig, Ram};
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use hdrhistogram::Histogram;

use super::tables::histogram;
use super::{Bench, Image};
use crate::data::{Data, Random, page_at};
use crate::machine;
use crate::measure::{median, thread_clock};
use crate::options::Set;

/// The numbers, and those of a smoke run.
const BUSY: u32 = 64;
const BUSY_QUICK: u32 = 8;
const DIRTY_BYTES: u64 = 128 << 20;
const DIRTY_BYTES_QUICK: u64 = 4 << 20;
/// The family's limit is this part of what is written.
const LIMIT_PART: u64 = 4;
/// What the quiet one has and works on, and is guaranteed; at most an eighth of the limit.
const QUIET_BYTES: u64 = 16 << 20;
/// Different pages that are written.
const CONTENT_BYTES: u64 = 32 << 20;
const ROUNDS: u32 = 11;
/// Long enough for several rounds of spilling.
const SLICE: Duration = Duration::from_secs(1);
const SLICE_QUICK: Duration = Duration::from_millis(50);
/// Between noise and quiet, so that one is over when the other is measured.
const SETTLE: Duration = Duration::from_millis(200);

/// What all threads share.
struct Crowd {
    forks: Vec<Ram>,
    /// Pages of a fork.
    pages: u64,
    content: IoBuf,
    /// Whether the busy ones work.
    on: Mutex<bool>,
    turned: Condvar,
    end: AtomicBool,
    /// Of writes while they were on.
    latencies: Mutex<Histogram<u64>>,
}

pub(super) fn run(bench: &Bench) -> Result<Report> {
    let args = bench.args;
    let busy = bench.count(args.busy, BUSY, BUSY_QUICK);
    let dirty = bench.size(args.dirty, DIRTY_BYTES, DIRTY_BYTES_QUICK);
    let limit = (busy * dirty / LIMIT_PART).max(4 << 20);
    let quiet_bytes = QUIET_BYTES.min(limit / 8) & !0xFFF;
    let base = Image::sparse(&bench.dir, "base", dirty)?;
    let spill = bench.dir.join(format!("freestone-forks-spill-{}.img", std::process::id()));
    // It never gets a name.
    let spill = Arc::new(File::open_for_spilling(spill, Some(busy * dirty))?);
    let config = Config { comp_algorithm: Algorithm::Lz4, mem_limit: limit, ..Config::default() };
    let family = Family::new(config.backed_by(spill, true))?;
    let device: Arc<dyn Device> = Arc::new(base.device()?);
    let fork = |config: &ForkConfig| family.fork(Arc::clone(&device), config);
    let quiet = fork(&ForkConfig { mem_min: quiet_bytes, ..ForkConfig::default() })?;
    let forks = (0..busy).map(|_| fork(&ForkConfig::default())).collect::<Result<Vec<_>, _>>()?;
    let data = Data::open(Set::Fio, CONTENT_BYTES, bench.options)?;
    let crowd = Crowd {
        forks,
        pages: dirty / PAGE_BYTES as u64,
        content: data.load()?,
        on: Mutex::new(false),
        turned: Condvar::new(),
        end: AtomicBool::new(false),
        latencies: Mutex::new(histogram()?),
    };
    let cpus = machine::allowed_cpus()?;
    // The quiet one has a CPU of its own where there are two; so what it loses, it loses inside the
    // engine.
    let (own, others) = cpus.split_first().context("no CPU")?;
    let others = if others.is_empty() { &cpus[..] } else { others };
    let others = &others[..others.len().min(crowd.forks.len())];
    let measured = std::thread::scope(|scope| {
        let noise: Vec<_> = others
            .iter()
            .enumerate()
            .map(|(number, cpu)| {
                let crowd = &crowd;
                let share = (number, others.len());
                scope.spawn(move || {
                    // Whatever ends it, nobody waits for it.
                    let _end = End(&crowd.end);
                    machine::pin_to(*cpu).and_then(|()| crowd.work(share))
                })
            })
            .collect();
        let measured = machine::pin_to(*own).and_then(|()| measure(bench, &crowd, &quiet, quiet_bytes));
        drop(End(&crowd.end));
        crowd.turn(true);
        for thread in noise {
            thread.join().ok().context("a busy thread panicked")??;
        }
        measured
    });
    machine::pin_to_any(&cpus)?;
    let rows = measured?.rows(&family, &quiet);
    Ok(Report::new("forks: density", data.description, busy * dirty, "lz4")
        .note(format!(
            "{busy} forks of one base, {} MiB of each written, limit of the family {} MiB, spilled to \
             a file in {}. {} busy thread(s): first every page of every fork once, then random \
             rewrites; 4 KiB each, one at a time. Latency is from the call to the answer, with every \
             wait for memory.",
            dirty >> 20,
            limit >> 20,
            bench.dir.display(),
            others.len()
        ))
        .note(format!(
            "Quiet: one more fork, {} MiB of its own (mem_min as much), random reads and rewrites of \
             these in turn, on CPU {own}; the busy ones are on CPUs {others:?}. The engine's own \
             threads may run on any. Slices with and without noise take turns.",
            quiet_bytes >> 20
        ))
        .rows(rows))
}

/// Says that it is over when it is dropped.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        // Relaxed: carries no data; joining the threads orders the rest.
        self.0.store(true, Ordering::Relaxed);
    }
}

// ---- the busy ones ------------------------------------------------------------------------------

impl Crowd {
    fn turn(&self, on: bool) {
        *self.on.lock().unwrap_or_else(PoisonError::into_inner) = on;
        self.turned.notify_all();
    }

    /// True where the end has come. Waits while they are off.
    fn wait(&self) -> bool {
        let mut on = self.on.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            // Relaxed: see `End`.
            if self.end.load(Ordering::Relaxed) {
                return true;
            }
            if *on {
                return false;
            }
            on = self.turned.wait(on).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// One thread's loop, on every n-th fork.
    fn work(&self, (number, of): (usize, usize)) -> Result<()> {
        /// Writes between two looks.
        const BATCH: u32 = 64;
        let mine: Vec<&Ram> = self.forks.iter().skip(number).step_by(of).collect();
        let mut random = Random::new(1000 + number as u64);
        // Every page once, fork after fork; from then on at random.
        let order = random.permutation(self.pages);
        let mut first = order.iter().flat_map(|page| mine.iter().map(move |fork| (*fork, u64::from(*page))));
        let mut latencies = histogram()?;
        while !self.wait() {
            for _ in 0..BATCH {
                let (fork, page) = first.next().unwrap_or_else(|| {
                    let pick = random.next_u64();
                    (mine[(pick >> 32) as usize % mine.len()], (pick & 0xFFFF_FFFF) % self.pages)
                });
                let begun = Instant::now();
                fork.write_at(page * PAGE_BYTES as u64, self.any(&mut random), Flags::empty())?;
                latencies.saturating_record(begun.elapsed().as_nanos() as u64);
            }
            self.latencies.lock().unwrap_or_else(PoisonError::into_inner).add(&latencies)?;
            latencies.reset();
        }
        Ok(())
    }

    /// Some content.
    fn any(&self, random: &mut Random) -> &[u8] {
        let pages = self.content.len() / PAGE_BYTES;
        page_at(&self.content, (random.next_u64() % pages as u64) as u32)
    }

    /// What was noted since the last time.
    fn noted(&self) -> Result<Histogram<u64>> {
        let empty = histogram()?;
        Ok(std::mem::replace(&mut *self.latencies.lock().unwrap_or_else(PoisonError::into_inner), empty))
    }

    /// How many first writes there are in all.
    fn all(&self) -> u64 {
        self.pages * self.forks.len() as u64
    }
}

// ---- the quiet one ------------------------------------------------------------------------------

/// Operations a second of the quiet one.
#[derive(Default)]
struct Speeds {
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

/// What came of it.
struct Measured {
    fill_seconds: f64,
    fill: Histogram<u64>,
    /// A noisy slice each.
    rewrites: Vec<Histogram<u64>>,
    noise_per_second: Vec<f64>,
    alone: Speeds,
    noisy: Speeds,
}

fn measure(bench: &Bench, crowd: &Crowd, quiet: &Ram, quiet_bytes: u64) -> Result<Measured> {
    let pages = quiet_bytes / PAGE_BYTES as u64;
    let mut random = Random::new(7);
    for page in 0..pages {
        quiet.write_at(page * PAGE_BYTES as u64, crowd.any(&mut random), Flags::empty())?;
    }
    // The fill.
    let begun = Instant::now();
    let mut fill = histogram()?;
    crowd.turn(true);
    while fill.len() < crowd.all() {
        std::thread::sleep(Duration::from_millis(20));
        // Relaxed: see `End`.
        ensure!(!crowd.end.load(Ordering::Relaxed), "a busy fork could not be written");
        fill.add(&crowd.noted()?)?;
    }
    let fill_seconds = begun.elapsed().as_secs_f64();
    crowd.turn(false);
    let mut measured = Measured {
        fill_seconds,
        fill,
        rewrites: Vec::new(),
        noise_per_second: Vec::new(),
        alone: Speeds::default(),
        noisy: Speeds::default(),
    };
    let length = if bench.options.quick { SLICE_QUICK } else { SLICE };
    for round in 0..bench.options.rounds(ROUNDS, 2) {
        let mut order = [false, true];
        if round % 2 == 1 {
            order.reverse();
        }
        for noise in order {
            crowd.turn(noise);
            std::thread::sleep(SETTLE);
            crowd.noted()?;
            let begun = Instant::now();
            let [wall, cpu] = slice(crowd, quiet, pages, length, &mut random)?;
            let took = begun.elapsed();
            let speeds = if noise { &mut measured.noisy } else { &mut measured.alone };
            speeds.wall.push(wall);
            speeds.cpu.push(cpu);
            if noise {
                let noted = crowd.noted()?;
                measured.noise_per_second.push(noted.len() as f64 / took.as_secs_f64());
                measured.rewrites.push(noted);
            }
        }
        crowd.turn(false);
    }
    Ok(measured)
}

/// Operations a second, on the wall and by the thread's own clock.
fn slice(crowd: &Crowd, quiet: &Ram, pages: u64, length: Duration, random: &mut Random) -> Result<[f64; 2]> {
    /// Operations between two looks at the clock.
    const BATCH: u64 = 64;
    let mut into = [0; PAGE_BYTES];
    let mut done = 0;
    let (begun, cpu) = (Instant::now(), thread_clock());
    while begun.elapsed() < length {
        for number in 0..BATCH {
            let at = random.next_u64() % pages * PAGE_BYTES as u64;
            if number % 2 == 0 {
                quiet.read_at(at, &mut into)?;
            } else {
                quiet.write_at(at, crowd.any(random), Flags::empty())?;
            }
        }
        done += BATCH;
    }
    let cpu = thread_clock().saturating_sub(cpu);
    Ok([done as f64 / begun.elapsed().as_secs_f64(), done as f64 / cpu.as_secs_f64()])
}

// ---- what is said -------------------------------------------------------------------------------

impl Measured {
    fn rows(&self, family: &Family, quiet: &Ram) -> Vec<Row> {
        let micros = |histogram: &Histogram<u64>, part| histogram.value_at_quantile(part) as f64 / 1e3;
        let latency = |what: &str, all: &[&Histogram<u64>]| {
            let over = |part| Summary::of(all.iter().map(|one| micros(one, part)));
            Row::new(format!("latency of a write, 99 %, {what}"), Unit::Micros, over(0.99))
                .part("50 %", over(0.5).median)
                .part("99.9 %", over(0.999).median)
                .part("max", over(1.0).max)
        };
        let rewrites: Vec<_> = self.rewrites.iter().filter(|one| !one.is_empty()).collect();
        let mut rows = vec![
            Row::one("writing every page once", Unit::Seconds, self.fill_seconds)
                .part("writes", self.fill.len() as f64),
            latency("first writes", &[&self.fill]),
        ];
        if !rewrites.is_empty() {
            rows.push(latency("rewrites", &rewrites));
        }
        let noise = Summary::of(self.noise_per_second.iter().map(|speed| speed / 1e3));
        rows.push(Row::new("rewrites of the busy ones", Unit::Kiops, noise));
        let Self { alone, noisy, .. } = self;
        rows.push(
            Row::over("the quiet one: with noise / alone", &noisy.wall, &alone.wall)
                .target(Target::AtLeast(0.9))
                .part("k/s", median(&noisy.wall) / 1e3)
                .part("alone", median(&alone.wall) / 1e3)
                .steady(),
        );
        rows.push(
            Row::over("the quiet one: with noise / alone, by its CPU time", &noisy.cpu, &alone.cpu).steady(),
        );
        let (stat, over) = (family.stat(), quiet.over_stat());
        rows.push(
            Row::one("the family's pool at the end", Unit::Mib, mib(stat.mem_used_total))
                .part("limit", mib(stat.mem_limit))
                .part(
                    "blocks written to the spill file, MiB",
                    mib(quiet.bd_stat().bd_writes * PAGE_BYTES as u64),
                )
                .part("read, MiB", mib(quiet.bd_stat().bd_reads * PAGE_BYTES as u64)),
        );
        rows.push(
            Row::one("the quiet one's own at the end", Unit::Mib, mib(over.own_bytes))
                .part("charged", mib(over.charged))
                .part("mem_min", mib(over.mem_min)),
        );
        rows
    }
}
