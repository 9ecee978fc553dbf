//! The two tables for snapshots on devices: null devices below, as in the source, so that nothing
//! but the engine is measured.

use std::sync::Arc;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::cow::{Config, Origin, Snapshot, StoreKind};
use freestone::device::{Device, IoBuf};
use freestone::null::{self, Null};
use freestone_report::{Report, Target};

use super::Bench;
use super::tables::{self, Variant};

/// Size of the origin where `--size` does not say.
const BYTES: u64 = 256 << 20;
/// The source's chunks.
pub const CHUNK_BYTES: u64 = 4096;

/// Which device the workers write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Which {
    /// What the snapshot was made of.
    Origin,
    /// The snapshot.
    Snapshot,
}

/// A variant, and what it holds for the present slice.
pub struct Devices {
    name: &'static str,
    which: Which,
    config: Config,
    bytes: u64,
    /// Every worker has an origin and a snapshot of its own.
    apart: bool,
    now: Vec<(Origin, Snapshot)>,
}

impl Devices {
    /// Devices of `bytes`; nothing is there before [`Variant::fresh`].
    pub fn new(name: &'static str, which: Which, store: StoreKind, bytes: u64, apart: bool) -> Self {
        let config = Config { kind: store, chunk_bytes: Some(CHUNK_BYTES), force: true, ..Config::default() };
        Self { name, which, config, bytes, apart, now: Vec::new() }
    }

    /// Drops what it holds for the present slice.
    pub fn clear(&mut self) {
        self.now.clear();
    }
}

impl Variant for Devices {
    fn name(&self) -> &'static str {
        self.name
    }

    fn fresh(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        self.clear();
        let (count, bytes) =
            if self.apart { (workers, self.bytes / workers as u64) } else { (1, self.bytes) };
        for _ in 0..count {
            let origin = Origin::new(null(bytes)?);
            let snapshot = origin.snapshot(null(2 * bytes + (1 << 20))?, &self.config)?;
            self.now.push((origin, snapshot));
        }
        let devices = self.now.iter().map(|(origin, snapshot)| -> Arc<dyn Device> {
            match self.which {
                Which::Origin => Arc::new(origin.clone()),
                Which::Snapshot => Arc::new(snapshot.clone()),
            }
        });
        let devices: Vec<_> = devices.collect();
        Ok(devices.iter().cycle().take(workers).cloned().collect())
    }
}

fn null(bytes: u64) -> Result<Arc<dyn Device>> {
    let size = bytes & !(CHUNK_BYTES - 1);
    Ok(Arc::new(Null::new(null::Config::plain(size, 4096))?))
}

/// Writes of the origin.
pub(super) fn origin(bench: &Bench) -> Result<Report> {
    one(bench, Which::Origin, "forks: an origin on a device, first writes")
}

/// Writes of the snapshot.
pub(super) fn snapshot(bench: &Bench) -> Result<Report> {
    one(bench, Which::Snapshot, "forks: a snapshot on a device, first writes")
}

fn one(bench: &Bench, which: Which, name: &'static str) -> Result<Report> {
    let mut pages = IoBuf::zeroed(bench.options.bytes(BYTES) as usize)?;
    pages.fill(0x5A);
    let store = bench.args.store;
    let variant = |name, apart| -> Box<dyn Variant> {
        Box::new(Devices::new(name, which, store, pages.len() as u64, apart))
    };
    let mut variants =
        vec![variant("a lock a chunk", false), variant("each worker a device of its own", true)];
    let speeds = tables::run(bench.options.rounds(tables::ROUNDS, 2), &mut variants, &pages)?;
    let mut rows = tables::rows(&variants, &speeds);
    let target = Some((2, Target::AtLeast(0.95)));
    rows.extend(tables::ratios("a lock a chunk / a device each", &speeds, [0, 1], target));
    let what = match which {
        Which::Origin => "every write has its chunk copied first",
        Which::Snapshot => "every write covers a chunk, so nothing is copied",
    };
    Ok(Report::new(
        name,
        format!("null devices, store {store}, chunks of {CHUNK_BYTES} bytes"),
        pages.len() as u64,
        "none",
    )
    .note(format!(
        "Random 4 KiB writes, each of {} chunks once, workers with chunks of their own, one write \
         of each at a time, worker n on CPU n modulo {}; {what}; a new snapshot before each \
         slice. Latency is of one write; taking the time is in it.",
        pages.len() / PAGE_BYTES,
        crate::machine::allowed_cpus()?.len()
    ))
    .note("What the kernel's locks make of it: `cargo xtask bench reproduce 4`.")
    .rows(rows))
}
