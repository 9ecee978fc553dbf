//! `increments` part: size of an increment, relative to the compressed pages in it.

use anyhow::{Context as _, Result, ensure};
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use super::Bench;
use super::saved_disk::SavedDisk;
use crate::data::Random;
use crate::engine::bare::Store;
use crate::measure::median;
use crate::transport::nbd_client::Client;

const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
/// Divisor of the disk's pages: the result is the number of changed pages.
const CHANGED_PART: u64 = 100;
const OVERHEAD_MAX: f64 = 1.3;

pub(super) fn run(bench: &Bench<'_>, saved_disk: &SavedDisk) -> Result<Report> {
    let (mut files, mut stored, mut seconds) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.options.rounds(ROUNDS, ROUNDS_QUICK) {
        let (_, before) = saved_disk.files()?;
        let (server, _control) = saved_disk.start_loaded(&[])?;
        stored.push(write_pages(saved_disk, round)?);
        let started = std::time::Instant::now();
        SavedDisk::end(server)?;
        seconds.push(started.elapsed().as_secs_f64());
        let (_, after) = saved_disk.files()?;
        ensure!(after.len() == before.len() + 1, "{} increments became {}", before.len(), after.len());
        let newest = after.last().context("the server wrote no increment")?;
        files.push(std::fs::metadata(newest)?.len() as f64);
    }
    Ok(Report::new("restarts: increments", saved_disk.data.description.clone(), saved_disk.bytes(), "lz4")
        .note(format!(
            "One page of {CHANGED_PART}, at random, is overwritten with another page of the data, through NBD; \
             then the server is ended. The ratio is the size of the newest file over the compressed bytes of \
             these pages. This program computes them with the same codec and rules: an incompressible page \
             counts 4096 bytes, a same-filled page none."
        ))
        .rows(vec![
            Row::ratio_of("increment / compressed bytes of the changed pages", &files, &stored)
                .target(Target::AtMost(OVERHEAD_MAX))
                .part("file MiB", median(&files) / mib_f64())
                .part("compressed MiB", median(&stored) / mib_f64())
                .part("pages", changed_pages(saved_disk) as f64)
                .part("disk MiB", mib(saved_disk.bytes())),
            Row::new("the server's end, with the increment", Unit::Seconds, Summary::of(seconds)),
        ]))
}

fn mib_f64() -> f64 {
    f64::from(1 << 20)
}

fn changed_pages(saved_disk: &SavedDisk) -> u64 {
    (saved_disk.pages / CHANGED_PART).max(1)
}

/// Writes the pages of a round and returns their compressed size in bytes.
fn write_pages(saved_disk: &SavedDisk, round: u32) -> Result<f64> {
    let count = changed_pages(saved_disk) as usize;
    // The first numbers are the offsets to write, the next ones the content. All numbers are
    // distinct, so no page is overwritten with its own content.
    let numbers = Random::new(u64::from(round)).permutation(saved_disk.pages);
    let mut pages = vec![0; count * PAGE_BYTES];
    let mut client = Client::connect(&saved_disk.home.nbd_socket())?;
    for (number, page) in pages.chunks_exact_mut(PAGE_BYTES).enumerate() {
        saved_disk.data.read(u64::from(numbers[count + number]), page)?;
        client.write(u64::from(numbers[number]) * PAGE_BYTES as u64, page)?;
    }
    client.end()?;
    let (_, census) = Store::build(&pages)?;
    Ok(census.bytes as f64)
}
