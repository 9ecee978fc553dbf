//! Tables for snapshots on COW devices. Origins and COW devices are null devices, as in the
//! published experiment, so that only the engine is measured.

use std::sync::Arc;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::cow::{Config, Origin, Snapshot, StoreKind};
use freestone::device::{Device, IoBuf};
use freestone::null::{self, Null};
use freestone_report::{Report, Target};

use super::Bench;
use super::tables::{self, Variant};

/// Default size of the origin, in bytes.
const BYTES: u64 = 256 << 20;
/// Chunk size in bytes, as in the published experiment.
pub const CHUNK_BYTES: u64 = 4096;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WrittenDevice {
    Origin,
    Snapshot,
}

/// A variant of the measurement, with the origins and snapshots of the current slice.
pub struct Devices {
    name: &'static str,
    written: WrittenDevice,
    config: Config,
    bytes: u64,
    /// If true, every worker has its own origin and snapshot.
    separate: bool,
    current: Vec<(Origin, Snapshot)>,
}

impl Devices {
    /// Creates a variant with devices of `bytes` bytes. [`Variant::prepare`] creates the devices.
    pub fn new(
        name: &'static str,
        written: WrittenDevice,
        store: StoreKind,
        bytes: u64,
        separate: bool,
    ) -> Self {
        let config = Config { kind: store, chunk_bytes: Some(CHUNK_BYTES), force: true, ..Config::default() };
        Self { name, written, config, bytes, separate, current: Vec::new() }
    }

    /// Drops the origins and snapshots of the current slice.
    pub fn clear(&mut self) {
        self.current.clear();
    }
}

impl Variant for Devices {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prepare(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        self.clear();
        let (count, bytes) =
            if self.separate { (workers, self.bytes / workers as u64) } else { (1, self.bytes) };
        for _ in 0..count {
            let origin = Origin::new(null(bytes)?);
            let snapshot = origin.snapshot(null(2 * bytes + (1 << 20))?, &self.config)?;
            self.current.push((origin, snapshot));
        }
        let devices = self.current.iter().map(|(origin, snapshot)| -> Arc<dyn Device> {
            match self.written {
                WrittenDevice::Origin => Arc::new(origin.clone()),
                WrittenDevice::Snapshot => Arc::new(snapshot.clone()),
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

pub(super) fn origin(bench: &Bench) -> Result<Report> {
    run_table(bench, WrittenDevice::Origin, "forks: an origin on a device, first writes")
}

pub(super) fn snapshot(bench: &Bench) -> Result<Report> {
    run_table(bench, WrittenDevice::Snapshot, "forks: a snapshot on a device, first writes")
}

fn run_table(bench: &Bench, written: WrittenDevice, name: &'static str) -> Result<Report> {
    let mut pages = IoBuf::zeroed(bench.options.bytes(BYTES) as usize)?;
    pages.fill(0x5A);
    let store = bench.args.store;
    let variant = |name, separate| -> Box<dyn Variant> {
        Box::new(Devices::new(name, written, store, pages.len() as u64, separate))
    };
    let mut variants =
        vec![variant("a lock a chunk", false), variant("each worker a device of its own", true)];
    let speeds = tables::run(bench.options.rounds(tables::ROUNDS, 2), &mut variants, &pages)?;
    let mut rows = tables::rows(&variants, &speeds);
    let target = Some((2, Target::AtLeast(0.95)));
    rows.extend(tables::ratios("a lock a chunk / a device each", &speeds, [0, 1], target));
    let what = match written {
        WrittenDevice::Origin => "every write has its chunk copied first",
        WrittenDevice::Snapshot => "every write covers a chunk, so nothing is copied",
    };
    Ok(Report::new(
        name,
        format!("null devices, store {store}, chunks of {CHUNK_BYTES} bytes"),
        pages.len() as u64,
        "none",
    )
    .note(format!(
        "Random 4 KiB writes, each of {} chunks once. Each worker has its own chunks and one write at a time; \
         worker n is on CPU n modulo {}. {what}; each slice has a new snapshot. Latency is that of one write, \
         including the clock.",
        pages.len() / PAGE_BYTES,
        crate::measure::machine::allowed_cpus()?.len()
    ))
    .note("For the kernel's locks: `cargo xtask bench reproduce 4`.")
    .rows(rows))
}
