//! `boot` part: boot of a guest from a local file, from an uncached image, and from an uncached image with a
//! recorded trace.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use freestone::device::{Blocking as _, Device, IoBuf};
use freestone::ram::{Config, Family, ForkConfig};
use freestone::store::format::CHUNK_BYTES;
use freestone::store::store::Store;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use super::remote::Remote;
use super::replay::{Read, reads, replay};
use super::requested_objects::RequestedObjects;
use super::test_image::{TestImage, deadline, image};
use crate::measure::median;
use crate::options::Options;

const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
const READS_QUICK: usize = 100;
const WITH_TRACE_MAX: f64 = 1.5;
const WITHOUT_MAX: f64 = 4.0;
pub const BYTES_MAX: f64 = 1.1;

/// Replays the boot on a new fork of `base`, one read at a time, and returns the duration in seconds.
fn boot(base: Arc<dyn Device>, reads: &[Read], paused: bool) -> Result<f64> {
    let fork = Family::new(Config::default())?.fork(base, &ForkConfig::default())?;
    let started = Instant::now();
    replay(reads, paused.then_some(1), |offset, len| Ok(fork.read_at(offset, &mut IoBuf::zeroed(len)?)?))?;
    Ok(started.elapsed().as_secs_f64())
}

/// Source that a guest boots from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Local,
    NoTrace,
    Trace,
}

/// Results of one side, in the order of the rounds.
#[derive(Default)]
struct Boots {
    seconds: Vec<f64>,
    /// Bytes received from the object store in each round, including HTTP headers.
    received: Vec<f64>,
    chunks: u64,
}

struct Bench<'a> {
    test_image: &'a TestImage,
    remote: &'a Remote,
    store: Arc<Store>,
    reads: Vec<Read>,
}

impl Bench<'_> {
    /// Boots once from the source of a side and adds the results to `boots`.
    fn boot(&self, side: Side, paused: bool, boots: &mut Boots) -> Result<()> {
        if side == Side::Local {
            boots.seconds.push(boot(self.test_image.local()?, &self.reads, paused)?);
            return Ok(());
        }
        let cache = self.test_image.empty_cache()?;
        let before = self.remote.bytes().1;
        let started = Instant::now();
        let image = image(&self.store, cache.path(), side == Side::Trace)?;
        let opened = started.elapsed().as_secs_f64();
        boots.seconds.push(opened + boot(Arc::clone(&image) as _, &self.reads, paused)?);
        boots.received.push((self.remote.bytes().1 - before) as f64);
        boots.chunks = image.stat().fetched;
        ensure!(image.stat().failed == 0, "fetches failed: {:?}", image.stat().last_error);
        Ok(())
    }

    /// Boots once and pushes the recorded trace to the image store.
    fn record_trace(&self) -> Result<()> {
        let cache = self.test_image.empty_cache()?;
        let image = image(&self.store, cache.path(), false)?;
        boot(Arc::clone(&image) as _, &self.reads, false)?;
        image.push_trace(deadline())?;
        Ok(())
    }
}

pub fn run(test_image: &TestImage, remote: &Remote, options: &Options) -> Result<Report> {
    let mut reads = reads(options, test_image.data.bytes())?;
    if options.quick {
        reads.truncate(READS_QUICK);
    }
    let bytes_read: u64 = reads.iter().map(|read| read.len as u64).sum();
    let (store, is_new) = remote.store(&format!("boot-{}", std::process::id()))?;
    test_image.push(&store, is_new)?;
    let bench = Bench { test_image, remote, store, reads };
    bench.record_trace()?;
    let facts = RequestedObjects::of(&bench.store, &bench.reads)?;
    let mut rows = Vec::new();
    for (paused, what) in [(true, "with the guest's pauses"), (false, "without pauses")] {
        let mut sides = [Side::Local, Side::NoTrace, Side::Trace].map(|side| (side, Boots::default()));
        for round in 0..options.rounds(ROUNDS, ROUNDS_QUICK) {
            for at in 0..sides.len() {
                // Every other round uses the opposite order.
                let at = if round % 2 == 1 { sides.len() - 1 - at } else { at };
                let (side, boots) = &mut sides[at];
                bench.boot(*side, paused, boots)?;
            }
        }
        let [(_, local), (_, no_trace), (_, trace)] = sides;
        for (boots, name, most) in
            [(trace, "its trace known", WITH_TRACE_MAX), (no_trace, "no trace", WITHOUT_MAX)]
        {
            let row = Row::ratio_of(
                format!("{what}: nothing cached, {name} / local file"),
                &boots.seconds,
                &local.seconds,
            )
            .part("s", median(&boots.seconds))
            .part("local s", median(&local.seconds));
            rows.push(if paused { row.target(Target::AtMost(most)) } else { row });
            let over =
                |bytes: u64| Summary::of(boots.received.iter().map(|received| received / bytes as f64));
            let received = median(&boots.received) as u64;
            rows.push(
                Row::new(
                    format!("{what}, {name}: bytes that came / chunks that were read"),
                    Unit::Ratio,
                    over(facts.chunks.bytes),
                )
                .target(Target::AtMost(BYTES_MAX))
                .part("came MiB", mib(received))
                .part("chunks that were read MiB", mib(facts.chunks.bytes))
                .part("chunks that were read", facts.chunks.count as f64)
                .part("chunks that came", boots.chunks as f64),
            );
            rows.push(
                Row::new(
                    format!("{what}, {name}: bytes that came / bytes that the guest read"),
                    Unit::Ratio,
                    over(bytes_read),
                )
                .part("read MiB", mib(bytes_read))
                .part("chunks uncompressed MiB", mib(boots.chunks * CHUNK_BYTES as u64)),
            );
        }
    }
    Ok(Report::new("images: boot", test_image.data.description.clone(), test_image.data.bytes(), "zstd")
        .note(format!(
            "{} reads of a Debian guest until its login prompt, one at a time, through a fork: \
             benches/data/boot.trace. The store is behind a link with a round trip of 20 ms and 1 Gbit/s, on \
             {}; the local file is in the page cache. The three sides take turns, every other round in the \
             opposite order. Times include opening the image. Bytes that came: everything received, including \
             HTTP headers, manifest, maps and trace; chunks are counted compressed.",
            bench.reads.len(),
            remote.name
        ))
        .rows(rows))
}
