//! Requests to hot pages while the background works on the cold ones, beside the same requests to a disk without
//! background work.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Flags, IoBuf};
use freestone::ram::{Config, Ram};
use freestone_report::{Report, Row, Target};
use hdrhistogram::Histogram;

use super::contenders::{self, Contender, PLAIN};
use crate::data::{Data, Random, page_at};
use crate::forks::tables::histogram;
use crate::measure::median;
use crate::options::Options;
use crate::writeback::backing;

/// Size of the hot part, at the end of the disk. The rest, the cold part, must keep the background busy for longer
/// than a window.
const HOT_BYTES: u64 = 16 << 20;
/// Duration of a window (the second value with --quick).
const WINDOW: [Duration; 2] = [Duration::from_secs(3), Duration::from_millis(300)];
/// Number of windows of each side, and with --quick.
const ROUNDS: [u32; 2] = [9, 3];
/// Time limit until background work begins.
const BEGIN_MAX: Duration = Duration::from_secs(60);
/// Bounds of the speed and of the 99th percentile of the latency, against a disk without background work.
const SPEED_MIN: f64 = 0.97;
const LATE_MAX: f64 = 1.1;
/// Requests between two readings of the clock for the end of a window.
const BATCH: u32 = 64;

/// Latencies of a window in nanoseconds: of reads, and of writes.
struct Window {
    latencies: [Histogram<u64>; 2],
    /// Number of pages that the background made smaller.
    pages: u64,
}

pub fn run(data: &Data, idle: Duration, options: &Options) -> Result<Report> {
    let quick = usize::from(options.quick);
    let window = WINDOW[quick];
    let rounds = options.rounds(ROUNDS[0], ROUNDS[1]);
    let all = contenders::all(idle);
    let off = all.iter().find(|contender| contender.name == PLAIN).unwrap_or(&all[0]);
    let mut rows = Vec::new();
    for on in contenders::in_background(idle) {
        let (mut off_windows, mut on_windows) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            // Each window has a new disk: a disk whose work is done has no background work. The side that begins
            // alternates.
            for has_work in [round % 2 == 1, round % 2 == 0] {
                if has_work {
                    on_windows.push(measure(&on, true, data, window)?);
                } else {
                    off_windows.push(measure(off, false, data, window)?);
                }
            }
        }
        for (number, what) in ["reads", "writes"].into_iter().enumerate() {
            let of = |windows: &[Window], part: f64| -> Vec<f64> {
                windows.iter().map(|w| w.latencies[number].value_at_quantile(part) as f64).collect()
            };
            let ([on_mid, off_mid], [on_late, off_late]) =
                [0.5, 0.99].map(|part| [of(&on_windows, part), of(&off_windows, part)]).into();
            let name = on.name;
            rows.push(
                Row::ratio_of(format!("hot 4 KiB {what}, speed: {name} / off"), &off_mid, &on_mid)
                    .target(Target::AtLeast(SPEED_MIN))
                    .part("ns", median(&on_mid))
                    .part("off ns", median(&off_mid))
                    .withhold_if_unsteady(),
            );
            let pages = on_windows.iter().map(|window| window.pages as f64).collect::<Vec<_>>();
            rows.push(
                Row::ratio_of(format!("hot 4 KiB {what}, 99 % latency: {name} / off"), &on_late, &off_late)
                    .target(Target::AtMost(LATE_MAX))
                    .part("ns", median(&on_late))
                    .part("off ns", median(&off_late))
                    .part("background pages a window", median(&pages))
                    .withhold_if_unsteady(),
            );
        }
    }
    Ok(Report::new("density: hot pages", data.description.clone(), data.bytes(), "lz4")
        .note(format!(
            "One thread reads and writes random pages of {} MiB in turn, while the background works on the other \
             pages of the disk. A window of {} ms with background work and one without take turns, each with a new \
             disk. Speed: by the median latency.",
            HOT_BYTES >> 20,
            window.as_millis()
        ))
        .rows(rows))
}

/// Fills a disk and measures one window, which begins when background work has begun.
fn measure(contender: &Contender, has_work: bool, data: &Data, window: Duration) -> Result<Window> {
    let hot = HOT_BYTES.min(data.bytes() / 4) / PAGE_BYTES as u64 * PAGE_BYTES as u64;
    let ram = Ram::new(Config { disksize: data.bytes() + hot, ..contender.config.clone() })?;
    backing::fill(&ram, data, 1)?;
    let mut content = IoBuf::zeroed(hot as usize)?;
    data.read(0, &mut content)?;
    let mut load = Load { ram: &ram, first: data.bytes(), content, random: Random::new(11) };
    let started = Instant::now();
    let mut latencies = [histogram()?, histogram()?];
    while has_work && contenders::background_pages(&ram) == 0 {
        ensure!(started.elapsed() < BEGIN_MAX, "{}: no background work in {BEGIN_MAX:?}", contender.name);
        load.run(Duration::from_millis(20), &mut latencies)?;
    }
    // Brings the pages of a disk without background work into the same state.
    load.run(window / 10, &mut latencies)?;
    latencies.iter_mut().for_each(Histogram::reset);
    let before = contenders::background_pages(&ram);
    load.run(window, &mut latencies)?;
    let pages = contenders::background_pages(&ram) - before;
    ensure!(!has_work || pages > 0, "{}: the background work had ended", contender.name);
    Ok(Window { latencies, pages })
}

struct Load<'a> {
    ram: &'a Ram,
    /// Offset of the hot part in bytes, and the content of its pages.
    first: u64,
    content: IoBuf,
    random: Random,
}

impl Load<'_> {
    /// Reads and writes random hot pages in turn, and records the latencies.
    fn run(&mut self, time: Duration, latencies: &mut [Histogram<u64>; 2]) -> Result<()> {
        let pages = (self.content.len() / PAGE_BYTES) as u64;
        let mut into = [0; PAGE_BYTES];
        let started = Instant::now();
        while started.elapsed() < time {
            for number in 0..BATCH {
                let pick = self.random.next_u64();
                let offset = self.first + pick % pages * PAGE_BYTES as u64;
                let start = Instant::now();
                if number % 2 == 0 {
                    self.ram.read_at(offset, &mut into)?;
                } else {
                    let page = page_at(&self.content, ((pick >> 32) % pages) as u32);
                    self.ram.write_at(offset, page, Flags::empty())?;
                }
                latencies[number as usize % 2].saturating_record(start.elapsed().as_nanos() as u64);
            }
        }
        Ok(())
    }
}
