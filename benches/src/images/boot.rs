//! The boot of a guest from a local file, from an image of which nothing is cached, and from one whose trace
//! is known, too.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, ensure};
use freestone::device::{Blocking as _, Device, IoBuf};
use freestone::ram::{Config, Family, ForkConfig};
use freestone::store::format::CHUNK_BYTES;
use freestone::store::store::Store;
use freestone_report::{Report, Row, Summary, Target, Unit, mib};

use super::facts::Facts;
use super::kit::{Kit, image, until};
use super::remote::Remote;
use super::replay::{Read, reads, replay};
use crate::measure::median;
use crate::options::Options;

const ROUNDS: u32 = 3;
const ROUNDS_QUICK: u32 = 1;
/// Reads of a smoke run.
const READS_QUICK: usize = 100;
const WITH_TRACE_MAX: f64 = 1.5;
const WITHOUT_MAX: f64 = 4.0;
pub const BYTES_MAX: f64 = 1.1;

/// Seconds of all reads of a fork, one after the other.
fn boot(base: Arc<dyn Device>, reads: &[Read], paused: bool) -> Result<f64> {
    let fork = Family::new(Config::default())?.fork(base, &ForkConfig::default())?;
    let begun = Instant::now();
    replay(reads, paused.then_some(1), |offset, len| Ok(fork.read_at(offset, &mut IoBuf::zeroed(len)?)?))?;
    Ok(begun.elapsed().as_secs_f64())
}

/// Where a guest boots from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Side {
    Local,
    NoTrace,
    Trace,
}

/// Boots of one side, in the order of the rounds.
#[derive(Default)]
struct Boots {
    seconds: Vec<f64>,
    /// Bytes that came over the line, with all that HTTP adds.
    came: Vec<f64>,
    chunks: u64,
}

struct Bench<'a> {
    kit: &'a Kit,
    remote: &'a Remote,
    store: Arc<Store>,
    reads: Vec<Read>,
}

impl Bench<'_> {
    /// A boot, and what it cost.
    fn boot(&self, side: Side, paused: bool, boots: &mut Boots) -> Result<()> {
        if side == Side::Local {
            boots.seconds.push(boot(self.kit.local()?, &self.reads, paused)?);
            return Ok(());
        }
        let cache = self.kit.empty_cache()?;
        let before = self.remote.bytes().1;
        let begun = Instant::now();
        let image = image(&self.store, cache.path(), side == Side::Trace)?;
        let opened = begun.elapsed().as_secs_f64();
        boots.seconds.push(opened + boot(Arc::clone(&image) as _, &self.reads, paused)?);
        boots.came.push((self.remote.bytes().1 - before) as f64);
        boots.chunks = image.stat().fetched;
        ensure!(image.stat().failed == 0, "fetches failed: {:?}", image.stat().last_error);
        Ok(())
    }

    /// A first boot, so that the store has its trace.
    fn note_trace(&self) -> Result<()> {
        let cache = self.kit.empty_cache()?;
        let image = image(&self.store, cache.path(), false)?;
        boot(Arc::clone(&image) as _, &self.reads, false)?;
        image.push_trace(until())?;
        Ok(())
    }
}

pub fn run(kit: &Kit, remote: &Remote, options: &Options) -> Result<Report> {
    let mut reads = reads(options, kit.data.bytes())?;
    if options.quick {
        reads.truncate(READS_QUICK);
    }
    let asked: u64 = reads.iter().map(|read| read.len as u64).sum();
    let (store, is_new) = remote.store(&format!("boot-{}", std::process::id()))?;
    kit.push(&store, is_new)?;
    let bench = Bench { kit, remote, store, reads };
    bench.note_trace()?;
    let facts = Facts::of(&bench.store, &bench.reads)?;
    let mut rows = Vec::new();
    for (paused, what) in [(true, "with the guest's pauses"), (false, "without pauses")] {
        let mut sides = [Side::Local, Side::NoTrace, Side::Trace].map(|side| (side, Boots::default()));
        for round in 0..options.rounds(ROUNDS, ROUNDS_QUICK) {
            for at in 0..sides.len() {
                // Every other round in the opposite order.
                let at = if round % 2 == 1 { sides.len() - 1 - at } else { at };
                let (side, boots) = &mut sides[at];
                bench.boot(*side, paused, boots)?;
            }
        }
        let [(_, local), (_, no_trace), (_, trace)] = sides;
        for (boots, name, most) in
            [(trace, "its trace known", WITH_TRACE_MAX), (no_trace, "no trace", WITHOUT_MAX)]
        {
            let row = Row::over(
                format!("{what}: nothing cached, {name} / local file"),
                &boots.seconds,
                &local.seconds,
            )
            .part("s", median(&boots.seconds))
            .part("local s", median(&local.seconds));
            rows.push(if paused { row.target(Target::AtMost(most)) } else { row });
            let over = |bytes: u64| Summary::of(boots.came.iter().map(|came| came / bytes as f64));
            let came = median(&boots.came) as u64;
            rows.push(
                Row::new(
                    format!("{what}, {name}: bytes that came / chunks that were read"),
                    Unit::Ratio,
                    over(facts.chunks.bytes),
                )
                .target(Target::AtMost(BYTES_MAX))
                .part("came MiB", mib(came))
                .part("chunks that were read MiB", mib(facts.chunks.bytes))
                .part("chunks that were read", facts.chunks.count as f64)
                .part("chunks that came", boots.chunks as f64),
            );
            rows.push(
                Row::new(
                    format!("{what}, {name}: bytes that came / bytes that the guest read"),
                    Unit::Ratio,
                    over(asked),
                )
                .part("read MiB", mib(asked))
                .part("chunks uncompressed MiB", mib(boots.chunks * CHUNK_BYTES as u64)),
            );
        }
    }
    Ok(Report::new("images: boot", kit.data.description.clone(), kit.data.bytes(), "zstd")
        .note(format!(
            "{} reads of a Debian guest up to its login, one after the other, through a fork: benches/data/boot.trace. \
             Over a line of 20 ms to and fro and 1 Gbit/s, to {}; the local file is in the page cache. The three take \
             turns, every other round in the opposite order. The times have the opening of the image in them. Bytes that \
             came: all over the line, with answers' headers, manifest, maps and trace; chunks as they are compressed.",
            bench.reads.len(),
            remote.name
        ))
        .rows(rows))
}
