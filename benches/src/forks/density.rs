//! Many busy forks that together hold more than the memory limit of their family (a base and its
//! forks, which share memory). A quiet fork with guaranteed memory is among them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use freestone::PAGE_BYTES;
use freestone::codec::Algorithm;
use freestone::device::{Blocking, Device, Flags, IoBuf};
use freestone::file::File;
use freestone::ram::{Config, Family, ForkConfig, Ram};
use freestone::sync::{Condvar, Mutex};
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use hdrhistogram::Histogram;

use super::tables::histogram;
use super::{Bench, Image};
use crate::data::{Data, Random, page_at};
use crate::measure::machine;
use crate::measure::{median, thread_clock};
use crate::options::Set;

/// Number of busy forks, by default. The values of a full run are those of the requirement;
/// constants with `QUICK` are for a smoke run.
const BUSY: u32 = 64;
const BUSY_QUICK: u32 = 8;
const DIRTY_BYTES: u64 = 128 << 20;
const DIRTY_BYTES_QUICK: u64 = 4 << 20;
/// Divisor of the bytes written to all busy forks. The quotient is the family's memory limit.
const LIMIT_PART: u64 = 4;
/// Guaranteed memory and working set of the quiet fork, in bytes, but at most an eighth of the
/// memory limit.
const QUIET_BYTES: u64 = 16 << 20;
/// Total size of the different pages that are written, in bytes.
const CONTENT_BYTES: u64 = 32 << 20;
const ROUNDS: u32 = 11;
/// Duration of a slice: long enough for several rounds of eviction.
const SLICE: Duration = Duration::from_secs(1);
const SLICE_QUICK: Duration = Duration::from_millis(50);
/// Pause between slices with and without busy forks, so that the effects of a slice do not reach
/// the next.
const SETTLE: Duration = Duration::from_millis(200);

/// The busy forks, and the state that their threads share with the measurement.
struct BusyForks {
    forks: Vec<Ram>,
    pages: u64,
    content: IoBuf,
    /// True while the busy threads work.
    running: Mutex<bool>,
    running_changed: Condvar,
    end: AtomicBool,
    /// Latencies of the busy threads' writes, in nanoseconds.
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
    let spill = Arc::new(File::open_for_writeback(spill, Some(busy * dirty))?);
    let config = Config { comp_algorithm: Algorithm::Lz4, mem_limit: limit, ..Config::default() };
    let family = Family::new(config.backed_by(spill, true))?;
    let device: Arc<dyn Device> = Arc::new(base.device()?);
    let fork = |config: &ForkConfig| family.fork(Arc::clone(&device), config);
    let quiet = fork(&ForkConfig { mem_min: quiet_bytes, ..ForkConfig::default() })?;
    let forks = (0..busy).map(|_| fork(&ForkConfig::default())).collect::<Result<Vec<_>, _>>()?;
    let data = Data::open(Set::Fio, CONTENT_BYTES, bench.options)?;
    let busy_forks = BusyForks {
        forks,
        pages: dirty / PAGE_BYTES as u64,
        content: data.load()?,
        running: Mutex::new(false),
        running_changed: Condvar::new(),
        end: AtomicBool::new(false),
        latencies: Mutex::new(histogram()?),
    };
    let cpus = machine::allowed_cpus()?;
    // With two or more CPUs, the quiet fork has a CPU of its own, so any slowdown is caused inside
    // the engine.
    let (own, others) = cpus.split_first().context("no CPU")?;
    let others = if others.is_empty() { &cpus[..] } else { others };
    let others = &others[..others.len().min(busy_forks.forks.len())];
    let measured = std::thread::scope(|scope| {
        let noise: Vec<_> = others
            .iter()
            .enumerate()
            .map(|(number, cpu)| {
                let busy_forks = &busy_forks;
                let share = (number, others.len());
                scope.spawn(move || {
                    // Ends the measurement if this thread fails or panics, so that the other
                    // threads do not hang.
                    let _end = EndGuard(&busy_forks.end);
                    machine::pin_to(*cpu).and_then(|()| busy_forks.run_worker(share))
                })
            })
            .collect();
        let measured = machine::pin_to(*own).and_then(|()| measure(bench, &busy_forks, &quiet, quiet_bytes));
        drop(EndGuard(&busy_forks.end));
        busy_forks.set_running(true);
        for thread in noise {
            thread.join().ok().context("a busy thread panicked")??;
        }
        measured
    });
    machine::pin_to_any(&cpus)?;
    let rows = measured?.rows(&family, &quiet);
    Ok(Report::new("forks: density", data.description, busy * dirty, "lz4")
        .note(format!(
            "{busy} forks of one base with {} MiB written to each; memory limit of the family {} MiB, backing \
             file in {}. {} busy thread(s): first every page of every fork once, then random rewrites; 4 KiB \
             each, one at a time. Latency is from call to completion, including every wait for memory.",
            dirty >> 20,
            limit >> 20,
            bench.dir.display(),
            others.len()
        ))
        .note(format!(
            "Quiet: one more fork with {} MiB of its own (mem_min is the same size), random reads and rewrites \
             of it in turn, on CPU {own}; the busy threads are on CPUs {others:?}. The engine's own threads \
             may run on any CPU. Slices with and without noise take turns.",
            quiet_bytes >> 20
        ))
        .rows(rows))
}

struct EndGuard<'a>(&'a AtomicBool);

impl Drop for EndGuard<'_> {
    fn drop(&mut self) {
        // Relaxed: the flag carries no data; joining the threads orders the rest.
        self.0.store(true, Ordering::Relaxed);
    }
}

// ---- busy forks ---------------------------------------------------------------------------------

impl BusyForks {
    fn set_running(&self, running: bool) {
        *self.running.lock() = running;
        self.running_changed.notify_all();
    }

    /// Waits while the busy threads are paused. Returns true if the measurement has ended.
    fn wait(&self) -> bool {
        let mut running = self.running.lock();
        loop {
            // Relaxed: see `EndGuard`.
            if self.end.load(Ordering::Relaxed) {
                return true;
            }
            if *running {
                return false;
            }
            running = self.running_changed.wait(running);
        }
    }

    /// Runs busy thread `number`, which writes to every `of`-th fork until the measurement ends.
    fn run_worker(&self, (number, of): (usize, usize)) -> Result<()> {
        /// Writes between two checks of the shared state.
        const BATCH: u32 = 64;
        let mine: Vec<&Ram> = self.forks.iter().skip(number).step_by(of).collect();
        let mut random = Random::new(1000 + number as u64);
        // First, every page of each fork is written once, in random order; then random pages are
        // rewritten.
        let order = random.permutation(self.pages);
        let mut first = order.iter().flat_map(|page| mine.iter().map(move |fork| (*fork, u64::from(*page))));
        let mut latencies = histogram()?;
        while !self.wait() {
            for _ in 0..BATCH {
                let (fork, page) = first.next().unwrap_or_else(|| {
                    let pick = random.next_u64();
                    (mine[(pick >> 32) as usize % mine.len()], (pick & 0xFFFF_FFFF) % self.pages)
                });
                let start = Instant::now();
                fork.write_at(page * PAGE_BYTES as u64, self.random_page(&mut random), Flags::empty())?;
                latencies.saturating_record(start.elapsed().as_nanos() as u64);
            }
            self.latencies.lock().add(&latencies)?;
            latencies.reset();
        }
        Ok(())
    }

    /// Returns a random page of the content.
    fn random_page(&self, random: &mut Random) -> &[u8] {
        let pages = self.content.len() / PAGE_BYTES;
        page_at(&self.content, (random.next_u64() % pages as u64) as u32)
    }

    /// Returns and clears the recorded latencies.
    fn take_latencies(&self) -> Result<Histogram<u64>> {
        let empty = histogram()?;
        Ok(std::mem::replace(&mut *self.latencies.lock(), empty))
    }

    /// Returns the number of writes that fill all busy forks: one per page.
    fn first_write_count(&self) -> u64 {
        self.pages * self.forks.len() as u64
    }
}

// ---- quiet fork ---------------------------------------------------------------------------------

/// Operations per second of the quiet fork in each slice, by wall time and by CPU time.
#[derive(Default)]
struct Speeds {
    wall: Vec<f64>,
    cpu: Vec<f64>,
}

struct DensityResult {
    fill_seconds: f64,
    fill: Histogram<u64>,
    /// Write latencies of the busy forks, by slice in which they were running.
    rewrites: Vec<Histogram<u64>>,
    noise_per_second: Vec<f64>,
    alone: Speeds,
    noisy: Speeds,
}

fn measure(bench: &Bench, busy_forks: &BusyForks, quiet: &Ram, quiet_bytes: u64) -> Result<DensityResult> {
    let pages = quiet_bytes / PAGE_BYTES as u64;
    let mut random = Random::new(7);
    for page in 0..pages {
        quiet.write_at(page * PAGE_BYTES as u64, busy_forks.random_page(&mut random), Flags::empty())?;
    }
    // Fill: every page of every busy fork is written once.
    let start = Instant::now();
    let mut fill = histogram()?;
    busy_forks.set_running(true);
    while fill.len() < busy_forks.first_write_count() {
        std::thread::sleep(Duration::from_millis(20));
        // Relaxed: see `EndGuard`.
        ensure!(!busy_forks.end.load(Ordering::Relaxed), "a busy fork could not be written");
        fill.add(&busy_forks.take_latencies()?)?;
    }
    let fill_seconds = start.elapsed().as_secs_f64();
    busy_forks.set_running(false);
    let mut measured = DensityResult {
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
            busy_forks.set_running(noise);
            std::thread::sleep(SETTLE);
            busy_forks.take_latencies()?;
            let start = Instant::now();
            let [wall, cpu] = slice(busy_forks, quiet, pages, length, &mut random)?;
            let took = start.elapsed();
            let speeds = if noise { &mut measured.noisy } else { &mut measured.alone };
            speeds.wall.push(wall);
            speeds.cpu.push(cpu);
            if noise {
                let latencies = busy_forks.take_latencies()?;
                measured.noise_per_second.push(latencies.len() as f64 / took.as_secs_f64());
                measured.rewrites.push(latencies);
            }
        }
        busy_forks.set_running(false);
    }
    Ok(measured)
}

/// Runs a slice of the quiet fork and returns operations per second of wall time and of CPU time.
fn slice(
    busy_forks: &BusyForks,
    quiet: &Ram,
    pages: u64,
    length: Duration,
    random: &mut Random,
) -> Result<[f64; 2]> {
    /// Operations between two readings of the clock.
    const BATCH: u64 = 64;
    let mut into = [0; PAGE_BYTES];
    let mut done = 0;
    let (start, cpu) = (Instant::now(), thread_clock());
    while start.elapsed() < length {
        for number in 0..BATCH {
            let at = random.next_u64() % pages * PAGE_BYTES as u64;
            if number % 2 == 0 {
                quiet.read_at(at, &mut into)?;
            } else {
                quiet.write_at(at, busy_forks.random_page(random), Flags::empty())?;
            }
        }
        done += BATCH;
    }
    let cpu = thread_clock().saturating_sub(cpu);
    Ok([done as f64 / start.elapsed().as_secs_f64(), done as f64 / cpu.as_secs_f64()])
}

// ---- report -------------------------------------------------------------------------------------

impl DensityResult {
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
            Row::single("writing every page once", Unit::Seconds, self.fill_seconds)
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
            Row::ratio_of("the quiet one: with noise / alone", &noisy.wall, &alone.wall)
                .target(Target::AtLeast(0.9))
                .part("k/s", median(&noisy.wall) / 1e3)
                .part("alone", median(&alone.wall) / 1e3)
                .withhold_if_unsteady(),
        );
        rows.push(
            Row::ratio_of("the quiet one: with noise / alone, by its CPU time", &noisy.cpu, &alone.cpu)
                .withhold_if_unsteady(),
        );
        let (stat, over) = (family.stat(), quiet.over_stat());
        rows.push(
            Row::single("the family's pool at the end", Unit::Mib, mib(stat.mem_used_total))
                .part("limit", mib(stat.mem_limit))
                .part(
                    "blocks written to the spill file, MiB",
                    mib(quiet.bd_stat().bd_writes * PAGE_BYTES as u64),
                )
                .part("read, MiB", mib(quiet.bd_stat().bd_reads * PAGE_BYTES as u64)),
        );
        rows.push(
            Row::single("the quiet one's own at the end", Unit::Mib, mib(over.own_bytes))
                .part("charged", mib(over.charged))
                .part("mem_min", mib(over.mem_min)),
        );
        rows
    }
}
