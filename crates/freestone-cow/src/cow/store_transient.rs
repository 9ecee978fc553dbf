//! A store without a record on disk: chunks are handed out to each CPU in runs, and lost with the
//! process.

use std::ops::Range;

use crossbeam_utils::CachePadded;

use super::Usage;
use super::format::Layout;
use super::status::SECTOR_BYTES;
use super::store_answers::NoPlace;
use freestone_core::percpu;
use freestone_core::sync::{AtomicU32, AtomicU64, Mutex, Ordering};

/// Places that a CPU takes at once. Writes of one CPU lie one after the other for so long.
const RUN_PLACES: u64 = 64;

/// A store without metadata (`store=N`). Places have no order that anything depends on, so each CPU
/// has some of its own; who finds the device full takes those of another.
///
/// Lock order: a CPU's run is innermost, held for a few instructions, one at a time.
pub struct Transient {
    layout: Layout,
    /// The first chunk that no CPU has.
    next_free: CachePadded<AtomicU64>,
    /// By CPU: what it may hand out.
    runs: Box<[CachePadded<Mutex<Range<u64>>>]>,
    lost: AtomicU32,
}

impl Transient {
    pub fn new(layout: Layout) -> Self {
        Self {
            layout,
            next_free: CachePadded::new(AtomicU64::new(0)),
            runs: (0..percpu::cpus()).map(|_| CachePadded::default()).collect(),
            lost: AtomicU32::new(0),
        }
    }

    pub fn is_valid(&self) -> bool {
        self.lost.load(Ordering::SeqCst) == 0
    }

    /// The snapshot is lost.
    pub fn lose(&self) {
        self.lost.store(1, Ordering::SeqCst);
    }

    /// Hands out a chunk of a device of `size` bytes.
    pub fn allocate(&self, size: u64) -> Result<u64, NoPlace> {
        if !self.is_valid() {
            return Err(NoPlace::Invalid);
        }
        let own = {
            let mut run = percpu::lock_nearest(|cpu| &self.runs[cpu]);
            if run.is_empty() {
                *run = self.next_run(self.layout.chunks(size));
            }
            run.next()
        };
        // No CPU gets a run any more, so what the others have only becomes less.
        let place = own.or_else(|| self.runs.iter().find_map(|run| run.lock().next()));
        place.ok_or(NoPlace::Full)
    }

    /// The next places of a device of so many chunks; empty where there are none left.
    fn next_run(&self, chunks: u64) -> Range<u64> {
        let end = |free: u64| chunks.min(free + RUN_PLACES);
        let next = |free: u64| (free < chunks).then(|| end(free));
        // Relaxed: they only have to be others each time.
        let taken = self.next_free.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        taken.map_or(0..0, |free| free..end(free))
    }

    pub fn usage(&self, size: u64) -> Usage {
        let sectors = self.layout.chunk() / SECTOR_BYTES;
        let left: u64 = self.runs.iter().map(|run| run.lock()).map(|run| run.end - run.start).sum();
        // Relaxed: a statistic. A CPU that took a run since is not in `left`.
        let allocated = self.next_free.load(Ordering::Relaxed).saturating_sub(left);
        Usage { allocated: allocated * sectors, total: size / SECTOR_BYTES, metadata: 0 }
    }
}
