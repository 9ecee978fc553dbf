//! `push` part: a push of real files over a network link, beside zstd alone and the link alone, and a
//! second push after some pages changed.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context as _, Result, ensure};
use freestone::PAGE_BYTES;
use freestone::store::format::chunk::UNIT_BYTES;
use freestone::store::push::PushReport;
use freestone_report::{Report, Row, Target, Unit, mib};

use super::remote::{BITS_PER_SECOND, Remote};
use super::test_image::TestImage;
use crate::data::Random;
use crate::options::Options;

const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
/// Longest duration of a push that meets the target, relative to the slower of zstd and the link: 0.8 of its
/// speed.
const SLOWER_MAX: f64 = 1.25;
/// Largest number of bytes of the second push that meets the target, relative to the compressed changed
/// pages.
const CHANGED_MAX: f64 = 1.3;
/// Divisor of the file's pages. The quotient is the number of changed pages.
const CHANGED_OF: u64 = 100;

pub fn run(test_image: &TestImage, remote: &Remote, options: &Options) -> Result<Report> {
    let (mut times, mut bounds, mut zstds, mut lines) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut sent = 0;
    let mut last = None;
    for round in 0..options.rounds(ROUNDS, ROUNDS_QUICK) {
        let zstd = zstd(test_image)?;
        let prefix = format!("push-{}-{round}", std::process::id());
        let started = Instant::now();
        let pushed = send(test_image, remote, &prefix)?;
        times.push(started.elapsed().as_secs_f64());
        sent = pushed.sent.1;
        let line = (sent * 8) as f64 / BITS_PER_SECOND as f64;
        zstds.push(zstd);
        lines.push(line);
        bounds.push(zstd.max(line));
        last = Some(prefix);
    }
    let first = Row::ratio_of("first push / the slower of zstd and the line", &times, &bounds)
        .target(Target::AtMost(SLOWER_MAX))
        .part("s", crate::measure::median(&times))
        .part("zstd s", crate::measure::median(&zstds))
        .part("line s", crate::measure::median(&lines))
        .part("sent MiB", mib(sent));
    let prefix = last.context("at least one round")?;
    let changed = change(test_image)?;
    let before = remote.bytes().0;
    let started = Instant::now();
    let pushed = send(test_image, remote, &prefix)?;
    let seconds = started.elapsed().as_secs_f64();
    let sent_bytes = remote.bytes().0 - before;
    ensure!(pushed.changed_pages <= changed.pages, "more pages changed than were written");
    let second = Row::single(
        "bytes of a second push / the changed pages, compressed",
        Unit::Ratio,
        sent_bytes as f64 / changed.packed as f64,
    )
    .target(Target::AtMost(CHANGED_MAX))
    .part("went MiB", mib(sent_bytes))
    .part("pages in units MiB", mib(changed.packed))
    .part("each by itself MiB", mib(changed.each))
    .part("s", seconds);
    Ok(Report::new("images: push", test_image.data.description.clone(), test_image.data.bytes(), "zstd")
        .note(format!(
            "Over a link with a round trip of 20 ms and 1 Gbit/s, to {}. zstd: the program, level 3, two \
             threads, of the same file. The line: the bytes of the chunks at the speed of the link. The second \
             push follows changes of 1 % of the pages, at random (content of other pages, changed in 16 \
             bytes). Its bytes are all that were sent, including requests. The changed pages are compressed in \
             units of 16, as in a chunk.",
            remote.name
        ))
        .rows(vec![first, second]))
}

fn send(test_image: &TestImage, remote: &Remote, prefix: &str) -> Result<PushReport> {
    let (store, is_new) = remote.store(prefix)?;
    test_image.push(&store, is_new)
}

/// Compresses the file with the zstd program and returns the seconds.
fn zstd(test_image: &TestImage) -> Result<f64> {
    let started = Instant::now();
    let mut command = Command::new("zstd");
    command.args(["-3", "-T2", "-q", "-c"]).arg(&test_image.file).stdout(Stdio::null());
    ensure!(command.status().context("cannot start zstd")?.success(), "zstd failed");
    Ok(started.elapsed().as_secs_f64())
}

/// Number of changed pages, and their compressed sizes.
struct ChangedPages {
    pages: u64,
    /// Size of the pages in bytes when compressed together, in units of `UNIT_BYTES`.
    packed: u64,
    /// Size of the pages in bytes when each is compressed separately.
    each: u64,
}

/// Overwrites one in `CHANGED_OF` pages of the file with a changed copy of a random page.
fn change(test_image: &TestImage) -> Result<ChangedPages> {
    let file = File::options().read(true).write(true).open(&test_image.file)?;
    let count = test_image.data.bytes() / PAGE_BYTES as u64;
    let mut random = Random::new(1);
    let mut pages = BTreeSet::new();
    while (pages.len() as u64) < count / CHANGED_OF {
        pages.insert(random.next_u64() % count);
    }
    let mut content = Vec::with_capacity(pages.len() * PAGE_BYTES);
    let mut page = [0; PAGE_BYTES];
    for number in &pages {
        file.read_exact_at(&mut page, random.next_u64() % count * PAGE_BYTES as u64)?;
        page[..8].copy_from_slice(&random.next_u64().to_le_bytes());
        page[2000..2008].copy_from_slice(&random.next_u64().to_le_bytes());
        file.write_all_at(&page, number * PAGE_BYTES as u64)?;
        content.extend_from_slice(&page);
    }
    let compressed = |bytes: usize| -> u64 { content.chunks(bytes).map(compressed_bytes).sum() };
    Ok(ChangedPages {
        pages: pages.len() as u64,
        packed: compressed(UNIT_BYTES),
        each: compressed(PAGE_BYTES),
    })
}

/// Returns the size in bytes of `bytes` compressed by zstd at level 3, or the uncompressed size if that is
/// smaller.
fn compressed_bytes(bytes: &[u8]) -> u64 {
    let mut out = vec![0; zstd_safe::compress_bound(bytes.len())];
    zstd_safe::compress(&mut out[..], bytes, 3).map_or(bytes.len(), |len| len.min(bytes.len())) as u64
}
