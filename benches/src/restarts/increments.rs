//! How large an increment is beside the compressed pages that are in it.

use anyhow::{Context as _, Result, ensure};
use freestone::PAGE_BYTES;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use super::Bench;
use super::kept::Kept;
use crate::bare::Store;
use crate::data::Random;
use crate::measure::median;
use crate::nbd_client::Client;

const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
/// One page of so many is changed.
const CHANGED_PART: u64 = 100;
const OVERHEAD_MAX: f64 = 1.3;

pub(super) fn run(bench: &Bench<'_>, kept: &Kept) -> Result<Report> {
    let (mut files, mut stored, mut seconds) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..bench.options.rounds(ROUNDS, ROUNDS_QUICK) {
        let (_, before) = kept.files()?;
        let (server, _control) = kept.loaded(&[])?;
        stored.push(change(kept, round)?);
        let begun = std::time::Instant::now();
        Kept::end(server)?;
        seconds.push(begun.elapsed().as_secs_f64());
        let (_, after) = kept.files()?;
        ensure!(after.len() == before.len() + 1, "{} increments became {}", before.len(), after.len());
        let newest = after.last().context("there is no increment")?;
        files.push(std::fs::metadata(newest)?.len() as f64);
    }
    Ok(Report::new("restarts: increments", kept.data.description.clone(), kept.bytes(), "lz4")
        .note(format!(
            "One page of {CHANGED_PART}, at random places, is written over with another page of the data, through \
             NBD; then the server ends. The newest file over the compressed bytes of these pages, which the program \
             that measures finds with the same codec and by the same rules (a page that does not compress is 4096 \
             bytes, a same-filled one none)."
        ))
        .rows(vec![
            Row::over("increment / compressed bytes of the changed pages", &files, &stored)
                .target(Target::AtMost(OVERHEAD_MAX))
                .part("file MiB", median(&files) / mib_f64())
                .part("compressed MiB", median(&stored) / mib_f64())
                .part("pages", changed(kept) as f64)
                .part("disk MiB", mib(kept.bytes())),
            Row::new("the server's end, with the increment", Unit::Seconds, Summary::of(seconds)),
        ]))
}

fn mib_f64() -> f64 {
    f64::from(1 << 20)
}

fn changed(kept: &Kept) -> u64 {
    (kept.pages / CHANGED_PART).max(1)
}

/// Writes the pages of a round. Returns their compressed bytes.
fn change(kept: &Kept, round: u32) -> Result<f64> {
    let count = changed(kept) as usize;
    // First the places, behind them the contents: nothing is written where it is already.
    let numbers = Random::new(u64::from(round)).permutation(kept.pages);
    let mut pages = vec![0; count * PAGE_BYTES];
    let mut client = Client::connect(&kept.home.nbd())?;
    for (number, page) in pages.chunks_exact_mut(PAGE_BYTES).enumerate() {
        kept.data.read(u64::from(numbers[count + number]), page)?;
        client.write(u64::from(numbers[number]) * PAGE_BYTES as u64, page)?;
    }
    client.end()?;
    let (_, census) = Store::build(&pages)?;
    Ok(census.bytes as f64)
}
