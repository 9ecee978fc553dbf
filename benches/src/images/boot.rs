//! What a guest reads while it starts, read again in its order and with its own pauses: from a local
//! file, from an image of which nothing is cached, and from one whose trace is known.

use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use freestone::device::{Blocking as _, Device, IoBuf};
use freestone::ram::{Config, Family, ForkConfig};
use freestone::store::format::CHUNK_BYTES;
use freestone::store::store::Store;
use freestone_report::{Report, Row, Target, Unit, mib};

use super::kit::{Kit, image, until};
use super::remote::Remote;
use crate::measure::median;
use crate::options::Options;

/// As `lab/record-boot.sh` writes it.
const TRACE: &str = include_str!("../../data/boot.trace");
const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
/// Reads of a smoke run, and their longest pause.
const READS_QUICK: usize = 100;
const PAUSE_QUICK: Duration = Duration::from_millis(1);
const WITH_TRACE_MAX: f64 = 1.5;
const WITHOUT_MAX: f64 = 4.0;
const BYTES_MAX: f64 = 1.1;

/// One read.
struct Read {
    offset: u64,
    len: usize,
    pause: Duration,
}

fn reads(options: &Options, bytes: u64) -> Result<Vec<Read>> {
    let mut reads = Vec::new();
    for line in TRACE.lines().filter(|line| !line.starts_with('#')) {
        let mut numbers = line.split(' ').map(str::parse::<u64>);
        let mut next = || numbers.next().and_then(Result::ok).with_context(|| format!("{line}: no read"));
        let (offset, len, pause) = (next()?, next()? as usize, Duration::from_micros(next()?));
        reads.push(Read { offset, len, pause });
    }
    if options.quick {
        reads.truncate(READS_QUICK);
        for read in &mut reads {
            read.pause = read.pause.min(PAUSE_QUICK);
        }
    }
    // A smaller disk has those that lie on it.
    reads.retain(|read| read.offset + read.len as u64 <= bytes);
    ensure!(!reads.is_empty(), "the data is smaller than any read lies");
    Ok(reads)
}

/// Seconds of all reads, one after the other.
fn replay(base: Arc<dyn Device>, reads: &[Read], paused: bool) -> Result<f64> {
    let fork = Family::new(Config::default())?.fork(base, &ForkConfig::default())?;
    let begun = Instant::now();
    for read in reads {
        if paused {
            thread::sleep(read.pause);
        }
        let mut buffer = IoBuf::zeroed(read.len)?;
        fork.read_at(read.offset, &mut buffer)?;
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// What a start from the store took.
struct Started {
    seconds: f64,
    /// Bytes that came over the line, with all that HTTP adds.
    came: u64,
    /// Of the objects of the chunks that were read.
    touched: u64,
    chunks: u64,
}

fn start(
    kit: &Kit,
    remote: &Remote,
    store: &Arc<Store>,
    reads: &[Read],
    prefetch: bool,
    paused: bool,
) -> Result<Started> {
    let cache = kit.empty_cache()?;
    let before = remote.bytes().1;
    let begun = Instant::now();
    let image = image(store, cache.path(), prefetch)?;
    let opened = begun.elapsed().as_secs_f64();
    let seconds = opened + replay(Arc::clone(&image) as _, reads, paused)?;
    let came = remote.bytes().1 - before;
    image.push_trace(until())?;
    let mut stored = HashMap::new();
    for map in image.manifest().segments.iter().flat_map(|segment| &segment.maps) {
        stored.extend(
            store.map(&map.map, until())?.chunks().iter().map(|chunk| (chunk.name, u64::from(chunk.stored))),
        );
    }
    let touched = store.trace(&image.name(), until())?;
    let bytes = touched.iter().filter_map(|name| stored.get(name)).sum();
    Ok(Started { seconds, came, touched: bytes, chunks: touched.len() as u64 })
}

pub fn run(kit: &Kit, remote: &Remote, options: &Options) -> Result<Report> {
    let reads = reads(options, kit.data.bytes())?;
    let asked: u64 = reads.iter().map(|read| read.len as u64).sum();
    let (store, is_new) = remote.store(&format!("boot-{}", std::process::id()))?;
    kit.push(&store, is_new)?;
    let mut rows = Vec::new();
    for (paused, what) in [(true, "with the guest's pauses"), (false, "without pauses")] {
        let (mut local, mut without, mut with) = (Vec::new(), Vec::new(), Vec::new());
        let (mut bytes, mut last) = (Vec::new(), None);
        for _ in 0..options.rounds(ROUNDS, ROUNDS_QUICK) {
            local.push(replay(kit.local()?, &reads, paused)?);
            let started = start(kit, remote, &store, &reads, false, paused)?;
            without.push(started.seconds);
            bytes.push(started.came as f64 / started.touched as f64);
            last = Some(started);
            with.push(start(kit, remote, &store, &reads, true, paused)?.seconds);
        }
        let last = last.context("there is a round at least")?;
        let row = |name: &str, times: &[f64], most: f64| {
            let row = Row::over(format!("{what}: {name} / local file"), times, &local)
                .part("s", median(times))
                .part("local s", median(&local));
            if paused { row.target(Target::AtMost(most)) } else { row }
        };
        rows.push(row("nothing cached, its trace known", &with, WITH_TRACE_MAX));
        rows.push(row("nothing cached, no trace", &without, WITHOUT_MAX));
        rows.push(
            Row::one(
                format!("{what}: bytes that came / chunks that were read, no trace"),
                Unit::Ratio,
                median(&bytes),
            )
            .target(Target::AtMost(BYTES_MAX))
            .part("came MiB", mib(last.came))
            .part("read MiB", mib(asked))
            .part("chunks", last.chunks as f64)
            .part("chunks whole MiB", mib(last.chunks * CHUNK_BYTES as u64)),
        );
    }
    Ok(Report::new("images: boot", kit.data.description.clone(), kit.data.bytes(), "zstd")
        .note(format!(
            "{} reads of a Debian guest up to its login, one after the other, through a fork: benches/data/boot.trace. \
             Over a line of 20 ms to and fro and 1 Gbit/s, to {}; the local file is in the page cache. The times have \
             the opening of the image in them. Bytes: all that came over the line, with answers' headers, manifest and maps.",
            reads.len(),
            remote.name
        ))
        .rows(rows))
}
