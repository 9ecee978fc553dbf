//! Tables for snapshots inside a family (disks and forks that share memory): writes to an origin,
//! whose old pages move to the snapshot, and writes to a fork of a snapshot.

use std::sync::Arc;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Device, Flags};
use freestone::ram::{Family, ForkConfig, Ram};
use freestone_report::{Report, Target};

use super::locks::{LockedDevice, Locks};
use super::tables::{self, ExtraWork, Variant};
use super::{Bench, family, wait_until_freed};
use crate::data::Data;
use crate::data::whole_pages;
use crate::options::Set;

/// Default data size, in bytes.
const BYTES: u64 = 256 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum WrittenDevice {
    Origin,
    Fork,
}

/// A disk with a snapshot, or with a fork of its snapshot.
struct Disk {
    family: Family,
    /// The device to which the workers write: the disk or the fork.
    live: Ram,
    snapshot: Option<Ram>,
}

impl Disk {
    fn new(written: WrittenDevice, pages: &[u8], extra_work: ExtraWork) -> Result<Self> {
        let family = family()?;
        let live = family.ram(pages.len() as u64)?;
        for (number, page) in whole_pages(pages).enumerate() {
            let at = (number * PAGE_BYTES) as u64;
            match extra_work {
                ExtraWork::Nothing => live.write_at(at, page, Flags::empty())?,
                ExtraWork::Codec => live.write_at(at, &[0xA5; PAGE_BYTES], Flags::empty())?,
            }
        }
        Ok(match written {
            WrittenDevice::Origin => Self { family, live, snapshot: None },
            WrittenDevice::Fork => {
                let snapshot = live.snapshot()?;
                Self { family, live: snapshot.fork(&ForkConfig::default())?, snapshot: Some(snapshot) }
            }
        })
    }

    fn prepare(&mut self, written: WrittenDevice) -> Result<Arc<dyn Device>> {
        match written {
            WrittenDevice::Origin => {
                self.snapshot = None;
                wait_until_freed(&self.family, 1)?;
                self.snapshot = Some(self.live.snapshot()?);
            }
            WrittenDevice::Fork => {
                self.live.rewind()?;
                // Three layers exist: the snapshot's origin, the snapshot and the fork.
                wait_until_freed(&self.family, 3)?;
            }
        }
        Ok(Arc::new(self.live.clone()))
    }
}

/// Variant with one disk for all workers.
struct SharedDisk {
    name: &'static str,
    written: WrittenDevice,
    disk: Disk,
    extra_work: ExtraWork,
    locks: Option<Arc<Locks>>,
}

impl Variant for SharedDisk {
    fn name(&self) -> &'static str {
        self.name
    }

    fn prepare(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        let device = self.disk.prepare(self.written)?;
        let device = match &self.locks {
            Some(locks) => Arc::new(LockedDevice { device, locks: Arc::clone(locks) }),
            None => device,
        };
        Ok(vec![device; workers])
    }

    fn extra_work(&self) -> ExtraWork {
        self.extra_work
    }
}

/// Variant in which each worker has a disk and a family of its own.
struct DiskPerWorker<'a> {
    written: WrittenDevice,
    pages: &'a [u8],
    /// Disks, indexed by the binary logarithm of the number of workers, then by worker.
    disks: Vec<Vec<Disk>>,
}

impl Variant for DiskPerWorker<'_> {
    fn name(&self) -> &'static str {
        "each worker a family of its own"
    }

    fn prepare(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        let index = workers.ilog2() as usize;
        while self.disks.len() <= index {
            self.disks.push(Vec::new());
        }
        let disks = &mut self.disks[index];
        let share = self.pages.len() / PAGE_BYTES / workers * PAGE_BYTES;
        while disks.len() < workers {
            let part = &self.pages[disks.len() * share..][..share];
            disks.push(Disk::new(self.written, part, ExtraWork::Nothing)?);
        }
        disks.iter_mut().map(|disk| disk.prepare(self.written)).collect()
    }
}

/// Measures first writes to a disk with a live snapshot.
pub(super) fn origin(bench: &Bench) -> Result<Report> {
    run_table(bench, WrittenDevice::Origin, "forks: a RAM disk with a live snapshot, first writes")
}

/// Measures first writes to a fork of a snapshot.
pub(super) fn snapshot(bench: &Bench) -> Result<Report> {
    run_table(bench, WrittenDevice::Fork, "forks: a fork of a RAM snapshot, first writes")
}

fn run_table(bench: &Bench, written: WrittenDevice, name: &'static str) -> Result<Report> {
    let data = Data::open(Set::Fio, bench.options.bytes(BYTES), bench.options)?;
    let pages = data.load()?;
    let shared_disk = |name, extra_work, locks: Option<Locks>| -> Result<Box<dyn Variant + '_>> {
        let (disk, locks) = (Disk::new(written, &pages, extra_work)?, locks.map(Arc::new));
        Ok(Box::new(SharedDisk { name, written, disk, extra_work, locks }))
    };
    let mut variants = vec![
        shared_disk("as it is", ExtraWork::Nothing, None)?,
        Box::new(DiskPerWorker { written, pages: &pages, disks: Vec::new() }),
        shared_disk("table and codec, a lock a page", ExtraWork::Codec, None)?,
        shared_disk("table and codec, one lock", ExtraWork::Codec, Some(Locks::one()))?,
        shared_disk("table and codec, locks by bucket", ExtraWork::Codec, Some(Locks::buckets()))?,
    ];
    let speeds = tables::run(bench.options.rounds(tables::ROUNDS, 2), &mut variants, &pages)?;
    let mut rows = tables::rows(&variants, &speeds);
    rows.extend(tables::ratios("a lock a page / one lock", &speeds, [2, 3], None));
    rows.extend(tables::ratios("a lock a page / locks by bucket", &speeds, [2, 4], None));
    let target = Some((2, Target::AtLeast(0.95)));
    rows.extend(tables::ratios("as it is / a family each", &speeds, [0, 1], target));
    let what = match written {
        WrittenDevice::Origin => "every page moves to the snapshot; each slice has a new snapshot",
        WrittenDevice::Fork => "the fork is rewound before each slice",
    };
    Ok(Report::new(name, data.description, pages.len() as u64, "lz4")
        .note(format!(
            "Random 4 KiB writes, each page once. Each worker has its own pages and one write at a time; \
             worker n is on CPU n modulo {}. {what}. Latency is that of one write, including the clock.",
            crate::measure::machine::allowed_cpus()?.len()
        ))
        .note(
            "As it is: the library. Table and codec: the worker compresses the page and drops the object, then \
             writes a same-filled page, which costs only the table's part of a write. One lock: a mutex around \
             that part (slot, hand-over, counters; no codec, no pool), like dm-snapshot's lock before Linux \
             5.2. By bucket: a shared read-write lock, then the page's bucket of complete and of pending \
             exceptions, like dm-snapshot since.",
        )
        .rows(rows))
}
