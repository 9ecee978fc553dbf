//! The two tables inside a family: writes of an origin, whose pages move to the snapshot, and
//! writes of a fork of a snapshot.

use std::sync::Arc;

use anyhow::Result;
use freestone::PAGE_BYTES;
use freestone::device::{Blocking, Device, Flags};
use freestone::ram::{Family, ForkConfig, Ram};
use freestone_report::{Report, Target};

use super::locks::{Locked, Locks};
use super::tables::{self, Beside, Variant};
use super::{Bench, family, wait_until_freed};
use crate::data::Data;
use crate::data::whole_pages;
use crate::options::Set;

/// Data where `--size` does not say.
const BYTES: u64 = 256 << 20;

/// Which device the workers write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Which {
    Origin,
    Fork,
}

/// A disk with a snapshot, or with a fork of its snapshot.
struct Disk {
    family: Family,
    /// The disk that is written; or a fork.
    live: Ram,
    snapshot: Option<Ram>,
}

impl Disk {
    fn new(which: Which, pages: &[u8], beside: Beside) -> Result<Self> {
        let family = family()?;
        let live = family.ram(pages.len() as u64)?;
        for (number, page) in whole_pages(pages).enumerate() {
            let at = (number * PAGE_BYTES) as u64;
            match beside {
                Beside::Nothing => live.write_at(at, page, Flags::empty())?,
                Beside::Codec => live.write_at(at, &[0xA5; PAGE_BYTES], Flags::empty())?,
            }
        }
        Ok(match which {
            Which::Origin => Self { family, live, snapshot: None },
            Which::Fork => {
                let snapshot = live.snapshot()?;
                Self { family, live: snapshot.fork(&ForkConfig::default())?, snapshot: Some(snapshot) }
            }
        })
    }

    fn fresh(&mut self, which: Which) -> Result<Arc<dyn Device>> {
        match which {
            Which::Origin => {
                self.snapshot = None;
                wait_until_freed(&self.family, 1)?;
                self.snapshot = Some(self.live.snapshot()?);
            }
            Which::Fork => {
                self.live.rewind()?;
                // The disk that the snapshot is of, the snapshot, the fork.
                wait_until_freed(&self.family, 3)?;
            }
        }
        Ok(Arc::new(self.live.clone()))
    }
}

/// All workers on one disk.
struct Together {
    name: &'static str,
    which: Which,
    disk: Disk,
    beside: Beside,
    locks: Option<Arc<Locks>>,
}

impl Variant for Together {
    fn name(&self) -> &'static str {
        self.name
    }

    fn fresh(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        let device = self.disk.fresh(self.which)?;
        let device = match &self.locks {
            Some(locks) => Arc::new(Locked { device, locks: Arc::clone(locks) }),
            None => device,
        };
        Ok(vec![device; workers])
    }

    fn beside(&self) -> Beside {
        self.beside
    }
}

/// Every worker has a family of its own.
struct Apart<'a> {
    which: Which,
    pages: &'a [u8],
    /// By number of workers.
    disks: Vec<Vec<Disk>>,
}

impl Variant for Apart<'_> {
    fn name(&self) -> &'static str {
        "each worker a family of its own"
    }

    fn fresh(&mut self, workers: usize) -> Result<Vec<Arc<dyn Device>>> {
        let place = workers.ilog2() as usize;
        while self.disks.len() <= place {
            self.disks.push(Vec::new());
        }
        let disks = &mut self.disks[place];
        let share = self.pages.len() / PAGE_BYTES / workers * PAGE_BYTES;
        while disks.len() < workers {
            let part = &self.pages[disks.len() * share..][..share];
            disks.push(Disk::new(self.which, part, Beside::Nothing)?);
        }
        disks.iter_mut().map(|disk| disk.fresh(self.which)).collect()
    }
}

/// Writes of a disk with a live snapshot.
pub(super) fn origin(bench: &Bench) -> Result<Report> {
    one(bench, Which::Origin, "forks: a RAM disk with a live snapshot, first writes")
}

/// Writes of a fork of a snapshot.
pub(super) fn snapshot(bench: &Bench) -> Result<Report> {
    one(bench, Which::Fork, "forks: a fork of a RAM snapshot, first writes")
}

fn one(bench: &Bench, which: Which, name: &'static str) -> Result<Report> {
    let data = Data::open(Set::Fio, bench.options.bytes(BYTES), bench.options)?;
    let pages = data.load()?;
    let together = |name, beside, locks: Option<Locks>| -> Result<Box<dyn Variant + '_>> {
        let (disk, locks) = (Disk::new(which, &pages, beside)?, locks.map(Arc::new));
        Ok(Box::new(Together { name, which, disk, beside, locks }))
    };
    let mut variants = vec![
        together("as it is", Beside::Nothing, None)?,
        Box::new(Apart { which, pages: &pages, disks: Vec::new() }),
        together("table and codec, a lock a page", Beside::Codec, None)?,
        together("table and codec, one lock", Beside::Codec, Some(Locks::one()))?,
        together("table and codec, locks by bucket", Beside::Codec, Some(Locks::buckets()))?,
    ];
    let speeds = tables::run(bench.options.rounds(tables::ROUNDS, 2), &mut variants, &pages)?;
    let mut rows = tables::rows(&variants, &speeds);
    rows.extend(tables::ratios("a lock a page / one lock", &speeds, [2, 3], None));
    rows.extend(tables::ratios("a lock a page / locks by bucket", &speeds, [2, 4], None));
    let target = Some((2, Target::AtLeast(0.95)));
    rows.extend(tables::ratios("as it is / a family each", &speeds, [0, 1], target));
    let what = match which {
        Which::Origin => "every page moves to the snapshot, which is taken anew before each slice",
        Which::Fork => "the fork is rewound before each slice",
    };
    Ok(Report::new(name, data.description, pages.len() as u64, "lz4")
        .note(format!(
            "Random 4 KiB writes, each page once, workers with pages of their own, one write of each \
             at a time, worker n on CPU n modulo {}; {what}. Latency is of one write; taking the time \
             is in it.",
            crate::machine::allowed_cpus()?.len()
        ))
        .note(
            "As it is: the library. Table and codec: the worker compresses the page itself and drops \
             the object, and then writes a page of one pattern, which is nothing but the table's part \
             of a write. One lock: a mutex around that part (slot, hand-over, counters; no codec, no \
             pool), as dm-snapshot had one over its tables before Linux 5.2. By bucket: a shared \
             read-write lock, then the page's bucket of complete and of pending exceptions, as since.",
        )
        .rows(rows))
}
