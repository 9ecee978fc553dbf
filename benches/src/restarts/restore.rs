//! `restore` part: time until a kept disk (`keep=yes`) serves its first read, and until its whole
//! content is in memory. The latter is compared with plain reads of the content file.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use rustix::fs::{Advice, fadvise};

use super::Bench;
use super::saved_disk::{self, SavedDisk};
use crate::data::Random;
use crate::measure::median;
use crate::programs::server_process::{Server, WaitLimits};
use crate::transport::nbd_client::Client;

const ROUNDS: u32 = 7;
const ROUNDS_QUICK: u32 = 2;
/// Bytes per plain read.
const READ_BYTES: usize = 1 << 20;
/// Longest loading time that meets the target, relative to plain reads of the file.
const LOAD_MAX: f64 = 2.0;
const FIRST_READ_MAX_S: f64 = 0.2;
/// Time limit and retry interval for connecting. The interval is short, as it is part of the
/// measured time.
const CONNECT: WaitLimits =
    WaitLimits { timeout: Duration::from_secs(60), pause: Duration::from_micros(200) };

/// State of the page cache: it holds nothing of the content file, or all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Cold,
    Warm,
}

/// Durations in seconds, by round.
#[derive(Default)]
struct RestoreTimes {
    plain: Vec<f64>,
    first: Vec<f64>,
    loaded: Vec<f64>,
}

pub(super) fn run(bench: &Bench<'_>, saved_disk: &SavedDisk) -> Result<Report> {
    let (file, increments) = saved_disk.files()?;
    ensure!(increments.is_empty(), "the disk has increments already");
    let bytes = std::fs::metadata(&file)?.len();
    let mut rows = vec![
        Row::single(
            "the server's end, with the save of all",
            Unit::Seconds,
            saved_disk.save_time.as_secs_f64(),
        )
        .part("file MiB", mib(bytes)),
    ];
    let mut times = [RestoreTimes::default(), RestoreTimes::default()];
    for round in 0..bench.options.rounds(ROUNDS, ROUNDS_QUICK) {
        for cache in [Cache::Cold, Cache::Warm] {
            let times = &mut times[cache as usize];
            for restores in [round % 2 == 1, round % 2 == 0] {
                prepare(&file, cache)?;
                if restores {
                    let (first, loaded) = restore(saved_disk, round)?;
                    times.first.push(first);
                    times.loaded.push(loaded);
                } else {
                    times.plain.push(read(&file)?);
                }
            }
        }
    }
    for (name, times) in [("cold", &times[0]), ("warm", &times[1])] {
        let speed = |seconds: &[f64]| mib(bytes) / median(seconds);
        let loaded = Row::ratio_of(
            format!("{name}: until all is in memory / plain reads"),
            &times.loaded,
            &times.plain,
        )
        .part("s", median(&times.loaded))
        .part("MiB/s", speed(&times.loaded))
        .part("plain MiB/s", speed(&times.plain));
        let first = Summary::of(times.first.iter().copied());
        rows.push(
            Row::new(format!("{name}: until the first read is answered"), Unit::Seconds, first)
                .target(Target::AtMost(FIRST_READ_MAX_S)),
        );
        rows.push(
            if name == "cold" { loaded.target(Target::AtMost(LOAD_MAX)) } else { loaded }
                .withhold_if_unsteady(),
        );
    }
    Ok(Report::new("restarts: restore", saved_disk.data.description.clone(), saved_disk.bytes(), "lz4")
        .note(
            "A RAM disk with keep=yes, saved as one file when the server ended. Plain reads: the file \
             sequentially, 1 MiB at a time. A restore: from before the server's process is started until its \
             first reply to an NBD client (one random page, which is verified), and until its loader thread \
             has ended and stat reports that everything is in memory. They take turns; before each the file is \
             dropped from the page cache (cold) or read (warm). Times of a restore include the start of the \
             program.",
        )
        .rows(rows))
}

/// Starts the server and returns the seconds until the reply to the first read, and until all
/// content is in memory.
fn restore(saved_disk: &SavedDisk, round: u32) -> Result<(f64, f64)> {
    let page = Random::new(u64::from(round)).next_u64() % saved_disk.pages;
    let mut content = [[0; PAGE_BYTES], [1; PAGE_BYTES]];
    saved_disk.data.read(page, &mut content[0])?;
    let started = Instant::now();
    let mut server = Server::spawn(&saved_disk.home.command_with_state(&[]))?;
    // The server listens before it publishes the disk, so the handshake is retried until it
    // succeeds.
    let mut client = server.wait_for(CONNECT, &mut || Client::connect(&saved_disk.home.nbd_socket()).ok())?;
    client.read(page * PAGE_BYTES as u64, &mut content[1])?;
    let first = started.elapsed().as_secs_f64();
    ensure!(content[0] == content[1], "page {page} has other content than before the restart");
    let mut control = server.wait_for(CONNECT, &mut || saved_disk.home.control().ok())?;
    saved_disk::wait_until_loaded(&mut server, &mut control)?;
    let loaded = started.elapsed().as_secs_f64();
    client.end()?;
    SavedDisk::end(server)?;
    Ok((first, loaded))
}

fn prepare(path: &Path, cache: Cache) -> Result<()> {
    match cache {
        Cache::Warm => read(path).map(drop),
        Cache::Cold => {
            let file = File::open(path)?;
            // Dirty pages cannot be dropped.
            file.sync_all()?;
            fadvise(&file, 0, None, Advice::DontNeed).with_context(|| format!("{}", path.display()))
        }
    }
}

/// Reads a file sequentially and returns the seconds.
fn read(path: &Path) -> Result<f64> {
    let mut buffer = vec![1; READ_BYTES];
    let started = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut buffer)? > 0 {}
    Ok(started.elapsed().as_secs_f64())
}
