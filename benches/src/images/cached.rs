//! `cached` part: random reads of a fork over an image that is fully cached and in memory, beside a
//! fork over a local file.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Result, ensure};
use freestone::PAGE_BYTES;
use freestone::device::{Blocking as _, Buffer, Device, IoBuf, Request, TryResult};
use freestone::ram::{Config, Family, ForkConfig, Ram};
use freestone_report::{Report, Row, Summary, Target};

use super::test_image::TestImage;
use crate::data::Random;
use crate::measure::alternate;
use crate::options::Options;
use crate::transport::export::export;
use crate::transport::fio_nbd::{self, Amount, DEPTH, Direction, Load};

/// Longest read time that meets the target, relative to a fork over the local file.
const SLOWER_MAX: f64 = 1.05;
/// Number of pages of a large read.
const PAGES: u64 = 32;
/// Number of slices of the NBD client. `FIO_MILLIS` is the length of a slice in milliseconds.
const FIO_ROUNDS: u32 = 15;
const FIO_ROUNDS_QUICK: u32 = 1;
const FIO_MILLIS: u64 = 1000;
const FIO_MILLIS_QUICK: u64 = 50;

pub fn run(test_image: &TestImage, options: &Options) -> Result<Report> {
    let fork = |base: Arc<dyn Device>| -> Result<Ram> {
        Ok(Family::new(Config::default())?.fork(base, &ForkConfig::default())?)
    };
    let (local, stored) = (fork(test_image.local()?)?, fork(test_image.pulled()?)?);
    warm(&local)?;
    warm(&stored)?;
    let mut rows = Vec::new();
    for (what, pages) in [("4 KiB", 1), ("128 KiB", PAGES)] {
        let (mut one, mut other) =
            (IoBuf::zeroed(PAGE_BYTES * pages as usize)?, IoBuf::zeroed(PAGE_BYTES * pages as usize)?);
        let (mut missed, mut missed_other) = (0, 0);
        let times = alternate(
            options.slices(),
            &mut [
                &mut |from, count| missed += read(&local, &mut one, pages, from, count),
                &mut |from, count| missed_other += read(&stored, &mut other, pages, from, count),
            ],
        );
        ensure!(missed + missed_other == 0, "{missed} and {missed_other} reads were not in memory");
        ensure!(one[..] == other[..], "the last reads differ");
        rows.push(
            Row::ratio_of(format!("{what} at random: image / file"), &times[1].cpu, &times[0].cpu)
                .target(Target::AtMost(SLOWER_MAX))
                .part("image ns", crate::measure::median(&times[1].cpu))
                .part("file ns", crate::measure::median(&times[0].cpu)),
        );
    }
    rows.push(over_nbd(test_image, [local, stored], options)?);
    Ok(Report::new("images: cached", test_image.data.description.clone(), test_image.data.bytes(), "none")
        .note(
            "Reads of an empty fork by one thread, in CPU time: over an image that was pulled, and over the \
             file that was pushed. Everything that is read is in the page cache.",
        )
        .note(format!(
            "Over NBD: reads per second over a Unix socket, by fio ({DEPTH} in flight), from a server in this \
             process."
        ))
        .rows(rows))
}

/// Measures random reads of both forks over NBD. Returns the row that compares them.
fn over_nbd(test_image: &TestImage, forks: [Ram; 2], options: &Options) -> Result<Row> {
    let sockets = ["local", "stored"].map(|name| test_image.socket(name));
    let mut speeds = [Vec::new(), Vec::new()];
    let mut servers = Vec::new();
    for (fork, socket) in forks.into_iter().zip(&sockets) {
        servers.push(export(Arc::new(fork), socket)?);
    }
    let time = Duration::from_millis(if options.quick { FIO_MILLIS_QUICK } else { FIO_MILLIS });
    for round in 0..options.rounds(FIO_ROUNDS, FIO_ROUNDS_QUICK) {
        for at in 0..sockets.len() {
            // Every other round uses the opposite order.
            let side = if round % 2 == 1 { sockets.len() - 1 - at } else { at };
            let amount = Amount::Time(time);
            let load = Load { direction: Direction::Read, block_bytes: 4096, connections: 1, amount, round };
            speeds[side].push(fio_nbd::run(&sockets[side], &load)?.per_second);
        }
    }
    let [file, image] = speeds;
    let row = Row::ratio("4 KiB at random over NBD: file / image", Summary::ratio(&file, &image));
    Ok(row
        .target(Target::AtMost(SLOWER_MAX))
        .part("image reads/s", crate::measure::median(&image))
        .part("file reads/s", crate::measure::median(&file)))
}

/// Reads the whole device twice, so that its content is in memory.
fn warm(device: &Ram) -> Result<()> {
    let mut buffer = IoBuf::zeroed(1 << 20)?;
    for _ in 0..2 {
        let mut at = 0;
        while at < device.geometry().size {
            let len = (device.geometry().size - at).min(1 << 20);
            device.read_at(at, &mut buffer[..len as usize])?;
            at += len;
        }
    }
    Ok(())
}

/// Reads `pages` pages at random, `count` times. Returns the number of reads that would have
/// blocked.
fn read(device: &Ram, buffer: &mut IoBuf, pages: u64, from: u64, count: u64) -> u64 {
    let places = device.geometry().size / (PAGE_BYTES as u64 * pages);
    let mut random = Random::new(from);
    let mut missed = 0;
    for _ in 0..count {
        let mut request =
            Request::read(random.next_u64() % places * PAGE_BYTES as u64 * pages, PAGE_BYTES as u64 * pages);
        let mut at = 0;
        loop {
            match device.try_io(&request, Buffer::Read(&mut buffer[at..])) {
                Ok(TryResult::Done) => break,
                Ok(TryResult::Partly(bytes)) => {
                    at += bytes as usize;
                    request = request.rest(bytes);
                }
                Ok(TryResult::WouldBlock) | Err(_) => {
                    missed += 1;
                    break;
                }
            }
        }
    }
    missed
}
