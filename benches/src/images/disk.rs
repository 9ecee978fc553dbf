//! `disk` part: random reads of a fork over an image that is cached on disk but not in memory, beside a
//! fork over a local file that is not in memory either.

use std::fs::{self, File};
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Instant;

use anyhow::{Result, anyhow};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking as _, Device, IoBuf};
use freestone::ram::{Config, Family, ForkConfig, Ram};
use freestone_report::{Report, Row, Summary, Target};
use rustix::fs::{Advice, fadvise};

use super::test_image::TestImage;
use crate::data::Random;
use crate::measure::median;
use crate::options::Options;

const ROUNDS: u32 = 11;
const ROUNDS_QUICK: u32 = 1;
/// Number of reads per slice, of all threads together.
const READS: u64 = 4000;
const READS_QUICK: u64 = 200;
/// Numbers of reader threads, each with one page at a time.
const THREADS: [u64; 2] = [1, 16];
/// Lowest speed that meets the target, relative to the local file.
const SPEED_MIN: f64 = 0.8;

pub fn run(test_image: &TestImage, options: &Options) -> Result<Report> {
    let fork = |base: Arc<dyn Device>| -> Result<Ram> {
        Ok(Family::new(Config::default())?.fork(base, &ForkConfig::default())?)
    };
    let sides = [fork(test_image.local()?)?, fork(test_image.pulled()?)?];
    let all = if options.quick { READS_QUICK } else { READS };
    let mut rows = Vec::new();
    for threads in THREADS {
        let mut speeds = [Vec::new(), Vec::new()];
        for round in 0..options.rounds(ROUNDS, ROUNDS_QUICK) {
            for at in 0..sides.len() {
                // Every other round uses the opposite order.
                let side = if round % 2 == 1 { sides.len() - 1 - at } else { at };
                drop_from_page_cache(&test_image.file)?;
                drop_from_page_cache(&test_image.cache())?;
                let started = Instant::now();
                read(&sides[side], threads, all / threads, u64::from(round))?;
                speeds[side].push((all / threads * threads) as f64 / started.elapsed().as_secs_f64());
            }
        }
        let [local, cached] = speeds;
        let plural = if threads == 1 { "" } else { "s" };
        let row = Row::ratio(
            format!("4 KiB at random, {threads} thread{plural}: reads a second, image / file"),
            Summary::ratio(&cached, &local),
        );
        rows.push(
            row.target(Target::AtLeast(SPEED_MIN))
                .part("image reads/s", median(&cached))
                .part("file reads/s", median(&local)),
        );
    }
    Ok(Report::new(
        "images: from the disk cache",
        test_image.data.description.clone(),
        test_image.data.bytes(),
        "none",
    )
    .note(
        "Reads of an empty fork: over an image that was pulled, and over the file that was pushed, both on \
             one disk. Before each slice both are dropped from the page cache; caches of the disk or of the \
             machine below remain.",
    )
    .rows(rows))
}

/// Drops a file, or all files of a directory, from the page cache.
fn drop_from_page_cache(path: &Path) -> Result<()> {
    if path.is_dir() {
        return fs::read_dir(path)?.try_for_each(|entry| drop_from_page_cache(&entry?.path()));
    }
    let file = File::open(path)?;
    // Dirty pages cannot be dropped.
    file.sync_data()?;
    Ok(fadvise(&file, 0, None, Advice::DontNeed)?)
}

fn read(device: &Ram, threads: u64, each: u64, seed: u64) -> Result<()> {
    let pages = device.geometry().size / PAGE_BYTES as u64;
    thread::scope(|scope| {
        let readers = (0..threads).map(|number| {
            scope.spawn(move || -> Result<()> {
                let mut random = Random::new(seed * threads + number);
                let mut page = IoBuf::zeroed(PAGE_BYTES)?;
                for _ in 0..each {
                    device.read_at(random.next_u64() % pages * PAGE_BYTES as u64, &mut page)?;
                }
                Ok(())
            })
        });
        let readers: Vec<_> = readers.collect();
        readers.into_iter().try_for_each(|reader| reader.join().map_err(|_| anyhow!("a reader panicked"))?)
    })
}
