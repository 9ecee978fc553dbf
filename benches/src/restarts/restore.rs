//! How soon a kept disk can be read, and how soon all of it is in memory, beside plain reads of its
//! file.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};
use rustix::fs::{Advice, fadvise};

use super::Bench;
use super::kept::{self, Kept};
use crate::data::Random;
use crate::measure::median;
use crate::nbd_client::Client;
use crate::served::{Patience, Server};

const ROUNDS: u32 = 7;
const ROUNDS_QUICK: u32 = 2;
/// What plain reads read at once.
const READ_BYTES: usize = 1 << 20;
/// Loading at half the speed of plain reads, or better.
const LOAD_MAX: f64 = 2.0;
const FIRST_READ_MAX_S: f64 = 0.2;
/// Short, as it is part of what is measured.
const CONNECT: Patience = Patience { most: Duration::from_secs(60), pause: Duration::from_micros(200) };

/// The page cache has nothing of the file, or all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Cache {
    Cold,
    Warm,
}

/// Seconds, by round.
#[derive(Default)]
struct Times {
    plain: Vec<f64>,
    first: Vec<f64>,
    loaded: Vec<f64>,
}

pub(super) fn run(bench: &Bench<'_>, kept: &Kept) -> Result<Report> {
    let (file, increments) = kept.files()?;
    ensure!(increments.is_empty(), "the disk has increments already");
    let bytes = std::fs::metadata(&file)?.len();
    let mut rows = vec![
        Row::one("the server's end, with the save of all", Unit::Seconds, kept.saving.as_secs_f64())
            .part("file MiB", mib(bytes)),
    ];
    let mut times = [Times::default(), Times::default()];
    for round in 0..bench.options.rounds(ROUNDS, ROUNDS_QUICK) {
        for cache in [Cache::Cold, Cache::Warm] {
            let times = &mut times[cache as usize];
            for restores in [round % 2 == 1, round % 2 == 0] {
                prepare(&file, cache)?;
                if restores {
                    let (first, loaded) = restore(kept, round)?;
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
        let loaded =
            Row::over(format!("{name}: until all is in memory / plain reads"), &times.loaded, &times.plain)
                .part("s", median(&times.loaded))
                .part("MiB/s", speed(&times.loaded))
                .part("plain MiB/s", speed(&times.plain));
        let first = Summary::of(times.first.iter().copied());
        rows.push(
            Row::new(format!("{name}: until the first read is answered"), Unit::Seconds, first)
                .target(Target::AtMost(FIRST_READ_MAX_S)),
        );
        rows.push(if name == "cold" { loaded.target(Target::AtMost(LOAD_MAX)) } else { loaded }.steady());
    }
    Ok(Report::new("restarts: restore", kept.data.description.clone(), kept.bytes(), "lz4")
        .note(
            "A RAM disk with keep=yes, saved as one file at the end of the server. Plain reads: the file from its \
             beginning, 1 MiB each. A restore: from before the server's process is made until its first answer to an \
             NBD client (one page at a random place, which is compared), and until its thread that loads has ended and stat tells that all is in memory. \
             These take turns; before each the file is dropped from the page cache (cold), or read (warm). The times \
             of a restore have the start of the program in them.",
        )
        .rows(rows))
}

/// Seconds until the first answer, and until all is in memory.
fn restore(kept: &Kept, round: u32) -> Result<(f64, f64)> {
    let page = Random::new(u64::from(round)).next_u64() % kept.pages;
    let mut content = [[0; PAGE_BYTES], [1; PAGE_BYTES]];
    kept.data.read(page, &mut content[0])?;
    let begun = Instant::now();
    let mut server = Server::spawn(&kept.home.stateful(&[]))?;
    // It listens before it shows the disk.
    let mut client = server.wait_for(CONNECT, &mut || Client::connect(&kept.home.nbd()).ok())?;
    client.read(page * PAGE_BYTES as u64, &mut content[1])?;
    let first = begun.elapsed().as_secs_f64();
    ensure!(content[0] == content[1], "page {page} has not its content again");
    let mut control = server.wait_for(CONNECT, &mut || kept.home.control().ok())?;
    kept::wait_until_loaded(&mut server, &mut control)?;
    let loaded = begun.elapsed().as_secs_f64();
    client.end()?;
    Kept::end(server)?;
    Ok((first, loaded))
}

fn prepare(path: &Path, cache: Cache) -> Result<()> {
    match cache {
        Cache::Warm => read(path).map(drop),
        Cache::Cold => {
            let file = File::open(path)?;
            // What is not on the disk yet stays.
            file.sync_all()?;
            fadvise(&file, 0, None, Advice::DontNeed).with_context(|| format!("{}", path.display()))
        }
    }
}

/// Seconds that plain reads of a file take.
fn read(path: &Path) -> Result<f64> {
    let mut buffer = vec![1; READ_BYTES];
    let begun = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut buffer)? > 0 {}
    Ok(begun.elapsed().as_secs_f64())
}
